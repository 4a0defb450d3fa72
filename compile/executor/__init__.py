"""A CPU executor of GE graphs: what a bundle's graphs compute, read from their bytes and run with torch."""

from .infer import infer_shapes
from .lockstep import run_together
from .node import Node, Selections
from .registry import PROVENANCES, SEMANTICS, provenance_counts, provenance_table
from .run import Executor, Ran

__all__ = [
    "PROVENANCES",
    "SEMANTICS",
    "Executor",
    "Node",
    "Ran",
    "Selections",
    "infer_shapes",
    "provenance_counts",
    "provenance_table",
    "run_together",
]
