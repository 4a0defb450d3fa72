"""Graphs of a mesh with pipeline stages: one graph for all ranks of a stage, tied by what it reads and gives.

Each kind of part is traced and converted once for all stages. What crosses a boundary stays outside the graphs: a stage
reads values by their names in the schedule and gives those that it writes itself. A value that only passes through (a
closed block of attention residuals) is handed on by whoever runs the stages.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kimi_graph.models.decoder import Use
from kimi_graph.parallel import Rules
from kimi_graph.parallel.stages import Stage, parts_by_stage

from .driver import Clock, Graph, Request, build_pieces, check, stamp_graph
from .phases import Bucket, uses
from .prototypes import Prototypes
from .torchair_host import Host


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
    request: Request, b: Bucket, host: Host, rules: Rules, stages: Sequence[Stage], clock: Clock | None = None
) -> list[StageGraph]:
    """The graphs of all stages of one bucket.

    Args:
        b: sizes of all ranks of a stage together. rules: of the mesh of one stage.
    """
    clock = clock or Clock()
    prototypes = Prototypes(request.target.soc, host.root)
    pieces = build_pieces(request, b, host, prototypes, clock, rules)
    made = []
    schedule = uses(request.config, b)
    written = {name for use in schedule for name in use.writes}
    for stage, steps in zip(stages, parts_by_stage(schedule, [s.layers for s in stages]), strict=True):
        own = [use for use in steps if isinstance(use, Use)]
        gives = _gives(stage, own)
        with clock.step("stamp"):
            placed = [(use, pieces[use.part]) for use in own]
            graph = stamp_graph(request.config, b, placed, prototypes, gives)
        with clock.step("check"):
            check(graph, request.target, prototypes)
        inputs = [op.name for op in graph.model.graph[0].op if op.type == "Data"]
        made.append(StageGraph(stage, graph, tuple(name for name in inputs if name in written), gives))
    return made


def _gives(stage: Stage, own: Sequence[Use]) -> tuple[str, ...]:
    """What a stage writes that later ones read; the last one's results."""
    if stage.edge is None:
        return own[-1].writes
    written = {name for use in own for name in use.writes}
    return tuple(name for name in stage.edge.values if name in written)
