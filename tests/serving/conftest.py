"""Checkpoints that are served, and the library that answers are held against."""

import functools
import importlib.util
from pathlib import Path
from typing import Any

import pytest

import kimi_graph as kg
from tests.serving.served import Library

NEEDS = {
    "vllm": "needs vLLM: pip install -e '.[serve-test]' in an environment of its own, see docs/serving.md",
    "sglang": "needs SGLang 0.5.23 in an environment of its own, see docs/serving.md",
}


@pytest.fixture(autouse=True)
def _needs_the_engine(request: pytest.FixtureRequest) -> None:
    """`pytest.mark.serving` is of vLLM, `serving("sglang")` of SGLang. Who asks for these tests has one of the two."""
    marker = request.node.get_closest_marker("serving")
    if marker is None or importlib.util.find_spec(engine := (*marker.args, "vllm")[0]):
        return
    wanted = request.config.option.markexpr
    asked = "serving" in wanted and "not serving" not in wanted
    if asked and not any(map(importlib.util.find_spec, NEEDS)):
        pytest.fail(NEEDS["vllm"])
    pytest.skip(NEEDS[engine])


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
