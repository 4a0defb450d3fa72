"""All ranks of a bundle as one side of a comparison: whole inputs go in, whole results and states come out.

`MeshSide` runs the ranks in lockstep in this process. What ranks hold in common has to be the same.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kimi_graph.checkpoint import Checkpoint
from kimi_graph.config import ModelConfig
from kimi_graph.errors import BundleError, ShardingError, VerifyError
from kimi_graph.parallel.simulate import gather

from .bundle import Bundle
from .caches import kept_states, model_states
from .executor import Selections, run_together
from .executor.lockstep import Groups
from .mesh_manifest import as_dims
from .ranks import Plan, cut, handed_on, make_ranks, results

SELECTORS = ("LightningIndexer", "QuantLightningIndexer")


@dataclass
class RankSelections:
    """Choices of experts and keys of every rank, recorded in one run and replayed in another."""

    ranks: dict[int, Selections] = field(default_factory=dict)

    def of(self, rank: int) -> Selections:
        return self.ranks.setdefault(rank, Selections())

    def replay(self) -> "RankSelections":
        """The same choices, to be used instead of computed ones."""
        return RankSelections({rank: chosen.replay() for rank, chosen in self.ranks.items()})


class MeshSide:
    """A bundle's graphs on all ranks, in lockstep."""

    def __init__(
        self, bundle: Bundle, config: ModelConfig, params: Any, mode: str, checkpoint: Checkpoint, plan: Plan
    ) -> None:
        self.plan, self.config, self.mode = plan, config, mode
        self.kv_dtype = bundle.manifest["state"]["kv_dtype"]
        self.ranks = make_ranks(plan, range(plan.mesh.world), params, checkpoint, mode)

    @property
    def types(self) -> set[str]:
        """Operator types that run."""
        return self.plan.types

    def selections(self) -> RankSelections:
        return RankSelections()

    def step(self, phase: str, given: Mapping[str, Tensor], selections: RankSelections) -> Tensor:
        """Whole logits `[rows, vocab]`, or embeddings of a picture; the states move on."""
        values: dict[int, dict[str, Tensor]] = {}  # what comes to a rank of the next stage, by its place in the stage
        gives: dict[int, dict[str, Tensor]] = {}
        for stage in self.plan.stages(phase):
            ranks = [self.ranks[r] for r in self.plan.ranks(stage)]
            for place, rank in enumerate(ranks):
                rank.crossed = values.get(place, {})
            runs = [rank.start(phase, given, selections.of(rank.rank)) for rank in ranks]
            ran = run_together(runs, self._groups(stage))
            for place, (rank, made) in enumerate(zip(ranks, ran, strict=True)):
                gives[place] = rank.finish(phase, made)
                values[place] = handed_on(self.plan, phase, stage, rank.crossed | gives[place])
        return whole_result(self.plan, phase, gives)

    def _groups(self, stage: int) -> Groups:
        """Rank lists within a stage, counted from its first rank."""
        first, of = self.plan.ranks(stage), self.plan.groups()
        return lambda name: [[r - first[0] for r in ranks] for ranks in of(name) if ranks[0] in first]

    def take(self, states: Mapping[str, Tensor]) -> None:
        """Start from the model's states."""
        kept = kept_states(self.config, self.kv_dtype, dict(states), exact=self.mode == "exact")
        for s in self.plan.bundle.manifest["state"]["states"]:
            for r in self.plan.ranks(s["stage"]):
                whole = kept[s["name"]].view(s["shape"])
                own = cut(whole, as_dims(s["over"]), self.plan.mesh, r)
                self.ranks[r].states[s["name"]].copy_(own.reshape(s["graph_shape"]))

    def named_states(self) -> dict[str, Tensor]:
        """What the states hold, whole, under the model's names."""
        return whole_states(self.plan, self.kv_dtype, [rank.states for rank in self.ranks])

    def choices(self, phase: str, selections: RankSelections) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Of a replayed step, by layer: the keys that the graph selects itself, and those of the exact run."""
        yield from whole_choices(self.plan, phase, selections)


# ---- of all ranks together -------------------------------------------------------------------------------------------


def whole_result(plan: Plan, phase: str, gives: Mapping[int, Mapping[str, Tensor]]) -> Tensor:
    """The first result of the last stage's ranks, put together: logits `[B, V]`, or a picture's embeddings `[N, D]`.

    Args:
        gives: results of each rank by name, by its place in the stage.

    Raises:
        BundleError: parts of the ranks do not fit together.
        VerifyError: ranks differ in what all of them have; a token that pads the vocabulary could be chosen.
    """
    entry = next(results(plan, phase))
    parts = [gives[place][entry["name"]] for place in range(plan.mesh.stage.world)]
    whole = _gathered(plan, entry["name"], parts, entry["over"])
    if entry["name"] != "logits":
        return whole
    own, added = whole.split([plan.config.vocab, whole.shape[-1] - plan.config.vocab], -1)
    if not bool(added.isneginf().all()):
        raise VerifyError(f"{entry['name']} on {plan.mesh}: a padded token could be chosen; minus infinity expected.")
    return own


def whole_states(plan: Plan, kv_dtype: str, states: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """States of all ranks put together, as the model names and shapes them; `states`: by rank."""
    whole = {}
    for s in plan.bundle.manifest["state"]["states"]:
        parts = [states[r][s["name"]].reshape(s["local"]).clone() for r in plan.ranks(s["stage"])]
        for part in parts:
            part[0].zero_()  # nobody's, and so not the same everywhere
        whole[s["name"]] = _gathered(plan, s["name"], parts, s["over"])
    return model_states(plan.config, kv_dtype, whole)


def whole_choices(plan: Plan, phase: str, selections: RankSelections) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Keys that native graphs select by themselves, and those of the exact run, `[rows, tokens, keys]` each."""
    rules = plan.rules(phase)
    if phase == "decode" and rules.ways("cached") > 1:
        return  # a rank selects among its own part of the keys
    over = [list(rules.on("batch")), list(rules.on("index_queries")), []]
    for stage in plan.stages(phase):
        ranks = [selections.of(r) for r in plan.ranks(stage)]
        nodes = plan.executor(phase, plan.ranks(stage)[0]).nodes
        for name in [n for n in ranks[0].own if nodes[n].type in SELECTORS]:
            own = _gathered(plan, name, [s.own[name][:, :, 0] for s in ranks], over)
            yield name, own, _gathered(plan, name, [s.chosen[name][:, :, 0] for s in ranks], over)


def _gathered(plan: Plan, name: str, parts: list[Tensor], over: Any) -> Tensor:
    """The whole tensor of the ranks of a stage; what they hold in common has to be the same.

    Raises:
        VerifyError: it is not.
    """
    try:
        if parts[0].is_floating_point() and parts[0].itemsize == 1:  # 8-bit floats cannot be compared on a CPU
            return gather(plan.mesh.stage, [x.view(torch.uint8) for x in parts], as_dims(over)).view(parts[0].dtype)
        return gather(plan.mesh.stage, parts, as_dims(over))
    except ShardingError as error:
        raise VerifyError(f"{name} on {plan.mesh}: {error}") from None
    except (RuntimeError, IndexError) as error:
        raise BundleError(f"{name} on {plan.mesh}: parts of the ranks do not fit together: {error}") from None
