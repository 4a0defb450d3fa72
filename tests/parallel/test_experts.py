"""Rows sent to their experts: the layer is what it is without a mesh, on every mesh, with copies and in chunks."""

import dataclasses
from typing import Any

import pytest
import torch

from kimi_graph import layers, tree
from kimi_graph.compile.sharded import check
from kimi_graph.parallel import Mesh, Rules
from kimi_graph.parallel.balance import plain_table
from tests.layers.test_expert_copies import in_slots, packed
from tests.layers.test_sharding import EMBED, HIDDEN, LATENT, MOE, RULES, hidden, values

MESHES = ("tp=2", "tp=4", "dp=2,tp=2", "dp=2,tp=2,ep=2", "dp=4,tp=2,ep=4")


def exchange(mesh: str) -> Rules:
    m = Mesh.parse(mesh)
    mapping = Rules.of(m, RULES).mapping
    return Rules(m, {**mapping, "token": (*m.atoms("data"), *m.atoms("tensor")), "experts": m.atoms("experts")})


def run(mesh: str, config: Any, copies: int = 0) -> list[tuple[str, tuple[str, ...]]]:
    rules, more = exchange(mesh), dataclasses.replace(config, redundant=copies)
    specs, x = layers.moe_specs(more, EMBED), hidden()[:, : 4 if rules.mesh.data == 4 else None]
    p: Any = values(layers.moe_specs(config, EMBED))
    args, axes = {"p": p, "x": x}, {"p": specs, "x": HIDDEN}
    f = lambda p, x: {"y": layers.moe(p, config, x)}  # noqa: E731
    if copies:
        table = plain_table(config.experts, more.slots, rules.ways("experts"))
        args, axes = args | {"p": in_slots(p, table), "table": packed(table)}, axes | {"table": "_"}
        f = lambda p, x, table: {"y": layers.moe(p, more, x, table=table)}  # noqa: E731
    return [(c.name, c.axes) for c in check(rules, f, args, axes, {"y": HIDDEN}).collectives]


@pytest.mark.parametrize("copies", [0, 8])
@pytest.mark.parametrize("config", [MOE, LATENT], ids=["plain", "latent"])
@pytest.mark.parametrize("mesh", MESHES)
def test_an_exchange_is_exact_and_takes_four_collectives(mesh, config, copies):
    experts, tensor = exchange(mesh).on("experts"), ("tensor",)
    assert run(mesh, config, copies) == [
        ("expert_dispatch", experts),
        ("expert_combine", experts),
        ("reduce_scatter", tensor),  # of the shared experts
        ("all_gather", tensor),
    ]


@pytest.mark.parametrize("chunks", [2, 3, 5])
def test_chunks_are_exact_and_each_is_sent_before_the_one_before_is_computed(chunks):
    names = [name for name, _ in run("tp=4", dataclasses.replace(LATENT, chunks=chunks))]
    sent, back = "expert_dispatch", "expert_combine"
    assert names == [sent, *[sent, back] * (chunks - 1), back, "reduce_scatter", "all_gather"]


def test_rows_that_all_go_to_one_rank_arrive():
    config = dataclasses.replace(MOE, top_k=2)
    rules, specs = exchange("tp=4"), layers.moe_specs(config, EMBED)
    p = values(specs)
    p = tree.replace(p, bias=torch.tensor([9.0, 9, 0, 0, 0, 0, 0, 0]).double())  # both experts of rank 0
    f = lambda p, x: {"y": layers.moe(p, config, x)}  # noqa: E731
    check(rules, f, {"p": p, "x": hidden()}, {"p": specs, "x": HIDDEN}, {"y": HIDDEN})
