"""Nothing is read of the engine's caches before it is written: they are full of NaN, which would show in tokens."""

import pytest

from tests.serving import ascend_runner
from tests.serving.poisoned import Poison
from tests.serving.served import counted, engine
from tests.serving.test_tokens import BLOCK, rounds

pytestmark = [pytest.mark.serving, pytest.mark.filterwarnings("default")]


@pytest.mark.parametrize("layout", ["vllm", "ascend"])
@pytest.mark.parametrize(
    "preset, blocks", [("kimi-linear-48b", 28), ("kimi-k3.1-pro", 28), ("kimi-k2.5", 9), ("deepseek-v3.2", 9)]
)
def test_caches_of_nan_change_no_token(folder, library, monkeypatch, preset, blocks, layout):
    """With and without KDA, dense and sparse; in parts, about a page's end, cold, found again, and preempted, so that
    sequences start in pages and slots that others have used."""
    if layout == "ascend":
        ascend_runner.install(monkeypatch)
    poison, lib = Poison(monkeypatch), library(preset)
    with engine(folder(preset), num_gpu_blocks_override=blocks, max_num_batched_tokens=161) as llm:
        found = rounds(lib, llm, lib.prompts(1, BLOCK - 1, BLOCK, BLOCK + 1, 300, seed=21), count=4, times=2)
        assert max(found[1]) == 2 * BLOCK
        rounds(lib, llm, lib.prompts(*[120] * 20, seed=22), count=12, times=1)
        assert counted(llm, "vllm:num_preemptions") > 0
        assert poison.used > 20
