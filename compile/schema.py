"""The part of JSON Schema (2020-12) that our pinned schemas use, checked in one pass; the first fault is an error.

Known keywords: type, const, enum, minimum, pattern, items, prefixItems, properties, required, additionalProperties,
propertyNames, anyOf, $ref to $defs. A schema with another one is refused, so that none is ignored.
"""

import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kimi_graph.errors import BundleError

DATA = Path(__file__).parent / "data"
TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
WORDS = frozenset({"$schema", "$id", "$defs", "title", "description"})  # say nothing about a value
KNOWN = WORDS | {
    "type", "const", "enum", "minimum", "pattern", "items", "prefixItems", "properties", "required",
    "additionalProperties", "propertyNames", "anyOf", "$ref",
}  # fmt: skip


@functools.cache
def schema(name: str) -> dict[str, Any]:
    """The pinned schema of `name`: "manifest" or "weights-index"."""
    return json.loads((DATA / f"{name}.schema.json").read_bytes())


def check(value: Any, name: str, where: object) -> None:
    """Hold a value read from JSON against a pinned schema.

    Raises:
        BundleError: the first place where it is otherwise: the key, what is found there and what is expected.
    """
    root = schema(name)
    if fault := _fault(value, root, root, ""):
        raise BundleError(f"{where}: {fault}")


def _fault(value: Any, s: Mapping[str, Any], root: Mapping[str, Any], path: str) -> str:
    """What is wrong first, in words; empty where nothing is."""
    assert KNOWN.issuperset(s), f"schema at {path or 'the top'}: {sorted(set(s) - KNOWN)} is not known here"
    at = path or "the top"
    if "$ref" in s:
        return _fault(value, root["$defs"][s["$ref"].removeprefix("#/$defs/")], root, path)
    if "anyOf" in s:
        faults = [_fault(value, choice, root, path) for choice in s["anyOf"]]
        return "" if "" in faults else max(faults, key=lambda f: (f.partition(" is ")[0].count("."), f))
    if "const" in s and value != s["const"]:
        return f"{at} is {_short(value)}; expected {json.dumps(s['const'])}."
    if "enum" in s and value not in s["enum"]:
        return f"{at} is {_short(value)}; expected one of {', '.join(map(json.dumps, s['enum']))}."
    if "type" in s and not _is(value, s["type"]):
        return f"{at} is {_short(value)}; expected {_a(s['type'])}."
    if "minimum" in s and value < s["minimum"]:
        return f"{at} is {_short(value)}; the smallest is {s['minimum']}."
    if "pattern" in s and not re.search(s["pattern"], value):
        return f"{at} is {_short(value)}; expected text like {s['pattern']}."
    if isinstance(value, list):
        return _fault_of_items(value, s, root, path)
    return _fault_of_keys(value, s, root, path) if isinstance(value, dict) else ""


def _fault_of_items(value: list[Any], s: Mapping[str, Any], root: Mapping[str, Any], path: str) -> str:
    first = s.get("prefixItems", [])
    if len(value) < len(first) or ("items" in s and s["items"] is False and len(value) > len(first)):
        return f"{path} has {len(value)} items; expected {len(first)}."
    for i, item in enumerate(value):
        kind = first[i] if i < len(first) else s.get("items", {})
        if fault := _fault(item, kind, root, _join(path, i)):
            return fault
    return ""


def _fault_of_keys(value: dict[str, Any], s: Mapping[str, Any], root: Mapping[str, Any], path: str) -> str:
    known, rest = s.get("properties", {}), s.get("additionalProperties", {})
    for key in s.get("required", ()):
        if key not in value:
            return f"no entry {_join(path, key)!r}; the file was changed or damaged."
    for key, item in value.items():
        if key not in known and rest is False:
            return f"{_join(path, key)} is not known; the keys there are {', '.join(known)}."
        if "propertyNames" in s and (fault := _fault(key, s["propertyNames"], root, _join(path, f"({key})"))):
            return fault
        if fault := _fault(item, known.get(key, rest), root, _join(path, key)):
            return fault
    return ""


def _is(value: Any, kind: str) -> bool:
    return isinstance(value, TYPES[kind]) and (type(value) is bool) == (kind == "boolean")  # True is an int in Python


def _a(kind: str) -> str:
    return kind if kind == "null" else f"{'an' if kind[0] in 'aio' else 'a'} {kind}"


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
