"""Writes evidence.md out of the rows that the code reads: `python docs/make_evidence.py`.

`tests/test_evidence.py` holds that the page is what this makes of the rows as they are, that every source has a date,
and that what is nobody's word is called our own.
"""

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from kimi_graph import hardware
from kimi_graph.compile import executor, limits  # noqa: F401  the executor registers what operators compute
from kimi_graph.compile.executor.registry import PROVENANCES, SEMANTICS
from kimi_graph.compile.packages import PACKAGES
from kimi_graph.compile.prototype_rows import ROWS, Row
from kimi_graph.compile.targets import TARGETS, target
from kimi_graph.compile.torchair_contract import NAMES
from kimi_graph.plan.factors import PUBLISHED, Factors
from kimi_graph.plan.profiles import numbers

PAGE = Path(__file__).with_name("evidence.md")
ROOT = PAGE.parent.parent
OWN = "own reading"


class Source(NamedTuple):
    """Something public that rows name: what is found in their words, what it is, and of when."""

    words: str
    what: str
    date: str


SOURCES = (
    Source(
        "ops-transformer",
        "operators of transformers in CANN: registrations, definitions, tiling, aclnn documents",
        "July 2026",
    ),
    Source("ops-nn", "operators of neural networks in CANN: registrations and documents", "August 2026"),
    Source("ops-math", "mathematical operators in CANN: registrations", "August 2026"),
    Source(
        r"\bge\b|GE's",
        "the graph engine: its graph headers, reader of AIR files, type map of collectives, documents",
        "August 2026",
    ),
    Source(
        "hccl|HCCL",
        "the collectives' library: registrations of Hcom operators, documents of rank tables",
        "August 2026",
    ),
    Source(
        "torchair|torch-npu", "the converter inside the torch-npu 2.13.0 wheel; its documents of June 2026", "June 2026"
    ),
    Source("platform files", "the files of the runtime from which atc reads the numbers of a chip", "August 2026"),
    Source("migration guide", "the guide from A2 to 950 in ops-transformer: totals of both", "July 2026"),
    Source(
        "vllm-ascend",
        "the serving engine for Ascend and its operator package, main and release 0.26.0rc",
        "August 2026",
    ),
    Source("cann-recipes-infer|K3 recipe", "recipes of CANN for inference, that of Kimi K3 among them", "August 2026"),
    Source("Ascend C", "the public development kit asc-devkit: headers, opbuild", "July 2026"),
    Source(
        "CloudMatrix384|2506.12708", "the paper of CloudMatrix384 (arXiv:2506.12708), read in summaries", "June 2025"
    ),
    Source("keynote", "Huawei Connect 2025, in summaries", "September 2025"),
    Source(
        "white paper",
        "totals of the 950's architecture white paper, as issues of CANN's repositories and a blog quote them",
        "August 2026",
    ),
    Source("SGLang", "SGLang's documents and sgl-kernel-npu", "August 2026"),
    Source("compressed-tensors|OCP", "formats of released checkpoints; OCP Microscaling v1.0", "August 2026"),
    Source("aten|ATen|torch semantics", "torch 2.13: the operator that is the only one lowered to it", "torch 2.13"),
)


class Constant(NamedTuple):
    """A number of the stack that stands in the code by itself, and what holds it there."""

    module: str
    name: str
    what: str
    source: str
    test: str


CONSTANTS = (
    Constant(
        "compile.air",
        "SIZE_LIMIT",
        "bytes of an AIR file, at most",
        "ge: its reader takes INT_MAX bytes",
        "compile/test_air.py",
    ),
    Constant(
        "compile.checks",
        "NAME_LIMIT",
        "characters of a communication group's name",
        "GROUP_NAME_MAX_LEN in the headers of HCCL",
        "compile/test_checks.py",
    ),
    Constant(
        "compile.constants",
        "ALIGNMENT",
        "bytes: where a weight begins in a file that GE loads in one piece",
        "ge: files of combined weights",
        "compile/test_constants.py",
    ),
    Constant(
        "compile.lower",
        "CAUSAL_MASK_SIZE",
        "side of the compressed causal mask",
        "documents of FusedInferAttentionScore in ops-transformer",
        "compile/test_checks.py",
    ),
    Constant(
        "compile.limits",
        "UNIFIED_BUFFER",
        "bytes of a core's unified buffer that a kernel can use",
        "platform files of CANN's runtime",
        "compile/test_checks.py",
    ),
    Constant(
        "compile.limits",
        "POWERS_OF_TWO",
        "numbers of query heads of SparseFlashAttention on A2 and A3",
        "its documents in ops-transformer",
        "compile/test_checks.py",
    ),
    Constant(
        "compile.limits",
        "CACHE_ROW",
        "bytes of a row of an 8-bit cache: latents, rope channels, scales",
        "documents of KvQuantSparseFlashAttention in ops-transformer",
        "compile/test_caches.py",
    ),
    Constant(
        "compile.caches",
        "CHIPS",
        "whose sparse attention takes a dtype of caches",
        "definition of KvQuantSparseFlashAttention in ops-transformer",
        "compile/test_caches.py",
    ),
    Constant(
        "ops.quantised_cache",
        "TILE",
        "latents that share a scale",
        "documents of KvQuantSparseFlashAttention in ops-transformer",
        "compile/test_caches.py",
    ),
    Constant(
        "ops.quantised_cache",
        "INDEX_SCALE",
        "dtype of an index key's scale",
        "definition of QuantLightningIndexer in ops-transformer",
        "compile/test_caches.py",
    ),
    Constant(
        "ops.sparse_attention",
        "INDEX_HEADS",
        "heads of an indexer, at most, on A2 and A3",
        "documents of LightningIndexer in ops-transformer",
        "compile/test_checks.py",
    ),
    Constant(
        "ops.attention",
        "EXPANDED",
        "widths of nope, rope and value of a prefill's attention with the rope part apart",
        "documents of FusedInferAttentionScore in ops-transformer",
        "compile/test_checks.py",
    ),
    Constant(
        "ops.full_attention",
        "ALIGNED",
        "channels of a head are a multiple of it",
        "documents of FusedInferAttentionScore in ops-transformer",
        "compile/test_vision.py",
    ),
    Constant(
        "parallel.experts",
        "MAX_TOP_K",
        "experts of a row that MoeDistributeDispatchV2 takes",
        "its documents in ops-transformer",
        "compile/test_expert_pair.py",
    ),
    Constant(
        "parallel.experts",
        "MAX_EXPERTS",
        "experts with their copies",
        "its documents in ops-transformer",
        "compile/test_expert_pair.py",
    ),
    Constant(
        "parallel.experts",
        "MAX_ROWS",
        "rows of a rank",
        "its documents in ops-transformer",
        "compile/test_expert_pair.py",
    ),
    Constant(
        "parallel.experts",
        "WIDTHS",
        "channels of a row, from and to",
        "its documents in ops-transformer",
        "compile/test_expert_pair.py",
    ),
    Constant(
        "parallel.experts",
        "MAX_RANKS",
        "ranks, by chip",
        "its tiling in ops-transformer, where the documents differ",
        "compile/test_expert_pair.py",
    ),
    Constant(
        "parallel.experts",
        "NOTES",
        "numbers of a row in what the pair hands on",
        "its shape inference in ops-transformer",
        "compile/test_expert_pair.py",
    ),
    Constant(
        "compile.fit", "BUFFER_MIB", "MiB of HCCL_BUFFSIZE unless set", "documents of HCCL", "compile/test_deploy.py"
    ),
    Constant(
        "compile.deploy",
        "FORMATS",
        "GE's numbers of ND and of FRACTAL_NZ, by whether a tensor is tiled",
        "enum of formats in the headers of ge",
        "compile/test_deploy.py",
    ),
    Constant("compile.fit", "RUNTIME", "bytes of a die that driver and runtime take", OWN, "compile/test_deploy.py"),
    Constant(
        "compile.rank_tables",
        "LONGEST_GROUP",
        "characters of a group's name",
        "GROUP_NAME_MAX_LEN in the headers of HCCL",
        "compile/test_deploy.py",
    ),
    Constant(
        "compile.rank_tables",
        "CLUSTER_BUILDS",
        "releases whose atc makes models of many ranks, by chip",
        "torchair's documents, the table of what is supported",
        "compile/test_deploy.py",
    ),
    Constant(
        "compile.hosts",
        "MOST_DEVICES",
        "devices of a host that a rank table can number",
        "documents of HCCL's rank tables",
        "compile/test_hosts.py",
    ),
    Constant(
        "compile.targets",
        "CANN_VERSIONS",
        "releases that graphs can be made for",
        "definitions in ops-transformer and ops-nn, by release",
        "compile/test_targets.py",
    ),
    Constant(
        "compile.executor.on_twin",
        "ARCH",
        "architecture that a kernel is compiled for",
        "headers of Ascend C",
        "ops/kernels",
    ),
    Constant(
        "formats",
        "GROUP",
        "inputs that share a scale in MXFP4",
        "OCP Microscaling; compressed-tensors",
        "test_formats.py",
    ),
    Constant(
        "formats",
        "BLOCK",
        "side of a block of FP8 experts that shares a scale",
        "released checkpoints in compressed-tensors and of DeepSeek-V3",
        "test_formats.py",
    ),
)


def page() -> str:
    """All of evidence.md."""
    return "\n".join(
        [
            _INTRODUCTION,
            "## Sources\n",
            *_table(("named as", "what it is", "state read"), ((_plain(s.words), s.what, s.date) for s in SOURCES)),
            "\n## Operators\n",
            _OPERATORS,
            *_table(
                ("operator", "whose", "chips", "since", "prototype from", "of", "has run", "computes as, by"),
                operators(),
            ),
            "\n## Limits of operators\n",
            _LIMITS,
            *_table(("operators", "checked"), limit_lines()),
            "\n## Layouts\n",
            _LAYOUTS,
            *_table(("operator", "input, dtypes: layouts", "from", "of"), layouts()),
            "\n## Numbers that stand alone\n",
            _CONSTANTS,
            *_table(("number", "is", "what", "from", "of", "held by"), constants()),
            "\n## Hardware\n",
            _HARDWARE,
            *_table(("number", "targets", "is", "known how", "from", "of"), hardware_numbers()),
            "\n## What a plan assumes\n",
            _FACTORS,
            *_table(("factor", "is"), ((f"`{f.name}`", f"{getattr(Factors(), f.name):g}") for f in fields(Factors))),
            _PUBLISHED,
            *_table(("what", "figure", "from", "of"), ((*row, date(row[2])) for row in PUBLISHED)),
            "\n## Packages\n",
            _PACKAGES,
            *_table(("package", "CANN's type", "what differs"), packages()),
            "\n## Formulas of layers\n",
            _FORMULAS,
            *_table(("module", "source"), formulas()),
            "\n## Inside torchair\n",
            _TORCHAIR,
            *_table(("module", "names"), ((m, ", ".join(f"`{n}`" for n in names)) for m, names in NAMES.items())),
            "",
        ]
    )


def date(source: str) -> str:
    """Of when what a source names is; "" where it names nothing that is listed."""
    return ", ".join(dict.fromkeys(s.date for s in SOURCES if re.search(s.words, source)))


def is_own(source: str) -> bool:
    """Whether a source is this project itself."""
    return source == OWN or source.startswith(("the reference", "reference"))


def operators() -> Iterator[tuple[str, ...]]:
    others = sorted((set(SEMANTICS) | set(limits.LIMITS)) - set(ROWS))  # read as they stand, when a graph has one
    for type_, row in [*ROWS.items(), *((t, Row(type=t, source="torchair's helper")) for t in others)]:
        known = SEMANTICS.get(type_)
        yield (
            f"`{type_}`",
            row.provider,
            "all" if len(row.socs.split()) == 3 else row.socs,
            row.since,
            row.source,
            "this project" if is_own(row.source) else date(row.source),
            row.ran,
            "" if known is None else f"{known.provenance}: {known.source}",
        )


def limit_lines() -> Iterator[tuple[str, str]]:
    by_check: dict[Callable[..., Any], list[str]] = {}
    for type_, check in limits.LIMITS.items():
        by_check.setdefault(check, []).append(type_)
    for check, types in by_check.items():
        said = list(dict.fromkeys(_checked(check)))
        yield ", ".join(f"`{t}`" for t in types), "; ".join(said) or "shapes of inputs and results that fit each other"


_WORDS: dict[str, Callable[[list[str]], str]] = {
    "within": lambda a: f"{a[0]}: {a[3]}",
    "at_most": lambda a: f"{a[0]}: at most {a[2]}",
    "one_of": lambda a: f"{a[0]}: one of {a[2]}",
    "exactly": lambda a: f"{a[0]}: {a[2]}",
    "_sixteens": lambda a: f"{a[0]}: a multiple of 16 from 16 to {a[2]}",
}


def _checked(check: Callable[..., Any]) -> Iterator[str]:
    """What a check says a number has to be, its helpers' checks with it, as the code has it."""
    seen, todo = {check}, [check]
    while todo:
        now = todo.pop(0)
        tree = ast.parse(textwrap.dedent(inspect.getsource(now)))
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
                helper = getattr(limits, call.func.id, None)
                if call.func.id in _WORDS:
                    yield _WORDS[call.func.id]([_said(a) for a in call.args])
                elif helper not in seen and _looks_at_a_node(helper):
                    seen.add(helper)
                    todo.append(helper)


def _looks_at_a_node(helper: Any) -> bool:
    ours = inspect.isfunction(helper) and helper.__module__ == limits.__name__
    return ours and "Use" in str(inspect.signature(helper))  # others only put words together


def _said(node: ast.expr) -> str:
    """An argument of a check for readers: its text, with what is only known of a node in braces."""
    if isinstance(node, ast.Constant):
        return f"{node.value:,}" if type(node.value) is int else str(node.value)
    if isinstance(node, ast.JoinedStr):
        parts = (_said(v) if isinstance(v, ast.Constant) else "{" + ast.unparse(v.value) + "}" for v in node.values)
        return "".join(p if isinstance(p, str) else str(p) for p in parts)
    if isinstance(node, ast.Tuple) and all(isinstance(e, ast.Constant) for e in node.elts):
        return ", ".join(_said(e) for e in node.elts)
    value = getattr(limits, node.id, None) if isinstance(node, ast.Name) else None
    return str(value) if isinstance(value, (int, str, tuple)) else "{" + ast.unparse(node) + "}"


def layouts() -> Iterator[tuple[str, ...]]:
    for type_, row in ROWS.items():
        for line in filter(None, map(str.strip, row.layouts.splitlines())):
            yield f"`{type_}`", line, row.source, date(row.source)


def constants() -> Iterator[tuple[str, ...]]:
    for c in CONSTANTS:
        value = getattr(importlib.import_module(f"kimi_graph.{c.module}"), c.name)
        held = f"`tests/{c.test}`"
        yield f"`{c.module}.{c.name}`", _value(value), c.what, c.source, date(c.source), held


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k}: {_value(v)}" for k, v in value.items())
    if isinstance(value, tuple):
        return ", ".join(map(_value, value))
    return f"{value:,}" if type(value) is int and value >= 10_000 else str(value)


def hardware_numbers() -> Iterator[tuple[str, ...]]:
    found: dict[tuple[str, ...], list[str]] = {}
    for name in TARGETS:
        for what, n in numbers(target(name)).items():
            assert isinstance(n, hardware.Number)
            found.setdefault((what, n.text, n.how, n.source), []).append(name)
    for (what, text, how, source), targets in sorted(found.items(), key=lambda row: row[0][0]):
        yield what, ", ".join(targets), text, how, source, date(source)


def packages() -> Iterator[tuple[str, ...]]:
    for name, package in PACKAGES.items():
        for type_, how in package.replaces.items():
            yield name, f"`{type_}`", how


def formulas() -> Iterator[tuple[str, str]]:
    """Modules whose documentation, or that of a function in them, says a source."""
    for folder in _FOLDERS:
        for path in sorted((ROOT / folder).glob("*.py")):
            tree = ast.parse(path.read_text())
            texts = [ast.get_docstring(tree)]
            texts += [ast.get_docstring(n) for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.ClassDef))]
            said = [" ".join(found.split()) for text in texts if text for found in _SOURCE.findall(text)]
            if said:
                yield f"`{path.relative_to(ROOT)}`", "; ".join(dict.fromkeys(s.rstrip(".") for s in said))


_SOURCE = re.compile(r"^Sources?: (.+?)(?:\n\n|\n(?=[A-Z]\w+:)|\Z)", re.M | re.S)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{' --- |' * len(head)}"
    for row in rows:
        yield "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in row) + " |"


def _plain(words: str) -> str:
    return ", ".join(re.sub(r"\\b|\\", "", w) for w in words.split("|"))


_INTRODUCTION = """\
# Evidence

<!-- Written by docs/make_evidence.py out of the rows that the code reads: change those, then run it. -->

Every limit, formula and layout of the Ascend stack that the code relies on, with where it is from. Nothing here was
seen on a device. The page is made of the rows that checks, lowerings, executor and planner read
(`python docs/make_evidence.py`), and a test holds that it says what they say: a number can only change with its row.

Sources are named in words. A date is that of the state that was read; what has none is this project's own, and says so.
"""
_OPERATORS = f"""\
Every type that a graph of ours may hold: a row of `compile/prototype_rows.py`, or torchair's helper as it stands, which
each node of each graph is checked against (`tests/compile/test_prototypes.py`, `test_checks.py`). *Has run* names a
public word of the operator running on a device; empty is none known. *Computes as* is what the executor takes it to do
and how that is known, best first: {", ".join(PROVENANCES)} (`compile/executor/semantics/`,
`tests/compile/executor/`); empty where no graph has made it be executed.
"""
_LIMITS = """\
What `compile/limits.py` checks beyond dtypes, in the words of its checks; what stands in braces depends on the node.
Sources are the aclnn documents of ops-transformer (July 2026) and ops-nn (August 2026) and, of our own operators, their
tiling (`tests/compile/test_checks.py`). All check that shapes fit too.
"""
_LAYOUTS = "An input lies row by row (ND) and only so, but for these:\n"
_CONSTANTS = "Numbers of the stack that are no column of a row, by module of `kimi_graph`.\n"
_HARDWARE = """\
Of one die, rows of `compile/targets.py` and `kimi_graph/hardware.py`, as `kimi-graph targets NAME` prints them
(`tests/compile/test_targets.py`, `tests/plan/test_profiles.py`). *Assumed* is our own.
"""
_FACTORS = """\
Own assumptions, all of them: what of a data sheet's rate a kernel gets, and what costs time whatever its size
(`kimi_graph/plan/factors.py`; `--factor NAME=VALUE` sets one).
"""
_PUBLISHED = """
Published figures, which estimates are printed beside and never tuned to; most are with speculative decoding:
"""
_PACKAGES = """\
Types of CANN that a package brings in another form (`compile/packages.py`, `tests/compile/test_providers.py`).
"""
_FORMULAS = "What modules say of where their formulas and layouts are from, in their own words.\n"
_TORCHAIR = """\
Names that are used and that nobody promises; `tests/compile/test_torchair_contract.py` holds them for torch-npu 2.10
to 2.14.
"""
_FOLDERS = "kimi_graph kimi_graph/layers kimi_graph/models kimi_graph/families ops parallel compile".split()

if __name__ == "__main__":
    PAGE.write_text(page())
