"""Placement: a mesh of devices, what of it splits each logical axis, and what layer code may say about it."""

from . import body, rules_of_torch  # noqa: F401  the rules of global values register themselves
from .annotate import constrain, local_ids, shard_map, summand
from .mesh import Mesh
from .rules import Rules

__all__ = ["Mesh", "Rules", "constrain", "local_ids", "shard_map", "summand"]
