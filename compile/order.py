"""The order of collectives: one order on every rank, or ranks wait for each other for ever.

All ranks of a stage have one graph, so they issue the same collectives. Two that do not depend on each other could
still be started in either order, and on two ranks in both: control edges make one order of them.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .executor import Executor
from .executor.lockstep import Groups, run_together
from .ge_proto import ModelDef, OpDef, bytes_of, is_known, split_edge

COLLECTIVE = ("Hcom", "MoeDistribute")  # begin the types of collectives

# What takes about as long as a collective: attention, selection and KDA read caches and memories, grouped products the
# weights of experts. A plain product counts where an operand is large: a device reads 1 MiB in about a microsecond.
HEAVY = frozenset({
    "FusedInferAttentionScore", "GroupedMatmul", "KdaChunk", "KvQuantSparseFlashAttention", "LightningIndexer",
    "QuantLightningIndexer", "RecurrentGatedDeltaRule", "SparseAttend", "SparseFlashAttention",
})  # fmt: skip
PRODUCTS = frozenset({"BatchMatMul", "MatMul"})
LARGE = 1 << 20  # bytes of an operand


def order_collectives(model: ModelDef) -> int:
    """Control edges from each collective to the next one of the file that does not depend on it. Changes `model`.

    Returns:
        how many it took. In a graph of decoder layers there is nothing to add: each reads what the one before made.
    """
    ops = {op.name: op for op in model.graph[0].op}
    after: dict[str, int] = {}  # the last collective that a node comes after, itself included; by its number
    collectives: list[OpDef] = []
    added = 0
    for op in ops.values():
        known = max((after[split_edge(edge)[0]] for edge in op.input if edge), default=-1)
        if op.type.startswith(COLLECTIVE):
            if known < len(collectives) - 1:
                op.input.append(f"{collectives[-1].name}:-1")
                added += 1
            known = len(collectives)
            collectives.append(op)
        after[op.name] = known
    return added


def is_heavy(op: OpDef) -> bool:
    """Whether a node is worth to be computed while a collective is on its way."""
    large = op.type in PRODUCTS and any(is_known(d) and bytes_of(d) >= LARGE for d in op.input_desc)
    return large or op.type in HEAVY


def overlaps(model: ModelDef, heavy: Callable[[OpDef], bool] = is_heavy) -> dict[str, list[str]]:
    """What may run while each collective is on its way: heavy nodes that neither it needs nor that need it.

    Read off the edges of the graph, control edges included; on a device they then run on different streams.
    """
    ops = {op.name: op for op in model.graph[0].op}
    work = {op.name: 1 << i for i, op in enumerate(filter(heavy, ops.values()))}
    sent = {op.name: 1 << i for i, op in enumerate(o for o in ops.values() if o.type.startswith(COLLECTIVE))}
    before: dict[str, tuple[int, int]] = {}  # heavy nodes and collectives that a node comes after
    for op in ops.values():
        needs, waits = 0, 0
        for name in {split_edge(edge)[0] for edge in op.input if edge}:
            needs |= before[name][0] | work.get(name, 0)
            waits |= before[name][1] | sent.get(name, 0)
        before[op.name] = needs, waits
    return {
        name: [h for h, bit in work.items() if not before[name][0] & bit and not before[h][1] & own]
        for name, own in sent.items()
    }


@dataclass(frozen=True)
class Overlap:
    """Collectives of one type in one kind of part.

    Attributes:
        part: "moe". type: of GE. count: how many. covered: of them, those beside which something heavy may run.
        beside: types of what may run, and how many of each there are beside all of them.
    """

    part: str
    type: str
    count: int
    covered: int
    beside: dict[str, int]


def overlap_kinds(model: ModelDef) -> list[Overlap]:
    """`overlaps` by kind, in the order of the graph."""
    types = {op.name: op.type for op in model.graph[0].op}
    kinds: dict[tuple[str, str], list[list[str]]] = {}
    for name, beside in overlaps(model).items():
        kinds.setdefault((_part(name), types[name]), []).append(beside)
    return [
        Overlap(
            part,
            type_,
            len(all_),
            sum(map(bool, all_)),
            dict(sorted(Counter(types[n] for b in all_ for n in b).items())),
        )
        for (part, type_), all_ in kinds.items()
    ]


def _part(name: str) -> str:
    """The kind of part that a node belongs to: "moe" of `layers.3.moe/HcomAllReduce`."""
    return name.partition("/")[0].rpartition(".")[2].rstrip("0123456789")


def check_order(ranks: Sequence[Executor], groups: Groups) -> None:
    """Prove that all ranks come to the same collectives in the same order, without running anything else.

    Args:
        ranks: the graph of each rank; ranks of a stage share one. groups: rank lists of a group's name.

    Raises:
        BundleError: the first step at which ranks of a group differ, or one waits for ever; both sides are named.
    """
    run_together([executor.meetings() for executor in ranks], groups)
