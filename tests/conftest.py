"""What every test has: one seed, no network for model hubs, few threads."""

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of commands that tests start too: threads would only wait

import hypothesis
import pytest
import torch

# Sizes are small: time is spent per call, and an example that was slow once is no failure.
hypothesis.settings.register_profile("kimi-graph", deadline=None, derandomize=bool(os.environ.get("CI")))
hypothesis.settings.load_profile("kimi-graph")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def nobody(tmp_path: Path) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """`with nobody():` somebody who may write where everybody may, as root may everywhere; what is needed is imported.

    `tmp_path` and what it lies in can be reached then.
    """
    for folder in (tmp_path, *tmp_path.parents):
        if Path(tempfile.gettempdir()) in folder.parents:
            folder.chmod(0o755)

    @contextlib.contextmanager
    def somebody() -> Iterator[None]:
        if os.geteuid() != 0:
            yield
            return
        os.seteuid(65534)
        try:
            yield
        finally:
            os.seteuid(0)

    return somebody


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fixture checkpoint of Kimi Linear: five layers, every kind among them. Read only."""
    from kimi_graph.fixture import make_fixture
    from kimi_graph.read_config import load_config

    return make_fixture(load_config("kimi-linear-48b"), tmp_path_factory.mktemp("checkpoints") / "tiny").folder


@pytest.fixture(scope="session")
def twin_cache(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where kernels are built for the CPU; libraries are found again by content, in later runs too."""
    from kimi_graph.ops.twin import compiler

    if compiler() is None:
        pytest.skip("needs a C++ compiler: g++ or clang++")
    kept = getattr(request.config, "cache", None)
    return kept.mkdir("twin") if kept else tmp_path_factory.mktemp("twin")
