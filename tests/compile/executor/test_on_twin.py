"""In native runs nodes of ours may be run by their kernels; the graph computes the same."""

import pytest
import torch

from kimi_graph.compile.executor.on_twin import ARCH, kernels_on_twin
from kimi_graph.compile.targets import TARGETS, target
from kimi_graph.errors import BundleError

BF16, I32, I64 = torch.bfloat16, torch.int32, torch.int64


def convolution(b):
    """Two rows in use, and two that are not: both at slot 0."""
    x, window = b.source("x", torch.randn(4, 3, 2, 16).to(BF16)), torch.randn(5, 2, 16, 3).to(BF16)
    where = {"slots": ([3, 0, 1, 0], I32), "lengths": ([9, 0, 2, 0], I64), "counts": ([3, 0, 2, 0], I64)}
    inputs = {"x": x, "weight": b.source("weight", torch.randn(2, 16, 4)), "window": b.state("window", window)}
    inputs |= {name: b.source(name, torch.tensor(v, dtype=d)) for name, (v, d) in where.items()}
    b.result(*b.node("ShortConv", inputs, outputs="y window", name="conv"))
    return b


def mix(b, width=64, **attrs):
    sources = [b.source(f"s{i}", torch.randn(1, 5, width).to(BF16)) for i in range(3)]
    aims = {name: b.source(name, torch.randn(width).to(BF16)) for name in ("norm", "query")}
    inputs = {"sources": sources, **aims}
    b.result(b.node("AttnResMix", inputs, outputs="y total", attrs={"eps": 1e-5, **attrs}, name="mix")[0])
    return b


def mix_of_a_sum(b, width=64):
    sources = [b.source(f"s{i}", torch.randn(1, 5, width).to(BF16)) for i in range(3)]
    names = ("norm", "query", "gain")
    norm, query, gain = (b.source(name, torch.randn(width).to(BF16)) for name in names)
    inputs = {"sources": sources, "norm": norm, "query": query, "addend": sources[0], "gain": gain}
    b.result(*b.node("AttnResMix", inputs, outputs="y total", attrs={"eps": 1e-5, "norm_eps": 1e-5}))
    return b


def norm(b):
    x, gate = (b.source(name, torch.randn(3, 2, 32).to(BF16)) for name in ("x", "gate"))
    inputs = {"x": x, "gate": gate, "weight": b.source("weight", torch.randn(32))}
    b.result(*b.node("GatedRmsNorm", inputs, attrs={"eps": 1e-5}))
    return b


@pytest.mark.parametrize("arch", sorted(set(ARCH.values())))
@pytest.mark.parametrize("make", [convolution, mix, mix_of_a_sum, norm])
def test_a_node_run_by_its_kernel_computes_the_same(make, arch, build, twin_cache):
    b = make(build)
    before = {name: t.clone() for name, t in b.values.items()}
    plain = b.run("native")
    b.values.update({name: t.clone() for name, t in before.items()})
    with kernels_on_twin(arch, twin_cache) as kernels:
        ran = b.run("native")
    assert sum(kernels.ran.values()) == 1 and str(arch) in str(kernels)
    for ours, theirs in zip(ran.outputs, plain.outputs, strict=True):  # rounded once: one place apart beside a tie
        used = [0, 2] if make is convolution else slice(None)
        torch.testing.assert_close(ours[used].float(), theirs[used].float(), rtol=2**-7, atol=1e-5)
    for name, state in plain.states.items():
        assert torch.equal(ran.states[name][1:], state[1:]), "slot 0 is nobody's"


def test_exact_runs_and_operators_without_a_kernel_keep_their_semantics(build, twin_cache):
    x = build.source("x", torch.randn(2, 64).to(BF16))
    made = build.node("Sigmoid", {"x": x})
    build.result(*made)
    with kernels_on_twin(2201, twin_cache) as kernels:
        build.run("native")
        mix(type(build)()).run("exact")
    assert str(kernels).endswith("none")


def test_what_a_kernel_refuses_is_an_error_of_the_node(build, twin_cache):
    b = mix(build, width=24)
    with (
        kernels_on_twin(2201, twin_cache),
        pytest.raises(BundleError, match=r"mix \(AttnResMix\): AttnResMix: tiling refuses sources 3 x \[1, 5, 24\]"),
    ):
        b.run("native")


def test_an_attribute_that_no_kernel_has_is_an_error(build, twin_cache):
    b = mix(build, shift=1.0)
    with kernels_on_twin(2201, twin_cache), pytest.raises(BundleError, match="has no attribute 'shift'"):
        b.run("native")


def test_every_target_has_an_architecture():
    assert {target(name).soc for name in TARGETS} == set(ARCH)
