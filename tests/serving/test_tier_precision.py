"""Attention pages in fewer bits: how near they stay, and that nothing else is touched. Needs no engine."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from kimi_graph.serving.tiers.precision import CODES, Layout, bytes_of, layout_of

# Half a step of the code at a run's largest number, and float32's own error: int8 has 127 steps, and fp8 three bits of
# mantissa, so half a step is a sixteenth of a number, or of the smallest normal one (2^-6) in its scale of 448.
STEP = {"int8": lambda x, most: most / 127 / 2, "fp8": lambda x, most: torch.maximum(x.abs() / 16, most * 2**-10 / 448)}


def pages(rows, width, dtype, seed, spread):
    """Numbers whose runs have sizes of their own: `[rows, width]`."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator)
    return (x * 10 ** (spread * torch.randn(rows, width // 64, generator=generator)).repeat_interleave(64, 1)).to(dtype)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(rows=st.integers(1, 5), runs=st.integers(1, 4), seed=st.integers(0, 99), spread=st.sampled_from([0.0, 1.0, 3.0]))
def test_numbers_stay_within_half_a_step(code, dtype, rows, runs, seed, spread):
    x = pages(rows, 64 * runs, dtype, seed, spread)
    layout = Layout([(0, rows)], 64 * runs, 64, dtype, code)
    chunk = x.clone().view(torch.uint8).flatten()
    coded = layout.coded(chunk)
    assert coded.numel() == layout.size < x.numel() * 1.07
    layout.decode(coded, chunk)
    y, wide = chunk.view(dtype).view_as(x).float(), x.float()
    most = wide.view(rows, runs, 64).abs().amax(-1, keepdim=True).expand(-1, -1, 64).reshape(x.shape)
    own = wide.abs() * torch.finfo(dtype).eps  # rounded again to the page's dtype
    assert ((y - wide).abs() <= 1.001 * STEP[code](wide, most) + own).all()


@pytest.mark.parametrize("code", CODES)
def test_zeros_stay_zeros_and_what_is_not_finite_does_not_become_finite(code):
    x = torch.zeros(3, 64)
    x[1, 5], x[2, 6] = float("nan"), float("inf")
    layout, chunk = Layout([(0, 3)], 64, 64, torch.float32, code), x.clone().view(torch.uint8).flatten()
    layout.decode(layout.coded(chunk), chunk)
    y = chunk.view(torch.float32).view(3, 64)
    assert (y[0] == 0).all()
    assert not y[1, 5].isfinite()
    assert not y[2, 6].isfinite()


def test_only_rows_of_the_layout_are_written():
    chunk = torch.arange(4096, dtype=torch.int64).to(torch.uint8)
    layout = Layout([(256, 2), (2048, 1)], 64, 64, torch.float32, "int8")
    there = chunk.clone()
    layout.decode(torch.zeros(layout.size, dtype=torch.uint8), there)
    kept = torch.ones(4096, dtype=torch.bool)
    kept[256 : 256 + 512] = kept[2048 : 2048 + 256] = False
    assert (there[kept] == chunk[kept]).all()
    assert (there[~kept] == 0).all()


def test_groups_with_a_recurrent_layer_have_no_layout():
    groups = {i: ([f"layers.{n}.mixer" for n in names], 16) for i, names in enumerate([(0, 1), (2, 4), (3, 7), (8,)])}
    page = 16 * 96 * 2
    found = layout_of(groups, {3, 4, 7, 8}, 96, bytes_of_rank=2 * page, ranks=2, dtype=torch.bfloat16, code="fp8")
    assert {group: list(layout.pages) for group, layout in found.items()} == {
        2: [(0, 16), (page, 16), (2 * page, 16), (3 * page, 16)],
        3: [(0, 16), (2 * page, 16)],
    }
    assert found[3].run == 32  # what 96 and a run of 64 have in common


def test_bytes_of_shared_memory_are_not_copied():
    memory = bytearray(16)
    bytes_of(memoryview(memory).cast("B", (2, 8)))[1, 3] = 255
    assert memory[11] == 255
