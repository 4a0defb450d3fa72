"""Placement: the two things layer code may say about it. Without a mesh both are the identity."""

from .annotate import constrain, shard_map

__all__ = ["constrain", "shard_map"]
