"""Layers on a mesh: the same numbers as without one, and no more collectives than by hand.

Each is traced once for all ranks, which then run in lockstep. Rows of a batch are split over `data`, each device with
slots and pages of its own (ids count within them); heads, widths, experts and vocabulary over `tensor`.
"""

import dataclasses
import sys
from typing import Any

import pytest
import torch

import kimi_graph as kg
from kimi_graph import layers, ops, tree
from kimi_graph.compile.sharded import ShardedCapture, capture_on, check
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
from kimi_graph.parallel import Mesh, Rules
from kimi_graph.spec import ParamSpec

RULES = {
    "batch": "data", "slots": "data", "pages": "data", "token": "data", "embed": None,
    "heads": "tensor", "key": None, "value": None, "gate_rank": None, "latent": None,
    "ffn": "tensor", "experts": "tensor", "expert_ffn": None, "vocab": "tensor",
    "query_latent": None, "index_heads": None, "expert_embed": None, "sequence": None, "index_queries": None,
    "cached": None, "attn_heads": "tensor", "queries": None,
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
def rules(request) -> Rules:
    return rules_of(*request.param)


def rules_of(data: int, tensor: int, **changed: Any) -> Rules:
    return Rules.of(Mesh(data=data, tensor=tensor), RULES | changed)


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


def pools(rules: Rules) -> dict[str, int]:
    shards = rules.mesh.data
    return {"slots": ROWS + shards, "pages": ROWS * PAGES + shards}


def hidden(tokens: int = TOKENS) -> torch.Tensor:
    return torch.randn(ROWS, tokens, EMBED, dtype=torch.float64)


Log = list[tuple[str, tuple[str, ...], tuple[int, ...]]]


def log(piece: ShardedCapture) -> Log:
    """Name, mesh axes and local shape of each collective."""
    return [(c.name, c.axes, c.shape) for c in piece.collectives]


def all_reduce(rules: Rules, tokens: int = TOKENS) -> tuple[str, tuple[str, ...], tuple[int, ...]]:
    """Of hidden states over `tensor`, as the log has it."""
    return "all_reduce", ("tensor",), (ROWS // rules.mesh.data, tokens, EMBED)


def run_mixer(rules: Rules, f: Any, specs: Any, state_specs: Any, *, step: bool, **more: Any) -> Log:
    """The collectives of `f(p, x, s, batch)`, which gives `y` and the next state; `more`: values by name, with axes."""
    args = {"p": values(specs), "x": hidden(1 if step else TOKENS), "s": values(state_specs)}
    args |= {name: value for name, (value, _) in more.items()}
    axes = {"p": specs, "x": HIDDEN, "s": state_specs, "batch": BATCH_AXES}
    axes |= {name: axis for name, (_, axis) in more.items()}
    through, within = batches(rules.mesh.data, step=step)
    out = {"y": HIDDEN, "s": state_specs} | ({"selected": "batch _ _"} if "selected" in more else {})
    return log(check(rules, f, args | {"batch": within}, axes, out, unsharded=args | {"batch": through}))


def run_kda(rules: Rules, config: KdaConfig = KDA, *, step: bool) -> Log:
    def f(p: Any, x: Any, s: Any, batch: Any) -> dict[str, Any]:
        y, after = layers.kda(p, config, x, s, batch, EPS, step=step)
        return {"y": y, "s": after}

    state = layers.kda_state_specs(config, pools(rules)["slots"], torch.float64)
    return run_mixer(rules, f, layers.kda_specs(config, EMBED), state, step=step)


def run_mla(rules: Rules, config: MlaConfig = MLA, *, step: bool) -> Log:
    def f(p: Any, x: Any, s: Any, batch: Any, selected: Any = None) -> dict[str, Any]:
        y, after, picked = layers.mla(p, config, x, s, batch, step=step, selected=selected)
        assert (picked is None) == (config.indexer is None)
        return {"y": y, "s": after} | ({} if selected is None else {"selected": picked})

    state = layers.mla_state_specs(config, pools(rules)["pages"], PAGE, torch.float64)
    chosen = torch.arange(4, dtype=torch.int32).expand(ROWS, 1 if step else TOKENS, 4)
    more = {"selected": (chosen, "batch _ _")} if config is SHARED else {}
    return run_mixer(rules, f, layers.mla_specs(config, EMBED), state, step=step, **more)


@pytest.mark.parametrize("step", [False, True], ids=["prefill", "step"])
@pytest.mark.parametrize(
    "run, config",
    [(run_kda, KDA), (run_kda, BOUNDED), (run_mla, MLA), (run_mla, GATED), (run_mla, SPARSE), (run_mla, SHARED)],
    ids=["kda", "kda-bounded", "mla", "mla-gated", "mla-sparse", "mla-shared"],
)
def test_a_mixer_needs_one_all_reduce(rules, run, config, step):
    assert run(rules, config, step=step) == [all_reduce(rules, 1 if step else TOKENS)]


@pytest.mark.parametrize("situ", [None, SITU], ids=["swiglu", "situ"])
def test_ffn_needs_one_all_reduce(rules, situ):
    specs = layers.ffn_specs(DENSE.ffn, EMBED)
    args, axes = {"p": values(specs), "x": hidden()}, {"p": specs, "x": HIDDEN}
    piece = check(rules, lambda p, x: {"y": layers.ffn(p, x, situ)}, args, axes, {"y": HIDDEN})
    assert log(piece) == [all_reduce(rules)]


@pytest.mark.parametrize("data, tensor", [(1, 5), (2, 5)])
def test_queries_of_the_indexer_are_shared_out_and_their_selections_gathered(data, tensor):
    rules = rules_of(data, tensor, index_queries="tensor", heads=None)
    assert run_mla(rules, SPARSE, step=False) == [("all_gather", ("tensor",), (ROWS // data, 1, 4))]


def run_moe(rules: Rules, config: MoeConfig = MOE) -> Log:
    specs = layers.moe_specs(config, EMBED)
    args, axes = {"p": values(specs), "x": hidden()}, {"p": specs, "x": HIDDEN}
    return log(check(rules, lambda p, x: {"y": layers.moe(p, config, x)}, args, axes, {"y": HIDDEN}))


@pytest.mark.parametrize("config", [MOE, GROUPED], ids=["plain", "grouped"])
def test_moe_with_its_experts_split_needs_one_all_reduce_for_routed_and_shared(rules, config):
    assert run_moe(rules, config) == [all_reduce(rules)]


def test_latent_experts_are_summed_before_their_norm_and_added_to_the_shared_ones_before_theirs(rules):
    """Public case K8."""
    rows = ROWS // rules.mesh.data
    latent = ("all_reduce", ("tensor",), (rows * TOKENS, LATENT.latent))
    assert run_moe(rules, LATENT) == [latent, all_reduce(rules)]


def test_split_latent_projections_gather_what_experts_read_and_leave_a_sum_for_the_shared_experts():
    rules, rows = rules_of(2, 2, expert_embed="tensor"), ROWS * TOKENS // 2
    gathered, summed = ("all_gather", ("tensor",), (rows, 4)), ("all_reduce", ("tensor",), (rows, 8))
    assert run_moe(rules, LATENT) == [gathered, summed, all_reduce(rules)]


def test_a_residual_mix_needs_nothing_of_whole_sources_and_sums_pending_ones_once(rules):
    specs = layers.attn_residual_specs(EMBED, "site")
    args: Any = {"p": values(specs), "sources": [hidden() for _ in range(3)]}
    axes: Any = {"p": specs, "sources": [HIDDEN] * 3}
    mix = lambda p, sources: {"y": layers.attn_residual(p, sources, EPS)}  # noqa: E731
    assert log(check(rules, mix, args, axes, {"y": HIDDEN})) == []

    def mixed_with_pending(p: Any, sources: Any, x: Any, w: Any) -> dict[str, Any]:
        narrow = torch.einsum("btd,df->btf", x, w)
        return {"y": layers.attn_residual(p, [*sources, torch.einsum("btf,df->btd", narrow, w)], EPS)}

    args, axes = args | {"x": hidden(), "w": torch.randn(EMBED, 8).double()}, axes | {"x": HIDDEN, "w": "embed ffn"}
    assert log(check(rules, mixed_with_pending, args, axes, {"y": HIDDEN})) == [all_reduce(rules)]


def test_moe_with_the_width_of_experts_split_needs_one_all_reduce():
    rules = rules_of(2, 2, experts=None, expert_ffn="tensor")
    assert run_moe(rules) == [all_reduce(rules)]


def test_moe_with_experts_and_their_width_split_sums_over_both():
    rules = rules_of(2, 2, batch=None, token=None, experts="data", expert_ffn="tensor", ffn=("data", "tensor"))
    assert run_moe(rules) == [("all_reduce", ("data", "tensor"), (ROWS, TOKENS, EMBED))]


def test_experts_over_all_devices_gather_the_rows_and_scatter_their_sums():
    rules, rows = rules_of(2, 2, token=None, experts=("data", "tensor")), ROWS * TOKENS
    gathered, scattered = ("all_gather", ("data",), (rows // 2, EMBED)), ("reduce_scatter", ("data",), (rows, EMBED))
    assert run_moe(rules) == [gathered, scattered, all_reduce(rules)]


def test_moe_can_split_tokens_that_attention_replicates():
    rules = rules_of(2, 2, token=("data", "tensor"), experts=None)
    assert run_moe(rules) == [("all_gather", ("tensor",), (ROWS * TOKENS // 4, EMBED)), all_reduce(rules)]


def test_embedding_and_head_split_over_the_vocabulary_need_one_all_reduce_and_none(rules):
    config, how = small_config(DENSE), decoder.How(step=False, last_only=False)
    first, *_, last = decoder.schedule(config)

    def run(use: decoder.Use, p: Any, x: Any) -> Any:
        return {"y": decoder.run_part(use, config, p, [x], None, Any, how)[0][0]}  # type: ignore[arg-type]

    table: Any = {"embed": torch.randn(16, EMBED).double()}
    args, axes = {"p": table, "x": torch.randint(16, (ROWS, TOKENS))}, {"p": {"embed": "vocab embed"}, "x": "batch _"}
    embedding = check(rules, lambda p, x: run(first, p, x), args, axes, {"y": HIDDEN})
    assert log(embedding) == [all_reduce(rules)]
    params = {"norm": torch.randn(EMBED).double(), "head": table["embed"]}
    axes = {"p": {"norm": "embed", "head": "vocab embed"}, "x": HIDDEN}
    head = check(rules, lambda p, x: run(last, p, x), {"p": params, "x": hidden()}, axes, {"y": "batch _ vocab"})
    assert log(head) == []


def small_config(*ffns: DenseConfig | MoeConfig) -> Any:
    kinds = tuple(LayerConfig(mixer=mixer, ffn=ffn) for ffn in ffns for mixer in (KDA, MLA))
    return dataclasses.replace(kg.load_config("kimi-linear-48b"), vocab=16, embed=EMBED, layers=kinds)


@pytest.mark.parametrize("step, last_only", [(False, False), (False, True), (True, False)])
def test_a_model_needs_one_all_reduce_for_its_embedding_and_two_a_layer(rules, step, last_only):
    config = small_config(DENSE, MOE)
    specs = decoder.model_specs(config)
    state_specs = decoder.state_specs(config, **pools(rules), page=PAGE, dtype=torch.float64)
    tokens = torch.randint(config.vocab, (ROWS, 1 if step else TOKENS))
    through, within = batches(rules.mesh.data, step=step)
    args: Any = {"p": values(specs), "tokens": tokens, "s": values(state_specs)}
    axes: Any = {"p": specs, "tokens": "batch _", "s": state_specs, "batch": BATCH_AXES}

    def f(p: Any, tokens: Any, s: Any, batch: Any) -> dict[str, Any]:
        logits, after = decoder.forward(p, config, tokens, s, batch, step=step, last_only=last_only)
        return {"logits": logits, "s": after}

    out = {"logits": "batch _ vocab", "s": state_specs}
    piece = check(rules, f, args | {"batch": within}, axes, out, unsharded=args | {"batch": through})
    last = all_reduce(rules, 1 if last_only else tokens.shape[1])  # only the last token goes on after the last layer
    assert log(piece) == [all_reduce(rules, tokens.shape[1])] * 2 * len(config.layers) + [last]


@pytest.mark.parametrize("step", [False, True], ids=["prefill", "step"])
def test_the_48b_model_on_1024_devices_traces_on_meta_tensors(step):
    rules, config = rules_of(32, 32), kg.load_config("kimi-linear-48b")
    specs = decoder.model_specs(config)
    state_specs = decoder.state_specs(config, slots=96, pages=320, page=128, dtype=config.dtype)
    rows = torch.empty(64, dtype=torch.int64, device="meta")
    tokens = rows[:, None].expand(64, 1 if step else 512)
    table = torch.empty(64, 8, dtype=torch.int32, device="meta")
    batch = step_batch(table, rows.int(), rows, rows, tokens.shape[1], page=128)
    empty = lambda specs: tree.map(  # noqa: E731
        lambda s: torch.empty(s.shape, dtype=s.dtype or config.dtype, device="meta"), specs
    )

    def f(p: Any, tokens: Any, s: Any, batch: Any) -> dict[str, Any]:
        logits, after = decoder.forward(p, config, tokens, s, batch, step=step, last_only=True)
        assert str(logits) == "[64@data, 1, 163840@tensor]"
        assert str(after[0].memory) == "[96@data, 32@tensor, 128, 128]"  # type: ignore[union-attr]
        assert str(after[3].latent) == "[320@data, 128, 512]"  # type: ignore[union-attr]
        return {"logits": logits, "s": after}

    args = {"p": empty(specs), "tokens": tokens, "s": empty(state_specs), "batch": batch}
    axes = {"p": specs, "tokens": "batch _", "s": state_specs, "batch": PLAIN_AXES}
    piece = capture_on(rules, f, args, axes, {"logits": "batch _ vocab", "s": state_specs})
    assert {(name, axes) for name, axes, _ in log(piece)} == {("all_reduce", ("tensor",))}
    assert len(log(piece)) == 1 + 2 * len(config.layers)


def kda_chunk(rules: Rules, key: str, slots: str = "slots") -> Any:
    meta = lambda *shape: torch.empty(shape, device="meta")  # noqa: E731
    args: Any = {
        "q": meta(ROWS, TOKENS, 4, 6), "beta": meta(ROWS, TOKENS, 4), "v": meta(ROWS, TOKENS, 4, 6),
        "memory": meta(ROWS + 2, 4, 6, 6), "b": tree.map(lambda x: x.to("meta"), batches(2, step=False)[1]),
    }  # fmt: skip
    axes: Any = {
        "q": f"batch _ heads {key}", "beta": "batch _ heads", "v": "batch _ heads _",
        "memory": f"{slots} heads _ {key}", "b": BATCH_AXES,
    }  # fmt: skip

    def f(q: Any, beta: Any, v: Any, memory: Any, b: Any) -> dict[str, Any]:
        o, _ = ops.kda_chunk(q, q, v, q, beta, memory, b.slots, b.lengths, b.counts, 1.0)
        return {"o": o}

    return capture_on(rules, f, args, axes, {"o": "batch _ heads _"})


def test_split_key_channels_of_kda_are_refused_by_name():
    rules = rules_of(2, 2, key="tensor", heads=None)
    with pytest.raises(ShardingError, match=r"kda_chunk\(\[4@data, 5, 4, 6@tensor\], .*'k' of .* is split over"):
        kda_chunk(rules, "key")
    with pytest.raises(ShardingError, match=r"layers/kda.py:\d+: l2_norm.*'d' of .* is split over \('tensor',\)"):
        run_kda(rules, step=False)


def test_slots_that_do_not_go_with_their_rows_are_refused():
    with pytest.raises(ShardingError, match=r"kda_chunk.*'s' of .* is split over None, and has to be over \('data',\)"):
        kda_chunk(rules_of(2, 2), "_", slots="_")


def test_rows_split_over_some_of_the_axes_of_experts_are_refused():
    with pytest.raises(
        ShardingError, match=r"layers/moe.py:\d+: summand.* varies by 'token', on the same mesh axis as"
    ):
        run_moe(rules_of(2, 2, experts=("data", "tensor")))


def test_rows_sent_to_experts_whose_width_is_split_are_refused():
    rules = rules_of(2, 2, token=("data", "tensor"), expert_ffn="data")
    with pytest.raises(ShardingError, match=r"layers/moe.py:\d+: expert_combine.* also varies by 'expert_ffn'"):
        run_moe(rules)


def test_a_body_that_forgets_its_summand_is_noticed(monkeypatch):
    monkeypatch.setattr(sys.modules["kimi_graph.layers.moe"], "summand", lambda x, *_: x)
    with pytest.raises(ShardingError, match="is not the same along experts"):
        run_moe(rules_of(2, 2))


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ShardingError, match=r"p\.query: axis 'heads' has size 4, not divisible by tensor = 3"):
        run_kda(rules_of(1, 3), step=False)


def test_an_axis_without_a_rule_is_refused():
    x = torch.ones(2, device="meta")
    with pytest.raises(ShardingError, match="'stage' has no rule"):
        capture_on(rules_of(1, 2), lambda x: {"y": x}, {"x": x}, {"x": "stage"}, {"y": "stage"})
