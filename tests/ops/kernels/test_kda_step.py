"""KdaStep on the twin is the reference `kda_step`, with and without what comes before it made in the kernel."""

import pytest
import torch
import torch.nn.functional as F

from kimi_graph import ops
from kimi_graph.errors import KernelError
from kimi_graph.ops.twin import ARCHES, Kernel

STATE = 1e-5  # of scale: float32 throughout, the order of sums differs; measured 1e-7
# The output is rounded once. Where two float32 results lie on both sides of a tie, they round one last place apart.
OUTPUT = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-5}


@pytest.fixture(scope="module")
def kernel(twin_cache):
    return Kernel("kda_step", twin_cache)


def made(batch, heads, key, value, dtype=torch.bfloat16):
    """Inputs as the one-step operator takes them: unit q and k, decay and beta made."""
    q, k = (F.normalize(torch.randn(batch, 1, heads, key), dim=-1).to(dtype) for _ in range(2))
    slots = torch.randperm(batch + 2)[:batch].to(torch.int32)
    return {
        "q": q,
        "k": k,
        "v": torch.randn(batch, 1, heads, value).to(dtype),
        "decay": -3 * torch.rand(batch, 1, heads, key),
        "beta": torch.rand(batch, 1, heads),
        "memory": torch.randn(batch + 2, heads, value, key),
        "slots": slots,
    }


def raw(batch, heads, key, value, dtype, gate):
    """Inputs as the projections give them, and what makes the decay of them."""
    values = made(batch, heads, key, value, dtype)
    values |= {name: 3 * torch.randn(batch, 1, heads, key).to(dtype) for name in ("q", "k")}
    values["decay"] = 4 * torch.randn(batch, 1, heads, key).to(gate)
    values["beta"] = 3 * torch.randn(batch, 1, heads).to(gate)
    return values | {"bias": torch.randn(heads, key), "log_rate": torch.randn(heads)}


def reference(values, scale, lower_bound):
    """Norm, gate and beta by their own operators, in float32; then the step."""
    values = dict(values)
    bias, log_rate = values.pop("bias"), values.pop("log_rate")
    values["q"], values["k"] = (ops.l2_norm(values[n].float(), 1e-6) for n in ("q", "k"))
    values["decay"] = ops.kda_gate(values["decay"].float(), bias, log_rate, lower_bound or None)
    values["beta"] = values["beta"].float().sigmoid()
    o, memory = ops.kda_step(**values, scale=scale)
    return o, memory


def compare(run, o, memory, dtype):
    scale = o.float().abs().max()
    torch.testing.assert_close(run.outputs["o"].float(), o.float(), rtol=OUTPUT[dtype], atol=STATE * scale)
    error = (run.outputs["memory"] - memory).abs().max() / memory.abs().max()
    assert error <= STATE


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "batch, heads, key, value",
    [(1, 1, 128, 128), (1, 12, 128, 128), (33, 3, 128, 128), (7, 5, 16, 48), (2, 3, 96, 32), (3, 1, 256, 256)],
    ids=str,
)
def test_a_step_is_the_references(batch, heads, key, value, dtype, arch, kernel):
    values = made(batch, heads, key, value, dtype)
    run = kernel.run(values, {"scale": key**-0.5}, arch=arch)
    compare(run, *ops.kda_step(**values, scale=key**-0.5), dtype)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("lower_bound", [0.0, -5.0])
@pytest.mark.parametrize("batch, heads", [(1, 2), (5, 12)], ids=str)
def test_norm_gate_and_beta_may_be_made_in_the_kernel(batch, heads, lower_bound, arch, kernel):
    values = raw(batch, heads, 128, 128, torch.bfloat16, torch.bfloat16)
    attrs = {"scale": 0.1, "norm_eps": 1e-6, "beta_logits": True, "lower_bound": lower_bound}
    run = kernel.run(values, attrs, arch=arch)
    compare(run, *reference(values, 0.1, lower_bound), torch.bfloat16)


def test_float16_works_too(kernel):
    values = raw(2, 3, 32, 16, torch.float16, torch.float16)
    attrs = {"scale": 0.25, "norm_eps": 1e-6, "beta_logits": True, "lower_bound": -5.0}
    compare(kernel.run(values, attrs), *reference(values, 0.25, -5.0), torch.float16)


def test_other_slots_and_the_inputs_stay_as_they_were(kernel):
    values = made(3, 2, 32, 32)
    before = {name: t.clone() for name, t in values.items()}
    run = kernel.run(values, {"scale": 1.0})
    assert all(torch.equal(values[name], t) for name, t in before.items())
    others = sorted(set(range(5)) - set(values["slots"].tolist()))
    assert others and torch.equal(run.outputs["memory"][others], values["memory"][others])


@pytest.mark.parametrize("name", ["q", "k", "v", "decay", "beta", "memory", "slots", "bias", "log_rate"])
def test_every_input_matters(name, kernel):
    values = raw(2, 3, 32, 32, torch.bfloat16, torch.bfloat16)
    attrs = {"scale": 1.0, "norm_eps": 1e-6, "beta_logits": True, "lower_bound": -5.0}
    first = kernel.run(values, attrs).outputs
    changed = values[name].flip(0) if name == "slots" else values[name] * 1.5
    second = kernel.run(values | {name: changed}, attrs).outputs
    assert not torch.equal(first["o"], second["o"]) or not torch.equal(first["memory"], second["memory"])


@pytest.mark.parametrize(
    "attr, value", [("scale", 2.0), ("norm_eps", 1.0), ("beta_logits", False), ("lower_bound", -2.0)]
)
def test_every_attribute_matters(attr, value, kernel):
    values = raw(2, 3, 32, 32, torch.bfloat16, torch.bfloat16)
    attrs = {"scale": 1.0, "norm_eps": 1e-6, "beta_logits": True, "lower_bound": -5.0}
    assert not torch.equal(
        kernel.run(values, attrs).outputs["o"], kernel.run(values, attrs | {attr: value}).outputs["o"]
    )


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("batch, heads", [(1, 3), (1, 12), (33, 12)], ids=str)
def test_few_bytes_are_moved_more_than_once(batch, heads, arch, kernel):
    values = made(batch, heads, 128, 128)
    run = kernel.run(values, {"scale": 1.0}, arch=arch)
    states = 2 * batch * heads * 128 * 128 * 4
    rest = sum(values[n].nbytes for n in ("q", "k", "v", "decay", "beta", "slots")) + values["v"].nbytes
    assert 1 <= run.counters.bytes / (states + rest) <= 1.05


def test_rows_are_shared_out_evenly(kernel):
    run = kernel.run(made(5, 12, 128, 128), {"scale": 1.0})
    moved = [r + w for r, w in zip(run.counters.read, run.counters.written, strict=True)]
    assert run.cores == 48 and max(moved) <= 1.25 * min(moved)  # 5 or 6 of 240 stretches of 32 rows


@pytest.mark.parametrize("change", [{"key": 24}, {"value": 8}, {"key": 512}], ids=str)
def test_sizes_the_kernel_does_not_claim_are_refused(change, kernel):
    sizes = {"batch": 1, "heads": 1, "key": 32, "value": 32} | change
    with pytest.raises(KernelError, match="KdaStep: tiling refuses q"):
        kernel.run(made(**sizes), {"scale": 1.0})


def test_a_gate_needs_both_of_its_inputs(kernel):
    values = raw(1, 1, 32, 32, torch.bfloat16, torch.bfloat16)
    with pytest.raises(KernelError, match="tiling refuses"):
        kernel.run(values | {"bias": None}, {"scale": 1.0})


def test_shapes_that_do_not_fit_are_refused(kernel):
    values = made(2, 3, 32, 32)
    with pytest.raises(KernelError, match="shape inference refuses"):
        kernel.run(values | {"memory": values["memory"][:, :2].contiguous()}, {"scale": 1.0})
