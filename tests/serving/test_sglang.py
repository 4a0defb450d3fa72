"""SGLang with the adapter gives the library's own tokens, whatever its scheduler does.

It starts in half a minute on a machine of its own: an engine serves all that can be asked of it.
"""

import pytest

from kimi_graph.errors import ConfigError
from tests.serving.sglang_served import ask_sglang, sglang_engine

pytestmark = [pytest.mark.serving("sglang"), pytest.mark.filterwarnings("default"), pytest.mark.timeout(1200)]

PRESETS = ["kimi-linear-48b", "kimi-k3", "kimi-k3.1-pro", "kimi-k2.5", "deepseek-v3.2", "glm-5.2"]
HARDEST = "kimi-k3.1-pro"  # KDA, sparse attention, attention residuals, latent experts


def rounds(library, llm, prompts, count=8, times=3):
    """The answers of each round; every one is the library's."""
    library.greedy(prompts, count)
    outs = [ask_sglang(llm, prompts, count) for _ in range(times)]
    for prompt, out in ((p, o) for some in outs for p, o in zip(prompts, some, strict=True)):
        library.agrees(prompt, out)
    return outs


def cached(outs):
    return [[o.cached for o in some] for some in outs]


@pytest.mark.parametrize("preset", PRESETS)
def test_a_batch_gives_the_librarys_tokens_cold_and_where_they_are_found_again(folder, library, preset):
    """A prompt is found without its last token; beside memories only where one was kept: at a request's end."""
    lib = library(preset)
    prompts = lib.prompts(8, 70, 140, 33, 300)
    prompts[3] = prompts[2][:131] + prompts[3]
    with sglang_engine(folder(preset)) as llm:
        outs = rounds(lib, llm, prompts)
        turns = [p + o.tokens + [7, 8, 9] for p, o in zip(prompts, outs[0], strict=True)]
        later = rounds(lib, llm, turns, times=2)
    again = [0] * 5 if lib.hybrid else [len(p) - 1 for p in prompts]
    assert cached(outs) == [[0] * 5, again, again]
    assert cached(later)[0] == [len(t) - 4 for t in turns]  # of an answer all but the last token was computed


@pytest.mark.parametrize("preset", [HARDEST, "glm-5.2"])
def test_odd_parts_and_retracted_requests_give_the_same_tokens(folder, library, preset, monkeypatch):
    """Prompts are read 37 tokens a step; then the engine takes requests out of the batch and begins them anew."""
    lib = library(preset)
    monkeypatch.setenv("SGLANG_TEST_RETRACT", "1")
    prompts = lib.prompts(200, 3, 38, 37, 36, 75, 74, 73, seed=1)
    with sglang_engine(folder(preset), chunked_prefill_size=37, context_length=500) as llm:
        outs = rounds(lib, llm, prompts, count=24, times=2)
    assert sum(o.retracted for o in outs[0]) > 0


@pytest.mark.parametrize("preset, page", [("deepseek-v3.2", 64)])
def test_lengths_about_a_page_are_the_same_cold_and_found_again(folder, library, preset, page):
    """One token fewer than a page, as many, one more; then each goes on."""
    lib = library(preset)
    (whole,) = lib.prompts(2 * page + 3, seed=3)
    with sglang_engine(folder(preset), page_size=page) as llm:
        for length in (page - 1, page, page + 1, 2 * page - 1, 2 * page, 2 * page + 1):
            for more in range(3):
                rounds(lib, llm, [whole[: length + more]], count=3, times=2)
        (found,) = rounds(lib, llm, [whole], count=3, times=1)
    assert found[0].cached == 2 * page


def test_flags_that_would_do_nothing_are_refused_all_at_once():
    from sglang.srt.server_args import ServerArgs

    from kimi_graph.serving.sglang import check

    told = ServerArgs(model_path="none", device="cpu")
    check(told)
    told.tp_size, told.kv_cache_dtype = 2, "fp8_e4m3"
    with pytest.raises(ConfigError, match=r"^--tp-size, .*: one rank runs here; --kv-cache-dtype fp8_e4m3: .*\.$"):
        check(told)
