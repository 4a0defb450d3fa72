"""Docstrings of public functions say what their signature cannot: shapes, errors, sources; and nothing that is not so.

All is read from source text, so that what cannot be imported here (an engine's adapter) is held to it as well.
"""

import ast
import builtins
import functools
import importlib
import re
from dataclasses import dataclass

import pytest
import torch

from kimi_graph import errors
from kimi_graph.ops import OPERATORS
from kimi_graph.parallel.value import CallError
from kimi_graph.plan.search import PlanError
from tests.test_repository import ROOT, imports, parsed
from tests.test_repository import modules as paths

pytestmark = pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="needs the repository, not a wheel")

ERRORS = {e.__name__: e for e in [*vars(errors).values(), PlanError, CallError] if isinstance(e, type)}
FUNCTION, CLASS = ast.FunctionDef, ast.ClassDef

# Of these folders what others import is public; of the rest every module. Commands have help, which test_cli holds.
INSIDE = ("kimi_graph.compile", "kimi_graph.families", "kimi_graph.config_keys", "kimi_graph.ops.twin")
COMMANDS = "kimi_graph.cli"

# They take tensors of any shape, or hold those of a file.
ANY_SHAPE = ("kimi_graph.parallel", "kimi_graph.ops.base", "kimi_graph.checkpoint", "kimi_graph.init")

# What the result of every command answers (`cli.output.Result` says what they are), and what a sharded value answers as
# torch's tensors do.
OF_RESULTS = {"passed", "summary", "text", "to_json"}
LIKE_TENSORS = {"kimi_graph.parallel.value.Value": torch.Tensor, "kimi_graph.parallel.value.Sharded": torch.Tensor}


@dataclass(frozen=True)
class Place:
    """A module: its name, its tree, and the full names of what it imports."""

    name: str
    tree: ast.Module
    imported: dict[str, str]


@dataclass(frozen=True)
class Public:
    """A public function, method or class."""

    place: Place
    owner: ast.ClassDef | None
    node: ast.FunctionDef | ast.ClassDef

    @property
    def name(self) -> str:
        return ".".join([self.place.name, *([self.owner.name] if self.owner else []), self.node.name])

    @property
    def doc(self) -> str:
        return ast.get_docstring(self.node) or ""

    @property
    def named(self) -> dict[str, str]:
        """Its parameters and their annotations; or its fields, and the parameters it is made from."""
        if isinstance(self.node, FUNCTION):
            return arguments(self.node)
        found = {x.id: "" for y in self.node.body if isinstance(y, ast.Assign) for x in y.targets if hasattr(x, "id")}
        for x in ast.walk(self.node):
            if isinstance(x, ast.AnnAssign) and isinstance(x.target, ast.Name):
                found[x.target.id] = ast.unparse(x.annotation)
            elif isinstance(x, FUNCTION):
                found |= arguments(x) if x.name == "__init__" else {x.name: ""}
            elif isinstance(x, ast.Attribute) and isinstance(x.ctx, ast.Store):
                found[x.attr] = ""
        for base in (x.id for x in self.node.bases if isinstance(x, ast.Name)):
            there = lookup(self.place.imported.get(base, f"{self.place.name}.{base}"))
            found |= Public(there[0], None, there[1]).named if there else {}
        return found


def arguments(node):
    a = node.args
    found = [*a.posonlyargs, *a.args, a.vararg, *a.kwonlyargs, a.kwarg]
    found = [x for x in found if x is not None and x.arg not in ("self", "cls")]
    return {x.arg: ast.unparse(x.annotation) if x.annotation else "" for x in found}


@functools.cache
def places():
    found = {}
    for name, path in paths().items():
        named = {full.rpartition(".")[2]: full for _, full, _ in imports(name, path)}
        found[name] = Place(name, parsed(path), named)
    return found


def within(name, folders):
    return any(name == f or name.startswith(f"{f}.") for f in folders)


@functools.cache
def shared():
    """Names inside the folders `INSIDE` that modules outside of their folder import."""
    found = set()
    for place in places().values():
        for full in place.imported.values():
            inside = [f for f in INSIDE if within(full, [f]) and not within(place.name, [f])]
            found |= {full} if inside else set()
    return found


@functools.cache
def public():
    found = []
    for place in places().values():
        if within(place.name, [COMMANDS]) or place.name.rpartition(".")[2].startswith("_"):
            continue
        for node in filter(shown, place.tree.body):
            if not within(place.name, INSIDE) or f"{place.name}.{node.name}" in shared():
                found.append(Public(place, None, node))
                if isinstance(node, CLASS) and not foreign(place, node):
                    known = OF_RESULTS | {*dir(LIKE_TENSORS.get(f"{place.name}.{node.name}", object))}
                    found += [Public(place, node, x) for x in node.body if shown(x) and x.name not in known]
    return found


def shown(node):
    """Whether it is public, and more than the declaration of a protocol."""
    if not isinstance(node, FUNCTION | CLASS) or node.name.startswith("_"):
        return False
    return not isinstance(node.body[0], ast.Expr) or getattr(node.body[0].value, "value", None) is not Ellipsis


def foreign(place, node):
    """Whether methods of a class answer an engine's interface, which says what they are."""
    named = [n.id for b in node.bases for n in ast.walk(b) if isinstance(n, ast.Name)]
    bases = [place.imported.get(n, "") for n in named]
    return any(within(b, ["vllm", "transformers"]) for b in bases)


def listed(faults):
    return "\n".join([f"{len(faults)}:", *faults])


def test_everything_public_has_a_docstring():
    silent = [x.name for x in public() if not x.doc]
    assert not silent, listed(silent)


# Shapes.


def of_tensors(annotation):
    """Whether an annotation says Tensor itself: not a tree of them, nor tensors by name."""
    trees = r"\b(?!list|tuple|Sequence|Iterable|Iterator)\w+\[[^]]*Tensor\]"
    return bool(re.search(r"\bTensor\b", re.sub(rf"{trees}|tuple\[str, Tensor\]", "", annotation)))


def test_a_function_of_tensors_says_their_shapes():
    faults = []
    for x in public():
        if isinstance(x.node, FUNCTION) and not within(x.place.name, ANY_SHAPE):
            returned = ast.unparse(x.node.returns) if x.node.returns else ""
            if any(map(of_tensors, [*x.named.values(), returned])) and not re.search(r"`[^`\n]*\[[^`\n]*\]", x.doc):
                faults.append(x.name)
    assert not faults, listed(faults)


# Errors.


@functools.cache
def exported():
    """Full names of what the package and its folders say is theirs: `__all__`."""
    found = set()
    for name in ("", ".layers", ".models", ".ops", ".parallel"):
        module = importlib.import_module(f"kimi_graph{name}")
        named = [getattr(module, n) for n in module.__all__]
        found |= {f"{x.__module__}.{x.__name__}" for x in named if hasattr(x, "__module__") and hasattr(x, "__name__")}
    return found | {f"{x.reference.__module__}.{x.name}" for x in OPERATORS.values()}


def raised(place, owner, node, deep, seen=()):
    """Names of our errors that a function raises: itself, or by what its module keeps to itself; not those it catches.

    Args:
        deep: also what public functions and classes that it calls raise themselves.
    """
    if isinstance(node, CLASS):
        return {e for x in bodies(node) for e in raised(place, node, x, deep, seen)}
    if isinstance(node, ast.Try):
        caught = {n.id for h in node.handlers if h.type for n in ast.walk(h.type) if isinstance(n, ast.Name)}
        rest = [x for h in node.handlers for x in h.body] + node.orelse + node.finalbody
        inside = {e for x in node.body for e in raised(place, owner, x, deep, seen)}
        inside = {e for e in inside if not any(is_a(e, c) for c in caught)}
        return inside | {e for x in rest for e in raised(place, owner, x, deep, seen)}
    found = thrown(node)
    if isinstance(node, ast.Call):
        for there, kept in called(place, owner, node.func):
            if kept and there not in seen:
                found |= raised(*there, deep, (*seen, there))
            elif deep and not kept:
                found |= {e for x in bodies(there[2]) for n in ast.walk(x) for e in thrown(n)}
    for x in ast.iter_child_nodes(node):
        found |= raised(place, owner, x, deep, seen)
    return found


def thrown(node):
    said = isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name)
    return {node.exc.func.id} & ERRORS.keys() if said else set()


def bodies(node):
    made = ("__init__", "__post_init__")
    return [x for x in node.body if isinstance(x, FUNCTION) and x.name in made] if isinstance(node, CLASS) else [node]


def called(place, owner, func):
    """What a call may mean, with its place and class, and whether it is kept to this module."""
    if isinstance(func, ast.Name):
        there = lookup(place.imported.get(func.id, f"{place.name}.{func.id}"))
        yield from [((there[0], None, there[1]), there[0] is place and func.id.startswith("_"))] if there else []
    elif isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name):
        if func.value.id == "self" and owner is not None:
            mine = [x for x in owner.body if isinstance(x, FUNCTION) and x.name == func.attr]
            yield from (((place, owner, x), x.name.startswith("_")) for x in mine)
        elif there := lookup(f"{place.imported.get(func.value.id, '')}.{func.attr}"):
            yield (there[0], None, there[1]), False


def lookup(name):
    """The module and node of a function or class, also by where it is imported."""
    home, _, last = name.rpartition(".")
    place = places().get(home)
    if place is None:
        return None
    for node in place.tree.body:
        if isinstance(node, FUNCTION | CLASS) and node.name == last:
            return place, node
    return lookup(place.imported[last]) if place.imported.get(last, name) != name else None


def is_a(name, base):
    return base == "Exception" or (name in ERRORS and base in ERRORS and issubclass(ERRORS[name], ERRORS[base]))


def test_a_function_says_which_of_our_errors_it_raises():
    faults = []
    for x in public():
        said = entries(x.doc, "Raises")
        found = raised(x.place, x.owner, x.node, deep=x.name in exported())
        missing = [e for e in sorted(found) if not any(is_a(e, s) for s in said)]
        faults += [f"{x.name}: {', '.join(missing)}"] if missing else []
    assert not faults, listed(faults)


# Sections.


def section(doc, title):
    """Lines of a section, without their indentation."""
    found = re.search(rf"^{title}:\n((?:[ \t]+.*\n?|\n)+)", doc, re.M)
    return [line[4:] for line in found[1].splitlines() if line.strip()] if found else []


def entries(doc, title):
    """Names before the colons of a section's entries."""
    heads = [line.partition(":")[0] for line in section(doc, title) if not line.startswith(" ")]
    return [name.strip("*") for head in heads for name in head.split(", ")]


def test_a_section_names_what_is_there():
    faults = []
    for x in public():
        for title in ("Args", "Attributes"):
            faults += [f"{x.name}: {n!r}" for n in entries(x.doc, title) if n not in x.named]
        faults += [f"{x.name}: {n!r}" for n in entries(x.doc, "Raises") if n not in {*ERRORS, *vars(builtins)}]
    assert not faults, listed(faults)


def test_an_entry_of_a_section_stands_on_a_line_of_its_own():
    """Where two share a line, the reference shows the second as part of the first."""
    faults = []
    for x in public():
        for line in [y for title in ("Args", "Attributes", "Raises") for y in section(x.doc, title)]:
            inside = re.findall(r"(?<=[.;] )([\w, ]+): ", line)
            faults += [f"{x.name}: {line.strip()}" for i in inside if {*i.split(", ")} <= {*x.named, *ERRORS}]
    assert not faults, listed(faults)


def test_the_first_line_of_a_property_has_no_colon():
    """What is before one the reference takes for the property's type."""
    faults = []
    for x in public():
        marks = [ast.unparse(d) for d in x.node.decorator_list]
        line = re.sub(r"`[^`]*`", "", x.doc.partition("\n")[0])
        faults += [f"{x.name}: {line}" for m in marks if m.endswith("property") and ": " in line]
    assert not faults, listed(faults)


# Sources.

# They move, place or record tensors; what they compute is another's, which has the source.
LAYERS_WITHOUT = ("batch", "packing", "stretches", "kernels")
OPS_WITHOUT = ("twin", "base", "cache", "contract", "einsum", "gpu", "kernel_project", "offers", "state")


def test_what_computes_a_formula_names_its_source():
    """In the docstring of its module, or of every public function in it."""
    faults = []
    for place in places().values():
        _, folder, name, *_ = (*place.name.split("."), "", "")
        if name and name not in {"layers": LAYERS_WITHOUT, "ops": OPS_WITHOUT}.get(folder, (name,)):
            docs = [ast.get_docstring(x) for x in place.tree.body if isinstance(x, FUNCTION) and shown(x)]
            if not sourced(ast.get_docstring(place.tree)) and not all(map(sourced, docs)):
                faults.append(place.name)
    assert not faults, listed(faults)


def sourced(doc):
    return bool(re.search(r"^Source: \S", doc or "", re.M))
