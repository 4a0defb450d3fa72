"""Capture: a layer function becomes a graph with named inputs and outputs, whole operators and source lines."""

import operator
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from kimi_graph import ops, tree
from kimi_graph.compile.capture import _called, capture
from kimi_graph.compile.phases import Bucket, capture_pieces
from kimi_graph.models import decoder
from kimi_graph.ops import contract
from kimi_graph.read_config import load_config
from tests.compile.family import FAMILY, small_model

META = torch.device("meta")
CONFIG = load_config("kimi-linear-48b")
PREFILL = Bucket(phase="prefill", rows=2, tokens=8, page=16, pages=17, sequence_pages=8, slots=3)
VISION = replace(PREFILL, phase="vision", tokens=16, images=4)


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device=META)


def calls(captured):
    return [n for n in captured.module.graph.nodes if n.op == "call_function"]


def test_inputs_and_outputs_are_named_by_their_place_in_the_trees():
    def f(x, p):
        return {"y": {"first": x + p["a"]}, "z": [p["b"][0] * x]}

    got = capture(f, {"x": meta(2), "p": {"a": meta(2), "b": (meta(2),)}})
    assert got.inputs == ("x", "p.a", "p.b.0")
    assert got.outputs == ("y.first", "z.0")


def test_what_was_captured_computes_what_the_function_does():
    def f(x, p):
        y = F.silu(x @ p.t())[:, 1:]
        return {"y": y.exp().sum(-1), "x": x.to(torch.float64)}

    x, p = torch.randn(3, 4), torch.randn(5, 4)
    got = capture(f, {"x": meta(3, 4), "p": meta(5, 4)})
    made = fx.Interpreter(got.module).run(x, p)
    for mine, theirs in zip(made, tree.leaves(f(x, p)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_einsum_and_operators_stay_whole():
    def f(x, w, g):
        return {"y": ops.rms_norm(contract("btd,hkd->bthk", x, w).flatten(2), g, 1e-5)}

    got = capture(f, {"x": meta(2, 3, 4), "w": meta(2, 5, 4), "g": meta(10)})
    assert [str(n.target) for n in calls(got)] == ["kimi.einsum.default", "aten.view.default", "kimi.rms_norm.default"]
    assert calls(got)[0].args[0] == "btd,hkd->bthk"


def test_calls_that_no_output_needs_are_not_captured():
    def f(x):
        x.exp()
        return {"y": x.neg()}

    assert [n.target for n in calls(capture(f, {"x": meta(2)}))] == [torch.ops.aten.neg.default]


def test_every_value_has_a_static_plain_meta_tensor():
    got = capture(lambda x: {"y": x.t().split(1)[1] + 1}, {"x": meta(3, 4)})
    for node in got.module.graph.nodes:
        if node.op != "output":
            for value in node.meta["val"] if isinstance(node.meta["val"], (list, tuple)) else [node.meta["val"]]:
                assert value.is_meta
                assert value.is_contiguous()


def test_parts_of_a_tuple_are_taken_by_index():
    got = capture(lambda x: {"y": x.topk(2)[1]}, {"x": meta(5)})
    assert [n.target for n in calls(got)] == [torch.ops.aten.topk.default, operator.getitem]


def test_one_tensor_given_twice_is_two_inputs():
    """A tied embedding: two parameters, one tensor."""
    w = meta(4, 4)
    got = capture(lambda p: {"y": p["a"] @ p["b"].t()}, {"p": {"a": w, "b": w}})
    assert got.inputs == ("p.a", "p.b")
    a, b = (n for n in got.module.graph.nodes if n.op == "placeholder")
    assert len(a.users) == len(b.users) == 1


def capture_small(model):
    """Every part of a fixture's prefill and, where it has one, of its vision tower."""
    config = small_model(model)
    buckets = [PREFILL] if config.vision is None else [replace(PREFILL, images=4), VISION]
    return {f"{b.phase} {name}": piece for b in buckets for name, piece in capture_pieces(config, b).items()}


@pytest.fixture(scope="module")
def pieces():
    return capture_pieces(CONFIG, PREFILL)


def test_every_kind_of_part_is_captured_once(pieces):
    assert sorted(pieces) == ["attn_add", "dense", "embed", "ffn_add", "head", "kda", "mla", "moe"]


@pytest.mark.parametrize("model", FAMILY)
def test_every_call_names_a_line_of_layer_code(model):
    for name, piece in capture_small(model).items():
        for node in calls(piece):
            if node.target is not operator.getitem:
                assert re.fullmatch(r"(layers|models|compile)/\w+\.py:\d+", node.meta["source"]), (name, node)


def test_source_lines_are_those_that_make_the_call(pieces):
    """The line of the router's product says so."""
    node = next(n for n in calls(pieces["moe"]) if "einsum" in str(n.target))
    file, line = node.meta["source"].split(":")
    root = Path(decoder.__file__).parents[1]
    assert "nd,ed->ne" in (root / file).read_text().splitlines()[int(line) - 1]


@pytest.mark.parametrize("model", FAMILY)
def test_capturing_twice_gives_the_same_graph(model):
    first, again = capture_small(model), capture_small(model)
    assert list(again) == list(first)
    for name, piece in first.items():
        assert str(again[name].module.graph) == str(piece.module.graph)
        assert (again[name].inputs, again[name].outputs) == (piece.inputs, piece.outputs)


def test_the_calls_are_those_that_make_fx_records():
    def f(x, w, table):
        y = F.linear(x[:, :4], w).softmax(-1) + x.unflatten(1, (2, 4)).mean(1)[:, :3]
        low, high = torch.split(y, [1, 2], dim=-1)
        values, indices = high.sort(-1)
        rows = F.embedding(indices, table).to(torch.float32).amax(-1)
        return torch.where(rows > 0, values, torch.zeros_like(values)) * low + torch.arange(2, device=x.device)

    def listing(graph: fx.Graph) -> list[str]:
        at = {node: f"%{i}" for i, node in enumerate(graph.nodes)}
        operands = [fx.node.map_arg((n.args, n.kwargs), at.__getitem__) for n in graph.nodes]
        return [f"{n.target}{o}" for n, o in zip(graph.nodes, operands, strict=True) if n.op == "call_function"]

    args = {"x": meta(5, 8), "w": meta(3, 4), "table": meta(9, 6, dtype=torch.bfloat16)}
    theirs = make_fx(f)(*args.values())
    theirs.graph.eliminate_dead_code()
    assert listing(capture(lambda **given: {"y": f(**given)}, args).module.graph) == listing(theirs.graph)


def test_a_tensor_from_outside_is_a_constant_of_the_graph():
    table = torch.tensor([1.0, 2.0])
    got = capture(lambda x: {"y": torch.outer(table, table).exp().to(x.device) + x}, {"x": meta(2, 2)})
    (constant,) = [n for n in got.module.graph.nodes if n.op == "get_attr"]
    assert torch.equal(got.module.get_buffer(str(constant.target)), table)


def test_a_value_written_in_place_is_read_as_it_is_afterwards():
    got = capture(lambda x: {"y": x.exp().add_(1).sin()}, {"x": meta(2)})
    assert [str(n.target) for n in calls(got)] == ["aten.exp.default", "aten.add_.Tensor", "aten.sin.default"]


aten = torch.ops.aten
BF16, INT, F64 = torch.bfloat16, torch.int32, torch.float64
CALLS = [
    (aten.add.Tensor, (meta(4, 1), meta(3)), {}),
    (aten.add.Tensor, (meta(2, dtype=INT), 1.5), {}),
    (aten.add.Tensor, (meta(2, dtype=INT), 2), {"alpha": 3}),
    (aten.mul.Tensor, (meta(2, 3, dtype=BF16), meta(dtype=torch.float32)), {}),
    (aten.mul.Tensor, (meta(2, 3, dtype=BF16), meta(3, dtype=F64)), {}),
    (aten.mul.Tensor, (meta(3), torch.tensor(2.0, dtype=F64)), {}),
    (aten.ge.Scalar, (meta(5, dtype=INT), 2), {}),
    (aten.where.self, (meta(4, 1, dtype=torch.bool), meta(3, dtype=BF16), meta(1)), {}),
    (aten.clamp.default, (meta(5, dtype=INT),), {"min": 0}),
    (aten.sigmoid.default, (meta(3, 4, dtype=INT),), {}),
    (aten.bitwise_and.Tensor, (meta(3, dtype=torch.bool), meta(2, 1, dtype=torch.bool)), {}),
    (aten.remainder.Scalar, (meta(5, dtype=INT), 3), {}),
    (aten.floor_divide.default, (meta(5, 1, dtype=INT), meta(2, dtype=INT)), {}),
    (aten.div.Tensor_mode, (meta(5, dtype=INT), 2), {"rounding_mode": "floor"}),
    (aten._to_copy.default, (meta(5),), {"dtype": BF16}),
    (aten.add.Tensor, (meta(2, 3, 4).permute(2, 0, 1), meta(4, 2, 3)), {}),
    (aten.cat.default, ([meta(2, 3), meta(2, 1, dtype=BF16)], -1), {}),
    (aten.cat.default, ([meta(2, 3), meta(4, 3)],), {}),
]


@pytest.mark.parametrize("f, args, kwargs", CALLS, ids=lambda x: str(x) if isinstance(x, torch._ops.OpOverload) else "")
def test_what_pointwise_calls_and_concatenations_give_is_what_torch_says(f, args, kwargs):
    found, want = _called(f, args, kwargs), f(*args, **kwargs)
    assert (found.shape, found.dtype, found.stride(), found.device) == (want.shape, want.dtype, want.stride(), META)


@pytest.mark.parametrize("f, args", [
    (aten.add.Tensor, (meta(4), meta(3))),
    (aten.cat.default, ([meta(2, 3), meta(3, 2)], 0)),
])  # fmt: skip
def test_calls_that_cannot_be_are_refused_as_torch_refuses_them(f, args):
    with pytest.raises(RuntimeError, match=r"[Ss]izes? of|broadcast|[Ss]hape"):
        _called(f, args, {})


@pytest.mark.slow
def test_a_model_on_a_mesh_is_traced_without_dynamo():
    """It takes longer to import than all of the tracing. A process of its own: here others have imported it."""
    code = """
import sys
from kimi_graph.parallel import Mesh
from kimi_graph.read_config import load_config
from kimi_graph.shard import Request, shard_model
for phase in ("vision", "prefill", "decode"):
    shard_model(Request(config=load_config("kimi-k3.1-pro"), mesh=Mesh.parse("tp=8"), phase=phase))
print("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]


def test_a_copy_has_the_order_of_dimensions_that_was_asked_for():
    x = torch.empty(3, 4, device="meta")
    captured = capture(lambda x: {"y": x.transpose(0, 1).reshape(-1)}, {"x": x})
    assert [n.meta["val"].shape for n in captured.module.graph.nodes if n.op == "call_function"][-1] == (12,)
