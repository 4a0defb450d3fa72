"""Gradients against finite differences, torch.func and torch.compile over layers; docs/research.md says what holds."""

import dataclasses

import pytest
import torch
from torch.func import grad, jacrev, jvp, vmap

import kimi_graph as kg
from kimi_graph import layers, ops, tree
from kimi_graph.fixture import small_config
from kimi_graph.layers.moe import experts
from kimi_graph.read_config import parse_config

DOUBLE = torch.float64


@pytest.fixture(scope="module")
def made():
    config = parse_config(small_config(kg.load_config("kimi-k3.1-pro")), origin="a test", name="small")
    return config, kg.init_params(config, dtype=DOUBLE)


@pytest.fixture(params=["kda", "mla", "moe", "attn_residual"])
def layer(request, made):
    """`f(parameters, x)`, its parameters, and x `[1, T, D]` with more tokens than the indexer keeps."""
    c, p = made
    at = {name: next(i for i, b in enumerate(p.layers) if getattr(b, name)) for name in ("kda", "mla", "moe")}
    kinds = {
        "kda": (lambda q, x: layers.kda(q, c.layers[at["kda"]].mixer, x)[0], p.layers[at["kda"]].kda),
        "mla": (lambda q, x: layers.mla(q, c.layers[at["mla"]].mixer, x)[0], p.layers[at["mla"]].mla),
        "moe": (lambda q, x: layers.moe(q, c.layers[at["moe"]].ffn, x), p.layers[at["moe"]].moe),
        "attn_residual": (lambda q, x: layers.attn_residual(q, [x, x.flip(1)], 1e-5), p.out_res),
    }
    return *kinds[request.param], torch.randn(1, 70, c.embed, dtype=DOUBLE)


# Finite differences. gradcheck's own tolerances: 1e-5 of its numbers, which steps of 1e-6 give in float64.


@pytest.mark.parametrize("counts", [[5, 5], [5, 3]], ids=str)
def test_gradients_of_kda_in_chunks_are_finite_differences(counts):
    q, k, v, raw = torch.randn(4, 2, 5, 1, 3, dtype=DOUBLE).unbind()
    slots, counts = torch.tensor([2, 1], dtype=torch.int32), torch.tensor(counts)
    args = [q / 2, k / 2, v, -raw.exp(), torch.rand(2, 5, 1, dtype=DOUBLE), torch.randn(3, 1, 3, 3, dtype=DOUBLE)]
    args = [a.requires_grad_() for a in args]
    assert torch.autograd.gradcheck(lambda *a: ops.kda_chunk(*a, slots, counts + 2, counts, 0.5), args)


def test_gradients_of_sparse_attention_are_finite_differences_with_the_selection_fixed():
    """A selection has no derivative: gradients go through what was selected, as if the choice did not move."""
    q, q_rope = torch.randn(1, 4, 2, 3, dtype=DOUBLE), torch.randn(1, 4, 2, 2, dtype=DOUBLE)
    latent, rope = torch.randn(3, 4, 3, dtype=DOUBLE), torch.randn(3, 4, 2, dtype=DOUBLE)
    selected = torch.tensor([[[0, 1, -1], [2, 0, 1], [3, 1, 2], [0, 3, 4]]], dtype=torch.int32)
    rows = torch.tensor([[2, 1]], dtype=torch.int32), torch.tensor([6]), torch.tensor([4])
    args = [a.requires_grad_() for a in (q, q_rope, latent, rope)]
    assert torch.autograd.gradcheck(lambda *a: ops.sparse_attention(*a, selected, *rows, 0.7), args)


def test_the_indexer_gets_no_gradient_and_the_layer_the_one_of_its_selection(made):
    c, p = made
    at = next(i for i, b in enumerate(p.layers) if b.mla)
    config, x = c.layers[at].mixer, torch.randn(1, 70, c.embed, dtype=DOUBLE)
    _, _, selected = layers.mla(p.layers[at].mla, config, x)
    assert selected is not None
    own = grad(lambda q: layers.mla(q, config, x)[0].square().sum())(p.layers[at].mla)
    shared = dataclasses.replace(config, indexer=dataclasses.replace(config.indexer, shared=True))
    state = layers.zero_state(layers.mla_state_specs(shared, 2, 70, DOUBLE), x)
    given = state, layers.row_batch(1, 70)
    blind = tree.replace(p.layers[at].mla, indexer=None)
    fixed = grad(lambda q: layers.mla(q, shared, x, *given, selected=selected)[0].square().sum())(blind)
    assert all(not g.any() for g in tree.leaves(own.indexer))
    for one, other in zip(tree.leaves(tree.replace(own, indexer=None)), tree.leaves(fixed), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)  # the same sums


def test_gradients_of_experts_are_finite_differences_with_the_routing_fixed():
    scores, bias = torch.randn(3, 4, dtype=DOUBLE), torch.randn(4, dtype=DOUBLE)
    x, gate_up = torch.randn(3, 3, dtype=DOUBLE), torch.randn(4, 2, 2, 3, dtype=DOUBLE)
    down = torch.randn(4, 3, 2, dtype=DOUBLE)

    def run(x, scores, gate_up, down):
        weights, chosen = ops.moe_route(scores, bias, 2, 1.5)
        return experts(x, chosen, weights, gate_up, down)

    assert torch.autograd.gradcheck(run, [a.requires_grad_() for a in (x, scores, gate_up, down)])


def test_gradients_of_attention_residuals_are_finite_differences():
    p = layers.AttnResidual(norm=torch.randn(4, dtype=DOUBLE), query=torch.randn(4, dtype=DOUBLE))
    sources = torch.randn(3, 1, 2, 4, dtype=DOUBLE, requires_grad=True)

    def run(norm, query, sources):
        return layers.attn_residual(tree.replace(p, norm=norm, query=query), list(sources), 1e-5)

    assert torch.autograd.gradcheck(run, (p.norm.requires_grad_(), p.query.requires_grad_(), sources))


# torch.func.


def test_a_layers_gradient_is_that_of_backward(layer):
    f, p, x = layer
    found = grad(lambda q: f(q, x).square().sum())(p)
    mine = tree.map(lambda w: w.clone().requires_grad_(), p)
    f(mine, x).square().sum().backward()
    for one, other in zip(tree.leaves(found), tree.leaves(mine), strict=True):
        expected = torch.zeros_like(one) if other.grad is None else other.grad
        torch.testing.assert_close(one, expected, rtol=1e-9, atol=1e-9)  # float64, sums in another order


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # torch's, of scatter under vmap
def test_a_layer_maps_over_a_batch(layer):
    f, p, x = layer
    many = torch.cat([x, x.flip(1), x + 0.1])
    one_by_one = torch.cat([f(p, row[None]) for row in many])
    torch.testing.assert_close(vmap(lambda row: f(p, row[None])[0])(many), one_by_one, rtol=1e-9, atol=1e-9)
    gradients = vmap(grad(lambda row: f(p, row[None]).square().sum()))(many)
    expected = torch.stack([grad(lambda row: f(p, row[None]).square().sum())(row) for row in many])
    torch.testing.assert_close(gradients, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own use of it
def test_jacobians_agree_forward_and_backward(layer):
    f, p, x = layer
    x, along = x[:, :4], torch.randn_like(x[:, :4])
    rows = jacrev(lambda y: f(p, y)[0, -1, :3])(x)
    _, forward = jvp(lambda y: f(p, y)[0, -1, :3], (x,), (along,))
    torch.testing.assert_close((rows * along).flatten(1).sum(1), forward, rtol=1e-9, atol=1e-9)


def test_a_whole_model_has_gradients(made):
    c, p = made
    tokens = torch.randint(c.vocab, (2, 6))
    found = grad(lambda q: kg.prefill(c, q, tokens, kg.init_state(c, 2, 8))[0].square().mean())(p)
    assert all(g.isfinite().all() for g in tree.leaves(found)) and found.layers[0].ffn_norm.any()


# torch.compile: graphs break where values decide shapes, results are the same.


@pytest.mark.filterwarnings("ignore")  # dynamo's own, of what it does not trace
@pytest.mark.parametrize(
    "layer",
    ["attn_residual", *(pytest.param(name, marks=pytest.mark.heavy) for name in ("kda", "mla", "moe"))],
    indirect=True,
)
def test_a_compiled_layer_gives_what_it_gave(layer):
    f, p, x = layer
    torch._dynamo.reset()
    found = torch.compile(f, backend="eager")(p, x[:, :12])
    torch._dynamo.reset()
    torch.testing.assert_close(found, f(p, x[:, :12]), rtol=1e-10, atol=1e-10)  # float64


# Seeds.


def test_the_same_seed_gives_the_same_parameters_and_the_same_tokens(made):
    c, _ = made
    one, other = (kg.init_params(c, seed=3) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(one), tree.leaves(other), strict=True))
    torch.manual_seed(1)  # the global generator has no part in it
    first = kg.generate(c, one, [1, 2, 3], 5, temperature=2.0, seed=4)
    torch.manual_seed(2)
    assert torch.equal(first, kg.generate(c, one, [1, 2, 3], 5, temperature=2.0, seed=4))
