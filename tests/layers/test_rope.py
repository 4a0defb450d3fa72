"""Angles against the published numbers, the formula in plain Python, and transformers."""

import math

import pytest
import torch

from kimi_graph.config import RopeConfig, YarnConfig
from kimi_graph.layers import mscale, rope_rows, rope_table, row_batch


def yarn(factor: float, fast: float = 32, slow: float = 1) -> YarnConfig:
    return YarnConfig(factor=factor, original_len=4096, beta_fast=fast, beta_slow=slow, mscale=1, mscale_all=1)


K25 = RopeConfig(theta=50000, interleaved=True, yarn=yarn(64))
K2_0905 = RopeConfig(theta=50000, interleaved=True, yarn=yarn(64, 1, 1))
K2_0711 = RopeConfig(theta=50000, interleaved=True, yarn=yarn(32, 1, 1))
V32 = RopeConfig(theta=10000, interleaved=True, yarn=yarn(40))
GLM = RopeConfig(theta=8e6, interleaved=True)

# fact sheet of models, section 7: low, rate of pair low, rate of pair 31, temperature
PUBLISHED = [
    (K25, 8, 6.687403e-2, 4.382206e-7, 1.415888),
    (K2_0905, 19, 1.62176e-3, 4.382206e-7, 1.415888),
    (K2_0711, 19, 1.62176e-3, 8.764413e-7, 1.346574),
    (V32, 10, 5.623413e-2, 3.333804e-6, 1.368888),
]


@pytest.mark.parametrize("config, low, rate_low, rate_31, temperature", PUBLISHED)
def test_rates_are_the_published_ones(config, low, rate_low, rate_31, temperature):
    rates, multiplier = rope_table(config, 64)
    assert rates[0] == 1
    assert multiplier == 1
    assert float(rates[low]) == pytest.approx(rate_low, rel=1e-6)  # printed digits
    assert float(rates[31]) == pytest.approx(rate_31, rel=1e-6)
    assert mscale(config.yarn.factor, config.yarn.mscale_all) == pytest.approx(temperature, rel=1e-6)


def test_the_softmax_scale_grows_by_the_square_of_the_temperature():
    # public case R3
    assert mscale(40, 1) ** 2 == pytest.approx(1.8739, abs=1e-4)
    assert mscale(64, 1) ** 2 == pytest.approx(2.0047, abs=1e-4)
    assert mscale(1, 1) == mscale(0.5, 1) == 1


def by_formula(config: RopeConfig, pair: int, dims: int) -> float:
    """Rate of a pair, step by step."""
    rate = config.theta ** (-2 * pair / dims)
    if config.yarn is None:
        return rate
    y = config.yarn

    def corr(turns: float) -> float:
        return dims * math.log(y.original_len / (2 * math.pi * turns)) / (2 * math.log(config.theta))

    low, high = max(math.floor(corr(y.beta_fast)), 0), min(math.ceil(corr(y.beta_slow)), dims - 1)
    high = high if high != low else high + 0.001
    ramp = min(max((pair - low) / (high - low), 0), 1)
    return rate / y.factor * ramp + rate * (1 - ramp)


@pytest.mark.parametrize("config", [K25, K2_0905, V32, GLM, RopeConfig(theta=4, interleaved=False, yarn=yarn(8))])
def test_cosine_and_sine_follow_the_formula_at_far_positions(config):
    # public case R3: positions 1, 4,095, 163,839; the last one of a million
    positions = torch.tensor([0, 1, 4095, 163839, 1048575])
    cos, sin = rope_rows(config, 64, positions)
    assert cos.dtype == sin.dtype == torch.float64
    for i, position in enumerate(positions.tolist()):
        for pair in range(32):
            angle = position * by_formula(config, pair, 64)
            # an angle of 10^6 has half an ulp of 6e-11
            assert float(cos[i, pair]) == pytest.approx(math.cos(angle), abs=1e-9)
            assert float(sin[i, pair]) == pytest.approx(math.sin(angle), abs=1e-9)


def test_unequal_temperatures_multiply_cosine_and_sine():
    config = RopeConfig(
        theta=1e4,
        interleaved=True,
        yarn=YarnConfig(factor=40, original_len=4096, beta_fast=32, beta_slow=1, mscale=0.7, mscale_all=1.3),
    )
    wanted = (0.07 * math.log(40) + 1) / (0.13 * math.log(40) + 1)
    cos, sin = rope_rows(config, 64, torch.tensor([0, 3]))
    assert float(cos[0, 0]) == pytest.approx(wanted)
    torch.testing.assert_close(cos**2 + sin**2, torch.full_like(cos, wanted**2))


@pytest.mark.parametrize("config", [K25, K2_0711, V32])
def test_rates_are_those_of_transformers(config):
    pytest.importorskip("transformers")
    from transformers import DeepseekV3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    y = config.yarn
    parameters = {
        "rope_type": "yarn", "rope_theta": config.theta, "factor": y.factor, "beta_fast": y.beta_fast,
        "beta_slow": y.beta_slow, "mscale": y.mscale, "mscale_all_dim": y.mscale_all,
        "original_max_position_embeddings": y.original_len,
    }  # fmt: skip
    theirs = DeepseekV3Config(rope_parameters=parameters, qk_rope_head_dim=64, max_position_embeddings=163840)
    rates, multiplier = ROPE_INIT_FUNCTIONS["yarn"](theirs, "cpu")
    got, ours = rope_table(config, 64)
    torch.testing.assert_close(got.float(), rates, rtol=1e-6, atol=0)  # theirs are computed in float32
    assert ours == multiplier


def test_a_batch_holds_the_rows_of_its_new_tokens():
    batch = row_batch(2, 3, before=4, rope=(GLM, 8))
    cos, sin = rope_rows(GLM, 8, torch.tensor([[4, 5, 6]] * 2))
    assert batch.cos.dtype == torch.float32
    assert torch.equal(batch.cos, cos.float())
    assert torch.equal(batch.sin, sin.float())
    assert torch.equal(row_batch(2, 3, before=4, rope=(GLM, 8), dtype=torch.float64).sin, sin)
    assert row_batch(2, 3).cos is None
