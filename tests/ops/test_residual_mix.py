"""Attention over depth against plain loops; and an operator that takes a list of tensors."""

import math

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from kimi_graph import ops

EPS = 1e-5


def by_loops(sources, norm, query, eps):
    """Of each token: softmax over sources of the normed source's product with the query, times the raw source."""
    out = torch.zeros_like(sources[0])
    for b in range(out.shape[0]):
        for t in range(out.shape[1]):
            values = [s[b, t].tolist() for s in sources]
            scores = []
            for v in values:
                root = math.sqrt(sum(x * x for x in v) / len(v) + eps)
                scores.append(sum(x / root * n * q for x, n, q in zip(v, norm.tolist(), query.tolist(), strict=True)))
            total = sum(math.exp(s - max(scores)) for s in scores)
            for s, v in zip(scores, values, strict=True):
                out[b, t] += math.exp(s - max(scores)) / total * torch.tensor(v, dtype=out.dtype)
    return out


def some(count: int, *, width: int = 6, dtype: torch.dtype = torch.float64) -> tuple:
    sources = [3 * torch.randn(2, 3, width, dtype=torch.float64).to(dtype) for _ in range(count)]
    return sources, torch.randn(width).to(dtype), torch.randn(width).to(dtype)


@pytest.mark.parametrize("count", [1, 2, 9])
def test_it_is_a_softmax_over_all_sources(count):
    sources, norm, query = some(count)
    got = ops.residual_mix(sources, norm, query, EPS)
    want = by_loops(sources, norm, query, float(torch.tensor(EPS)))  # a float attribute is a float32
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)


def test_a_query_of_zeros_gives_the_mean():
    sources, norm, query = some(4)
    got = ops.residual_mix(sources, norm, torch.zeros_like(query), EPS)
    torch.testing.assert_close(got, torch.stack(sources).mean(0), rtol=1e-14, atol=1e-14)


def test_sources_are_mixed_in_float32_and_rounded_once():
    sources, norm, query = some(5, dtype=torch.bfloat16)
    got = ops.residual_mix(sources, norm, query, EPS)
    wide = ops.residual_mix([s.float() for s in sources], norm.float(), query.float(), EPS)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, wide.bfloat16())


def test_blocks_of_rows_change_nothing():
    sources = [torch.randn(2, 600, 512) for _ in range(4)]
    norm, query = torch.randn(512), torch.randn(512)
    whole = ops.residual_mix(sources, norm, query, EPS)
    parts = [ops.residual_mix([s[:, t : t + 1] for s in sources], norm, query, EPS) for t in (0, 313, 599)]
    # products of float32 are summed in another order; scores are of order 20
    torch.testing.assert_close(torch.cat(parts, 1), whole[:, [0, 313, 599]], rtol=1e-4, atol=1e-4)


def test_a_list_of_tensors_is_one_argument_of_one_node():
    sources, norm, query = some(3)
    assert "Tensor[] sources" in str(ops.residual_mix.op._schema)
    with ops.capturing():
        graph = make_fx(lambda *x: ops.residual_mix(list(x[:-2]), *x[-2:], EPS))(*sources, norm, query).graph
    (node,) = (n for n in graph.nodes if n.op == "call_function")
    assert node.target is ops.residual_mix.op
    assert [len(node.args[0]), *node.args[3:]] == [3, float(torch.tensor(EPS))]


def test_whoever_answers_for_a_member_of_the_list_is_asked():
    class Answers:
        @classmethod
        def __torch_function__(cls, f, types, args=(), kwargs=None):
            return f, [type(x).__name__ for x in args[0]]

    sources, norm, query = some(2)
    got = ops.residual_mix([sources[0], Answers(), sources[1]], norm, query, EPS)
    assert got == (ops.residual_mix, ["Tensor", "Answers", "Tensor"])
