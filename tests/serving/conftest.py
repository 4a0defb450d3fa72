"""Checkpoints that are served, and the library that answers are held against."""

import functools
import importlib.util
from pathlib import Path
from typing import Any

import pytest

import kimi_graph as kg
from tests.serving.served import Library


@pytest.fixture(autouse=True)
def _needs_the_engine(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("serving") is None or importlib.util.find_spec("vllm"):
        return
    words = "needs vLLM: pip install -e '.[serve-test]' in an environment of its own, see docs/serving.md"
    wanted = request.config.option.markexpr
    if "serving" in wanted and "not serving" not in wanted:
        pytest.fail(words)
    pytest.skip(words)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A fixture checkpoint of a preset, made once."""
    from kimi_graph.fixture import make_fixture

    @functools.cache
    def made(preset: str) -> Path:
        return make_fixture(kg.load_config(preset), tmp_path_factory.mktemp("served") / preset, ways=2).folder

    return made


@pytest.fixture(scope="session")
def library(folder: Any) -> Any:
    return functools.cache(lambda preset: Library(folder(preset)))
