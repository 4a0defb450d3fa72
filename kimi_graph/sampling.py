"""Continue prompts: from parameters in memory, or from a checkpoint whose experts stay on disk.

Axes: B sequences, T tokens, V vocab.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .checkpoint import load_params
from .config import ModelConfig, check_config, check_whole
from .errors import ConfigError
from .models import Decoder, decode, init_state, prefill
from .streamed import StreamedExperts


def sample(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> Tensor:
    """Next tokens `[B]` of logits `[B, V]`: the best at temperature 0, else drawn from the fewest of mass `top_p`."""
    if temperature == 0.0:
        return logits.argmax(-1)
    sorted_, index = (logits.double() / temperature).softmax(-1).sort(-1, descending=True)
    sorted_ = sorted_.masked_fill(sorted_.cumsum(-1) - sorted_ >= top_p, 0)
    drawn = torch.multinomial(sorted_, 1, generator=generator)
    return torch.gather(index, 1, drawn)[:, 0]


def generate(
    config: ModelConfig,
    params: Decoder[Tensor] | str | Path,
    prompt: Tensor | Sequence[int] | Sequence[Sequence[int]],
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    chunk: int = 2048,
    *,
    stream_experts: bool = False,
) -> Tensor:
    """Continue prompts, greedily or by drawing.

    Args:
        params: parameters, or the folder of a checkpoint.
        prompt: `[B, T]` or `[T]` ids, or lists of ids of unequal length.
        temperature: 0 is greedy.
        top_p: keep the smallest set of tokens of this probability mass.
        seed: of the draws; the same seed gives the same tokens.
        chunk: tokens read at once, bounds memory. With streamed experts a chunk reads most of them: larger is quicker.
        stream_experts: routed experts stay in the checkpoint's files (see `load_params`); `params` is its folder, or
            was loaded so.

    Returns:
        `[B, max_new_tokens]` int64: the new tokens; after the end-of-sequence token a row holds the padding token.

    Raises:
        ConfigError: a number out of range, an empty prompt, tokens outside the vocabulary, more tokens than the model's
            limit, streamed experts of parameters in memory.
        CheckpointError: the folder is not a checkpoint of this model.
    """
    check_config(config, "generate")
    check_whole("generate", max_new_tokens=max_new_tokens, chunk=chunk)
    _check_share("temperature", temperature, "0 (greedy) or above, and finite", lambda x: 0 <= x < math.inf)
    _check_share("top_p", top_p, "above 0, at most 1", lambda x: 0 < x <= 1)
    rows = _rows(prompt)
    params = _params(config, params, stream_experts)
    longest = max(map(len, rows))
    state = init_state(config, len(rows), longest + max_new_tokens, params.embed.dtype)
    generator = torch.Generator().manual_seed(seed)
    padded = torch.zeros(len(rows), longest, dtype=torch.int64)
    for i, row in enumerate(rows):
        padded[i, longest - len(row) :] = row
    mask = torch.arange(longest) >= longest - torch.tensor([len(r) for r in rows])[:, None]
    with torch.no_grad():
        for start in range(0, longest, chunk):
            part = slice(start, start + chunk)
            logits, state = prefill(
                config, params, padded[:, part], state, mask=mask[:, part], last_only=True, donate=True
            )
        new, done = [], torch.zeros(len(rows), dtype=torch.bool)
        for _ in range(max_new_tokens):
            token = sample(logits, temperature, top_p, generator).masked_fill(done, config.pad)
            new.append(token)
            done |= torch.isin(token, torch.tensor(config.eos))
            if bool(done.all()) or len(new) == max_new_tokens:
                break
            logits, state = decode(config, params, token, state, donate=True)
    out = torch.full((len(rows), max_new_tokens), config.pad, dtype=torch.int64)
    out[:, : len(new)] = torch.stack(new, 1)
    return out


def _check_share(name: str, value: Any, legal: str, holds: Callable[[float], bool]) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not holds(value):  # nan holds nothing
        raise ConfigError(f"generate: {name}: found {value!r}, expected a number, {legal}.")


def _params(config: ModelConfig, params: Decoder[Tensor] | str | Path, stream: bool) -> Decoder[Tensor]:
    if not isinstance(params, Decoder):
        return load_params(params, config, stream_experts=stream)
    held = [layer.moe.gate_up for layer in params.layers if layer.moe is not None]
    if stream and not all(isinstance(experts, StreamedExperts) for experts in held):
        raise ConfigError(
            "generate: stream_experts=True of parameters whose experts are in memory; give the checkpoint's folder."
        )
    return params


def _rows(prompt: Tensor | Sequence[int] | Sequence[Sequence[int]]) -> list[Tensor]:
    if isinstance(prompt, str | bytes):
        raise ConfigError("generate: prompt: found text, expected ids of tokens; a tokenizer makes them.")
    if isinstance(prompt, Tensor):
        rows = list(prompt if prompt.ndim == 2 else prompt[None])
    else:
        many = bool(prompt) and not isinstance(prompt[0], int)
        rows = [torch.tensor(r, dtype=torch.int64) for r in (prompt if many else [prompt])]
    if not rows or not all(len(r) for r in rows):
        raise ConfigError("generate: an empty prompt; give at least one token per sequence.")
    return rows
