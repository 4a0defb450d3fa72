"""Tables of the keys of a JSON file, and reading an object by them. All faults of an object are found at once."""

import difflib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

MAX_SIZE = 2**31 - 1  # of one dimension: routing and cache indices are int32
SHOWN = 8  # faults of a file, or members of a list, that a message names


# Readers of one value: give it back, or raise UnfitError saying what is expected.


class UnfitError(Exception):
    """A value that a reader refuses; the text says what is expected."""


Reader = Callable[[Any], Any]


def integer(low: int = 1, high: int = MAX_SIZE, why: str = "") -> Reader:
    """Reads an integer from `low` to `high`; `why` stands behind that in the message."""

    def read(x: Any) -> int:
        if isinstance(x, bool) or not isinstance(x, int) or not low <= x <= high:
            raise UnfitError(f"an integer from {low:,} to {high:,}{why}")
        return x

    return read


def real(above: float, below: float = math.inf) -> Reader:
    """Reads a finite number between two bounds, themselves excluded."""

    def read(x: Any) -> float:
        # An integer of 400 digits compares with a float, but does not convert to one: compare first.
        if isinstance(x, bool) or not isinstance(x, int | float) or not above < x < min(below, 1e300):
            bounds = [f"above {above:g}"] * (above > -math.inf) + [f"below {below:g}"] * (below < math.inf)
            raise UnfitError(f"a number {' and '.join(bounds)}")
        return float(x)

    return read


def flag(x: Any) -> bool:
    """Reads true or false."""
    if not isinstance(x, bool):
        raise UnfitError("true or false")
    return x


def text(x: Any) -> str:
    """Reads a string."""
    if not isinstance(x, str):
        raise UnfitError("text")
    return x


def only(value: Any, why: str) -> Reader:
    """One value is implemented; `why` says what it means, or why others are refused."""

    def read(x: Any) -> Any:
        if type(x) is not type(value) or x != value:
            raise UnfitError(f"{show(value)} ({why})")
        return x

    return read


def one_of(*values: Any, why: str = "") -> Reader:
    """Reads one of these values, of the same type (1 is not true); `why` is for the message."""

    def read(x: Any) -> Any:
        if not any(type(x) is type(v) and x == v for v in values):
            raise UnfitError(f"one of {', '.join(map(show, values))}" + (f" ({why})" if why else ""))
        return x

    return read


def optional(reader: Reader) -> Reader:
    """Reads null as None, all else as `reader` does."""
    return lambda x: None if x is None else reader(x)


def list_of(reader: Reader, count: int | None = None) -> Reader:
    """Reads a list whose members `reader` takes; of `count` of them, if given."""

    def read(x: Any) -> tuple[Any, ...]:
        if not isinstance(x, list) or count not in (None, len(x)):
            raise UnfitError("a list" if count is None else f"a list of {count}")
        try:
            return tuple(reader(i) for i in x)
        except UnfitError as e:
            raise UnfitError(f"a list, each member {e}") from None

    return read


def token_ids(x: Any) -> tuple[int, ...]:
    """One id, or a list of some."""
    one = integer(0)
    if isinstance(x, list) and x:
        return list_of(one)(x)
    try:
        return (one(x),)
    except UnfitError as e:
        raise UnfitError(f"{e}, or a list of such") from None


def dtype(x: Any) -> torch.dtype:
    """Reads the name of a float dtype of at most 32 bits."""
    names = ("bfloat16", "float16", "float32")
    if x not in names:
        raise UnfitError(f"one of {', '.join(names)}")
    return getattr(torch, x)


# Tables.

_REQUIRED: Any = object()


@dataclass(frozen=True)
class Key:
    """A key: how its value is read, what it is when the file leaves it out, and how others spell it."""

    read: Reader
    default: Any = _REQUIRED
    spellings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Section:
    """An object of keys and sections.

    Attributes:
        inert: keys that are known and do not change any result.
        optional: it may be left out or null; its values are None then.
    """

    keys: "Mapping[str, Key | Section | Choice]"
    inert: frozenset[str] = frozenset()
    optional: bool = False


@dataclass(frozen=True)
class Choice:
    """An object whose keys depend on one of them; it may be left out or null. Its values hold that key's as "kind".

    Attributes:
        by: the deciding key, and how others spell it.
        why: what is at stake, for the message about another value.
    """

    by: tuple[str, ...]
    sections: Mapping[str, Section]
    why: str


Entry = Key | Section | Choice


def read_section(section: Section, data: Mapping[str, Any], at: str, problems: list[str]) -> dict[str, Any]:
    """Values of a section by key, defaults filled in.

    Args:
        at: path of the section, "" or ending in a dot.
        problems: takes a line for each fault.
    """
    known = _known(section)
    problems += [_unknown(x, data[x], known, at) for x in data if x not in known]
    return {key: _read_entry(key, entry, data, at, problems) for key, entry in section.keys.items()}


def known_part(section: Section, data: Mapping[str, Any], at: str = "") -> tuple[dict[str, Any], list[str]]:
    """What of an object its table knows, and the paths of the keys that it does not."""
    kept, unknown, known = {}, [], _known(section)
    for key, value in data.items():
        if key not in known:
            unknown.append(f"{at}{key[:64]}")
            continue
        inner = _section_of(section.keys.get(key), value)
        kept[key] = value
        if inner is not None:
            kept[key], more = known_part(inner, value, f"{at}{key}.")
            unknown += more
    return kept, unknown


def _known(section: Section) -> set[str]:
    """Every spelling of every key."""
    home = {s for key, k in section.keys.items() for s in (key, *(k.spellings if isinstance(k, Key) else ()))}
    return home | section.inert


def _section_of(entry: "Entry | None", data: Any) -> Section | None:
    """The table of an object inside another; None where it is no object, or has no table."""
    if not isinstance(data, dict) or not isinstance(entry, Section | Choice):
        return None
    if isinstance(entry, Section):
        return entry
    kind = next((data[key] for key in entry.by if key in data), None)
    inner = entry.sections.get(kind) if isinstance(kind, str) else None
    return None if inner is None else Section(inner.keys, inner.inert | frozenset(entry.by))


def _read_entry(key: str, entry: Entry, data: Mapping[str, Any], at: str, problems: list[str]) -> Any:
    if isinstance(entry, Key):
        return _read_key(key, entry, data, at, problems)
    inner = data.get(key)
    if inner is None and (isinstance(entry, Choice) or entry.optional):
        return None
    if not isinstance(inner, dict):
        names = entry.by[:1] if isinstance(entry, Choice) else entry.keys
        problems.append(f"{at}{key}: {found(data, key)}, expected an object with {', '.join(names)}.")
        return None
    if isinstance(entry, Section):
        return read_section(entry, inner, f"{at}{key}.", problems)
    return _read_choice(entry, inner, f"{at}{key}.", problems)


def _read_key(key: str, entry: Key, data: Mapping[str, Any], at: str, problems: list[str]) -> Any:
    given = {s: data[s] for s in (key, *entry.spellings) if s in data}
    read = {}
    for spelling, value in given.items():
        try:
            read[spelling] = entry.read(value)
        except UnfitError as e:
            problems.append(f"{at}{spelling}: found {show(value)}, expected {e}.")
    if len(set(read.values())) > 1:
        both = " and ".join(f"{at}{s}: {show(given[s])}" for s in read)
        problems.append(f"{both} are two spellings of one setting and differ; delete one.")
    elif not given and entry.default is _REQUIRED:
        problems.append(f"{at}{key}: not given, and it has no default.")
    return next(iter(read.values()), entry.default)


def _read_choice(entry: Choice, data: Mapping[str, Any], at: str, problems: list[str]) -> dict[str, Any] | None:
    kinds = one_of(*entry.sections, why=entry.why)
    kind = _read_key(entry.by[0], Key(kinds, spellings=entry.by[1:]), data, at, problems)
    section = entry.sections.get(kind) if isinstance(kind, str) else None
    if section is None:
        return None
    return {"kind": kind, **read_section(section, {k: v for k, v in data.items() if k not in entry.by}, at, problems)}


def _unknown(key: str, value: Any, known: Iterable[str], at: str) -> str:
    near = difflib.get_close_matches(key[:64], sorted(known), n=1)
    hint = f"did you mean {at}{near[0]}?" if near else "it would be ignored; delete it if that is meant."
    return f"{at}{key[:64]}: unknown key (its value is {show(value)}); {hint}"


# Words of messages.


def found(data: Mapping[str, Any], key: str) -> str:
    """What the data has for a key, for a message."""
    return f"found {show(data[key])}" if key in data else "not given"


def show(value: Any) -> str:
    """A value as JSON, cut where it is long."""
    try:
        shown = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):  # not from a JSON file, or an integer of thousands of digits
        shown = f"a {type(value).__name__}"
    return shown if len(shown) <= 80 else shown[:60] + " ..."


def some(numbers: Iterable[int]) -> str:
    """Numbers in order, the first few of many."""
    numbers = sorted(numbers)
    more = f" and {len(numbers) - SHOWN} more" if len(numbers) > SHOWN else ""
    return ", ".join(map(str, numbers[:SHOWN])) + more
