"""Chains that cross parts: a residual sum, a mix over depth and the norm that opens the next part, as one node.

Parts are traced and converted one by one, so what one ends with and the next begins with meet only in the whole graph:

* Add, RmsNorm (after attention and after a feed-forward layer, in models without attention residuals): AddRmsNorm of
  CANN, or ResidualNormGate.
* Add, AttnResMix, RmsNorm (with attention residuals): AttnResMix with an addend and a gain.

A matrix product and, on a mesh, a collective stand before the sum and after the norm. A sum stays a result, as later
parts read it. A mix is fused where the norm alone reads it, which is so in every model.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kimi_graph.ops.offers import Offer

from .ge_proto import Dtype, ModelDef, OpDef, describe, dtype_of, get_attr, set_attr, shape_of, split_edge
from .limits import UNIFIED_BUFFER
from .lower import Choice, asked, not_there
from .prototypes import Prototypes
from .targets import Target

CHAINS = "chains"  # the part that choices and moved values are noted under
SUM_AND_NORM, MIX_AND_NORM = "residual and norm", "mix over depth and norm"


@dataclass
class Fused:
    """What became of a graph.

    Attributes:
        choices: which operator took chains and why, with the names of their norms. replaced: the types that they were.
        moved: the edge that has a value now, by the edge it had; "" where no edge has it any more.
    """

    choices: dict[Choice, list[str]] = field(default_factory=dict)
    replaced: dict[Choice, Counter[str]] = field(default_factory=dict)
    moved: dict[str, str] = field(default_factory=dict)


def fuse_chains(model: ModelDef, target: Target, prototypes: Prototypes) -> Fused:
    """Fuse every chain that an operator of the target's providers takes. Changes `model`; the nodes keep the order, a
    fused one the name and the place of its norm."""
    chains = _Chains(model, target, prototypes)
    for norm in [op for op in model.graph[0].op if op.type == "RmsNorm"]:
        chains.fuse(norm)
    return chains.finish()


@dataclass(frozen=True)
class _Chain:
    """A norm, and what makes what it reads; `added`: the sum that is the last source of a mix."""

    norm: OpDef
    made: OpDef
    added: OpDef | None = None

    @property
    def types(self) -> list[str]:
        return [op.type for op in (self.added, self.made, self.norm) if op is not None]


class _Chains:
    def __init__(self, model: ModelDef, target: Target, prototypes: Prototypes) -> None:
        self.graph, self.target, self.prototypes, self.fused = model.graph[0], target, prototypes, Fused()
        self.ops = {op.name: op for op in self.graph.op}
        self.place = {name: i for i, name in enumerate(self.ops)}
        self.readers: dict[str, list[OpDef]] = {}
        for op in self.graph.op:
            for edge in op.input:
                self.readers.setdefault(edge, []).append(op)
        self.gone: set[str] = set()

    def fuse(self, norm: OpDef) -> None:
        made = self.ops[split_edge(norm.input[0])[0]]
        if f"{norm.name}:1" in self.readers:  # of the statistics nothing is kept
            return
        if made.type == "AttnResMix" and self.readers[norm.input[0]] == [norm]:
            last = [d.name for d in made.input_desc].index("norm") - 1
            added = self.ops[split_edge(made.input[last])[0]]
            self._serve(MIX_AND_NORM, MIXES, _Chain(norm, made, added if self._is_sum(added, made, norm) else None))
        elif self._is_sum(made, norm, norm):
            self._serve(SUM_AND_NORM, SUMS, _Chain(norm, made))

    def _is_sum(self, op: OpDef, reader: OpDef, norm: OpDef) -> bool:
        """Whether a node adds two values of one shape and dtype for a reader, and others read it after the norm."""
        if op.type != "Add" or op.name in self.gone:
            return False
        alike = len({(d.dtype, shape_of(d)) for d in (*op.input_desc, *op.output_desc)}) == 1
        others = [r for r in self.readers[f"{op.name}:0"] if r is not reader]
        return alike and all(self.place[r.name] > self.place[norm.name] for r in others)

    def _serve(self, kind: str, offers: tuple[Offer, ...], chain: _Chain) -> None:
        passed: list[str] = []
        for offer in asked(offers, self.target):
            why = not_there(offer, self.target) or offer.refuses(self.target, chain)
            if not why:
                words = "; ".join([offer.reason, *passed])
                chosen = Choice(kind, offer.operator, words, provider=offer.provider)
                self.fused.choices.setdefault(chosen, []).append(chain.norm.name)
                self.fused.replaced.setdefault(chosen, Counter()).update(chain.types)
                moved = offer.make(self.target, chain)
                self.gone.update(split_edge(edge)[0] for edge in moved)
                self.fused.moved |= moved
                return
            passed.append(f"{offer.operator} of {offer.provider}: {why}")

    def finish(self) -> Fused:
        moved = {edge: now for edge, now in self.fused.moved.items() if now}
        kept = [op for op in self.graph.op if op.name not in self.gone]
        for op in kept:
            op.input[:] = [moved.get(edge, edge) for edge in op.input]
        self.graph.output[:] = [moved.get(edge, edge) for edge in self.graph.output]
        copies = [OpDef.FromString(op.SerializeToString()) for op in kept]
        del self.graph.op[:]
        self.graph.op.extend(copies)
        return self.fused


# ---- how -------------------------------------------------------------------------------------------------------------


def _rewrite(op: OpDef, type_: str, inputs: Mapping[str, tuple[str, Any]], outputs: Mapping[str, Any]) -> None:
    """Make a node another one: edges and descriptions by the names of inputs, descriptions by those of outputs."""
    taken = [_named(name, desc) for name, (_, desc) in inputs.items()]
    made = [_named(name, desc) for name, desc in outputs.items()]
    op.type, op.input[:] = type_, [edge for edge, _ in inputs.values()]
    del op.input_desc[:], op.output_desc[:]
    op.input_desc.extend(taken)
    op.output_desc.extend(made)


def _named(name: str, desc: Any) -> Any:
    """A copy of a description under a name."""
    made = type(desc).FromString(desc.SerializeToString())
    made.name = name
    return made


def _empty(like: Any) -> Any:
    """The description of a result without elements."""
    made = _named("", like)
    describe(made, (0,), Dtype.of_proto(like.dtype))
    return made


def _add_rms_norm(target: Target, c: _Chain) -> dict[str, str]:
    y, statistics, eps = c.norm.output_desc[0], c.norm.output_desc[1], get_attr(c.norm, "epsilon", 1e-6)
    inputs = {
        "x1": (c.made.input[0], c.made.input_desc[0]),
        "x2": (c.made.input[1], c.made.input_desc[1]),
        "gamma": (c.norm.input[1], c.norm.input_desc[1]),
    }
    _rewrite(c.norm, "AddRmsNorm", inputs, {"y": y, "rstd": statistics, "x": y})
    set_attr(c.norm, "epsilon", eps)
    return {f"{c.made.name}:0": f"{c.norm.name}:2"}


def _residual_norm_gate(target: Target, c: _Chain) -> dict[str, str]:
    y, eps = c.norm.output_desc[0], get_attr(c.norm, "epsilon", 1e-6)
    inputs = {
        "x": (c.made.input[1], c.made.input_desc[1]),
        "residual": (c.made.input[0], c.made.input_desc[0]),
        "weight": (c.norm.input[1], c.norm.input_desc[1]),
    }
    _rewrite(c.norm, "ResidualNormGate", inputs, {"y": y, "sum": y})
    _own_attrs(c.norm, eps=eps)
    return {f"{c.made.name}:0": f"{c.norm.name}:1"}


def _mix_and_norm(target: Target, c: _Chain) -> dict[str, str]:
    y, norm_eps, eps = c.norm.output_desc[0], get_attr(c.norm, "epsilon", 1e-6), get_attr(c.made, "eps")
    given = zip(c.made.input, c.made.input_desc, strict=True)
    inputs = {desc.name: (edge, desc) for edge, desc in given if edge}
    moved = {f"{c.made.name}:0": ""}
    if c.added is not None:
        last = [name for name in inputs if name.startswith("sources")][-1]
        inputs[last] = (c.added.input[0], c.added.input_desc[0])
        inputs["addend"] = (c.added.input[1], c.added.input_desc[1])
        moved[f"{c.added.name}:0"] = f"{c.norm.name}:1"
    inputs["gain"] = (c.norm.input[1], c.norm.input_desc[1])
    _rewrite(c.norm, "AttnResMix", inputs, {"y": y, "total": _empty(y) if c.added is None else y})
    _own_attrs(c.norm, eps=eps, norm_eps=norm_eps)
    return moved


def _own_attrs(op: OpDef, **attrs: float) -> None:
    del op.attr["epsilon"]
    for name, value in attrs.items():
        set_attr(op, name, value)


def _left(target: Target, c: _Chain) -> dict[str, str]:
    return {}


def _one_dtype(target: Target, c: _Chain) -> str:
    x, gamma = (dtype_of(c.norm.input_desc[i]) for i in (0, 1))
    return "" if x == gamma else f"takes a gamma of x's dtype, {x}; this is {gamma}"


def _width(floats: Callable[[int], int]) -> Callable[[Target, _Chain], str]:
    """What a kernel of ours refuses of a width. `floats`: bytes of UB for each channel, by those of an element."""

    def refuses(target: Target, c: _Chain) -> str:
        desc = c.norm.input_desc[0]
        width, most = shape_of(desc)[-1], (UNIFIED_BUFFER[target.soc] - 512) // floats(dtype_of(desc).itemsize)
        return (
            "" if width % 16 == 0 and width <= most else f"takes multiples of 16 channels up to {most:,}, not {width:,}"
        )

    return refuses


def _mix_refuses(target: Target, c: _Chain) -> str:
    norm = next(d for d in c.made.input_desc if d.name == "norm")
    if norm.dtype != c.norm.input_desc[1].dtype:
        return "takes a gain of the dtype of norm and query"
    return _width(lambda element: 3 * element + 20)(target, c)


SUMS = (
    Offer("builtin", "AddRmsNorm", _add_rms_norm, "the sum and its norm in one operator, on every chip", _one_dtype),
    Offer(
        "own",
        "ResidualNormGate",
        _residual_norm_gate,
        "the sum and its norm in one kernel; products stand before and after them",
        _width(lambda element: 4 * element + 12),
    ),
    Offer("composed", "Add, RmsNorm", _left, "one after the other"),
)
MIXES = (
    Offer(
        "own",
        "AttnResMix",
        _mix_and_norm,
        "the sum, the mix and its norm in one kernel: sources are read once, a sum and a norm are written",
        _mix_refuses,
    ),
    Offer("composed", "RmsNorm", _left, "after the mix"),
)
