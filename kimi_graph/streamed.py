"""Experts that stay in their files: of a stack of them, what a step uses is read, and let go.

Letters: M rows sorted by expert, E experts, F features, D width.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from .errors import ConfigError
from .ops import grouped_matmul
from .ops.contract import FEW, few_rows
from .ops.moe import NARROW_ROWS
from .parallel import shard_map, ways
from .spec import ParamSpec


class StreamedExperts:
    """Stands for the parameter `[E, ..., D]` of the routed experts, and holds none of it.

    It answers for the products of experts, which is all that a layer asks of them; the answer is that of
    `ops.grouped_matmul`, one expert in memory at a time. Everything else is refused.
    """

    def __init__(
        self,
        spec: ParamSpec,
        read: Callable[[str], Tensor],
        ahead: Callable[[str], None],
        release: Callable[[str], None],
    ) -> None:
        """Args:
        spec: the stack; its sources are those of expert 0, then 1 ...
        read: a stored tensor `[F, D]` by name, dequantised. ahead: starts fetching one that will be read soon.
        release: gives back the memory of one that has been read.
        """
        self.shape, self.requires_grad = spec.shape, False
        self._spec, self._read, self._ahead, self._release = spec, read, ahead, release

    def flatten(self, start: int, end: int) -> "StreamedExperts":
        """Dimensions between experts and width as one: what a stored tensor has."""
        assert (start, end) == (1, len(self.shape) - 2), "only features may be flattened"
        return self

    def __repr__(self) -> str:
        return f"<{list(self.shape)} in {len(self._spec.source):,} stored tensors>"

    @classmethod
    def __torch_function__(cls, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if f is shard_map:
            return args[0](*args[3:])
        if f is ways:
            return 1
        if f is grouped_matmul:
            x, experts, group_sizes = args
            return experts.products(x, group_sizes)
        name = getattr(f, "__name__", f)
        raise ConfigError(f"{name}: these experts stay in their files; load them without stream_experts.")

    def products(self, x_MD: Tensor, sizes_E: Tensor) -> Tensor:
        """`[M, F]`: see `ops.grouped_matmul`."""
        sizes = sizes_E.tolist()
        for name in self._names(e for e, size in enumerate(sizes) if size):
            self._ahead(name)
        outs = []
        start = 0
        for expert, size in enumerate(sizes):
            if size:
                # a little more than asked for: torch keeps code for every number of rows of a bfloat16 product
                more = -size % NARROW_ROWS if size > FEW else 0
                outs.append(self._product(x_MD[start : start + size + more], expert)[:size])
                start += size
        features = self._spec.numel // self.shape[0] // self.shape[-1]
        outs.append(x_MD.new_zeros(len(x_MD) - start, features))
        return torch.cat(outs)

    def _product(self, x_MD: Tensor, expert: int) -> Tensor:
        parts = []
        for name in self._names([expert]):
            parts.append(few_rows(x_MD, self._read(name)).view(len(x_MD), -1))
            self._release(name)
        return torch.cat(parts, 1)

    def _names(self, experts: Iterable[int]) -> Iterable[str]:
        each = len(self._spec.source) // self.shape[0]
        return (self._spec.source[e * each + i] for e in experts for i in range(each))
