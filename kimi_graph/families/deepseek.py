"""DeepSeek-V3.2, GLM-5, and the text of Kimi K2.5, which is DeepSeek-V3.

Source: fact sheet of models, sections 5.1 and 6.1.
"""

from collections.abc import Iterator
from typing import Any

from kimi_graph.config import DenseConfig, IndexerConfig, LayerConfig, MlaConfig, MoeConfig, Names
from kimi_graph.config_keys import Entry, Key, UnfitError, flag, integer, list_of, one_of, only, optional, token_ids

from .common import EXPERTS, INDEX_EPS, MAX_EXPERTS, TEXT, Values, is_moe, text_faults, text_fields
from .quant import QUANTISATION, quant_faults, read_quant
from .rope import ROPE, read_rope, rope_faults, score_scale

DEEPSEEK: dict[str, Entry] = TEXT | ROPE | {
    "max_position_embeddings": Key(integer()),
    "hidden_act": Key(only("silu", "the activation of these models"), "silu"),
    "bos_token_id": Key(optional(integer(0)), None),
    "eos_token_id": Key(token_ids),
    "pad_token_id": Key(optional(integer(0)), None),
    "q_lora_rank": Key(integer()),
    "qk_head_dim": Key(optional(integer()), None),
    "n_routed_experts": Key(EXPERTS, spellings=("num_experts", "num_local_experts")),
    "num_experts_per_tok": Key(integer(1, MAX_EXPERTS), spellings=("num_experts_per_token",)),
    "n_shared_experts": Key(integer()),
    "norm_topk_prob": Key(only(True, "weights of the chosen experts are divided by their sum"), True),
    "scoring_func": Key(only("sigmoid", "the router's scores"), "sigmoid"),
    "moe_router_dtype": Key(only("float32", "the router computes in float32"), "float32"),
    "n_group": Key(integer(1, MAX_EXPERTS), 1),
    "mlp_layer_types": Key(optional(list_of(one_of("dense", "sparse"))), None),
    "mlp_bias": Key(only(False, "linear layers of these models have no bias"), False),
    "quantization_config": QUANTISATION,
}  # fmt: skip

_INDEXER: dict[str, Entry] = {
    "index_n_heads": Key(integer()),
    "index_head_dim": Key(integer()),
    "index_topk": Key(integer()),
}

V32: dict[str, Entry] = DEEPSEEK | _INDEXER | {"indexer_rope_interleave": Key(flag, False)}


def _pattern(x: Any) -> tuple[str, ...]:
    """`index_topk_pattern`: one letter a layer, or a list of the words."""
    words = {"F": "full", "S": "shared"}
    if isinstance(x, str) and x and set(x) <= words.keys():
        return tuple(words[c] for c in x)
    try:
        return list_of(one_of(*words.values()))(x)
    except UnfitError:
        raise UnfitError("a letter F (full) or S (shared) for each layer") from None


GLM: dict[str, Entry] = DEEPSEEK | _INDEXER | {
    "indexer_rope_interleave": Key(flag, True),
    "indexer_types": Key(optional(list_of(one_of("full", "shared"))), None),
    "index_topk_pattern": Key(optional(_pattern), None),
    "index_topk_freq": Key(optional(integer()), None),
    "index_skip_topk_offset": Key(optional(integer(0)), None),
}  # fmt: skip

# head_dim is 64 or 192 for the same rotation: belongs to no tensor (fact sheet, section 5.1). layer_types names a class
# of caches. Drafting may reuse a selection; drafts are not made here.
DEEPSEEK_INERT = frozenset({"head_dim", "layer_types", "index_share_for_mtp_iteration"})


def deepseek_faults(v: Values) -> Iterator[str]:
    yield from text_faults(v, experts="n_routed_experts", top_k="num_experts_per_tok", groups="n_group")
    yield from rope_faults(v)
    yield from quant_faults(v["quantization_config"], "quantization_config.")
    key = v["qk_nope_head_dim"] + v["qk_rope_head_dim"]
    if v["qk_head_dim"] not in (None, key):
        yield f"qk_head_dim: found {v['qk_head_dim']}, expected {key} (qk_nope_head_dim + qk_rope_head_dim)."
    layers = v["num_hidden_layers"]
    kinds = tuple("sparse" if is_moe(v, i) else "dense" for i in range(layers))
    yield from _listed_faults("mlp_layer_types", v["mlp_layer_types"], kinds, "first_k_dense_replace, moe_layer_freq")
    if (index := v.get("index_head_dim")) is not None and index < v["qk_rope_head_dim"]:
        yield f"index_head_dim: found {index}, expected {v['qk_rope_head_dim']} (qk_rope_head_dim) or more."


def _listed_faults(key: str, listed: tuple[str, ...] | None, expected: tuple[str, ...], why: str) -> Iterator[str]:
    """A list with a word for each layer that other keys say as well."""
    if listed is None or listed == expected:
        return
    if len(listed) != len(expected):
        yield f"{key}: found {len(listed)} layers, expected {len(expected)} (num_hidden_layers)."
        return
    at = next(i for i, (a, b) in enumerate(zip(listed, expected, strict=True)) if a != b)
    yield f"{key}: found {listed[at]} for layer {at}, expected {expected[at]} ({why})."


def glm_faults(v: Values) -> Iterator[str]:
    yield from deepseek_faults(v)
    by_rule = v["index_topk_freq"] is not None or v["index_skip_topk_offset"] is not None
    given = v["indexer_types"] or v["index_topk_pattern"]
    if given and by_rule:
        key = "indexer_types" if v["indexer_types"] else "index_topk_pattern"
        yield from _listed_faults(key, given, _kinds_by_rule(v), "index_topk_freq, index_skip_topk_offset")
    kinds = indexer_kinds(v)
    if len(kinds) != v["num_hidden_layers"]:
        yield f"indexer_types: found {len(kinds)} layers, expected {v['num_hidden_layers']} (num_hidden_layers)."
    elif kinds[0] != "full":
        yield "indexer_types: found shared for layer 0, expected full: there is no selection yet that it could share."
    pattern = v["index_topk_pattern"]
    if v["indexer_types"] and pattern:
        yield from _listed_faults("index_topk_pattern", pattern, v["indexer_types"], "indexer_types")


def _kinds_by_rule(v: Values) -> tuple[str, ...]:
    """Source: fact sheet, section 5.1; without keys every layer is full. A missing offset is 2 in released code."""
    every = v["index_topk_freq"] or 1
    offset = 2 if v["index_skip_topk_offset"] is None else v["index_skip_topk_offset"]
    return tuple("shared" if max(i - offset + 1, 0) % every else "full" for i in range(v["num_hidden_layers"]))


def indexer_kinds(v: Values) -> tuple[str, ...]:
    """Which layers have an indexer of their own ("full"), and which reuse the last one's selection ("shared")."""
    return v["indexer_types"] or v["index_topk_pattern"] or _kinds_by_rule(v)


def deepseek_text(v: Values, names: Names, shared: tuple[bool, ...] | None = None) -> Values:
    """Args:
    shared: for each layer whether it reuses a selection; None: attention is dense.
    """
    rope = read_rope(v)

    def mla(reuses: bool | None) -> MlaConfig:
        return MlaConfig(
            heads=v["num_attention_heads"],
            latent=v["kv_lora_rank"],
            key_nope=v["qk_nope_head_dim"],
            key_rope=v["qk_rope_head_dim"],
            value=v["v_head_dim"],
            scale=score_scale(v["qk_nope_head_dim"] + v["qk_rope_head_dim"], rope.yarn),
            query_latent=v["q_lora_rank"],
            rope=rope,
            indexer=None if reuses is None else _indexer(v, reuses),
        )

    dense = DenseConfig(ffn=v["intermediate_size"])
    moe = MoeConfig(
        experts=v["n_routed_experts"],
        top_k=v["num_experts_per_tok"],
        ffn=v["moe_intermediate_size"],
        shared_ffn=v["n_shared_experts"] * v["moe_intermediate_size"],
        scale=v["routed_scaling_factor"],
        groups=v["n_group"],
        kept_groups=v["topk_group"],
    )
    mixers = {reuses: mla(reuses) for reuses in shared or (None,)}
    layers = tuple(
        LayerConfig(mixer=mixers[shared[i] if shared else None], ffn=moe if is_moe(v, i) else dense)
        for i in range(v["num_hidden_layers"])
    )
    quant = read_quant(v["quantization_config"])
    return text_fields(v, names, "max_position_embeddings") | {"layers": layers, "quant": quant}


def _indexer(v: Values, shared: bool) -> IndexerConfig:
    return IndexerConfig(
        heads=v["index_n_heads"],
        key=v["index_head_dim"],
        top_k=v["index_topk"],
        eps=INDEX_EPS,
        rope=v["qk_rope_head_dim"],
        interleaved=v["indexer_rope_interleave"],
        shared=shared,
    )
