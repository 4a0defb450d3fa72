// How an operator's host library is called. Included after its op_host sources.
#pragma once

#include <algorithm>

#include "twin_host.h"

namespace twin {

struct Given {
    int32_t input, type, rank;  // which input of the prototype; instances of one follow each other
    int64_t dims[8];
};
struct Made {
    int32_t type, rank;
    int64_t dims[8];
};

inline gert::Node NodeOf(const Given* given, uint32_t count, const double* attrs, uint32_t attr_count)
{
    gert::Node node;
    const size_t inputs = operator_definition.inputs.size(), outputs = operator_definition.outputs.size();
    node.shapes.resize(inputs);
    node.descs.resize(inputs);
    node.infos.resize(inputs);
    for (uint32_t i = 0; i < count; i++) {
        gert::StorageShape shape;
        shape.shape.count = size_t(given[i].rank);
        std::copy_n(given[i].dims, given[i].rank, shape.shape.dims);
        node.shapes[given[i].input].push_back(shape);
        node.descs[given[i].input].push_back({});
        node.descs[given[i].input].back().type = ge::DataType(given[i].type);
        node.infos[given[i].input].count++;
    }
    for (uint32_t i = 0; i < attr_count; i++) {
        node.attrs.floats[i] = float(attrs[i]);
        node.attrs.ints[i] = int64_t(attrs[i]);
        node.attrs.bools[i] = attrs[i] != 0;
    }
    node.made_shapes.resize(outputs);
    node.made_types.resize(outputs);
    return node;
}

}  // namespace twin

extern "C" const char* twin_definition()
{
    static std::string made;
    made = "{\"definition\": " + twin::Json(twin::operator_definition) + ", \"prototype\": " +
           twin::Json(twin::graph_prototype) + "}";
    return made.c_str();
}

// 0, or 1: refused.
extern "C" int twin_infer(const twin::Given* given, uint32_t count, const double* attrs, uint32_t attr_count,
                          twin::Made* made)
{
    gert::Node node = twin::NodeOf(given, count, attrs, attr_count);
    gert::InferShapeContext shapes(node);
    gert::InferDataTypeContext types(node);
    if (twin::implementation.shape(&shapes) != ge::GRAPH_SUCCESS) return 1;
    if (twin::implementation.type(&types) != ge::GRAPH_SUCCESS) return 1;
    for (size_t i = 0; i < node.made_shapes.size(); i++) {
        made[i] = {int32_t(node.made_types[i]), int32_t(node.made_shapes[i].count), {}};
        std::copy_n(node.made_shapes[i].dims, node.made_shapes[i].count, made[i].dims);
    }
    return 0;
}

struct twin_tiling {
    uint32_t cores, bytes;
    uint64_t workspace, key;
    uint8_t data[4096];
};

// 0, or 1: refused, or 2: more tiling data than there is room for.
extern "C" int twin_tile(const twin::Given* given, uint32_t count, const double* attrs, uint32_t attr_count,
                         uint32_t cores, uint64_t ub, twin_tiling* made)
{
    gert::Node node = twin::NodeOf(given, count, attrs, attr_count);
    gert::TilingContext context(node);
    context.platform = {cores, ub};
    if (twin::implementation.tiling(&context) != ge::GRAPH_SUCCESS) return 1;
    if (context.tiling.size() > sizeof made->data) return 2;
    made->cores = context.block_dim;
    made->bytes = uint32_t(context.tiling.size());
    made->workspace = context.workspace;
    made->key = context.tiling_key;
    std::memcpy(made->data, context.tiling.data(), context.tiling.size());
    return 0;
}
