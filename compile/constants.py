"""`--weights constant`: weights as FileConstant nodes that point into one file, for single-rank models.

GE reads every FileConstant into host memory when it compiles a graph, and each phase's model has its own copy: the
usual way is weights as inputs. Every weight starts at a multiple of 512 bytes: then GE loads the file in one piece.
Source: fact sheets of torchair, section 5, and of Ascend, D.2.
"""

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kimi_graph import tree
from kimi_graph.checkpoint import Checkpoint, audit, load_tree
from kimi_graph.config import ModelConfig
from kimi_graph.errors import BundleError
from kimi_graph.models import decoder

from . import recipe
from .bundle import CONSTANTS
from .ge_proto import Dtype, ModelDef, OpDef, dtype_of, get_attr, set_attr, shape_of

ALIGNMENT = 512
ATTRIBUTES = {  # of a FileConstant
    "location": (str, "the name of a file"),
    "offset": (int, "a number of bytes"),
    "length": (int, "a number of bytes"),
    "shape": (list, "a list of sizes"),
    "dtype": (Dtype, "a dtype"),
}


def place(plan: dict[str, Any]) -> int:
    """Give every weight of the plan its `offset` in the file; returns the file's size in bytes."""
    end = 0
    for name in sorted(plan):
        plan[name]["offset"] = end
        end += -(-plan[name]["bytes"] // ALIGNMENT) * ALIGNMENT
    return end


def to_file_constants(model: ModelDef, plan: dict[str, Any]) -> ModelDef:
    """The graph with FileConstant nodes instead of weight inputs."""
    out = ModelDef()
    out.CopyFrom(model)
    index = 0
    for op in out.graph[0].op:
        if op.name in plan and op.type == "Data":
            _make_constant(op, plan[op.name])
        elif op.type in ("Data", "RefData"):
            set_attr(op, "index", index)
            index += 1
    return out


def _make_constant(op: OpDef, entry: dict[str, Any]) -> None:
    desc = op.output_desc[0]
    op.type = "FileConstant"
    del op.input[:], op.input_desc[:]
    op.attr.clear()
    set_attr(op, "shape", list(shape_of(desc)))
    set_attr(op, "dtype", dtype_of(desc))
    set_attr(op, "location", CONSTANTS)
    set_attr(op, "offset", entry["offset"])
    set_attr(op, "length", entry["bytes"])


def to_inputs(model: ModelDef, folder: Path) -> dict[str, Tensor]:
    """Make the FileConstant nodes of a graph read from a bundle Data again, and map what they point to.

    Raises:
        BundleError: a node that points out of the file or disagrees with itself.
    """
    found: dict[str, Tensor] = {}
    index = sum(op.type in ("Data", "RefData") for op in model.graph[0].op)
    for op in model.graph[0].op:
        if op.type == "FileConstant":
            found[op.name] = _mapped(op, folder)
            op.type = "Data"
            op.attr.clear()
            set_attr(op, "index", index)
            index += 1
    return found


def _mapped(op: OpDef, folder: Path) -> Tensor:
    try:
        found = {name: get_attr(op, name) for name in ATTRIBUTES if name in op.attr}
    except ValueError as error:
        raise BundleError(f"{op.name}: FileConstant: {error}.") from None
    given: dict[str, Any] = {"shape": [], **found}
    for name, (kind, words) in ATTRIBUTES.items():
        if type(given.get(name)) is not kind:
            raise BundleError(f"{op.name}: FileConstant with {name} {given.get(name)!r}, expected {words}.")
    location, offset, length, shape = given["location"], given["offset"], given["length"], tuple(given["shape"])
    dtype, file = given["dtype"].shared, folder / CONSTANTS
    if dtype is None:
        raise BundleError(f"{op.name}: FileConstant of {given['dtype'].name}, which no constant of a bundle has.")
    if location != CONSTANTS:
        raise BundleError(f"{op.name}: FileConstant reads {location!r}; the bundle's constants are in {CONSTANTS}.")
    if length != math.prod(shape) * dtype.itemsize or shape != shape_of(op.output_desc[0]):
        raise BundleError(f"{op.name}: FileConstant of {length} bytes does not hold {dtype} {list(shape)}.")
    size = file.stat().st_size if file.is_file() else 0
    if not 0 <= offset <= size - length:
        raise BundleError(f"{op.name}: bytes {offset:,} to {offset + length:,} are not in {file} ({size:,} bytes).")
    if offset % ALIGNMENT:
        raise BundleError(
            f"{op.name}: starts at byte {offset:,} of {file}; constants start at multiples of {ALIGNMENT}."
        )
    mapped = torch.from_file(str(file), shared=False, size=size, dtype=torch.uint8)
    return mapped[offset : offset + length].view(dtype).view(shape)


def write(
    file: Path,
    plan: dict[str, Any],
    config: ModelConfig,
    checkpoint: Checkpoint,
    notify: Callable[[str, int, int], None],
) -> None:
    """Write the weights, one parameter in memory at a time.

    Raises:
        CheckpointError: the checkpoint is not the model's.
    """
    specs = decoder.model_specs(config)
    audit(specs, checkpoint, config.dtype, config).check()
    by_path = dict(tree.items(specs))
    total = sum(entry["bytes"] for entry in plan.values())
    done = 0
    with file.open("wb") as out:
        for path, names in _by_parameter(plan):
            parameter = load_tree(by_path[path], checkpoint, config.dtype)
            for name in names:
                made = recipe.apply(recipe.from_json(plan[name]["steps"]), parameter).contiguous()
                out.seek(plan[name]["offset"])
                out.write(made.view(-1).view(torch.uint8).numpy().data)
                done += plan[name]["bytes"]
                notify("write weights", done, total)
        out.truncate(max(e["offset"] + -(-e["bytes"] // ALIGNMENT) * ALIGNMENT for e in plan.values()))


def _by_parameter(plan: dict[str, Any]) -> Iterable[tuple[str, list[str]]]:
    names: dict[str, list[str]] = {}
    for name in sorted(plan):
        names.setdefault(plan[name]["parameter"], []).append(name)
    return names.items()
