"""`verify --bisect`: the first node of a bundle's graphs whose value is not the model's.

The model is traced again, piece by piece, as compile did, and each traced call is evaluated in float64 beside the GE
node that stands for it. Both start from the model's own state, so that what is found is where a difference begins.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from kimi_graph import tree
from kimi_graph.config import ModelConfig
from kimi_graph.models.decoder import Use

from . import recipe
from .bundle import SOURCES, Bundle, read_json
from .caches import WRITES, written
from .executor import Node, Selections
from .fuse import CHAINS
from .manifest import bucket_of
from .origins import Origins, source_of
from .passes import Folded
from .phases import Bucket, capture_pieces, fold_piece, parameter_path, place_of, state_name, uses
from .verify import EXACT_TOLERANCE, GraphSide, ModelSide, Step, largest


@dataclass(frozen=True)
class Difference:
    """A node that differs, or the place of one where the graph has other nodes than a compile makes.

    Attributes:
        seen: the node whose result was compared: `node`, or one that only views or carries on what it gives.
    """

    graph: str
    node: str
    type: str
    source: str
    error: float
    seen: str

    def __str__(self) -> str:
        seen = "" if self.seen == self.node else f" (seen at {self.seen})"
        return (
            f"first difference: {self.graph}: {self.node} ({self.type}), from {self.source or 'an unknown line'}: "
            f"off by {self.error:.1e} of scale{seen}, while everything before it agrees"
        )


class _Exact(fx.Interpreter):
    """Evaluates a traced piece in float64: casts between floats do nothing. Yields values by call name."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.values: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.op == "call_function":
            self.values[n.name] = value
        return value

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.aten._to_copy.default:
            dtype = kwargs.get("dtype") or args[0].dtype
            if args[0].is_floating_point() and dtype.is_floating_point:
                return args[0]
        if target is torch.ops.aten.view.default:  # of a permuted value too: GE tensors have no strides
            return args[0].reshape(args[1])
        return super().call_function(target, args, kwargs)


def first_difference(bundle: Bundle, config: ModelConfig, params: Any, steps: list[Step]) -> str:
    """A line that names the first node that differs, or says that none was found."""
    model, side = ModelSide(config, bundle.manifest["state"], params), GraphSide(bundle, config, params, "exact")
    file = bundle.folder / SOURCES
    origins = read_json(file) if file.is_file() else {}
    for step in steps:
        if step.phase in side.graphs:
            entry = bundle.graph(step.phase)
            side.take(model.named_states())
            seen: dict[str, Tensor] = {}

            def observe(node: Node, outputs: tuple[Tensor, ...], seen: dict[str, Tensor] = seen) -> None:
                seen.update({f"{node.name}:{i}": x.clone() for i, x in enumerate(outputs)})

            side.step(step.phase, step.given("exact", config.dtype), Selections(), observe)
            known = origins.get(entry["name"], {})
            agreed: set[str] = set()
            for edges, values in _traced(config, bucket_of(bundle.manifest, entry), model, step, known):
                name = edges[0].rpartition(":")[0]
                if not seen.keys() >= set(edges):
                    line = source_of(known, name)
                    return str(Difference(entry["name"], name, "missing", line, float("inf"), name))
                error = values([seen[edge] for edge in edges])
                if not error <= EXACT_TOLERANCE:
                    node = _suspect(side.graphs[step.phase].nodes, name, agreed)
                    line = source_of(known, node.name)
                    return str(Difference(entry["name"], node.name, node.type, line, error, name))
                agreed.add(name)
        model.step(step)
    return "no single node differs: every traced value is the model's (is sources.json of this bundle missing?)"


def _error(mine: Tensor, value: Tensor, first: int) -> float:
    if mine.numel() != value.numel():
        return float("inf")
    mine, value = mine.reshape(value.shape), value.double()  # booleans too
    return largest(mine[first:], value[first:]) if first else largest(mine, value)


# They change no number in float64; what an operator is given more of (heads) comes and goes by PadV3 and Slice.
CARRIERS = frozenset({"Reshape", "Identity", "Transpose", "Cast", "TensorMove", "PadV3", "Slice", "ConcatV2"})


def _suspect(nodes: Mapping[str, Node], name: str, agreed: set[str]) -> Node:
    """The first node that computes something, of those behind `name` whose own results nobody compared.

    One call of a layer may become several nodes, of which only the last one's result is a traced value.
    """
    behind: dict[str, Node] = {}
    todo = [name]
    while todo:
        node = nodes[todo.pop()]
        if node.name not in behind and node.name not in agreed and node.edges:
            behind[node.name] = node
            todo += [edge[0] for edge in node.edges]
    computing = [n for n in behind.values() if n.type not in CARRIERS]
    return min(computing or [nodes[name]], key=lambda n: n.position)


def _traced(
    config: ModelConfig, bucket: Bucket, model: ModelSide, step: Step, origins: dict[str, Origins]
) -> Iterator[tuple[list[str], Callable[[list[Tensor]], float]]]:
    """Edges of the graph, and how far what they gave is from what the model gives."""
    pieces: dict[str, Folded] = {name: fold_piece(c) for name, c in capture_pieces(config, bucket).items()}
    params, states = dict(tree.items(model.params)), model.named_states()
    batch, values = step.named, dict(step.inputs)
    schedule = uses(config, bucket)
    for use, unread in zip(schedule, _unread(schedule), strict=True):
        piece = pieces[use.part]
        read = {f"in{i}": values[name] for i, name in enumerate(use.reads)}

        def value(name: str, piece: Folded = piece, use: Use = use, read: dict[str, Tensor] = read) -> Tensor:
            if name.startswith("p."):
                parameter, steps = piece.weights[name]
                return recipe.apply(steps, params[parameter_path(config, parameter, use.prefix)])
            if name.startswith("s."):
                return states[state_name(config, use, name.removeprefix("s."))]
            return batch[name] if name in batch else read[name]

        run = _Exact(piece.captured.module)
        with torch.no_grad():
            out = run.run(*map(value, piece.captured.inputs))
        edges_of = origins[use.part]["values"] if use.part in origins else {}
        moved = origins[CHAINS]["values"] if CHAINS in origins else {}
        needed = _needed(piece, {f"out.{i}" for i, name in enumerate(use.writes) if name in unread})
        after = {id(value) for name, value in zip(piece.captured.outputs, out, strict=True) if name.startswith("s.")}
        for call, results in run.values.items():
            edges = edges_of.get(call, []) if call in needed else []
            made = list(results) if isinstance(results, (tuple, list)) else [results]
            for edge, result in zip(edges, made, strict=False):
                (at,) = moved.get(place_of(use) + edge, [place_of(use) + edge])
                if edge and at and isinstance(result, Tensor):
                    first = int(id(result) in after)  # slot 0 and page 0 are nobody's
                    yield [at], lambda x, y=result, first=first: _error(x[0], y, first)
            if kept := edges_of.get(WRITES.get(call, "")):
                start = made[0].shape[1]  # rows of page 0
                yield [place_of(use) + edge for edge in kept], lambda x, y=made, n=start: _error(*written(x, y), n)
        values |= zip(use.writes, out, strict=False)  # states come after the values


def _unread(schedule: Sequence[Use]) -> list[set[str]]:
    """Of each part, the values it writes that nobody reads before another part writes them again."""
    wanted, unread = set(schedule[-1].writes), []
    for use in reversed(schedule):
        unread.append(set(use.writes) - wanted)
        wanted = wanted - set(use.writes) | set(use.reads)
    return unread[::-1]


def _needed(piece: Folded, unread: set[str]) -> set[str]:
    """Calls that an output needs which somebody reads: stamping leaves the others out."""
    graph = piece.captured.module.graph
    (results,) = graph.find_nodes(op="output")
    todo = [n for name, n in zip(piece.captured.outputs, results.args[0], strict=True) if name not in unread]
    needed: set[str] = set()
    while todo:
        node = todo.pop()
        if node.name not in needed:
            needed.add(node.name)
            todo += node.all_input_nodes
    return needed
