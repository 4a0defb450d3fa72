"""Where a checkpoint keeps a tensor of the model: spellings of its name, and whether it is whole or packed.

Specs name plain tensors as released (`language_model.model.layers.3.mlp.experts.0.w1.weight`). Files differ: with and
without `language_model.` and `model.`, older names of a few tensors, and a quantised weight is several tensors beside
each other (`formats.py`). Which it is, the names in the file say, each tensor for itself.
Source: fact sheet of models, sections 2.2 and 6.1; lablup/mlxcel#1334 (older names of attention residuals).
"""

import re
from collections.abc import Collection, Iterator
from typing import NamedTuple

from .formats import FORMATS

SUFFIXES = {name: (tuple(part.name for part in f.parts), f.extras) for name, f in FORMATS.items()}
PREFIXES = ("language_model.model.", "model.language_model.", "language_model.", "model.", "")
RENAMED = (  # pattern and replacement, of names without prefix
    (re.compile(r"^mm_projector\.proj\.0\."), "mm_projector.linear_1."),
    (re.compile(r"^mm_projector\.proj\.2\."), "mm_projector.linear_2."),
    (re.compile(r"((?:^|\.)(?:self_attention|mlp|output_attn)_res)_(proj|norm)\.weight$"), r"\1.\2_weight"),
)


class Place(NamedTuple):
    """Tensors of a checkpoint that hold one tensor of the model.

    Attributes:
        format: a name of `FORMATS`, or None for a tensor that is stored as it is.
        names: in the order of the format's parts; those of a format may be missing from the checkpoint.
        extras: tensors that belong to it and are not read.
    """

    format: str | None
    names: tuple[str, ...]
    extras: tuple[str, ...] = ()


class Names:
    """The names of a checkpoint, for finding the model's tensors among them."""

    def __init__(self, names: Collection[str]) -> None:
        self.names = names
        self.prefixes = list(PREFIXES)  # the one that was last found comes first

    def find(self, name: str) -> Place | None:
        """Where a tensor of the model is, or None."""
        return self._at(name) or self._elsewhere(name)

    def _elsewhere(self, name: str) -> Place | None:
        for bare in _spellings(name):
            for prefix in self.prefixes:
                if place := self._at(prefix + bare):
                    self.prefixes = [prefix, *(p for p in self.prefixes if p != prefix)]  # threads read the old list
                    return place
        return None

    def _at(self, name: str) -> Place | None:
        names = self.names
        if not name.endswith(".weight"):
            return Place(None, (name,)) if name in names else None
        stem = name[:-6]
        if name in names:
            form = _beside_weight(stem, names)
        elif f"{stem}weight_packed" in names:
            form = "int4" if f"{stem}weight_shape" in names else "mxfp4"
        else:
            return None
        if form is None:
            return Place(None, (name,))
        parts, extras = SUFFIXES[form]
        held = tuple([stem + extra for extra in extras if stem + extra in names]) if extras else ()
        return Place(form, tuple([stem + part for part in parts]), held)


def _beside_weight(stem: str, names: Collection[str]) -> str | None:
    """Format of a tensor called `weight`, by the names beside it."""
    if f"{stem}weight_scale" in names:
        if f"{stem}scale_bias" in names:
            return "w4"
        return "w8" if f"{stem}weight_offset" in names else "w4-mx"
    if f"{stem}weight_scale_inv" in names:
        return "fp8"
    return "w8-static" if f"{stem}deq_scale" in names else None


def _spellings(name: str) -> Iterator[str]:
    """A name without prefix, then as older files have it."""
    bare = name.removeprefix(next(p for p in PREFIXES if name.startswith(p)))
    yield bare
    for pattern, replacement in RENAMED:
        other = pattern.sub(replacement, bare)
        if other != bare:
            yield other
