"""vLLM with the adapter gives the library's own tokens, whatever the scheduler does."""

import itertools

import pytest
from packaging.version import Version

import kimi_graph as kg
from kimi_graph.fixture import make_fixture
from tests.serving.served import Library, ask, counted, differ_at_a_tie, engine

pytestmark = [pytest.mark.serving, pytest.mark.filterwarnings("default")]

PRESETS = ["kimi-linear-48b", "kimi-k3", "kimi-k3.1-pro", "kimi-k2.5", "deepseek-v3.2", "glm-5"]
BLOCK = 128  # tokens of a page: what the engine chooses for these fixtures
HARDEST = "kimi-k3.1-pro"  # KDA, sparse attention, attention residuals, latent experts


def rounds(library, llm, prompts, count=8, times=3):
    """What was found in the cache in each round; every answer is the library's."""
    cached = []
    library.greedy(prompts, count)
    for _ in range(times):
        outs = ask(llm, prompts, count)
        for prompt, out in zip(prompts, outs, strict=True):
            library.agrees(prompt, out)
        cached.append([o.cached for o in outs])
    return cached


@pytest.mark.parametrize("preset", PRESETS)
def test_a_batch_gives_the_librarys_tokens_cold_and_from_the_prefix_cache(folder, library, preset):
    lib = library(preset)
    prompts = lib.prompts(8, 70, 140, 33, 300)
    prompts[3] = prompts[2][: BLOCK + 3] + prompts[3]
    with engine(folder(preset)) as llm:
        assert llm.llm_engine.vllm_config.cache_config.block_size == BLOCK
        cached = rounds(lib, llm, prompts)
    assert cached[1:] == [[0, 0, BLOCK, BLOCK, 2 * BLOCK]] * 2


@pytest.fixture(scope="module")
def narrow(folder):
    """The hardest model in an engine with little room: prompts are read in parts, requests are preempted."""
    options = {"num_gpu_blocks_override": 28, "max_num_batched_tokens": 161, "max_num_seqs": 64}
    with engine(folder(HARDEST), **options) as llm:
        yield llm


def test_prompts_read_in_odd_parts_give_the_same_tokens(library, narrow):
    lib = library(HARDEST)
    prompts = lib.prompts(300, 9, 161, 162, 50, seed=1)
    rounds(lib, narrow, prompts)


def test_preempted_requests_give_the_same_tokens(library, narrow):
    lib = library(HARDEST)
    before = counted(narrow, "vllm:num_preemptions")
    rounds(lib, narrow, lib.prompts(*[118] * 64, seed=2), count=16, times=1)
    assert counted(narrow, "vllm:num_preemptions") - before > 20


@pytest.mark.parametrize("base", [BLOCK, 2 * BLOCK])
def test_lengths_about_a_page_are_the_same_cold_and_resumed(library, narrow, base):
    """One token fewer than pages, as many, one and two more; then each goes on by one and two tokens."""
    lib = library(HARDEST)
    (whole,) = lib.prompts(base + 2, seed=3)
    for length in (base - 1, base, base + 1, base + 2):
        prompt = whole[:length]
        for more in range(3):
            cold, again = rounds(lib, narrow, [prompt + whole[:more]], count=3, times=2)
            assert again[0] >= cold[0]


def test_a_prompt_of_one_page_is_found_again_without_its_last_token(library, narrow):
    """A prompt that is cached whole still needs the logits of its last token, and the memory before it."""
    lib = library(HARDEST)
    (prompt,) = lib.prompts(BLOCK, seed=4)
    assert rounds(lib, narrow, [prompt], count=4, times=2) == [[0], [0]]
    cached = rounds(lib, narrow, [prompt + lib.prompts(5, seed=5)[0]], count=4, times=2)
    assert cached[1] == [BLOCK]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Four layers of the hardest model: three of KDA and one of sparse attention."""
    config = kg.load_config(HARDEST)
    return Library(make_fixture(config, tmp_path_factory.mktemp("small") / "small", layers=4).folder)


@pytest.mark.parametrize("page, lengths", [(384, (383, 384, 385, 767, 768)), (1536, (1535, 1536, 1537))])
def test_large_pages_end_where_they_end_cold_and_resumed(small, page, lengths):  # K6
    """Of TP16 in bfloat16 and of TP8 in fp8. Each length, and one and two tokens more, by itself and found again: one
    token over a page, one is left to read. Of a prompt of whole pages 0.27 keeps the memory at its end alone, which
    would leave none to read; 0.32 keeps the one before it too."""
    from vllm import __version__

    old = Version(__version__) < Version("0.28")
    (whole,) = small.prompts(lengths[-1] + 2, seed=12)
    with engine(small.folder, block_size=page, max_model_len=2048) as llm:
        assert llm.llm_engine.vllm_config.cache_config.block_size == page
        for length in lengths:
            llm.reset_prefix_cache()
            for more in range(3):
                _, again = rounds(small, llm, [whole[: length + more]], count=3, times=2)
                count = length + more
                expected = [(count - 1) // page * page]
                assert again == expected or (old and count % page == 0 and again == [0])


def test_memories_may_be_kept_at_every_pages_end(folder, library):
    """Else vLLM 0.32 keeps the one below a prompt's last token alone: not that of a prompt of one page, which the next
    turn goes on from, nor what decoding passes."""
    from vllm.config import CacheConfig

    if "prefix_cache_retention_interval" not in CacheConfig.__dataclass_fields__:
        pytest.skip("0.27 keeps them all")
    lib = library(HARDEST)
    first, tail, begun = lib.prompts(BLOCK, 5, BLOCK - 10, seed=13)
    with engine(folder(HARDEST), prefix_cache_retention_interval=BLOCK) as llm:
        rounds(lib, llm, [first], count=4, times=1)
        assert rounds(lib, llm, [first + tail], count=4, times=1) == [[BLOCK]]
        (answer,) = ask(llm, [begun], 30)
        assert rounds(lib, llm, [begun + answer.tokens + tail], count=4, times=1) == [[BLOCK]]


def test_requests_that_read_what_others_write_in_the_same_step_are_right(folder, library):
    """Without memories of fixed size a prefix is found before it is computed: in the same step as its writer."""
    lib = library("deepseek-v3.2")
    (prefix,) = lib.prompts(2 * BLOCK, seed=6)
    tails = lib.prompts(40, 1, 90, seed=7)
    with engine(folder("deepseek-v3.2")) as llm:
        first, *rest = rounds(lib, llm, [prefix + t for t in tails], times=1)[0]
    assert (first, rest) == (0, [2 * BLOCK] * 2)


def test_odd_parts_without_memories_of_fixed_size_give_the_same_tokens(folder, library):
    lib = library("deepseek-v3.2")
    with engine(folder("deepseek-v3.2"), max_num_batched_tokens=37, max_num_seqs=5) as llm:
        rounds(lib, llm, lib.prompts(200, 3, 38, 37, 36, seed=8), times=2)


def test_a_prompt_longer_than_the_engine_takes_is_refused_and_the_next_is_served(folder, library):
    lib = library("deepseek-v3.2")
    with engine(folder("deepseek-v3.2"), max_model_len=64) as llm:
        for length in (64, 65, 200):
            with pytest.raises(Exception, match=r"maximum (model|context) length"):
                ask(llm, lib.prompts(length))
        rounds(lib, llm, lib.prompts(63), count=1, times=1)


def test_pages_are_shared_in_every_order(folder, library):
    """Batches of prompts that share prefixes of several lengths, in every order of three."""
    lib = library(HARDEST)
    (whole,) = lib.prompts(3 * BLOCK, seed=9)
    prompts = [whole[: BLOCK + 7], whole[: 2 * BLOCK + 1], whole]
    with engine(folder(HARDEST)) as llm:
        for order in itertools.permutations(prompts):
            rounds(lib, llm, list(order), count=3, times=1)
            llm.reset_prefix_cache()


def test_a_config_that_is_reset_when_the_caches_are_there_changes_nothing(folder, library):
    """As vLLM's server does it: the platform's default page is in the config again, and not that of the caches.

    bfloat16, because a memory then has the bytes of 256 tokens, which is not the default. vLLM's scheduler cuts prompts
    at the page of its config, so that sums are in another order then: logits of up to 8 in size are rounded to 2^-5.
    """
    prompts = library(HARDEST).prompts(8, 140, 300, seed=11)
    with engine(folder(HARDEST), dtype="bfloat16") as llm:
        config = llm.llm_engine.vllm_config
        first = ask(llm, prompts)
        assert config.cache_config.block_size == 2 * BLOCK
        llm.reset_prefix_cache()
        config.__post_init__()
        assert config.cache_config.block_size == BLOCK
        for before, after in zip(first, ask(llm, prompts), strict=True):
            assert differ_at_a_tie(before, after, 2 * 2**-5)
