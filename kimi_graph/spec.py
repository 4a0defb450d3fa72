"""What a parameter is before it has values: shape, dtype, logical axes, and where a checkpoint keeps it."""

import dataclasses
import math
from dataclasses import dataclass

import torch

from .errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ParamSpec:
    """One parameter, declared once.

    The parameter's elements in row-major order are those of the tensors named in `source`, one after another: a single
    name is a view of that tensor, several are a stack. So a weight keeps the checkpoint's order (`[out, in]`) and is
    only viewed into named axes, and every shard of it is a list of byte ranges.

    Attributes:
        shape: global shape, heads and experts as dimensions of their own.
        axes: a logical axis per dimension, `_` where a dimension has no name and is never sharded.
        source: checkpoint tensor names.
        stored: shape of each of those tensors in the checkpoint.
        padding: elements at the end of a single stored tensor that are not the parameter's, and must be zero.
        dtype: fixed dtype, or None for the model's.

    Raises:
        ConfigError: a dimension without an axis, or stored tensors of another size.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    source: tuple[str, ...]
    stored: tuple[int, ...]
    dtype: torch.dtype | None = None
    padding: int = 0

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.shape):
            raise ConfigError(f"{self.source[0]}: {len(self.shape)} dimensions {self.shape} but axes {self.axes}")
        if math.prod(self.shape) + self.padding != math.prod(self.stored) * len(self.source):
            raise ConfigError(
                f"{self.source[0]}: {self.shape} does not hold {len(self.source)} tensors of {self.stored}"
            )

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def under(self, prefix: str) -> "ParamSpec":
        """The same parameter with `prefix` before its checkpoint names."""
        return dataclasses.replace(self, source=tuple(prefix + s for s in self.source))


def weight(
    shape: tuple[int, ...],
    axes: str,
    *,
    source: str | tuple[str, ...],
    stored: tuple[int, ...] | None = None,
    dtype: torch.dtype | None = None,
    padding: int = 0,
) -> ParamSpec:
    """Declare a parameter: `weight((32, 128, 2304), "heads key embed", source="q_proj.weight", stored=(4096, 2304))`.

    `stored` defaults to `shape`, or to `shape` without its leading dimensions when several tensors are stacked.
    """
    names = (source,) if isinstance(source, str) else source
    if stored is None:
        stored, count = shape, len(names)
        while count > 1:
            count, stored = count // stored[0], stored[1:]
    return ParamSpec(shape=shape, axes=tuple(axes.split()), source=names, stored=stored, dtype=dtype, padding=padding)
