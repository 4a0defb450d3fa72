"""SituMulQuant on the twin is the reference `situ_mul`, then each row over its largest value / 127, rounded to int8."""

import pytest
import torch

from kimi_graph import ops
from kimi_graph.errors import KernelError
from kimi_graph.ops.twin import ARCHES, Kernel

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SITU = {"beta": 4.0, "linear_beta": 25.0}


@pytest.fixture(scope="module")
def kernel(twin_cache):
    return Kernel("situ_mul_quant", twin_cache)


def made(shape, dtype=BF16):
    return {"gate": (6 * torch.randn(shape)).to(dtype), "up": (20 * torch.randn(shape)).to(dtype)}


def compare(run, values):
    """Of the float32 SiTU; a number beside a tie may be rounded to the other side, so one apart, and few are."""
    y, scale = run.outputs["y"], run.outputs["scale"]
    wide = ops.situ_mul(values["gate"].float(), values["up"].float(), **SITU)
    wanted = wide.abs().amax(-1) / 127
    torch.testing.assert_close(scale, wanted, rtol=1e-5, atol=1e-7)
    exact = wide / wanted[..., None]
    assert (y.float() - exact).abs().max() <= 0.5 + 1e-3
    assert (y.float() != exact.round()).float().mean() < 1e-3 + 2 / y.numel()


# every combination is a library to build: other types on one chip
@pytest.mark.parametrize("arch, dtype", [(2201, BF16), (3510, BF16), (2201, F16), (2201, F32)], ids=str)
@pytest.mark.parametrize("shape", [(1, 16), (33, 48), (1, 1, 3072), (2, 100, 96), (130, 192)], ids=str)
def test_it_is_the_quantised_reference(shape, dtype, arch, kernel):
    values = made(shape, dtype)
    compare(kernel.run(values, SITU, arch=arch), values)


def test_the_largest_value_of_a_row_becomes_127_and_ties_go_to_even(kernel):
    """Gates this large give 4, so rows are 100 tanh(up / 25)."""
    share = torch.tensor([127.0, 126.5, 125.5, -127.0, 0.0, 63.5, -2.5, 1.5]) / 127
    values = {"gate": torch.full((1, 16), 100.0), "up": 25 * torch.atanh(0.5 * share.repeat(2)[None])}
    run = kernel.run(values, SITU)
    assert run.outputs["y"][0, [0, 3, 4]].tolist() == [127, -127, 0]
    torch.testing.assert_close(run.outputs["scale"], torch.tensor([50 / 127]), rtol=1e-5, atol=0)


def test_rows_of_zeros_are_zeros_with_the_scale_0(kernel):
    values = made((3, 32)) | {"up": torch.zeros(3, 32).to(BF16)}
    run = kernel.run(values, SITU)
    assert not run.outputs["y"].any() and run.outputs["scale"].abs().max() < 1e-6


@pytest.mark.parametrize("name", ["gate", "up", "beta", "linear_beta"])
def test_every_input_matters(name, kernel):
    values, attrs = made((2, 64)), dict(SITU)
    first = kernel.run(values, attrs).outputs
    if name in values:
        values[name] = values[name].flip(-1)
    else:
        attrs[name] *= 1.5
    second = kernel.run(values, attrs).outputs
    assert not torch.equal(first["y"], second["y"]) or not torch.equal(first["scale"], second["scale"])


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("shape", [(1, 3072), (33, 3072), (512, 96)], ids=str)
def test_nothing_is_moved_twice(shape, arch, kernel):
    values = made(shape)
    assert kernel.run(values, SITU, arch=arch).counters.bytes == 5 * values["gate"].numel() + 4 * shape[0]


@pytest.mark.parametrize("width, attrs", [(24, {}), (7552, {}), (32, {"beta": 0.0}), (32, {"linear_beta": 0.0})])
def test_what_the_kernel_does_not_claim_is_refused(width, attrs, kernel):
    with pytest.raises(KernelError, match="SituMulQuant: tiling refuses gate"):
        kernel.run(made((2, width)), SITU | attrs)


def test_shapes_have_to_agree(kernel):
    values = made((4, 32)) | {"up": torch.randn(4, 16).to(BF16)}
    with pytest.raises(KernelError, match="SituMulQuant: shape inference refuses gate"):
        kernel.run(values, SITU)
