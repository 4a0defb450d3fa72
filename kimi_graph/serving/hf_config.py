# pyright: reportMissingImports=false
"""A released config.json as the engine needs to know it: sizes that it allocates by, and which class runs the model.

The engine's own classes for these models are bypassed, and names that switch parts of it (`kv_lora_rank`, `index_topk`,
a `model_type` of its lists) are not given. What the model means is read by the library, from the same file.
"""

from typing import Any

from transformers import PretrainedConfig

from kimi_graph.config import KdaConfig, MlaConfig, ModelConfig
from kimi_graph.read_config import parse_config

from .views import row_parts

MODEL_TYPE = "kimi_graph"
MOST_PATCHES = "most_patches"  # attribute of a config: that a picture may have, where a bundle sets it
ARCHITECTURES = {  # by whether the model has KDA layers, and vision
    (False, False): "KimiGraphForCausalLM",
    (True, False): "KimiGraphHybridForCausalLM",
    (False, True): "KimiGraphForConditionalGeneration",
    (True, True): "KimiGraphHybridForConditionalGeneration",
}


class EngineConfig(PretrainedConfig):
    """What the engine asks a config for. `media_token`: id that stands for a picture's embeddings, or None."""

    model_type = MODEL_TYPE

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Of a released file.

        Raises:
            ConfigError: the library does not know the model, each fault with its key.
        """
        unused = kwargs.pop("return_unused_kwargs", False)
        own = config_dict.get("model_type") == MODEL_TYPE  # one that was made here before
        facts = (
            config_dict if own else cls.facts(parse_config(_released(config_dict), origin="config.json", name="model"))
        )
        made = cls(**{**facts, **{k: v for k, v in kwargs.items() if k in ("name_or_path",)}})
        made.__dict__["model_type"] = MODEL_TYPE  # the class has that of the file which was registered last
        return (made, kwargs) if unused else made

    @classmethod
    def facts(cls, c: ModelConfig) -> dict[str, Any]:
        """Attributes of this config."""
        return engine_facts(c)

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "model_type": MODEL_TYPE}


def _released(config_dict: dict[str, Any]) -> dict[str, Any]:
    """The file as it is: transformers and the engine add keys of their own as they read it."""
    return {k: v for k, v in config_dict.items() if not k.startswith("_")}


def engine_facts(c: ModelConfig) -> dict[str, Any]:
    """Attributes of vLLM's config; SGLang's are made of them."""
    return {
        "architectures": [ARCHITECTURES[is_hybrid(c), c.vision is not None]],
        "vocab_size": c.vocab,
        "hidden_size": c.embed,
        "num_hidden_layers": len(c.layers),
        "num_attention_heads": min(layer.mixer.heads for layer in c.layers),
        "num_key_value_heads": 1,
        "head_dim": cached_row(c) // 2,  # keys and values of one head: the bytes of a token's row
        "max_position_embeddings": c.max_len,
        "tie_word_embeddings": c.tied,
        "dtype": str(c.dtype).removeprefix("torch."),
        "bos_token_id": c.bos,
        "eos_token_id": list(c.eos),
        "pad_token_id": c.pad,
        "media_token": None if c.vision is None else c.vision.placeholder,
    }


def is_hybrid(c: ModelConfig) -> bool:
    """Whether some layers have a memory of fixed size."""
    return any(isinstance(layer.mixer, KdaConfig) for layer in c.layers)


def cached_row(c: ModelConfig) -> int:
    """Numbers that a page has room for, of each token: latent, rope channels, index key. One width for all layers."""
    rows = [row_parts(layer.mixer) for layer in c.layers if isinstance(layer.mixer, MlaConfig)]
    return max(map(sum, rows))
