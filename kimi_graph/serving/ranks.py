"""One rank of the engine: which layers it has, and how it runs them. Layers come from the library's pipeline split."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kimi_graph import tree
from kimi_graph.checkpoint import Checkpoint, audit, load_tree
from kimi_graph.config import ModelConfig
from kimi_graph.layers import Batch
from kimi_graph.models import decoder
from kimi_graph.models.decoder import Block, Decoder, How, Use
from kimi_graph.models.pipeline import model_stages, stages_of
from kimi_graph.parallel import Mesh
from kimi_graph.parallel.stages import crossing, parts_by_stage


@dataclass(frozen=True)
class Place:
    """Where a rank stands.

    Attributes:
        config: of the model.
        mesh: of all ranks of the engine.
        stage: pipeline stage.
        rank: within the stage.
    """

    config: ModelConfig
    mesh: Mesh
    stage: int = 0
    rank: int = 0

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
        """This rank's parameters, read one after another. What other stages have is None.

        Raises:
            CheckpointError: the checkpoint is not the model's.
        """
        checkpoint = Checkpoint.open(folder)
        specs = decoder.model_specs(self.config)
        audit(specs, checkpoint, self.config.dtype, self.config).check()
        return tree.map(lambda spec: load_tree(spec, checkpoint, dtype), self.own(specs))

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
        every = [states.get(i) for i in layers], [batches.get(i) for i in layers]
        return decoder.run_uses(uses, params, self.config, values, every[0], every[1], how)  # type: ignore[arg-type]
