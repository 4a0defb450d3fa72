"""Whether the ranks of a mesh fit their dies: weights and states, the work memory of the largest graph, and what HCCL
and the runtime take. What does not fit is refused before anybody compiles it on a host.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kimi_graph.errors import KimiGraphError
from kimi_graph.parallel.experts import buffer_bytes

from .ge_proto import ModelDef, OpDef, get_attr, shape_of
from .least import RUNTIME
from .rank_tables import communicators
from .scratch import scratch_bytes

BUFFER_MIB = 200  # HCCL_BUFFSIZE unless set


def buffer_mib(models: Mapping[str, ModelDef]) -> int:
    """What HCCL_BUFFSIZE has to be for rows that go to their experts; 0: HCCL's default will do."""
    ops = [op for m in models.values() for op in m.graph[0].op if op.type == "MoeDistributeDispatchV2"]
    return max(map(_buffer_mib, ops), default=0)


def _buffer_mib(op: OpDef) -> int:
    (rows, width), (_, top_k) = shape_of(op.input_desc[0]), shape_of(op.input_desc[1])
    ways, experts = get_attr(op, "ep_world_size"), get_attr(op, "moe_expert_num")
    return -(-buffer_bytes(rows, width, top_k, ways, experts // ways) // 2**20)


@dataclass(frozen=True)
class Held:
    """What a rank of a stage needs of its die.

    Attributes:
        bytes: by what for; graphs share their work memory ("scratch"), which is that of graph `largest`.
    """

    stage: int
    bytes: Mapping[str, int]
    largest: str


def held_by_stage(manifest: Mapping[str, Any], models: Mapping[str, ModelDef]) -> list[Held]:
    """Of each pipeline stage; a bundle of one rank has one.

    Args:
        models: graphs by name.
    """
    mesh, memory = manifest["mesh"], manifest["memory"]
    stages = memory.get("stages", [memory])
    groups = [] if mesh is None else communicators(mesh["groups"])
    each = max(BUFFER_MIB, buffer_mib(models)) << 20
    found = []
    for stage, own in enumerate(stages):
        rank = 0 if mesh is None else stage * mesh["ranks"] // len(stages)
        scratch = {
            g["name"]: scratch_bytes(models[g["name"]]) for g in manifest["graphs"] if g.get("stage", 0) == stage
        }
        largest = max(scratch, key=lambda name: scratch[name])
        parts = {
            "weights": own["weights"],
            "states": own["states"],
            "scratch": scratch[largest],
            "HCCL": sum(rank in c.ranks for c in groups) * 2 * each,
            "runtime": RUNTIME,
        }
        found.append(Held(stage, parts, largest))
    return found


def check_fit(where: str, manifest: Mapping[str, Any], held: list[Held], error: type[KimiGraphError]) -> None:
    """Raises `error` where a rank does not fit its die; `where`: what it is of, for the message."""
    target, die = manifest["target"]["name"], manifest["memory"]["die"]
    for h in held:
        if die is not None and (need := sum(h.bytes.values())) > die:
            parts = ", ".join(f"{name} {size / 2**30:,.2f}" for name, size in h.bytes.items())
            raise error(
                f"{where}: a rank of stage {h.stage} needs {need / 2**30:,.2f} GiB ({parts}; scratch is that of "
                f"{h.largest}), a die of {target} has {die / 2**30:,.2f}. More ranks hold less of weights each, a "
                "shorter --chunk or fewer rows need less scratch; kimi-graph plan says what fits."
            )
