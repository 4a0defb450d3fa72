import os

import pytest

from kimi_graph.compile import torchair_host
from kimi_graph.compile.torchair_host import Host


@pytest.fixture(scope="session")
def host() -> Host:
    """torchair: of the wheel KIMI_GRAPH_TORCH_NPU_WHEEL names, or found as the command line finds it."""
    cache = torchair_host.default_cache(os.environ)
    return torchair_host.load(os.environ.get("KIMI_GRAPH_TORCH_NPU_WHEEL"), cache=cache)
