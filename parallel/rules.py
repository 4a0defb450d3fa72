"""Rules: which mesh axes split each logical axis. Every logical axis has one, "whole" included.

A missing rule is an error, never replication by accident.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kimi_graph.errors import ShardingError

from .mesh import Axes, Mesh

Padding = Mapping[tuple[str, int], int]
"""Physical sizes of logical axes: `{("vocab", 163840): 163872}`. What is added holds zeros and is never read."""

UNNAMED = ("_", None)  # a dim without a logical axis is never split


@dataclass(frozen=True)
class Rules:
    """Logical axes on a mesh.

    Attributes:
        mesh: whose axes they are.
        mapping: logical axis -> atomic mesh axes that split it, the first of them outermost; empty: whole everywhere.
        why: in words, for axes that have a reason on record.
        padding: physical sizes of logical axes that would not divide, see `legality.pad`.

    Raises:
        ShardingError: a rule names an axis that the mesh does not have, or one twice.
    """

    mesh: Mesh
    mapping: Mapping[str, Axes]
    why: Mapping[str, str] = field(default_factory=dict, compare=False)
    padding: Padding = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, axes in self.mapping.items():
            if unknown := [axis for axis in axes if axis not in self.mesh.axes]:
                raise ShardingError(
                    f"rule {name!r} -> {' x '.join(axes)}: the mesh {self.mesh} has no axis {unknown[0]!r}; "
                    f"it has {', '.join(self.mesh.axes)}."
                )
            if len(set(axes)) < len(axes):
                raise ShardingError(f"rule {name!r} -> {' x '.join(axes)}: a mesh axis can split a dim once.")
        object.__setattr__(self, "mapping", dict(self.mapping))

    @staticmethod
    def of(mesh: Mesh, mapping: Mapping[str, str | Axes | None]) -> "Rules":
        """Rules by direction: `{"heads": "tensor", "batch": ("data", "context"), "embed": None}`.

        A name stands for all atomic axes of that direction; "experts" for those that split experts.
        """

        def atoms(value: str | Axes | None) -> Axes:
            names = () if value is None else (value,) if isinstance(value, str) else value
            return tuple(axis for name in names for axis in mesh.atoms(name))

        return Rules(mesh, {name: atoms(value) for name, value in mapping.items()})

    def on(self, name: str | None) -> Axes:
        """The mesh axes, larger than one, that split a logical axis; none split a dim that is `_` or None.

        Raises:
            ShardingError: the axis has no rule.
        """
        if name in UNNAMED:
            return ()
        if name not in self.mapping:
            raise ShardingError(
                f"logical axis {name!r} has no rule; give it one, None to keep it whole. "
                f"There are rules for {', '.join(sorted(self.mapping))}."
            )
        return tuple(axis for axis in self.mapping[name] if self.mesh.axes[axis] > 1)

    def ways(self, name: str | None) -> int:
        """Into how many parts a logical axis is split."""
        return self.mesh.size(self.on(name))

    def changed(self, **axes: str | Axes | None) -> "Rules":
        """The same rules but for some axes; why those are so is not on record."""
        why = {name: words for name, words in self.why.items() if name not in axes}
        return replace(self, mapping={**self.mapping, **Rules.of(self.mesh, axes).mapping}, why=why)

    def padded(self, padding: Padding) -> "Rules":
        """The same rules with physical sizes in place of some."""
        return replace(self, padding={**self.padding, **padding})

    def physical(self, name: str | None, size: int) -> int:
        """The size that a logical axis of this size has on the mesh."""
        return self.padding.get((name or "_", size), size)

    def __str__(self) -> str:
        width = max(map(len, self.mapping), default=0)
        lines = (f"{name:<{width}}  {' x '.join(self.on(name)) or '-'}" for name in self.mapping)
        return "\n".join(lines)
