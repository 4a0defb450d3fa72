"""Which groups of ranks leave the fast domain of a machine: a host, or a superpod whose links are alike throughout."""

from dataclasses import dataclass

from kimi_graph.errors import ShardingError
from kimi_graph.hardware import LINKS

from .mesh import FLAGS, Mesh


@dataclass(frozen=True)
class Domain:
    """Dies that reach each other over the scale-up network; beyond it lies the slower scale-out network."""

    name: str
    dies: int


DOMAINS = {target: Domain(links[-2].name, links[-2].dies) for target, links in LINKS.items()}


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
