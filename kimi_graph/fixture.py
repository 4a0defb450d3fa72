"""Small checkpoints with released names, dtypes and shapes of heads: real input for every later command.

Dimensions that an operator is written for stay as released (heads' widths, latent, rope, index heads, convolution,
grid of positions); counts and widths shrink: layers, hidden size, heads, experts, vocabulary. Every kind of layer is
there.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .checkpoint import pieces_of, released_formats, write_shards
from .config import KdaConfig, MlaConfig, ModelConfig, check_config
from .errors import CheckpointError, ConfigError
from .files import Standing, check_writable, new_folder
from .models import init_params, model_specs
from .read_config import MAX_FILE, parse_config, read_json
from .tokenizer import BYTES, TOKENIZER, TOKENIZER_CONFIG, chat_tokenizer

HIDDEN, HEADS, EXPERTS, TOP_K, VOCAB = 256, 4, 16, 4, 2 * BYTES  # a fixture's sizes
QUERY_LATENT = 192  # is no width that anything else has
INDEX_TOP_K = 64  # a cache of this many tokens or fewer is attended to as a whole, longer ones are not
BLOCKS = 3  # of attention residuals
VISION_LAYERS = 2
MARK = "fixture.json"  # says that the folder is ours to replace, and lists what we put there
SHARDS = 3  # at least two, so that the index is used


@dataclass(frozen=True, kw_only=True)
class Fixture:
    """What was written: the folder, the model, its number of tensors and all bytes."""

    folder: Path
    config: ModelConfig
    tensors: int
    bytes: int


def make_fixture(
    config: ModelConfig,
    out: str | Path,
    layers: int | None = None,
    seed: int = 0,
    overwrite: bool = False,
    quantised: bool = False,
    ways: int = 1,
) -> Fixture:
    """Write a small checkpoint of the same kind as `config`: weights, index, config.json, tokenizer with chat template.

    Args:
        layers: 2 or more, up to the model's own number; by default as many as it takes to show every kind.
        seed: of the weights; the same seed gives the same bytes.
        overwrite: replace `out` if it is a fixture (and nothing else) already.
        quantised: weights that are released quantised are so here; else all are plain.
        ways: heads and channels divide over so many ranks (tp).

    Raises:
        ConfigError: too few or too many layers; `quantised` of a model that is not.
        CheckpointError: `out` is something else's, or exists.
        KimiGraphError: nothing can be written there, or somebody else has meanwhile.
    """
    check_config(config, "make_fixture")
    out = Path(out)
    source = small_config(config, layers, quantised, ways)
    small = parse_config(source, origin=f"fixture of {config.name}", name=out.absolute().name)
    _check_place(out, overwrite)
    standing = Standing.of(out, MARK)
    specs, params = model_specs(small), init_params(small, seed, small.dtype)
    packed = released_formats(small, specs)
    tensors = pieces_of(specs, small.dtype, packed)
    total = sum(piece.bytes for piece in tensors)
    with new_folder(out, lambda: _check_place(out, overwrite), standing) as work:
        names = write_shards(work, specs, params, small.dtype, math.ceil(total / SHARDS), packed)
        tokenizer, tokenizer_config = chat_tokenizer(small)
        texts = {
            "config.json": small.source,
            "generation_config.json": {
                **({} if small.bos is None else {"bos_token_id": small.bos}),
                "do_sample": False,
                "eos_token_id": small.eos[0] if len(small.eos) == 1 else list(small.eos),
                "pad_token_id": small.pad,
            },
            TOKENIZER: tokenizer,
            TOKENIZER_CONFIG: tokenizer_config,
        }
        files = sorted([*names, *texts, MARK])
        texts[MARK] = {"fixture_of": config.name, "fingerprint": small.fingerprint, "seed": seed, "files": files}
        for name, data in texts.items():
            (work / name).write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        size = sum(p.stat().st_size for p in work.iterdir())
    return Fixture(folder=out, config=small, tensors=len(tensors), bytes=size)


def _check_place(out: Path, overwrite: bool) -> None:
    check_writable(out)
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    mark = out / MARK
    if not mark.is_file():
        raise CheckpointError(f"{out}: exists and is not a fixture of kimi-graph; choose another folder.")
    ours = read_json(mark, MAX_FILE, CheckpointError).get("files")
    if other := sorted(p.name for p in out.iterdir() if p.name not in (ours or ())):
        raise CheckpointError(f"{out}: holds {other[0]}, which the fixture did not bring; choose another folder.")
    if not overwrite:
        raise CheckpointError(f"{out}: is a fixture already; replace it with --overwrite, or choose another folder.")


def small_config(
    config: ModelConfig, layers: int | None = None, quantised: bool = False, ways: int = 1
) -> dict[str, Any]:
    """The released `config.json` with smaller counts; the vocabulary is 256 bytes and 256 special tokens.

    Raises:
        ConfigError: too few or too many layers; `quantised` of a model that is not.
    """
    if quantised and config.quant is None:
        raise ConfigError(f"fixture of {config.name}: its weights are not released quantised; leave --quantised out.")
    most = len(config.layers)
    count = min(_enough_layers(config), most) if layers is None else layers
    if not 2 <= count <= most:
        raise ConfigError(
            f"fixture of {config.name}: layers: found {count}, expected 2 (one of each mixer) to {most} (the model's)."
        )
    small = SMALL[config.model_type](config.source, count)
    _divide(small.get("text_config", small), ways)
    if not quantised:
        for section in (small, small.get("text_config", {})):
            section.pop("quantization_config", None)
    return small


def _enough_layers(config: ModelConfig) -> int:
    """How many layers show every kind of layer, more than one place of each, and blocks of attention residuals."""
    mixers = [layer.mixer for layer in config.layers]
    if config.residual_block is not None:
        return 8
    if any(isinstance(m, KdaConfig) for m in mixers):
        return 5
    return 6 if any(isinstance(m, MlaConfig) and m.indexer and m.indexer.shared for m in mixers) else 3


def _divide(text: dict[str, Any], ways: int) -> None:
    """More heads and channels where they do not divide over `ways`; the vocabulary and the experts stay as they are."""
    linear = text.get("linear_attn_config", {})
    heads = [(text, "num_attention_heads"), (text, "num_key_value_heads"), (linear, "num_heads")]
    channels = [(text, "intermediate_size"), (text, "moe_intermediate_size")]
    for step, places in ((ways, heads), (1 if ways == 1 else math.lcm(ways, 64), channels)):
        for where, key in places:
            if where.get(key) is not None:
                where[key] = step * math.ceil(where[key] / step)


# Parts of a config.json, made smaller.


def _heads(released: int) -> int:
    """No power of two where the released number is none (some operators take only these, and get more heads), nor then
    on 2 or 4 devices; but dividing over these."""
    return min(released, 3 * HEADS if released & (released - 1) else HEADS)


def _text(source: dict[str, Any], layers: int, experts: str, top_k: str) -> dict[str, Any]:
    """What all families have. `experts`, `top_k`: how the file spells these keys."""
    heads = _heads(source["num_attention_heads"])
    dense, total = source["first_k_dense_replace"], source["num_hidden_layers"]
    groups = _get(source, "n_group", "num_expert_group", default=1)
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    changed = {
        "hidden_size": min(source["hidden_size"], HIDDEN),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": _width(source, "intermediate_size"),
        "moe_intermediate_size": _width(source, "moe_intermediate_size"),
        experts: min(source[experts], max(EXPERTS, 4 * groups if groups > 1 else 0)),
        top_k: min(source[top_k], TOP_K),
        "first_k_dense_replace": min(dense, layers) if dense == total or layers == total else min(dense, 1),
        "vocab_size": VOCAB,
        **{key: _special(source[key], source["vocab_size"]) for key in ids if source.get(key) is not None},
    }
    if source.get("num_key_value_heads") is not None:
        changed["num_key_value_heads"] = heads
    if source.get("q_lora_rank") is not None:
        changed["q_lora_rank"] = min(source["q_lora_rank"], QUERY_LATENT)
    if source.get("num_nextn_predict_layers"):
        changed["num_nextn_predict_layers"] = 0  # no draft layers are written
    return {k: v for k, v in source.items() if k != "auto_map"} | changed  # it names Python files that are not here


def _width(source: dict[str, Any], key: str, hidden: str = "hidden_size", most: int = HIDDEN, step: int = 64) -> int:
    """As wide for its hidden size as released, in steps of 64."""
    small = min(source[hidden], most)
    return min(source[key], step * math.ceil(source[key] * small / source[hidden] / step))


def _special(tokens: Any, vocab: int) -> Any:
    """Released special tokens are the last 256 of the vocabulary and stay so; others move behind the bytes."""
    if isinstance(tokens, list):
        return [_special(token, vocab) for token in tokens]
    return VOCAB - (vocab - tokens) if vocab - tokens <= VOCAB - BYTES else BYTES + tokens % (VOCAB - BYTES)


def _get(source: dict[str, Any], *spellings: str, default: Any = None) -> Any:
    return next((source[s] for s in spellings if s in source), default)


# Kimi Linear and K3.


def _kimi_text(source: dict[str, Any], layers: int) -> dict[str, Any]:
    experts = next(k for k in ("num_experts", "num_local_experts") if k in source)
    top_k = next(k for k in ("num_experts_per_token", "num_experts_per_tok") if k in source)
    attention = source["linear_attn_config"]
    full = _full_layers(sorted(attention["full_attn_layers"]), source["num_hidden_layers"], layers)
    small = _text(source, layers, experts, top_k)
    small["linear_attn_config"] = {
        **attention,
        "num_heads": min(attention["num_heads"], HEADS),
        "full_attn_layers": full,
        "kda_layers": [i for i in range(1, layers + 1) if i not in full],
    }
    # No tensor has head_dim (hidden_size / num_attention_heads); nothing is rotated, and transformers warns of
    # rope_scaling even where it is null.
    return {k: v for k, v in small.items() if k not in ("head_dim", "rope_theta", "rope_scaling")}


def _k3_text(source: dict[str, Any], layers: int) -> dict[str, Any]:
    small = _kimi_text(source, layers)
    if source.get("routed_expert_hidden_size") is not None:  # unlike the experts' own width
        small["routed_expert_hidden_size"] = min(source["routed_expert_hidden_size"], 3 * small["hidden_size"] // 4)
    if source.get("attn_res_block_size") is not None and layers < source["num_hidden_layers"]:
        small["attn_res_block_size"] = math.ceil(layers / BLOCKS)
    if source.get("dsa_config") is not None:
        small["dsa_config"] = dict(source["dsa_config"])
        for key in ("index_topk", "topk", "top_k"):
            if key in small["dsa_config"]:
                small["dsa_config"][key] = min(small["dsa_config"][key], INDEX_TOP_K)
        for key in ("dsa_layers", "layers", "full_attn_layers"):
            if key in small["dsa_config"]:
                small["dsa_config"][key] = small["linear_attn_config"]["full_attn_layers"]
    return small


def _full_layers(released: list[int], total: int, layers: int) -> list[int]:
    """Which of `layers` layers are full attention, counted from 1.

    Released schedules are regular (three KDA layers, then a full one) up to a last group that is shorter. A fixture
    with room for it has the same end; a smaller one has groups of three layers and a last group of two.
    """
    if layers == total:
        return released
    if len(released) in (0, total):
        return list(range(1, layers + 1)) if released else []
    group = released[0]
    last = total - released[-2] if len(released) > 1 else group
    if layers < group + last:
        group, last = 3, max(last - group + 3, 1)
    full = [layers]
    at = layers - last
    while at > 1:
        full.append(at)
        at -= group
    return sorted(full)


# DeepSeek-V3, V3.2 and GLM-5.


def _deepseek_text(source: dict[str, Any], layers: int) -> dict[str, Any]:
    experts = next(k for k in ("n_routed_experts", "num_experts", "num_local_experts") if k in source)
    top_k = next(k for k in ("num_experts_per_tok", "num_experts_per_token") if k in source)
    small = _text(source, layers, experts, top_k)
    if "index_topk" in source:
        small["index_topk"] = min(source["index_topk"], INDEX_TOP_K)
    if source.get("mlp_layer_types") is not None:
        every, dense = source.get("moe_layer_freq", 1), small["first_k_dense_replace"]
        small["mlp_layer_types"] = ["sparse" if i >= dense and i % every == 0 else "dense" for i in range(layers)]
    return small


def _glm(source: dict[str, Any], layers: int) -> dict[str, Any]:
    """Two full layers, then shared and full ones in turn: F F S S F S S, for FFF SSSF SSSF ... as released."""
    small = _deepseek_text(source, layers)
    kinds = source.get("indexer_types") or source.get("index_topk_pattern")
    if layers == source["num_hidden_layers"] or (kinds is None and "index_topk_freq" not in source):
        return small
    every, offset = 3, 2
    shared = [max(i - offset + 1, 0) % every > 0 for i in range(layers)]
    if source.get("indexer_types") is not None:
        small["indexer_types"] = ["shared" if s else "full" for s in shared]
    if source.get("index_topk_pattern") is not None:
        small["index_topk_pattern"] = "".join("S" if s else "F" for s in shared)
    if "index_topk_freq" in source:
        small |= {"index_topk_freq": every, "index_skip_topk_offset": offset}
    return small


# Text and vision.

# transformers' own classes read these spellings and take the released model's values for what they do not find.
NATIVE = {
    "vt_hidden_size": "hidden_size",
    "vt_num_hidden_layers": "num_hidden_layers",
    "vt_num_attention_heads": "num_attention_heads",
    "vt_intermediate_size": "intermediate_size",
}


def _vision(source: dict[str, Any], text: dict[str, Any]) -> dict[str, Any]:
    """Heads keep their width; where the file names the width of all heads, it stays apart from the hidden size."""
    names = {released: released if released in source else native for released, native in NATIVE.items()}
    hidden, heads, ffn = (names[f"vt_{k}"] for k in ("hidden_size", "num_attention_heads", "intermediate_size"))
    count = min(source[heads], HEADS)
    wide = source.get("qkv_hidden_size")
    width = count * (source[hidden] // source[heads]) if wide is None else min(source[hidden], HIDDEN)
    small = source | {
        hidden: width,
        heads: count,
        names["vt_num_hidden_layers"]: min(source[names["vt_num_hidden_layers"]], VISION_LAYERS),
        ffn: _width(source, ffn, hidden, width, 16),
        "mm_hidden_size": width,
        "text_hidden_size": text["hidden_size"],
    }
    if wide is not None:
        small["qkv_hidden_size"] = count * (wide // source[heads])
    return small


def _whole(
    source: dict[str, Any], layers: int, make: Callable[[dict[str, Any], int], dict[str, Any]]
) -> dict[str, Any]:
    text = make(source["text_config"], layers)
    vocab = source["text_config"]["vocab_size"]
    ids = ("bos_token_id", "eos_token_id", "pad_token_id", "media_placeholder_token_id", "image_token_id")
    changed = {key: _special(source[key], vocab) for key in ids if source.get(key) is not None}
    changed |= {"text_config": text, "vision_config": _vision(source["vision_config"], text)}
    return {k: v for k, v in source.items() if k != "auto_map"} | changed


def _kimi_k3(source: dict[str, Any], layers: int) -> dict[str, Any]:
    return _whole(source, layers, _k3_text)


def _kimi_k25(source: dict[str, Any], layers: int) -> dict[str, Any]:
    small = _whole(source, layers, _deepseek_text)
    vision = small["vision_config"]
    vision |= {native: vision[released] for released, native in NATIVE.items() if released in vision}
    placeholder = _get(small, "media_placeholder_token_id", "image_token_id")
    return small | {"projection_hidden_size": vision["mm_hidden_size"], "image_token_id": placeholder}


SMALL: dict[str, Callable[[dict[str, Any], int], dict[str, Any]]] = {
    "kimi_linear": _kimi_text,
    "kimi_k3": _kimi_k3,
    "kimi_k31": _kimi_k3,
    "kimi_k25": _kimi_k25,
    "deepseek_v32": _deepseek_text,
    "glm_moe_dsa": _glm,
}
