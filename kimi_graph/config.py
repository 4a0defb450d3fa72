"""What a model is made of, read from a released `config.json`. See `read_config.py` for how it is read."""

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from .errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class KdaConfig:
    """Kimi Delta Attention. `gate_lower_bound` None: softplus gate, unbounded below; else the bounded sigmoid gate."""

    heads: int
    key: int
    value: int
    conv_width: int
    gate_rank: int
    gate_lower_bound: float | None = None


@dataclass(frozen=True, kw_only=True)
class MlaConfig:
    """Multi-head latent attention. With `rope` channels but `nope` true they are cached and used raw."""

    heads: int
    latent: int
    key_nope: int
    key_rope: int
    value: int
    nope: bool

    @property
    def key(self) -> int:
        return self.key_nope + self.key_rope


@dataclass(frozen=True, kw_only=True)
class DenseConfig:
    """SwiGLU of width `ffn`."""

    ffn: int


@dataclass(frozen=True, kw_only=True)
class MoeConfig:
    """Routed experts of width `ffn`, `top_k` of `experts` per token, beside shared experts of width `shared_ffn`."""

    experts: int
    top_k: int
    ffn: int
    shared_ffn: int
    scale: float


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """One decoder layer: a mixer over tokens, then a feed-forward part."""

    mixer: KdaConfig | MlaConfig
    ffn: DenseConfig | MoeConfig

    @property
    def kinds(self) -> tuple[Literal["kda", "mla"], Literal["dense", "moe"]]:
        return (
            "kda" if isinstance(self.mixer, KdaConfig) else "mla",
            "dense" if isinstance(self.ffn, DenseConfig) else "moe",
        )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A whole model. Two configs are equal when they mean the same model, whatever they are called.

    Attributes:
        name: preset name, or the name of the file's folder.
        model_type: the released file's `model_type`.
        max_len: longest sequence in tokens.
        dtype: dtype of the weights that do not fix their own.
        tied: the output projection is the token embedding.
        bos, eos, pad: ids of the tokens that start, end and fill a sequence.
        source: the file as read, for writing it again (a fixture, a bundle).
    """

    name: str = field(compare=False)
    model_type: str
    vocab: int
    embed: int
    layers: tuple[LayerConfig, ...]
    norm_eps: float
    tied: bool
    max_len: int
    dtype: torch.dtype
    bos: int
    eos: int
    pad: int
    source: dict[str, Any] = field(compare=False, repr=False)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of what the model means: `name`, `source` and keys without influence do not take part."""
        return hashlib.sha256(canonical(self).encode()).hexdigest()


def canonical(config: ModelConfig) -> str:
    """The meaning of a config as one line of JSON: defaults filled in, keys sorted."""

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value):
            fields = {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value) if f.compare}
            return {"kind": type(value).__name__, **fields}
        if isinstance(value, tuple):
            return [plain(v) for v in value]
        return str(value) if isinstance(value, torch.dtype) else value

    return json.dumps(plain(config), sort_keys=True, separators=(",", ":"), allow_nan=False)


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """Room of one sequence in the paged caches: whole pages.

    Attributes:
        tokens: tokens that fit, at least those asked for.
        pages: pages of each MLA layer.
        bytes: of all MLA layers together, in the config's dtype.
    """

    tokens: int
    pages: int
    bytes: int


def check_length(config: ModelConfig, length: int, page: int) -> Capacity:
    """What a sequence of `length` tokens takes up, in pages of `page` tokens.

    Raises:
        ConfigError: `length` is not in 1..`config.max_len`, or `page` is not positive.
    """
    if page < 1:
        raise ConfigError(f"page: found {page}, expected a positive number of tokens.")
    if not 1 <= length <= config.max_len:
        nearest = 1 if length < 1 else config.max_len
        raise ConfigError(
            f"max_len: found {length:,}, expected 1 to {config.max_len:,} ({config.name}); the nearest is {nearest:,}."
        )
    pages = -(-length // page)
    mixers = [layer.mixer for layer in config.layers]
    row = sum(m.latent + m.key_rope for m in mixers if isinstance(m, MlaConfig)) * config.dtype.itemsize
    return Capacity(tokens=pages * page, pages=pages, bytes=pages * page * row)
