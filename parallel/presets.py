"""Rules for the models of the family, by phase: what each logical axis is split over, and why.

One table serves every model: a config decides no more than whether its vision tower can be split. States are shared by
all phases, so the axes of states have the same rule in each.
"""

from collections.abc import Iterator

from kimi_graph.config import ModelConfig, MoeConfig
from kimi_graph.errors import ShardingError

from .mesh import NAMES, Axes, Mesh
from .rules import Rules

PHASES = ("vision", "prefill", "decode")

# Logical axis -> direction, and why so; where phases or choices differ see `_varying`.
_ALWAYS: dict[str, tuple[str | None, str]] = {
    # activations and states
    "batch": ("data", "rows of a batch do not depend on each other"),
    "slots": (
        "data",
        "a row's memory lives where the row is computed; along context each rank has what the last stretch left",
    ),
    "patches": (None, "every patch of a picture attends to every other"),
    # weights
    "vocab": ("tensor", "a rank looks up the tokens it has; the head's results stay split"),
    "embed": (None, "every rank computes with whole hidden states; they are split over batch and sequence only"),
    "heads": ("tensor", "heads do not depend on each other: one sum after their output projection"),
    "key": (None, "a head stays on one device"),
    "value": (None, "a head stays on one device"),
    "gate_rank": (None, "thin: to split it would cost a sum between two small matrices"),
    "latent": (None, "every head reads the whole latent, and its norm runs over all of it"),
    "query_latent": (None, "its norm runs over all of it, and the indexer reads it"),
    "index_heads": (None, "the indexer sums over its heads before it chooses, inside one operator"),
    "ffn": ("tensor", "channels do not depend on each other: one sum after the down projection"),
    "experts": ("experts", "an expert stays whole; ep says over how many ranks"),
    "expert_ffn": (None, "an expert stays whole on its rank"),
    "vision_embed": (None, "every rank computes with whole hidden states of the tower"),
}


def preset(
    config: ModelConfig, mesh: Mesh, phase: str = "decode", *, exchange: bool = False, split_cache: bool = False
) -> Rules:
    """The rules of a model on a mesh in one phase.

    Args:
        phase: "vision", "prefill" or "decode".
        exchange: every row goes to its experts (all_to_all: rows are split over all of data x tensor first); else
            experts read all rows that their ranks share and their results are summed, which suits few rows.
        split_cache: caches are split by sequence over the tensor axis as well (decode context parallelism): a rank
            keeps 1/tp of every sequence, and attends with all heads to its part.

    Raises:
        ShardingError: a phase the model does not have.
    """
    if phase not in PHASES or (phase == "vision" and config.vision is None):
        legal = PHASES if config.vision else PHASES[1:]
        raise ShardingError(f"phase {phase!r}: the phases of {config.name} are {', '.join(legal)}.")
    rows = {
        **_ALWAYS,
        **dict(_varying(mesh, phase, exchange=exchange, split_cache=split_cache)),
        "expert_embed": _expert_embed(config, mesh, exchange),
        **dict(_tower(config, mesh)),
    }
    rules = Rules.of(mesh, {axis: where for axis, (where, _) in rows.items()})
    return Rules(mesh, rules.mapping, {axis: why for axis, (_, why) in rows.items()})


Row = tuple[str, tuple[str | Axes | None, str]]


def _varying(mesh: Mesh, phase: str, *, exchange: bool, split_cache: bool) -> Iterator[Row]:
    prefill = phase == "prefill"
    cached: Axes = ("context", "tensor") if split_cache else ("context",)
    yield (
        "sequence",
        (None, "between layers every rank of context has all new tokens: any may belong to its pages of a cache"),
    )
    why = "a sequence's cache lies where its row is computed, its pages are dealt to the ranks that share it in turn"
    yield "pages", (("data", *cached), why if split_cache else f"{why}; split_cache: over tensor too")
    yield "cached", (cached, "a rank scores its pages of a sequence and attends to them; the parts are merged")
    yield (
        "attn_heads",
        (None, "every rank holds a part of each sequence, so it needs all heads")
        if split_cache
        else ("tensor", "heads do not depend on each other"),
    )
    one = (None, "a step has one query a row")
    why = "a rank takes a stretch of the new tokens: attends with it to all keys, goes on with KDA from the one before"
    yield "queries", ("context", why) if prefill else one
    why = "the indexer has no heads to split, so its queries are"
    yield "index_queries", (("context", "tensor"), why) if prefill else one
    yield "token", (_token(mesh, prefill, exchange), _TOKEN[exchange])


_TOKEN = {
    False: "experts read every row of the ranks that share them out, so rows are whole along those",
    True: "a row is sent to its experts by one rank alone",
}


def _token(mesh: Mesh, prefill: bool, exchange: bool) -> Axes:
    rows = (*mesh.atoms("data"), *(("context",) if prefill else ()))
    if exchange:
        return (*rows, *mesh.atoms("tensor"))
    return tuple(axis for axis in rows if axis not in mesh.atoms("experts"))


def _expert_embed(config: ModelConfig, mesh: Mesh, exchange: bool) -> tuple[str | None, str]:
    """The latent projections are a small part of a layer: a width that does not divide is whole, and that is said."""
    if exchange:
        return None, "each rank projects its own rows, with the whole matrix"
    widths = {m.latent for m in (layer.ffn for layer in config.layers) if isinstance(m, MoeConfig) and m.latent}
    odd = [width for width in sorted(widths) if width % mesh.tensor]
    if odd:
        return None, f"{odd[0]:,} does not divide over tp={mesh.tensor}: every rank projects to all of it"
    return "tensor", "every rank projects all rows to a part of the experts' width"


def _tower(config: ModelConfig, mesh: Mesh) -> Iterator[Row]:
    """The vision tower is small too. Without its heads, nothing of it is split: it then needs no collective at all."""
    c, tensor = config.vision, mesh.tensor
    heads, widths = (1, ()) if c is None else (c.heads, (c.ffn, c.projector_ffn))
    odd = [width for width in widths if width % tensor]
    split = "tensor", "as in the text model"
    if c is not None and heads % tensor:
        split = None, f"the tower's {heads} heads do not divide over tp={tensor}: every rank computes all of it"
    yield "vision_heads", split
    if odd and split[0]:
        split = None, f"the tower's {odd[0]:,} channels do not divide over tp={tensor}: every rank computes them"
    yield "vision_ffn", split


def directions(mesh: Mesh, axes: Axes) -> tuple[str, ...]:
    """The directions that atomic axes are parts of, outermost first."""
    return tuple(name for name in NAMES if set(axes) & set(mesh.atoms(name)))
