"""What a model is made of, read from a released `config.json`. See `read_config.py` for how it is read."""

import dataclasses
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from .display import COLOURS, Html, Mark, card, facts, listed, pictured, strip
from .errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class KdaConfig:
    """Kimi Delta Attention.

    Attributes:
        gate_rank: of the low-rank decay gate, and of the output gate where that is low-rank.
        gate_lower_bound: None: softplus decay gate, unbounded below; else the bounded sigmoid gate.
        full_rank_gate: the output gate is one matrix (`g_proj`) rather than two (`g_a_proj`, `g_b_proj`).
        stored_rates: shape of A_log in the checkpoint; entries after the heads are zero padding.
        conv_dtype: fixed dtype of the convolutions and the output norm; None: the model's.
    """

    heads: int
    key: int
    value: int
    conv_width: int
    gate_rank: int
    gate_lower_bound: float | None = None
    full_rank_gate: bool = False
    stored_rates: tuple[int, ...]
    conv_dtype: torch.dtype | None = None


@dataclass(frozen=True, kw_only=True)
class YarnConfig:
    """YaRN frequency bands. Source: fact sheet of models, section 7."""

    factor: float
    original_len: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all: float


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotation of the rope channels; `interleaved`: pairs are neighbours, else a half and the other half."""

    theta: float
    interleaved: bool
    yarn: YarnConfig | None = None


@dataclass(frozen=True, kw_only=True)
class IndexerConfig:
    """Lightning indexer of DSA: scores every cached token per query and keeps the best `top_k` for all heads.

    Attributes:
        heads, key: of the index queries; one key head.
        eps: of the key's LayerNorm.
        rope: channels rotated at the front of query and key, 0 without rotation; `interleaved` as in `RopeConfig`.
        shared: the layer has no indexer of its own and reuses what the last one that has kept.
    """

    heads: int
    key: int
    top_k: int
    eps: float
    rope: int
    interleaved: bool
    shared: bool = False


@dataclass(frozen=True, kw_only=True)
class MlaConfig:
    """Multi-head latent attention.

    Attributes:
        query_latent: width of the query's low-rank form (`q_a_proj`, norm, `q_b_proj`); None: one matrix.
        latent_eps: of the latent norms.
        scale: of the scores, mscale included.
        output_gate: heads are multiplied by `sigmoid(g_proj x)`.
        rope: None: the rope channels are cached and used raw (NoPE).
        indexer: None: every query attends to all tokens before it (dense).
    """

    heads: int
    latent: int
    key_nope: int
    key_rope: int
    value: int
    scale: float
    latent_eps: float = 1e-6
    query_latent: int | None = None
    output_gate: bool = False
    rope: RopeConfig | None = None
    indexer: IndexerConfig | None = None

    @property
    def key(self) -> int:
        """Channels of a head's query and key, those without position and then the rope channels."""
        return self.key_nope + self.key_rope


@dataclass(frozen=True, kw_only=True)
class SituConfig:
    """SiTU activation: `beta tanh(g / beta) sigmoid(g) * linear_beta tanh(u / linear_beta)`."""

    beta: float
    linear_beta: float


@dataclass(frozen=True, kw_only=True)
class DenseConfig:
    """Gated feed-forward of width `ffn`; `situ` None: SwiGLU."""

    ffn: int
    situ: SituConfig | None = None


@dataclass(frozen=True, kw_only=True)
class MoeConfig:
    """Routed experts of width `ffn`, `top_k` of `experts` per token, beside shared experts of width `shared_ffn`.

    Attributes:
        groups, kept_groups: grouped routing: experts compete inside the best groups (1: no groups).
        latent: width routed experts work in (down- and up-projection around them); None: the model's.
        latent_norm: RMSNorm of the combined result before its up-projection.
        redundant: copies of busy experts, beside one of each. Which they are is a table, an input of the layer.
        chunks: parts in which rows go to experts of other devices, so that one is on its way while another is computed.
    """

    experts: int
    top_k: int
    ffn: int
    shared_ffn: int
    scale: float
    groups: int = 1
    kept_groups: int = 1
    latent: int | None = None
    latent_norm: bool = False
    situ: SituConfig | None = None
    redundant: int = 0
    chunks: int = 1

    @property
    def slots(self) -> int:
        """Physical experts, which are one of each and the copies."""
        return self.experts + self.redundant

    @property
    def table(self) -> int:
        """Numbers of a table from experts to slots, see `parallel.balance.Table.packed`."""
        return self.experts + 1 + self.slots


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """One decoder layer: a mixer over tokens, then a feed-forward part."""

    mixer: KdaConfig | MlaConfig
    ffn: DenseConfig | MoeConfig

    @property
    def kinds(self) -> tuple[Literal["kda", "mla"], Literal["dense", "moe"]]:
        """Names of its mixer and of its feed-forward part."""
        return (
            "kda" if isinstance(self.mixer, KdaConfig) else "mla",
            "dense" if isinstance(self.ffn, DenseConfig) else "moe",
        )

    @property
    def marks(self) -> tuple[Mark, Mark]:
        """The mixer and the feed-forward part, for a picture."""
        mixer, ffn = self.mixer, self.ffn
        if isinstance(mixer, KdaConfig):
            first = ("K", COLOURS[0], "KDA")
        elif mixer.indexer is None:
            first = ("A", COLOURS[1], "MLA")
        else:
            first = ("S", COLOURS[5], "sparse MLA, shared selection" if mixer.indexer.shared else "sparse MLA")
        return first, ("d", COLOURS[7], "dense") if isinstance(ffn, DenseConfig) else ("e", COLOURS[4], "MoE")


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """MoonViT3d tower and projector. Source: fact sheet of models, section 6.

    Attributes:
        patch: pixels of a patch's side.
        grid: learned position grid (height, width).
        frames: of the time table.
        interpolation: "bicubic" or "bilinear", of the grid.
        bias: linears have biases, norms are LayerNorm; else none, and RMSNorm.
        merge: patches merged to a token (height, width).
        projector_norm: "before" (LayerNorm per patch) or "after" (RMSNorm of the result).
        patch_limit: patches of one image; the picture is made smaller beyond.
        chessboard: what shows through transparent pixels: a side of its squares, their light and their dark value; the
            first is light. None: pixels keep their colour, whatever their transparency.
        sized_prompt: the prompt says how large the picture is.
    """

    embed: int
    layers: int
    heads: int
    head_dim: int
    ffn: int
    patch: int
    grid: tuple[int, int]
    frames: int
    interpolation: str
    bias: bool
    norm_eps: float
    merge: tuple[int, int]
    projector_ffn: int
    projector_norm: str
    projector_eps: float
    patch_limit: int
    placeholder: int
    chessboard: tuple[int, int, int] | None = None
    sized_prompt: bool = False


@dataclass(frozen=True, kw_only=True)
class Names:
    """How a checkpoint spells what all models have.

    Attributes:
        prefix: before every text tensor ("" or "language_model.").
        moe: the mixture's name in a layer.
        experts: names of an expert's gate, up and down matrices.
    """

    prefix: str
    moe: str
    experts: tuple[str, str, str]


KIMI_NAMES = Names(prefix="", moe="block_sparse_moe", experts=("w1", "w3", "w2"))
DEEPSEEK_NAMES = Names(prefix="", moe="mlp", experts=("gate_proj", "up_proj", "down_proj"))


@dataclass(frozen=True, kw_only=True)
class QuantConfig:
    """What a file says of quantised weights. Which tensors they are, and whether it is so, only the checkpoint says.

    Attributes:
        format: "mxfp4" (E2M1 numbers, an E8M0 scale), "int4" or "fp8" (E4M3).
        block: weights that share a scale (outputs, inputs).
        activations: "dynamic" (quantised as they come), or None: the file leaves them alone.
        ignore: patterns of the names that the file excepts.
    """

    format: str
    block: tuple[int, int]
    activations: str | None
    ignore: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A whole model. Two configs are equal when they mean the same model, whatever they are called.

    Attributes:
        name: preset name, or the name of the file's folder.
        model_type: the released file's `model_type`.
        max_len: longest sequence in tokens.
        dtype: dtype of the weights that do not fix their own.
        tied: the output projection is the token embedding.
        residual_block: layers of a block of attention residuals; None: ordinary residual connections.
        names: spelling of the checkpoint.
        vision: None: text only.
        quant: what the file says of quantised weights; None: there are none.
        draft_layers: how many layers after the model's a checkpoint may hold for drafting; they are not read.
        assumptions: what this config says that no released file does, in words.
        bos, pad: ids of the tokens that start a sequence (None: there is none) and fill it up.
        eos: those that end it, the usual one first.
        source: the file as read, for writing it again (a fixture, a bundle).
    """

    name: str = field(compare=False)
    model_type: str
    vocab: int
    embed: int
    layers: tuple[LayerConfig, ...]
    norm_eps: float
    tied: bool
    residual_block: int | None = None
    names: Names = KIMI_NAMES
    vision: VisionConfig | None = None
    quant: QuantConfig | None = None
    draft_layers: int = field(default=0, compare=False)
    assumptions: tuple[str, ...] = field(default=(), compare=False)
    max_len: int
    dtype: torch.dtype
    bos: int | None
    eos: tuple[int, ...]
    pad: int
    source: dict[str, Any] = field(compare=False, repr=False)

    def __repr__(self) -> str:
        return "\n".join([f"ModelConfig {self.name!r} ({self.model_type})", *listed(self._facts)])

    def _repr_html_(self) -> Html:
        layers = (
            [(letter, colour, f"layer {i}: {word}") for letter, colour, word in layer.marks]
            for i, layer in enumerate(self.layers)
        )
        return card(self.name, strip(layers), facts(self._facts), note=self.model_type)

    @property
    def _facts(self) -> dict[str, str]:
        """What a reader wants to know first, in words."""
        said = {"layers": f"{len(self.layers):,}: {_counted(layer.marks[0][2] for layer in self.layers)}; "
                f"{_counted(layer.marks[1][2] for layer in self.layers)}"}  # fmt: skip
        said["width"] = f"{self.embed:,}; vocabulary {self.vocab:,}; {str(self.dtype).removeprefix('torch.')}"
        said["longest"] = f"{self.max_len:,} tokens"
        for part in dict.fromkeys(p for layer in self.layers for p in (layer.mixer, layer.ffn)):
            said.setdefault(type(part).__name__.removesuffix("Config").lower(), _said(part))
            inner = {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}
            for name, value in inner.items():
                if dataclasses.is_dataclass(value):
                    said.setdefault(name, _said(value))
        if self.residual_block:
            said["residuals"] = f"attention over blocks of {self.residual_block} layers"
        if self.vision:
            said["vision"] = _said(self.vision)
        if self.quant:
            said["released"] = f"quantised: {self.quant.format}, {pictured(self.quant.block)} weights share a scale"
        if self.assumptions:
            said["assumed"] = f"{len(self.assumptions)} things that no released file says, see .assumptions"
        return said

    @property
    def rotation(self) -> tuple[RopeConfig, int] | None:
        """Rotation of the attention layers and the channels of a head it turns; None where they have none."""
        found = (m for m in (layer.mixer for layer in self.layers) if isinstance(m, MlaConfig) and m.rope)
        return next(((m.rope, m.key_rope) for m in found if m.rope), None)

    @property
    def moe(self) -> MoeConfig | None:
        """The experts, which are the same in all layers that have some; None where none has."""
        return next((layer.ffn for layer in self.layers if isinstance(layer.ffn, MoeConfig)), None)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of what the model means; `name`, `source` and keys without influence do not take part."""
        return hashlib.sha256(canonical(self).encode()).hexdigest()


def _counted(words: Iterable[str]) -> str:
    """`69 KDA, 24 MLA`."""
    return ", ".join(f"{count} {word}" for word, count in Counter(words).items())


def _said(part: Any) -> str:
    """The fields of a part of a config that are set, in words."""
    fields = {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}
    shown = {k: v for k, v in fields.items() if v not in (None, False, 1, 0, 0.0) and not dataclasses.is_dataclass(v)}
    return ", ".join(k.replace("_", " ") if v is True else f"{k.replace('_', ' ')} {_number(v)}"
                     for k, v in shown.items())  # fmt: skip


def _number(value: Any) -> str:
    if isinstance(value, (int, float)):
        return f"{value:,}" if isinstance(value, int) else f"{value:g}"
    return str(value).removeprefix("torch.")


def with_copies(config: ModelConfig, redundant: int) -> ModelConfig:
    """A model with so many copies of experts in each layer that has some; 0: the model itself."""
    return _with_experts(config, redundant=redundant)


def in_chunks(config: ModelConfig, chunks: int) -> ModelConfig:
    """A model whose rows go to experts of other devices in so many parts; 1: the model itself."""
    return _with_experts(config, chunks=chunks)


def arranged(config: ModelConfig, redundant_experts: int = 0, moe_chunks: int = 1) -> ModelConfig:
    """A model with copies of experts, whose rows go to them in chunks; the model itself where neither is asked for."""
    return in_chunks(with_copies(config, redundant_experts), moe_chunks)


def _with_experts(config: ModelConfig, **fields: int) -> ModelConfig:
    def layer(x: LayerConfig) -> LayerConfig:
        return dataclasses.replace(x, ffn=dataclasses.replace(x.ffn, **fields)) if isinstance(x.ffn, MoeConfig) else x

    return dataclasses.replace(config, layers=tuple(map(layer, config.layers)))


def is_draft(config: ModelConfig, name: str) -> bool:
    """Whether a checkpoint's tensor belongs to a draft layer: one that comes after the model's own."""
    found = re.match(r"(language_model\.)?(model\.)?layers\.(\d{1,9})\.", name)
    count = len(config.layers)
    return found is not None and count <= int(found[3]) < count + config.draft_layers


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
    row = sum(_cached(m) for m in mixers if isinstance(m, MlaConfig)) * config.dtype.itemsize
    return Capacity(tokens=pages * page, pages=pages, bytes=pages * page * row)


def _cached(c: MlaConfig) -> int:
    """Numbers a layer keeps of a token; one that reuses another's selection keeps no index key."""
    index = 0 if c.indexer is None or c.indexer.shared else c.indexer.key
    return c.latent + c.key_rope + index


def check_config(found: Any, what: str) -> None:
    """Refuse what is no config, a preset's name say; `what`: the function that was called.

    Raises:
        ConfigError: `found` is not a `ModelConfig`.
    """
    if not isinstance(found, ModelConfig):
        shown = repr(found) if isinstance(found, str | Path) else type(found).__name__
        raise ConfigError(f"{what}: config: found {shown}, expected a ModelConfig, which kg.load_config(...) gives.")


def check_whole(what: str, error: type[Exception] = ConfigError, least: int | None = 1, **numbers: Any) -> None:
    """Refuse what is no whole number, or below `least` (None: any): `check_whole("init_state", batch=batch)`."""
    for name, value in numbers.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise error(f"{what}: {name}: found {value!r}, expected a whole number.")
        if least is not None and value < least:
            raise error(f"{what}: {name} is {value:,}; the smallest is {least}.")
