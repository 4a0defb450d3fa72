"""What a model is made of, read from a released `config.json`. See `read_config.py` for how it is read."""

from dataclasses import dataclass
from typing import Literal

import torch


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
    """A whole model. Equal configs have equal `fingerprint`s.

    Attributes:
        name: preset name, or the name of the file's folder.
        model_type: the released file's `model_type`.
        max_len: longest sequence in tokens.
        dtype: dtype of the weights that do not fix their own.
        tied: the output projection is the token embedding.
        fingerprint: SHA-256 of the canonical JSON.
        source: the file as read, for writing it again (a fixture, a bundle).
    """

    name: str
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
    fingerprint: str
    source: dict
