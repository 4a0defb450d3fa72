"""Recipes: how a graph's weight is made from checkpoint tensors.

A parameter's elements are those of its checkpoint tensors one after another (`ParamSpec`), dequantised where they are
stored quantised; steps then view, slice, cast or otherwise change them. A first step `pack` takes one part of the
parameter in a format of `formats.py` instead. Everything here works on real, mapped or meta tensors, and on JSON.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kimi_graph import formats
from kimi_graph.checkpoint import Checkpoint, load_packed, load_tree
from kimi_graph.errors import BundleError
from kimi_graph.spec import ParamSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64, "float16": torch.float16}


@dataclass(frozen=True)
class Step:
    """One step: `kind` and its arguments (shape; dim, start, end; dtype name; dims; format and part)."""

    kind: str
    args: tuple[Any, ...] = ()

    def short(self) -> str:
        """For names: `slice1_0_128`, `float32`, `exp`, `mxfp4.weight_scale`."""
        if self.kind == "slice":
            return "slice{}_{}_{}".format(*self.args)
        if self.kind == "permute":
            return "permute" + "".join(map(str, self.args))
        if self.kind == "pack":
            return ".".join(self.args).replace("-", "_")
        return str(self.args[0]) if self.kind == "cast" else self.kind


def _cast(x: Tensor, dtype: str) -> Tensor:
    return x if x.dtype == torch.float64 else x.to(DTYPES[dtype])  # exact mode: every float is float64


def _pack(x: Tensor, form: str, part: str) -> Tensor:
    """One part of a matrix, or of a stack of them, in a format."""
    if not x.is_meta:
        return formats.pack(form, x)[part]
    dtype, shape = formats.layout(form, tuple(x.shape))[part]
    return torch.empty(shape, dtype=dtype, device="meta")


TILE_ROWS, TILE_BYTES = 16, 32


def tile(x: Tensor) -> Tensor:
    """Bytes of stacked matrices `[E, N, B]` in tiles of 16 rows by 32 bytes, column of tiles by column: FRACTAL_NZ.

    `[E, B / 32, N / 16, 16, 32]`. Source: the layout (K1, N1, N0, K0) of a transposed weight in the document of
    aclnnGroupedMatmulWeightNz.
    """
    return x.unflatten(2, (-1, TILE_BYTES)).unflatten(1, (-1, TILE_ROWS)).permute(0, 3, 1, 2, 4)


def untile(x: Tensor) -> Tensor:
    """The inverse of `tile`."""
    return x.permute(0, 2, 3, 1, 4).flatten(3).flatten(1, 2)


STEPS: dict[str, Callable[..., Tensor]] = {
    "view": lambda x, *shape: x.reshape(shape),
    "slice": lambda x, dim, start, end: x.narrow(dim, start, end - start),
    "permute": lambda x, *dims: x.permute(dims),
    "cast": _cast,
    "exp": lambda x: x if x.is_meta else x.exp(),  # torch would import all of Dynamo to say that it is alike
    "neg": lambda x: -x,
    "pack": _pack,
    "tile": tile,
}


def form(steps: tuple[Step, ...]) -> str | None:
    """The format of a packed weight; None where it is plain."""
    return steps[0].args[0] if steps and steps[0].kind == "pack" else None


def apply(steps: Iterable[Step], x: Tensor) -> Tensor:
    """The steps, one after another."""
    for step in steps:
        if step.kind not in STEPS:
            raise BundleError(f"recipe step {step.kind!r} is not known; known are {', '.join(sorted(STEPS))}.")
        x = STEPS[step.kind](x, *step.args)
    return x


def make(steps: tuple[Step, ...], spec: ParamSpec, checkpoint: Checkpoint, dtype: torch.dtype) -> Tensor:
    """A weight of the parameter `spec`, read from a checkpoint that passed `audit`; `dtype`: the model's.

    What is to be packed in the format it is stored in is taken as it is stored, without a loss; other formats are made
    one stored tensor at a time.
    """
    if form(steps) is not None:
        return apply(steps[1:], load_packed(spec, checkpoint, steps[0].args[0])[steps[0].args[1]])
    return apply(steps, load_tree(spec, checkpoint, dtype))


def to_json(steps: Iterable[Step]) -> list[list[Any]]:
    return [[s.kind, *s.args] for s in steps]


def from_json(steps: list[list[Any]]) -> tuple[Step, ...]:
    return tuple(Step(kind, tuple(args)) for kind, *args in steps)
