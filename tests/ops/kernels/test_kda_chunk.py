"""KdaChunk on the twin is the reference `kda_chunk`: rows that start, go on, are padded or unused; short and long."""

import math
import random

import pytest
import torch
import torch.nn.functional as F

from kimi_graph import ops
from kimi_graph.errors import KernelError
from kimi_graph.ops.twin import ARCHES, Kernel

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
STATE = 1e-5  # of scale: float32 throughout; the reference joins halves of a chunk, this blocks of 16 tokens
# The output is rounded once. Where two float32 results lie on both sides of a tie, they round one last place apart.
OUTPUT = {BF16: 2**-7, F16: 2**-10, F32: 1e-5}


@pytest.fixture(scope="module")
def kernel(twin_cache):
    return Kernel("kda_chunk", twin_cache)


def made(batch, tokens, heads, key, value, dtype=BF16, counts=None, before=None, steep=3.0):
    counts = torch.randint(0, tokens + 1, (batch,)) if counts is None else torch.tensor(counts)
    before = torch.randint(0, 2, (batch,)) * 5 if before is None else torch.tensor(before)
    q, k = (F.normalize(torch.randn(batch, tokens, heads, key), dim=-1).to(dtype) for _ in range(2))
    return {
        "q": q,
        "k": k,
        "v": torch.randn(batch, tokens, heads, value).to(dtype),
        "decay": -steep * torch.rand(batch, tokens, heads, key),
        "beta": torch.rand(batch, tokens, heads),
        "memory": torch.randn(batch + 2, heads, value, key),
        "slots": torch.randperm(batch + 2)[:batch].to(torch.int32),
        "lengths": before + counts,
        "counts": counts,
    }


def compare(run, values, scale):
    o, memory = ops.kda_chunk(**values, scale=scale)
    size = max(1e-3, o.float().abs().max().item())
    torch.testing.assert_close(run.outputs["o"].float(), o.float(), rtol=OUTPUT[o.dtype], atol=STATE * size)
    error = (run.outputs["memory"] - memory).abs().max() / memory.abs().max()
    assert error <= STATE


# every combination is a library to build: other types on one chip
@pytest.mark.parametrize("arch, dtype", [(2201, BF16), (3510, BF16), (2201, F32)], ids=str)
@pytest.mark.parametrize(
    "batch, tokens, heads, key, value",
    [(1, 1, 1, 128, 128), (2, 9, 12, 128, 128), (3, 70, 2, 16, 48), (33, 3, 1, 32, 32), (1, 5, 1, 256, 256)],
    ids=str,
)
def test_it_is_the_references(batch, tokens, heads, key, value, dtype, arch, kernel):
    values = made(batch, tokens, heads, key, value, dtype)
    compare(kernel.run(values, {"scale": key**-0.5}, arch=arch), values, key**-0.5)


@pytest.mark.parametrize("tokens", [15, 16, 17, 63, 64, 65, 127, 128, 129, 257, 700])
def test_rows_of_any_length_are_the_references(tokens, kernel):
    values = made(1, tokens, 2, 128, 32, counts=[tokens], before=[3])
    compare(kernel.run(values, {"scale": 0.1}), values, 0.1)


def test_packed_rows_are_the_references(kernel):
    """Rows of no tokens, of one, of some, that start and that go on."""
    counts, before = [0, 1, 130, 0, 64, 17, 200], [0, 4, 0, 7, 1, 0, 300]
    values = made(7, 200, 3, 32, 48, counts=counts, before=before)
    values["memory"][values["slots"][0].long()] = math.nan  # it starts, and has nothing yet: zeros
    compare(kernel.run(values, {"scale": 0.3}, arch=3510), values, 0.3)


@pytest.mark.heavy
@pytest.mark.parametrize("seed", range(40))
def test_random_packs_are_the_references(seed, kernel):
    """Any rows, heads, lengths, widths, decays and numbers of cores, on either chip."""
    pick = random.Random(seed)
    batch, heads, tokens = pick.choice([1, 2, 5, 33]), pick.randint(1, 12), pick.randint(1, 700)
    key, value = pick.choice([(128, 128), (16, 16), (48, 80), (256, 256), (128, 32), (64, 256), (256, 16)])
    tokens = max(1, min(tokens, 60_000_000 // (batch * heads * key * value)))
    dtype, steep = pick.choice([BF16, F16, F32]), pick.choice([0.1, 3.0, 80.0])
    values = made(batch, tokens, heads, key, value, dtype, steep=steep)
    run = kernel.run(values, {"scale": key**-0.5}, arch=pick.choice([*ARCHES]), cores=pick.choice([None, 2, 8]))
    compare(run, values, key**-0.5)


@pytest.mark.parametrize("steep", [0.0, 1e-3, 80.0, 1000.0], ids=str)
def test_any_decay_gives_numbers(steep, kernel):
    values = made(2, 140, 2, 32, 32, F16, counts=[140, 33], steep=steep)
    compare(kernel.run(values, {"scale": 1.0}), values, 1.0)


def test_a_token_that_forgets_all_does_not_blur_those_after_it(kernel):
    """Differences of summed decays would lose what small decays say beside large ones: exponentials are multiplied."""
    values = made(1, 64, 2, 32, 32, F32, counts=[64], before=[5], steep=1.0)
    values["decay"][:, ::5] = -90.0
    values["decay"][:, 1::5] *= 1e-4
    compare(kernel.run(values, {"scale": 1.0}), values, 1.0)


def test_padding_and_stale_slots_do_not_matter(kernel):
    values = made(3, 6, 2, 32, 32, counts=[6, 0, 2], before=[0, 9, 18])
    first = kernel.run(values, {"scale": 1.0}).outputs
    dirty = {n: t.clone() for n, t in values.items()}
    for name in ("q", "k", "v", "decay", "beta"):
        dirty[name][1] = dirty[name][2, 2:] = math.nan
    stale = sorted({0, 1, 2, 3, 4} - set(values["slots"][1:].tolist()))  # the first row starts: nothing is read
    dirty["memory"][stale] = math.nan
    second = kernel.run(dirty, {"scale": 1.0}).outputs
    assert torch.equal(first["o"], second["o"]) and not first["o"][2, 2:].any()
    rows = values["slots"].long()
    assert torch.equal(first["memory"][rows], second["memory"][rows])


def test_many_tokens_are_as_many_steps(kernel, twin_cache):
    values = made(1, 6, 2, 32, 32, F32, counts=[6], before=[1])
    step, memory, outs = Kernel("kda_step", twin_cache), values["memory"], []
    for i in range(6):
        token = {n: values[n][:, i : i + 1].contiguous() for n in ("q", "k", "v", "decay", "beta")}
        ran = step.run(token | {"memory": memory, "slots": values["slots"]}, {"scale": 0.5}).outputs
        memory = ran["memory"]
        outs.append(ran["o"])
    run = kernel.run(values, {"scale": 0.5}).outputs
    for got, want in ((run["o"], torch.cat(outs, 1)), (run["memory"], memory)):
        torch.testing.assert_close(got, want, rtol=STATE, atol=STATE * want.abs().max().item())


@pytest.mark.parametrize("name", ["q", "k", "v", "decay", "beta", "memory", "slots", "lengths", "counts", "scale"])
def test_every_input_matters(name, kernel):
    values, scale = made(2, 5, 2, 32, 32, counts=[5, 3], before=[4, 6]), 1.0
    first = kernel.run(values, {"scale": scale}).outputs
    changed = {"slots": values["slots"].flip(0), "lengths": values["counts"], "counts": values["counts"] - 1}
    if name == "scale":
        scale = 2.0
    else:
        values[name] = changed.get(name, values.get(name) * 1.5)
    second = kernel.run(values, {"scale": scale}).outputs
    assert any(not torch.equal(first[n], second[n]) for n in first)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("batch, tokens, heads", [(6, 16, 12), (1, 128, 3), (1, 300, 1)], ids=str)
def test_tensors_are_moved_once(batch, tokens, heads, arch, kernel):
    values = made(batch, tokens, heads, 128, 128, counts=[tokens] * batch, before=[1] * batch)
    run = kernel.run(values, {"scale": 1.0}, arch=arch)
    least = sum(values[n].nbytes for n in ("q", "k", "v", "v", "decay", "beta"))
    least += 2 * batch * heads * 128 * 128 * 4
    assert 1 <= run.counters.bytes / least <= 1.01
    assert run.cores == min(batch * heads, ARCHES[arch].cores // 2)


def test_products_are_the_cubes(kernel):
    """Fractals of the Cube, counted by hand for two chunks of 64 tokens that go on; a vector core has rows of pairs."""
    run = kernel.run(made(1, 128, 1, 128, 128, counts=[128], before=[1]), {"scale": 1.0}).counters
    links = sum(2 * rows for rows in (1, 2, 3)) * 16
    state = 4 * 8 * 8 + 2 * 4 * 8 * 16 + 2 * 4 * 8 * 8 + 8 * 8 * 2 + 8 * 8 * 8
    assert run.cube == (True, False, False) and sum(run.products) == 2 * (links + state)
    assert run.products[1:] == (0, 0) and run.repeats[0] == 0
    assert max(run.repeats) < 250 * 64  # the recurrence takes about 1,500 of a token


def test_the_same_run_is_the_same(kernel):
    """Cores run at once, but always in the same order."""
    values = made(3, 150, 2, 32, 32)
    first, second = (kernel.run(values, {"scale": 1.0}) for _ in range(2))
    assert first.counters == second.counters and torch.equal(first.outputs["o"], second.outputs["o"])


@pytest.mark.parametrize("change", [{"key": 24}, {"value": 8}], ids=str)
def test_sizes_the_kernel_does_not_claim_are_refused(change, kernel):
    sizes = {"batch": 1, "tokens": 2, "heads": 1, "key": 32, "value": 32} | change
    with pytest.raises(KernelError, match="KdaChunk: tiling refuses q"):
        kernel.run(made(**sizes), {"scale": 1.0})
