"""Small checkpoints with released names, dtypes and shapes of heads: real input for every later command.

Dimensions that an operator is written for stay as released (head, latent, rope and convolution); counts and widths
shrink: layers, hidden size, heads, experts, vocabulary. Every kind of layer occurs.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import tree
from .checkpoint import write_shards
from .config import ModelConfig
from .errors import CheckpointError, ConfigError
from .files import new_folder
from .models import init_params, model_specs
from .read_config import MAX_FILE, parse_config, read_json
from .tokenizer import BYTES, TOKENIZER, TOKENIZER_CONFIG, chat_tokenizer

HIDDEN, HEADS, EXPERTS, TOP_K, VOCAB, LAYERS = 256, 4, 16, 4, 2 * BYTES, 5  # a fixture's sizes
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
    config: ModelConfig, out: str | Path, layers: int | None = None, seed: int = 0, overwrite: bool = False
) -> Fixture:
    """Write a small checkpoint of the same kind as `config`: weights, index, config.json, tokenizer with chat template.

    Args:
        layers: 2 or more, up to the model's own number; 5 by default.
        seed: of the weights; the same seed gives the same bytes.
        overwrite: replace `out` if it is a fixture (and nothing else) already.

    Raises:
        ConfigError: too few or too many layers. CheckpointError: `out` is something else's, or exists.
    """
    out = Path(out)
    small = parse_config(small_config(config, layers), origin=f"fixture of {config.name}", name=out.absolute().name)
    _check_place(out, overwrite)
    specs, params = model_specs(small), init_params(small, seed, small.dtype)
    total = sum(x.numel() * x.itemsize for x in tree.leaves(params))
    with new_folder(out) as work:
        names = write_shards(work, specs, params, small.dtype, math.ceil(total / SHARDS))
        tokenizer, tokenizer_config = chat_tokenizer(small)
        texts = {
            "config.json": small.source,
            "generation_config.json": {
                "bos_token_id": small.bos,
                "do_sample": False,
                "eos_token_id": small.eos,
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
    return Fixture(folder=out, config=small, tensors=sum(len(s.source) for s in tree.leaves(specs)), bytes=size)


def _check_place(out: Path, overwrite: bool) -> None:
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


def small_config(config: ModelConfig, layers: int | None = None) -> dict[str, Any]:
    """The released `config.json` with smaller counts; the vocabulary is 256 bytes and 256 special tokens."""
    make = SMALL.get(config.model_type)
    if make is None:
        raise ConfigError(f"fixture of {config.name}: there is no small form of {config.model_type} yet.")
    most = len(config.layers)
    count = min(LAYERS, most) if layers is None else layers
    if not 2 <= count <= most:
        raise ConfigError(
            f"fixture of {config.name}: layers: found {count}, expected 2 (one of each mixer) to {most} (the model's)."
        )
    return make(config.source, count)


def _kimi_linear(source: dict[str, Any], layers: int) -> dict[str, Any]:
    hidden = min(source["hidden_size"], HIDDEN)

    def width(key: str) -> int:
        """As wide for its hidden size as released, in steps of 64."""
        return min(source[key], 64 * math.ceil(source[key] * hidden / source["hidden_size"] / 64))

    experts = _get(source, "num_experts", "num_local_experts")
    dense, total = source["first_k_dense_replace"], source["num_hidden_layers"]
    attention = source["linear_attn_config"]
    full = _full_layers(sorted(attention["full_attn_layers"]), total, layers)
    changed = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": min(source["num_attention_heads"], HEADS),
        "intermediate_size": width("intermediate_size"),
        "moe_intermediate_size": width("moe_intermediate_size"),
        "num_experts": min(experts, EXPERTS),
        "num_experts_per_token": min(_get(source, "num_experts_per_token", "num_experts_per_tok"), TOP_K),
        "first_k_dense_replace": layers if dense == total else min(dense, 1),
        "vocab_size": VOCAB,
        "linear_attn_config": {
            **attention,
            "num_heads": min(attention["num_heads"], HEADS),
            "full_attn_layers": full,
            "kda_layers": [i for i in range(1, layers + 1) if i not in full],
        },
        **{k: _special(source[k], source["vocab_size"]) for k in ("bos_token_id", "eos_token_id", "pad_token_id")},
    }
    if source.get("num_key_value_heads") is not None:
        changed["num_key_value_heads"] = changed["num_attention_heads"]
    # auto_map names Python files that are not here; no tensor has head_dim (hidden_size / num_attention_heads); nothing
    # is rotated, and transformers warns of rope_scaling even where it is null. The rest are spellings set above.
    dropped = {"auto_map", "head_dim", "rope_theta", "rope_scaling", "num_local_experts", "num_experts_per_tok"}
    return {k: v for k, v in source.items() if k not in dropped} | changed


def _special(token: int, vocab: int) -> int:
    """Released special tokens are the last 256 of the vocabulary and stay so; others move behind the bytes."""
    return VOCAB - (vocab - token) if vocab - token <= VOCAB - BYTES else BYTES + token % (VOCAB - BYTES)


def _get(source: dict[str, Any], *spellings: str) -> Any:
    return next(source[s] for s in spellings if s in source)


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


SMALL = {"kimi_linear": _kimi_linear}
