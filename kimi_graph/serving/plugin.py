# pyright: reportMissingImports=false
"""The entry point of vLLM's plugins: makes the engine run the family's released config.json files by this library.

The engine calls `register` in every process, before it reads a config. `VLLM_PLUGINS` names the plugins it may load;
without `kimi_graph` among them it has its own classes again.
"""


def register() -> None:
    """Take the family's model types over. Imports no model: the engine does, when it needs one."""
    from vllm import ModelRegistry

    from kimi_graph.families import FAMILIES

    from . import compat, media  # noqa: F401 (registers a loader of pictures)
    from .hf_config import ARCHITECTURES, MODEL_TYPE, EngineConfig

    compat.model_types(EngineConfig, (*FAMILIES, MODEL_TYPE))
    for (_, vision), name in ARCHITECTURES.items():
        module = "pictures" if vision else "engine"
        ModelRegistry.register_model(name, f"{__package__}.{module}:{name}")
