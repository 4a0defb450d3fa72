"""An operator call: who is asked, what is rounded, and what a captured graph shows of it."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from kimi_graph import ops


class Asked:
    """Something that is no tensor and answers for itself."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return func, args


def test_arguments_may_be_named_and_float_attributes_are_float32():
    x, weight = torch.randn(3, 4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    eps = float(torch.tensor(0.1))
    assert eps != 0.1
    for y in (ops.rms_norm(x, weight, 0.1), ops.rms_norm(x, eps=0.1, weight=weight)):
        assert torch.equal(y, ops.rms_norm.reference(x, weight, eps))


def test_an_optional_float_may_be_none():
    z = torch.randn(1, 1, 2, 3)
    assert (ops.kda_gate(z, torch.zeros(2, 3), torch.zeros(2), lower_bound=None) < 0).all()


@pytest.mark.parametrize(
    "give", [lambda x, w: ops.rms_norm(x, w, 0.1), lambda x, w: ops.rms_norm(x, eps=0.1, weight=w)]
)
def test_a_value_that_is_no_tensor_is_asked_first(give):
    x, weight = Asked(), torch.ones(4)
    func, args = give(x, weight)
    assert func is ops.rms_norm
    assert args[0] is x and args[1] is weight and args[2] == float(torch.tensor(0.1))


def test_wrong_arguments_are_refused_as_python_does():
    with pytest.raises(TypeError, match="eps"):
        ops.rms_norm(torch.ones(1, 2), torch.ones(2))
    with pytest.raises(TypeError, match="positional"):
        ops.rms_norm(torch.ones(1, 2), torch.ones(2), 0.1, 0.2)


def test_a_captured_call_is_one_node_and_an_eager_one_is_plain_torch():
    def f(x, w):
        return ops.rms_norm(x, w, 1e-5)

    args = torch.randn(3, 4), torch.ones(4)
    with ops.capturing():
        nodes = [n.target for n in make_fx(f)(*args).graph.nodes if n.op == "call_function"]
    assert nodes == [torch.ops.kimi.rms_norm.default]
    plain = [str(n.target) for n in make_fx(f)(*args).graph.nodes if n.op == "call_function"]
    assert plain and all(name.startswith("aten.") for name in plain)


def test_large_rows_are_split_only_outside_a_capture():
    x = torch.randn(3, 1 << 20)
    eager = make_fx(lambda x: ops.l2_norm(x, 1e-6))(x)
    with ops.capturing():
        captured = make_fx(lambda x: ops.l2_norm.reference(x, 1e-6))(x)
    names = [[str(n.target) for n in g.graph.nodes] for g in (eager, captured)]
    assert "aten.cat.default" in names[0] and "aten.cat.default" not in names[1]
