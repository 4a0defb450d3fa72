"""Kimi Linear as pure functions on trees of tensors, and as static Ascend graphs.

    import kimi_graph as kg

    config = kg.load_config("kimi-linear-48b")  # preset, config.json or folder
    params = kg.load_params("checkpoint/", config)
    state = kg.init_state(config, batch=1, max_len=256)
    logits, state = kg.prefill(config, params, tokens, state)

Names are imported when they are first used, so that `import kimi_graph` takes no time and the command line answers
before torch is there.
"""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._links import check_links

check_links(Path(__file__).parent)

__version__ = "0.1.0"

if TYPE_CHECKING:
    from . import compile, errors, layers, models, ops, parallel, tree  # noqa: A004
    from .checkpoint import load_params
    from .compile.make import make_bundle
    from .compile.opened import open_bundle
    from .fixture import make_fixture
    from .layers import gpu_kernels
    from .models import (
        count_parameters,
        decode,
        encode_image,
        init_params,
        init_state,
        model_specs,
        parameter_counts,
        prefill,
    )
    from .parallel import Mesh
    from .read_config import load_config, presets
    from .sampling import generate
    from .shard import shard_plan
    from .vision import prepare_image

# Where each public name lives; the same as the block above, which type checkers and editors read.
_FOLDERS = ("compile", "errors", "layers", "models", "ops", "parallel", "tree")
_HOMES = {
    "Mesh": "parallel",
    "count_parameters": "models",
    "decode": "models",
    "encode_image": "models",
    "generate": "sampling",
    "gpu_kernels": "layers",
    "init_params": "models",
    "init_state": "models",
    "load_config": "read_config",
    "load_params": "checkpoint",
    "make_bundle": "compile.make",
    "make_fixture": "fixture",
    "model_specs": "models",
    "open_bundle": "compile.opened",
    "parameter_counts": "models",
    "prefill": "models",
    "prepare_image": "vision",
    "presets": "read_config",
    "shard_plan": "shard",
}

__all__ = [
    "Mesh",
    "__version__",
    "compile",
    "count_parameters",
    "decode",
    "encode_image",
    "errors",
    "generate",
    "gpu_kernels",
    "init_params",
    "init_state",
    "layers",
    "load_config",
    "load_params",
    "make_bundle",
    "make_fixture",
    "model_specs",
    "models",
    "open_bundle",
    "ops",
    "parallel",
    "parameter_counts",
    "prefill",
    "prepare_image",
    "presets",
    "shard_plan",
    "tree",
]


def __getattr__(name: str) -> Any:
    if name in _FOLDERS:
        return importlib.import_module(f".{name}", __name__)
    if name in _HOMES:
        value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
