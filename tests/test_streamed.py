"""Experts that stay in their files: the same tokens, in bounded memory."""

import subprocess
import sys

import pytest
import torch

import kimi_graph as kg
from kimi_graph import formats, tree
from kimi_graph.checkpoint import Checkpoint, save_checkpoint
from kimi_graph.errors import ConfigError
from kimi_graph.fixture import make_fixture, small_config
from kimi_graph.models import model_specs
from kimi_graph.read_config import parse_config
from kimi_graph.streamed import StreamedExperts

PROMPT = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1]]


def test_streamed_experts_generate_the_same_tokens(tiny):
    config = kg.load_config(tiny)
    loaded = kg.generate(config, kg.load_params(tiny, config), PROMPT, 12)
    assert torch.equal(kg.generate(config, tiny, PROMPT, 12, stream_experts=True), loaded)
    assert torch.equal(kg.generate(config, tiny, PROMPT, 12), loaded)


@pytest.mark.parametrize("preset", ["kimi-k3", "kimi-k2.5", "deepseek-v3.2"])
def test_quantised_experts_are_dequantised_one_by_one_and_only_those_used(preset, tmp_path, monkeypatch):
    made = make_fixture(kg.load_config(preset), tmp_path / "quantised", layers=2, quantised=True)
    config, used = made.config, []
    loaded, params = (kg.load_params(made.folder, config, stream_experts=s) for s in (False, True))
    unpack = formats.unpack
    monkeypatch.setattr(formats, "unpack", lambda *args: used.append(unpack(*args)) or used[-1])
    tokens = torch.tensor([[5, 6, 7]])
    first, _ = kg.prefill(config, loaded, tokens, kg.init_state(config, 1, 8))
    assert not used
    (again, _), taps = kg.prefill(config, params, tokens, kg.init_state(config, 1, 8), taps=["layers.*.moe.experts"])
    # which products torch takes for a few rows may differ, and rounds to bfloat16 differently: two ulps of the scale
    assert float((first - again).abs().max() / first.abs().max()) < 2**-7
    assert len(used) == sum(3 * len(chosen.unique()) for chosen in taps.values())


def test_all_rows_of_an_expert_are_the_products_of_its_matrix(tiny):
    config = kg.load_config(tiny)
    whole, params = (kg.load_params(tiny, config, torch.float64, stream_experts=s) for s in (False, True))
    matrices, streamed = (
        next(block.moe.gate_up for block in p.layers if block.moe).flatten(1, 2) for p in (whole, params)
    )
    sizes = torch.zeros(len(matrices), dtype=torch.int64)
    sizes[[1, 2, 7]] = torch.tensor([1, 100, 30])
    x = torch.randn(140, matrices.shape[-1], dtype=torch.float64)
    expected = kg.ops.grouped_matmul(x, matrices, sizes)
    found = kg.ops.grouped_matmul(x, streamed, sizes)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13 * float(expected.abs().max()))  # sums in any order


def test_what_cannot_be_is_refused(tiny):
    config = kg.load_config(tiny)
    with pytest.raises(ConfigError, match=r"generate: stream_experts=True .* give the checkpoint's folder"):
        kg.generate(config, kg.load_params(tiny, config), PROMPT, 1, stream_experts=True)
    params = kg.load_params(tiny, config, stream_experts=True)
    experts = next(x for x in tree.leaves(params) if isinstance(x, StreamedExperts))
    with pytest.raises(ConfigError, match="relu: these experts stay in their files; load them without stream_experts"):
        torch.relu(experts)  # type: ignore[arg-type]


def test_reading_ahead_and_letting_go_leave_the_tensor_as_it_was(tiny):
    checkpoint = Checkpoint.open(tiny)
    name = max(checkpoint.tensors, key=lambda n: checkpoint.tensors[n].end - checkpoint.tensors[n].begin)
    before = checkpoint.read(name).clone()
    checkpoint.ahead(name)
    checkpoint.release(name)
    assert torch.equal(checkpoint.read(name), before)


# Memory.

EXPERTS, FFN = 48, 1536  # two layers of them: 226 MB of bfloat16, everything else 10 MB


@pytest.fixture(scope="module")
def mostly_experts(tmp_path_factory):
    source = small_config(kg.load_config("kimi-linear-48b"), 3)
    source |= {"num_experts": EXPERTS, "moe_intermediate_size": FFN}
    config = parse_config(source, origin="a test", name="mostly experts")
    specs = model_specs(config)

    def make(spec):  # any values do: small ones, quickly
        return (
            torch.full(spec.shape, 0.01, dtype=torch.bfloat16) if spec.axes[0] == "experts" else torch.rand(spec.shape)
        )

    folder = tmp_path_factory.mktemp("streamed") / "checkpoint"
    save_checkpoint(folder, specs, tree.map(make, specs), config)
    return folder, sum(2 * s.numel for s in tree.leaves(specs) if s.axes[0] == "experts")


def extra_memory(folder, stream):
    """Bytes that generating takes at its peak over what the process had before, in a process of its own."""
    code = f"""
import torch, kimi_graph as kg
from pathlib import Path
def status(name):
    return next(int(l.split()[1]) for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(name))
config = kg.load_config({str(folder)!r})
torch.mm(torch.ones(8, 8, dtype=torch.bfloat16), torch.ones(8, 8, dtype=torch.bfloat16))
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
tokens = kg.generate(config, {str(folder)!r}, [list(range(96))], 8, stream_experts={stream})
print(1024 * (status("VmHWM") - before))
print(tokens.tolist())
"""
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split("\n")
    return int(out[0]), out[1]


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_memory_is_bounded_by_what_is_no_expert(mostly_experts):
    folder, experts = mostly_experts
    loaded, tokens = extra_memory(folder, stream=False)
    streamed, same = extra_memory(folder, stream=True)
    assert experts > 200e6 and loaded > 0.9 * experts
    assert streamed < 0.3 * experts, f"{streamed:,} of {experts:,}"  # 10 MB of other weights, activations, libraries
    assert tokens == same


def test_a_48b_checkpoint_streams_on_16_gb():
    """What is held at once: every weight but the routed experts, the largest expert, and the state of 8,192 tokens."""
    config = kg.load_config("kimi-linear-48b")
    specs = tree.leaves(model_specs(config))
    routed = [s for s in specs if s.axes[0] == "experts"]
    held = 2 * sum(s.numel for s in specs) - 2 * sum(s.numel for s in routed)
    expert = max(2 * s.numel // s.shape[0] for s in routed)
    state = kg.models.state_specs(config, slots=2, pages=65, page=128, dtype=config.dtype)
    caches = sum(s.numel * (s.dtype or config.dtype).itemsize for s in tree.leaves(state))
    assert sum(2 * s.numel for s in routed) > 94e9
    assert held + expert + caches < 4.3e9
