"""What differs between the graphs of a stage's ranks: where a rank stands, in the few attributes that say so.

Everything else that is a rank's own is an input (`own_index.*`, weights). CANN's fused pair of experts takes its rank
as an attribute, which is 0 in the file: whoever loads a graph sets it, a hundred ranks need no hundred files.
"""

from collections.abc import Callable

from .executor.registry import SEMANTICS, Semantics
from .ge_proto import ModelDef, OpDef, attr_value, set_attr


def _own(op: OpDef) -> Semantics | None:
    """What is known of an operator that says where its rank stands."""
    semantics = SEMANTICS.get(op.type)
    return semantics if semantics is not None and semantics.own else None


def group_of(op: OpDef) -> str:
    """The group that a collective names."""
    semantics = SEMANTICS.get(op.type)
    return str(attr_value(op.attr["group" if semantics is None else semantics.group]))


def placed_attributes(model: ModelDef) -> dict[str, dict[str, str]]:
    """By operator type: the attribute that is a rank's place, and in which group; empty: all ranks have one graph."""
    found = {op.type: (own.own, group_of(op)) for op in model.graph[0].op if (own := _own(op))}
    return {kind: {"attribute": attribute, "group": group} for kind, (attribute, group) in sorted(found.items())}


def placed_groups(model: ModelDef) -> set[str]:
    """Names of the groups a rank's place in which a graph says."""
    return {entry["group"] for entry in placed_attributes(model).values()}


def bind_rank(model: ModelDef, place: Callable[[str], int]) -> ModelDef:
    """The graph of one rank.

    Args:
        place: where it stands in the group of a name.
    """
    bound = ModelDef.FromString(model.SerializeToString())
    for op in bound.graph[0].op:
        if own := _own(op):
            set_attr(op, own.own, place(group_of(op)))
    return bound
