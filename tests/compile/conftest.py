import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kimi_graph.compile import torchair_host
from kimi_graph.compile.driver import compile_model
from kimi_graph.compile.targets import CANN_DEFAULT, PROVIDERS_DEFAULT, target
from kimi_graph.compile.torchair_host import Host
from kimi_graph.fixture import make_fixture
from kimi_graph.read_config import load_config

Compile = Callable[..., Path]


@pytest.fixture(scope="session")
def host() -> Host:
    """torchair: of the wheel KIMI_GRAPH_TORCH_NPU_WHEEL names, or found as the command line finds it."""
    cache = torchair_host.default_cache(os.environ)
    return torchair_host.load(os.environ.get("KIMI_GRAPH_TORCH_NPU_WHEEL"), cache=cache)


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fixture checkpoint of three layers: KDA and dense, KDA and MoE, MLA and MoE. Read only."""
    folder = tmp_path_factory.mktemp("checkpoints") / "small"
    return make_fixture(load_config("kimi-linear-48b"), folder, layers=3).folder


@pytest.fixture(scope="session")
def compile_small(small: Path, host: Host) -> Compile:
    """`compile_small(out, **options)` compiles it for A3: 2 rows, chunks of 16, 64 tokens in pages of 16.

    `target`, `cann` and `providers` are those of `targets.target`, other options compile's.
    """

    def run(out: Path | None, **options: Any) -> Any:
        sizes = {"batch": 2, "chunk": 16, "max_len": 64, "page": 16}
        given: dict[str, Any] = {"cann": CANN_DEFAULT, "providers": PROVIDERS_DEFAULT, "avoid": ()}
        given |= {name: options.pop(name) for name in given.keys() & options.keys()}
        profile = target(options.pop("target", "a3"), **given)
        model = options.pop("model", small)
        return compile_model(load_config(model), target=profile, out=out, **{"checkpoint": small, **sizes, **options})

    return run


@pytest.fixture(scope="session")
def family_bundle(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`family_bundle(name, chip)`: the bundle of a preset's fixture for a chip, made when first asked for. Read only.

    2 rows, chunks of 16, 96 tokens in pages of 16: more than the fixtures' top-k of 64, so that keys are selected.
    Other options are compile's; with a `weights_format` the fixture is quantised as its model is released, with `ways`
    its heads and channels divide over so many ranks.
    """

    @functools.cache
    def checkpoint(name: str, quantised: bool, ways: int) -> Path:
        folder = tmp_path_factory.mktemp("family") / name
        return make_fixture(load_config(name), folder, quantised=quantised, ways=ways).folder

    @functools.cache
    def made(
        name: str,
        chip: str = "a3",
        ways: int = 1,
        providers: tuple[str, ...] = PROVIDERS_DEFAULT,
        **options: Any,
    ) -> Path:
        folder = tmp_path_factory.mktemp("bundles") / name
        quantised = "weights_format" in options and load_config(name).quant is not None
        source = checkpoint(name, quantised, ways)
        config = load_config(source)
        sizes = {
            "batch": 2,
            "chunk": 16,
            "max_len": 96,
            "page": 16,
            "patches": 16 if config.vision else None,
            **options,
        }
        profile = target(chip, providers=providers)
        compile_model(config, target=profile, out=folder, checkpoint=source, **sizes)
        return folder

    return made


@pytest.fixture(scope="session")
def bundle(compile_small: Compile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of it. Read only: copy it before you change anything."""
    folder = tmp_path_factory.mktemp("bundles") / "small"
    compile_small(folder)
    return folder
