"""`kimi-graph verify`: execute a bundle's graphs on the CPU and compare every output and state with the model.

Prompts of unequal length are read in chunks, then decoded token by token, through the bundle's own state contract: slots
and pages in scrambled order, rows that end inside a chunk. Twice:

* exact: every float is float64 and float casts do nothing, on both sides. What is left is rounding: <= 1e-10 of scale.
* native: the graph in its own dtypes, against the exact model; expert choices are taken from the exact run, because a
  rounding that flips a near tie changes a token's experts and says nothing about the graph.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kimi_graph import tree
from kimi_graph.checkpoint import Checkpoint, load_params
from kimi_graph.config import ModelConfig
from kimi_graph.errors import BundleError, VerifyError
from kimi_graph.layers import Batch, step_batch
from kimi_graph.models import decoder
from kimi_graph.read_config import read_config
from kimi_graph.spec import ParamSpec

from . import air, recipe
from .bundle import Bundle, open_bundle
from .executor import Executor

EXACT_TOLERANCE = 1e-10


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of the script, the same for model and graph."""

    phase: str
    tokens: Tensor
    batch: Batch[Tensor]


@dataclass(frozen=True, kw_only=True)
class Row:
    """The largest difference seen for one kind of tensor.

    Attributes:
        what: "logits" or a kind of state, such as "kda.memory". count: tensors compared.
        error: exact: largest |difference| / largest |model|; native: |difference| / |model| in the 2-norm, worst tensor.
        where: tensor and step of the largest.
    """

    mode: str
    what: str
    count: int
    error: float
    tolerance: float
    where: str

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance  # NaN fails


@dataclass
class Report:
    """What verify found. `rows` per mode and kind of tensor."""

    rows: list[Row] = field(default_factory=list)
    steps: int = 0
    provenance: dict[str, int] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return bool(self.rows) and all(r.passed for r in self.rows)


# ---- weights ---------------------------------------------------------------------------------------------------------


def graph_weights(
    plan: dict[str, Any], names: list[str], params: dict[str, Tensor], dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """The graph's weights by its plan, from parameters by path. `dtype` float64 keeps every float in float64."""
    weights = {}
    for name in names:
        entry = plan["weights"][name]
        if entry["parameter"] not in params:
            raise BundleError(f"weight {name}: the model has no parameter {entry['parameter']!r}.")
        weights[name] = recipe.apply(recipe.from_json(entry["steps"]), params[entry["parameter"]])
    return weights


def causal_mask(size: int) -> Tensor:
    """`[size, size]` bool, True above the diagonal: what a query must not see."""
    return torch.ones(size, size, dtype=torch.bool).triu(1)


GENERATORS: dict[str, Callable[[int], Tensor]] = {"causal_mask": causal_mask}


def generated_inputs(plan: dict[str, Any]) -> dict[str, Tensor]:
    """Inputs no checkpoint holds."""
    return {name: GENERATORS[kind](size) for name, (kind, size) in plan["generated"].items()}


# ---- the script ------------------------------------------------------------------------------------------------------


def script(bundle: Bundle, config: ModelConfig, steps: int, seed: int) -> Iterator[Step]:
    """Prefill chunks that read unequal prompts, then `steps` decode steps, for the phases the bundle has."""
    contract = bundle.manifest["state"]
    phases = {g["phase"]: g for g in bundle.manifest["graphs"]}
    rows = next(iter(phases.values()))["rows"]
    generator = torch.Generator().manual_seed(seed)
    capacity, page = contract["tokens_per_sequence"], contract["page_tokens"]
    chunk = phases["prefill"]["tokens"] if "prefill" in phases else min(16, capacity)
    table, slots = _scattered(contract, rows, generator)
    room = max(1, min(capacity, (contract["pages"] - 1) // rows * page) - (steps if "decode" in phases else 0))
    prompts = torch.tensor([max(1, min(room, chunk + chunk // 2 + 1 - r * (chunk // 3 + 1))) for r in range(rows)])
    before = torch.zeros(rows, dtype=torch.int64)
    while bool((before < prompts).any()):
        counts = (prompts - before).clamp(max=chunk)
        tokens = torch.randint(config.vocab, (rows, chunk), generator=generator)
        yield Step(phase="prefill", tokens=tokens, batch=step_batch(table, slots, before, counts, chunk, page))
        before = before + counts
    for _ in range(steps if "decode" in phases else 0):
        tokens = torch.randint(config.vocab, (rows, 1), generator=generator)
        counts = torch.ones_like(before)
        yield Step(phase="decode", tokens=tokens, batch=step_batch(table, slots, before, counts, 1, page))
        before = before + counts


def _scattered(contract: dict[str, Any], rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Pages and slots in scrambled order: a graph that ignores the tables cannot pass."""
    per_row = min(contract["pages_per_sequence"], (contract["pages"] - 1) // rows)
    order = torch.randperm(contract["pages"] - 1, generator=generator) + 1
    table = torch.zeros(rows, contract["pages_per_sequence"], dtype=torch.int32)
    table[:, :per_row] = order[: rows * per_row].view(rows, per_row).int()
    slots = (torch.randperm(contract["slots"] - 1, generator=generator)[:rows] + 1).int()
    return table, slots


# ---- both sides ------------------------------------------------------------------------------------------------------


class ModelSide:
    """The functional model on the bundle's own state shapes, in float64."""

    def __init__(self, config: ModelConfig, contract: dict[str, Any], params: Any) -> None:
        self.config, self.params = config, params
        specs = decoder.state_specs(
            config, slots=contract["slots"], pages=contract["pages"], page=contract["page_tokens"], dtype=torch.float64
        )
        self.states = tree.map(lambda s: torch.zeros(s.shape, dtype=torch.float64), specs)

    def step(self, step: Step) -> Tensor:
        """Logits `[rows, vocab]` of each row's last token; the states move on."""
        decode = step.phase == "decode"
        with torch.no_grad():
            logits, self.states = decoder.forward(
                self.params, self.config, step.tokens, self.states, step.batch, step=decode, last_only=not decode
            )
        return logits[:, 0]

    def named_states(self) -> dict[str, Tensor]:
        kinds = [layer.kinds[0] for layer in self.config.layers]
        return {
            f"s.layers.{i}.{kind}.{leaf}": value
            for i, (kind, state) in enumerate(zip(kinds, self.states, strict=True))
            for leaf, value in tree.items(state)
        }


class GraphSide:
    """The bundle's graphs in the executor."""

    def __init__(self, bundle: Bundle, params: Any, mode: str, selections: dict[str, Any]) -> None:
        self.mode, self.selections = mode, selections
        named = dict(tree.items(params))
        exact = mode == "exact"
        self.graphs: dict[str, Executor] = {}
        self.inputs: dict[str, dict[str, Tensor]] = {}
        for entry in bundle.manifest["graphs"]:
            self.graphs[entry["phase"]] = Executor(air.from_bytes(bundle.graph_bytes(entry), entry["file"]))
            weights = graph_weights(bundle.weights, entry["weights"], named, torch.float64 if exact else None)
            self.inputs[entry["phase"]] = weights | generated_inputs(bundle.weights)
        self.states = {
            s["name"]: torch.zeros(s["graph_shape"], dtype=torch.float64 if exact else recipe.DTYPES[s["dtype"]])
            for s in bundle.manifest["state"]["states"]
        }

    def step(self, index: int, step: Step) -> Tensor:
        batch = {f"batch.{name}": value for name, value in tree.items(step.batch)}
        executor = self.graphs[step.phase]
        inputs = {**self.inputs[step.phase], **batch, "tokens": step.tokens}
        outputs = executor.run(
            {name: inputs[name] for name in executor.inputs}, self.states, mode=self.mode, selections=self.selections.setdefault(index, {})
        )
        return outputs[0]
