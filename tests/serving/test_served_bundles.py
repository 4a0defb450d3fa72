"""vLLM calls a bundle's graphs and gives the library's own tokens, whatever the scheduler does.

Exact: graphs in float64, the engine's caches in float32, against the library in float32. Native: graphs in the model's
dtype, against the same graphs on states of their own.
"""

import functools
import os
import signal
import subprocess
import sys
import threading

import pytest
import torch

import kimi_graph as kg
from kimi_graph.compile import torchair_host
from kimi_graph.compile.driver import compile_model
from kimi_graph.compile.targets import target
from kimi_graph.errors import KimiGraphError
from kimi_graph.serving.bundles import Choice, Graphs, runner_for
from tests.serving.poisoned import Poison
from tests.serving.served import SETTINGS, ask, counted, engine
from tests.serving.test_bundles import own_states, played
from tests.serving.test_tokens import rounds

pytestmark = [pytest.mark.serving, pytest.mark.filterwarnings("default")]

PRESETS = ["kimi-linear-48b", "kimi-k3.1-pro", "deepseek-v3.2"]
HARDEST = "kimi-k3.1-pro"
PAGES = {torch.float32: 192, torch.bfloat16: 368}  # tokens: the least that hold all memories of either hybrid
ROWS, CHUNK = 5, 80
PORT = 18125


@pytest.fixture(scope="session")
def bundle(folder, tmp_path_factory):
    """`bundle(preset, page, pages)`: of a fixture, 5 rows, chunks of 80, sequences of 4 pages."""

    @functools.cache
    def made(preset, page, pages):
        out = tmp_path_factory.mktemp("bundles") / preset
        compile_model(
            kg.load_config(folder(preset)), target=target("a3"), out=out, checkpoint=folder(preset), batch=ROWS,
            chunk=CHUNK, max_len=4 * page, page=page, pages=pages, slots=pages,
            cache_dir=torchair_host.default_cache(os.environ),
        )  # fmt: skip
        return out

    return made


@pytest.fixture
def serving(folder, bundle):
    """`serving(preset)`: the engine, told to call a bundle and all that goes with it."""

    def run(preset, of=torch.float32, pages=24, told=None, beside=None, **changes):
        page = PAGES[of]
        own = {"bundle": str(bundle(told or preset, page, pages))} | ({"mode": "exact"} if of == torch.float32 else {})
        options = {
            "additional_config": {"kimi_graph": own} | (beside or {}),
            "dtype": str(of).removeprefix("torch."), "block_size": page, "num_gpu_blocks_override": pages,
            "max_model_len": 4 * page, "max_num_seqs": ROWS,
            "max_num_batched_tokens": ROWS * CHUNK,
        }  # fmt: skip
        if kg.load_config(folder(preset)).vision is not None:
            options["limit_mm_per_prompt"] = {"image": 0}
        return engine(folder(preset), **options | changes)

    return run


@pytest.mark.parametrize("preset", PRESETS)
def test_a_batch_gives_the_librarys_tokens_cold_and_from_the_prefix_cache(serving, library, preset):
    page, lib = PAGES[torch.float32], library(preset)
    prompts = lib.prompts(8, 70, page + 12, 33, 2 * page + 30)
    prompts[3] = prompts[2][: page + 3] + prompts[3]
    with serving(preset) as llm:
        assert llm.llm_engine.vllm_config.cache_config.block_size == page
        cached = rounds(lib, llm, prompts, count=4)
    assert cached[1:] == [[0, 0, page, page, 2 * page]] * 2


def test_prompts_read_in_odd_parts_give_the_same_tokens(serving, library):
    lib = library(HARDEST)
    with serving(HARDEST, max_num_batched_tokens=PAGES[torch.float32] + 1) as llm:
        rounds(lib, llm, lib.prompts(300, 9, 193, seed=1), count=3, times=2)


def test_preempted_requests_give_the_same_tokens(serving, library):
    """Pages for three of five sequences that grow over the end of a page."""
    lib, page = library(HARDEST), PAGES[torch.float32]
    with serving(HARDEST, pages=9) as llm:
        rounds(lib, llm, lib.prompts(*[page - 3] * 5, seed=2), count=8, times=1)
        assert counted(llm, "vllm:num_preemptions") > 0


@pytest.mark.parametrize("preset", PRESETS)
def test_caches_of_nan_change_no_token(serving, library, monkeypatch, preset):
    """Rows of a graph that no sequence has are padding: what they read is NaN too, and nobody's."""
    poison, page, lib = Poison(monkeypatch), PAGES[torch.float32], library(preset)
    with serving(preset, pages=9) as llm:
        rounds(lib, llm, lib.prompts(1, page, page + 1, seed=6), count=3, times=2)
        rounds(lib, llm, lib.prompts(*[page - 3] * 7, seed=2), count=6, times=1)
        assert poison.used > 5


def test_native_answers_are_those_of_the_graphs_alone(serving, library, folder, bundle):
    """To the bit, but for the softmax: what `verify` says of the graphs holds of the answers. (The library in bfloat16
    is no measure: a rounding that flips a near tie of experts or keys is another text.)"""
    prompts, dtype = library(HARDEST).prompts(8, 70, 33, 90, seed=3), torch.bfloat16
    graphs = Graphs.open(Choice(bundle=bundle(HARDEST, PAGES[dtype], 24)), folder(HARDEST))
    runner = runner_for(graphs, folder(HARDEST), torch.device("cpu"))
    tokens, logits = played(graphs, runner, own_states(graphs), prompts, 4)
    with serving(HARDEST, dtype) as llm:
        for _ in range(2):
            for out, own, rows in zip(ask(llm, prompts, 4), tokens, logits, strict=True):
                assert out.tokens == own
                for top, row in zip(out.top, rows[-4:], strict=True):
                    logprobs = row.float().log_softmax(-1)
                    assert all(abs(float(logprobs[i]) - x) < 1e-5 for i, x in top.items())


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"max_num_seqs": 6}, "--max-num-seqs 6; lower it to 5"),
        ({"max_num_batched_tokens": 401}, "--max-num-batched-tokens 401; lower it to 400"),
        ({"max_model_len": 769}, "--max-model-len 769; lower it to 768"),
        ({"block_size": 128}, "--block-size 128; give 192"),
        ({"dtype": "bfloat16"}, "model.config is float32, --dtype bfloat16; give float32"),
        ({"told": HARDEST}, "made for another model than"),
        ({"beside": {"kimi_graph_experts": {"redundant_experts": 2}}}, "experts lie on one rank; leave it out"),
    ],
)
def test_an_engine_that_does_not_fit_its_bundle_is_refused_before_it_starts(serving, changes, words):
    with pytest.raises(KimiGraphError, match=words), serving("kimi-linear-48b", **changes):
        pass


def test_logits_of_a_prompts_tokens_are_refused_and_the_next_request_is_served(serving, library):
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    lib = library("kimi-linear-48b")
    with serving("kimi-linear-48b") as llm:
        with pytest.raises(VLLMValidationError, match="prompt_logprobs: graphs of a bundle"):
            llm.generate([{"prompt_token_ids": [1, 2, 3]}], SamplingParams(prompt_logprobs=1), use_tqdm=False)
        rounds(lib, llm, lib.prompts(9, seed=4), count=2, times=1)
        assert ask(llm, lib.prompts(9, seed=4), 2)[0].tokens


def test_serve_starts_a_server_on_a_bundle_that_answers_alike_and_refuses_what_graphs_do_not_give(bundle):
    own = {name: value for name, value in os.environ.items() if name not in SETTINGS and name != "OMP_NUM_THREADS"}
    words = [str(bundle("kimi-linear-48b", PAGES[torch.bfloat16], 24)), "--name", "kl", "--port", str(PORT)]
    command = [sys.executable, "-m", "kimi_graph", "serve", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=own) as process:
        assert process.stdout is not None
        while (line := process.stdout.readline()) and "answers on" not in line:
            pass
        assert line, "the server ended"
        rest = threading.Thread(target=process.stdout.read)  # a full pipe would stop the server
        rest.start()
        with openai_client() as client:
            asked = functools.partial(
                client.completions.create, model="kl", prompt="hello", max_tokens=6, temperature=0
            )
            first, again = (asked(logprobs=1, temperature=0) for _ in range(2))
            assert first.choices[0].logprobs == again.choices[0].logprobs
            with pytest.raises(Exception, match="prompt_logprobs: graphs of a bundle") as caught:
                asked(echo=True, logprobs=1)
            assert getattr(caught.value, "status_code", None) == 400
            assert asked().usage.completion_tokens
        process.send_signal(signal.SIGTERM)
        rest.join()
    assert process.returncode == 128 + signal.SIGTERM


def openai_client():
    import openai

    return openai.OpenAI(base_url=f"http://127.0.0.1:{PORT}/v1", api_key="none", max_retries=0, timeout=120)
