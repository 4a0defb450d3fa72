"""ShortConv on the twin is the reference `short_conv`: rows that start, go on, are padded or unused; short and long."""

import math

import pytest
import torch

from kimi_graph import ops
from kimi_graph.errors import KernelError
from kimi_graph.ops.twin import ARCHES, Kernel

# The output is rounded once. Where two float32 results lie on both sides of a tie, they round one last place apart.
OUTPUT = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-5}
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(scope="module")
def kernel(twin_cache):
    return Kernel("short_conv", twin_cache)


def made(batch, tokens, heads, key, dtype=BF16, weight=F32, counts=None, before=None):
    """`before`, `counts`: tokens a row has seen and brings; by default some start, some go on, some are short."""
    counts = torch.randint(0, tokens + 1, (batch,)) if counts is None else torch.tensor(counts)
    before = torch.randint(0, 3, (batch,)) if before is None else torch.tensor(before)
    return {
        "x": torch.randn(batch, tokens, heads, key).to(dtype),
        "weight": torch.randn(heads, key, 4).to(weight),
        "window": torch.randn(batch + 2, heads, key, 3).to(dtype),
        "slots": torch.randperm(batch + 2)[:batch].to(torch.int32),
        "lengths": before + counts,
        "counts": counts,
    }


def compare(run, values):
    y, window = ops.short_conv(**values)
    rtol = OUTPUT[y.dtype]
    torch.testing.assert_close(run.outputs["y"].float(), y.float(), rtol=rtol, atol=1e-5)  # float32 sums of order 1
    assert torch.equal(run.outputs["window"], window)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("dtype, weight", [(BF16, F32), (F32, F32)], ids=str)
@pytest.mark.parametrize(
    "batch, tokens, heads, key",
    [
        (1, 1, 1, 128),
        (33, 1, 12, 128),
        (5, 1, 3, 16),
        (2, 3, 2, 48),
        (33, 4, 3, 128),
        (3, 64, 1, 80),
        (2, 65, 2, 128),
        (1, 700, 3, 128),
    ],
    ids=str,
)
def test_it_is_the_references(batch, tokens, heads, key, dtype, weight, arch, kernel):
    values = made(batch, tokens, heads, key, dtype, weight)
    compare(kernel.run(values, arch=arch), values)


@pytest.mark.parametrize("dtype, weight", [(BF16, BF16), (F16, F32), (F16, F16)], ids=str)
def test_other_types_work_too(dtype, weight, kernel):
    values = made(3, 5, 2, 32, dtype, weight)
    compare(kernel.run(values), values)


@pytest.mark.parametrize("tokens", [1, 2, 70, 200])
def test_every_count_leaves_the_right_window(tokens, kernel):
    counts = sorted({0, 1, 2, 3, 63, 64, 65, 66, 67, 68, tokens - 1, tokens} & set(range(tokens + 1)))
    for start in (0, 7):
        values = made(len(counts), tokens, 1, 16, counts=counts, before=[start] * len(counts))
        compare(kernel.run(values), values)


def test_padding_and_stale_slots_do_not_matter(kernel):
    values = made(3, 6, 2, 32, counts=[6, 0, 2], before=[0, 9, 18])
    first = kernel.run(values).outputs
    dirty, window = values["x"].clone(), values["window"].clone()
    dirty[1] = dirty[2, 2:] = math.nan
    stale = sorted({0, 1, 2, 3, 4} - set(values["slots"][1:].tolist()))  # the first row starts: nothing is read
    window[stale] = math.nan
    second = kernel.run(values | {"x": dirty, "window": window}).outputs
    assert torch.equal(first["y"][0], second["y"][0]) and torch.equal(first["y"][2, :2], second["y"][2, :2])
    rows = values["slots"].long()
    assert torch.equal(first["window"][rows], second["window"][rows])


def test_slots_that_are_nobodys_may_be_met_by_many(kernel):
    values = made(40, 1, 1, 64) | {"slots": torch.zeros(40, dtype=torch.int32)}
    with pytest.raises(KernelError, match=r"race for byte|meets window that pipe MTE3 wrote"):
        kernel.run(values, cores=2)
    kernel.run(values, cores=2, nobody={"window": 1})


@pytest.mark.parametrize("name", ["x", "weight", "window", "slots", "lengths", "counts"])
def test_every_input_matters(name, kernel):
    values = made(2, 5, 2, 32, counts=[5, 3], before=[4, 6])
    first = kernel.run(values).outputs
    changed = {"slots": values["slots"].flip(0), "lengths": values["counts"], "counts": values["counts"] - 1}
    second = kernel.run(values | {name: changed.get(name, values[name] * 1.5)}).outputs
    assert any(not torch.equal(first[n], second[n]) for n in first)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize(
    "batch, tokens, heads", [(1, 1, 12), (33, 1, 12), (33, 1, 3), (1, 512, 12), (2, 700, 3)], ids=str
)
def test_few_bytes_are_moved_more_than_once(batch, tokens, heads, arch, kernel):
    values = made(batch, tokens, heads, 128, counts=[tokens] * batch, before=[5] * batch)
    run = kernel.run(values, arch=arch)
    states = 2 * batch * heads * 128 * 3 * 2
    rest = 2 * values["x"].nbytes + values["weight"].nbytes + batch * 20
    assert 1 <= run.counters.bytes / (states + rest) <= 1.05


@pytest.mark.parametrize("change", [{"key": 24}, {"heads": 0}], ids=str)
def test_sizes_the_kernel_does_not_claim_are_refused(change, kernel):
    sizes = {"batch": 1, "tokens": 1, "heads": 1, "key": 32} | change
    with pytest.raises(KernelError, match="ShortConv: tiling refuses x"):
        kernel.run(made(**sizes))


def test_other_widths_are_refused(kernel):
    values = made(1, 1, 1, 32)
    with pytest.raises(KernelError, match="ShortConv: shape inference refuses"):
        kernel.run(values | {"weight": torch.randn(1, 32, 3)})
