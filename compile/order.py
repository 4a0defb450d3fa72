"""The order of collectives: one order on every rank, or ranks wait for each other for ever.

All ranks of a stage have one graph, so they issue the same collectives. Two that do not depend on each other could
still be started in either order, and on two ranks in both: control edges make one order of them.
"""

from collections.abc import Sequence

from .executor import Executor
from .executor.lockstep import Groups, run_together
from .ge_proto import ModelDef, OpDef, split_edge

COLLECTIVE = ("Hcom", "MoeDistribute")  # begin the types of collectives


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


def overlaps(model: ModelDef, types: Sequence[str] = ("GroupedMatmul",)) -> dict[str, list[str]]:
    """What may run while each collective is on its way: nodes of these types that neither it needs nor that need it.

    Read off the edges of the graph, control edges included; on a device they then run on different streams.
    """
    ops = {op.name: op for op in model.graph[0].op}
    heavy = {op.name: 1 << i for i, op in enumerate(o for o in ops.values() if o.type in types)}
    sent = {op.name: 1 << i for i, op in enumerate(o for o in ops.values() if o.type.startswith(COLLECTIVE))}
    before: dict[str, tuple[int, int]] = {}  # heavy nodes and collectives that a node comes after
    for op in ops.values():
        reads = [split_edge(edge)[0] for edge in op.input if edge]
        needs, waits = 0, 0
        for name in reads:
            needs |= before[name][0] | heavy.get(name, 0)
            waits |= before[name][1] | sent.get(name, 0)
        before[op.name] = needs, waits
    return {
        name: [h for h, bit in heavy.items() if not before[name][0] & bit and not before[h][1] & own]
        for name, own in sent.items()
    }


def check_order(ranks: Sequence[Executor], groups: Groups) -> None:
    """Prove that all ranks come to the same collectives in the same order, without running anything else.

    Args:
        ranks: the graph of each rank; ranks of a stage share one. groups: rank lists of a group's name.

    Raises:
        BundleError: the first step at which ranks of a group differ, or one waits for ever; both sides are named.
    """
    run_together([executor.meetings() for executor in ranks], groups)
