"""Pictures through the vision tower of a whole model."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kimi_graph import tree
from kimi_graph.config import ModelConfig, VisionConfig, check_config
from kimi_graph.errors import ConfigError
from kimi_graph.layers import Vision, VisionTables, arrange_patches, vision_forward, vision_tables
from kimi_graph.layers.vision import vision_block, vision_embed, vision_project
from kimi_graph.vision import Source, VisionInput, prepare_image

from .decoder import Decoder, Use


def vision_schedule(c: VisionConfig) -> tuple[Use, ...]:
    """The tower's parts in order, for a graph: pixels of patches in, `vision.values` out."""
    embed = Use(part="vision_embed", prefix="vision", reads=("vision.patches",), writes=("v0",))
    blocks = [
        Use(part="vision_block", prefix=f"vision.blocks.{i}", reads=(f"v{i}",), writes=(f"v{i + 1}",))
        for i in range(c.layers)
    ]
    last = Use(part="vision_project", prefix="vision", reads=(f"v{c.layers}",), writes=("vision.values",))
    return (embed, *blocks, last)


def vision_part_params(use: Use, p: Vision[Any]) -> Any:
    """The parameters of a part, as a tree whose names follow the part's prefix in the model's names."""
    if use.part == "vision_block":
        return p.blocks[int(use.prefix.rpartition(".")[2])]
    keep = ("patch", "grid") if use.part == "vision_embed" else ("norm", "projector")
    return {name: getattr(p, name) for name in keep}


def run_vision_part(use: Use, c: VisionConfig, p: Any, x: Tensor, tables: VisionTables[Tensor]) -> Tensor:
    """One part of the tower, for a single frame: `[N, P]` or `[N, D]` -> `[N, D]`, or `[M, E]` of the last part."""
    if use.part == "vision_block":
        return vision_block(p, c, x, tables)
    nothing = dict.fromkeys(f.name for f in dataclasses.fields(Vision))
    whole: Any = Vision(**{**nothing, **p})
    return vision_embed(whole, x, tables) if use.part == "vision_embed" else vision_project(whole, c, x, 1)


def encode_image(
    config: ModelConfig,
    params: Decoder[Tensor],
    image: VisionInput | Source | Sequence[Source],
    room: int | None = None,
) -> Tensor:
    """Embeddings of a picture, one for each of its placeholders: `[tokens, D]`, to give to `prefill`.

    Args:
        image: what `vision.prepare_image` takes, or gives.
        room: patches to pad the picture to; the embeddings do not depend on it.

    Raises:
        ConfigError: a model without vision, or a picture that cannot be read or does not fit.
    """
    check_config(config, "encode_image")
    if config.vision is None or params.vision is None:
        raise ConfigError(f"encode_image: {config.name} has no vision tower.")
    given: Any = image if isinstance(image, VisionInput) else prepare_image(config.vision, image)
    weight = params.vision.patch.weight
    patches = arrange_patches(config.vision, given.patches.to(weight.device, weight.dtype), given.grid, room)
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    tables = tree.map(lambda x: x.to(weight.device), vision_tables(config.vision, given.grid, room, dtype))
    return vision_forward(params.vision, config.vision, patches, tables)[: given.tokens]
