"""Copies of busy experts: whatever the table, the layer is what it is without; a new table needs no new graph."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kimi_graph import layers, tree
from kimi_graph.compile.sharded import EXACT, capture_on, run
from kimi_graph.errors import ShardingError
from kimi_graph.layers.moe import copies
from kimi_graph.parallel import Mesh, Rules, balance
from kimi_graph.parallel.balance import Table, plain_table
from kimi_graph.parallel.legality import check_redundant
from kimi_graph.parallel.simulate import difference
from tests.layers.test_sharding import EMBED, HIDDEN, LATENT, MOE, RULES, hidden, values

REDUNDANT = 4
LOADS = {
    "even": [1.0] * 8,
    "skewed": [100.0, 50, 25, 12, 6, 3, 1, 0],
    "one expert has all": [0.0, 0, 0, 1, 0, 0, 0, 0],
    "busy ones lie together": [9.0, 9, 9, 1, 1, 1, 1, 1],
    "nobody has any": [0.0] * 8,
}
MESHES = {  # mesh axes of rows, and of experts
    "tp=4": (None, ("tensor",)),
    "dp=2,tp=2": (None, ("data", "tensor")),
    "dp=2,tp=2,ep=2": ("data", ("tensor",)),
    "dp=4,tp=2,ep=4": ("data_outer", ("data_inner", "tensor")),
}


def rules_on(mesh: str) -> Rules:
    token, experts = MESHES[mesh]
    m = Mesh.parse(mesh)
    atoms = {None: (), "data": m.atoms("data"), "data_outer": ("data_outer",)}[token]
    mapping = Rules.of(m, {k: v for k, v in RULES.items() if k not in ("token", "experts")}).mapping
    return Rules(m, {**mapping, "token": atoms, "experts": experts})


def in_slots(p: Any, table: Table) -> Any:
    """Parameters of one of each expert as the slots of a table hold them."""
    slots = torch.tensor(table.slots)
    return tree.replace(p, gate_up=p.gate_up[slots], down=p.down[slots])


def packed(table: Table) -> Tensor:
    return torch.tensor(table.packed, dtype=torch.int32)


@pytest.mark.parametrize("config", [MOE, LATENT], ids=["plain", "latent"])
@pytest.mark.parametrize("mesh", MESHES)
def test_every_table_that_balance_makes_is_exact_in_one_graph(mesh, config):
    rules, more = rules_on(mesh), dataclasses.replace(config, redundant=REDUNDANT)
    specs = layers.moe_specs(more, EMBED)
    p, x = values(layers.moe_specs(config, EMBED)), hidden()
    want = layers.moe(p, config, x)
    axes = {"p": specs, "x": HIDDEN, "table": "_"}
    f = lambda p, x, table: {"y": layers.moe(p, more, x, table=table)}  # noqa: E731
    ranks, table = rules.ways("experts"), None
    given: Any = {"p": in_slots(p, plain_table(8, 12, ranks)), "x": x, "table": packed(plain_table(8, 12, ranks))}
    graph = capture_on(rules, f, tree.map(lambda t: t.to("meta"), given), axes, {"y": HIDDEN})
    for loads in LOADS.values():
        plan = balance(loads, 12, ranks, table)
        table = plan.table
        given["p"] = tree.replace(  # the weights of the table before, moved
            given["p"],
            gate_up=torch.stack(plan.moved(list(given["p"].gate_up))),
            down=torch.stack(plan.moved(list(given["p"].down))),
        )
        got = run(graph, given | {"table": packed(table)})["y"]
        assert difference(got, want) <= EXACT  # sums in another order


def test_a_table_that_is_not_that_of_the_weights_gives_something_else():
    rules, more = rules_on("tp=4"), dataclasses.replace(MOE, redundant=REDUNDANT)
    specs = layers.moe_specs(more, EMBED)
    p, x = values(layers.moe_specs(MOE, EMBED)), hidden()
    axes = {"p": specs, "x": HIDDEN, "table": "_"}
    f = lambda p, x, table: {"y": layers.moe(p, more, x, table=table)}  # noqa: E731
    table, other = plain_table(8, 12, 4), balance(LOADS["one expert has all"], 12, 4, good=1.0).table
    assert table != other
    given: Any = {"p": in_slots(p, table), "x": x, "table": packed(other)}
    graph = capture_on(rules, f, tree.map(lambda t: t.to("meta"), given), axes, {"y": HIDDEN})
    assert difference(run(graph, given)["y"], layers.moe(p, MOE, x)) > 1e-3


@given(st.integers(1, 6), st.integers(1, 5), st.data())
@settings(max_examples=100)
def test_rows_take_the_copies_of_an_expert_in_turn(experts, ranks, data):
    slots = data.draw(st.integers(-(-experts // ranks), experts)) * ranks
    loads = data.draw(st.lists(st.integers(0, 9).map(float), min_size=experts, max_size=experts))
    table = balance(loads, slots, ranks).table
    chosen = torch.randint(experts, (12, 2), dtype=torch.int32)
    found = copies(chosen, packed(table))
    for row, (ids, taken) in enumerate(zip(chosen.tolist(), found.tolist(), strict=True)):
        assert taken == [table.copies[e][row % len(table.copies[e])] for e in ids]
    assert Table.unpack(table.packed, experts, ranks) == table


@pytest.mark.parametrize(
    "values, message",
    [
        ([4, 6, 6, 8, 0, 3, 1, 2], "expert 1 has no slot"),
        ([4, 6, 7, 8, 0, 1, 3, 2], "expert 0 is twice on rank 0"),
        ([4, 6, 7, 8, 0, 3, 3, 2], "slot 1 is there 0 times"),
        ([4, 6, 7, 9, 0, 3, 1, 2], "do not begin where it says"),
        ([3, 6, 7, 8, 0, 3, 1, 2], "do not begin where it says"),
        ([4, 7, 6, 8, 0, 3, 1, 2], "do not begin where it says"),
        ([4, 5, 6], "do not begin where it says"),
    ],
)
def test_a_wrong_table_is_refused(values, message):
    assert Table.unpack([4, 6, 7, 8, 0, 3, 1, 2], 3, 2) == Table((0, 1, 2, 0), 2)
    with pytest.raises(ShardingError, match=message):
        Table.unpack(values, 3, 2)


@pytest.mark.parametrize(
    "redundant, ways, message",
    [
        (5, 4, r"13 slots do not divide over 4 ranks. Nearest: 4, 8"),
        (25, 4, r"at most once on each of 4 ranks, so that there are 0 to 24 copies of 8 experts"),
        (1, 1, r"0 to 0 copies"),
        (-1, 4, r"0 to 24 copies"),
    ],
)
def test_numbers_of_copies_that_cannot_be_are_refused(redundant, ways, message):
    for legal in (0, 4, 24):
        check_redundant(8, legal, 4)
    with pytest.raises(ShardingError, match=message):
        check_redundant(8, redundant, ways)
