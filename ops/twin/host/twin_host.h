// The subset of CANN's host interface that op_host and op_graph use, so that their own sources run on a CPU: operator
// definitions, shape and dtype inference, tiling. Names and argument orders are those of the public headers.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <initializer_list>
#include <string>
#include <vector>

namespace ge {

enum DataType { DT_FLOAT = 0, DT_FLOAT16 = 1, DT_INT8 = 2, DT_INT32 = 3, DT_INT64 = 9, DT_BOOL = 12, DT_BF16 = 27 };
enum Format { FORMAT_ND = 2 };
using graphStatus = uint32_t;
constexpr graphStatus GRAPH_SUCCESS = 0, GRAPH_FAILED = 0xFFFFFFFF;

}  // namespace ge

namespace twin {

inline const char* NameOf(ge::DataType type)
{
    switch (type) {
        case ge::DT_FLOAT: return "float32";
        case ge::DT_FLOAT16: return "float16";
        case ge::DT_BF16: return "bfloat16";
        case ge::DT_INT8: return "int8";
        case ge::DT_INT32: return "int32";
        case ge::DT_INT64: return "int64";
        case ge::DT_BOOL: return "bool";
    }
    return "?";
}

struct Parameter {
    std::string name, kind;  // required, optional, dynamic
    std::vector<ge::DataType> types;
};
struct Attribute {
    std::string name, type, fallback;  // Float, Int, Bool; no fallback: required
};
struct Definition {
    std::string type;
    std::vector<Parameter> inputs, outputs;
    std::vector<Attribute> attrs;
    std::vector<std::string> socs;
};

static Definition operator_definition, graph_prototype;  // static: each library has its own

inline std::string Json(const std::string& text) { return '"' + text + '"'; }

template <typename X, typename F>
std::string Json(const std::vector<X>& values, F f)
{
    std::string made = "[";
    for (const X& value : values) made += (made.size() > 1 ? ", " : "") + f(value);
    return made + "]";
}

inline std::string Json(const Parameter& p)
{
    return "{\"name\": " + Json(p.name) + ", \"kind\": " + Json(p.kind) + ", \"types\": " +
           Json(p.types, [](ge::DataType t) { return Json(NameOf(t)); }) + "}";
}

inline std::string Json(const Attribute& a)
{
    return "{\"name\": " + Json(a.name) + ", \"type\": " + Json(a.type) + ", \"default\": " +
           (a.fallback.empty() ? "null" : a.fallback) + "}";
}

inline std::string Json(const Definition& d)
{
    const auto parameter = [](const Parameter& p) { return Json(p); };
    return "{\"type\": " + Json(d.type) + ", \"inputs\": " + Json(d.inputs, parameter) + ", \"outputs\": " +
           Json(d.outputs, parameter) + ", \"attrs\": " + Json(d.attrs, [](const Attribute& a) { return Json(a); }) +
           ", \"socs\": " + Json(d.socs, [](const std::string& s) { return Json(s); }) + "}";
}

inline std::string Text(double value)
{
    char text[32];
    std::snprintf(text, sizeof text, "%.9g", value);
    return text;
}

}  // namespace twin

namespace gert {

class Shape {
public:
    size_t GetDimNum() const { return count; }
    int64_t GetDim(size_t i) const { return i < count ? dims[i] : -1; }
    void SetDimNum(size_t n) { count = n; }
    void SetDim(size_t i, int64_t value) { dims[i] = value; }
    int64_t GetShapeSize() const
    {
        int64_t size = 1;
        for (size_t i = 0; i < count; i++) size *= dims[i];
        return size;
    }
    size_t count = 0;
    int64_t dims[8] = {};
};

class StorageShape {
public:
    const Shape& GetOriginShape() const { return shape; }
    const Shape& GetStorageShape() const { return shape; }
    Shape shape;
};

class CompileTimeTensorDesc {
public:
    ge::DataType GetDataType() const { return type; }
    ge::DataType type = ge::DT_FLOAT;
};

class AnchorInstanceInfo {
public:
    size_t GetInstanceNum() const { return count; }
    size_t count = 0;
};

class RuntimeAttrs {
public:
    const float* GetFloat(size_t i) const { return &floats[i]; }
    const int64_t* GetInt(size_t i) const { return &ints[i]; }
    const bool* GetBool(size_t i) const { return &bools[i]; }
    float floats[16] = {};
    int64_t ints[16] = {};
    bool bools[16] = {};
};

// What the driver tells of a node: instances of every input of the prototype, attributes, the device.
struct Node {
    std::vector<std::vector<StorageShape>> shapes;
    std::vector<std::vector<CompileTimeTensorDesc>> descs;
    std::vector<AnchorInstanceInfo> infos;
    RuntimeAttrs attrs;
    std::vector<Shape> made_shapes;
    std::vector<ge::DataType> made_types;
};

class NodeContext {
public:
    explicit NodeContext(Node& node) : node(node) {}
    const RuntimeAttrs* GetAttrs() const { return &node.attrs; }
    const CompileTimeTensorDesc* GetRequiredInputDesc(size_t i) const { return GetDynamicInputDesc(i, 0); }
    const CompileTimeTensorDesc* GetOptionalInputDesc(size_t i) const { return GetDynamicInputDesc(i, 0); }
    const CompileTimeTensorDesc* GetDynamicInputDesc(size_t i, size_t n) const
    {
        return i < node.descs.size() && n < node.descs[i].size() ? &node.descs[i][n] : nullptr;
    }
    const AnchorInstanceInfo* GetIrInputInstanceInfo(size_t i) const
    {
        return i < node.infos.size() ? &node.infos[i] : nullptr;
    }

protected:
    const StorageShape* Stored(size_t i, size_t n) const
    {
        return i < node.shapes.size() && n < node.shapes[i].size() ? &node.shapes[i][n] : nullptr;
    }
    Node& node;
};

class InferShapeContext : public NodeContext {
public:
    using NodeContext::NodeContext;
    const Shape* GetRequiredInputShape(size_t i) const { return GetDynamicInputShape(i, 0); }
    const Shape* GetOptionalInputShape(size_t i) const { return GetDynamicInputShape(i, 0); }
    const Shape* GetDynamicInputShape(size_t i, size_t n) const
    {
        const StorageShape* stored = Stored(i, n);
        return stored ? &stored->shape : nullptr;
    }
    Shape* GetOutputShape(size_t i) const { return i < node.made_shapes.size() ? &node.made_shapes[i] : nullptr; }
};

class InferDataTypeContext : public NodeContext {
public:
    using NodeContext::NodeContext;
    ge::DataType GetRequiredInputDataType(size_t i) const { return GetRequiredInputDesc(i)->type; }
    ge::DataType GetDynamicInputDataType(size_t i, size_t n) const { return GetDynamicInputDesc(i, n)->type; }
    ge::graphStatus SetOutputDataType(size_t i, ge::DataType type)
    {
        node.made_types[i] = type;
        return ge::GRAPH_SUCCESS;
    }
};

}  // namespace gert

namespace fe {

struct PlatFormInfos {
    uint32_t cores;
    uint64_t ub;
};

}  // namespace fe

namespace gert {

class TilingParseContext {};

class TilingContext : public NodeContext {
public:
    using NodeContext::NodeContext;
    const StorageShape* GetRequiredInputShape(size_t i) const { return Stored(i, 0); }
    const StorageShape* GetOptionalInputShape(size_t i) const { return Stored(i, 0); }
    const StorageShape* GetDynamicInputShape(size_t i, size_t n) const { return Stored(i, n); }
    fe::PlatFormInfos* GetPlatformInfo() { return &platform; }
    template <typename T>
    T* GetTilingData()
    {
        tiling.assign(sizeof(T), 0);
        return reinterpret_cast<T*>(tiling.data());
    }
    size_t* GetWorkspaceSizes(size_t)  { return &workspace; }
    ge::graphStatus SetBlockDim(uint32_t n) { return block_dim = n, ge::GRAPH_SUCCESS; }
    ge::graphStatus SetScheduleMode(uint32_t mode) { return mode > 1 ? ge::GRAPH_FAILED : ge::GRAPH_SUCCESS; }
    ge::graphStatus SetTilingKey(uint64_t key) { return tiling_key = key, ge::GRAPH_SUCCESS; }

    fe::PlatFormInfos platform{};
    std::vector<uint8_t> tiling;
    size_t workspace = 0;
    uint32_t block_dim = 0;
    uint64_t tiling_key = 0;
};

}  // namespace gert

namespace twin {

struct Implementation {
    ge::graphStatus (*shape)(gert::InferShapeContext*) = nullptr;
    ge::graphStatus (*type)(gert::InferDataTypeContext*) = nullptr;
    ge::graphStatus (*tiling)(gert::TilingContext*) = nullptr;

    Implementation& InferShape(ge::graphStatus (*f)(gert::InferShapeContext*)) { return shape = f, *this; }
    Implementation& InferDataType(ge::graphStatus (*f)(gert::InferDataTypeContext*)) { return type = f, *this; }
    template <typename T>
    Implementation& TilingParse(ge::graphStatus (*)(gert::TilingParseContext*))
    {
        return *this;
    }
    Implementation& Tiling(ge::graphStatus (*f)(gert::TilingContext*)) { return tiling = f, *this; }
};

static Implementation implementation;

}  // namespace twin
