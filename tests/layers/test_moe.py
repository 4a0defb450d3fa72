"""Mixture of experts: against transformers' layers, and latent experts against a plain form in float64."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kimi_graph import layers, tree
from kimi_graph.config import DEEPSEEK_NAMES, KIMI_NAMES, DenseConfig, MoeConfig, SituConfig
from kimi_graph.taps import collect
from tests.layers.oracle import assert_close, load, values

EMBED = 24
GROUPED = MoeConfig(experts=16, top_k=4, ffn=10, shared_ffn=10, scale=2.5, groups=8, kept_groups=3)
PLAIN = dataclasses.replace(GROUPED, groups=1, kept_groups=1)
SITU = SituConfig(beta=4.0, linear_beta=25.0)
K3 = MoeConfig(experts=12, top_k=5, ffn=10, shared_ffn=20, scale=1.0, latent=14, latent_norm=True, situ=SITU)


@pytest.mark.parametrize("kind, config", [("DeepseekV32", GROUPED), ("GlmMoeDsa", PLAIN), ("DeepseekV3", PLAIN)])
def test_a_layer_is_that_of_transformers(kind, config):
    transformers = pytest.importorskip("transformers")
    package = {"DeepseekV32": "deepseek_v32", "GlmMoeDsa": "glm_moe_dsa", "DeepseekV3": "deepseek_v3"}[kind]
    module = __import__(f"transformers.models.{package}.modeling_{package}", fromlist=["x"])
    theirs = getattr(transformers, f"{kind}Config")(
        hidden_size=EMBED, moe_intermediate_size=config.ffn, n_routed_experts=config.experts, n_shared_experts=1,
        num_experts_per_tok=config.top_k, n_group=config.groups, topk_group=config.kept_groups,
        routed_scaling_factor=config.scale, experts_implementation="eager",
    )  # fmt: skip
    layer = getattr(module, f"{kind}MoE")(theirs).eval()
    specs = layers.moe_specs(config, EMBED, DEEPSEEK_NAMES)
    p, x = values(specs), torch.randn(2, 9, EMBED)
    load(layer, specs, p)
    with torch.no_grad():
        assert_close(layers.moe(p, config, x), layer(x))


def situ(gate: float, up: float) -> float:
    return 4 * math.tanh(gate / 4) / (1 + math.exp(-gate)) * 25 * math.tanh(up / 25)


def plain_mlp(gate: Tensor, up: Tensor, down: Tensor, x: Tensor) -> Tensor:
    pairs = zip((gate @ x).tolist(), (up @ x).tolist(), strict=True)
    return down @ torch.tensor([situ(g, u) for g, u in pairs], dtype=x.dtype)


def plain_latent(p: Any, c: MoeConfig, x: Tensor, eps: float) -> Tensor:
    """One token, from the fact sheet of models, section 2.6."""
    scores = torch.sigmoid(p.router @ x)
    biased = (scores + p.bias).tolist()
    chosen = sorted(range(c.experts), key=lambda e: (-biased[e], e))[: c.top_k]
    total = sum(float(scores[e]) for e in chosen)
    u = p.down_latent @ x
    y = sum(float(scores[e]) / total * plain_mlp(p.gate_up[e, 0], p.gate_up[e, 1], p.down[e], u) for e in chosen)
    y = y / (y.square().mean() + eps).sqrt() * p.latent_norm
    return p.up_latent @ y + plain_mlp(p.shared.gate, p.shared.up, p.shared.down, x)


def test_latent_experts_are_normalised_after_they_are_combined():
    p, x = values(layers.moe_specs(K3, EMBED), torch.float64), torch.randn(2, 7, EMBED).double()
    want = torch.stack([plain_latent(p, K3, row, 1e-5) for row in x.flatten(0, 1)]).view(x.shape)
    assert_close(layers.moe(p, K3, x, 1e-5), want, 1e-7)  # eps of an operator is a float32: 2.5e-8 of it


def test_the_dense_layer_with_situ_is_the_plain_form():
    dense = DenseConfig(ffn=14, situ=SITU)
    p, x = values(layers.ffn_specs(dense.ffn, EMBED), torch.float64), torch.randn(2, 7, EMBED).double()
    want = torch.stack([plain_mlp(p.gate, p.up, p.down, row) for row in x.flatten(0, 1)]).view(x.shape)
    assert_close(layers.ffn(p, x, dense.situ), want, 1e-12)


@pytest.mark.parametrize("config", [PLAIN, GROUPED, K3, dataclasses.replace(K3, latent_norm=False)])
def test_gradients_reach_every_weight_but_the_selection_bias(config):
    specs = layers.moe_specs(config, EMBED)
    p, x = values(specs, torch.float64), torch.randn(1, 5, EMBED).double().requires_grad_()
    names, leaves = zip(*tree.items(p), strict=True)
    leaves = [leaf.requires_grad_() for leaf in leaves]

    def f(x: Tensor, *leaves: Tensor) -> Tensor:
        rest = iter(leaves)
        return layers.moe(tree.map(lambda _: next(rest), p), config, x)

    assert torch.autograd.gradcheck(f, (x, *leaves), fast_mode=True)
    f(x, *leaves).sum().backward()
    assert {n for n, leaf in zip(names, leaves, strict=True) if leaf.grad is None} == {"bias"}


def test_released_names_and_shapes():
    # fact sheet of models, section 2.2
    full = MoeConfig(
        experts=896, top_k=16, ffn=3072, shared_ffn=6144, scale=1.0, latent=3584, latent_norm=True, situ=SITU
    )
    specs = layers.moe_specs(full, 7168, KIMI_NAMES)
    stored = {s.source[0]: (s.stored, len(s.source)) for s in tree.leaves(specs)}
    assert stored == {
        "gate.weight": ((896, 7168), 1),
        "gate.e_score_correction_bias": ((896,), 1),
        "routed_expert_down_proj.weight": ((3584, 7168), 1),
        "routed_expert_norm.weight": ((3584,), 1),
        "routed_expert_up_proj.weight": ((7168, 3584), 1),
        "experts.0.w1.weight": ((3072, 3584), 1792),
        "experts.0.w2.weight": ((3584, 3072), 896),
        "shared_experts.gate_proj.weight": ((6144, 7168), 1),
        "shared_experts.up_proj.weight": ((6144, 7168), 1),
        "shared_experts.down_proj.weight": ((7168, 6144), 1),
    }
    assert specs.gate_up.source[:3] == ("experts.0.w1.weight", "experts.0.w3.weight", "experts.1.w1.weight")
    other = layers.moe_specs(PLAIN, EMBED, DEEPSEEK_NAMES)
    assert other.gate_up.source[:2] == ("experts.0.gate_proj.weight", "experts.0.up_proj.weight")
    assert other.down.source[-1] == "experts.15.down_proj.weight"
    assert other.down_latent is other.latent_norm is other.up_latent is None


def test_tapped_experts_and_weights_are_those_of_the_router():
    p, x = values(layers.moe_specs(GROUPED, EMBED)), torch.randn(2, 9, EMBED)
    with collect(["experts", "weights"]) as found:
        layers.moe(p, GROUPED, x)
    assert found["experts"].shape == found["weights"].shape == (18, 4)
    torch.testing.assert_close(found["weights"].sum(-1), torch.full((18,), 2.5))
