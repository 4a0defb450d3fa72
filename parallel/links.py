"""Which groups of ranks leave the fast domain of a machine: a host, or a superpod whose links are alike throughout.

Source: fact sheet of Ascend, C.2 (dies of a node and of a supernode).
"""

from dataclasses import dataclass

from kimi_graph.errors import ShardingError

from .mesh import FLAGS, Mesh


@dataclass(frozen=True)
class Domain:
    """Dies that reach each other over the scale-up network; beyond it lies the slower scale-out network."""

    name: str
    dies: int


DOMAINS = {
    "a2": Domain("host", 8),
    "a3": Domain("host", 16),
    "a3-superpod": Domain("superpod", 768),
    "950pr": Domain("host", 8),
    "950dt": Domain("host", 8),
    "950-superpod": Domain("superpod", 8192),
}


def domains_spanned(mesh: Mesh, target: str) -> dict[str, int]:
    """Hosts (or superpods) that one group of each direction spreads over, ranks laid out in order.

    Returns:
        by direction, "experts" included; directions of one rank are left out.

    Raises:
        ShardingError: a target that is not known.
    """
    if target not in DOMAINS:
        raise ShardingError(f"target {target!r} is not known; there are {', '.join(DOMAINS)}.")
    dies = DOMAINS[target].dies
    return {
        name: max(len({rank // dies for rank in group}) for group in mesh.groups(mesh.atoms(name)))
        for name in FLAGS.values()
        if getattr(mesh, name) > 1
    }
