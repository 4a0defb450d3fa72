"""Graphs of a mesh with pipeline stages: one graph for all ranks of a stage, tied by what it reads and gives.

Each kind of part is traced and converted once for all stages. What crosses a boundary stays outside the graphs: a stage
reads values by their names in the schedule and gives those that it writes itself. A value that only passes through (a
closed block of attention residuals) is handed on by whoever runs the stages.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kimi_graph.parallel import Rules
from kimi_graph.parallel.stages import Stage

from .driver import Clock, Graph, Request, build_pieces, check, fused, stamp_graph
from .kept import Kept
from .phases import Bucket, stage_parts, written_values
from .prototypes import Prototypes
from .torchair_host import Host, Late


@dataclass(frozen=True)
class StageGraph:
    """The graph of one stage.

    Attributes:
        reads: values that it gets from stages before. gives: values, in the order of its outputs.
    """

    stage: Stage
    graph: Graph
    reads: tuple[str, ...]
    gives: tuple[str, ...]


def build_stages(
    request: Request,
    b: Bucket,
    host: Host | Late,
    rules: Rules,
    stages: Sequence[Stage],
    clock: Clock | None = None,
    kept: Kept | None = None,
) -> list[StageGraph]:
    """The graphs of all stages of one bucket.

    Args:
        b: sizes of all ranks of a stage together. rules: of the mesh of one stage. kept: of earlier compiles.
    """
    clock = clock or Clock()
    prototypes = Prototypes(request.target.soc, host.root)
    pieces = build_pieces(request, b, host, prototypes, clock, rules, kept)
    made = []
    written = written_values(request.config, b)
    for part in stage_parts(request.config, b, stages):
        name = stage_name(b, part.stage.index, len(stages))
        with clock.step("stamp"):
            placed = [(use, pieces[use.part]) for use in part.parts]
            graph = stamp_graph(request.config, b, placed, prototypes, part.gives, name)
            graph = fused(graph, request.target, prototypes)
        with clock.step("check"):
            check(graph, request.target, prototypes)
        inputs = [op.name for op in graph.model.graph[0].op if op.type == "Data"]
        reads = tuple(name for name in inputs if name in written)
        graph = replace(graph, stage=part.stage.index, reads=reads, gives=part.gives)
        made.append(StageGraph(part.stage, graph, reads, part.gives))
    return made


def stage_name(b: Bucket, stage: int, stages: int) -> str:
    """What the graph of a stage is called: `decode_b2_s0`, without a number where there is one stage."""
    return b.name if stages == 1 else f"{b.name}_s{stage}"
