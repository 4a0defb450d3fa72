"""How many parameters a model has, and where, from its specs alone."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from kimi_graph import tree
from kimi_graph.config import ModelConfig, MoeConfig

from .decoder import model_specs

PARTS = (  # in reading order
    "embed", "kda", "mla", "indexer", "dense", "router", "latent", "experts", "shared experts", "residuals", "norms",
    "head", "vision", "projector",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Numbers of parameters.

    Attributes:
        text: of the text model.
        embedding: of its token table.
        active: what a token goes through in the text model: `top_k` of each layer's experts, the token table included.
        vision, projector: of the vision tower, and of what leads from it to the text model.
        parts: of the text model by kind: "embed", "head", "norms", "residuals", "kda", "mla", "indexer", "dense",
            "router", "experts", "shared experts" and "latent" (projections and norm around the experts), over all
            layers.
    """

    text: int
    embedding: int
    active: int
    vision: int
    projector: int
    parts: Mapping[str, int]


def parameter_counts(c: ModelConfig) -> Counts:
    """Numbers of parameters, from the specs alone: all, active for a token, and by part; without draft layers."""
    parts: Counter[str] = Counter()
    idle = vision = projector = 0
    for path, spec in tree.items(model_specs(c)):
        words = path.split(".")
        if words[0] == "vision":
            if words[1] == "projector":
                projector += spec.numel
            else:
                vision += spec.numel
            continue
        part = _part(words)
        parts[part] += spec.numel
        if part == "experts":
            ffn = c.layers[int(words[1])].ffn
            assert isinstance(ffn, MoeConfig)
            idle += spec.numel // ffn.experts * (ffn.experts - ffn.top_k)
    text = sum(parts.values())
    return Counts(
        text=text,
        embedding=parts["embed"],
        active=text - idle,
        vision=vision,
        projector=projector,
        parts=dict(parts),
    )


def part_of(path: str) -> str:
    """Kind of a parameter as in `Counts.parts`, or "vision" or "projector"."""
    words = path.split(".")
    if words[0] == "vision":
        return "projector" if words[1] == "projector" else "vision"
    return _part(words)


def _part(words: list[str]) -> str:
    """Kind of a parameter, by its path in the tree of specs."""
    if words[0] in ("embed", "head"):
        return words[0]
    name = words[2] if words[0] == "layers" else words[0]
    if name.endswith("_res"):
        return "residuals"
    if name.endswith("norm"):
        return "norms"
    if name == "mla" and words[3] == "indexer":
        return "indexer"
    if name != "moe":
        return name
    kinds = {"router": "router", "bias": "router", "shared": "shared experts", "gate_up": "experts", "down": "experts"}
    return kinds.get(words[3], "latent")
