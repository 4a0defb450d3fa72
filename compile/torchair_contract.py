"""What is used of torchair without being promised by it, and a check that an imported torchair has it.

torchair's documented interface needs a device; lowering without one uses these parts of its inside. A new torch-npu is
fit for use when this list holds and the pieces of a model convert to the same nodes: `test_torchair_contract.py`.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch

from .torchair_host import Host

# By attribute of Host (a module of torchair): the names used, and the parameters they are called with.
NAMES: dict[str, dict[str, str]] = {
    "graph": {
        "GeGraph": "name",
        "Tensor": "node index",
        "default_ge_graph": "graph",
        "get_default_ge_graph": "",
    },
    "ge": {
        "Data": "index dtype shape placement node_name",
        "Const": "v dtype",
        "NetOutput": "inputs",
        "BroadcastTo": "x shape",
        "Cast": "x dst_type",
        "MatMul": "x1 x2 bias transpose_x1 transpose_x2",
        "Mul": "x1 x2",
        "Muls": "x value",
        "ReduceMax": "x axes keep_dims",
        "Reshape": "x shape",
        "SoftplusV2": "x beta threshold",
        "Transpose": "x perm",
    },
    "ir": {"ge_op": "op_type inputs outputs"},
    "converters": {"set_ge_outputs": "ge_outputs meta_outputs", "_CONVERTERS": ""},
}
GRAPH_ATTRIBUTES = ("op", "num_inputs", "add_python_code", "SerializeToString")
TENSOR_ATTRIBUTES = ("meta", "node", "desc", "tensor", "set_meta")


def broken(host: Host) -> list[str]:
    """What of the contract an imported torchair does not keep, in words; empty if all of it holds."""
    found = [
        problem
        for module, names in NAMES.items()
        for name, parameters in names.items()
        for problem in _broken_name(getattr(host, module), name, parameters.split())
    ]
    return found or [*_broken_values(host), *_broken_converters()]


def _broken_name(module: Any, name: str, parameters: list[str]) -> list[str]:
    value = getattr(module, name, None)
    if value is None:
        return [f"{module.__name__}.{name} is missing"]
    if not parameters:
        return []
    known = inspect.signature(value).parameters
    return [f"{module.__name__}.{name} takes no {p!r}, only {', '.join(known)}" for p in parameters if p not in known]


def _broken_values(host: Host) -> list[str]:
    graph = host.graph.GeGraph(name="contract")
    with host.graph.default_ge_graph(graph), host.shield():
        value = host.ge.Data(index=0, dtype=0, shape=[2], placement="NPU", node_name="x")
        value.set_meta(torch.empty(2, device="meta"))
    return [
        *(f"GeGraph.{name} is missing" for name in GRAPH_ATTRIBUTES if not hasattr(graph, name)),
        *(f"Tensor.{name} is missing" for name in TENSOR_ATTRIBUTES if not hasattr(value, name)),
        *([] if graph.num_inputs == 1 else [f"GeGraph.num_inputs is {graph.num_inputs} after one input"]),
    ]


def _broken_converters() -> list[str]:
    converter: Callable[..., Any] | None = getattr(torch.ops.aten.sigmoid.default, "_ge_converter", None)
    if converter is None:
        return ["converters are not kept as `_ge_converter` of the overload"]
    return [] if hasattr(converter, "require_meta") else ["converters do not say whether they `require_meta`"]
