"""Placement: what layer code may say about it. Without a mesh all of it is the identity."""

from .annotate import constrain, local_ids, shard_map, summand

__all__ = ["constrain", "local_ids", "shard_map", "summand"]
