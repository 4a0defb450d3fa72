// REG_OP: its macros turn a prototype into calls. Included last: they take common words.
#pragma once

#include "twin_host.h"

namespace ge {

struct TensorType {
    TensorType(std::initializer_list<DataType> types) : types(types) {}
    std::vector<DataType> types;
};

}  // namespace ge

namespace twin {

struct Prototype {
    explicit Prototype(const char* type) { graph_prototype.type = type; }
    Prototype& In(const char* name, const char* kind, const ge::TensorType& t)
    {
        graph_prototype.inputs.push_back({name, kind, t.types});
        return *this;
    }
    Prototype& Out(const char* name, const ge::TensorType& t)
    {
        graph_prototype.outputs.push_back({name, "required", t.types});
        return *this;
    }
    Prototype& Has(const char* name, const char* type, const std::string& fallback)
    {
        graph_prototype.attrs.push_back({name, type, fallback});
        return *this;
    }
    Prototype& Done() { return *this; }
    static std::string Of(float value) { return Text(value); }
    static std::string Of(bool value) { return value ? "true" : "false"; }
    static std::string Of(int value) { return std::to_string(value); }
};

}  // namespace twin

#define REG_OP(type) [[maybe_unused]] static const twin::Prototype twin_prototype_##type = twin::Prototype(#type)
#define INPUT(name, types) In(#name, "required", types)
#define OPTIONAL_INPUT(name, types) In(#name, "optional", types)
#define DYNAMIC_INPUT(name, types) In(#name, "dynamic", types)
#define OUTPUT(name, types) Out(#name, types)
#define REQUIRED_ATTR(name, type) Has(#name, #type, "")
#define ATTR(name, type, value) Has(#name, #type, twin::Prototype::Of(value))
#define OP_END_FACTORY_REG(type) Done();
