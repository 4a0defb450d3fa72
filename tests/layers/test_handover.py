"""KDA whose new tokens are shared out: what one stretch leaves to the next, exactly, and no more than that."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import kimi_graph as kg
from kimi_graph import layers, ops, tree
from kimi_graph.compile.sharded import ShardedCapture, capture_on, check, run
from kimi_graph.config import KdaConfig
from kimi_graph.errors import ShardingError
from kimi_graph.layers import Batch, handover, step_batch
from kimi_graph.layers.handover import _window as window
from kimi_graph.parallel import Mesh, Rules
from kimi_graph.parallel.annotate import own_slice
from kimi_graph.parallel.presets import preset
from tests.layers.test_sharding import BATCH_AXES, BOUNDED, EMBED, EPS, HIDDEN, KDA, RULES, log, values

PAGE = 32
WIDE = dataclasses.replace(KDA, conv_width=6)


def rules_of(mesh: str) -> Rules:
    return Rules.of(Mesh.parse(mesh), RULES | {"queries": "context"})


def every_count(tokens: int) -> tuple[Tensor, Tensor]:
    """Rows with each number of new tokens, none to all, of a sequence that starts and of one that goes on."""
    counts = torch.arange(tokens + 1).repeat(2)
    return torch.where(torch.arange(len(counts)) <= tokens, 0, 5), counts


def batches(before: Tensor, counts: Tensor, tokens: int, shards: int) -> tuple[Batch, Batch]:
    """A batch whose slots count through the pools of all shards, and the same with slots within each."""
    rows = len(counts) // shards
    table, slots = (torch.arange(1, rows + 1, dtype=torch.int32) for _ in range(2))
    parts = []
    for some in zip(before.split(rows), counts.split(rows), strict=True):
        own = step_batch(table[:, None], slots, *some, tokens, PAGE)
        parts.append(tree.replace(own, cos=torch.zeros(rows, tokens, 1), sin=torch.zeros(rows, tokens, 1)))
    within = tree.map(lambda *x: torch.cat(x), *parts)
    shard = torch.arange(shards, dtype=torch.int32).repeat_interleave(rows)
    return tree.replace(within, slots=within.slots + shard * (rows + 1)), within


def kda_on(
    mesh: str,
    tokens: int,
    config: KdaConfig = KDA,
    rows: tuple[Tensor, Tensor] | None = None,
    dirt: float | None = None,
) -> ShardedCapture:
    """A prefill checked against the layer without a mesh; `dirt`: what padding and slots of new sequences hold."""
    rules = rules_of(mesh)
    before, counts = every_count(tokens) if rows is None else rows
    shards, many = rules.mesh.data, len(counts)
    through, within = batches(before, counts, tokens, shards)
    specs, state_specs = layers.kda_specs(config, EMBED), layers.kda_state_specs(config, many + shards, torch.float64)
    x, state = torch.randn(many, tokens, EMBED, dtype=torch.float64), values(state_specs)
    if dirt is not None:
        x[torch.arange(tokens) >= counts[:, None]] = dirt
        for leaf in tree.leaves(state):
            leaf[through.slots[before == 0].long()] = dirt
    args = {"p": values(specs), "x": x, "s": state}

    def f(p: Any, x: Any, s: Any, batch: Any) -> dict[str, Any]:
        y, after = layers.kda(p, config, x, s, batch, EPS)
        return {"y": y, "s": after}

    axes = {"p": specs, "x": HIDDEN, "s": state_specs, "batch": BATCH_AXES}
    out = {"y": HIDDEN, "s": state_specs}
    return check(rules, f, args | {"batch": within}, axes, out, unsharded=args | {"batch": through})


# ---- exact -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [KDA, BOUNDED], ids=["kda", "kda-bounded"])
@pytest.mark.parametrize("mesh", ["cp=2", "cp=4", "cp=2,tp=2", "dp=2,cp=2", "cp=2,dp=2,tp=2"])
def test_stretches_equal_the_whole_whatever_number_of_tokens_rows_have(mesh, config):
    """New and continued sequences that end in any stretch and at any boundary, or have no token."""
    kda_on(mesh, 12, config)


@pytest.mark.parametrize("mesh, tokens", [("cp=2", 2), ("cp=4", 4), ("cp=4", 8), ("cp=3", 12)])
@pytest.mark.parametrize("config", [KDA, WIDE], ids=["window3", "window5"])
def test_a_stretch_may_be_shorter_than_the_window_of_a_convolution(mesh, tokens, config):
    kda_on(mesh, tokens, config)


def test_a_chunk_of_several_blocks_of_the_scan_is_exact():
    kda_on("cp=2", 300, rows=(torch.tensor([0, 7, 3]), torch.tensor([300, 290, 149])))


def test_what_padding_and_the_slots_of_new_sequences_hold_does_not_matter():
    kda_on("cp=4", 8, dirt=float("nan"))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_on_one_device_the_bodies_are_the_operators(size):
    rows, at = 3, (torch.tensor([2, 1, 3], dtype=torch.int32), torch.tensor([size, 9, 4]), torch.tensor([size, 0, 1]))
    normal = lambda *shape: torch.randn(shape, dtype=torch.float64)  # noqa: E731
    x, weight, window = normal(rows, size, 2, 6), normal(2, 6, 4), normal(4, 2, 6, 3)
    (made,) = handover.short_convs([x], [weight], [window], at)
    torch.testing.assert_close(made, ops.short_conv(x, weight, window, *at), rtol=0, atol=0)
    q, k = (torch.nn.functional.normalize(normal(rows, size, 2, 6), dim=-1) for _ in range(2))
    args = q, k, normal(rows, size, 2, 5), -normal(rows, size, 2, 6).exp(), normal(rows, size, 2).sigmoid()
    memory = normal(4, 2, 5, 6)
    got, want = handover.kda_chunk(*args, memory, at, 0.3), ops.kda_chunk(*args, memory, *at, 0.3)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-14)  # the same sums, with zeros


def test_in_bfloat16_the_memory_is_as_exact_as_without_a_mesh_and_results_nearly():
    """What is read of the memory before a stretch, and of the stretch, is rounded before both are added."""
    c = dataclasses.replace(BOUNDED, heads=2, key=32, value=32, gate_rank=8, stored_rates=(2,))
    _, within = batches(torch.tensor([0, 7]), torch.tensor([128, 100]), 128, 1)
    specs, state_specs = layers.kda_specs(c, EMBED), layers.kda_state_specs(c, 3, torch.bfloat16)
    args = {"p": values(specs), "x": torch.randn(2, 128, EMBED), "s": values(state_specs)}
    axes = {"p": specs, "x": HIDDEN, "s": state_specs, "batch": BATCH_AXES}
    kinds = {"p": specs, "x": None, "s": state_specs}
    narrow = tree.map(lambda x, spec: x.to((spec and spec.dtype) or torch.bfloat16), args, kinds) | {"batch": within}
    wide = tree.map(lambda x: x.double() if x.is_floating_point() else x, narrow)

    def f(p: Any, x: Any, s: Any, batch: Any) -> dict[str, Any]:
        y, after = layers.kda(p, c, x, s, batch, EPS)
        return {"y": y, "memory": after.memory}

    want, alone = f(**wide), f(**narrow)
    out = {"y": HIDDEN, "memory": state_specs.memory}
    piece = capture_on(rules_of("cp=4"), f, tree.map(lambda x: x.to("meta"), narrow), axes, out)
    made = run(piece, narrow)
    error = lambda found, name: (found[name].double() - want[name]).pow(2).mean().sqrt()  # noqa: E731
    assert error(made, "memory") <= 1.001 * error(alone, "memory")
    assert error(made, "y") <= 1.1 * error(alone, "y")


# ---- noticed ---------------------------------------------------------------------------------------------------------


def test_a_rank_that_takes_the_memory_before_it_for_empty_is_noticed(monkeypatch):
    """Public case M8."""
    monkeypatch.setattr(handover, "own_slice", lambda *args: 0 * own_slice(*args))
    with pytest.raises(ShardingError, match=r"^y: on the mesh cp=2 it differs by"):
        kda_on("cp=2", 8)


def test_a_rank_that_takes_the_inputs_before_it_for_zeros_is_noticed(monkeypatch):
    monkeypatch.setattr(handover, "_window", lambda *args: 0 * window(*args))
    with pytest.raises(ShardingError, match=r"^y: on the mesh cp=2 it differs by"):
        kda_on("cp=2", 8)


def test_tokens_that_do_not_divide_are_refused_with_the_nearest_numbers():
    refused = r"13 new tokens of a row do not divide over the 4 devices that share them out; nearest: 12 or 16\."
    with pytest.raises(ShardingError, match=refused):
        kda_on("cp=4", 13)


# ---- what crosses ranks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [8, 24])
def test_only_last_inputs_maps_of_the_memory_and_results_are_gathered(tokens):
    rows, widths = 2 * (tokens + 1), 2 * (2 * KDA.key + KDA.value)  # two heads of a rank
    assert log(kda_on("cp=4,tp=2", tokens)) == [
        ("all_gather", ("context",), (1, 3, rows, widths)),
        ("all_gather", ("context",), (1, rows, 2, KDA.key + KDA.value, KDA.key)),
        ("all_reduce", ("tensor",), (rows, tokens // 4, EMBED)),
        ("all_gather", ("context",), (rows, tokens // 4, EMBED)),
    ]


def k3_prefill(mesh: str, tokens: int) -> ShardedCapture:
    """A KDA layer of K3 for one sequence, traced in its own dtype."""
    c, m = kg.load_config("kimi-k3"), Mesh.parse(mesh)
    config: Any = c.layers[0].mixer
    specs, state_specs = layers.kda_specs(config, c.embed), layers.kda_state_specs(config, 2, c.dtype)
    batch = tree.replace(layers.row_batch(1, tokens, room=tokens), cos=None, sin=None)
    empty = lambda specs: tree.map(  # noqa: E731
        lambda s: torch.empty(s.shape, dtype=s.dtype or c.dtype, device="meta"), specs
    )
    args = {
        "p": empty(specs),
        "x": torch.empty(1, tokens, c.embed, dtype=c.dtype, device="meta"),
        "s": empty(state_specs),
    }
    args |= {"batch": tree.map(lambda x: x.to("meta"), batch)}

    def f(p: Any, x: Any, s: Any, batch: Any) -> dict[str, Any]:
        y, after = layers.kda(p, config, x, s, batch, EPS)
        return {"y": y, "s": after}

    axes = {"p": specs, "x": HIDDEN, "s": state_specs, "batch": tree.replace(BATCH_AXES, cos=None, sin=None)}
    return capture_on(preset(c, m, "prefill"), f, args, axes, {"y": HIDDEN, "s": state_specs})


def test_bytes_that_a_rank_of_k3_gives_are_those_of_the_documentation():
    found = [(c.name, c.dtype, c.bytes) for c in k3_prefill("cp=4,tp=8", 4096).collectives]
    assert found == [
        ("all_gather", torch.bfloat16, 27_648),
        ("all_gather", torch.float32, 1_572_864),  # maps are as exact as the memory
        ("all_reduce", torch.bfloat16, 14_680_064),
        ("all_gather", torch.bfloat16, 14_680_064),
    ]
    assert [c.bytes for c in k3_prefill("cp=4", 4096).collectives] == [221_184, 12_582_912, 14_680_064]


def calls(piece: ShardedCapture) -> list[str]:
    """Names of the nodes of a graph that are calls of operators of ours."""
    targets = [n.target for n in piece.captured.module.graph.nodes if n.op == "call_function"]
    return [name for t in targets if (name := getattr(t, "_opname", "")) in ops.OPERATORS]


def test_a_rank_scans_once_and_without_context_as_without_a_mesh():
    alone, shared = calls(k3_prefill("tp=8", 64)), calls(k3_prefill("cp=2,tp=8", 64))
    made = ["kda_gate", "l2_norm", "l2_norm", "kda_chunk"]
    assert alone == [*["short_conv"] * 3, *made, "gated_rms_norm"]
    assert shared == [*["short_conv", "state_write"] * 3, *made, "state_write", "gated_rms_norm"]
