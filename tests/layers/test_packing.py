"""Packed and padded layouts move to right-padded rows and back without a trace."""

import pytest
import torch

from kimi_graph import layers, tree
from kimi_graph.config import KdaConfig, MlaConfig, RopeConfig
from kimi_graph.errors import ConfigError
from kimi_graph.layers import packing

BOUNDS = torch.tensor([0, 3, 3, 10, 11])
MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [0, 1, 0, 1, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]]).bool()


def test_unpacked_rows_are_the_sequences_and_pack_again():
    packed = torch.arange(22).view(1, 11, 2)
    rows, counts = packing.unpack(packed, BOUNDS)
    assert counts.tolist() == [3, 0, 7, 1] and rows.shape == (4, 7, 2)
    for row, count, start in zip(rows, counts, BOUNDS, strict=False):
        assert torch.equal(row[:count], packed[0, start : start + count])
    assert torch.equal(packing.pack(rows, BOUNDS), packed)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64], ids=str)
def test_real_tokens_move_to_the_left_in_order_and_back(dtype):
    x = torch.arange(25).view(5, 5) + 1
    rows, counts = packing.left_to_right(x, MASK.to(dtype))
    assert counts.tolist() == [3, 3, 2, 5, 0]
    assert [row[:count].tolist() for row, count in zip(rows, counts, strict=True)] == [
        x[i, MASK[i]].tolist() for i in range(5)
    ]
    assert torch.equal(packing.right_to_left(rows, MASK.to(dtype)), x * MASK)
    assert torch.equal(packing.right_to_left(rows[..., None], MASK), (x * MASK)[..., None])


@pytest.mark.parametrize("bounds", [[0, 4], [1, 11], [0, 7, 5, 11], [11], [0, 12]], ids=str)
def test_boundaries_that_do_not_cover_the_tokens_are_refused(bounds):
    with pytest.raises(ConfigError, match=r"boundaries that rise from 0 to 11"):
        packing.unpack(torch.zeros(1, 11), torch.tensor(bounds))


def test_a_mask_of_another_shape_is_refused():
    with pytest.raises(ConfigError, match=r"mask has shape \[5, 5\]; the tokens' is \[5, 6\]"):
        packing.left_to_right(torch.zeros(5, 6), MASK)


@pytest.mark.parametrize("kind", ["kda", "mla", "rotated"])
def test_packed_and_padded_sequences_are_the_sequences_alone(kind):
    rope = RopeConfig(theta=10, interleaved=False) if kind == "rotated" else None
    if kind == "kda":
        c = KdaConfig(heads=2, key=6, value=5, conv_width=4, gate_rank=3, stored_rates=(2,))
        specs, layer = layers.kda_specs(c, 10), layers.kda
        state = lambda rows: layers.kda_state_specs(c, rows + 1, torch.float64)  # noqa: E731
    else:
        c = MlaConfig(heads=3, latent=7, key_nope=5, key_rope=4, value=6, scale=1 / 3, rope=rope)
        specs, layer = layers.mla_specs(c, 10), layers.mla
        state = lambda rows: layers.mla_state_specs(c, rows + 1, 8, torch.float64)  # noqa: E731
    p = tree.map(lambda s: 0.5 * torch.randn(s.shape, dtype=torch.float64), specs)

    angles = {} if rope is None else {"rope": (rope, 4), "dtype": torch.float64}

    def run(rows, counts):
        own = torch.arange(1, len(rows) + 1, dtype=torch.int32)
        batch = layers.step_batch(own[:, None], own, torch.zeros_like(counts), counts, rows.shape[1], 8, **angles)
        return layer(p, c, rows, layers.zero_state(state(len(rows)), rows), batch)[0]

    packed = torch.randn(1, 11, 10, dtype=torch.float64)
    y = packing.pack(run(*packing.unpack(packed, BOUNDS)), BOUNDS)
    for start, stop in zip(BOUNDS.tolist(), BOUNDS.tolist()[1:], strict=False):
        if stop > start:
            torch.testing.assert_close(y[:, start:stop], layer(p, c, packed[:, start:stop])[0])

    padded = torch.randn(5, 5, 10, dtype=torch.float64)
    y = packing.right_to_left(run(*packing.left_to_right(padded, MASK)), MASK)
    for row, mask, out in zip(padded, MASK, y, strict=True):
        assert not out[~mask].any()
        if mask.any():
            torch.testing.assert_close(out[mask], layer(p, c, row[mask][None])[0][0])
