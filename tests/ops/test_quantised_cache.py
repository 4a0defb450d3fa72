"""Rows of a cache in 8 bits: where what lies, how far rounding goes, and that nothing is rounded in a wider pool."""

import pytest
import torch

from kimi_graph import ops
from kimi_graph.ops.quantised_cache import LARGEST, TILE, pack_rows, quantise, row_width, unpack_rows

EIGHT = sorted(LARGEST, key=str)
L, R = 512, 64
TABLE = torch.tensor([[2, 1]], dtype=torch.int32)


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def half(*shape: int) -> torch.Tensor:
    return rand(*shape).to(torch.bfloat16)


def test_a_row_is_latents_rope_channels_and_scales_by_the_byte():
    latent, rope = half(3, L), half(3, R)
    rows = pack_rows(latent, rope, torch.int8)
    assert rows.shape == (3, 656) and row_width(L, R) == 656
    scales = rows[:, 640:].contiguous().view(torch.float32)
    torch.testing.assert_close(scales, latent.float().view(3, 4, TILE).abs().amax(-1) / 127)
    assert torch.equal(rows[:, 512:640].contiguous().view(torch.bfloat16), rope)
    whole = (latent.float().view(3, 4, TILE) / scales[..., None]).round()
    assert torch.equal(rows[:, :512].view(3, 4, TILE).float(), whole)
    assert whole.abs().amax() == 127


@pytest.mark.parametrize("dtype", EIGHT, ids=str)
def test_rounding_is_half_a_step_of_a_tile_at_most(dtype):
    latent, rope = half(5, L) * torch.logspace(-3, 3, L), half(5, R)
    found, turned = unpack_rows(pack_rows(latent, rope, dtype), L)
    assert torch.equal(turned, rope.float())
    largest = latent.float().view(5, -1, TILE).abs().amax(-1, keepdim=True).expand(-1, -1, TILE).reshape(5, L)
    # int8 has equal steps; a float with 3 bits of mantissa is off by 2^-4 of a number, or by half its smallest step
    step = largest / 127 if dtype == torch.int8 else torch.maximum(latent.float().abs() / 8, largest / 448 * 2**-9)
    assert bool(((found - latent.float()).abs() <= 0.5001 * step).all())


@pytest.mark.parametrize("dtype, least, most", [(torch.int8, 0.005, 0.0068), (torch.float8_e4m3fn, 0.022, 0.0275)])
def test_normal_numbers_lose_what_verify_allows_for(dtype, least, most):
    latent = rand(200, L)
    found, _ = unpack_rows(pack_rows(latent, half(200, R), dtype), L)
    assert least < float((found - latent).norm() / latent.norm()) < most


def test_a_pool_of_more_bits_is_not_rounded():
    latent, rope = rand(3, L), rand(3, R)
    rows = pack_rows(latent, rope, torch.float64)
    assert rows.shape == (3, 656) and rows.dtype == torch.float64
    found, turned = unpack_rows(rows, L)
    torch.testing.assert_close(found, latent, rtol=1e-15, atol=0)
    assert torch.equal(turned, rope)
    assert torch.equal(rows[:, 512:640:2], rope) and not rows[:, 513:640:2].any()


@pytest.mark.parametrize("dtype", [*EIGHT, torch.float64], ids=str)
def test_a_tile_of_zeros_stays_zero(dtype):
    latent = half(2, L)
    latent[:, TILE : 2 * TILE] = 0
    found, _ = unpack_rows(pack_rows(latent, half(2, R), dtype), L)
    assert not found[:, TILE : 2 * TILE].any() and bool(found.isfinite().all())
    made, scale = quantise(torch.zeros(2, 4), dtype)
    assert not made.double().any() and not scale.any()


@pytest.mark.parametrize("dtype", EIGHT, ids=str)
def test_rows_are_written_where_the_slots_say_and_nowhere_else(dtype):
    pool = pack_rows(half(3, 4, L), half(3, 4, R), dtype)
    latent, rope, slots = half(1, 2, L), half(1, 2, R), torch.tensor([9, 6])
    after = ops.quantised_cache_write(latent, rope, pool, slots)
    flat, before = (x.view(torch.int8).flatten(0, 1) for x in (after, pool))
    assert torch.equal(flat[slots], pack_rows(latent, rope, dtype)[0].view(torch.int8))
    others = [i for i in range(12) if i not in (9, 6)]
    assert torch.equal(flat[others], before[others])


@pytest.mark.parametrize("dtype", EIGHT, ids=str)
def test_attention_is_that_to_the_numbers_the_rows_stand_for(dtype):
    latent, rope = half(3, 4, L), half(3, 4, R)
    pool = pack_rows(latent, rope, dtype)
    queries = half(1, 2, 3, L), half(1, 2, 3, R)
    selected = torch.tensor([[[0, 2, -1], [5, 1, 0]]], dtype=torch.int32)
    rows = (selected, TABLE, torch.tensor([6]), torch.tensor([2]), 0.1)
    read = unpack_rows(pool, L)[0].bfloat16()
    assert torch.equal(
        ops.quantised_sparse_attention(*queries, pool, *rows), ops.sparse_attention(*queries, read, rope, *rows)
    )


@pytest.mark.parametrize("dtype", EIGHT, ids=str)
def test_keys_that_differ_by_more_than_rounding_are_selected_as_without_it(dtype):
    aim = torch.nn.functional.normalize(rand(128), dim=0).float()
    keys = aim * torch.arange(1, 13).view(3, 4, 1)  # each further along than the one before
    pool, scales = quantise(keys, dtype)
    rows = (TABLE, torch.tensor([8]), torch.tensor([1]), 3)
    q, weights = aim.view(1, 1, 1, 128), torch.ones(1, 1, 1)
    found = ops.quantised_select_keys(q, weights, pool, scales, *rows)
    assert found.tolist() == [[[3, 2, 1]]]  # page 2 comes first in the table, and holds the longest keys
    assert torch.equal(found, ops.select_keys(q, weights, keys, *rows))
