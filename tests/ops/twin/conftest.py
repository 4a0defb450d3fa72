"""What tests of kernels share: a C++ compiler, and a folder for what it builds."""

import pytest

from kimi_graph.ops.twin import compiler


@pytest.fixture(scope="session")
def twin_cache(request):
    """Libraries by content, kept between runs."""
    if compiler() is None:
        pytest.skip("needs a C++ compiler: g++ or clang++")
    return request.config.cache.mkdir("twin")
