"""One rank of the engine: which layers and shards it has, and how it runs them.

Layers come from the library's pipeline split, shards from its mesh rules. The ranks of a stage all have what the engine
gives to one: values, batches and pages of latents are whole on each. Parameters and KDA states are split.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kimi_graph import tree
from kimi_graph.checkpoint import Checkpoint, audit, load_part, load_tree
from kimi_graph.config import ModelConfig
from kimi_graph.errors import ShardingError
from kimi_graph.layers import Batch
from kimi_graph.models import decoder, encode_image
from kimi_graph.models.decoder import Block, Decoder, How, Use
from kimi_graph.models.pipeline import model_stages, stages_of
from kimi_graph.parallel import Mesh, Placement, Rules, place_tree, preset
from kimi_graph.parallel.legality import faults, refusal, sizes_of
from kimi_graph.parallel.processes import Member
from kimi_graph.parallel.stages import crossing, parts_by_stage
from kimi_graph.parallel.value import Sharded, replicated
from kimi_graph.spec import ParamSpec
from kimi_graph.vision import VisionInput


def check_mesh(config: ModelConfig, mesh: Mesh) -> None:
    """Refuse a mesh over which the model's sizes do not divide.

    Raises:
        ShardingError: all of them; more stages than layers.
    """
    model_stages(config, mesh.pipe)
    sizes, rules_of = sizes_of(decoder.model_specs(config)), functools.partial(preset, config)
    found = [
        dataclasses.replace(fault, padding="") for fault in faults(sizes, rules_of(mesh))
    ]  # nothing is padded here
    if found:
        raise ShardingError(refusal(config.name, mesh, sizes, found, rules_of))


@dataclass(frozen=True)
class Place:
    """Where a rank stands.

    Attributes:
        config: of the model.
        mesh: of all ranks of the engine.
        stage: pipeline stage.
        member: which rank of the stage it is, among their processes; None: the only one.
    """

    config: ModelConfig
    mesh: Mesh
    stage: int = 0
    member: Member | None = None

    @property
    def layers(self) -> range:
        """Layers of this stage, in the model's numbering."""
        return model_stages(self.config, self.mesh.pipe)[self.stage].layers

    @property
    def first(self) -> bool:
        """Whether it has the embedding."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """Whether it has the head."""
        return self.stage == self.mesh.pipe - 1

    # ---- parts ----

    def uses(self, *, sparse: bool) -> list[Use]:
        """The parts of this stage, but for embedding and head, which the engine asks for by themselves."""
        return [use for use in self._stages(sparse)[self.stage] if use.part not in ("embed", "head")]

    def reads(self, *, sparse: bool) -> tuple[str, ...]:
        """Values that the parts are given, by their names in the schedule."""
        return ("x",) if self.first else crossing(self._stages(sparse), self.stage - 1)

    def gives(self, *, sparse: bool) -> tuple[str, ...]:
        """Values that the next stage reads, or the head."""
        stages = self._stages(sparse)
        return (stages[-1][-1].reads[0],) if self.last else crossing(stages, self.stage)

    def _stages(self, sparse: bool) -> list[list[Any]]:
        """The parts of all stages; `sparse` as far as the model is."""
        ranges = [s.layers for s in model_stages(self.config, self.mesh.pipe)]
        indexed = decoder.is_sparse(self.config, self.config.max_len)
        return parts_by_stage(decoder.schedule(self.config, sparse=sparse and indexed), ranges)

    # ---- parameters ----

    def load(self, folder: Path, dtype: torch.dtype) -> Decoder[Any]:
        """This rank's parameters, read one after another: tensors, or shards of them. What other stages have is None.

        Raises:
            CheckpointError: the checkpoint is not the model's.
        """
        checkpoint = Checkpoint.open(folder)
        specs = decoder.model_specs(self.config)
        audit(specs, checkpoint, self.config.dtype, self.config).check()
        own, member = self.own(specs), self.member
        if member is None:
            return tree.map(lambda spec: load_tree(spec, checkpoint, dtype), own)

        rules = self._rules("decode")

        def part(spec: ParamSpec, placement: Placement) -> Sharded:
            indices = [placement.own(dim, member.rank) for dim in range(len(spec.shape))]
            return Sharded(rules, load_part(spec, indices, checkpoint, dtype), placement.dims)

        return tree.map(part, own, place_tree(own, rules, dtype))

    def own(self, specs: Decoder[Any]) -> Decoder[Any]:
        """The part of a tree that is this stage's."""
        stages = model_stages(self.config, self.mesh.pipe)
        nothing = Block(**dict.fromkeys(f for f in Block.__dataclass_fields__))
        has = {
            name: getattr(specs, name) if self.stage in stages_of(name, self.config, stages) else None
            for name in ("embed", "out_res", "norm", "head", "vision")
        }
        blocks = tuple(b if i in self.layers else nothing for i, b in enumerate(specs.layers))
        return tree.replace(specs, layers=blocks, **has)

    # ---- a step ----

    def run(
        self,
        uses: Sequence[Use],
        params: Decoder[Any],
        values: Mapping[str, Tensor],
        states: Mapping[int, Any],
        batches: Mapping[int, Batch[Tensor]],
        *,
        step: bool,
    ) -> dict[str, Tensor]:
        """Some parts, see `decoder.run_uses`; of states and batches those of this stage's layers. States are written
        where they lie.
        """
        how, layers = How(step=step, last_only=False), range(len(self.config.layers))
        if self.member is None:
            own: Any = [states.get(i) for i in layers], [batches.get(i) for i in layers]
            return decoder.run_uses(uses, params, self.config, values, own[0], own[1], how)
        rules = self._rules("decode" if step else "prefill")

        def state(i: int) -> Any:
            specs = _state_specs(self.config)[i]
            return tree.map(lambda x, spec: Sharded(rules, x, [*map(rules.on, spec.axes)]), states[i], specs)

        whole = functools.partial(replicated, rules)
        own = [state(i) if i in states else None for i in layers], [tree.map(whole, batches.get(i)) for i in layers]
        given: Any = tree.map(whole, dict(values))
        shards = tree.map(lambda x: Sharded(rules, x.local, x.dims), _of_uses(uses, params))
        with self.member.at_work():
            made: Any = decoder.run_uses(uses, shards, self.config, given, own[0], own[1], how)
            return {name: in_whole(x) for name, x in made.items()}

    def encode(self, params: Decoder[Any], image: VisionInput) -> Tensor:
        """`encode_image`, `[tokens, D]`, on a stage that has the tower."""
        if self.member is None:
            return encode_image(self.config, params, image)
        rules = self._rules("vision")
        tower = tree.map(lambda x: Sharded(rules, x.local, x.dims), params.vision)
        with self.member.at_work():
            return in_whole(encode_image(self.config, tree.replace(params, vision=tower), image))

    def _rules(self, phase: str) -> Rules:
        return _rules(self.config, self.mesh.stage, phase)


def _of_uses(uses: Sequence[Use], params: Decoder[Any]) -> Decoder[Any]:
    """Parameters without those of layers that are not asked for, and of the tower."""
    asked = {use.layer for use in uses}
    nothing = Block(**dict.fromkeys(f for f in Block.__dataclass_fields__))
    blocks = tuple(b if i in asked else nothing for i, b in enumerate(params.layers))
    return tree.replace(params, layers=blocks, vision=None)


_rules = functools.lru_cache(maxsize=8)(preset)


@functools.lru_cache(maxsize=2)
def _state_specs(config: ModelConfig) -> tuple[Any, ...]:
    """Of every layer, for the axes."""
    return decoder.state_specs(config, slots=1, pages=1, page=1, dtype=config.dtype)


def in_whole(x: Any) -> Any:
    """A value that every rank has all of."""
    return x.placed([()] * x.ndim).reduced().local if isinstance(x, Sharded) else x
