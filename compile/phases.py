"""Phases and pieces: what is traced once, and which layers it serves.

A phase (prefill, decode) of a bucket (rows, tokens, capacity) is one static graph. It is made of pieces: embedding, one
mixer half per kind, one feed-forward half per kind, head. Each piece is captured once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kimi_graph import tree
from kimi_graph.config import LayerConfig, ModelConfig
from kimi_graph.layers import Batch
from kimi_graph.models import decoder
from kimi_graph.models.decoder import Block

from .capture import Captured, capture
from .passes import Folded, fold_weights, lower_einsum, simplify


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """One static shape.

    Attributes:
        phase: "prefill" or "decode".
        rows: sequences. tokens: new tokens a row. page: tokens of a page. pages: of the pool, null page included.
        sequence_pages: pages of one sequence. slots: KDA slots, null slot included.
    """

    phase: str
    rows: int
    tokens: int
    page: int
    pages: int
    sequence_pages: int
    slots: int

    @property
    def step(self) -> bool:
        return self.phase == "decode"

    @property
    def name(self) -> str:
        return f"{self.phase}_b{self.rows}" + ("" if self.step else f"_t{self.tokens}")


def meta(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def batch_inputs(b: Bucket) -> Batch[Tensor]:
    return Batch(
        slots=meta((b.rows,), torch.int32),
        lengths=meta((b.rows,), torch.int64),
        counts=meta((b.rows,), torch.int64),
        block_table=meta((b.rows, b.sequence_pages), torch.int32),
        slot_mapping=meta((b.rows * b.tokens,), torch.int64),
    )


def meta_params(c: ModelConfig) -> decoder.Decoder[Tensor]:
    return tree.map(lambda s: meta(s.shape, s.dtype or c.dtype), decoder.model_specs(c))


def meta_states(c: ModelConfig, b: Bucket) -> tuple[Any, ...]:
    specs = decoder.state_specs(c, slots=b.slots, pages=b.pages, page=b.page, dtype=c.dtype)
    return tree.map(lambda s: meta(s.shape, s.dtype), specs)


@dataclass(frozen=True, kw_only=True)
class PieceUse:
    """A piece at its place: `layer` is the layer's number, None for embedding and head."""

    piece: str
    layer: int | None = None

    @property
    def prefix(self) -> str:
        """Of the layer's names (`layers.3`)."""
        return "" if self.layer is None else f"layers.{self.layer}"


def schedule(c: ModelConfig) -> list[PieceUse]:
    """The pieces of the whole model, in order."""
    uses = [PieceUse(piece="embed")]
    for i, layer in enumerate(c.layers):
        uses += [PieceUse(piece=kind, layer=i) for kind in layer.kinds]
    return [*uses, PieceUse(piece="head")]


def piece_tracer(c: ModelConfig, b: Bucket) -> Callable[[PieceUse], Captured]:
    """A function that captures a piece at its place. Input names: `x`, `tokens`, `batch.*`, `p.*`, `s.*`."""
    params, states, batch = meta_params(c), meta_states(c, b), batch_inputs(b)
    x = meta((b.rows, b.tokens, c.embed), c.dtype)

    def trace(use: PieceUse) -> Captured:
        if use.layer is None:
            return _capture_embed(params, b) if use.piece == "embed" else _capture_head(c, params, x, batch, b)
        layer, block = c.layers[use.layer], params.layers[use.layer]
        if use.piece == layer.kinds[0]:
            return _capture_mix(c, layer, block, x, states[use.layer], batch, b)
        return _capture_feed(c, layer, block, x)

    return trace


def capture_pieces(c: ModelConfig, b: Bucket) -> dict[str, Captured]:
    """Every piece the model needs, captured where it is used first."""
    trace = piece_tracer(c, b)
    first: dict[str, PieceUse] = {}
    for use in schedule(c):
        first.setdefault(use.piece, use)
    return {name: trace(use) for name, use in first.items()}


def fold_piece(captured: Captured) -> Folded:
    """The passes between capture and conversion."""
    return fold_weights(simplify(lower_einsum(captured)), lambda name: name.startswith("p."))


def parameter_path(config: ModelConfig, name: str, prefix: str) -> str:
    """Path in the parameter tree of a piece's `p.` input: `p.kda.query` in layer 3 is `layers.3.kda.query`."""
    path = name.removeprefix("p.")
    if path == "head" and config.tied:
        path = "embed"
    return f"{prefix}.{path}" if prefix else path


def _capture_embed(params: decoder.Decoder[Tensor], b: Bucket) -> Captured:
    tokens = meta((b.rows, b.tokens), torch.int64)
    f = lambda tokens, p: {"x": decoder.embed(p["embed"], tokens)}  # noqa: E731
    return capture(f, {"tokens": tokens, "p": {"embed": params.embed}})


def _capture_mix(
    c: ModelConfig, layer: LayerConfig, block: Block[Tensor], x: Tensor, state: Any, batch: Batch[Tensor], b: Bucket
) -> Captured:
    def f(x: Tensor, p: Block[Tensor], s: Any, batch: Batch[Tensor]) -> dict[str, Any]:
        y, after = decoder.mix(p, c, layer, x, s, batch, step=b.step)
        return {"x": y, "s": after}

    half: Any = tree.replace(block, ffn_norm=None, dense=None, moe=None)
    return capture(f, {"x": x, "p": half, "s": state, "batch": batch})


def _capture_feed(c: ModelConfig, layer: LayerConfig, block: Block[Tensor], x: Tensor) -> Captured:
    half: Any = tree.replace(block, mixer_norm=None, kda=None, mla=None)
    return capture(lambda x, p: {"x": decoder.feed(p, c, layer, x)}, {"x": x, "p": half})


def _capture_head(c: ModelConfig, params: Any, x: Tensor, batch: Batch[Tensor], b: Bucket) -> Captured:
    def f(x: Tensor, p: dict[str, Tensor], batch: Batch[Tensor]) -> dict[str, Any]:
        last = x if b.step else decoder.last_token(x, batch.counts)
        return {"logits": decoder.head(p["norm"], p["head"], c, last).flatten(0, 1)}

    weights = {"norm": params.norm, "head": params.embed if params.head is None else params.head}
    return capture(f, {"x": x, "p": weights, "batch": batch})
