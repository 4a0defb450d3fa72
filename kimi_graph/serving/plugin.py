# pyright: reportMissingImports=false
"""The entry point of vLLM's plugins: makes the engine run the family's released config.json files by this library.

The engine calls `register` in every process, before it reads a config. `VLLM_PLUGINS` names the plugins it may load;
without `kimi_graph` among them it has its own classes again.
"""

from typing import Any


def register() -> None:
    """Take the family's model types over. Imports no model: the engine does, when it needs one."""
    from vllm import ModelRegistry

    from kimi_graph.families import FAMILIES

    from . import compat, media  # noqa: F401 (registers a loader of pictures)
    from .hf_config import ARCHITECTURES, MODEL_TYPE, EngineConfig
    from .tokens import MODE, ReleasedTokenizer

    compat.model_types(EngineConfig, (*FAMILIES, MODEL_TYPE))
    for (_, vision), name in ARCHITECTURES.items():
        module = "pictures" if vision else "engine"
        ModelRegistry.register_model(name, f"{__package__}.{module}:{name}")
    compat.tokenizer_mode(MODE, ReleasedTokenizer)
    compat.when_configured(BundleHook, tuple(ARCHITECTURES.values()))


class BundleHook:
    """What vLLM calls as it makes its config, in the process that starts the others."""

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Refuse a bundle that does not fit; have requests refused that its graphs cannot answer."""
        from . import compat
        from .bundle_settings import graphs_of
        from .hf_config import MOST_PATCHES

        if (graphs := graphs_of(vllm_config)) is not None:
            model = vllm_config.model_config
            compat.size_pages_by(graphs.row, model)
            setattr(model.hf_config, MOST_PATCHES, graphs.patches)
            model.logits_processors = [*(model.logits_processors or ()), f"{__package__}.bundle_caches:LastTokenAlone"]

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        """Nothing: the bundle is not known yet."""
