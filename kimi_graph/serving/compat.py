# pyright: reportMissingImports=false
"""What differs between the releases of vLLM that the adapter runs on. Everything else of them is imported plainly.

0.32: run on its CPU build. 0.27.1: what vllm-ascend is made for.
"""

from typing import Any

from torch import Tensor
from vllm.forward_context import get_forward_context


def step_metadata() -> dict[str, Any] | None:
    """What the engine says of a step, by the name of a cache; None in a run that only measures memory."""
    found = get_forward_context().attn_metadata
    return found[0] if isinstance(found, list) else found


def pages_of(cache: Tensor) -> Tensor:
    """A paged cache as `[pages, page, width]`: 0.32 gives it with a dimension of its one head, 0.27 as it was asked."""
    if cache.ndim == 4:
        (head,) = (d for d in (1, 2) if cache.shape[d] == 1)
        return cache.squeeze(head)
    assert cache.ndim == 3, cache.shape
    return cache


class PicturesAlone:
    """A multimodal processor's step of 0.27: pictures without a text go to the parts of a processor that transformers
    names, of which ours has none. The processor itself takes them, as it is asked to in 0.32.
    """

    info: Any
    _get_hf_mm_data: Any

    def _apply_hf_processor_mm_only(self, mm_items: Any, hf_processor_mm_kwargs: Any, tokenization_kwargs: Any) -> Any:
        given = {kind for kind, count in mm_items.get_all_counts().items() if count}
        data, passed = self._get_hf_mm_data(mm_items.select(given))
        made = self.info.ctx.call_hf_processor(self.info.get_hf_processor(), data, dict(hf_processor_mm_kwargs))
        made.update(passed)
        return made


def model_types(registered: type, names: tuple[str, ...]) -> None:
    """Make a config class that of some `model_type`s, before those that the engine or transformers have for them."""
    from transformers import AutoConfig
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    for name in names:
        registered.model_type = name  # transformers compares the two
        AutoConfig.register(name, registered, exist_ok=True)
        _CONFIG_REGISTRY[name] = registered


def when_configured(hook: type, architectures: tuple[str, ...]) -> None:
    """Have a class of hooks called when the engine makes the config of a model of some architectures."""
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    MODELS_CONFIG_MAP.update(dict.fromkeys(architectures, hook))


def tokenizer_mode(mode: str, made_by: type) -> None:
    """Make a class that of a `--tokenizer-mode`, whose chats are written by the template that it has."""
    from vllm.renderers.registry import RENDERER_REGISTRY
    from vllm.tokenizers.registry import TokenizerRegistry

    if mode not in TokenizerRegistry.tokenizers:  # registering twice is a warning
        TokenizerRegistry.register(mode, made_by.__module__, made_by.__name__)
        RENDERER_REGISTRY.register(mode, "vllm.renderers.hf", "HfRenderer")
