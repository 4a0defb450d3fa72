"""ResidualNormGate on the twin is a sum and the references `rms_norm` and `sigmoid_gate`, of what is given."""

import pytest
import torch

from kimi_graph import ops
from kimi_graph.errors import KernelError
from kimi_graph.ops.twin import ARCHES, Kernel

# The output is rounded once. Where two float32 results lie on both sides of a tie, they round one last place apart.
OUTPUT = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-5}
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
PARTS = ("residual", "weight", "gate")


@pytest.fixture(scope="module")
def kernel(twin_cache):
    return Kernel("residual_norm_gate", twin_cache)


def made(shape, parts=PARTS, dtype=BF16, weight=BF16):
    rows = {name: (3 * torch.randn(*shape)).to(dtype) for name in ("x", "residual", "gate")}
    values = rows | {"weight": torch.randn(shape[-1]).to(weight)}
    return {name: v for name, v in values.items() if name in ("x", *parts)}


def compare(run, values, eps=1e-5):
    y, dtype = values["x"].float(), values["x"].dtype
    if "residual" in values:
        total = (y + values["residual"].float()).to(dtype)
        assert torch.equal(run.outputs["sum"], total)
        y = total.float()
    else:
        assert run.outputs["sum"].shape == (0,)
    if "weight" in values:
        y = ops.rms_norm(y, values["weight"].float(), eps)
    if "gate" in values:
        y = ops.sigmoid_gate(y, values["gate"].float())
    torch.testing.assert_close(run.outputs["y"].float(), y.to(dtype).float(), rtol=OUTPUT[dtype], atol=1e-6)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("parts", [PARTS, ("residual", "weight"), ("weight", "gate")], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 128), (33, 1, 2304), (2, 350, 80), (5, 16), (3, 7168)], ids=str)
def test_it_is_the_references(shape, parts, arch, kernel):
    values = made(shape, parts)
    compare(kernel.run(values, {"eps": 1e-5}, arch=arch), values)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("shape", [(1,), (33, 7), (1, 1, 12, 128), (2, 99, 3, 128), (512, 1001)], ids=str)
def test_a_gate_alone_takes_any_shape(shape, arch, kernel):
    values = made(shape, ("gate",))
    run = kernel.run(values, arch=arch)
    compare(run, values)
    assert run.counters.bytes == 3 * values["x"].nbytes


@pytest.mark.parametrize("dtype, weight", [(BF16, F32), (F16, F32), (F16, F16), (F32, F32)], ids=str)
def test_other_types_work_too(dtype, weight, kernel):
    values = made((9, 112), dtype=dtype, weight=weight)
    compare(kernel.run(values, {"eps": 1e-3}), values, 1e-3)


def test_gates_of_any_size_give_numbers(kernel):
    values = made((4, 32)) | {"gate": torch.linspace(-3e4, 3e4, 128).view(4, 32).to(BF16)}
    compare(kernel.run(values, {"eps": 1e-5}), values)


@pytest.mark.parametrize("name", ["x", *PARTS, "eps"])
def test_every_input_matters(name, kernel):
    values, eps = made((4, 32)), 1e-5
    first = kernel.run(values, {"eps": eps}).outputs["y"]
    if name == "eps":
        eps = 10.0
    else:
        values[name] = values[name] + 1
    assert not torch.equal(first, kernel.run(values, {"eps": eps}).outputs["y"])


@pytest.mark.parametrize("arch", ARCHES)
def test_rows_are_read_and_written_once(arch, kernel):
    values = made((133, 512))
    run = kernel.run(values, {"eps": 1e-5}, arch=arch)
    assert run.counters.bytes == 5 * values["x"].nbytes + run.cores * values["weight"].nbytes


@pytest.mark.parametrize("shape, parts", [((2, 24), PARTS), ((2, 9808), PARTS), ((2, 32), ())], ids=str)
def test_what_the_kernel_does_not_claim_is_refused(shape, parts, kernel):
    with pytest.raises(KernelError, match="ResidualNormGate: tiling refuses x"):
        kernel.run(made(shape, parts), {"eps": 1e-5})


@pytest.mark.parametrize("name", PARTS)
def test_shapes_have_to_agree(name, kernel):
    values = made((4, 32))
    values[name] = values[name][: len(values[name]) // 2].contiguous()
    with pytest.raises(KernelError, match="ResidualNormGate: shape inference refuses x"):
        kernel.run(values, {"eps": 1e-5})
