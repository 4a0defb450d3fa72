"""GE graphs of several ranks: each collective's nodes, whole models on a mesh, and ranks that do not come together."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from kimi_graph import tree
from kimi_graph.compile import phases, recipe
from kimi_graph.compile.capture import capture
from kimi_graph.compile.checks import check_graph
from kimi_graph.compile.convert import convert
from kimi_graph.compile.driver import Graph, Request, build_graph
from kimi_graph.compile.executor import Executor, infer_shapes, run_together
from kimi_graph.compile.ge_proto import ModelDef, shape_of
from kimi_graph.compile.prototypes import Prototypes
from kimi_graph.compile.sharded import dims_of
from kimi_graph.compile.targets import target
from kimi_graph.compile.verify import causal_mask
from kimi_graph.config import ModelConfig
from kimi_graph.errors import BundleError
from kimi_graph.models import decoder
from kimi_graph.parallel import Mesh, Rules, collectives
from kimi_graph.parallel.presets import preset
from kimi_graph.parallel.simulate import difference, gather, scatter, simulate
from tests.compile.test_sharded import ROWS, batches, bucket, model, parameter
from tests.parallel.test_collectives import CALLS

MESH = Mesh.parse("dp=2,tp=3")
A3 = target("a3")
ROUNDING = 1e-11  # float64, a whole model


def groups_of(mesh: Mesh) -> Any:
    """Rank lists by the name of a group."""
    return lambda name: mesh.groups(collectives.group_axes(name))


def own_index(mesh: Mesh, name: str, rank: int) -> Tensor:
    """The input of a rank that says where it stands."""
    return torch.tensor([mesh.index(rank, name.split(".")[1:])])


# ---- one collective --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_nodes_of_a_collective_are_legal_and_mean_what_it_means(host, name, dtype):
    call, _ = CALLS[name]
    captured = capture(lambda x: {"y": call(x)}, {"x": torch.empty(6, 12, 5, dtype=dtype, device="meta")})
    made = convert(captured.module, name="call", host=host, target=A3, cann=A3.cann)
    infer_shapes(made.model)
    check_graph(made.model, A3, Prototypes(A3.soc, host.root), weights=set(), states=set())
    x = [torch.randn(6, 12, 5, dtype=torch.float64) for _ in range(6)]
    executor = Executor(made.model)

    def inputs(rank: int) -> dict[str, Tensor]:
        return {n: x[rank] if n == "arg0_1" else own_index(MESH, n, rank) for n in executor.inputs}

    ran = run_together([executor.steps(inputs(rank), {}, "exact") for rank in range(6)], groups_of(MESH))
    (want,) = simulate(captured.module, MESH, [x])
    for got, expected in zip(ran, want, strict=True):
        torch.testing.assert_close(got.outputs[0], expected, rtol=0, atol=1e-14)


# ---- whole models ----------------------------------------------------------------------------------------------------


@functools.cache
def graph_on(name: str, mesh: str, phase: str, host: Any) -> tuple[Graph, Rules, phases.Bucket]:
    c, m = model(name), Mesh.parse(mesh)
    rules, b = preset(c, m, phase), bucket(c, phase, m.data)
    return build_graph(Request(config=c, target=A3), b, host, rules=rules), rules, b


def local_inputs(
    c: ModelConfig, graph: Graph, rules: Rules, b: phases.Bucket, given: dict[str, Tensor], params: Any
) -> list[dict[str, Tensor]]:
    """The inputs of every rank: weights cut and made by their recipes, the rest cut."""
    mesh = rules.mesh
    named, specs = dict(tree.items(params)), dict(tree.items(decoder.model_specs(c)))
    axes = dict(tree.items(phases.step_axes(c, b))) | {"tokens": phases.value_axes("tokens")}
    ranks: list[dict[str, Tensor]] = [{} for _ in range(mesh.world)]
    for op in graph.model.graph[0].op:
        if op.type != "Data":
            continue
        if op.name.startswith("own_index."):
            parts = [own_index(mesh, op.name, rank) for rank in range(mesh.world)]
        elif op.name == "causal_mask":
            parts = [causal_mask(2048)] * mesh.world
        elif op.name in graph.weights:
            path, steps = graph.weights[op.name]
            cut = scatter(mesh, named[path], dims_of(rules, " ".join(specs[path].axes)))
            parts = [recipe.apply(steps, x).reshape(shape_of(op.output_desc[0])) for x in cut]
        else:
            text = axes.get(op.name) or phases.value_axes(op.name)
            parts = scatter(mesh, given[op.name], dims_of(rules, text))
        for rank, part in enumerate(parts):
            ranks[rank][op.name] = part
    return ranks


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("mesh", ["tp=2", "dp=2,tp=2", "dp=2,tp=2,ep=2"])
@pytest.mark.parametrize("name", ["kimi-linear-48b", "kimi-k3.1-pro", "glm-5.2"])
def test_a_model_on_a_mesh_computes_what_it_does_without(host, name, mesh, phase):
    graph, rules, b = graph_on(name, mesh, phase, host)
    c, m = model(name), rules.mesh
    params = tree.map_with_path(parameter, decoder.model_specs(c))
    specs = decoder.state_specs(c, slots=b.slots, pages=b.pages, page=b.page, dtype=c.dtype)
    states = tree.map(lambda s: torch.randn(s.shape, dtype=torch.float64), specs)
    through, within = batches(c, b, m.data)
    given = {"tokens": torch.randint(c.vocab, (ROWS, b.tokens))} | dict(tree.items({"batch": within}))
    vision = None
    if b.images:
        vision = torch.randint(b.images + 1, (ROWS, b.tokens)), torch.randn(b.images, c.embed, dtype=torch.float64)
        given |= {"vision.rows": vision[0], "vision.values": vision[1]}

    executor = Executor(graph.model)
    inputs = local_inputs(c, graph, rules, b, given, params)
    named = dict(zip(state_names(c, specs), zip(tree.leaves(specs), tree.leaves(states), strict=True), strict=True))
    shapes = {op.name: shape_of(op.output_desc[0]) for op in graph.model.graph[0].op if op.type == "RefData"}
    cut = {n: scatter(m, x, dims_of(rules, " ".join(s.axes))) for n, (s, x) in named.items() if n in shapes}
    ran = run_together(
        [
            executor.steps(inputs[r], {n: parts[r].reshape(shapes[n]) for n, parts in cut.items()}, "exact")
            for r in range(m.world)
        ],
        groups_of(m),
    )

    logits, after = decoder.forward(
        params, c, given["tokens"], states, through, step=b.step, last_only=not b.step, vision=vision
    )
    got = gather(m, [r.outputs[0] for r in ran], dims_of(rules, phases.value_axes("logits")))
    assert difference(got, logits.flatten(0, 1)) <= ROUNDING
    wanted = dict(zip(named, tree.leaves(after), strict=True))
    assert set(executor.states) == set(cut)
    for n in executor.states:
        spec, _ = named[n]
        parts = [r.states[n].reshape(cut[n][0].shape) for r in ran]
        assert difference(gather(m, parts, dims_of(rules, " ".join(spec.axes))), wanted[n]) <= ROUNDING, n


def state_names(c: ModelConfig, specs: Any) -> list[str]:
    """`s.layers.3.kda.memory` of each leaf."""
    return [f"s.layers.{i}.{c.layers[i].kinds[0]}.{leaf}" for i, s in enumerate(specs) for leaf, _ in tree.items(s)]


# ---- ranks that do not come together ---------------------------------------------------------------------------------


def ranks_of(host: Any, *functions: Any) -> list[Any]:
    """Runs of ranks that each have a graph of their own."""
    runs = []
    for f in functions:
        captured = capture(lambda x, f=f: {"y": f(x)}, {"x": torch.empty(6, 4, device="meta")})
        made: ModelDef = convert(captured.module, name="call", host=host, target=A3, cann=A3.cann).model
        infer_shapes(made)
        runs.append(Executor(made).steps({"arg0_1": torch.ones(6, 4)}, {}, "exact"))
    return runs


PAIR = Mesh.parse("tp=2")


def summed(x: Any) -> Any:
    return collectives.all_reduce(x, ("tensor",))


@pytest.mark.parametrize(
    "other, message",
    [
        (
            lambda x: collectives.all_gather(PAIR, x, ("tensor",), 0),
            r"rank 0 is at \S+ \(HcomAllReduce tensor \[6, 4\]",
        ),
        (lambda x: summed(x[:3]), r"rank 1 of its group at \S+ \(HcomAllReduce tensor \[3, 4\] float64\)"),
        (lambda x: collectives.all_reduce(x, ("tensor",), "max"), r"rank 0 is at .* rank 1 of its group at"),
        (lambda x: x.exp(), r"rank 0 waits at .* for ever: rank 1 of its group has finished"),
        (lambda x: summed(summed(x)), r"rank 1 waits at .* for ever: rank 0 of its group has finished"),
    ],
)
def test_ranks_that_do_not_come_together_are_named(host, other, message):
    with pytest.raises(BundleError, match=message):
        run_together(ranks_of(host, summed, other), groups_of(PAIR))


def test_groups_in_another_order_on_two_ranks_wait_for_ever(host):
    mesh = Mesh.parse("dp=2,tp=2")

    def one(x: Any) -> Any:
        return collectives.all_reduce(summed(x), ("data",))

    def turned(x: Any) -> Any:
        return summed(collectives.all_reduce(x, ("data",)))

    with pytest.raises(BundleError, match=r"rank 0 waits at .* for ever: rank 1 of its group is at .*AllReduce data"):
        run_together(ranks_of(host, one, turned, turned, one), groups_of(mesh))


def test_one_rank_alone_cannot_run_a_collective(host):
    captured = capture(lambda x: {"y": summed(x)}, {"x": torch.empty(6, 4, device="meta")})
    made = convert(captured.module, name="call", host=host, target=A3, cann=A3.cann).model
    infer_shapes(made)
    with pytest.raises(BundleError, match=r"HcomAllReduce tensor .*: one rank alone cannot run a collective"):
        Executor(made).run({"arg0_1": torch.ones(6, 4)}, {}, "exact")
