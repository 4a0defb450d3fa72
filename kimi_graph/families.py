"""What the config.json of each family of models means: tables of keys, what contradicts itself, and the `ModelConfig`.

No size is derived from another that the released code does not derive: hidden_size / num_attention_heads, for one, is
the width of nothing in these models.
Source: fact sheet of models, sections 1.1, 2.1, 5.1, 6, 7; what others read wrong, in the public cases C, R, V2, K11.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .config import (
    DEEPSEEK_NAMES,
    KIMI_NAMES,
    DenseConfig,
    IndexerConfig,
    KdaConfig,
    LayerConfig,
    MlaConfig,
    MoeConfig,
    Names,
    QuantConfig,
    RopeConfig,
    SituConfig,
    VisionConfig,
    YarnConfig,
)
from .config_keys import (
    Choice,
    Entry,
    Key,
    Section,
    UnfitError,
    dtype,
    flag,
    integer,
    list_of,
    one_of,
    only,
    optional,
    real,
    some,
    text,
    token_ids,
)

MAX_LAYERS = 4096
MAX_EXPERTS = 2048  # limit of the routing operators of CANN (MoeGatingTopK, MoeInitRoutingV3)
INDEX_EPS = 1e-6  # of the index key's LayerNorm: a constant of the released code (fact sheet, section 5.2)

Values = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """The files of one `model_type`.

    Attributes:
        architectures: what `architectures` may name, where the file has it.
        contradictions: values that do not fit each other, as messages; called when every single value was fine.
        build: fields of `ModelConfig` other than name, model_type and source.
    """

    architectures: tuple[str, ...]
    section: Section
    contradictions: Callable[[Values], Iterable[str]]
    build: Callable[[Values], Values]


# Keys that many files have.

# What `PretrainedConfig` of transformers writes into any file, and hints for training or for running Python code.
INERT = frozenset({
    "_name_or_path", "attention_dropout", "attn_implementation", "auto_map", "aux_loss_alpha",
    "chunk_size_feed_forward", "ep_size", "id2label", "initializer_range", "label2id", "output_attentions",
    "output_hidden_states", "output_router_logits", "pretraining_tp", "problem_type", "return_dict",
    "router_aux_loss_coef", "seq_aux", "transformers_version", "use_cache",
})  # fmt: skip

# The same, inside a nested section: how to sample, how to fine-tune, and what its own classes are called.
INERT_INSIDE = INERT | {
    "architectures", "bad_words_ids", "begin_suppress_tokens", "cross_attention_hidden_size", "decoder_start_token_id",
    "diversity_penalty", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id", "forced_eos_token_id", "is_decoder",
    "length_penalty", "max_length", "min_length", "model_type", "no_repeat_ngram_size", "num_beam_groups", "num_beams",
    "num_return_sequences", "output_scores", "prefix", "pruned_heads", "remove_invalid_values", "repetition_penalty",
    "return_dict_in_generate", "sep_token_id", "suppress_tokens", "task_specific_params", "temperature",
    "tf_legacy_loss", "tie_encoder_decoder", "tokenizer_class", "top_k", "top_p", "torchscript", "typical_p",
    "use_bfloat16",
}  # fmt: skip

_EXPERTS = integer(1, MAX_EXPERTS, " (limit of CANN's routing operators)")

_TEXT: dict[str, Entry] = {
    "vocab_size": Key(integer()),
    "hidden_size": Key(integer()),
    "num_hidden_layers": Key(integer(1, MAX_LAYERS)),
    "rms_norm_eps": Key(real(0, 1)),
    "tie_word_embeddings": Key(flag, False),
    "dtype": Key(dtype, spellings=("torch_dtype",)),
    "num_attention_heads": Key(integer()),
    "num_key_value_heads": Key(optional(integer()), None),
    "kv_lora_rank": Key(integer()),
    "qk_nope_head_dim": Key(integer()),
    "qk_rope_head_dim": Key(integer()),
    "v_head_dim": Key(integer()),
    "attention_bias": Key(only(False, "linear layers of these models have no bias"), False),
    "intermediate_size": Key(integer()),
    "moe_intermediate_size": Key(integer()),
    "first_k_dense_replace": Key(integer(0)),
    "moe_layer_freq": Key(integer(1), 1),
    "routed_scaling_factor": Key(real(0)),
    "topk_method": Key(only("noaux_tc", "selection with a correction bias"), "noaux_tc"),
    "topk_group": Key(integer(), 1),
    "num_nextn_predict_layers": Key(integer(0, MAX_LAYERS), 0),  # draft layers: their tensors are passed over
    "is_encoder_decoder": Key(only(False, "this is a decoder"), False),
    "add_cross_attention": Key(only(False, "this is a decoder"), False),
}


def _text_faults(v: Values, *, experts: str, top_k: str, groups: str) -> Iterator[str]:
    """Contradictions that any text model can have; the arguments are keys that families spell differently."""
    heads, kv_heads = v["num_attention_heads"], v["num_key_value_heads"]
    if kv_heads not in (None, heads):
        yield f"num_key_value_heads: found {kv_heads}, expected {heads} (num_attention_heads): heads share one latent."
    if v[top_k] > v[experts]:
        yield f"{top_k}: found {v[top_k]}, expected at most {v[experts]} ({experts})."
    layers, dense = v["num_hidden_layers"], v["first_k_dense_replace"]
    if dense > layers:
        yield f"first_k_dense_replace: found {dense}, expected at most {layers} (num_hidden_layers)."
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        ids = v[key] if isinstance(v[key], tuple) else () if v[key] is None else (v[key],)
        for token in ids:
            if token >= v["vocab_size"]:
                yield f"{key}: found {token}, expected at most {v['vocab_size'] - 1} (vocab_size {v['vocab_size']})."
    yield from _group_faults(v[experts], v[top_k], v[groups], v["topk_group"], groups, experts)


def _group_faults(experts: int, top_k: int, groups: int, kept: int, key: str, experts_key: str) -> Iterator[str]:
    """Grouped routing: the two best experts score a group, a few groups are kept, experts are chosen inside them."""
    if experts % groups or (groups > 1 and experts < 2 * groups):
        yield f"{key}: found {groups}, expected a divisor of {experts} ({experts_key}), two experts a group at least."
    elif kept > groups:
        yield f"topk_group: found {kept}, expected at most {groups} ({key})."
    elif groups > 1 and kept * (experts // groups) < top_k:
        yield f"topk_group: found {kept}, expected more: {kept} groups of {experts // groups} hold no {top_k} experts."


def _text_fields(v: Values, names: Names, max_len: str) -> Values:
    """Fields of `ModelConfig` that all text models have; without pad token sequences are filled up with their end."""
    return {
        "vocab": v["vocab_size"],
        "embed": v["hidden_size"],
        "norm_eps": v["rms_norm_eps"],
        "tied": v["tie_word_embeddings"],
        "names": names,
        "draft_layers": v["num_nextn_predict_layers"],
        "max_len": v[max_len],
        "dtype": v["dtype"],
        "bos": v["bos_token_id"],
        "eos": v["eos_token_id"],
        "pad": v["eos_token_id"][0] if v["pad_token_id"] is None else v["pad_token_id"],
    }


def _is_moe(v: Values, layer: int) -> bool:
    return layer >= v["first_k_dense_replace"] and layer % v["moe_layer_freq"] == 0


# Quantised weights: what the file says of them. Which tensors are quantised, the checkpoint's headers decide.

_NOT_GIVEN = only(None, "quantised activations are not implemented")

_COMPRESSED = Section(
    {
        "format": Key(one_of("pack-quantized", "mxfp4-pack-quantized")),
        "quantization_status": Key(only("compressed", "weights are packed in the file"), "compressed"),
        "ignore": Key(list_of(text), ()),
        "kv_cache_scheme": Key(only(None, "quantised caches are not a property of the checkpoint here"), None),
        "config_groups": Section(
            {
                "group_0": Section(
                    {
                        "format": Key(optional(text), None),
                        "targets": Key(list_of(only("Linear", "what is quantised"))),
                        "input_activations": Key(_NOT_GIVEN, None),
                        "output_activations": Key(_NOT_GIVEN, None),
                        "weights": Section(
                            {
                                "num_bits": Key(integer(1, 64)),
                                "type": Key(one_of("int", "float")),
                                "group_size": Key(integer()),
                                "strategy": Key(only("group", "a scale for every group_size inputs")),
                                "symmetric": Key(only(True, "there are no zero points")),
                                "dynamic": Key(only(False, "weights are quantised ahead"), False),
                                "actorder": Key(only(None, "inputs keep their order"), None),
                                "scale_dtype": Key(optional(text), None),
                                "zp_dtype": Key(only(None, "there are no zero points"), None),
                            },
                            inert=frozenset({"block_structure", "observer", "observer_kwargs"}),
                        ),
                    }
                )
            }
        ),
    },
    inert=frozenset({"global_compression_ratio", "version"}),
)

_FP8 = Section(
    {
        "activation_scheme": Key(only("dynamic", "activations are quantised as they come")),
        "fmt": Key(only("e4m3", "weights are float8 E4M3"), "e4m3"),
        "scale_fmt": Key(optional(only("ue8m0", "scales are powers of two")), None),
        "weight_block_size": Key(list_of(only(128, "blocks are 128 x 128"), 2)),
    },
    inert=frozenset({"ignored_layers", "modules_to_not_convert"}),
)

QUANTISATION = Choice(
    ("quant_method",),
    {"compressed-tensors": _COMPRESSED, "fp8": _FP8},
    "others would be read as something they are not",
)

# format in the file: ours, and the weights it must have
_PACKED = {
    "pack-quantized": ("int4", {"num_bits": 4, "type": "int"}),
    "mxfp4-pack-quantized": ("mxfp4", {"num_bits": 4, "type": "float", "group_size": 32}),
}


def _quant_faults(v: Values | None, at: str) -> Iterator[str]:
    if v is None or v["kind"] != "compressed-tensors":
        return
    name, group = v["format"], v["config_groups"]["group_0"]
    inside = f"{at}config_groups.group_0."
    for key, expected in _PACKED[name][1].items():
        if group["weights"][key] != expected:
            yield f"{inside}weights.{key}: found {group['weights'][key]}, expected {expected} ({at}format is {name})."
    if group["format"] not in (None, name):
        yield f"{inside}format: found {group['format']}, expected {name} ({at}format)."
    if name.startswith("mxfp4") and (scale := group["weights"]["scale_dtype"]) not in (None, "torch.uint8"):
        yield f"{inside}weights.scale_dtype: found {scale}, expected torch.uint8 (exponents, {at}format is {name})."


def _quant(v: Values | None) -> QuantConfig | None:
    if v is None:
        return None
    if v["kind"] == "fp8":
        rows, columns = v["weight_block_size"]
        return QuantConfig(format="fp8", block=(rows, columns), activations="dynamic", ignore=())
    size = v["config_groups"]["group_0"]["weights"]["group_size"]
    return QuantConfig(format=_PACKED[v["format"]][0], block=(1, size), activations=None, ignore=v["ignore"])


# Rotary positions.

_YARN: dict[str, Entry] = {
    "factor": Key(real(0)),
    "original_max_position_embeddings": Key(integer()),
    "beta_fast": Key(real(0)),
    "beta_slow": Key(real(0)),
    "mscale": Key(real(0)),
    "mscale_all_dim": Key(real(0)),
}
_THETA: dict[str, Entry] = {"rope_theta": Key(real(1))}
_ROPE_KINDS = "of another kind positions would be left unscaled"
ROPE: dict[str, Entry] = {
    "rope_theta": Key(optional(real(1)), None),
    "rope_scaling": Choice(("type", "rope_type"), {"yarn": Section(_YARN), "default": Section({})}, _ROPE_KINDS),
    "rope_parameters": Choice(
        ("rope_type", "type"), {"yarn": Section({**_THETA, **_YARN}), "default": Section(_THETA)}, _ROPE_KINDS
    ),
    "rope_interleave": Key(only(True, "rotated pairs are neighbours"), True),
}


def _rope_faults(v: Values) -> Iterator[str]:
    scaling, parameters, theta = v["rope_scaling"], v["rope_parameters"], v["rope_theta"]
    if v["qk_rope_head_dim"] % 2:
        yield f"qk_rope_head_dim: found {v['qk_rope_head_dim']}, expected an even number: channels turn in pairs."
    if theta is None and parameters is None:
        yield "rope_theta: not given, and it has no default; rope_parameters would do as well."
    if parameters is None:
        return
    if theta not in (None, parameters["rope_theta"]):
        yield f"rope_theta: {theta:g} and rope_parameters.rope_theta: {parameters['rope_theta']:g} differ; delete one."
    if scaling is not None and _bands(scaling) != _bands(parameters):
        yield "rope_scaling and rope_parameters differ; delete one."


def _bands(v: Values) -> YarnConfig | None:
    if v["kind"] != "yarn":
        return None
    return YarnConfig(
        factor=v["factor"],
        original_len=v["original_max_position_embeddings"],
        beta_fast=v["beta_fast"],
        beta_slow=v["beta_slow"],
        mscale=v["mscale"],
        mscale_all=v["mscale_all_dim"],
    )


def _rope(v: Values) -> RopeConfig:
    scaling, parameters = v["rope_scaling"], v["rope_parameters"]
    given = parameters or scaling
    theta = parameters["rope_theta"] if v["rope_theta"] is None else v["rope_theta"]
    return RopeConfig(theta=theta, interleaved=v["rope_interleave"], yarn=None if given is None else _bands(given))


def score_scale(key: int, yarn: YarnConfig | None) -> float:
    """What attention scores are multiplied with: `key ** -0.5`, with YaRN times the square of its mscale."""
    stretch = 1.0
    if yarn is not None and yarn.factor > 1:
        stretch = 0.1 * yarn.mscale_all * math.log(yarn.factor) + 1
    return key**-0.5 * stretch**2


# Kimi Linear, and the text of Kimi K3.

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

_KIMI: dict[str, Entry] = _TEXT | {
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
    "num_experts": Key(_EXPERTS, spellings=("num_local_experts",)),
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
_KIMI_INERT = frozenset({"head_dim", "rope_theta"})

_K3: dict[str, Entry] = _KIMI | {
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


def _kimi_faults(v: Values) -> Iterator[str]:
    yield from _text_faults(v, experts="num_experts", top_k="num_experts_per_token", groups="num_expert_group")
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


def _k3_faults(v: Values) -> Iterator[str]:
    yield from _kimi_faults(v)
    yield from _quant_faults(v["quantization_config"], "quantization_config.")
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


def _kimi_text(v: Values, names: Names, stored_rates: tuple[int, ...], conv_dtype: torch.dtype | None) -> Values:
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
        LayerConfig(mixer=mla if i + 1 in full else kda, ffn=moe if _is_moe(v, i) else dense)
        for i in range(v["num_hidden_layers"])
    )
    return _text_fields(v, names, "model_max_length") | {
        "layers": layers,
        "residual_block": v.get("attn_res_block_size"),
        "quant": _quant(v["quantization_config"]),
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


def _kimi_linear(v: Values) -> Values:
    return _kimi_text(v, KIMI_NAMES, (1, 1, v["linear_attn_config"]["num_heads"], 1), None)


# DeepSeek-V3.2, GLM-5, and the text of Kimi K2.5 (DeepSeek-V3).

_DEEPSEEK: dict[str, Entry] = _TEXT | ROPE | {
    "max_position_embeddings": Key(integer()),
    "hidden_act": Key(only("silu", "the activation of these models"), "silu"),
    "bos_token_id": Key(optional(integer(0)), None),
    "eos_token_id": Key(token_ids),
    "pad_token_id": Key(optional(integer(0)), None),
    "q_lora_rank": Key(integer()),
    "qk_head_dim": Key(optional(integer()), None),
    "n_routed_experts": Key(_EXPERTS, spellings=("num_experts", "num_local_experts")),
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

_V32: dict[str, Entry] = _DEEPSEEK | _INDEXER | {"indexer_rope_interleave": Key(flag, False)}


def _pattern(x: Any) -> tuple[str, ...]:
    """`index_topk_pattern`: one letter a layer, or a list of the words."""
    words = {"F": "full", "S": "shared"}
    if isinstance(x, str) and x and set(x) <= words.keys():
        return tuple(words[c] for c in x)
    try:
        return list_of(one_of(*words.values()))(x)
    except UnfitError:
        raise UnfitError("a letter F (full) or S (shared) for each layer") from None


_GLM: dict[str, Entry] = _DEEPSEEK | _INDEXER | {
    "indexer_rope_interleave": Key(flag, True),
    "indexer_types": Key(optional(list_of(one_of("full", "shared"))), None),
    "index_topk_pattern": Key(optional(_pattern), None),
    "index_topk_freq": Key(optional(integer()), None),
    "index_skip_topk_offset": Key(optional(integer(0)), None),
}  # fmt: skip

# head_dim is 64 or 192 for the same rotation: belongs to no tensor (fact sheet, section 5.1). layer_types names a class
# of caches. Drafting may reuse a selection; drafts are not made here.
_DEEPSEEK_INERT = frozenset({"head_dim", "layer_types", "index_share_for_mtp_iteration"})


def _deepseek_faults(v: Values) -> Iterator[str]:
    yield from _text_faults(v, experts="n_routed_experts", top_k="num_experts_per_tok", groups="n_group")
    yield from _rope_faults(v)
    yield from _quant_faults(v["quantization_config"], "quantization_config.")
    key = v["qk_nope_head_dim"] + v["qk_rope_head_dim"]
    if v["qk_head_dim"] not in (None, key):
        yield f"qk_head_dim: found {v['qk_head_dim']}, expected {key} (qk_nope_head_dim + qk_rope_head_dim)."
    layers = v["num_hidden_layers"]
    kinds = tuple("sparse" if _is_moe(v, i) else "dense" for i in range(layers))
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


def _glm_faults(v: Values) -> Iterator[str]:
    yield from _deepseek_faults(v)
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


def _deepseek_text(v: Values, names: Names, shared: tuple[bool, ...] | None = None) -> Values:
    """Args:
    shared: for each layer whether it reuses a selection; None: attention is dense.
    """
    rope = _rope(v)

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
        LayerConfig(mixer=mixers[shared[i] if shared else None], ffn=moe if _is_moe(v, i) else dense)
        for i in range(v["num_hidden_layers"])
    )
    quant = _quant(v["quantization_config"])
    return _text_fields(v, names, "max_position_embeddings") | {"layers": layers, "quant": quant}


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


def _deepseek_v32(v: Values) -> Values:
    return _deepseek_text(v, DEEPSEEK_NAMES, (False,) * v["num_hidden_layers"])


def _glm(v: Values) -> Values:
    return _deepseek_text(v, DEEPSEEK_NAMES, tuple(kind == "shared" for kind in indexer_kinds(v)))


# Vision: MoonViT3d. Native files of transformers spell some keys without `vt_` and `init_`.

_MERGE_TYPE = "patches are merged in space and averaged over time"
_VISION: dict[str, Entry] = {
    "vt_hidden_size": Key(integer(), spellings=("hidden_size",)),
    "vt_num_hidden_layers": Key(integer(1, MAX_LAYERS), spellings=("num_hidden_layers",)),
    "vt_num_attention_heads": Key(integer(), spellings=("num_attention_heads",)),
    "vt_intermediate_size": Key(integer(), spellings=("intermediate_size",)),
    "patch_size": Key(integer()),
    "init_pos_emb_height": Key(integer(), spellings=("pos_emb_height",)),
    "init_pos_emb_width": Key(integer(), spellings=("pos_emb_width",)),
    "init_pos_emb_time": Key(integer(), spellings=("pos_emb_time",)),
    "pos_emb_type": Key(only("divided_fixed", "a learned grid and a fixed time table"), "divided_fixed"),
    "merge_kernel_size": Key(list_of(integer(), 2)),
    "merge_type": Key(only("sd2_tpool", _MERGE_TYPE)),
    "mm_hidden_size": Key(integer()),
    "text_hidden_size": Key(integer()),
    "activation_func": Key(only("gelu_pytorch_tanh", "of the tower"), "gelu_pytorch_tanh", ("hidden_act",)),
    "projector_hidden_act": Key(only("gelu", "of the projector, exact")),
    "projector_ln_eps": Key(real(0, 1)),
    "in_patch_limit": Key(optional(integer()), None),  # released files keep it in preprocessor_config.json
}

_K25_VISION = Section(
    _VISION | {
        "mm_projector_type": Key(only("patchmerger", "norm, two linear layers")),
        "pos_emb_interpolation_mode": Key(one_of("bicubic", "bilinear"), "bicubic"),
        "video_attn_type": Key(only("spatial_temporal", "all frames attend to each other"), "spatial_temporal"),
    },
    inert=frozenset({"_attn_implementation", "model_type"}),
)  # fmt: skip

_K3_VISION = Section(
    _VISION | {
        "qkv_hidden_size": Key(integer()),
        "mm_projector_type": Key(only("patchmergerv2", "two linear layers, norm")),
        "pos_emb_interpolation_mode": Key(one_of("bicubic", "bilinear")),
        "mlp_type": Key(only("mlp2", "two linear layers"), "mlp2"),
        "norm_type": Key(only("rmsnorm", "of the tower")),
        "attn_bias": Key(only(False, "the tower of kimi_k3 has no biases")),
        "linear_bias": Key(only(False, "the tower of kimi_k3 has no biases")),
        "patch_embed_proj_bias": Key(only(False, "the tower of kimi_k3 has no biases")),
        "video_attn_type": Key(only("spatial_temporal", "all frames attend to each other"), "spatial_temporal"),
    },
    inert=frozenset({"_attn_implementation", "model_type"}),
)  # fmt: skip

# Patches of one image. The released preprocessor_config.json of K3 is not known: 65,536 is a third party's default.
K25_PATCHES, K3_PATCHES = 16_384, 65_536
# Behind transparent pixels: side, light and dark of K3's preprocessor_config.json, as in
# https://github.com/smg-project/smg/pull/1991; K2.5 has none.
K3_CHESSBOARD = (8, 255, 180)
K3_VISION_EPS = torch.finfo(torch.float32).eps  # torch.nn.RMSNorm without eps (fact sheet, section 4)


def _vision_faults(v: Values, width: str, embed: int) -> Iterator[str]:
    """Args:
    width: key of the width of all heads together. embed: of the text model.
    """
    heads, all_heads = v["vt_num_attention_heads"], v[width]
    if all_heads % heads or all_heads // heads % 4:
        yield f"{width}: found {all_heads}, expected a multiple of {4 * heads}: {heads} heads, channels in pairs twice."
    if v["mm_hidden_size"] != v["vt_hidden_size"]:
        yield f"mm_hidden_size: found {v['mm_hidden_size']}, expected {v['vt_hidden_size']} (vt_hidden_size)."
    if v["text_hidden_size"] != embed:
        yield f"text_hidden_size: found {v['text_hidden_size']}, expected {embed} (text_config.hidden_size)."


def _vision(v: Values, *, width: str, k3: bool, placeholder: int) -> VisionConfig:
    merge = v["merge_kernel_size"]
    return VisionConfig(
        embed=v["vt_hidden_size"],
        layers=v["vt_num_hidden_layers"],
        heads=v["vt_num_attention_heads"],
        head_dim=v[width] // v["vt_num_attention_heads"],
        ffn=v["vt_intermediate_size"],
        patch=v["patch_size"],
        grid=(v["init_pos_emb_height"], v["init_pos_emb_width"]),
        frames=v["init_pos_emb_time"],
        interpolation=v["pos_emb_interpolation_mode"],
        bias=not k3,
        norm_eps=K3_VISION_EPS if k3 else 1e-5,
        merge=(merge[0], merge[1]),
        projector_ffn=v["vt_hidden_size"] * merge[0] * merge[1],
        projector_norm="after" if k3 else "before",
        projector_eps=v["projector_ln_eps"],
        patch_limit=v["in_patch_limit"] or (K3_PATCHES if k3 else K25_PATCHES),
        placeholder=placeholder,
        chessboard=K3_CHESSBOARD if k3 else None,
        sized_prompt=k3,
    )


# Files that hold a text and a vision model.


def _whole(text_section: Section, vision_section: Section) -> dict[str, Entry]:
    return {
        "text_config": text_section,
        "vision_config": vision_section,
        "media_placeholder_token_id": Key(integer(0), spellings=("image_token_id",)),
        "dtype": Key(optional(dtype), None, spellings=("torch_dtype",)),
        "tie_word_embeddings": Key(optional(flag), None),
        "bos_token_id": Key(optional(integer(0)), None),
        "eos_token_id": Key(optional(token_ids), None),
        "pad_token_id": Key(optional(integer(0)), None),
        "assumptions": Key(list_of(text), ()),  # ours, in files that are not as released
    }


_WHOLE_INERT = INERT | {
    "ignore_index", "image_placeholder", "use_unified_vision_chunk", "video_placeholder", "video_token_id",
    "vision_end_token_id", "vision_start_token_id",
}  # fmt: skip

_KIMI_K25 = Section(
    {
        **_whole(Section(_DEEPSEEK, INERT_INSIDE | _DEEPSEEK_INERT), _K25_VISION),
        "projection_hidden_size": Key(optional(integer()), None),
        "projection_layer_norm_eps": Key(optional(real(0, 1)), None),
    },
    _WHOLE_INERT,
)
_KIMI_K3 = Section(_whole(Section(_K3, INERT_INSIDE | _KIMI_INERT), _K3_VISION), _WHOLE_INERT)

K31 = "KimiK31ForConditionalGeneration"


def _inside(at: str, faults: Iterable[str]) -> Iterator[str]:
    for fault in faults:
        yield f"{at}.{fault}"


def _whole_faults(v: Values, text_faults: Callable[[Values], Iterable[str]], width: str) -> Iterator[str]:
    inner = v["text_config"]
    yield from _inside("text_config", text_faults(inner))
    yield from _inside("vision_config", _vision_faults(v["vision_config"], width, inner["hidden_size"]))
    for key in ("dtype", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"):
        if v[key] is not None and v[key] != inner[key]:
            given, expected = (", ".join(map(str, x)) if isinstance(x, tuple) else x for x in (v[key], inner[key]))
            yield f"{key}: found {given}, expected {expected} (text_config.{key})."
    if (token := v["media_placeholder_token_id"]) >= inner["vocab_size"]:
        yield f"media_placeholder_token_id: found {token}, expected at most {inner['vocab_size'] - 1} (vocab_size)."


def _k25_faults(v: Values) -> Iterator[str]:
    yield from _whole_faults(v, _deepseek_faults, "vt_hidden_size")
    for key, inner in (("projection_hidden_size", "vt_hidden_size"), ("projection_layer_norm_eps", "projector_ln_eps")):
        if v[key] not in (None, expected := v["vision_config"][inner]):
            yield f"{key}: found {v[key]}, expected {expected} (vision_config.{inner})."


def _k3_whole_faults(v: Values) -> Iterator[str]:
    yield from _whole_faults(v, _k3_faults, "qkv_hidden_size")
    dsa = v["text_config"]["dsa_config"] is not None
    sparse = v["model_type"] == "kimi_k31" if v["architecture"] is None else v["architecture"] == K31
    if dsa and not sparse:
        yield "text_config.dsa_config: found an indexer, expected none: only Kimi K3.1 has one (architectures)."
    if sparse and not dsa:
        yield "text_config.dsa_config: not given; Kimi K3.1 selects the keys it attends to."


def _kimi_k25(v: Values) -> Values:
    names = Names(prefix="language_model.", moe=DEEPSEEK_NAMES.moe, experts=DEEPSEEK_NAMES.experts)
    placeholder = v["media_placeholder_token_id"]
    vision = _vision(v["vision_config"], width="vt_hidden_size", k3=False, placeholder=placeholder)
    return _deepseek_text(v["text_config"], names) | {"vision": vision, "assumptions": v["assumptions"]}


def _kimi_k3(v: Values) -> Values:
    names = Names(prefix="language_model.", moe=KIMI_NAMES.moe, experts=KIMI_NAMES.experts)
    inner = v["text_config"]
    rates = 128 * math.ceil(inner["linear_attn_config"]["num_heads"] / 128)  # A_log: 96 rates, stored as 128
    placeholder = v["media_placeholder_token_id"]
    vision = _vision(v["vision_config"], width="qkv_hidden_size", k3=True, placeholder=placeholder)
    assumed = list(v["assumptions"])
    if v["vision_config"]["in_patch_limit"] is None:
        assumed.append(f"an image has at most {K3_PATCHES:,} patches (no released file is known that says so)")
    if inner["dsa_config"] is not None:
        assumed += K31_ASSUMPTIONS
    fields = _kimi_text(inner, names, (rates,), torch.float32)
    return fields | {"vision": vision, "assumptions": tuple(assumed)}


# What no key of dsa_config says (fact sheet, section 5.5).
K31_ASSUMPTIONS = (
    f"the index key's LayerNorm has epsilon {INDEX_EPS:g}, as in DeepSeek-V3.2",
    "index queries are made from the normalised low-rank query (q_a_layernorm), as in DeepSeek-V3.2",
    "index scores are scaled by index_head_dim ** -0.5 and index_n_heads ** -0.5, without Hadamard rotation",
)

_k3_family = Family(("KimiK3ForConditionalGeneration", K31), _KIMI_K3, _k3_whole_faults, _kimi_k3)

FAMILIES: Mapping[str, Family] = {
    "kimi_linear": Family(("KimiLinearForCausalLM",), Section(_KIMI, INERT | _KIMI_INERT), _kimi_faults, _kimi_linear),
    "kimi_k3": _k3_family,
    "kimi_k31": _k3_family,
    "kimi_k25": Family(("KimiK25ForConditionalGeneration",), _KIMI_K25, _k25_faults, _kimi_k25),
    "deepseek_v32": Family(
        ("DeepseekV32ForCausalLM",), Section(_V32, INERT | _DEEPSEEK_INERT), _deepseek_faults, _deepseek_v32
    ),
    "glm_moe_dsa": Family(("GlmMoeDsaForCausalLM",), Section(_GLM, INERT | _DEEPSEEK_INERT), _glm_faults, _glm),
}
