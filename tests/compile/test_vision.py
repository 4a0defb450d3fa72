"""The vision tower as one graph: lowered for every chip, legal there, and the same as the model in float64."""

import dataclasses
from typing import Any

import pytest
import torch

import kimi_graph as kg
from kimi_graph import layers, tree
from kimi_graph.compile import recipe
from kimi_graph.compile.capture import capture
from kimi_graph.compile.checks import check_graph
from kimi_graph.compile.convert import convert
from kimi_graph.compile.executor import Executor, infer_shapes
from kimi_graph.compile.passes import fold_weights, lower_einsum, simplify
from kimi_graph.compile.prototypes import Prototypes
from kimi_graph.compile.stamp import alias_states
from kimi_graph.compile.targets import target as target_of
from kimi_graph.init import init_tensor

EXACT = 1e-10  # float64, sums in another order
NATIVE = 2**-5  # a few roundings of bfloat16 in a row
TEXT = 40
MODELS = [kg.load_config(name) for name in ("kimi-k2.5", "kimi-k3")]


class Graph:
    """The whole tower of two layers with released heads, for pictures of up to `room` patches; and how to run it."""

    def __init__(self, host: Any, model: Any, frames: int, room: int, place: tuple[str, str]) -> None:
        self.c = c = dataclasses.replace(model.vision, embed=144, layers=2, heads=2, ffn=56, projector_ffn=576)
        specs = layers.vision_specs(c, TEXT)
        self.p = tree.map_with_path(lambda path, s: init_tensor(s, path).bfloat16(), specs)
        self.room = room
        args = {"p": self.p, **self.inputs((frames, 2, 2))}
        call = lambda p, patches, tables: {"out": layers.vision_forward(p, c, patches, tables)}  # noqa: E731
        captured = capture(call, tree.map(lambda x: torch.empty_like(x, device="meta"), args))
        folded = fold_weights(simplify(lower_einsum(captured)), lambda name: name.startswith("p."))
        captured, self.weights = folded.captured, folded.weights
        target = target_of(place[0], cann=place[1])
        prototypes = Prototypes(target.soc, host.root)
        made = convert(captured.module, name="vision", host=host, target=target, cann=target.cann)
        self.model, self.choices = made.model, {choice.kind: choice for choice in made.choices}
        nodes = [n.name for n in captured.module.graph.nodes if n.op == "placeholder"]
        self.names = dict(zip(nodes, captured.inputs, strict=True))
        alias_states(self.model, self.names, captured.outputs, prototypes)
        infer_shapes(self.model)
        weights = {node for node, name in self.names.items() if name in self.weights}
        check_graph(self.model, target, prototypes, weights=weights, states=set())

    def inputs(self, grid: tuple[int, int, int]) -> dict[str, Any]:
        patches = torch.randn(grid[0] * grid[1] * grid[2], 3 * self.c.patch**2, dtype=torch.bfloat16)
        tables = layers.vision_tables(self.c, grid, self.room)
        return {"patches": layers.arrange_patches(self.c, patches, grid, self.room), "tables": tables}

    def differ(self, grid: tuple[int, int, int], mode: str) -> float:
        """How far the graph is from the model on a picture, of the largest value."""
        wide = lambda x: x.double() if mode == "exact" and x.is_floating_point() else x  # noqa: E731
        args = tree.map(wide, {"p": self.p, **self.inputs(grid)})
        values = dict(tree.items(args))
        values |= {name: recipe.apply(steps, values[of]) for name, (of, steps) in self.weights.items()}
        executor = Executor(self.model)
        (out,) = executor.run({node: values[self.names[node]] for node in executor.inputs}, {}, mode).outputs
        real = grid[1] * grid[2] // 4
        want = layers.vision_forward(args["p"], self.c, args["patches"], args["tables"])[:real]
        return float((out[:real] - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("place", [("a3", "8.5"), ("a3", "9.1"), ("950dt", "9.2")], ids="-".join)
@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name)
def test_one_graph_serves_every_picture_that_fits(host, model, place):
    graph = Graph(host, model, 1, 32, place)
    for grid in ((1, 2, 2), (1, 4, 6), (1, 8, 4)):
        assert graph.differ(grid, "exact") < EXACT
        assert graph.differ(grid, "native") < NATIVE


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name)
def test_a_graph_for_three_frames_averages_them(host, model):
    graph = Graph(host, model, 3, 36, ("a3", "9.1"))
    for grid in ((3, 2, 2), (3, 2, 6)):
        assert graph.differ(grid, "exact") < EXACT


def test_no_weight_is_sliced_or_cast_in_the_graph_and_queries_are_a_range_of_bytes(host):
    graph = Graph(host, MODELS[1], 1, 32, ("a3", "9.1"))
    steps = {tuple(s.short() for s in steps if s.kind != "view") for _, steps in graph.weights.values()}
    assert steps == {(), ("float32",), *((f"slice0_{i}_{i + 1}",) for i in range(3))}
    assert not {"Slice", "StridedSlice", "Transpose"} & {op.type for op in graph.model.graph[0].op}


PADDED = "; 72 channels padded to 80 and stripped: 11% more"


@pytest.mark.parametrize("model, reason", [(MODELS[0], PADDED), (MODELS[1], "")], ids=["k2.5", "k3"])
def test_heads_that_are_not_aligned_are_padded_and_the_cost_is_said(host, model, reason):
    graph = Graph(host, model, 1, 32, ("a3", "9.1"))
    choice = graph.choices["attention inside a picture"]
    assert choice.operator == "FusedInferAttentionScore"
    assert choice.reason == "the picture's length is an input" + reason
    assert ("PadV3" in {op.type for op in graph.model.graph[0].op}) == bool(reason)
