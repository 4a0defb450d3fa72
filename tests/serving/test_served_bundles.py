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
from kimi_graph.parallel import Mesh
from kimi_graph.serving.bundle_runners import Seat, runner_for
from kimi_graph.serving.bundles import Choice, Graphs
from tests.serving.poisoned import Poison
from tests.serving.served import SETTINGS, ask, counted, engine, seen
from tests.serving.test_bundles import own_states, played
from tests.serving.test_launch import picture
from tests.serving.test_mesh import PIPE, TENSOR
from tests.serving.test_tokens import rounds

pytestmark = [pytest.mark.serving, pytest.mark.filterwarnings("default")]

PRESETS = ["kimi-linear-48b", "kimi-k3.1-pro", "deepseek-v3.2"]
HARDEST = "kimi-k3.1-pro"
PAGES = {torch.float32: 192, torch.bfloat16: 368}  # tokens: the least that hold all memories of either hybrid
ROWS, CHUNK = 5, 80
PATCHES = 256  # of a picture
PORT = 18125


@pytest.fixture(scope="session")
def bundle(folder, tmp_path_factory):
    """`bundle(preset, page, pages)`: of a fixture, 5 rows, chunks of 80, sequences of 4 pages."""

    @functools.cache
    def made(preset, page, pages, mesh=None):
        out, config = tmp_path_factory.mktemp("bundles") / preset, kg.load_config(folder(preset))
        compile_model(
            config, target=target("a3"), out=out, checkpoint=folder(preset), batch=ROWS,
            chunk=CHUNK, max_len=4 * page, page=page, pages=pages, slots=pages, mesh=mesh,
            patches=None if config.vision is None else PATCHES,
            cache_dir=torchair_host.default_cache(os.environ),
        )  # fmt: skip
        return out

    return made


@pytest.fixture
def serving(folder, bundle):
    """`serving(preset)`: the engine, told to call a bundle and all that goes with it."""

    def run(preset, of=torch.float32, pages=24, told=None, beside=None, mesh=None, **changes):
        page = PAGES[of]
        mode = {"mode": "exact"} if of == torch.float32 else {}
        own = {"bundle": str(bundle(told or preset, page, pages, mesh))} | mode
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
    runner = runner_for(graphs, folder(HARDEST), torch.device("cpu"), Seat())
    tokens, logits = played(graphs, runner, own_states(graphs), prompts, 4)
    with serving(HARDEST, dtype) as llm:
        for _ in range(2):
            for out, own, rows in zip(ask(llm, prompts, 4), tokens, logits, strict=True):
                assert out.tokens == own
                for top, row in zip(out.top, rows[-4:], strict=True):
                    logprobs = row.float().log_softmax(-1)
                    assert all(abs(float(logprobs[i]) - x) < 1e-5 for i, x in top.items())


@pytest.mark.parametrize("preset", PRESETS)
def test_two_tensor_ranks_that_call_their_graphs_give_the_librarys_tokens(serving, library, preset):
    """Read in odd parts, cold and from the prefix cache."""
    page, lib = PAGES[torch.float32], library(preset)
    prompts = lib.prompts(8, 70, page + 12, 33, 2 * page + 30, seed=5)
    prompts[3] = prompts[2][: page + 3] + prompts[3]
    odd = {"max_num_batched_tokens": page + 1}
    with serving(preset, mesh=Mesh(tensor=2), **TENSOR, **odd) as llm:
        cached = rounds(lib, llm, prompts, count=4, times=2)
    assert cached[1:] == [[0, 0, page, page, 2 * page]]


def test_two_stages_of_two_tensor_ranks_that_call_their_graphs_give_the_librarys_tokens(serving, library):
    page, lib = PAGES[torch.float32], library(HARDEST)
    with serving(HARDEST, mesh=Mesh(pipe=2, tensor=2), **TENSOR | PIPE) as llm:
        cached = rounds(lib, llm, lib.prompts(8, 70, page + 12, seed=6), count=4, times=2)
    assert cached[1:] == [[0, 0, page]]


@pytest.mark.parametrize("mesh", [None, Mesh(tensor=2)], ids=str)
def test_pictures_embedded_by_the_bundle_give_the_librarys_tokens_and_are_found_again(serving, library, mesh):
    """One picture and two, then one of the same size; none of more patches than the graph takes."""
    from PIL import Image

    lib, text = library(HARDEST), "what is it? " * 20
    page, sizes = PAGES[torch.float32], ((90, 60), (90, 60), (41, 130), (300, 300))
    one, alike, other, large = (Image.effect_noise(size, 90).convert("RGB") for size in sizes)
    options = {"limit_mm_per_prompt": {"image": 2}, "max_num_batched_tokens": page + 1}
    with serving(HARDEST, mesh=mesh, **options, **(TENSOR if mesh else {})) as llm:
        for pictures, found in (([one, other], False), ([one, other], True), ([alike, other], False), ([], False)):
            ids, out = seen(llm, pictures, text, 4)
            lib.see(ids, 4, [kg.encode_image(lib.config, lib.params, p) for p in pictures])
            lib.agrees(ids, out)
            assert out.cached == (page if found else 0)
        with pytest.raises(ValueError, match="a picture of 484 patches: the bundle takes at most 256"):
            seen(llm, [large], text, 1)
        assert seen(llm, [one, other], text, 4)[1].cached == page


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"max_num_seqs": 6}, "--max-num-seqs 6; lower it to 5"),
        ({"max_num_batched_tokens": 401}, "--max-num-batched-tokens 401; lower it to 400"),
        ({"max_model_len": 769}, "--max-model-len 769; lower it to 768"),
        ({"block_size": 128}, "--block-size 128; give 192"),
        ({"dtype": "bfloat16"}, "model.config is float32, --dtype bfloat16; give float32"),
        ({"told": HARDEST}, "made for another model than"),
        ({"beside": {"kimi_graph_experts": {"redundant_experts": 2}}}, "copies of experts are the bundle's own"),
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
    words = [str(bundle(HARDEST, PAGES[torch.bfloat16], 24)), "--name", "k31", "--port", str(PORT)]
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
                client.completions.create, model="k31", prompt="hello", max_tokens=6, temperature=0
            )
            first, again = (asked(logprobs=1, temperature=0) for _ in range(2))
            assert first.choices[0].logprobs == again.choices[0].logprobs
            with pytest.raises(Exception, match="prompt_logprobs: graphs of a bundle") as caught:
                asked(echo=True, logprobs=1)
            assert getattr(caught.value, "status_code", None) == 400
            told = {"type": "image_url", "image_url": {"url": picture(300, 300, 9)}}
            with pytest.raises(Exception, match="484 patches: the bundle takes at most 256") as caught:
                client.chat.completions.create(model="k31", messages=[{"role": "user", "content": [told]}])
            assert getattr(caught.value, "status_code", None) == 400
            assert asked().usage.completion_tokens
        process.send_signal(signal.SIGTERM)
        rest.join()
    assert process.returncode == 128 + signal.SIGTERM


def openai_client():
    import openai

    return openai.OpenAI(base_url=f"http://127.0.0.1:{PORT}/v1", api_key="none", max_retries=0, timeout=120)
