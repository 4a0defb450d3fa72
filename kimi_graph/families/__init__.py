"""What the config.json of each family of models means: tables of keys, what contradicts itself, and the `ModelConfig`.

No size is derived from another that the released code does not derive: hidden_size / num_attention_heads, for one, is
the width of nothing in these models. What others read wrong: the public cases C, R, V2 and K11.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from kimi_graph.config import DEEPSEEK_NAMES, KIMI_NAMES, Names
from kimi_graph.config_keys import Entry, Key, Section, dtype, flag, integer, list_of, optional, real, text, token_ids

from .common import INDEX_EPS, INERT, INERT_INSIDE, Values
from .deepseek import DEEPSEEK, DEEPSEEK_INERT, GLM, V32, deepseek_faults, deepseek_text, glm_faults, indexer_kinds
from .kimi import K3, KIMI, KIMI_INERT, k3_faults, kimi_faults, kimi_text
from .rope import score_scale
from .vision import K3_PATCHES, K3_VISION, K25_VISION, read_vision, vision_faults

__all__ = ["FAMILIES", "INERT", "INERT_INSIDE", "Family", "indexer_kinds", "score_scale"]


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


# Files of a text model alone.


def _kimi_linear(v: Values) -> Values:
    return kimi_text(v, KIMI_NAMES, (1, 1, v["linear_attn_config"]["num_heads"], 1), None)


def _deepseek_v32(v: Values) -> Values:
    return deepseek_text(v, DEEPSEEK_NAMES, (False,) * v["num_hidden_layers"])


def _glm(v: Values) -> Values:
    return deepseek_text(v, DEEPSEEK_NAMES, tuple(kind == "shared" for kind in indexer_kinds(v)))


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
        **_whole(Section(DEEPSEEK, INERT_INSIDE | DEEPSEEK_INERT), K25_VISION),
        "projection_hidden_size": Key(optional(integer()), None),
        "projection_layer_norm_eps": Key(optional(real(0, 1)), None),
    },
    _WHOLE_INERT,
)
_KIMI_K3 = Section(_whole(Section(K3, INERT_INSIDE | KIMI_INERT), K3_VISION), _WHOLE_INERT)

K31 = "KimiK31ForConditionalGeneration"


def _inside(at: str, faults: Iterable[str]) -> Iterator[str]:
    for fault in faults:
        yield f"{at}.{fault}"


def _whole_faults(v: Values, text_faults: Callable[[Values], Iterable[str]], width: str) -> Iterator[str]:
    inner = v["text_config"]
    yield from _inside("text_config", text_faults(inner))
    yield from _inside("vision_config", vision_faults(v["vision_config"], width, inner["hidden_size"]))
    for key in ("dtype", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"):
        if v[key] is not None and v[key] != inner[key]:
            given, expected = (", ".join(map(str, x)) if isinstance(x, tuple) else x for x in (v[key], inner[key]))
            yield f"{key}: found {given}, expected {expected} (text_config.{key})."
    if (token := v["media_placeholder_token_id"]) >= inner["vocab_size"]:
        yield f"media_placeholder_token_id: found {token}, expected at most {inner['vocab_size'] - 1} (vocab_size)."


def _k25_faults(v: Values) -> Iterator[str]:
    yield from _whole_faults(v, deepseek_faults, "vt_hidden_size")
    for key, inner in (("projection_hidden_size", "vt_hidden_size"), ("projection_layer_norm_eps", "projector_ln_eps")):
        if v[key] not in (None, expected := v["vision_config"][inner]):
            yield f"{key}: found {v[key]}, expected {expected} (vision_config.{inner})."


def _k3_whole_faults(v: Values) -> Iterator[str]:
    yield from _whole_faults(v, k3_faults, "qkv_hidden_size")
    dsa = v["text_config"]["dsa_config"] is not None
    sparse = v["model_type"] == "kimi_k31" if v["architecture"] is None else v["architecture"] == K31
    if dsa and not sparse:
        yield "text_config.dsa_config: found an indexer, expected none: only Kimi K3.1 has one (architectures)."
    if sparse and not dsa:
        yield "text_config.dsa_config: not given; Kimi K3.1 selects the keys it attends to."


def _kimi_k25(v: Values) -> Values:
    names = Names(prefix="language_model.", moe=DEEPSEEK_NAMES.moe, experts=DEEPSEEK_NAMES.experts)
    placeholder = v["media_placeholder_token_id"]
    vision = read_vision(v["vision_config"], width="vt_hidden_size", k3=False, placeholder=placeholder)
    return deepseek_text(v["text_config"], names) | {"vision": vision, "assumptions": v["assumptions"]}


def _kimi_k3(v: Values) -> Values:
    names = Names(prefix="language_model.", moe=KIMI_NAMES.moe, experts=KIMI_NAMES.experts)
    inner = v["text_config"]
    rates = 128 * math.ceil(inner["linear_attn_config"]["num_heads"] / 128)  # A_log: 96 rates, stored as 128
    placeholder = v["media_placeholder_token_id"]
    vision = read_vision(v["vision_config"], width="qkv_hidden_size", k3=True, placeholder=placeholder)
    assumed = list(v["assumptions"])
    if v["vision_config"]["in_patch_limit"] is None:
        assumed.append(f"an image has at most {K3_PATCHES:,} patches (no released file is known that says so)")
    if inner["dsa_config"] is not None:
        assumed += K31_ASSUMPTIONS
    fields = kimi_text(inner, names, (rates,), torch.float32)
    return fields | {"vision": vision, "assumptions": tuple(assumed)}


# What no key of dsa_config says (fact sheet, section 5.5).
K31_ASSUMPTIONS = (
    f"the index key's LayerNorm has epsilon {INDEX_EPS:g}, as in DeepSeek-V3.2",
    "index queries are made from the normalised low-rank query (q_a_layernorm), as in DeepSeek-V3.2",
    "index scores are scaled by index_head_dim ** -0.5 and index_n_heads ** -0.5, without Hadamard rotation",
)

_k3_family = Family(("KimiK3ForConditionalGeneration", K31), _KIMI_K3, _k3_whole_faults, _kimi_k3)

FAMILIES: Mapping[str, Family] = {
    "kimi_linear": Family(("KimiLinearForCausalLM",), Section(KIMI, INERT | KIMI_INERT), kimi_faults, _kimi_linear),
    "kimi_k3": _k3_family,
    "kimi_k31": _k3_family,
    "kimi_k25": Family(("KimiK25ForConditionalGeneration",), _KIMI_K25, _k25_faults, _kimi_k25),
    "deepseek_v32": Family(
        ("DeepseekV32ForCausalLM",), Section(V32, INERT | DEEPSEEK_INERT), deepseek_faults, _deepseek_v32
    ),
    "glm_moe_dsa": Family(("GlmMoeDsaForCausalLM",), Section(GLM, INERT | DEEPSEEK_INERT), glm_faults, _glm),
}
