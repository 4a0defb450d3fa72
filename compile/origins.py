"""Where the nodes of a graph come from: the source line of layer code, and the traced value each edge stands for.

Kept per piece, as pieces were converted; a stamped node `layers.3.kda/MatMul_1` is node `MatMul_1` of the piece `kda`.
"""

from collections.abc import Mapping
from typing import TypedDict


class Origins(TypedDict):
    """Of one piece.

    Attributes:
        lines: source line by node.
        values: edges of the outputs of each traced call, empty where no node is left.
    """

    lines: dict[str, str]
    values: dict[str, list[str]]


def split_name(node: str) -> tuple[str, str]:
    """Piece and node in the piece of a stamped node's name; the piece is empty for inputs and NetOutput."""
    where, slash, name = node.partition("/")
    return (where.rpartition(".")[2], name) if slash else ("", node)


def source_of(origins: Mapping[str, Origins], node: str) -> str:
    """Source line of a stamped node; empty for inputs, NetOutput and what is not known."""
    piece, name = split_name(node)
    return origins[piece]["lines"].get(name, "") if piece in origins else ""
