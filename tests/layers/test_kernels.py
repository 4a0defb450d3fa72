"""The choice of kernels: what the GPU's are called with, and that they are never run silently or refused unclearly."""

import importlib.util
import sys
from types import ModuleType

import pytest
import torch

import kimi_graph as kg
from kimi_graph import layers, ops
from kimi_graph.errors import ConfigError
from kimi_graph.layers import kernels

B, T, H, K, V = 2, 9, 2, 4, 6


def stand_in():
    """fla's two functions by their documentation, token by token: what it does with every argument we give."""

    def run(q, k, v, g, beta, *, A_log, dt_bias, scale, initial_state, output_final_state, state_v_first, **how):
        assert output_final_state and how.pop("use_qk_l2norm_in_kernel") and how.pop("use_gate_in_kernel")
        bound, safe = how.pop("lower_bound"), how.pop("safe_gate", None)
        assert not how and safe in (None, bound is not None)
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        z, rate = g + dt_bias.view(H, K), A_log.exp()[:, None]
        decay = -rate * torch.nn.functional.softplus(z) if bound is None else bound * torch.sigmoid(rate * z)
        state = q.new_zeros(B, H, K, V) if initial_state is None else initial_state
        state = state.mT if initial_state is not None and state_v_first else state
        outs = []
        for t in range(q.shape[1]):
            state = state * decay[:, t].exp()[..., None]
            new = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state))
            state = state + k[:, t, :, :, None] * new[:, :, None]
            outs.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], state))
        return torch.stack(outs, 1), state.mT if state_v_first else state

    def step(*args, safe_gate=None, **how):
        assert safe_gate is None, "the recurrence of one token takes no safe_gate"
        return run(*args, **how)

    found = ModuleType("fla.ops.kda")
    found.chunk_kda, found.fused_recurrent_kda = run, step  # type: ignore[attr-defined]
    return {"fla": ModuleType("fla"), "fla.ops": ModuleType("fla.ops"), "fla.ops.kda": found}


@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize(
    "before, counts", [([0, 0], [9, 9]), ([0, 0], [9, 4]), ([7, 0], [3, 9]), ([5, 5], [1, 1])], ids=str
)
def test_fla_is_called_for_what_our_operators_compute(bound, before, counts, monkeypatch):
    for name, module in stand_in().items():
        monkeypatch.setitem(sys.modules, name, module)
    step = counts == [1, 1]
    tokens, double = 1 if step else T, torch.float64
    q, k, raw = torch.randn(3, B, tokens, H, K, dtype=double).unbind()
    v, beta = torch.randn(B, tokens, H, V, dtype=double), torch.rand(B, tokens, H, dtype=double)
    bias, rate = torch.randn(H, K, dtype=double), torch.rand(H, dtype=double)
    memory = torch.randn(4, H, V, K, dtype=double)
    table, slots = torch.zeros(B, 1, dtype=torch.int32), torch.tensor([3, 1], dtype=torch.int32)
    batch = layers.step_batch(table, slots, torch.tensor(before), torch.tensor(counts), tokens, 64)
    found = kernels.fla_kda(q, k, v, raw, bias, rate, beta, memory, batch, scale=0.5, lower_bound=bound, step=step)
    given = ops.l2_norm(q, 1e-6), ops.l2_norm(k, 1e-6), v, ops.kda_gate(raw, bias, rate, bound), beta, memory
    if step:
        expected = ops.kda_step(*given, slots, 0.5)
    else:
        expected = ops.kda_chunk(*given, slots, batch.lengths, batch.counts, 0.5)
    for one, other in zip(found, expected, strict=True):  # float64, sums in another order; 1e-6 is rounded to float32
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


def test_a_decay_that_fla_has_no_kernel_for_is_refused(monkeypatch):
    for name, module in stand_in().items():
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(ConfigError, match=r"takes a lower bound of the decay from -5 to 0, not -8\.0"):
        kernels.fla_kda(*[torch.zeros(1)] * 8, None, scale=1.0, lower_bound=-8.0, step=False)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def layer(tiny):
    config = kg.load_config(tiny)
    params = kg.init_params(config)
    at = next(i for i, block in enumerate(params.layers) if block.kda)
    return params.layers[at].kda, config.layers[at].mixer, torch.randn(1, 3, config.embed)


def test_kernels_that_cannot_run_are_refused(layer, monkeypatch):
    with pytest.raises(ConfigError, match=r"kda: kernels='fast'; expected 'torch' or 'gpu'"):
        layers.kda(*layer, kernels="fast")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"kda: kernels='gpu' for tensors on cpu; use kernels='torch', or a GPU"):
        layers.kda(*layer, kernels="gpu")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    on_a_gpu = type("OnGpu", (), {"device": torch.device("cuda")})()
    with pytest.raises(ConfigError, match=r"kda: kernels='gpu': not installed: pip install 'kimi-graph\[gpu\]'"):
        kernels.on_gpu("kda", "gpu", on_a_gpu)


def test_the_choice_is_printed_with_what_is_missing(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    lines = [str(provider) for provider in kg.gpu_kernels()]
    assert [line.split("  ")[0] for line in lines] == ["kda, many tokens", "kda, step=True", "mla, its indexer"]
    assert all("not installed: pip install 'kimi-graph[gpu]'" in line for line in lines)


@pytest.mark.skipif(not torch.cuda.is_available() or not importlib.util.find_spec("triton"), reason="needs a GPU")
def test_index_scores_are_those_of_float64():
    from kimi_graph.ops import gpu

    q, w = torch.randn(100, 8, 64, device="cuda").bfloat16(), torch.randn(100, 8, device="cuda")
    keys = torch.randn(300, 64, device="cuda").bfloat16()
    scores = (torch.relu(torch.einsum("nik,sk->nis", q.double(), keys.double())) * w.double()[..., None]).sum(1)
    visible = torch.arange(300, device="cuda") <= 200 + torch.arange(100, device="cuda")[:, None]
    found = gpu.index_scores(q, w, keys)
    assert not found[~visible].isfinite().any()
    torch.testing.assert_close(found[visible].double(), scores[visible], rtol=1e-5, atol=1e-3)  # float32 sums of 512
