"""Several ranks of vLLM, each with its own stage or shards, give the library's own tokens, and hold no more than that.

An engine here starts a process for each rank; what it measures of them (`disable_log_stats`) is not asked for.
"""

import math

import pytest
import torch

import kimi_graph as kg
from kimi_graph import tree
from kimi_graph.models import model_specs
from kimi_graph.parallel import Mesh, place_tree, preset
from tests.serving.served import ask, engine, seen
from tests.serving.test_tokens import BLOCK, HARDEST, rounds

pytestmark = [pytest.mark.serving, pytest.mark.filterwarnings("default")]

TENSOR = {"tensor_parallel_size": 2, "disable_log_stats": True}
# Not eager: vLLM makes what a later stage receives in a warm-up, which an eager CPU skips. The warm-up would embed the
# largest picture there is, whose patches all attend to each other.
PIPE = {"pipeline_parallel_size": 2, "enforce_eager": False, "skip_mm_profiling": True, "disable_log_stats": True}
ODD = {"max_num_batched_tokens": 161}  # of a step: long prompts are read in odd parts


def batch(lib, seed=0):
    prompts = lib.prompts(8, 70, 140, 33, 300, seed=seed)
    prompts[3] = prompts[2][: BLOCK + 3] + prompts[3]
    return prompts


def held(worker):
    """Bytes of a rank's parameters, and of the memory that they keep."""
    leaves = [getattr(x, "local", x) for x in tree.leaves(worker.get_model().params)]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in leaves}
    return sum(x.nbytes for x in leaves), sum(storages.values())


def bytes_of_a_rank(config, dtype, mesh):
    """By the mesh rules alone."""
    placed = place_tree(model_specs(config), preset(config, mesh), dtype)
    return sum(p.bytes for p in tree.leaves(placed))


@pytest.mark.parametrize("preset", ["kimi-linear-48b", "kimi-k3", "kimi-k3.1-pro", "deepseek-v3.2"])
def test_two_tensor_ranks_give_the_same_tokens_from_a_half_of_the_parameters_each(folder, library, preset):
    """As many bytes as the rules say, which is half of the released model, and of a fixture what its widths leave."""
    lib = library(preset)
    with engine(folder(preset), **TENSOR, **ODD) as llm:
        cached = rounds(lib, llm, batch(lib))
        sizes = llm.collective_rpc(held)
    assert cached[1:] == [[0, 0, BLOCK, BLOCK, 2 * BLOCK]] * 2
    want = bytes_of_a_rank(lib.config, torch.float32, Mesh(tensor=2))
    assert sizes == [(want, want)] * 2
    assert want < 0.7 * sum(x.nbytes for x in tree.leaves(lib.params))
    whole, half = (bytes_of_a_rank(kg.load_config(preset), torch.bfloat16, Mesh(tensor=n)) for n in (1, 2))
    assert math.isclose(half, whole / 2, rel_tol=0.003)


def test_two_stages_of_two_tensor_ranks_give_the_same_tokens(folder, library):
    lib = library(HARDEST)
    with engine(folder(HARDEST), **PIPE | TENSOR, **ODD) as llm:
        rounds(lib, llm, batch(lib), times=2)
        sizes = [size for size, _ in llm.collective_rpc(held)]
    assert sizes[0] == sizes[1] and sizes[2] == sizes[3]
    assert sizes[0] + sizes[2] == bytes_of_a_rank(lib.config, torch.float32, Mesh(tensor=2))


@pytest.mark.parametrize("preset", ["kimi-linear-48b", "deepseek-v3.2"])
def test_two_pipeline_stages_give_the_same_tokens(folder, library, preset):
    lib = library(preset)
    with engine(folder(preset), **PIPE) as llm:
        rounds(lib, llm, batch(lib, seed=10), times=2)


@pytest.mark.parametrize("options", [TENSOR, PIPE], ids=["tensor", "pipe"])
def test_pictures_give_the_same_tokens_on_two_ranks(folder, library, options):
    """Two pictures of other sizes in one prompt, one of them again, and a prompt without."""
    from PIL import Image

    lib = library(HARDEST)
    one, other = (Image.effect_noise(size, 90).convert("RGB") for size in ((90, 60), (41, 130)))
    with engine(folder(HARDEST), **options, **ODD) as llm:
        for pictures in ([one, other], [one], []):
            for _ in range(2):
                ids, out = seen(llm, pictures, "what is it?")
                lib.see(ids, 8, [kg.encode_image(lib.config, lib.params, p) for p in pictures])
                lib.agrees(ids, out)
        (prompt,) = lib.prompts(40)
        lib.greedy([prompt], 8)
        lib.agrees(prompt, ask(llm, [prompt])[0])
