"""AttnResMix on the twin is the reference `residual_mix`, after a sum and before `rms_norm` where asked for."""

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
    return Kernel("attn_res_mix", twin_cache)


def made(count, shape, dtype=BF16, weight=BF16, spread=1.0):
    width = shape[-1]
    sources = [(torch.randn(*shape) * (1 + i)).to(dtype) for i in range(count)]
    query = spread * torch.randn(width) / width**0.5
    return {"sources": sources, "norm": (1 + torch.rand(width)).to(weight), "query": query.to(weight)}


def chained(count, shape, dtype=BF16, weight=BF16):
    """With what is added to the last source, and the gain of the norm after the mix."""
    values = made(count, shape, dtype, weight)
    return values | {"addend": torch.randn(*shape).to(dtype), "gain": torch.randn(shape[-1]).to(weight)}


def compare(run, values, eps=1e-5, norm_eps=1e-5):
    sources, dtype = list(values["sources"]), values["sources"][0].dtype
    if (addend := values.get("addend")) is not None:
        sources[-1] = (sources[-1].float() + addend.float()).to(dtype)
        assert torch.equal(run.outputs["total"], sources[-1])  # it stays a source of later mixes: rounded as Add does
    else:
        assert run.outputs["total"].shape == (0,)
    wide = [s.float() for s in sources]  # nothing is rounded between the mix and the norm
    y = ops.residual_mix(wide, values["norm"].float(), values["query"].float(), eps)
    if (gain := values.get("gain")) is not None:
        y = ops.rms_norm(y, gain.float(), norm_eps)
    scale = y.abs().max()  # sources cancel in the mix: float32 errors are of their scale
    atol = (1e-5 if gain is not None else 3e-6) * scale
    torch.testing.assert_close(run.outputs["y"].float(), y.to(dtype).float(), rtol=OUTPUT[dtype], atol=atol)


# every combination is a library to build: other types on one chip
@pytest.mark.parametrize("arch, dtype, weight", [(2201, BF16, BF16), (3510, BF16, BF16), (2201, F32, F32)], ids=str)
@pytest.mark.parametrize(
    "count, shape",
    [(1, (1, 1, 128)), (2, (3, 1, 2304)), (9, (33, 1, 1024)), (3, (2, 50, 80)), (5, (1, 7, 16))],
    ids=str,
)
def test_it_is_the_references(count, shape, dtype, weight, arch, kernel):
    values = made(count, shape, dtype, weight)
    compare(kernel.run(values, {"eps": 1e-5}, arch=arch), values)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("left_out", [(), ("addend",), ("gain",)], ids=str)
@pytest.mark.parametrize(
    "count, shape", [(1, (1, 1, 128)), (2, (50, 1, 96)), (9, (33, 1, 512)), (4, (2, 57, 80))], ids=str
)
def test_a_sum_before_and_a_norm_after_are_of_the_same_kernel(count, shape, left_out, arch, kernel):
    values = {name: v for name, v in chained(count, shape).items() if name not in left_out}
    compare(kernel.run(values, {"eps": 1e-5, "norm_eps": 1e-5}, arch=arch), values)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("make", [made, chained])
def test_the_released_width_fits(make, arch, kernel):
    values = make(9, (3, 1, 7168))
    compare(kernel.run(values, {"eps": 1e-5, "norm_eps": 1e-5}, arch=arch), values)


@pytest.mark.parametrize("dtype, weight", [(BF16, F32), (F16, F32)], ids=str)
def test_other_types_work_too(dtype, weight, kernel):
    for make in (made, chained):
        values = make(3, (4, 1, 208), dtype, weight)
        compare(kernel.run(values, {"eps": 1e-6, "norm_eps": 1e-3}), values, 1e-6, 1e-3)


def test_scores_far_apart_give_numbers(kernel):
    """In either order: the larger score first, and last."""
    values = made(4, (2, 2, 256), spread=200.0)
    for sources in (values["sources"], values["sources"][::-1]):
        turned = values | {"sources": sources}
        compare(kernel.run(turned, {"eps": 1e-5}), turned)


@pytest.mark.parametrize("name", ["source 0", "source 2", "norm", "query", "addend", "gain", "eps", "norm_eps"])
def test_every_input_matters(name, kernel):
    values, attrs = chained(3, (2, 1, 64)), {"eps": 1e-5, "norm_eps": 1e-5}
    first = kernel.run(values, attrs).outputs["y"]
    if name in attrs:
        attrs[name] = 3.0
    elif name.startswith("source"):
        values["sources"][int(name[-1])] *= 1.5
    else:
        values[name] = values[name] + torch.randn(values[name].shape).to(BF16)
    assert not torch.equal(first, kernel.run(values, attrs).outputs["y"])


def minimum(values):
    rows, weights = len(values["sources"]) + 1 + 2 * ("addend" in values), 2 + ("gain" in values)
    return rows * values["sources"][0].nbytes + weights * values["norm"].nbytes


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("make", [made, chained])
@pytest.mark.parametrize("count, tokens", [(2, 512), (9, 512)], ids=str)
def test_sources_are_read_once(count, tokens, make, arch, kernel):
    values = make(count, (1, tokens, 512))
    assert 1 <= kernel.run(values, {"eps": 1e-5}, arch=arch).counters.bytes / minimum(values) <= 1.05


def moved(run):
    """What cores tell each other counts too."""
    return run.counters.bytes + sum(run.counters.workspace)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("make", [made, chained])
@pytest.mark.parametrize("count, tokens", [(9, 1), (9, 33), (5, 8), (2, 20)], ids=str)
def test_few_tokens_are_split_over_cores_which_tell_each_other_little(count, tokens, make, arch, kernel):
    values = make(count, (tokens, 1, 2048))
    run = kernel.run(values, {"eps": 1e-5, "norm_eps": 1e-5}, arch=arch)
    compare(run, values)
    assert run.counters.touched == minimum(values)
    assert moved(run) <= 1.05 * minimum(values) and run.cores > 1 and sum(run.counters.workspace)


def test_tokens_that_do_not_fit_at_once_are_taken_in_rounds(kernel):
    """Groups of cores have unequal numbers of tokens, and still wait for each other as often."""
    values = chained(9, (83, 1, 7168))
    run = kernel.run(values, {"eps": 1e-5, "norm_eps": 1e-5})
    compare(run, values)
    assert sum(s.nbytes for s in values["sources"]) > run.cores * (192 << 10)
    assert sum(run.counters.workspace) and moved(run) <= 1.05 * minimum(values)


@pytest.mark.parametrize("width", [24, 16384])
def test_widths_the_kernel_does_not_claim_are_refused(width, kernel):
    with pytest.raises(KernelError, match="AttnResMix: tiling refuses sources 2 x"):
        kernel.run(made(2, (1, 1, width)), {"eps": 1e-5})


@pytest.mark.parametrize("name", ["sources", "addend", "gain"])
def test_values_of_several_shapes_are_refused(name, kernel):
    values = chained(2, (2, 1, 64))
    given = values["sources"][1] if name == "sources" else values[name]
    half = given[: len(given) // 2].contiguous()
    values[name] = [values["sources"][0], half] if name == "sources" else half
    with pytest.raises(KernelError, match="AttnResMix: shape inference refuses"):
        kernel.run(values, {"eps": 1e-5})
