"""What differs between the graphs of a stage's ranks: where a rank stands, in the few attributes that say so.

Everything else that is a rank's own is an input (`own_index.*`, weights). CANN's fused pair of experts takes its rank
as an attribute: a graph that has one is written once for each place in its group.
"""

from collections.abc import Callable

from .executor.registry import SEMANTICS
from .ge_proto import ModelDef, attr_value, set_attr


def placed_groups(model: ModelDef) -> set[str]:
    """Names of the groups a rank's place in which a graph says; empty: every rank of the stage has the same graph."""
    return {str(attr_value(op.attr[s.group])) for op in model.graph[0].op if (s := SEMANTICS.get(op.type)) and s.own}


def bind_rank(model: ModelDef, place: Callable[[str], int]) -> ModelDef:
    """The graph of one rank.

    Args:
        place: where it stands in the group of a name.
    """
    bound = ModelDef.FromString(model.SerializeToString())
    for op in bound.graph[0].op:
        semantics = SEMANTICS.get(op.type)
        if semantics is not None and semantics.own:
            set_attr(op, semantics.own, place(str(attr_value(op.attr[semantics.group]))))
    return bound
