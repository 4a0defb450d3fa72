"""SituMul on the twin is the reference `situ_mul`."""

import pytest
import torch

from kimi_graph import ops
from kimi_graph.errors import KernelError
from kimi_graph.ops.twin import ARCHES, Kernel

# The output is rounded once. Where two float32 results lie on both sides of a tie, they round one last place apart.
OUTPUT = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-5}
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SITU = {"beta": 4.0, "linear_beta": 25.0}


@pytest.fixture(scope="module")
def kernel(twin_cache):
    return Kernel("situ_mul", twin_cache)


def compare(run, values):
    y = ops.situ_mul(**values, **SITU)
    # each tanh is wrong by some 1e-7 of its bound, and is multiplied by the other factor, at most 25
    torch.testing.assert_close(run.outputs["y"].float(), y.float(), rtol=OUTPUT[y.dtype], atol=3e-5)


# every combination is a library to build: other types on one chip
@pytest.mark.parametrize("arch, dtype", [(2201, BF16), (3510, BF16), (2201, F16), (2201, F32)], ids=str)
@pytest.mark.parametrize("shape", [(1,), (33, 7), (1, 1, 3072), (5, 1000), (64, 3072)], ids=str)
def test_it_is_the_references(shape, dtype, arch, kernel):
    values = {"gate": (6 * torch.randn(shape)).to(dtype), "up": (20 * torch.randn(shape)).to(dtype)}
    compare(kernel.run(values, SITU, arch=arch), values)


# printed digits; bfloat16 as the public case says
@pytest.mark.parametrize("arch, dtype, rtol", [(2201, F32, 1e-5), (2201, BF16, 1e-2), (3510, BF16, 1e-2)], ids=str)
def test_known_values_come_out(arch, dtype, rtol, kernel):
    gate, up = (torch.tensor(v, dtype=dtype) for v in ([1.0, 4.0, 100.0, -100.0], [1.0, 25.0, 1000.0, 5.0]))
    y = kernel.run({"gate": gate, "up": up}, SITU, arch=arch).outputs["y"]
    torch.testing.assert_close(y.float(), torch.tensor([0.71582, 56.9593, 100.0, 0.0]), rtol=rtol, atol=1e-6)


def test_values_of_any_size_give_numbers(kernel):
    wide = torch.linspace(-1e38, 1e38, 64)
    values = {"gate": wide, "up": wide.flip(0)}
    compare(kernel.run(values, SITU), values)


@pytest.mark.parametrize("name", ["gate", "up", "beta", "linear_beta"])
def test_every_input_matters(name, kernel):
    values, attrs = {"gate": torch.randn(64), "up": torch.randn(64)}, dict(SITU)
    first = kernel.run(values, attrs).outputs["y"]
    if name in values:
        values[name] = values[name] * 1.5
    else:
        attrs[name] *= 1.5
    assert not torch.equal(first, kernel.run(values, attrs).outputs["y"])


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("shape", [(1, 3072), (33, 3072), (512, 1000)], ids=str)
def test_nothing_is_moved_twice(shape, arch, kernel):
    values = {"gate": torch.randn(shape).to(BF16), "up": torch.randn(shape).to(BF16)}
    assert kernel.run(values, SITU, arch=arch).counters.bytes == 3 * values["gate"].nbytes


@pytest.mark.parametrize("attrs", [{"beta": 0.0}, {"linear_beta": 0.0}], ids=str)
def test_bounds_have_to_be_positive(attrs, kernel):
    with pytest.raises(KernelError, match="SituMul: tiling refuses gate"):
        kernel.run({"gate": torch.randn(4), "up": torch.randn(4)}, SITU | attrs)


def test_shapes_have_to_agree(kernel):
    with pytest.raises(KernelError, match="SituMul: shape inference refuses gate"):
        kernel.run({"gate": torch.randn(4), "up": torch.randn(5)}, SITU)
