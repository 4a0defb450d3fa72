"""Pictures through the vision tower of a whole model."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kimi_graph import tree
from kimi_graph.config import ModelConfig
from kimi_graph.errors import ConfigError
from kimi_graph.layers import arrange_patches, vision_forward, vision_tables
from kimi_graph.vision import Source, VisionInput, prepare_image

from .decoder import Decoder


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
    if config.vision is None or params.vision is None:
        raise ConfigError(f"encode_image: {config.name} has no vision tower.")
    given: Any = image if isinstance(image, VisionInput) else prepare_image(config.vision, image)
    weight = params.vision.patch.weight
    patches = arrange_patches(config.vision, given.patches.to(weight), given.grid, room)
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    tables = tree.map(lambda x: x.to(weight.device), vision_tables(config.vision, given.grid, room, dtype))
    return vision_forward(params.vision, config.vision, patches, tables)[: given.tokens]
