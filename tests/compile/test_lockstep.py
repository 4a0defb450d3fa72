"""GE graphs of several ranks: each collective's nodes, whole models on a mesh, and ranks that do not come together."""

import dataclasses
import re
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
from kimi_graph.compile.order import COLLECTIVE, overlaps
from kimi_graph.compile.pipeline import build_stages
from kimi_graph.compile.places import bind_rank, placed_groups
from kimi_graph.compile.prototypes import Prototypes
from kimi_graph.compile.sharded import dims_of
from kimi_graph.compile.targets import target
from kimi_graph.compile.verify import causal_mask
from kimi_graph.config import LayerConfig, ModelConfig, MoeConfig, in_chunks, with_copies
from kimi_graph.errors import BundleError
from kimi_graph.models import decoder
from kimi_graph.models.pipeline import model_stages
from kimi_graph.parallel import Mesh, Rules, balance, collectives, place, shard
from kimi_graph.parallel.balance import Table
from kimi_graph.parallel.presets import preset
from kimi_graph.parallel.simulate import difference, gather, scatter, simulate
from tests.compile.test_sharded import (
    ROWS,
    batches,
    bucket,
    in_threes,
    model,
    padded,
    parameter,
    without_null_pages,
)
from tests.parallel.test_collectives import CALLS

MESH = Mesh.parse("dp=2,tp=3")
A3 = target("a3")
ROUNDING = 1e-11  # float64, a whole model


def some(*values, on_request=()):
    """Parameters of which the last are tried by `pytest -m heavy` alone."""
    return [*values, *(pytest.param(value, marks=pytest.mark.heavy) for value in on_request)]


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


class Run:
    """A step of a model in a bucket on the mesh of a stage: numbers for everything, cut to ranks where it is asked."""

    def __init__(
        self,
        c: ModelConfig,
        mesh: Mesh,
        phase: str,
        rules: Rules | None = None,
        copies: int = 0,
        *,
        split_cache: bool = False,
    ) -> None:
        """`copies`: of experts, in tables by skewed loads that differ by layer."""
        self.rules = preset(c, mesh, phase, split_cache=split_cache) if rules is None else rules
        ways = self.rules.ways("cached")
        self.c, self.mesh, self.b = c, mesh, bucket(c, phase, mesh.data, ways)
        self.params = tree.map_with_path(parameter, decoder.model_specs(c))
        self.specs = decoder.state_specs(c, slots=self.b.slots, pages=self.b.pages, page=self.b.page, dtype=c.dtype)
        self.states = tree.map(lambda s: torch.randn(s.shape, dtype=torch.float64), self.specs)
        self.through, within = batches(c, self.b, mesh.data, ways)
        self.given = {"tokens": torch.randint(c.vocab, (ROWS, self.b.tokens))} | dict(tree.items({"batch": within}))
        self.made = with_copies(c, copies)  # what graphs are made of
        self.tables: dict[int, Table] = {}
        if copies:
            self.rebalance()
        self.vision = None
        if self.b.images:
            rows, values = torch.randint(self.b.images + 1, (ROWS, self.b.tokens)), torch.randn(self.b.images, c.embed)
            self.vision = rows, values.double()
            self.given |= {"vision.rows": rows, "vision.values": values.double()}
        self.named_states = dict(
            zip(self.state_names, zip(tree.leaves(self.specs), tree.leaves(self.states), strict=True), strict=True)
        )

    def rebalance(self) -> None:
        """New tables for other loads; weights are taken as the tables say."""
        for i, layer in enumerate(self.made.layers):
            if isinstance(layer.ffn, MoeConfig):
                loads = torch.rand(layer.ffn.experts).pow(4).tolist()
                ranks, before = self.rules.ways("experts"), self.tables.get(i)
                self.tables[i] = balance(loads, layer.ffn.slots, ranks, before).table
                self.given[decoder.table_name(i)] = torch.tensor(self.tables[i].packed, dtype=torch.int32)

    @property
    def state_names(self) -> list[str]:
        """`s.layers.3.kda.memory` of each leaf."""
        return [
            f"s.layers.{i}.{self.c.layers[i].kinds[0]}.{leaf}"
            for i, s in enumerate(self.specs)
            for leaf, _ in tree.items(s)
        ]

    def want(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Logits and states after the step, without a mesh."""
        logits, after = decoder.forward(
            self.params, self.c, self.given["tokens"], self.states, self.through,
            step=self.b.step, last_only=not self.b.step, vision=self.vision,
        )  # fmt: skip
        return logits.flatten(0, 1), dict(zip(self.state_names, tree.leaves(after), strict=True))

    def dims(self, axes: Any) -> Any:
        return dims_of(self.rules, axes if isinstance(axes, str) else " ".join(axes.axes))

    def inputs(self, graph: Graph, crossed: dict[str, list[Tensor]]) -> list[dict[str, Tensor]]:
        """Inputs of every rank: weights cut and made by their recipes, what came from another stage, the rest cut."""
        params, specs = dict(tree.items(self.params)), dict(tree.items(decoder.model_specs(self.made)))
        for i, table in self.tables.items():
            for name in ("gate_up", "down"):
                params[f"layers.{i}.moe.{name}"] = params[f"layers.{i}.moe.{name}"][list(table.slots)]
        axes = dict(tree.items(phases.step_axes(self.c, self.b)))
        ranks: list[dict[str, Tensor]] = [{} for _ in range(self.mesh.world)]
        for op in graph.model.graph[0].op:
            if op.type != "Data":
                continue
            if op.name in crossed:
                parts = crossed[op.name]
            elif op.name.startswith("own_index."):
                parts = [own_index(self.mesh, op.name, rank) for rank in range(self.mesh.world)]
            elif op.name == "causal_mask":
                parts = [causal_mask(2048)] * self.mesh.world
            elif op.name in graph.weights:
                path, steps = graph.weights[op.name]
                placed = place(path, specs[path], self.rules, self.c.dtype)
                cut = [shard(params[path], placed, rank) for rank in range(self.mesh.world)]
                parts = [recipe.apply(steps, x).reshape(shape_of(op.output_desc[0])) for x in cut]
            else:
                text = axes.get(op.name) or phases.value_axes(op.name)
                parts = scatter(self.mesh, self.given[op.name], self.dims(text))
            for rank, part in enumerate(parts):
                ranks[rank][op.name] = part
        return ranks

    def step(self, graph: Graph, crossed: dict[str, list[Tensor]]) -> list[Any]:
        """What every rank of a stage gives."""
        inputs = self.inputs(graph, crossed)
        executors = [Executor(graph.model)] * self.mesh.world
        if placed_groups(graph.model):
            place = lambda name, rank: self.mesh.index(rank, collectives.group_axes(name))  # noqa: E731
            bound = [bind_rank(graph.model, lambda n, r=r: place(n, r)) for r in range(self.mesh.world)]
            executors = [Executor(model) for model in bound]
        shapes = {op.name: shape_of(op.output_desc[0]) for op in graph.model.graph[0].op if op.type == "RefData"}
        cut = {n: scatter(self.mesh, self.named_states[n][1], self.dims(self.named_states[n][0])) for n in shapes}
        states = [{n: parts[r].reshape(shapes[n]) for n, parts in cut.items()} for r in range(self.mesh.world)]
        all_ranks = zip(executors, inputs, states, strict=True)
        runs = [executor.steps(given, state, "exact") for executor, given, state in all_ranks]
        return run_together(runs, groups_of(self.mesh))

    def check_states(self, ran: list[Any], want: dict[str, Tensor]) -> set[str]:
        """Compare the states that a graph has; their names."""
        for name in ran[0].states:
            spec, before = self.named_states[name]
            local = scatter(self.mesh, before, self.dims(spec))[0].shape
            got = gather(self.mesh, [r.states[name].reshape(local) for r in ran], self.dims(spec))
            owned = (without_null_pages(self.rules, name, x) for x in (got, want[name]))
            assert difference(*owned) <= ROUNDING, name
        return set(ran[0].states)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize(
    "mesh",
    some(
        "tp=2",
        "dp=2,tp=2,ep=2",
        on_request=(
            "tp=4",
            "dp=2,tp=2",
        ),
    ),
)
@pytest.mark.parametrize("name", some("kimi-linear-48b", "kimi-k3.1-pro", on_request=("glm-5.2",)))
def test_a_model_on_a_mesh_computes_what_it_does_without(host, name, mesh, phase):
    run = Run(model(name), Mesh.parse(mesh), phase)
    graph = build_graph(Request(config=run.c, target=A3), run.b, host, rules=run.rules)
    logits, states = run.want()
    ran = run.step(graph, {})
    got = gather(run.mesh, [r.outputs[0] for r in ran], run.dims(phases.value_axes("logits")))
    assert difference(got, logits) <= ROUNDING
    assert run.check_states(ran, states) == set(run.named_states)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("name", ["kimi-linear-48b", "kimi-k3.1-pro"])
def test_a_model_with_a_padded_vocabulary_and_padded_experts_computes_what_it_does_without(host, name, phase):
    c, mesh = in_threes(name, vocab=512, experts=16), Mesh.parse("tp=3")
    run = Run(c, mesh, phase, padded(c, preset(c, mesh, phase)))
    graph = build_graph(Request(config=c, target=A3), run.b, host, rules=run.rules)
    logits, states = run.want()
    ran = run.step(graph, {})
    got = gather(mesh, [r.outputs[0] for r in ran], run.dims(phases.value_axes("logits")))
    assert got.shape == (ROWS, 513) and got[:, 512:].isneginf().all()
    assert difference(got[:, :512], logits) <= ROUNDING
    assert run.check_states(ran, states) == set(run.named_states)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize(
    "mesh",
    some(
        "dp=2,tp=2,ep=2",
        on_request=(
            "tp=4",
            "dp=2,tp=2",
        ),
    ),
)
@pytest.mark.parametrize("name", ["kimi-linear-48b", "kimi-k3.1-pro"])
def test_a_model_with_copies_of_experts_computes_what_it_does_without(host, name, mesh, phase):
    run = Run(model(name), Mesh.parse(mesh), phase, copies=4)
    graph = build_graph(Request(config=run.made, target=A3), run.b, host, rules=run.rules)
    assert len(set(run.tables.values())) > 1
    logits, states = run.want()
    for _ in range(2):  # the same graph after a rebalance
        before = dict(run.tables)
        ran = run.step(graph, {})
        got = gather(run.mesh, [r.outputs[0] for r in ran], run.dims(phases.value_axes("logits")))
        assert difference(got, logits) <= ROUNDING
        assert run.check_states(ran, states) == set(run.named_states)
        run.rebalance()
        assert run.tables != before


def wide(name: str) -> ModelConfig:
    """A preset's fixture with latent experts as wide as CANN's pair wants them."""
    c = model(name)

    def layer(x: LayerConfig) -> LayerConfig:
        return dataclasses.replace(x, ffn=dataclasses.replace(x.ffn, latent=1024)) if "moe" in x.kinds else x

    return dataclasses.replace(c, layers=tuple(map(layer, c.layers)))


def run_exchange(host: Any, c: ModelConfig, mesh: str, phase: str, target: Any, copies: int = 0) -> Graph:
    """A graph whose rows are sent to their experts, after all of its ranks have computed what the model does."""
    m = Mesh.parse(mesh)
    run = Run(c, m, phase, preset(c, m, phase, exchange=True), copies)
    graph = build_graph(Request(config=run.made, target=target), run.b, host, rules=run.rules)
    logits, states = run.want()
    ran = run.step(graph, {})
    got = gather(m, [r.outputs[0] for r in ran], run.dims(phases.value_axes("logits")))
    assert difference(got, logits) <= ROUNDING
    assert run.check_states(ran, states) == set(run.named_states)
    return graph


def collectives_of(graph: Graph, part: str) -> list[str]:
    """Types of the collectives of a kind of part, where it is first."""
    ops = [op for op in graph.model.graph[0].op if f".{part}/" in op.name and op.type.startswith(COLLECTIVE)]
    first = ops[0].name.partition("/")[0]
    return [op.type for op in ops if op.name.startswith(f"{first}/")]


@pytest.mark.parametrize("phase, copies", [("prefill", 4), ("decode", 0), ("decode", 4)])
@pytest.mark.parametrize(
    "mesh",
    some(
        "dp=2,tp=2,ep=2",
        on_request=(
            "tp=4",
            "dp=2,tp=2",
        ),
    ),
)
def test_rows_sent_to_their_experts_by_canns_pair_come_back_right(host, mesh, phase, copies):
    graph = run_exchange(host, wide("kimi-k3.1-pro"), mesh, phase, A3, copies)
    pair = ["MoeDistributeDispatchV2", "MoeDistributeCombineV2"]
    assert collectives_of(graph, "moe") == [*pair, "HcomReduceScatter", "HcomAllGather"]
    assert placed_groups(graph.model) == {
        "experts:tensor" if mesh in ("tp=4", "dp=2,tp=2,ep=2") else "experts:data,tensor"
    }
    (reason,) = [c.reason for c in graph.choices["moe"] if c.operator == pair[0]]
    assert "HCCL_BUFFSIZE" in reason


def test_a_chunk_is_on_its_way_while_the_one_before_is_computed(host):
    """By the edges of the graph: no sending of a chunk needs the products of another, or they it."""
    graph = run_exchange(host, in_chunks(wide("kimi-k3.1-pro"), 3), "tp=4", "prefill", A3)
    found = overlaps(graph.model)
    sends = [name for name in found if ".moe/" in name and "Dispatch" in name]
    layers = {name.partition("/")[0] for name in sends}
    assert len(sends) == 3 * len(layers)
    products = [op.name for op in graph.model.graph[0].op if op.type == "GroupedMatmul"]
    for layer in layers:
        first, second, third = (name for name in sends if name.startswith(f"{layer}/"))
        own = [name for name in products if name.startswith(f"{layer}/")]
        assert len(own) == 6  # two a chunk
        assert found[first] == []
        assert found[second] == own[:2]
        assert found[third] == own[2:4]
        back = [n for n in found if n.startswith(f"{layer}/") and "Combine" in n]
        assert [len(found[n]) for n in back] == [2, 2, 0]  # and so is what comes back
    whole = run_exchange(host, wide("kimi-k3.1-pro"), "tp=4", "prefill", A3)
    assert not any(beside for name, beside in overlaps(whole.model).items() if ".moe/" in name)


@pytest.mark.parametrize(
    "name, on, why",
    [
        ("kimi-k3.1-pro", A3, "channels, it takes 1,024 to 8,192"),
        ("kimi-linear-48b", target("a2"), "does not have it|do not have it for a2"),
        ("glm-5.2", target("950pr"), "do not have it for 950pr"),
    ],
)
def test_where_the_pair_cannot_every_rank_reads_all_rows_and_that_is_said(host, name, on, why):
    graph = run_exchange(host, model(name), "tp=4", "decode", on)
    assert not placed_groups(graph.model)
    (reason,) = [c.reason for c in graph.choices["moe"] if c.kind == "rows to experts of other ranks"]
    assert re.search(why, reason)
    found = collectives_of(graph, "moe")
    assert found == ["HcomAllGather"] * 3 + ["HcomReduceScatter"] * 2 + ["HcomAllGather"]


def test_a_graph_of_another_rank_is_noticed(host):
    c, m = wide("kimi-k3.1-pro"), Mesh.parse("tp=4")
    run = Run(c, m, "decode", preset(c, m, "decode", exchange=True))
    graph = build_graph(Request(config=c, target=A3), run.b, host, rules=run.rules)
    inputs, executor = run.inputs(graph, {}), Executor(graph.model)
    shapes = {op.name: shape_of(op.output_desc[0]) for op in graph.model.graph[0].op if op.type == "RefData"}
    states = {n: torch.zeros(shape).double() for n, shape in shapes.items()}
    with pytest.raises(BundleError, match="ep_rank_id is 0 on rank 1 of its group"):
        run_together([executor.steps(given, states, "exact") for given in inputs], groups_of(m))


@pytest.mark.parametrize("mesh", ["pp=2,tp=2"])
def test_a_stage_takes_the_tables_of_its_own_layers(host, mesh):
    whole = Mesh.parse(mesh)
    run = Run(model("kimi-k3"), whole.stage, "decode", copies=2)
    stages = model_stages(run.made, 2, rows=ROWS)
    graphs = build_stages(Request(config=run.made, target=A3), run.b, host, run.rules, stages)
    assert all(not name.endswith(".table") for s in stages if s.edge for name in s.edge.values)
    found = [{op.name for op in g.graph.model.graph[0].op if op.name.endswith(".moe.table")} for g in graphs]
    for names, stage in zip(found, stages, strict=True):
        assert names == {decoder.table_name(i) for i in run.tables if i in stage.layers}
    assert all(found)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("mesh", some("pp=2,tp=2", on_request=("pp=3,dp=2,tp=2",)))
@pytest.mark.parametrize(
    "name",
    some(
        "kimi-linear-48b",
        "kimi-k3.1-pro",
        on_request=(
            "kimi-k3",
            "deepseek-v3.2",
            "glm-5.2",
        ),
    ),
)
def test_stages_one_after_another_compute_what_the_model_does(host, name, mesh, phase):
    whole = Mesh.parse(mesh)
    run = Run(model(name), whole.stage, phase)
    sparse = decoder.is_sparse(run.c, run.b.sequence_pages * run.b.page)
    stages = model_stages(run.c, whole.pipe, rows=ROWS, tokens=run.b.tokens, sparse=sparse)
    graphs = build_stages(Request(config=run.c, target=A3), run.b, host, run.rules, stages)
    logits, states = run.want()
    crossed: dict[str, list[Tensor]] = {}
    seen: set[str] = set()
    for made in graphs:
        assert set(made.reads) <= set(crossed)
        ran = run.step(made.graph, crossed)
        crossed |= {value: [r.outputs[i] for r in ran] for i, value in enumerate(made.gives)}
        seen |= run.check_states(ran, states)
        if made.stage.edge is not None:
            assert set(made.stage.edge.values) <= set(crossed)
            crossed = {value: crossed[value] for value in made.stage.edge.values}  # nothing else crosses
    got = gather(run.mesh, crossed["logits"], run.dims(phases.value_axes("logits")))
    assert difference(got, logits) <= ROUNDING
    assert seen == set(run.named_states)
    weights = [name for made in graphs for name in made.graph.weights]
    assert len(set(weights)) == len(weights)  # none of these models has its head tied to its embedding


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize(
    "mesh",
    some(
        "cp=2,tp=2",
        on_request=(
            "cp=4",
            "cp=2,dp=2",
            "tp=2 split",
        ),
    ),
)
@pytest.mark.parametrize(
    "name",
    some(
        "kimi-linear-48b",
        "kimi-k3.1-pro",
        on_request=(
            "deepseek-v3.2",
            "glm-5.2",
        ),
    ),
)
def test_a_model_whose_caches_are_split_computes_what_it_does_without(host, name, mesh, phase):
    text, *split = mesh.split()
    run = Run(model(name), Mesh.parse(text), phase, split_cache=bool(split))
    graph = build_graph(Request(config=run.c, target=A3), run.b, host, rules=run.rules)
    logits, states = run.want()
    ran = run.step(graph, {})
    got = gather(run.mesh, [r.outputs[0] for r in ran], run.dims(phases.value_axes("logits")))
    assert difference(got, logits) <= ROUNDING
    assert run.check_states(ran, states) == set(run.named_states)


@pytest.mark.parametrize("mesh", some("cp=2", on_request=("cp=4", "cp=2,tp=2", "cp=2,dp=2")))
@pytest.mark.parametrize("name", some("kimi-linear-48b", on_request=("kimi-k3", "kimi-k3.1-pro")))
def test_one_graph_of_a_prefill_hands_memories_over_wherever_rows_end(host, name, mesh):
    """Before, at and after the end of a stretch, with no token and with all; the last row's sequence starts."""
    run = Run(model(name), Mesh.parse(mesh), "prefill")
    graph = build_graph(Request(config=run.c, target=A3), run.b, host, rules=run.rules)
    assert collectives_of(graph, "kda")[:2] == ["HcomAllGather"] * 2
    for new in ((0, 3, 6, 12), (12, 7, 5, 6), (1, 2, 4, 5), (9, 12, 8, 0)):
        run.through, within = batches(run.c, run.b, run.mesh.data, run.rules.ways("cached"), new)
        run.given |= dict(tree.items({"batch": within}))
        logits, states = run.want()
        ran = run.step(graph, {})
        got = gather(run.mesh, [r.outputs[0] for r in ran], run.dims(phases.value_axes("logits")))
        assert difference(got, logits) <= ROUNDING
        assert run.check_states(ran, states) == set(run.named_states)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("name", ["kimi-k3.1-pro", "glm-5.2"])
def test_stages_whose_caches_are_split_hand_on_what_one_stage_computes(host, name, phase):
    test_stages_one_after_another_compute_what_the_model_does(host, name, "pp=2,cp=2,tp=2", phase)


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
