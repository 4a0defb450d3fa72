"""Placement: a mesh of devices, what of it splits each logical axis, and what layer code may say about it."""

from . import body, rules_of_torch  # noqa: F401  the rules of global values register themselves
from .annotate import (
    constrain,
    expert_combine,
    expert_dispatch,
    local_ids,
    own_index,
    shard_map,
    splits,
    summand,
    ways,
)
from .balance import balance
from .mesh import Mesh
from .placement import Placement, place, place_tree, shard, unshard
from .presets import preset
from .rules import Rules

__all__ = [
    "Mesh",
    "Placement",
    "Rules",
    "balance",
    "constrain",
    "expert_combine",
    "expert_dispatch",
    "local_ids",
    "own_index",
    "place",
    "place_tree",
    "preset",
    "shard",
    "shard_map",
    "splits",
    "summand",
    "unshard",
    "ways",
]
