"""Small GE graphs, built node by node."""

from typing import Any

import pytest
import torch

from kimi_graph.compile.executor import Executor
from kimi_graph.compile.ge_proto import ModelDef, OpDef, describe, set_attr, tensor_def

Edge = str


class Builder:
    """Adds nodes to a model; an edge is `"name:0"`."""

    def __init__(self) -> None:
        self.model = ModelDef()
        self.graph = self.model.graph.add()
        self.values: dict[str, torch.Tensor] = {}
        self._sources = 0

    def source(self, name: str, value: torch.Tensor, type_: str = "Data") -> Edge:
        op = self._add(name, type_)
        set_attr(op, "index", self._sources)
        self._sources += 1
        describe(op.output_desc.add(name="y"), value.shape, value.dtype)
        self.values[name] = value
        return f"{name}:0"

    def state(self, name: str, value: torch.Tensor) -> Edge:
        return self.source(name, value, "RefData")

    def const(self, value: Any, dtype: torch.dtype | None = None) -> Edge:
        tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=dtype)
        op = self._add(f"Const_{len(self.graph.op)}", "Const")
        op.attr["value"].t.CopyFrom(tensor_def(tensor))
        describe(op.output_desc.add(), tensor.shape, tensor.dtype)
        return f"{op.name}:0"

    def node(
        self,
        type_: str,
        inputs: dict[str, Any],
        *,
        outputs: str = "y",
        attrs: dict[str, Any] | None = None,
        after: tuple[str, ...] = (),
        name: str = "",
    ) -> list[Edge]:
        op = self._add(name or f"{type_}_{len(self.graph.op)}", type_)
        for key, given in inputs.items():
            edges = {f"{key}{i}": e for i, e in enumerate(given)} if isinstance(given, list) else {key: given}
            for input_name, edge in edges.items():
                op.input.append(edge or "")
                op.input_desc.add(name=input_name)
        op.input.extend(f"{a}:-1" for a in after)
        for key, value in (attrs or {}).items():
            set_attr(op, key, value)
        names = outputs.split()
        for output in names:
            op.output_desc.add(name=output)
        return [f"{op.name}:{i}" for i in range(len(names))]

    def result(self, *edges: Edge, after: tuple[str, ...] = ()) -> ModelDef:
        op = self._add("NetOutput", "NetOutput")
        for i, edge in enumerate(edges):
            op.input.append(edge)
            op.input_desc.add(name=f"input{i}")
        op.input.extend(f"{a}:-1" for a in after)
        return self.model

    def run(self, mode: str = "exact", **options: Any) -> Any:
        """Outputs and states of the finished model on the values its sources were given."""
        executor = Executor(self.model)
        inputs = {name: self.values[name] for name in executor.inputs}
        states = {name: self.values[name] for name in executor.states}
        return executor.run(inputs, states, mode, **options)

    def _add(self, name: str, type_: str) -> OpDef:
        return self.graph.op.add(name=name, type=type_)


@pytest.fixture
def build() -> Builder:
    return Builder()


@pytest.fixture
def new_builder() -> type[Builder]:
    return Builder
