"""A model's pipeline stages: layers split by the bytes of their parameters, edges as specs."""

import functools

import torch

from kimi_graph import tree
from kimi_graph.config import MlaConfig, ModelConfig
from kimi_graph.parallel.stages import Stage, make_stages
from kimi_graph.spec import ParamSpec, weight

from .decoder import model_specs, schedule


def value_spec(c: ModelConfig, name: str, rows: int, tokens: int) -> ParamSpec:
    """What a value of the schedule between parts is: hidden states, or the selection that layers share."""
    if name != "selected":
        return weight((rows, tokens, c.embed), "batch sequence embed", source="")
    top_k = next(m.indexer.top_k for m in (x.mixer for x in c.layers) if isinstance(m, MlaConfig) and m.indexer)
    return weight((rows, tokens, top_k), "batch sequence _", source="", dtype=torch.int32)


@functools.lru_cache(maxsize=8)
def parameter_bytes(c: ModelConfig) -> tuple[list[int], tuple[int, int]]:
    """Bytes of every layer's parameters, and of what comes before the layers and after."""
    specs = model_specs(c)

    def size(*parts: object) -> int:
        found = [s for part in parts if part is not None for s in tree.leaves(part)]
        return sum(s.numel * (s.dtype or c.dtype).itemsize for s in found)

    head = specs.embed if specs.head is None else specs.head
    return [size(layer) for layer in specs.layers], (size(specs.embed, specs.vision), size(specs.out_res, head))


def model_stages(c: ModelConfig, stages: int, *, rows: int = 1, tokens: int = 1, sparse: bool = False) -> list[Stage]:
    """The stages of a text model, the same in every phase; the vision tower is in the first.

    They are split by the bytes of their parameters: what a rank has to hold, and most of what a decode step reads.

    Args:
        rows, tokens: of a step, of all ranks together; they size the edges.
        sparse: see `decoder.is_sparse`.

    Raises:
        ShardingError: more stages than layers.
    """
    costs, ends = parameter_bytes(c)
    uses = schedule(c, sparse=sparse)
    return make_stages(uses, costs, stages, lambda name: value_spec(c, name, rows, tokens), c.dtype, ends=ends)


def stages_of(path: str, c: ModelConfig, stages: list[Stage]) -> tuple[int, ...]:
    """The stages that hold a parameter or a state (`s.layers.3...`); a tied embedding is in the first and the last."""
    words = path.removeprefix("s.").split(".")
    if words[0] == "layers":
        return next((s.index,) for s in stages if int(words[1]) in s.layers)
    if words[0] == "embed":
        return tuple(dict.fromkeys((0, stages[-1].index))) if c.tied else (0,)
    return (0,) if words[0] == "vision" else (stages[-1].index,)
