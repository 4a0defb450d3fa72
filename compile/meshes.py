"""A model on the ranks of a mesh: rules and stages of every phase, and what cannot be, before anything is traced."""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kimi_graph.config import ModelConfig, arranged
from kimi_graph.errors import CompileError, ShardingError
from kimi_graph.models import decoder
from kimi_graph.models.pipeline import model_stages
from kimi_graph.parallel import Mesh, Rules
from kimi_graph.parallel.legality import Fault, Size, check_redundant, faults, pad, refusal, sizes_of
from kimi_graph.parallel.presets import preset
from kimi_graph.parallel.stages import Stage

from .phases import Bucket


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A model on the ranks of a mesh.

    Attributes:
        config: of the model as graphs have it, see `config.arranged`.
        mesh: numbers of rows, slots and pages beside it are those of all its ranks.
        exchange, split_cache: see `presets.preset`.
        pad: the vocabulary and experts are padded where they must be.
    """

    config: ModelConfig
    mesh: Mesh
    exchange: bool = False
    split_cache: bool = False
    pad: bool = False

    def rules(self, phase: str) -> Rules:
        """Of the ranks of one stage."""
        if phase not in self._made:
            rules = self.rules_on(self.mesh, phase)
            self._made[phase] = rules.padded(pad(self.sizes, rules) if self.pad else {})
        return self._made[phase]

    @functools.cached_property
    def _made(self) -> dict[str, Rules]:
        return {}

    def rules_on(self, mesh: Mesh, phase: str) -> Rules:
        """Of the same choices on any mesh, nothing padded."""
        return preset(self.config, mesh.stage, phase, exchange=self.exchange, split_cache=self.split_cache)

    @functools.cached_property
    def sizes(self) -> list[Size]:
        """Of the named axes of all parameters."""
        return _sizes(self.config)

    def stages(self, b: Bucket) -> list[Stage]:
        """The pipeline stages, the same in every phase but for the sizes of their edges."""
        sparse = decoder.is_sparse(self.config, b.sequence_pages * b.page)
        tokens = 1 if b.phase == "vision" else b.tokens
        return model_stages(self.config, self.mesh.pipe, rows=b.rows, tokens=tokens, sparse=sparse)

    @property
    def shards(self) -> int:
        """Into how many parts rows, and the slots and pages that are theirs, fall."""
        return self.rules("decode").ways("batch")

    @property
    def pools(self) -> int:
        """Ranks that share a sequence's pages, each with a pool of its own."""
        return self.rules("decode").ways("cached")

    def described(self) -> dict[str, Any]:
        """For a manifest; `layout_of` reads it."""
        moe = self.config.moe
        return {
            "text": str(self.mesh),
            "exchange": self.exchange,
            "split_cache": self.split_cache,
            "padded": self.pad,
            "redundant_experts": moe.redundant if moe else 0,
            "moe_chunks": moe.chunks if moe else 1,
        }


@functools.lru_cache(maxsize=4)  # a plan tries many meshes
def _sizes(config: ModelConfig) -> list[Size]:
    return sizes_of(decoder.model_specs(config), config.dtype)


def layout_of(config: ModelConfig, entry: Mapping[str, Any]) -> Layout:
    """The layout that a manifest describes.

    Raises:
        ShardingError, KeyError, TypeError, AttributeError: it is none.
    """
    flags = {name: entry[name] for name in ("exchange", "split_cache", "padded")}
    numbers = {name: entry[name] for name in ("redundant_experts", "moe_chunks")}
    if any(type(flag) is not bool for flag in flags.values()) or any(type(n) is not int for n in numbers.values()):
        raise ShardingError(f"{flags | numbers}: yes or no, and whole numbers, were expected.")
    made = arranged(config, **numbers)
    mesh = Mesh.parse(entry["text"])
    layout = Layout(
        config=made, mesh=mesh, exchange=flags["exchange"], split_cache=flags["split_cache"], pad=flags["padded"]
    )
    try:
        _check_experts(layout)
    except CompileError as error:
        raise ShardingError(str(error)) from None
    return layout


def default_chunk(chunk: int, mesh: Mesh | None) -> int:
    """The largest chunk, up to `chunk`, that shares out over a mesh in prefill; the smallest that does, if none."""
    ways = 1 if mesh is None else mesh.tensor * mesh.context
    return max(ways, chunk // ways * ways)


def check_layout(
    layout: Layout, *, phases: tuple[str, ...], rows: int, chunk: int, pages: int | None, sparse: bool
) -> None:
    """Refuse a mesh that a model cannot be on.

    Args:
        rows, chunk, pages: of all ranks; see `driver.Request`. sparse: whether prefill selects keys.

    Raises:
        ShardingError: sizes that do not divide, all of them; more stages than layers; copies that cannot be.
        CompileError: a choice without what it is for.
    """
    c, mesh = layout.config, layout.mesh
    _check_experts(layout)
    found: dict[tuple[str, int, str], Fault] = {}
    for phase in phases:
        rules = layout.rules(phase)
        chosen = _chosen(layout, phase, rows=rows, chunk=chunk, pages=pages, sparse=sparse)
        for fault in faults([*layout.sizes, *chosen], rules):
            found.setdefault((fault.size.axis, fault.size.size, fault.size.path), fault)
    if found:
        raise ShardingError(refusal(c.name, mesh, layout.sizes, found.values(), lambda m: layout.rules_on(m, "decode")))
    model_stages(c, mesh.pipe)
    moe = c.moe
    if layout.exchange and moe is not None:
        tokens = {"prefill": chunk, "decode": 1}
        most = max((rows * tokens[p] // layout.rules(p).ways("token") for p in phases if p in tokens), default=1)
        if moe.chunks > most:
            raise CompileError(f"--moe-chunks {moe.chunks:,}: a rank sends {most:,} rows of a step; at most {most:,}.")


def _check_experts(layout: Layout) -> None:
    """Copies and chunks are of experts, and chunks of rows that are sent."""
    moe = layout.config.moe
    if moe is None:
        return
    if moe.redundant:
        check_redundant(moe.experts, moe.redundant, layout.rules("decode").ways("experts"))
    if moe.chunks < 1:
        raise CompileError(f"--moe-chunks {moe.chunks}: the smallest is 1.")
    if moe.chunks > 1 and not layout.exchange:
        raise CompileError(f"--moe-chunks {moe.chunks}: rows are sent to their experts with --exchange alone.")


def _chosen(layout: Layout, phase: str, *, rows: int, chunk: int, pages: int | None, sparse: bool) -> Iterator[Size]:
    """Sizes that the command line chooses."""
    if phase == "vision":
        return
    yield Size(axis="batch", size=rows, path="--batch", count=0)
    if pages is not None:
        yield Size(axis="pages", size=pages, path="--pages", count=0)
    if phase == "prefill":
        yield Size(axis="queries", size=chunk, path="--chunk", count=0)
        if sparse:
            yield Size(axis="index_queries", size=chunk, path="--chunk", count=0)
    if layout.exchange and rows % layout.mesh.data == 0:
        tokens, path = (chunk, "--batch x --chunk") if phase == "prefill" else (1, "--batch")
        yield Size(axis="token", size=rows * tokens, path=path, count=0)
