"""GatedRmsNorm on the twin is the reference `gated_rms_norm`."""

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
    return Kernel("gated_rms_norm", twin_cache)


def made(shape, dtype=BF16, weight=F32):
    x, gate = (3 * torch.randn(*shape) for _ in range(2))
    return {"x": x.to(dtype), "gate": gate.to(dtype), "weight": torch.randn(shape[-1]).to(weight)}


def compare(run, values, eps):
    y = ops.gated_rms_norm(**values, eps=eps)
    torch.testing.assert_close(run.outputs["y"].float(), y.float(), rtol=OUTPUT[y.dtype], atol=1e-6)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("dtype, weight", [(BF16, F32), (F32, F32)], ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 128), (1, 1, 12, 128), (33, 1, 12, 128), (2, 700, 3, 128), (5, 16), (7, 48), (3, 512)], ids=str
)
def test_it_is_the_references(shape, dtype, weight, arch, kernel):
    values = made(shape, dtype, weight)
    compare(kernel.run(values, {"eps": 1e-5}, arch=arch), values, 1e-5)


@pytest.mark.parametrize("dtype, weight", [(BF16, BF16), (F16, F32)], ids=str)
def test_other_types_work_too(dtype, weight, kernel):
    values = made((9, 64), dtype, weight)
    compare(kernel.run(values, {"eps": 1e-6}), values, 1e-6)


def test_gates_of_any_size_give_numbers(kernel):
    values = made((4, 32)) | {"gate": torch.linspace(-3e4, 3e4, 128).view(4, 32).to(BF16)}
    compare(kernel.run(values, {"eps": 1e-5}), values, 1e-5)


@pytest.mark.parametrize("name", ["x", "gate", "weight", "eps"])
def test_every_input_matters(name, kernel):
    values, eps = made((4, 32)), 1e-5
    first = kernel.run(values, {"eps": eps}).outputs["y"]
    if name == "eps":
        eps = 10.0
    else:  # the norm does not see a factor of x
        values[name] = values[name] + 1
    assert not torch.equal(first, kernel.run(values, {"eps": eps}).outputs["y"])


def test_rows_are_read_and_written_once(kernel):
    values = made((33, 1, 12, 128))
    run = kernel.run(values, {"eps": 1e-5})
    assert run.counters.bytes == 3 * values["x"].nbytes + run.cores * values["weight"].nbytes


@pytest.mark.parametrize("width", [8, 24, 2048])
def test_widths_the_kernel_does_not_claim_are_refused(width, kernel):
    with pytest.raises(KernelError, match="GatedRmsNorm: tiling refuses x"):
        kernel.run(made((2, width)), {"eps": 1e-5})
