"""What each GE operator type computes, and how that is known.

A semantics function is plain torch: `def rms_norm(op, x, gamma)`. Its parameters after `op` are the operator's inputs
in prototype order: `Tensor` is required, `Tensor | None` optional, `list[Tensor]` dynamic (`x0`, `x1`, ...). It serves
every mode: on float64 tensors it is exact, on bfloat16 it rounds where the hardware does, on meta tensors it infers
shapes. It reads attributes through `op`, which notices any it did not read.
"""

import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

# Best evidence first. All but the last two were checked against something that is not ours.
PROVENANCES = (
    "documented formula",  # of the operator's public document or prototype
    "public CPU reference",  # a golden function in the operator's own repository
    "published number",
    "torch semantics",  # the only lowering of an ATen operator, so it is that operator
    "own reading",
)


Together = Callable[[Any, list[Any]], list[Any]]


@dataclass(frozen=True)
class Input:
    """One input of a prototype."""

    name: str
    optional: bool = False
    dynamic: bool = False


@dataclass(frozen=True)
class Semantics:
    """A GE operator type.

    Attributes:
        run: the semantics function.
        inputs: prototype order. outputs: prototype order; `"y[]"` is dynamic.
        in_place: names that are both input and output: the output is the input's memory.
        host: inputs whose values decide shapes; they must come from constants.
        view: the output may be the input's memory, unchanged.
        provenance: one of `PROVENANCES`. source: in words.
        together: of an operator of several ranks: `together(op, parts)`, the inputs of a group in its order (of each
            rank its tensor, or where there are several a dict), gives each rank's output, or tuple of them. `run` then
            only says the shapes.
        group: attribute with the name of its group. own: attribute that says where a rank stands in it.
    """

    type: str
    run: Callable[..., Any]
    inputs: tuple[Input, ...]
    outputs: tuple[str, ...]
    in_place: tuple[str, ...]
    host: frozenset[str]
    view: bool
    provenance: str
    source: str
    together: Together | None = None
    group: str = "group"
    own: str = ""


SEMANTICS: dict[str, Semantics] = {}


def ge_op(
    *types: str,
    provenance: str,
    source: str,
    outputs: str = "y",
    in_place: str = "",
    host: str = "",
    view: bool = False,
    prototype: str = "",
    together: Together | None = None,
    group: str = "group",
    own: str = "",
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: the semantics of one or more GE operator types.

    Args:
        outputs, in_place, host: names, separated by spaces.
        prototype: all inputs where the function takes only some: `"x key[] mask? scale?"`; the rest must be absent.
        together, group, own: see `Semantics`.
    """
    assert provenance in PROVENANCES, provenance

    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        inputs = _inputs_of(run, prototype)
        for type_ in types:
            assert type_ not in SEMANTICS, type_
            SEMANTICS[type_] = Semantics(
                type=type_,
                run=run,
                inputs=inputs,
                outputs=tuple(outputs.split()),
                in_place=tuple(in_place.split()),
                host=frozenset(host.split()),
                view=view,
                provenance=provenance,
                source=source,
                together=together,
                group=group,
                own=own,
            )
        return run

    return register


def _inputs_of(run: Callable[..., Any], prototype: str) -> tuple[Input, ...]:
    taken = tuple(_input_of(p) for p in list(inspect.signature(run).parameters.values())[1:])
    if not prototype:
        return taken
    listed = tuple(Input(n.rstrip("?[]"), n.endswith("?"), n.endswith("[]")) for n in prototype.split())
    names = [i.name for i in taken]
    assert names == [i.name for i in listed if i.name in names], f"{names} are not in the order of {prototype}"
    return listed


def _input_of(parameter: inspect.Parameter) -> Input:
    """`else_` stands for `else`, which Python keeps for itself."""
    name = parameter.name.rstrip("_")
    return Input(name, parameter.annotation == Tensor | None, parameter.annotation == list[Tensor])


def argument_name(name: str) -> str:
    """The Python parameter of an input."""
    return "else_" if name == "else" else name


def provenance_counts(types: Any = None) -> dict[str, int]:
    """How many operator types rest on which evidence; of all known types, or of those given."""
    chosen = SEMANTICS if types is None else {t: SEMANTICS[t] for t in types}
    counts = Counter(s.provenance for s in chosen.values())
    return {p: counts[p] for p in PROVENANCES if counts[p]}


def provenance_table(types: Any = None) -> str:
    """One line per operator type: type, evidence, source."""
    chosen = sorted(SEMANTICS if types is None else set(types))
    width = max(map(len, chosen), default=0)
    return "\n".join(f"{t:{width}}  {SEMANTICS[t].provenance:20}  {SEMANTICS[t].source}" for t in chosen)
