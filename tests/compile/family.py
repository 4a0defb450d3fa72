"""The models whose parts the tests of the compiler go through: every preset, made small."""

import functools

from kimi_graph.config import ModelConfig
from kimi_graph.fixture import small_config
from kimi_graph.read_config import load_config, parse_config

FAMILY = ("kimi-linear-48b", "kimi-k3", "kimi-k3.1-pro", "kimi-k2.5", "deepseek-v3.2", "glm-5", "glm-5.2")
SPARSE = ("kimi-k3.1-pro", "deepseek-v3.2", "glm-5", "glm-5.2")  # select keys in caches longer than their top-k


@functools.cache
def small_model(name: str) -> ModelConfig:
    """The config of a preset's fixture."""
    return parse_config(small_config(load_config(name)), origin=f"fixture of {name}", name=name)
