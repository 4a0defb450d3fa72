"""Pages that come back from shared memory and from files are the pages that were computed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kimi_graph as kg
from kimi_graph.serving.tiers.plan import Tiers
from kimi_graph.serving.tiers.precision import RUN, Layout
from tests.serving.served import NEAR, ask, engine, reads

pytestmark = [pytest.mark.serving, pytest.mark.filterwarnings("default")]

BLOCK = 128
HARDEST = "kimi-k3.1-pro"
CHUNK = 1081344  # bytes that a page of all its layers takes in a tier


def tiered(folder, tiers, **options):
    return engine(folder, kv_transfer_config=Tiers.parse(tiers).engine_config(folder), **options)


def shared_memory(llm):
    """Files of the node's shared memory that are the engine's."""
    mark = llm.llm_engine.vllm_config.kv_transfer_config.engine_id
    return list(Path("/dev/shm").glob(f"*{mark}*"))


def asked(library, llm, prompts, count=8):
    """Tokens of the prompts that were found; every answer is the library's."""
    library.greedy(prompts, count)
    outs = ask(llm, prompts, count)
    for prompt, out in zip(prompts, outs, strict=True):
        library.agrees(prompt, out)
    return [o.cached for o in outs]


def restarted(library, tiers, prompts, count=8, **options):
    """A server of its own gives the library's tokens: how many of each prompt it found, in which files."""
    given = {"folder": str(library.folder), "tiers": Tiers.parse(tiers).engine_config(library.folder)}
    words = json.dumps(given | {"prompts": prompts, "count": count, "options": options})
    done = subprocess.run([sys.executable, "-m", "tests.serving.tiered", words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout.splitlines()[-1])
    for (tokens, _), prompt in zip(made["answers"], prompts, strict=True):
        assert tokens == library.seen[tuple(prompt)][0][:count]
    return [cached for _, cached in made["answers"]], made["read"]


@pytest.mark.parametrize("preset", [HARDEST, "deepseek-v3.2"])
def test_pages_that_the_engine_dropped_come_back_from_shared_memory(folder, library, preset):
    lib = library(preset)
    prompts = lib.prompts(400, 300, 150, seed=11)
    with tiered(folder(preset), "host=64MB") as llm:
        assert asked(lib, llm, prompts) == [0, 0, 0]
        for _ in range(2):
            assert llm.reset_prefix_cache()
            assert asked(lib, llm, prompts) == [3 * BLOCK, 2 * BLOCK, BLOCK]


def test_an_answer_is_found_by_the_next_turn(folder, library):
    """In models without KDA: of one with it, the engine keeps no memory where decoding passes a page's end."""
    lib = library("deepseek-v3.2")
    (first,) = lib.prompts(BLOCK - 10, seed=12)
    with tiered(folder("deepseek-v3.2"), "host=64MB") as llm:
        asked(lib, llm, [first], count=30)
        turn = first + lib.seen[tuple(first)][0][:30] + lib.prompts(20, seed=13)[0]
        assert llm.reset_prefix_cache()
        assert asked(lib, llm, [turn]) == [BLOCK]


def test_a_server_that_is_started_later_finds_its_pages_in_files(folder, library, tmp_path):
    """The second server is another process, after the first has ended and shared memory is gone."""
    lib, tiers = library(HARDEST), f"host=64MB,file={tmp_path / 'pages'}"
    prompts = lib.prompts(400, 300, 150, 60, seed=14)
    with tiered(folder(HARDEST), tiers) as llm:
        asked(lib, llm, prompts)
        assert shared_memory(llm)
    assert not shared_memory(llm)
    found, read = restarted(lib, tiers, prompts)
    assert found == [len(prompt) // BLOCK * BLOCK for prompt in prompts]
    assert len(set(read)) > sum(found) // BLOCK  # and memories


def test_more_than_fits_into_shared_memory_comes_back_from_files(folder, library, tmp_path):
    """Room for 14 pages; the prompts have 20, with their memories 30. One after another: of more at a time, the engine
    computes those whose pages find no room as they come back."""
    lib = library(HARDEST)
    prompts = lib.prompts(*[300] * 10, seed=15)
    tiers = f"host={14 * CHUNK}B,file={tmp_path}"
    with reads() as read, tiered(folder(HARDEST), tiers, max_num_seqs=2) as llm:
        asked(lib, llm, prompts)
        assert llm.reset_prefix_cache()
        assert [asked(lib, llm, [prompt]) for prompt in prompts] == [[2 * BLOCK]] * 10
    assert len(read) > 20


def logits_after_code(lib, prompt, cached, code):
    """The library's logits after `prompt`, where caches of its first tokens were written in code and read again."""
    state = kg.init_state(lib.config, 1, len(prompt), torch.float32)
    with torch.no_grad():
        _, state = kg.prefill(lib.config, lib.params, torch.tensor([prompt[:cached]]), state)
        for layer in state.layers:
            for pool in (getattr(layer, name, None) for name in ("latent", "rope", "index")):
                if pool is not None:
                    rows, width = pool.shape[:-1].numel(), pool.shape[-1]
                    layout, chunk = Layout([(0, rows)], width, RUN, pool.dtype, code), pool.view(torch.uint8).flatten()
                    layout.decode(layout.coded(chunk), chunk)
                    pool.copy_(chunk.view(pool.dtype).view_as(pool))
        return kg.prefill(lib.config, lib.params, torch.tensor([prompt[cached:]]), state, last_only=True)[0][0]


@pytest.mark.parametrize("code", ["int8", "fp8"])
def test_attention_pages_come_back_in_code_and_memories_as_they_were(folder, library, tmp_path, code):
    """The first logprobs are those of the library with its caches written in code and read again."""
    lib = library(HARDEST)
    prompts = lib.prompts(300, 290, seed=17)
    tiers = f"host=64MB,file={tmp_path},low={code}"
    with tiered(folder(HARDEST), tiers) as llm:
        asked(lib, llm, prompts, 1)
    with tiered(folder(HARDEST), tiers) as llm:
        outs = ask(llm, prompts, 1)
    sizes = sorted({f.stat().st_size for f in tmp_path.rglob("*.bin")})
    assert len(sizes) == 2
    assert sizes[1] == CHUNK  # memories
    for prompt, out in zip(prompts, outs, strict=True):
        assert out.cached == 2 * BLOCK
        logits = logits_after_code(lib, prompt, out.cached, code)
        exact = lib.seen[tuple(prompt)][1][0]
        for token, value in out.top[0].items():
            assert abs(float(logits.log_softmax(-1)[token]) - value) <= NEAR * float(logits.abs().max())
        assert float((logits - exact).abs().max()) > 100 * NEAR * float(logits.abs().max())  # code has an effect


def test_files_stay_within_their_bound_and_the_tokens_right(folder, library, tmp_path):
    lib, most = library(HARDEST), 9 * CHUNK
    prompts = lib.prompts(*[300] * 6, seed=16)
    for _ in range(2):  # the second engine finds files that it has not written
        with tiered(folder(HARDEST), f"host=64MB,file={tmp_path}:{most}B") as llm:
            for prompt in prompts:
                asked(lib, llm, [prompt])
        files = list(tmp_path.rglob("*.bin"))
        assert 0 < sum(f.stat().st_size for f in files) <= most


def test_files_that_cannot_be_read_are_computed_again(folder, library, tmp_path):
    """They are found, so the request waits for them, and must not wait for ever."""
    lib, tiers = library("deepseek-v3.2"), f"host=64MB,file={tmp_path}"
    prompts = lib.prompts(300, 200, seed=20)
    with tiered(folder("deepseek-v3.2"), tiers) as llm:
        asked(lib, llm, prompts, 2)
    files = list(tmp_path.rglob("*.bin"))
    assert len(files) == 3
    for file in files:
        file.write_bytes(b"short")
    with tiered(folder("deepseek-v3.2"), tiers) as llm:
        assert asked(lib, llm, prompts, 2) == [0, 0]


def test_a_connector_that_loads_by_layer_is_asked_before_each_and_told_after_all(folder, library):
    """Its pages come when a layer is waited for and not before, so that a layer not waited for would read others."""
    from tests.serving.by_layer import CALLS, KEPT

    lib = library("deepseek-v3.2")
    prompts = lib.prompts(300, 270, 60, seed=18)
    by_layer = {"kv_connector": "ByLayer", "kv_connector_module_path": "tests.serving.by_layer", "kv_role": "kv_both"}
    with engine(folder("deepseek-v3.2"), kv_transfer_config=by_layer) as llm:
        asked(lib, llm, prompts, 1)
        assert llm.reset_prefix_cache()
        CALLS.clear()
        # the last one reads a page that is loaded for the first one in the same step
        assert asked(lib, llm, [*prompts, prompts[0][:200]], 1) == [2 * BLOCK, 2 * BLOCK, 0, BLOCK]
    layers = [f"layers.{i}" for i in range(len(lib.config.layers))]
    calls = [(what, name.rpartition(".")[0]) for what, name in CALLS]
    step = [("start", ""), *(("wait", x) for x in layers), *(("save", x) for x in layers), ("end", "")]
    assert calls[: len(step)] == step
    assert all(len(kept) == len(layers) for kept in KEPT.values())


def test_others_compute_while_pages_come_back_from_files(folder, library, tmp_path, monkeypatch):
    """A prompt whose pages are in files waits; one that has none there is answered meanwhile."""
    import threading

    from kimi_graph.serving.tiers.files import Files

    lib, open_now = library(HARDEST), threading.Event()
    waits, computes = lib.prompts(300, 40, seed=19)
    lib.greedy([waits, computes], 4)
    with tiered(folder(HARDEST), f"host=64MB,file={tmp_path}") as llm:
        asked(lib, llm, [waits], 4)
    taken = Files.submit_load

    def slowly(tier, job):
        threading.Thread(target=lambda: open_now.wait(60) and taken(tier, job)).start()

    monkeypatch.setattr(Files, "submit_load", slowly)
    with tiered(folder(HARDEST), f"host=64MB,file={tmp_path}") as llm:
        done = answered(llm, {"waits": waits, "computes": computes}, 4, open_now)
    assert [name for name, _ in done] == ["computes", "waits"]
    for name, out in done:
        prompt = {"waits": waits, "computes": computes}[name]
        assert list(out.outputs[0].token_ids) == lib.seen[tuple(prompt)][0][:4]
        assert out.num_cached_tokens == {"waits": 2 * BLOCK, "computes": 0}[name]


def answered(llm, prompts, count, open_now):
    """Requests in the order in which they end; `open_now` is set when the first one has."""
    from vllm import SamplingParams

    for name, prompt in prompts.items():
        sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
    done = []
    while llm.llm_engine.has_unfinished_requests():
        for out in llm.llm_engine.step():
            if out.finished:
                done.append((out.request_id, out))
                open_now.set()
    return done
