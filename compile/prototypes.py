"""Prototypes of GE operators: inputs, outputs and attributes, and on which chips an operator runs.

GE matches the inputs of a node by their place in the operator's registration, silently: an input too many or in the
wrong place, or an attribute it does not know, surfaces on the device or never. So every node is held against this
table (`checks`). Fused operators and our own are rows of `prototype_rows`; basic ones are read, when they are first
asked for, from the helpers in torchair's folder, whose docstrings are the operators' registrations. Nothing of torchair
is imported.
"""

import ast
import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from .ge_proto import Dtype
from .prototype_rows import ROWS, Row

Dtypes = frozenset[int]  # numbers of descriptions (`Dtype.proto`)

DTYPES = {
    "F64": Dtype.DOUBLE,
    "F32": Dtype.FLOAT,
    "F16": Dtype.FLOAT16,
    "BF16": Dtype.BF16,
    "I64": Dtype.INT64,
    "I32": Dtype.INT32,
    "I16": Dtype.INT16,
    "I8": Dtype.INT8,
    "I4": Dtype.INT4,
    "U64": Dtype.UINT64,
    "U32": Dtype.UINT32,
    "U16": Dtype.UINT16,
    "U8": Dtype.UINT8,
    "BOOL": Dtype.BOOL,
    "C32": Dtype.COMPLEX32,
    "C64": Dtype.COMPLEX64,
    "C128": Dtype.COMPLEX128,
    "STR": Dtype.STRING,
    "HIF8": Dtype.HIFLOAT8,
    "E5M2": Dtype.FLOAT8_E5M2,
    "E4M3": Dtype.FLOAT8_E4M3FN,
    "E8M0": Dtype.FLOAT8_E8M0,
    "E2M1": Dtype.FLOAT4_E2M1,
    "E1M2": Dtype.FLOAT4_E1M2,
}
SHORT = {dtype.proto: short for short, dtype in DTYPES.items()}

_INTEGER = "I64/I32/I16/I8/U64/U32/U16/U8"

# GE's named groups, without quantised and string types, which no graph of ours holds. Source: types of the public
# graph headers of ge, August 2026.
GROUPS = {
    "INDEX": "I32/I64",
    "INTEGER": _INTEGER,
    "FLOATING": "F64/F32/F16",
    "UNARY": "F64/F32/F16/BF16/C32/C64/C128",
    "REAL": f"F64/F32/F16/BF16/{_INTEGER}",
    "NUMBER": f"F64/F32/F16/BF16/{_INTEGER}/C64/C128",
    "BASIC": f"F64/F32/F16/BF16/{_INTEGER}/C32/C64/C128",
    "ALL": "/".join(DTYPES),
}
NARROW_FLOATS: Dtypes = frozenset(DTYPES[s].proto for s in ("HIF8", "E5M2", "E4M3", "E8M0", "E2M1", "E1M2"))

# Attribute types: the field of AttrDef that holds them, and for lists the kind they must state.
FIELDS = {
    "Int": ("i", 0),
    "Float": ("f", 0),
    "Bool": ("b", 0),
    "String": ("s", 0),
    "Type": ("dt", 0),
    "Tensor": ("t", 0),
    "ListString": ("list", 1),
    "ListInt": ("list", 2),
    "ListFloat": ("list", 3),
    "ListBool": ("list", 4),
    "ListType": ("list", 10),
    "ListListInt": ("list_list_int", 0),
}


@dataclass(frozen=True)
class Port:
    """An input or output; `dtypes` None means that its source does not say."""

    name: str
    kind: Literal["required", "optional", "dynamic"]
    dtypes: Dtypes | None


@dataclass(frozen=True)
class Attribute:
    name: str
    type: str
    required: bool
    default: Any = None


@dataclass(frozen=True, kw_only=True)
class Prototype:
    """An operator type as one chip family has it.

    Attributes:
        inputs, outputs: in the order of the registration. attributes: by name.
        same: groups of port names that share one dtype.
        socs, since, provider, source: as in `Row`.
    """

    type: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    attributes: Mapping[str, Attribute]
    same: tuple[tuple[str, ...], ...] = ()
    socs: tuple[str, ...]
    since: str = ""
    provider: str = "builtin"
    source: str

    def is_in(self, soc: str, cann: str) -> bool:
        """Whether a CANN release has the operator for a chip family; true where that is not established."""
        release, *families = self.since.split() or ["0"]
        return bool(families and soc not in families) or _version(cann) >= _version(release)

    @functools.cached_property
    def inplace(self) -> dict[str, str]:
        """Outputs that are written into an input's buffer: output name to input name, which are the same for GE."""
        names = {port.name for port in self.inputs}
        return {port.name: port.name for port in self.outputs if port.name in names}


def _version(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))


class Prototypes:
    """All prototypes for one chip family.

    Args:
        soc: "a2", "a3" or "950".
        torchair: torchair's folder, for basic operators; without it only complete rows are known.
    """

    def __init__(self, soc: str, torchair: Path | None = None) -> None:
        self.soc, self.torchair = soc, torchair
        self._found: dict[str, Prototype | None] = {}

    def find(self, type: str) -> Prototype | None:  # noqa: A002
        """The prototype, also of an operator without a kernel for this family (see `socs`); None if unknown."""
        if type not in self._found:
            found = find(type, self.torchair)
            self._found[type] = None if found is None else _on_chip(found, self.soc)
        return self._found[type]


def find(type: str, torchair: Path | None = None) -> Prototype | None:  # noqa: A002
    """The prototype before anything is taken away for a chip family. See `Prototypes`."""
    row = ROWS.get(type)
    if row is not None and row.ins is not None:
        return _of_row(row)
    helper = None if torchair is None else read_helper(torchair, type)
    return helper if row is None or helper is None else _refined(helper, row)


def layouts_of(type: str, port: str, dtype: int) -> tuple[str, ...]:  # noqa: A002
    """Layouts in which an operator takes an input of a dtype (a number of descriptions), the first as it is written."""
    row = ROWS.get(type)
    for left, right in _lines("" if row is None else row.layouts):
        name, types = left.split()
        if name == port and dtype in dtypes(types):
            return tuple(right.split())
    return ("ND",)


def _on_chip(p: Prototype, soc: str) -> Prototype:
    return p if soc == "950" else replace(p, inputs=_without_narrow(p.inputs), outputs=_without_narrow(p.outputs))


def _without_narrow(ports: tuple[Port, ...]) -> tuple[Port, ...]:
    return tuple(replace(p, dtypes=None if p.dtypes is None else p.dtypes - NARROW_FLOATS) for p in ports)


# ---- rows ------------------------------------------------------------------------------------------------------------


def _lines(text: str) -> list[tuple[str, str]]:
    """`left: right` of each line or `;`-separated part."""
    parts = (part.strip() for part in re.split(r"[;\n]", text))
    return [(left.strip(), right.strip()) for left, _, right in (p.partition(":") for p in parts if p)]


@functools.cache
def dtypes(text: str) -> Dtypes:
    """`F32/BF16/INDEX` as numbers."""
    names = [name for word in text.split("/") for name in GROUPS.get(word, word).split("/")]
    return frozenset(DTYPES[name].proto for name in names)


def _ports(text: str) -> tuple[Port, ...]:
    kinds: dict[str, Literal["required", "optional", "dynamic"]] = {"?": "optional", "[]": "dynamic", "": "required"}
    found = []
    for names, types in _lines(text):
        for word in names.split():
            match = re.fullmatch(r"(\w+)(\?|\[\])?", word)
            assert match, word
            found.append(Port(match[1], kinds[match[2] or ""], dtypes(types)))
    return tuple(found)


def _attributes(text: str) -> dict[str, Attribute]:
    found = {}
    for name, rest in _lines(text):
        type_, given, default = (part.strip() for part in rest.partition("="))
        assert type_ in FIELDS, rest
        found[name] = Attribute(name, type_, required=not given, default=_value(default) if given else None)
    return found


def _same(text: str) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(group.split()) for group in text.split(";") if group.strip())


@functools.cache
def _of_row(row: Row) -> Prototype:
    assert row.ins is not None and row.outs is not None
    return Prototype(
        type=row.type,
        inputs=_ports(row.ins),
        outputs=_ports(row.outs),
        attributes=_attributes(row.attrs),
        same=_same(row.same),
        socs=tuple(row.socs.split()),
        since=row.since,
        provider=row.provider,
        source=row.source,
    )


def _refined(helper: Prototype, row: Row) -> Prototype:
    """What the helper says, with the row's dtypes, attributes, chips and source."""
    more = {name: dtypes(types) for names, types in _lines(row.more) for name in names.split()}
    known = {port.name for port in helper.inputs + helper.outputs}
    assert set(more) <= known and {n for group in _same(row.same) for n in group} <= known, (row.type, known)

    def widened(ports: tuple[Port, ...]) -> tuple[Port, ...]:
        return tuple(
            replace(p, dtypes=(p.dtypes or frozenset()) | more[p.name]) if p.name in more else p for p in ports
        )

    return replace(
        helper,
        inputs=widened(helper.inputs),
        outputs=widened(helper.outputs),
        attributes={**helper.attributes, **_attributes(row.attrs)},
        same=helper.same + _same(row.same),
        socs=tuple(row.socs.split()),
        since=row.since,
        source=row.source,
    )


# ---- torchair's helpers ----------------------------------------------------------------------------------------------

_HELPER_FILES = (
    "_ge_concrete_graph/dynamic_output_ops.py",  # first: these wrap private helpers of the next file
    "_ge_concrete_graph/auto_generated_ge_raw_ops.py",
    "ge/_ge_graph.py",
)

_GROUP_WORDS = {
    "ALL": "ALL",
    "BasicType": "BASIC",
    "NumberType": "NUMBER",
    "RealNumberType": "REAL",
    "REALNUMBERTYPE": "REAL",
    "IndexNumberType": "INDEX",
    "IntegerDataType": "INTEGER",
    "FloatingDataType": "FLOATING",
    "UnaryDataType": "UNARY",
}
# Spellings of the helpers that are not members of GE's enum.
_SPELLINGS = {
    "FLOAT32": "FLOAT",
    "FLOAT64": "DOUBLE",
    "BFLOAT16": "BF16",
    "HALF": "FLOAT16",
    "FLOAT8_E4M3": "FLOAT8_E4M3FN",
}

_PORT_KINDS: dict[str, Literal["required", "optional", "dynamic"]] = {
    "INPUT": "required",
    "OPTIONAL_INPUT": "optional",
    "DYNAMIC_INPUT": "dynamic",
    "OUTPUT": "required",
    "DYNAMIC_OUTPUT": "dynamic",
}


@functools.lru_cache(maxsize=4)
def _helper_sources(torchair: Path) -> tuple[str, ...]:
    """The text of the helper files; the largest has three megabytes and is neither compiled nor imported."""
    return tuple((torchair / name).read_text(encoding="utf-8") for name in _HELPER_FILES)


def registration(torchair: Path, type: str) -> str | None:  # noqa: A002
    """The docstring of an operator's helper: its registration as text; None if there is no helper."""
    for source in _helper_sources(torchair):
        start = source.find(f"\ndef {type}(")
        opening = source.find('"""', start)
        if start >= 0 and f"REG_OP({type})" in source[opening : opening + 200]:
            return source[opening + 3 : source.index('"""', opening + 3)].replace("\\n", "")
    return None


@functools.lru_cache(maxsize=1024)
def read_helper(torchair: Path, type: str) -> Prototype | None:  # noqa: A002
    """The prototype in the docstring of an operator's helper; None if there is no helper.

    Args:
        torchair: torchair's folder.
    """
    text = registration(torchair, type)
    return None if text is None else parse_registration(type, text)


def parse_registration(type: str, text: str) -> Prototype:  # noqa: A002
    """A prototype from `REG_OP(Name) .INPUT(x, TensorType({DT_FLOAT})) .ATTR(axis, Int, 0) ...`."""
    inputs, outputs, attributes, symbols, named = [], [], {}, {}, {}
    for clause in re.split(r"\n\s*\.", text)[1:]:
        match = re.match(r"(\w+)\(\s*(\w+)\s*(?:,\s*(.*))?\)\s*$", clause.strip(), re.DOTALL)
        if not match:
            continue
        kind, name, rest = match[1], match[2], match[3] or ""
        if kind in _PORT_KINDS:
            (inputs if kind.endswith("INPUT") else outputs).append(Port(name, _PORT_KINDS[kind], _type_list(rest)))
            if symbol := re.fullmatch(r'"(\w+)"', rest.strip()):
                named.setdefault(symbol[1], []).append(name)
        elif kind == "DATATYPE":
            symbols[name] = _type_list(rest)
        elif kind in ("ATTR", "ATRR", "REQUIRED_ATTR"):
            attributes[name] = _attribute(name, rest, required=kind == "REQUIRED_ATTR")
    of = {name: symbols.get(symbol) for symbol, names in named.items() for name in names}
    return Prototype(
        type=type,
        inputs=_with_symbols(inputs, of),
        outputs=_with_symbols(outputs, of),
        attributes=attributes,
        same=tuple(tuple(dict.fromkeys(names)) for names in named.values() if len(set(names)) > 1),
        socs=("a2", "a3", "950"),
        source="torchair's helper",
    )


def _with_symbols(ports: Iterable[Port], of: Mapping[str, Dtypes | None]) -> tuple[Port, ...]:
    return tuple(replace(p, dtypes=of[p.name]) if p.name in of else p for p in ports)


def _type_list(text: str) -> Dtypes | None:
    """`TensorType({DT_FLOAT, BasicType()})` as numbers; None for a symbol. Types that no graph of ours holds go."""
    found: Dtypes = frozenset()
    words: list[str] = re.findall(r"[A-Za-z]\w*", text)
    for word in words:
        if word in _GROUP_WORDS:
            found |= dtypes(GROUPS[_GROUP_WORDS[word]])
        elif word.startswith("DT_"):
            member = _SPELLINGS.get(word[3:], word[3:])
            found |= {Dtype[member].proto} if member in Dtype.__members__ else set()
    return found or None


def _attribute(name: str, text: str, required: bool) -> Attribute:
    type_, _, default = (part.strip() for part in text.partition(","))
    return Attribute(
        name, type_.capitalize() if type_ == "int" else type_, required, _value(default) if default else None
    )


def _value(text: str) -> Any:
    """A default as Python's value; the text itself where it is no literal (a dtype's name)."""
    plain = text.replace("{", "[").replace("}", "]")
    plain = {"true": "True", "false": "False"}.get(plain, re.sub(r"(?<=\d)f$", "", plain))
    try:
        return ast.literal_eval(plain)
    except (ValueError, SyntaxError):
        return text


# What is written in place, by operator type: output name to input name. Known without torchair.
IN_PLACE: dict[str, dict[str, str]] = {
    row.type: p.inplace for row in ROWS.values() if row.ins is not None for p in [_of_row(row)] if p.inplace
}
