"""Layers on a mesh, by the sharding probe: the same numbers as without one, and no more collectives than by hand.

Rows of a batch are split over `data`, each device with slots and pages of its own (ids count within them); heads,
widths, experts and vocabulary over `tensor`.
"""

import dataclasses
import sys
from typing import Any

import pytest
import torch

import kimi_graph as kg
from kimi_graph import layers, ops, tree
from kimi_graph.config import (
    DenseConfig,
    IndexerConfig,
    KdaConfig,
    LayerConfig,
    MlaConfig,
    MoeConfig,
    RopeConfig,
    SituConfig,
)
from kimi_graph.errors import ShardingError
from kimi_graph.init import init_tensor
from kimi_graph.layers import Batch, step_batch
from kimi_graph.models import decoder
from kimi_graph.spec import ParamSpec
from tests.sharding_probe import Mesh, Sharded, place, shard

ROUNDING = 1e-12  # float64, sums in another order
RULES = {
    "batch": "data", "slots": "data", "pages": "data", "token": "data", "embed": None,
    "heads": "tensor", "key": None, "value": None, "gate_rank": None, "latent": None,
    "ffn": "tensor", "experts": "tensor", "expert_ffn": None, "vocab": "tensor",
    "query_latent": None, "index_heads": None, "expert_embed": None,
}  # fmt: skip

ROWS, TOKENS, PAGE, PAGES, EMBED, EPS = 4, 5, 4, 3, 12, 1e-5
KDA = KdaConfig(heads=4, key=6, value=5, conv_width=4, gate_rank=3, stored_rates=(1, 1, 4, 1))
BOUNDED = dataclasses.replace(KDA, gate_lower_bound=-5.0, full_rank_gate=True, stored_rates=(6,))
MLA = MlaConfig(heads=4, latent=7, key_nope=6, key_rope=4, value=5, scale=0.3)
GATED = dataclasses.replace(MLA, query_latent=9, output_gate=True, rope=RopeConfig(theta=10.0, interleaved=True))
INDEXER = IndexerConfig(heads=3, key=6, top_k=4, eps=1e-6, rope=4, interleaved=False)
SPARSE = dataclasses.replace(GATED, indexer=INDEXER)
SHARED = dataclasses.replace(GATED, indexer=dataclasses.replace(INDEXER, shared=True))
SITU = SituConfig(beta=4.0, linear_beta=25.0)
DENSE = DenseConfig(ffn=8)
MOE = MoeConfig(experts=8, top_k=3, ffn=4, shared_ffn=4, scale=2.446)
GROUPED = dataclasses.replace(MOE, groups=4, kept_groups=2)
LATENT = dataclasses.replace(MOE, latent=8, latent_norm=True, situ=SITU)
BATCH_AXES: Any = Batch(
    slots="batch", lengths="batch", counts="batch", block_table="batch _", slot_mapping="batch",
    cos="batch _ _", sin="batch _ _",
)  # fmt: skip
PLAIN_AXES: Any = tree.replace(BATCH_AXES, cos=None, sin=None)
HIDDEN = "batch _ embed"


@pytest.fixture(params=[(1, 2), (1, 4), (2, 2)], ids=lambda sizes: f"data{sizes[0]}-tensor{sizes[1]}")
def mesh(request) -> Mesh:
    return mesh_of(*request.param)


def mesh_of(data: int, tensor: int, **rules: Any) -> Mesh:
    return Mesh({"data": data, "tensor": tensor}, RULES | rules)


def values(specs: Any) -> Any:
    """Parameters, or a state that is not empty (no specs of a state have a source)."""

    def value(path: str, spec: ParamSpec) -> torch.Tensor:
        return init_tensor(spec, path).double() if spec.source[0] else torch.randn(spec.shape).double()

    return tree.map_with_path(value, specs)


def batches(shards: int, *, step: bool) -> tuple[Batch, Batch]:
    """A batch of unequal rows whose ids count through the pools of all shards, and the same with ids within each."""
    rows, tokens = ROWS // shards, 1 if step else TOKENS
    before, counts = torch.tensor([3, 0, 6, 5]), torch.ones(4).long() if step else torch.tensor([5, 3, 0, 4])
    table = torch.arange(1, rows * PAGES + 1, dtype=torch.int32).view(rows, PAGES)
    slots = torch.arange(1, rows + 1, dtype=torch.int32)
    within, through = [], []
    for i in range(shards):
        some = slice(i * rows, (i + 1) * rows)
        own = step_batch(
            table, slots, before[some], counts[some], tokens, PAGE, rope=(GATED.rope, 4), dtype=torch.float64
        )
        within.append(own)
        page = i * (rows * PAGES + 1)
        moved = {"slots": own.slots + i * (rows + 1), "block_table": own.block_table + page}
        through.append(tree.replace(own, slot_mapping=own.slot_mapping + page * PAGE, **moved))
    join = lambda parts: tree.map(lambda *x: torch.cat(x), *parts)  # noqa: E731
    return join(through), join(within)


def pools(mesh: Mesh) -> dict[str, int]:
    shards = mesh.axes["data"]
    return {"slots": ROWS + shards, "pages": ROWS * PAGES + shards}


def hidden(tokens: int = TOKENS) -> torch.Tensor:
    return torch.randn(ROWS, tokens, EMBED, dtype=torch.float64)


def assert_equal(got: Any, want: Any) -> None:
    tree.map(lambda g, w: _close(g.whole(), w), got, want)


def _close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    assert float((got - want).abs().max()) <= ROUNDING * float(want.abs().max())


def all_reduce(mesh: Mesh, tokens: int = TOKENS) -> tuple[str, tuple[str, ...], tuple[int, ...]]:
    """Of hidden states over `tensor`, as the log has it."""
    return "all_reduce", ("tensor",), (ROWS // mesh.axes["data"], tokens, EMBED)


def run_kda(mesh: Mesh, config: KdaConfig = KDA, *, step: bool) -> None:
    specs = layers.kda_specs(config, EMBED)
    state_specs = layers.kda_state_specs(config, pools(mesh)["slots"], torch.float64)
    p, state, x = values(specs), values(state_specs), hidden(1 if step else TOKENS)
    through, within = batches(mesh.axes["data"], step=step)
    on_mesh = place(mesh, specs, p), config, shard(mesh, x, HIDDEN), place(mesh, state_specs, state)
    got = layers.kda(*on_mesh, place(mesh, BATCH_AXES, within), EPS, step=step)
    assert_equal(got, layers.kda(p, config, x, state, through, EPS, step=step))


def run_mla(mesh: Mesh, config: MlaConfig = MLA, *, step: bool) -> None:
    specs = layers.mla_specs(config, EMBED)
    state_specs = layers.mla_state_specs(config, pools(mesh)["pages"], PAGE, torch.float64)
    p, state, x = values(specs), values(state_specs), hidden(1 if step else TOKENS)
    through, within = batches(mesh.axes["data"], step=step)
    chosen = torch.arange(4, dtype=torch.int32).expand(ROWS, x.shape[1], 4) if config is SHARED else None
    before = None if chosen is None else shard(mesh, chosen, "batch _ _")
    on_mesh = place(mesh, specs, p), config, shard(mesh, x, HIDDEN), place(mesh, state_specs, state)
    *got, picked = layers.mla(*on_mesh, place(mesh, BATCH_AXES, within), step=step, selected=before)
    *want, expected = layers.mla(p, config, x, state, through, step=step, selected=chosen)
    assert_equal(tuple(got), tuple(want))
    assert (picked is None) == (expected is None) == (config.indexer is None)
    if expected is not None:
        assert_equal(picked, expected)


@pytest.mark.parametrize("step", [False, True], ids=["prefill", "step"])
@pytest.mark.parametrize(
    "run, config",
    [(run_kda, KDA), (run_kda, BOUNDED), (run_mla, MLA), (run_mla, GATED), (run_mla, SPARSE), (run_mla, SHARED)],
    ids=["kda", "kda-bounded", "mla", "mla-gated", "mla-sparse", "mla-shared"],
)
def test_a_mixer_needs_one_all_reduce(mesh, run, config, step):
    run(mesh, config, step=step)
    assert mesh.log == [all_reduce(mesh, 1 if step else TOKENS)]


@pytest.mark.parametrize("situ", [None, SITU], ids=["swiglu", "situ"])
def test_ffn_needs_one_all_reduce(mesh, situ):
    specs, x = layers.ffn_specs(DENSE.ffn, EMBED), hidden()
    p = values(specs)
    assert_equal(layers.ffn(place(mesh, specs, p), shard(mesh, x, HIDDEN), situ), layers.ffn(p, x, situ))
    assert mesh.log == [all_reduce(mesh)]


def run_moe(mesh: Mesh, config: MoeConfig = MOE) -> None:
    specs, x = layers.moe_specs(config, EMBED), hidden()
    p = values(specs)
    assert_equal(layers.moe(place(mesh, specs, p), config, shard(mesh, x, HIDDEN)), layers.moe(p, config, x))


@pytest.mark.parametrize("config", [MOE, GROUPED], ids=["plain", "grouped"])
def test_moe_with_its_experts_split_needs_one_all_reduce_for_routed_and_shared(mesh, config):
    run_moe(mesh, config)
    assert mesh.log == [all_reduce(mesh)]


def test_latent_experts_are_summed_before_their_norm_and_added_to_the_shared_ones_before_theirs(mesh):
    """Public case K8."""
    run_moe(mesh, LATENT)
    rows = ROWS // mesh.axes["data"]
    assert mesh.log == [("all_reduce", ("tensor",), (rows * TOKENS, LATENT.latent)), all_reduce(mesh)]


def test_split_latent_projections_gather_what_experts_read_and_leave_a_sum_for_the_shared_experts():
    mesh = mesh_of(2, 2, expert_embed="tensor")
    run_moe(mesh, LATENT)
    rows = ROWS * TOKENS // 2
    gathered, summed = ("all_gather", ("tensor",), (rows, 4)), ("all_reduce", ("tensor",), (rows, 8))
    assert mesh.log == [gathered, summed, all_reduce(mesh)]


def test_a_residual_mix_needs_nothing_of_whole_sources_and_sums_pending_ones_once(mesh):
    specs, rows = layers.attn_residual_specs(EMBED, "site"), ROWS // mesh.axes["data"]
    p, sources = values(specs), [hidden() for _ in range(3)]
    whole = [shard(mesh, x, HIDDEN) for x in sources]
    assert_equal(layers.attn_residual(place(mesh, specs, p), whole, EPS), layers.attn_residual(p, sources, EPS))
    assert mesh.log == []
    x, w = hidden(), torch.randn(EMBED, 8).double()
    narrow = torch.einsum("btd,df->btf", shard(mesh, x, HIDDEN), shard(mesh, w, "embed ffn"))
    pending = torch.einsum("btf,df->btd", narrow, shard(mesh, w, "embed ffn"))
    mixed = layers.attn_residual(place(mesh, specs, p), [*whole, pending], EPS)
    assert_equal(mixed, layers.attn_residual(p, [*sources, x @ w @ w.mT], EPS))
    assert mesh.log == [("all_reduce", ("tensor",), (rows, TOKENS, EMBED))]


def test_moe_with_the_width_of_experts_split_needs_one_all_reduce():
    mesh = mesh_of(2, 2, experts=None, expert_ffn="tensor")
    run_moe(mesh)
    assert mesh.log == [all_reduce(mesh)]


def test_moe_with_experts_and_their_width_split_sums_over_both():
    mesh = mesh_of(2, 2, batch=None, token=None, experts="data", expert_ffn="tensor", ffn=("data", "tensor"))
    run_moe(mesh)
    assert mesh.log == [("all_reduce", ("data", "tensor"), (ROWS, TOKENS, EMBED))]


def test_moe_can_split_tokens_that_attention_replicates():
    mesh = mesh_of(2, 2, token=("data", "tensor"), experts=None)
    run_moe(mesh)
    assert mesh.log == [("all_gather", ("tensor",), (ROWS * TOKENS // 4, EMBED)), all_reduce(mesh)]


def test_embedding_and_head_split_over_the_vocabulary_need_one_all_reduce_and_none(mesh):
    config, how = small_config(DENSE), decoder.How(step=False, last_only=False)
    weight, norm = torch.randn(16, EMBED).double(), torch.randn(EMBED).double()
    tokens = torch.randint(16, (ROWS, TOKENS))
    first, *_, last = decoder.schedule(config)
    table = shard(mesh, weight, "vocab embed")

    def run(use: decoder.Use, p: Any, x: Any) -> Any:
        return decoder.run_part(use, config, p, [x], None, Any, how)[0][0]  # type: ignore[arg-type]

    x = run(first, {"embed": table}, shard(mesh, tokens, "batch _"))
    assert_equal(x, run(first, {"embed": weight}, tokens))
    assert mesh.log == [all_reduce(mesh)]
    logits = run(last, {"norm": shard(mesh, norm, "embed"), "head": table}, x)
    assert_equal(logits, run(last, {"norm": norm, "head": weight}, x.whole()))
    assert mesh.log == [all_reduce(mesh)]


def small_config(*ffns: DenseConfig | MoeConfig) -> Any:
    kinds = tuple(LayerConfig(mixer=mixer, ffn=ffn) for ffn in ffns for mixer in (KDA, MLA))
    return dataclasses.replace(kg.load_config("kimi-linear-48b"), vocab=16, embed=EMBED, layers=kinds)


@pytest.mark.parametrize("step, last_only", [(False, False), (False, True), (True, False)])
def test_a_model_needs_one_all_reduce_for_its_embedding_and_two_a_layer(mesh, step, last_only):
    config = small_config(DENSE, MOE)
    specs = decoder.model_specs(config)
    state_specs = decoder.state_specs(config, **pools(mesh), page=PAGE, dtype=torch.float64)
    p, states = values(specs), values(state_specs)
    tokens = torch.randint(config.vocab, (ROWS, 1 if step else TOKENS))
    through, within = batches(mesh.axes["data"], step=step)
    want = decoder.forward(p, config, tokens, states, through, step=step, last_only=last_only)
    got = decoder.forward(
        place(mesh, specs, p), config, shard(mesh, tokens, "batch _"), place(mesh, state_specs, states),
        place(mesh, BATCH_AXES, within), step=step, last_only=last_only,
    )  # fmt: skip
    count = len(mesh.log)
    assert_equal(got, want)
    last = all_reduce(mesh, 1 if last_only else tokens.shape[1])  # only the last token goes on after the last layer
    assert mesh.log == [all_reduce(mesh, tokens.shape[1])] * 2 * len(config.layers) + [last]
    assert len(mesh.log) == count
    assert got[0].dims == (("data",) if mesh.axes["data"] > 1 else (), (), ("tensor",))


@pytest.mark.parametrize("step", [False, True], ids=["prefill", "step"])
def test_the_48b_model_on_1024_devices_traces_on_meta_tensors(step):
    mesh, config = mesh_of(32, 32), kg.load_config("kimi-linear-48b")
    specs = decoder.model_specs(config)
    state_specs = decoder.state_specs(config, slots=96, pages=320, page=128, dtype=config.dtype)
    rows = torch.empty(64, dtype=torch.int64, device="meta")
    tokens = rows[:, None].expand(64, 1 if step else 512)
    table = torch.empty(64, 8, dtype=torch.int32, device="meta")
    batch = step_batch(table, rows.int(), rows, rows, tokens.shape[1], page=128)

    def placed(specs: Any) -> Any:
        empty = tree.map(lambda s: torch.empty(s.shape, dtype=s.dtype or config.dtype, device="meta"), specs)
        return place(mesh, specs, empty)

    logits, states = decoder.forward(
        placed(specs), config, shard(mesh, tokens, "batch _"), placed(state_specs), place(mesh, PLAIN_AXES, batch),
        step=step, last_only=True,
    )  # fmt: skip
    assert str(logits) == "[64@data, 1, 163840@tensor]"
    assert str(states[0].memory) == "[96@data, 32@tensor, 128, 128]"
    assert str(states[3].latent) == "[320@data, 128, 512]"
    assert {(name, axes) for name, axes, _ in mesh.log} == {("all_reduce", ("tensor",))}
    assert len(mesh.log) == 1 + 2 * len(config.layers)


def kda_chunk(mesh: Mesh, key: str, slots: str = "slots") -> Any:
    q = shard(mesh, torch.randn(ROWS, TOKENS, 4, 6), f"batch _ heads {key}")
    beta, memory = torch.rand(ROWS, TOKENS, 4), torch.randn(ROWS + 2, 4, 6, 6)
    memory = shard(mesh, memory, f"{slots} heads _ {key}")
    b = place(mesh, BATCH_AXES, batches(2, step=False)[1])
    v = shard(mesh, torch.randn(ROWS, TOKENS, 4, 6), "batch _ heads _")
    return ops.kda_chunk(q, q, v, q, shard(mesh, beta, "batch _ heads"), memory, b.slots, b.lengths, b.counts, 1.0)


def test_split_key_channels_of_kda_are_refused_by_name():
    mesh = mesh_of(2, 2, key="tensor", heads=None)
    with pytest.raises(ShardingError, match=r"kda_chunk\(\[4@data, 5, 4, 6@tensor\], .*'k' of .* is split over"):
        kda_chunk(mesh, "key")
    with pytest.raises(ShardingError, match=r"l2_norm.*'d' of .* is split over \('tensor',\)"):
        run_kda(mesh, step=False)


def test_slots_that_do_not_go_with_their_rows_are_refused():
    with pytest.raises(ShardingError, match=r"kda_chunk.*'s' of .* is split over None, and has to be over \('data',\)"):
        kda_chunk(mesh_of(2, 2), "_", slots="_")


def test_rows_split_over_the_axes_of_experts_are_refused():
    with pytest.raises(ShardingError, match=r"shard_map.* uses a mesh axis twice"):
        run_moe(mesh_of(2, 2, token=("data", "tensor")))


def test_a_body_that_forgets_its_summand_is_noticed(monkeypatch):
    monkeypatch.setattr(sys.modules["kimi_graph.layers.moe"], "summand", lambda x, *_: x)
    with pytest.raises(ShardingError, match="not the same along tensor"):
        run_moe(mesh_of(2, 2))


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ShardingError, match=r"dimension 0 of .* is not divisible by tensor=3"):
        place(mesh_of(1, 3), layers.kda_specs(KDA, EMBED), values(layers.kda_specs(KDA, EMBED)))


def test_an_axis_without_a_rule_is_refused():
    with pytest.raises(ShardingError, match="'stage' has no rule; there are rules for batch"):
        shard(mesh_of(1, 2), torch.ones(2), "stage")


def test_a_merged_dimension_is_refused():
    x = shard(mesh_of(2, 2), torch.ones(2, 4, 6), "batch heads _")
    assert isinstance(x, Sharded)
    with pytest.raises(ShardingError, match=r"flatten\(\[2@data, 4@tensor, 6\], 0, 1\): dimension 1"):
        x.flatten(0, 1)
