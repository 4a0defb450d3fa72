"""An operator is declared in op_host, in op_graph, and to the checks of graphs: the three say the same."""

import pytest

from kimi_graph.compile import prototypes
from kimi_graph.ops.kernel_project import type_of
from kimi_graph.ops.twin import Kernel, kernels

SHORT = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int8": "I8", "int32": "I32", "int64": "I64"}


@pytest.mark.parametrize("name", kernels())
def test_the_graphs_prototype_is_the_definition(name, twin_cache):
    kernel = Kernel(name, twin_cache)
    host, graph = kernel.definition, kernel.prototype
    assert host.type == graph.type == type_of(name)
    assert host.attrs == graph.attrs
    for ours, theirs in ((host.inputs, graph.inputs), (host.outputs, graph.outputs)):
        assert [(p.name, p.kind, set(p.types)) for p in ours] == [(p.name, p.kind, set(p.types)) for p in theirs]
    assert len({len(p.types) for p in (*host.inputs, *host.outputs)}) == 1, "a dtype of each port for each combination"
    assert host.socs == ("ascend910b", "ascend910_93", "ascend950")


@pytest.mark.parametrize("name", kernels())
def test_what_checks_of_graphs_know_is_the_definition(name, twin_cache):
    host, row = Kernel(name, twin_cache).definition, prototypes.find(type_of(name))
    assert row is not None, "a kernel that no node of a graph is for"
    for ours, theirs in ((host.inputs, row.inputs), (host.outputs, row.outputs)):
        kinds = [(p.name, p.kind, {SHORT[t] for t in p.types}) for p in ours]
        assert kinds == [(p.name, p.kind, {prototypes.SHORT[d] for d in p.dtypes}) for p in theirs]
    attrs = [(a.name, a.type, a.default) for a in host.attrs]
    assert attrs == [(a.name, a.type, None if a.required else a.default) for a in row.attributes.values()]
    types = {p.name: p.types for p in (*host.inputs, *host.outputs)}
    assert all(len({types[port] for port in group}) == 1 for group in row.same)
