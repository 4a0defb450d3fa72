"""Several ways to lower one operator: whose GE operators each takes, and when it cannot.

Which of them a graph has is decided where it is made (`ge.serve`): the first whose provider the target lists, whose
operators the target has, and that does not refuse.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def _never(ge: Any, *args: Any) -> str:
    return ""


def _unable(ge: Any, *args: Any) -> Any:
    raise AssertionError("an offer that refuses always is never made")


@dataclass(frozen=True)
class Offer:
    """One way.

    Attributes:
        provider: "builtin" (a fused operator of CANN), "vllm-ascend" (of its package), "own" (of this project), or
            "composed" (of CANN's basic operators).
        operator: the GE types that do the work, joined by ", ".
        make: `make(ge, *args)`, a lowering.
        reason: why one would take it, in words.
        refuses: `refuses(ge, *args)`: why it cannot serve these; empty where it can.
        costs: `costs(ge, *args)`: what it takes beyond for these, said after the reason; empty where nothing.
    """

    provider: str
    operator: str
    make: Callable[..., Any]
    reason: str
    refuses: Callable[..., str] = _never
    costs: Callable[..., str] = _never


def cannot(provider: str, operator: str, why: str) -> Offer:
    """What looks as if it could serve, and why it never can: said where another does."""
    return Offer(provider, operator, _unable, "", lambda *_: why)


def own_widths(ge: Any, q: Any, k: Any, v: Any, *args: Any) -> str:
    """What our kernels of KDA refuse of the widths of keys and values."""
    key, value = ge.shape(k)[-1], ge.shape(v)[-1]
    if all(width % 16 == 0 and 16 <= width <= 256 for width in (key, value)):
        return ""
    return f"takes multiples of 16 channels up to 256, these are {key} and {value}"
