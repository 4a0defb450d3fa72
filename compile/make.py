"""`kg.make_bundle`: `kimi-graph compile` for programs and notebooks."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kimi_graph.config import ModelConfig
from kimi_graph.parallel import Mesh
from kimi_graph.read_config import load_config, presets

from .driver import compile_model
from .opened import OpenBundle, open_bundle
from .targets import CANN_DEFAULT, PROVIDERS_DEFAULT, target
from .torchair_host import default_cache


def make_bundle(
    model: str | Path | ModelConfig,
    out: str | Path,
    on: str = "a3",
    *,
    mesh: Mesh | str | None = None,
    cann: str = CANN_DEFAULT,
    providers: str | Sequence[str] = PROVIDERS_DEFAULT,
    environ: Mapping[str, str] = os.environ,
    **options: Any,
) -> OpenBundle:
    """Compile a model into a bundle, and open it. No NPU, no CANN and no weights are needed.

    The first compile on a machine fetches the torch-npu wheel (44 MB, announced) for torchair, which is kept in a
    cache. What earlier compiles made is kept there too and used again.

    Args:
        model: a preset's name, a config.json, a checkpoint folder (which `OpenBundle.verify` then finds), or a config.
        out: the bundle's folder; an older bundle there is replaced.
        on: the target, such as "a3" or "950dt".
        cann: the release that reads the graphs.
        providers: whose operators, as a sequence or with commas; `phases` may be given so too.
        mesh: of ranks that run it together, or its text, `pp=2,tp=2`; None: one rank.
        environ: where KIMI_GRAPH_CACHE and KIMI_GRAPH_TORCH_NPU_WHEEL are looked up, as on the command line.
        options: `batch`, `chunk`, `max_len`, `page`, `pages`, `phases`, `weights_format` and all others of
            `kimi_graph.compile.driver.compile_model`.

    Raises:
        KimiGraphError: a request that cannot be met; nothing is written.
    """
    config = model if isinstance(model, ModelConfig) else load_config(model)
    folder = None if isinstance(model, ModelConfig) or str(model) in presets() else Path(model)
    wheel, cache = (environ.get(f"KIMI_GRAPH_{name}") for name in ("TORCH_NPU_WHEEL", "CACHE"))
    given: dict[str, Any] = {
        "checkpoint": folder if folder is not None and folder.is_dir() else None,
        "mesh": Mesh.parse(mesh) if isinstance(mesh, str) else mesh,
        "torch_npu_wheel": Path(wheel) if wheel else None,
        "cache_dir": Path(cache) if cache else default_cache(environ),
        "keep": True,
    }
    if "phases" in options:
        options["phases"] = _words(options["phases"])
    profile = target(on, cann=cann, providers=_words(providers))
    compile_model(config, target=profile, out=Path(out), **{**given, **options})
    return open_bundle(out)


def _words(given: str | Sequence[str]) -> tuple[str, ...]:
    """Names, as a sequence or as the command line has them: `prefill,decode`."""
    return tuple(word.strip() for word in given.split(",")) if isinstance(given, str) else tuple(given)
