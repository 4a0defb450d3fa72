"""MLA, gated, rotated and sparse: against transformers' layers, against plain forms in float64, and against itself."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from kimi_graph import layers, ops, tree
from kimi_graph.config import IndexerConfig, MlaConfig, RopeConfig, YarnConfig
from kimi_graph.layers import Batch, MlaState, step_batch
from tests.layers.oracle import assert_close, causal, load, values

EMBED, PAGE = 48, 4
YARN = YarnConfig(factor=40, original_len=4096, beta_fast=32, beta_slow=1, mscale=1, mscale_all=1)
# widths of heads, latents and rope as released, scaled a little; index heads enough that no scores tie at zero
SMALL: dict[str, Any] = {"heads": 3, "latent": 24, "key_nope": 16, "key_rope": 8, "query_latent": 20}
V32 = MlaConfig(
    **SMALL, value=16, scale=24**-0.5 * layers.mscale(40, 1) ** 2,
    rope=RopeConfig(theta=1e4, interleaved=True, yarn=YARN),
    indexer=IndexerConfig(heads=16, key=12, top_k=6, eps=1e-6, rope=8, interleaved=False),
)  # fmt: skip
GLM = dataclasses.replace(
    V32, value=18, scale=24**-0.5, rope=RopeConfig(theta=8e6, interleaved=True),
    indexer=dataclasses.replace(V32.indexer, interleaved=True),
)  # fmt: skip
GLM_SHARED = dataclasses.replace(GLM, indexer=dataclasses.replace(GLM.indexer, shared=True))
K25 = dataclasses.replace(V32, indexer=None)
K3 = MlaConfig(**SMALL, value=16, scale=24**-0.5, output_gate=True)
K31 = dataclasses.replace(
    K3, indexer=IndexerConfig(heads=16, key=12, top_k=6, eps=1e-5, rope=0, interleaved=False)
)  # fmt: skip
LINEAR = dataclasses.replace(K3, query_latent=None, output_gate=False)
ALL = {"v32": V32, "glm": GLM, "k25": K25, "k3": K3, "k31": K31, "linear": LINEAR}
every_config = pytest.mark.parametrize("config", ALL.values(), ids=ALL)


def rotation(c: MlaConfig) -> Any:
    return None if c.rope is None else (c.rope, c.key_rope)


def wide(c: MlaConfig) -> dict[str, Any]:
    return {"rope": rotation(c), "dtype": torch.float64}


# ---- transformers ----------------------------------------------------------------------------------------------------


def theirs(kind: str, c: MlaConfig, shared: bool = False) -> tuple[Any, Any]:
    """An attention layer of transformers and its rotation."""
    transformers = pytest.importorskip("transformers")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": c.rope.theta}
    if (y := c.rope.yarn) is not None:
        rope |= {
            "rope_type": "yarn", "factor": y.factor, "beta_fast": y.beta_fast, "beta_slow": y.beta_slow,
            "mscale": y.mscale, "mscale_all_dim": y.mscale_all, "original_max_position_embeddings": y.original_len,
        }  # fmt: skip
    sizes: dict[str, Any] = {
        "hidden_size": EMBED, "num_attention_heads": c.heads, "num_key_value_heads": c.heads, "num_hidden_layers": 2,
        "q_lora_rank": c.query_latent, "kv_lora_rank": c.latent, "qk_nope_head_dim": c.key_nope,
        "qk_rope_head_dim": c.key_rope, "v_head_dim": c.value, "rope_parameters": rope, "attn_implementation": "eager",
    }  # fmt: skip
    if c.indexer is not None:
        i = c.indexer
        sizes |= {"index_n_heads": i.heads, "index_head_dim": i.key, "index_topk": i.top_k}
    if kind == "GlmMoeDsa":
        sizes["indexer_types"] = ["full", "shared"]
    config = getattr(transformers, f"{kind}Config")(**sizes)
    package = {"DeepseekV32": "deepseek_v32", "GlmMoeDsa": "glm_moe_dsa", "DeepseekV3": "deepseek_v3"}[kind]
    module = __import__(f"transformers.models.{package}.modeling_{package}", fromlist=["x"])
    attention = getattr(module, f"{kind}Attention")(config, int(shared)).eval()
    return attention, getattr(module, f"{kind}RotaryEmbedding")(config)


@torch.no_grad()
def their_output(attention: Any, rotary: Any, x: Tensor, **more: Any) -> Any:
    positions = torch.arange(x.shape[1])[None]
    return attention(x, rotary(x, positions), causal(x.shape[1]).expand(len(x), -1, -1, -1), **more)


@pytest.mark.parametrize("kind, config", [("DeepseekV32", V32), ("GlmMoeDsa", GLM), ("DeepseekV3", K25)])
@pytest.mark.parametrize("tokens", [5, 33])  # all tokens are selected, and few of them
def test_a_layer_is_that_of_transformers(kind, config, tokens):
    specs = layers.mla_specs(config, EMBED)
    p, x = values(specs), torch.randn(2, tokens, EMBED)
    attention, rotary = theirs(kind, config)
    load(attention, specs, p)
    want = their_output(attention, rotary, x)
    y, _, selected = layers.mla(p, config, x)
    assert_close(y, want[0])
    assert (selected is None) == (config.indexer is None or tokens <= config.indexer.top_k)
    if selected is not None and kind == "GlmMoeDsa":
        for t in range(tokens):  # theirs names tokens after the query where there are too few before it
            ours, seen = selected[:, t], [s[s <= t] for s in want[2][:, t]]
            assert all(set(o[o >= 0].tolist()) == set(s.tolist()) for o, s in zip(ours, seen, strict=True))


def test_a_layer_that_shares_a_selection_is_that_of_transformers():
    specs = layers.mla_specs(GLM_SHARED, EMBED)
    assert specs.indexer is None
    p, x = values(specs), torch.randn(2, 33, EMBED)
    first = values(layers.mla_specs(GLM, EMBED))
    selected = layers.mla(first, GLM, torch.randn(2, 33, EMBED))[2]
    attention, rotary = theirs("GlmMoeDsa", GLM, shared=True)
    load(attention, specs, p)
    # -1 for tokens that do not exist: theirs has any token after the query there
    want = their_output(attention, rotary, x, prev_topk_indices=torch.where(selected < 0, 32, selected))
    y, state, same = layers.mla(p, GLM_SHARED, x, selected=selected)
    assert_close(y[:, :32], want[0][:, :32])  # the last query does see token 32
    assert same is selected
    assert state.index is None


# ---- plain forms -----------------------------------------------------------------------------------------------------


def rms(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * w


def plain_gated(p: Any, c: MlaConfig, x: Tensor) -> Tensor:
    """One sequence `[T, D]`, head by head, from the fact sheet of models, section 2.4."""
    eps = float(torch.tensor(1e-6))
    low = x if p.query_down is None else rms(x @ p.query_down.mT, p.query_norm, eps)
    cached = x @ p.latent.mT
    latent, shared = rms(cached[:, : c.latent], p.latent_norm, eps), cached[:, c.latent :]
    y = torch.zeros_like(x)
    hidden = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    for h in range(c.heads):
        q = low @ p.query[h].mT
        k = torch.cat([latent @ p.up[h, : c.key_nope].mT, shared], 1)
        scores = (q @ k.mT * float(torch.tensor(c.scale))).masked_fill(hidden, float("-inf"))
        o = scores.softmax(-1) @ (latent @ p.up[h, c.key_nope :].mT)
        if p.gate is not None:
            o = o / (1 + (-(x @ p.gate[h].mT)).exp())
        y += o @ p.out[:, h].mT
    return y


@pytest.mark.parametrize("config", [K3, LINEAR], ids=["k3", "linear"])
def test_gated_attention_without_rotation_is_the_plain_form(config):
    p, x = values(layers.mla_specs(config, EMBED), torch.float64), torch.randn(2, 11, EMBED).double()
    want = torch.stack([plain_gated(p, config, row) for row in x])
    y, state, selected = layers.mla(p, config, x)
    assert_close(y, want, 1e-12)
    assert selected is None
    assert state.index is None


def plain_selection(p: Any, c: MlaConfig, x: Tensor) -> list[list[int]]:
    """One sequence `[T, D]`, an indexer without rotation, from the fact sheet of models, section 5.3."""
    i = c.indexer
    low = rms(x @ p.query_down.mT, p.query_norm, float(torch.tensor(1e-6)))
    keys = x @ p.indexer.key.mT
    keys = keys - keys.mean(-1, keepdim=True)
    keys = keys / (keys.square().mean(-1, keepdim=True) + float(torch.tensor(i.eps))).sqrt()
    keys = keys * p.indexer.key_norm + p.indexer.key_bias
    chosen = []
    for t in range(len(x)):
        score = torch.zeros(t + 1, dtype=x.dtype)
        for h in range(i.heads):
            weight = (x[t] @ p.indexer.weights[h]) * i.heads**-0.5
            score += weight * (keys[: t + 1] @ (p.indexer.query[h] @ low[t]) * i.key**-0.5).clamp(min=0)
        chosen.append(sorted(range(t + 1), key=lambda s: (-float(score[s]), s))[: i.top_k])
    return chosen


def test_an_indexer_without_rotation_selects_what_the_plain_form_does():
    p, x = values(layers.mla_specs(K31, EMBED), torch.float64), torch.randn(1, 29, EMBED).double()
    selected = layers.mla(p, K31, x)[2]
    for ours, want in zip(selected[0].tolist(), plain_selection(p, K31, x[0]), strict=True):
        assert ours == want + [-1] * (6 - len(want))


# ---- itself ----------------------------------------------------------------------------------------------------------


def empty(c: MlaConfig, rows: int, pages: int, fill: float = 0.0) -> tuple[MlaState[Tensor], Tensor]:
    """A cache in which pages lie in no order, and its block table."""
    specs = layers.mla_state_specs(c, rows * pages + 1, PAGE, torch.float64)
    table = (torch.randperm(rows * pages) + 1).view(rows, pages).int()
    return tree.map(lambda s: torch.full(s.shape, fill, dtype=torch.float64), specs), table


def read(
    p: Any, c: MlaConfig, x: Tensor, chunks: list[int], pages: int, *, step: bool = False, fill: float = 0.0
) -> tuple[Tensor, list[Any]]:
    """`x` in chunks through a paged cache: what the layer gives, and its selections."""
    state, table = empty(c, len(x), pages, fill)
    outs, chosen, start = [], [], 0
    for size in chunks:
        held = torch.full((len(x),), start)
        batch = step_batch(table, table[:, 0], held, torch.full_like(held, size), size, PAGE, **wide(c))
        y, state, selected = layers.mla(p, c, x[:, start : start + size], state, batch, step=step and size == 1)
        outs.append(y)
        chosen.append(selected)
        start += size
    return torch.cat(outs, 1), chosen


@every_config
def test_one_by_one_in_chunks_and_at_once_are_the_same(config):
    p, x = values(layers.mla_specs(config, EMBED), torch.float64), torch.randn(2, 19, EMBED).double()
    whole, chosen = read(p, config, x, [19], 5)
    for chunks in ([1] * 19, [7, 1, 11], [18, 1]):
        for step in (False, True):
            y, parts = read(p, config, x, chunks, 5, step=step)
            assert_close(y, whole, 1e-12)
            if config.indexer is not None:
                assert torch.equal(torch.cat(parts, 1), torch.cat(chosen, 1))


@every_config
def test_what_comes_later_does_not_matter(config):
    p, x = values(layers.mla_specs(config, EMBED), torch.float64), torch.randn(1, 19, EMBED).double()
    y = layers.mla(p, config, x)[0]
    other = torch.cat([x[:, :13], torch.randn(1, 6, EMBED).double()], 1)
    assert_close(layers.mla(p, config, other)[0][:, :13], y[:, :13], 1e-13)


@every_config
def test_rows_padding_and_stale_pages_do_not_leak(config):
    p, x = values(layers.mla_specs(config, EMBED), torch.float64), torch.randn(3, 9, EMBED).double()
    before, counts = torch.tensor([0, 5, 0]), torch.tensor([9, 4, 0])
    state, table = empty(config, 3, 8, float("nan"))
    first = torch.randn(3, 5, EMBED).double()
    held = torch.zeros(3, dtype=torch.int64)
    own = step_batch(table, table[:, 0], held, before, 5, PAGE, **wide(config))
    _, state, _ = layers.mla(p, config, first, state, own)
    batch = step_batch(table, table[:, 0], before, counts, 9, PAGE, **wide(config))
    x[1, 4:] = float("nan")
    y, after, selected = layers.mla(p, config, x, state, batch)
    alone = [layers.mla(p, config, x[:1])[0][0], layers.mla(p, config, torch.cat([first[1], x[1, :4]])[None])[0][0, 5:]]
    assert_close(y[0], alone[0], 1e-12)
    assert_close(y[1, :4], alone[1], 1e-12)
    assert y[2].isfinite().all()
    if selected is not None:
        assert (selected[1, 4:] == -1).all()
        assert (selected[2] == -1).all()
    for pool in tree.leaves(after):  # page 0 takes what padding writes; nothing else of others is touched
        untouched = pool[table[2].long()]
        assert untouched.isnan().all()


def sparse_and_dense(c: MlaConfig, top_k: int) -> list[MlaConfig]:
    return [dataclasses.replace(c, indexer=dataclasses.replace(c.indexer, top_k=k)) for k in (top_k, 10**6)]


@pytest.mark.parametrize("base", [V32, GLM, K31], ids=["v32", "glm", "k31"])
def test_sparse_is_dense_where_top_k_covers_what_is_there(base):
    sparse, dense = sparse_and_dense(base, 19)
    p, x = values(layers.mla_specs(base, EMBED), torch.float64), torch.randn(2, 19, EMBED).double()
    for chunks in ([19], [7, 1, 11], [1] * 19):
        y, chosen = read(p, sparse, x, chunks, 8, step=True)  # pages for more than top_k tokens
        want, none = read(p, dense, x, chunks, 8, step=True)
        assert_close(y, want, 1e-12)
        assert none == [None] * len(chunks)
        assert all(s is not None for s in chosen)


def test_a_dense_step_still_caches_the_keys_that_a_longer_sequence_scores():
    p, x = values(layers.mla_specs(K31, EMBED), torch.float64), torch.randn(1, 9, EMBED).double()
    state, table = empty(K31, 1, 4)
    want, _ = read(p, K31, x, [9], 4)
    outs = []
    for start, size, pages in ((0, 4, 1), (4, 1, 4), (5, 4, 4)):  # one page holds no more than top_k selects
        held, counts = torch.tensor([start]), torch.tensor([size])
        batch = step_batch(table[:, :pages], table[:, 0], held, counts, size, PAGE)
        y, state, selected = layers.mla(p, K31, x[:, start : start + size], state, batch, step=size == 1)
        assert (selected is None) == (pages == 1)
        outs.append(y)
    assert_close(torch.cat(outs, 1), want, 1e-12)


def test_with_top_k_over_the_length_the_indexer_changes_nothing():
    p, x = values(layers.mla_specs(K31, EMBED), torch.float64), torch.randn(2, 6, EMBED).double()
    assert torch.equal(layers.mla(p, K31, x)[0], layers.mla(tree.replace(p, indexer=None), K3, x)[0])


@pytest.mark.parametrize("config", [V32, K31, K3], ids=["v32", "k31", "k3"])
def test_everything_but_the_selection_has_gradients(config):
    specs = layers.mla_specs(config, EMBED)
    p, x = values(specs, torch.float64), torch.randn(1, 9, EMBED).double().requires_grad_()
    names, leaves = zip(*tree.items(p), strict=True)
    leaves = [leaf.requires_grad_() for leaf in leaves]

    def f(x: Tensor, *leaves: Tensor) -> Tensor:
        rest = iter(leaves)
        return layers.mla(tree.map(lambda _: next(rest), p), config, x)[0]

    assert torch.autograd.gradcheck(f, (x, *leaves), fast_mode=True)
    f(x, *leaves).sum().backward()
    without = {name for name, leaf in zip(names, leaves, strict=True) if leaf.grad is None}
    assert without == {name for name in names if name.startswith("indexer.")}


def test_caches_of_the_released_layers_are_as_wide_as_published():
    # fact sheet of models, section 5.4: 512 + 64 + 128 values a token and layer, the last only with an own indexer
    full = MlaConfig(
        heads=96, latent=512, key_nope=128, key_rope=64, value=128, scale=192**-0.5, query_latent=1536,
        output_gate=True, indexer=IndexerConfig(heads=32, key=128, top_k=2048, eps=1e-5, rope=0, interleaved=False),
    )  # fmt: skip
    shared = dataclasses.replace(full, indexer=dataclasses.replace(full.indexer, shared=True))
    specs = layers.mla_state_specs(full, 3, 128, torch.bfloat16)
    assert [s.shape for s in tree.leaves(specs)] == [(3, 128, 512), (3, 128, 64), (3, 128, 128)]
    assert layers.mla_state_specs(shared, 3, 128, torch.bfloat16).index is None
    indexer = layers.mla_specs(full, 7168).indexer
    assert sum(s.numel for s in tree.leaves(indexer)) == 7_438_592  # section 5.2
    names = {s.source[0]: s.stored for s in tree.leaves(layers.mla_specs(full, 7168))}
    assert names["indexer.wq_b.weight"] == (4096, 1536)
    assert names["indexer.k_norm.bias"] == (128,)
    assert names["g_proj.weight"] == (12288, 7168)


def test_a_shared_layer_without_a_selection_is_an_error_of_ours():
    p, x = values(layers.mla_specs(GLM_SHARED, EMBED)), torch.randn(1, 9, EMBED)
    with pytest.raises(AssertionError, match="given none"):
        layers.mla(p, GLM_SHARED, x)


def test_a_rotated_layer_refuses_a_batch_without_angles():
    p, x = values(layers.mla_specs(V32, EMBED)), torch.randn(1, 3, EMBED)
    state = layers.zero_state(layers.mla_state_specs(V32, 2, 3, torch.float32), x)
    batch: Batch[Tensor] = layers.row_batch(1, 3)
    with pytest.raises(AssertionError, match="without the angles"):
        layers.mla(p, V32, x, state, batch)


def test_the_selection_is_tapped():
    from kimi_graph.taps import collect

    p, x = values(layers.mla_specs(K31, EMBED)), torch.randn(1, 9, EMBED)
    with collect(["selected"]) as found:
        selected = layers.mla(p, K31, x)[2]
    assert torch.equal(found["selected"], selected)


def test_operators_take_bfloat16_layers(monkeypatch):
    """Scores of the indexer are summed in float32 whatever the layer's dtype."""
    p, x = values(layers.mla_specs(V32, EMBED), torch.bfloat16), torch.randn(1, 9, EMBED).bfloat16()
    seen = []
    select = ops.select_keys.reference
    monkeypatch.setattr(ops.select_keys, "reference", lambda *a: seen.append([v.dtype for v in a[:3]]) or select(*a))
    y, state, _ = layers.mla(p, V32, x)
    assert y.dtype == state.index.dtype == torch.bfloat16
    assert seen == [[torch.bfloat16, torch.float32, torch.bfloat16]]
