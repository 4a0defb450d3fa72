#pragma once

#include "register/op_impl_registry.h"

namespace ops {

enum Option { OPTIONAL, REQUIRED, DYNAMIC };

inline const char* KindOf(Option option)
{
    return option == OPTIONAL ? "optional" : option == DYNAMIC ? "dynamic" : "required";
}

class OpParamDef {
public:
    explicit OpParamDef(twin::Parameter* made) : made(made) {}
    OpParamDef& ParamType(Option option) { return made->kind = KindOf(option), *this; }
    OpParamDef& DataType(std::vector<ge::DataType> types) { return made->types = types, *this; }
    OpParamDef& Format(std::vector<ge::Format>) { return *this; }
    OpParamDef& UnknownShapeFormat(std::vector<ge::Format>) { return *this; }
    OpParamDef& AutoContiguous() { return *this; }

private:
    twin::Parameter* made;
};

class OpAttrDef {
public:
    explicit OpAttrDef(twin::Attribute* made) : made(made) {}
    OpAttrDef& AttrType(Option) { return *this; }
    OpAttrDef& Float() { return made->type = "Float", *this; }
    OpAttrDef& Float(float value) { return made->fallback = twin::Text(value), Float(); }
    OpAttrDef& Int() { return made->type = "Int", *this; }
    OpAttrDef& Int(int64_t value) { return made->fallback = std::to_string(value), Int(); }
    OpAttrDef& Bool() { return made->type = "Bool", *this; }
    OpAttrDef& Bool(bool value) { return made->fallback = value ? "true" : "false", Bool(); }

private:
    twin::Attribute* made;
};

class OpAICoreConfig {
public:
    OpAICoreConfig& DynamicShapeSupportFlag(bool) { return *this; }
};

class OpAICoreDef {
public:
    void AddConfig(const char* soc) { twin::operator_definition.socs.push_back(soc); }
    void AddConfig(const char* soc, const OpAICoreConfig&) { AddConfig(soc); }
};

class OpDef {
public:
    explicit OpDef(const char* name)
    {
        twin::operator_definition = {};
        twin::operator_definition.type = name;
    }
    OpParamDef Input(const char* name) { return Add(twin::operator_definition.inputs, name); }
    OpParamDef Output(const char* name) { return Add(twin::operator_definition.outputs, name); }
    OpAttrDef Attr(const char* name)
    {
        twin::operator_definition.attrs.push_back({name, "", ""});
        return OpAttrDef(&twin::operator_definition.attrs.back());
    }
    OpAICoreDef AICore() { return {}; }

private:
    static OpParamDef Add(std::vector<twin::Parameter>& parameters, const char* name)
    {
        parameters.push_back({name, "required", {}});
        return OpParamDef(&parameters.back());
    }
};

}  // namespace ops

#define OP_ADD(type) static const type TWIN_JOIN(twin_defined_, __COUNTER__)(#type)
