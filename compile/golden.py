"""Golden cases: nodes of a bundle's graphs as graphs of one operator, with the inputs and outputs that a run gave them.

```
golden/index.json             every case: operator type, its node and graph, files and hashes
golden/MatMul_0.air           a graph of one operator
golden/MatMul_0.safetensors   in.NAME, state.NAME, out.N, after.NAME
```
Recorded while the ranks of a bundle run in the graphs' own dtypes, of as many shapes as there are, the smallest first.
Collectives are not among them: bring-up tries groups by themselves.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from kimi_graph.errors import BundleError
from kimi_graph.files import new_folder

from . import air
from .bundle import GOLDEN, Bundle, check_hash, dump, open_bundle, read_json
from .cut import CONSTANTS, SOURCES, cut, parsed
from .executor import Executor, Node
from .executor.node import Edge
from .executor.registry import SEMANTICS
from .ge_proto import ModelDef, split_edge
from .sides import Recorded, record

INDEX = "index.json"
LARGEST = 8 << 20  # bytes of a case; larger nodes are left out
FORMAT = 1


@dataclass(frozen=True)
class Case:
    """One operator with what it reads and gives. `states`: before it ran, `after`: then."""

    name: str
    type: str
    node: str
    graph: str
    model: ModelDef
    inputs: dict[str, Tensor]
    states: dict[str, Tensor]
    outputs: tuple[Tensor, ...]
    after: dict[str, Tensor]


def write_golden(folder: Path, checkpoint: Path | None, count: int) -> int:
    """Record cases of a bundle and write them into it.

    Args:
        checkpoint: weights; None: that which it was compiled from.
        count: cases of an operator type, at most.

    Returns:
        How many there are.

    Raises:
        BundleError: there are no weights to run it with.
    """
    bundle = open_bundle(folder)
    cases = list(_chosen(record(bundle, checkpoint), count))
    with new_folder(folder / GOLDEN) as work:
        entries = []
        for case in cases:
            data = {"air": air.to_bytes(case.model), "safetensors": _tensors(case)}
            for kind, content in data.items():
                (work / f"{case.name}.{kind}").write_bytes(content)
            hashes = {kind: hashlib.sha256(content).hexdigest() for kind, content in data.items()}
            entries.append(
                {"name": case.name, "type": case.type, "node": case.node, "graph": case.graph, "sha256": hashes}
            )
        (work / INDEX).write_bytes(dump({"format": FORMAT, "cases": entries}))
    return len(cases)


def read_golden(bundle: Bundle) -> list[Case]:
    """The cases of a bundle; none where it has none.

    Raises:
        BundleError: a file that is missing or was changed.
    """
    index = bundle.folder / GOLDEN / INDEX
    if not index.is_file():
        return []
    value = read_json(index)
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise BundleError(f"{index}: format {FORMAT} expected; make them again with compile --golden.")
    return [_read(index.parent, entry) for entry in value["cases"]]


def _read(folder: Path, entry: Mapping[str, Any]) -> Case:
    data = {}
    for kind, digest in entry["sha256"].items():
        path = folder / f"{entry['name']}.{kind}"
        if path.parent != folder or not path.is_file():
            raise BundleError(f"{path}: missing; the golden cases are incomplete.")
        data[kind] = path.read_bytes()
        check_hash(data[kind], digest, path)
    try:
        tensors = load(data["safetensors"])
    except SafetensorError as error:
        raise BundleError(f"{folder / entry['name']}.safetensors: {error}") from None

    def those(prefix: str) -> dict[str, Tensor]:
        return {n.removeprefix(prefix): x for n, x in tensors.items() if n.startswith(prefix)}

    outputs = those("out.")
    return Case(
        name=entry["name"], type=entry["type"], node=entry["node"], graph=entry["graph"],
        model=air.from_bytes(data["air"], f"{entry['name']}.air"), inputs=those("in."), states=those("state."),
        outputs=tuple(outputs[str(i)] for i in range(len(outputs))), after=those("after."),
    )  # fmt: skip


def _tensors(case: Case) -> bytes:
    named = {f"in.{n}": x for n, x in case.inputs.items()} | {f"state.{n}": x for n, x in case.states.items()}
    named |= {f"out.{i}": x for i, x in enumerate(case.outputs)} | {f"after.{n}": x for n, x in case.after.items()}
    return save({name: x.clone(memory_format=torch.contiguous_format) for name, x in named.items()})


# ---- which -----------------------------------------------------------------------------------------------------------


def _chosen(runs: Iterator[Recorded], count: int) -> Iterator[Case]:
    """Of each type the smallest nodes whose shapes and attributes differ."""
    found: dict[str, dict[Any, tuple[int, Recorded, Node]]] = {}
    for run in runs:
        for node in parsed(run.model).order:
            if node.type in (*SOURCES, *CONSTANTS, "NetOutput") or SEMANTICS[node.type].together is not None:
                continue
            size = sum(x.nbytes for x in _tensors_of(run, node))
            if size > LARGEST or (node.name, 0) not in run.values:
                continue
            kind = found.setdefault(node.type, {})
            key = _kind(run, node)
            if key not in kind or size < kind[key][0]:
                kind[key] = size, run, node
    for type_, kinds in sorted(found.items()):
        smallest = sorted(kinds.values(), key=lambda x: (x[0], x[1].graph, x[2].position))
        for i, (_, run, node) in enumerate(smallest[:count]):
            yield _case(f"{type_}_{i}", run, node)


def _value(run: Recorded, edge: Edge) -> Tensor:
    return run.job.inputs[edge[0]] if edge[0] in run.job.inputs else run.values[edge]


def _tensors_of(run: Recorded, node: Node) -> list[Tensor]:
    """What a node reads."""
    return [_value(run, edge) for edge in node.edges]


def _kind(run: Recorded, node: Node) -> Any:
    """What makes a case another: shapes, dtypes and attributes."""
    shapes = [(tuple(x.shape), str(x.dtype)) for x in _tensors_of(run, node)]
    return repr((shapes, sorted((name, str(value)) for name, value in node.attrs.items())))


def _case(name: str, run: Recorded, node: Node) -> Case:
    part = cut(run.model, {node.name}, f"golden.{name}")
    by_name = {source: split_edge(edge) for source, edge in part.boundary.items()}
    for op in part.model.graph[0].op:
        if op.name == node.name:
            op.name = "golden"
            output = list(part.model.graph[0].op)[-1]
            output.input[:] = [_renamed(e, node.name) for e in output.input]
    alone = Executor(part.model)
    states = {n: _value(run, by_name.get(n, (n, 0))) for n in alone.states}
    inputs = {n: _value(run, by_name.get(n, (n, 0))) for n in alone.inputs}
    ran = alone.run(inputs, states, "native")
    return Case(name, node.type, node.name, run.graph, part.model, inputs, states, ran.outputs, ran.states)


def _renamed(edge: str, name: str) -> str:
    producer, colon, index = edge.rpartition(":")
    return f"golden{colon}{index}" if producer == name else edge
