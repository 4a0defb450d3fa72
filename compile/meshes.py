"""A mesh as `compile` takes it: rules and stages of a phase, and what cannot be, before anything is traced."""

import dataclasses
import math
from collections.abc import Iterator

from kimi_graph.config import ModelConfig
from kimi_graph.errors import CompileError, ShardingError
from kimi_graph.models import decoder
from kimi_graph.models.pipeline import model_stages
from kimi_graph.parallel import Mesh, Rules
from kimi_graph.parallel.legality import Fault, Size, faults, refusal, sizes_of
from kimi_graph.parallel.presets import preset
from kimi_graph.parallel.stages import Stage

from .phases import Bucket


def rules_on(c: ModelConfig, mesh: Mesh, phase: str) -> Rules:
    """The rules of the ranks of one stage in a phase."""
    return preset(c, mesh.stage, phase)


def stages_on(c: ModelConfig, mesh: Mesh, b: Bucket) -> list[Stage]:
    """The pipeline stages of a mesh, the same in every phase but for the sizes of their edges."""
    sparse = decoder.is_sparse(c, b.sequence_pages * b.page)
    tokens = 1 if b.phase == "vision" else b.tokens
    return model_stages(c, mesh.pipe, rows=b.rows, tokens=tokens, sparse=sparse)


def default_chunk(chunk: int, mesh: Mesh | None) -> int:
    """The largest chunk, up to `chunk`, that shares out over a mesh in prefill."""
    ways = 1 if mesh is None else math.lcm(mesh.tensor, mesh.context)
    return max(ways, chunk // ways * ways)


def check_mesh(
    c: ModelConfig, mesh: Mesh, *, phases: tuple[str, ...], rows: int, chunk: int, pages: int | None, sparse: bool
) -> None:
    """Refuse a mesh that a model cannot be on.

    Args:
        rows, chunk, pages: of all ranks; see `driver.Request`. sparse: whether prefill selects keys.

    Raises:
        ShardingError: sizes that do not divide, all of them; more stages than layers.
        CompileError: a direction that graphs are not made for yet.
    """
    sizes = sizes_of(decoder.model_specs(c), c.dtype)
    found: dict[tuple[str, int, str], Fault] = {}
    for phase in phases:
        rules = rules_on(c, mesh, phase)
        chosen = _chosen(phase, rows=rows, chunk=chunk, pages=pages, sparse=sparse)
        for fault in faults([*sizes, *chosen], rules):
            without = dataclasses.replace(fault, padding="")  # which compile does not do
            found.setdefault((fault.size.axis, fault.size.size, fault.size.path), without)
    if found:
        raise ShardingError(refusal(c.name, mesh, sizes, found.values(), lambda m: rules_on(c, m, "decode")))
    model_stages(c, mesh.pipe)
    if mesh.context > 1:
        raise CompileError(
            f"--mesh {mesh}: graphs that share out the tokens of a sequence (cp={mesh.context}) are not made yet; "
            f"the same ranks as {_without_context(mesh)} share out its rows."
        )


def _without_context(mesh: Mesh) -> Mesh:
    return Mesh(pipe=mesh.pipe, data=mesh.data * mesh.context, tensor=mesh.tensor)


def _chosen(phase: str, *, rows: int, chunk: int, pages: int | None, sparse: bool) -> Iterator[Size]:
    """Sizes that the command line chooses."""
    if phase == "vision":
        return
    yield Size(axis="batch", size=rows, path="--batch", count=0)
    if pages is not None:
        yield Size(axis="pages", size=pages, path="--pages", count=0)
    if phase == "prefill":
        yield Size(axis="sequence", size=chunk, path="--chunk", count=0)
        if sparse:
            yield Size(axis="index_queries", size=chunk, path="--chunk", count=0)
