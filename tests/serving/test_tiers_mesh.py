"""Pages of several ranks come back to the ranks that they are of, from shared memory and from files."""

import pytest

from tests.serving.test_mesh import PIPE, TENSOR
from tests.serving.test_tiers import BLOCK, asked, restarted, shared_memory, tiered

pytestmark = [pytest.mark.serving, pytest.mark.filterwarnings("default")]

LINEAR = "kimi-linear-48b"
MESHES = {"tensor": TENSOR, "pipe": PIPE}
CASES = [(LINEAR, "tensor"), (LINEAR, "pipe"), ("deepseek-v3.2", "tensor"), ("deepseek-v3.2", "pipe")]


@pytest.mark.parametrize(("preset", "mesh"), CASES)
def test_pages_of_two_ranks_come_back_from_shared_memory_and_to_a_later_server_from_files(
    folder, library, tmp_path, preset, mesh
):
    """The later server is another process, after the first has ended; one of another mesh finds nothing."""
    lib, tiers = library(preset), f"host=64MB,file={tmp_path / 'pages'}"
    options = MESHES[mesh]
    prompts = lib.prompts(400, 300, 150, seed=21)
    found = [3 * BLOCK, 2 * BLOCK, BLOCK]
    with tiered(folder(preset), tiers, **options) as llm:
        assert asked(lib, llm, prompts) == [0, 0, 0]
        assert llm.reset_prefix_cache()
        assert asked(lib, llm, prompts) == found
        assert len(shared_memory(llm)) == 1
    assert not shared_memory(llm)
    again, read = restarted(lib, tiers, prompts, **options)
    assert again == found
    assert len(set(read)) >= sum(found) // BLOCK
    others = {"tensor": [{}, PIPE], "pipe": [{}, TENSOR]}[mesh] if preset == LINEAR else []
    for other in others:
        assert restarted(lib, tiers, prompts, **other) == ([0, 0, 0], [])
