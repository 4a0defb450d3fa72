"""KdaChunk on the twin is the reference `kda_chunk`: rows that start, go on, are padded or unused; short and long."""

import math

import pytest
import torch
import torch.nn.functional as F

from kimi_graph import ops
from kimi_graph.errors import KernelError
from kimi_graph.ops.twin import ARCHES, Kernel

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
STATE = 1e-5  # of scale: float32 throughout; the reference multiplies matrices of a chunk, this goes token by token
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


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize(
    "batch, tokens, heads, key, value",
    [(1, 1, 1, 128, 128), (2, 9, 12, 128, 128), (3, 70, 2, 16, 48), (33, 3, 1, 32, 32), (1, 5, 1, 256, 256)],
    ids=str,
)
def test_it_is_the_references(batch, tokens, heads, key, value, dtype, arch, kernel):
    values = made(batch, tokens, heads, key, value, dtype)
    compare(kernel.run(values, {"scale": key**-0.5}, arch=arch), values, key**-0.5)


def test_a_long_row_is_the_references(kernel):
    values = made(1, 700, 2, 128, 32, counts=[700], before=[3])
    compare(kernel.run(values, {"scale": 0.1}), values, 0.1)


@pytest.mark.parametrize("steep", [0.0, 1e-3, 80.0], ids=str)
def test_any_decay_gives_numbers(steep, kernel):
    values = made(2, 40, 2, 32, 32, F16, counts=[40, 33], steep=steep)
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
    assert torch.equal(run["o"], torch.cat(outs, 1)) and torch.equal(run["memory"], memory)


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
def test_with_a_state_for_every_core_nothing_is_moved_twice(arch, kernel):
    values = made(6, 16, 12, 128, 128, counts=[16] * 6, before=[1] * 6)
    run = kernel.run(values, {"scale": 1.0}, arch=arch)
    tokens = sum(values[n].nbytes for n in ("q", "k", "v", "v", "decay", "beta"))
    states = 2 * 6 * 12 * 128 * 128 * 4
    assert 1 <= run.counters.bytes / (tokens + states) <= 1.01


def test_states_are_split_while_cores_idle(kernel):
    values = made(1, 4, 3, 128, 128, counts=[4])
    run = kernel.run(values, {"scale": 1.0})
    assert run.cores == 3 * 8
    tokens = sum(values[n].nbytes for n in ("q", "k", "v", "v", "decay", "beta"))
    states = (2 if values["lengths"] > 4 else 1) * 3 * 128 * 128 * 4
    assert run.counters.touched <= 1.01 * (tokens + states)


@pytest.mark.parametrize("change", [{"key": 24}, {"value": 8}], ids=str)
def test_sizes_the_kernel_does_not_claim_are_refused(change, kernel):
    sizes = {"batch": 1, "tokens": 2, "heads": 1, "key": 32, "value": 32} | change
    with pytest.raises(KernelError, match="KdaChunk: tiling refuses q"):
        kernel.run(made(**sizes), {"scale": 1.0})
