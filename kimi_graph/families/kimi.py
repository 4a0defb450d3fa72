"""Kimi Linear, and the text of Kimi K3 and K3.1.

Source: fact sheet of models, sections 1.1, 2.1 and 5.5.
"""

import math
from collections import Counter
from collections.abc import Iterator

import torch

from kimi_graph.config import (
    DenseConfig,
    IndexerConfig,
    KdaConfig,
    LayerConfig,
    MlaConfig,
    MoeConfig,
    Names,
    SituConfig,
)
from kimi_graph.config_keys import (
    Entry,
    Key,
    Section,
    flag,
    integer,
    list_of,
    one_of,
    only,
    optional,
    real,
    some,
    token_ids,
)

from .common import EXPERTS, INDEX_EPS, MAX_EXPERTS, MAX_LAYERS, TEXT, Values, is_moe, text_faults, text_fields
from .quant import QUANTISATION, quant_faults, read_quant
from .rope import score_scale

_KDA: dict[str, Entry] = {
    "num_heads": Key(integer()),
    "head_dim": Key(integer()),
    "short_conv_kernel_size": Key(integer(2, 64)),
    "full_attn_layers": Key(list_of(integer(1, MAX_LAYERS))),
    "kda_layers": Key(list_of(integer(1, MAX_LAYERS))),
    "gate_lower_bound": Key(optional(real(-math.inf, 0)), None),
    "use_full_rank_gate": Key(
        only(False, "the output gate of kimi_linear is a product of two low-rank matrices"), False
    ),
}

KIMI: dict[str, Entry] = TEXT | {
    "model_max_length": Key(integer(), spellings=("max_position_embeddings",)),
    "hidden_act": Key(only("silu", "the activation of kimi_linear"), "silu"),
    "bos_token_id": Key(integer(0)),
    "eos_token_id": Key(token_ids),
    "pad_token_id": Key(integer(0)),
    "linear_attn_config": Section(_KDA),
    "q_lora_rank": Key(only(None, "queries of kimi_linear are projected by one full matrix"), None),
    "mla_use_nope": Key(only(True, "attention of kimi_linear has no rotary positions")),
    "rope_scaling": Key(only(None, "there are no rotary positions to scale: mla_use_nope is true"), None),
    "rope_parameters": Key(only(None, "there are no rotary positions: mla_use_nope is true"), None),
    "num_experts": Key(EXPERTS, spellings=("num_local_experts",)),
    "num_experts_per_token": Key(integer(1, MAX_EXPERTS), spellings=("num_experts_per_tok",)),
    "num_shared_experts": Key(integer(), spellings=("n_shared_experts",)),
    "moe_renormalize": Key(
        only(True, "weights of the chosen experts are divided by their sum"), True, spellings=("norm_topk_prob",)
    ),
    "moe_router_activation_func": Key(only("sigmoid", "the router's scores"), "sigmoid"),
    "num_expert_group": Key(integer(1, MAX_EXPERTS), 1, spellings=("n_group",)),
    "use_grouped_topk": Key(flag, True),
    "quantization_config": Key(only(None, "quantised checkpoints of kimi_linear are not implemented"), None),
}
# head_dim is 2304 / 32 = 72 in the released file and belongs to no tensor; rope_theta has nothing to rotate.
KIMI_INERT = frozenset({"head_dim", "rope_theta"})

K3: dict[str, Entry] = KIMI | {
    "hidden_act": Key(one_of("situ", "silu")),
    "activation_situ_beta": Key(optional(real(0)), None),
    "activation_situ_linear_beta": Key(optional(real(0)), None),
    "linear_attn_config": Section(_KDA | {"use_full_rank_gate": Key(flag)}),
    "q_lora_rank": Key(optional(integer())),
    "mla_use_output_gate": Key(flag),
    "routed_expert_hidden_size": Key(optional(integer())),
    "latent_moe_use_norm": Key(flag),
    "attn_res_block_size": Key(optional(integer())),
    "quantization_config": QUANTISATION,
    # No released file shows this section: its keys are spelled as in DeepSeek-V3.2, or as elsewhere in K3.
    "dsa_config": Section(
        {
            "index_n_heads": Key(integer(), spellings=("num_heads", "n_heads")),
            "index_head_dim": Key(integer(), spellings=("head_dim",)),
            "index_topk": Key(integer(), spellings=("topk", "top_k")),
            "dsa_layers": Key(list_of(integer(1, MAX_LAYERS)), spellings=("layers", "full_attn_layers")),
        },
        optional=True,
    ),
}


def kimi_faults(v: Values) -> Iterator[str]:
    yield from text_faults(v, experts="num_experts", top_k="num_experts_per_token", groups="num_expert_group")
    if v["num_expert_group"] > 1 and not v["use_grouped_topk"]:
        yield f"use_grouped_topk: found false, expected true: num_expert_group is {v['num_expert_group']}."
    yield from _layer_list_faults(v["linear_attn_config"], v["num_hidden_layers"])


def _layer_list_faults(v: Values, layers: int) -> Iterator[str]:
    """Both lists count from 1 and are irregular in released files: together they name each layer once."""
    at = "linear_attn_config"
    full, kda = v["full_attn_layers"], v["kda_layers"]
    for key, found in (("full_attn_layers", full), ("kda_layers", kda)):
        if twice := [i for i, n in Counter(found).items() if n > 1]:
            yield f"{at}.{key}: layer {some(twice)} is listed twice."
        if beyond := {i for i in found if i > layers}:
            yield f"{at}.{key}: layer {some(beyond)}, but num_hidden_layers is {layers}; layers count from 1."
    if both := set(full) & set(kda):
        yield f"{at}: layer {some(both)} is in full_attn_layers and in kda_layers; delete it from one."
    if neither := set(range(1, layers + 1)) - set(full) - set(kda):
        yield f"{at}: layer {some(neither)} is in neither full_attn_layers nor kda_layers; layers count from 1."


def k3_faults(v: Values) -> Iterator[str]:
    yield from kimi_faults(v)
    yield from quant_faults(v["quantization_config"], "quantization_config.")
    if v["hidden_act"] == "situ":
        for key in ("activation_situ_beta", "activation_situ_linear_beta"):
            if v[key] is None:
                yield f"{key}: not given, but hidden_act is situ."
    if v["latent_moe_use_norm"] and v["routed_expert_hidden_size"] is None:
        yield "latent_moe_use_norm: found true, expected false: routed_expert_hidden_size is not given."
    if (dsa := v["dsa_config"]) is None:
        return
    full = v["linear_attn_config"]["full_attn_layers"]
    if wrong := set(dsa["dsa_layers"]) ^ set(full):
        yield f"dsa_config.dsa_layers: expected the layers of full_attn_layers; layer {some(wrong)} is in one alone."
    if v["q_lora_rank"] is None:
        yield "dsa_config: found an indexer, expected none: it reads the low-rank query, and q_lora_rank is null."


def kimi_text(v: Values, names: Names, stored_rates: tuple[int, ...], conv_dtype: torch.dtype | None) -> Values:
    """Kimi Linear and, with the keys that it alone has, K3."""
    a = v["linear_attn_config"]
    kda = KdaConfig(
        heads=a["num_heads"],
        key=a["head_dim"],
        value=a["head_dim"],
        conv_width=a["short_conv_kernel_size"],
        gate_rank=a["head_dim"],  # released code builds f_a_proj and g_a_proj as wide as a head
        gate_lower_bound=a["gate_lower_bound"],
        full_rank_gate=a["use_full_rank_gate"],
        stored_rates=stored_rates,
        conv_dtype=conv_dtype,
    )
    mla = MlaConfig(
        heads=v["num_attention_heads"],
        latent=v["kv_lora_rank"],
        key_nope=v["qk_nope_head_dim"],
        key_rope=v["qk_rope_head_dim"],
        value=v["v_head_dim"],
        scale=score_scale(v["qk_nope_head_dim"] + v["qk_rope_head_dim"], None),
        query_latent=v["q_lora_rank"],
        output_gate=v.get("mla_use_output_gate", False),
        indexer=_k31_indexer(v.get("dsa_config")),
    )
    situ = None
    if v["hidden_act"] == "situ":
        situ = SituConfig(beta=v["activation_situ_beta"], linear_beta=v["activation_situ_linear_beta"])
    dense = DenseConfig(ffn=v["intermediate_size"], situ=situ)
    moe = MoeConfig(
        experts=v["num_experts"],
        top_k=v["num_experts_per_token"],
        ffn=v["moe_intermediate_size"],
        shared_ffn=v["num_shared_experts"] * v["moe_intermediate_size"],
        scale=v["routed_scaling_factor"],
        groups=v["num_expert_group"],
        kept_groups=v["topk_group"],
        latent=v.get("routed_expert_hidden_size"),
        latent_norm=v.get("latent_moe_use_norm", False),
        situ=situ,
    )
    full = set(a["full_attn_layers"])
    layers = tuple(
        LayerConfig(mixer=mla if i + 1 in full else kda, ffn=moe if is_moe(v, i) else dense)
        for i in range(v["num_hidden_layers"])
    )
    return text_fields(v, names, "model_max_length") | {
        "layers": layers,
        "residual_block": v.get("attn_res_block_size"),
        "quant": read_quant(v["quantization_config"]),
    }


def _k31_indexer(v: Values | None) -> IndexerConfig | None:
    if v is None:
        return None
    return IndexerConfig(
        heads=v["index_n_heads"],
        key=v["index_head_dim"],
        top_k=v["index_topk"],
        eps=INDEX_EPS,
        rope=0,
        interleaved=False,
    )
