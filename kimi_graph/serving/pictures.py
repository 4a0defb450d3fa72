# pyright: reportMissingImports=false
"""Pictures through the engine's multimodal path, made ready and embedded as the library does.

A prompt has one placeholder a picture, which becomes one for each of its embeddings. Where the released processor says
the picture's size in the prompt (K3), the size goes before the token that opens the content.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import BatchFeature
from transformers.processing_utils import ProcessorMixin
from vllm.model_executor.models.interfaces import SupportsMultiModal
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFieldConfig
from vllm.multimodal.parse import ImageProcessorItems
from vllm.multimodal.processing import (
    BaseDummyInputsBuilder,
    BaseMultiModalProcessor,
    BaseProcessingInfo,
    PromptReplacement,
    PromptUpdateDetails,
)

from kimi_graph.config import VisionConfig
from kimi_graph.models.decoder import schedule
from kimi_graph.vision import SIDE_LIMIT, VisionInput, most_patches, prepare_image

from . import compat
from .engine import KimiGraphForCausalLM, KimiGraphHybridForCausalLM, config_of
from .hf_config import MOST_PATCHES

OPENS, PLACEHOLDER = "<|media_content|>", "<|media_pad|>"


class Processor(ProcessorMixin):
    """What the engine calls: text to ids, pictures to patches."""

    attributes = ("tokenizer",)

    def __init__(self, tokenizer: Any, vision: VisionConfig) -> None:
        self.tokenizer, self.vision = tokenizer, vision

    def __call__(self, text: Any = None, images: Any = None, return_tensors: Any = None, **kwargs: Any) -> BatchFeature:
        data: dict[str, Any] = {}
        if text is not None:
            data |= dict(self.tokenizer([text] if isinstance(text, str) else text))
        if images is not None:
            made = [prepare_image(self.vision, x) for x in (images if isinstance(images, list) else [images])]
            data["patches"] = torch.cat([x.patches for x in made])
            data["grid"] = torch.tensor([x.grid for x in made])
        return BatchFeature(data=data, tensor_type=return_tensors)


class Info(BaseProcessingInfo):
    """What the engine asks about pictures before there are any."""

    @functools.cached_property
    def vision(self) -> VisionConfig:
        found = config_of(self.ctx.model_config.model).vision
        assert found is not None
        return found

    def get_hf_processor(self, **kwargs: object) -> Processor:
        return Processor(self.get_tokenizer(), self.vision)

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": None}

    @property
    def most(self) -> int:
        """Patches that a picture may have."""
        return getattr(self.get_hf_config(), MOST_PATCHES, None) or most_patches(self.vision)

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        return {"image": tokens_of(self.vision, self.most)}


def tokens_of(c: VisionConfig, patches: int) -> int:
    """Embeddings that patches of a picture become."""
    return patches // (c.merge[0] * c.merge[1])


class Dummy(BaseDummyInputsBuilder[Info]):
    """The largest picture, for measuring memory."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        return placeholder() * mm_counts.get("image", 0)

    def get_dummy_mm_data(self, seq_len: int, mm_counts: Mapping[str, int], *args: Any, **kwargs: Any) -> Any:
        vision = self.info.vision
        side = min(SIDE_LIMIT, math.isqrt(min(vision.patch_limit, self.info.most)))
        side = side // max(vision.merge) * max(vision.merge) * vision.patch
        return {"image": self._get_dummy_images(width=side, height=side, num_images=mm_counts.get("image", 0))}


def placeholder() -> str:
    """What stands for a picture in a prompt that is still to be filled in."""
    return f"<|media_begin|>image{OPENS}{PLACEHOLDER}<|media_end|>"


class Pictures(compat.PicturesAlone, BaseMultiModalProcessor[Info]):
    """Pictures of a request as patches, and the placeholders that stand for them among the tokens."""

    def _get_mm_fields_config(self, hf_inputs: BatchFeature, hf_processor_mm_kwargs: Mapping[str, object]) -> Any:
        grid = hf_inputs.get("grid", torch.empty(0, 3, dtype=torch.int64))
        if (largest := max(grid.prod(-1).tolist(), default=0)) > self.info.most:
            raise ValueError(
                f"a picture of {largest:,} patches: the bundle takes at most {self.info.most:,}; scale it."
            )
        return {
            "patches": MultiModalFieldConfig.flat_from_sizes("image", grid.prod(-1)),
            "grid": MultiModalFieldConfig.batched("image"),
        }

    def _get_prompt_updates(
        self, mm_items: Any, hf_processor_mm_kwargs: Mapping[str, object], out_mm_kwargs: Any
    ) -> Sequence[PromptReplacement]:
        vision, tokenizer = self.info.vision, self.info.get_tokenizer()
        opens = tokenizer.encode(OPENS, add_special_tokens=False) if vision.sized_prompt else []

        def filled(item: int) -> PromptUpdateDetails:
            rows, columns = out_mm_kwargs["image"][item]["grid"].data.tolist()[1:]
            size = mm_items.get_items("image", ImageProcessorItems).get_image_size(item)
            words = f" {size.width}x{size.height}" if vision.sized_prompt else ""
            pads = [vision.placeholder] * tokens_of(vision, rows * columns)
            ids = tokenizer.encode(words, add_special_tokens=False) if words else []
            return PromptUpdateDetails.select_token_id([*ids, *opens, *pads], vision.placeholder)

        return [PromptReplacement(modality="image", target=[*opens, vision.placeholder], replacement=filled)]


@MULTIMODAL_REGISTRY.register_processor(Pictures, info=Info, dummy_inputs=Dummy)
class KimiGraphForConditionalGeneration(KimiGraphForCausalLM, SupportsMultiModal):
    """Attention layers alone, and a vision tower."""

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        return placeholder() if modality == "image" else None

    def get_language_model(self) -> Any:
        return self

    def embed_multimodal(self, **kwargs: Any) -> list[Tensor]:
        """Embeddings of each picture, `[tokens, D]`."""
        if kwargs.get("patches") is None:
            return []
        grids = kwargs["grid"].reshape(-1, 3).tolist()
        patches = kwargs["patches"]
        flat = patches if isinstance(patches, Tensor) else torch.cat([x.flatten(0, -2) for x in patches])
        parts = flat.flatten(0, -2).split([f * r * c for f, r, c in grids])
        return [self._embed(part, grid) for part, grid in zip(parts, grids, strict=True)]

    def _embed(self, patches: Tensor, grid: list[int]) -> Tensor:
        frames, rows, columns = grid
        assert self.config.vision is not None
        if self.bundle is not None:
            return self.bundle.embed(patches, (frames, rows, columns)).to(patches.device, self.dtype)
        tokens = tokens_of(self.config.vision, rows * columns)
        if self.params.vision is None:  # another stage has the tower; the engine asks all of them as it measures memory
            return patches.new_zeros(tokens, self.config.embed, dtype=self.dtype)
        image = VisionInput(patches=patches, grid=(frames, rows, columns), size=(0, 0), tokens=tokens)
        return self.place.encode(self.params, image).to(self.dtype)

    def embed_input_ids(
        self,
        input_ids: Tensor,
        multimodal_embeddings: Any = None,
        *,
        is_multimodal: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """`[N]` -> `[N, D]`; embeddings take the places that `is_multimodal` marks."""
        if self.bundle is not None:
            return self.bundle.marked(len(input_ids), multimodal_embeddings or (), is_multimodal).to(input_ids.device)
        if multimodal_embeddings is None or not len(multimodal_embeddings):
            return super().embed_input_ids(input_ids)
        assert is_multimodal is not None
        marked = is_multimodal.to(input_ids.device).long()
        values = torch.cat([x.flatten(0, -2) for x in multimodal_embeddings]).to(self.dtype)
        given = {"tokens": input_ids[None], "vision.rows": (marked.cumsum(0) * marked)[None], "vision.values": values}
        return self._outside(schedule(self.config, vision=True)[0], given)


@MULTIMODAL_REGISTRY.register_processor(Pictures, info=Info, dummy_inputs=Dummy)
class KimiGraphHybridForConditionalGeneration(KimiGraphForConditionalGeneration, KimiGraphHybridForCausalLM):
    """KDA layers, and a vision tower."""
