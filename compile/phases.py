"""Phases and pieces: what is traced once, and which layers it serves.

A phase (prefill, decode) of a bucket (rows, tokens, capacity) is one static graph. It is made of the parts of the
model's schedule; each kind of part is captured once.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kimi_graph import tree
from kimi_graph.config import MlaConfig, ModelConfig, MoeConfig, VisionConfig
from kimi_graph.errors import CompileError
from kimi_graph.layers import Batch, VisionTables
from kimi_graph.models import decoder
from kimi_graph.models.decoder import Use
from kimi_graph.models.vision import run_vision_part, vision_part_params, vision_schedule
from kimi_graph.parallel import Rules
from kimi_graph.parallel.stages import Stage, parts_by_stage

from .capture import Captured, capture
from .passes import Folded, fold_weights, lower_einsum, simplify
from .sharded import ShardedCapture, capture_on


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """One static shape.

    Attributes:
        phase: "vision", "prefill" or "decode".
        rows: sequences.
        tokens: new tokens a row; patches of a picture.
        page: tokens of a page.
        pages: of the pool, null page included.
        sequence_pages: pages of one sequence.
        slots: KDA slots, null slot included.
        images: rows of image embeddings that vision gives and prefill takes (models with vision).
    """

    phase: str
    rows: int
    tokens: int
    page: int
    pages: int
    sequence_pages: int
    slots: int
    images: int = 0

    @property
    def step(self) -> bool:
        """Whether each row has one token."""
        return self.phase == "decode"

    @property
    def name(self) -> str:
        """As its graph is called, by the phase, its rows and its tokens a row."""
        if self.phase == "vision":
            return f"vision_n{self.tokens}"
        return f"{self.phase}_b{self.rows}" + ("" if self.step else f"_t{self.tokens}")


def pools(rules: Rules, rows: int, sequence_pages: int) -> tuple[int, int]:
    """Slots and pages of all ranks; every rank's pools have one more than its rows need, which is nobody's.

    Args:
        rows: of all ranks.
        sequence_pages: of one sequence, on all ranks that share it.
    """
    own = rows // rules.ways("batch")
    pages = own * sequence_pages // rules.ways("cached") + 1
    return (own + 1) * rules.ways("slots"), pages * rules.ways("pages")


def meta(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def batch_inputs(c: ModelConfig, b: Bucket) -> Batch[Tensor]:
    angles = None if c.rotation is None else meta((b.rows, b.tokens, c.rotation[1] // 2), torch.float32)
    return Batch(
        slots=meta((b.rows,), torch.int32),
        lengths=meta((b.rows,), torch.int64),
        counts=meta((b.rows,), torch.int64),
        block_table=meta((b.rows, b.sequence_pages), torch.int32),
        slot_mapping=meta((b.rows * b.tokens,), torch.int64),
        cos=angles,
        sin=angles,
    )


@functools.lru_cache(maxsize=4)
def meta_params(c: ModelConfig) -> decoder.Decoder[Tensor]:
    return tree.map(lambda s: meta(s.shape, s.dtype or c.dtype), decoder.model_specs(c))


def meta_states(c: ModelConfig, b: Bucket) -> tuple[Any, ...]:
    specs = decoder.state_specs(c, slots=b.slots, pages=b.pages, page=b.page, dtype=c.dtype)
    return tree.map(lambda s: meta(s.shape, s.dtype), specs)


def uses(c: ModelConfig, b: Bucket) -> tuple[Use, ...]:
    """The parts of the whole graph, in order.

    Raises:
        CompileError: the vision phase of a model without vision.
    """
    if b.phase == "vision":
        return vision_schedule(_vision(c))
    sparse = decoder.is_sparse(c, b.sequence_pages * b.page)
    return decoder.schedule(c, sparse=sparse, vision=c.vision is not None and not b.step)


def _vision(c: ModelConfig) -> VisionConfig:
    if c.vision is None:
        raise CompileError(f"{c.name} has no vision tower; its phases are prefill and decode.")
    return c.vision


def step_inputs(c: ModelConfig, b: Bucket) -> dict[str, Any]:
    """What every part may read of a step, by its name in the graph: `batch`, or `tables` of a picture."""
    if b.phase != "vision":
        return {"batch": batch_inputs(c, b)}
    v, f32 = _vision(c), torch.float32
    angles = meta((b.tokens, v.head_dim // 2), f32)
    rows, columns = (meta((b.tokens, size), f32) for size in v.grid)
    count = meta((1,), torch.int64)
    return {"tables": VisionTables(rows=rows, columns=columns, cos=angles, sin=angles, time=None, count=count)}


def piece_tracer(c: ModelConfig, b: Bucket) -> Callable[[Use], Captured]:
    """A function that captures a part at its place.

    Input names: `in0`, `in1` ... for the values it reads, `batch.*` or `tables.*`, `p.*`, `s.*`; outputs `out.0` ...
    and `s.*`.

    Raises:
        CompileError: the vision phase of a model without vision.
    """
    piece = _piece_at(c, b)
    return lambda use: capture(*piece(use))


def sharded_piece_tracer(c: ModelConfig, b: Bucket, rules: Rules) -> Callable[[Use], ShardedCapture]:
    """`piece_tracer` on a mesh: the same names, local shapes, one graph for all ranks. `b` has the global sizes.

    Raises:
        CompileError: the vision phase of a model without vision.
    """
    piece, axes = _piece_at(c, b), _piece_axes(c, b)
    return lambda use: capture_on(rules, *piece(use), *axes(use))


def _piece_at(c: ModelConfig, b: Bucket) -> Callable[[Use], tuple[Callable[..., dict[str, Any]], dict[str, Any]]]:
    """What is to be captured of a part: a function, and its arguments by name."""
    shapes, inputs = _value_shapes(c, b), step_inputs(c, b)
    trace = _vision_part(c, b) if b.phase == "vision" else _text_part(c, b)

    def piece(use: Use) -> tuple[Callable[..., dict[str, Any]], dict[str, Any]]:
        f, params, state = trace(use)
        given = {f"in{i}": shapes(name) for i, name in enumerate(use.reads)}
        return f, {**given, "p": params, "s": state, **inputs}

    return piece


def _piece_axes(c: ModelConfig, b: Bucket) -> Callable[[Use], tuple[dict[str, Any], dict[str, Any]]]:
    """Logical axes of a part's arguments and of its results, in trees like theirs."""
    specs, vision = decoder.model_specs(c), b.phase == "vision"
    states = decoder.state_specs(c, slots=b.slots, pages=b.pages, page=b.page, dtype=c.dtype)
    inputs = step_axes(c, b)

    def axes(use: Use) -> tuple[dict[str, Any], dict[str, Any]]:
        params = vision_part_params(use, specs.vision) if vision else decoder.part_params(use, specs)
        state = states[use.layer] if use.layer is not None and _has_state(c, use) else {}
        given = {f"in{i}": value_axes(name, vision=vision) for i, name in enumerate(use.reads)}
        results: dict[str, Any] = {"out": [value_axes(name, vision=vision) for name in use.writes]}
        return {**given, "p": params, "s": state, **inputs}, results if vision else results | {"s": state}

    return axes


def value_axes(name: str, *, vision: bool = False) -> str:
    """Logical axes of a value of the schedule, as parts read and write it."""
    known = {
        "tokens": "batch sequence",
        "vision.rows": "batch sequence",
        "vision.values": "_ embed",
        "vision.patches": "patches _",
        "selected": "batch sequence _",
        "logits": "batch vocab",
    }
    if name.endswith(".moe.table"):
        return "_"
    return known.get(name, "patches vision_embed" if vision else "batch sequence embed")


def step_axes(c: ModelConfig, b: Bucket) -> dict[str, Any]:
    """Logical axes of `step_inputs`."""
    if b.phase == "vision":
        table: Any = "patches _"
        tables: Any = VisionTables(rows=table, columns=table, cos=table, sin=table, time=None, count="_")
        return {"tables": tables}
    angles: Any = None if c.rotation is None else "batch sequence _"
    row: Any = "batch"
    table = "batch _"
    batch = Batch(slots=row, lengths=row, counts=row, block_table=table, slot_mapping=row, cos=angles, sin=angles)
    return {"batch": batch}


def _has_state(c: ModelConfig, use: Use) -> bool:
    return use.layer is not None and decoder.mixer_part(c.layers[use.layer]) == use.part


Traceable = tuple[Callable[..., dict[str, Any]], Any, Any]  # a function, its parameters and its state


def _text_part(c: ModelConfig, b: Bucket) -> Callable[[Use], Traceable]:
    params, states = meta_params(c), meta_states(c, b)
    how = decoder.How(step=b.step, last_only=not b.step)

    def part(use: Use) -> Traceable:
        def f(p: Any, s: Any, batch: Batch[Tensor], **given: Tensor) -> dict[str, Any]:
            values = [given[f"in{i}"] for i in range(len(given))]
            results, after = decoder.run_part(use, c, p, values, s, batch, how)
            if use.part == "head":
                results = [results[0].flatten(0, 1)]
            return {"out": results, "s": {} if after is None else after}

        state = states[use.layer] if use.layer is not None and _has_state(c, use) else {}
        return f, decoder.part_params(use, params), state

    return part


def _vision_part(c: ModelConfig, b: Bucket) -> Callable[[Use], Traceable]:
    v, params = _vision(c), meta_params(c).vision

    def part(use: Use) -> Traceable:
        def f(p: Any, s: Any, tables: VisionTables[Tensor], in0: Tensor) -> dict[str, Any]:
            return {"out": [run_vision_part(use, v, p, in0, tables)]}

        return f, vision_part_params(use, params), {}

    return part


def _value_shapes(c: ModelConfig, b: Bucket) -> Callable[[str], Tensor]:
    """The meta tensor a value is."""
    tokens = meta((b.rows, b.tokens), torch.int64)
    top_k = [m.indexer.top_k for m in (x.mixer for x in c.layers) if isinstance(m, MlaConfig) and m.indexer]

    tables = {
        decoder.table_name(i): meta((x.ffn.table,), torch.int32)
        for i, x in enumerate(c.layers)
        if isinstance(x.ffn, MoeConfig)
    }

    def shape(name: str) -> Tensor:
        if name in ("tokens", "vision.rows"):
            return tokens
        if name == "vision.values":
            return meta((b.images, c.embed), c.dtype)
        if name in tables:
            return tables[name]
        if name == "vision.patches":
            return meta((b.tokens, 3 * _vision(c).patch ** 2), c.dtype)
        if b.phase == "vision":
            return meta((b.tokens, _vision(c).embed), c.dtype)
        if name == "selected":
            return meta((b.rows, b.tokens, top_k[0]), torch.int32)
        return meta((b.rows, b.tokens, c.embed), c.dtype)

    return shape


def graph_inputs(c: ModelConfig, b: Bucket, crossing: Iterable[str] = ()) -> dict[str, Tensor]:
    """Every input a graph of the bucket may have, besides weights, states and generated ones.

    Args:
        crossing: values that other pipeline stages write.
    """
    shapes, schedule = _value_shapes(c, b), uses(c, b)
    written = {name for use in schedule for name in use.writes} - set(crossing)
    values = {name: shapes(name) for use in schedule for name in use.reads if name not in written}
    return values | dict(tree.items(step_inputs(c, b)))


def named_axes(c: ModelConfig, b: Bucket) -> Callable[[str], str]:
    """Logical axes of an input or a result of a graph, by its name; weights and states have theirs in specs."""
    known = dict(tree.items(step_axes(c, b)))
    return lambda name: known.get(name) or value_axes(name, vision=b.phase == "vision")


@dataclass(frozen=True)
class StageParts:
    """What one pipeline stage runs in a bucket.

    Attributes:
        parts: of the schedule, in order.
        gives: values, in the order of its outputs: what it writes that later stages read, or the results of the last
            one.
    """

    stage: Stage
    parts: tuple[Use, ...]
    gives: tuple[str, ...]


def stage_parts(c: ModelConfig, b: Bucket, stages: Sequence[Stage]) -> list[StageParts]:
    """What every stage runs in a bucket; pictures are the first one's alone."""
    schedule = uses(c, b)
    if b.phase == "vision":
        return [StageParts(stages[0], schedule, schedule[-1].writes)]
    found = []
    for stage, steps in zip(stages, parts_by_stage(schedule, [s.layers for s in stages]), strict=True):
        own = tuple(use for use in steps if isinstance(use, Use))
        written = {name for use in own for name in use.writes}
        crossing = own[-1].writes if stage.edge is None else tuple(n for n in stage.edge.values if n in written)
        found.append(StageParts(stage, own, crossing))
    return found


def written_values(c: ModelConfig, b: Bucket) -> set[str]:
    """Values that parts of the schedule write; an input of that name comes from another stage."""
    return {name for use in uses(c, b) for name in use.writes}


def capture_pieces(c: ModelConfig, b: Bucket) -> dict[str, Captured]:
    """Every kind of part the model needs, captured where it is used first."""
    return _first_of_each(c, b, piece_tracer(c, b))


def capture_sharded_pieces(c: ModelConfig, b: Bucket, rules: Rules) -> dict[str, ShardedCapture]:
    """`capture_pieces` on a mesh: each once, for all ranks."""
    return _first_of_each(c, b, sharded_piece_tracer(c, b, rules))


def _first_of_each(c: ModelConfig, b: Bucket, trace: Callable[[Use], Any]) -> dict[str, Any]:
    first: dict[str, Use] = {}
    for use in uses(c, b):
        first.setdefault(use.part, use)
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


def state_name(config: ModelConfig, use: Use, leaf: str) -> str:
    """Name of a part's state in a graph: `s.layers.3.kda.memory`."""
    assert use.layer is not None
    return f"s.{use.prefix}.{config.layers[use.layer].kinds[0]}.{leaf}"


def place_of(use: Use) -> str:
    """What the names of a part's nodes start with."""
    return f"{use.prefix}.{use.part}/" if use.prefix else f"{use.part}/"
