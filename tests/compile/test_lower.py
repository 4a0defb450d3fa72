import pytest
import torch

from kimi_graph.compile.ge_proto import data_edges, dtype_of, get_attr, is_known, shape_of
from kimi_graph.compile.lower import CAUSAL_MASK, CAUSAL_MASK_SIZE, Room
from kimi_graph.errors import CompileError

bf16, f32, i64 = torch.bfloat16, torch.float32, torch.int64


@pytest.fixture
def ge(host):
    with host.graph.default_ge_graph(host.graph.GeGraph(name="room")):
        yield Room(host, "a3", "9.1")


def described(value):
    return shape_of(value.desc), dtype_of(value.desc)


def test_inputs_are_numbered_and_known(ge):
    x, y = ge.input("x", (2, 3), bf16), ge.input("y", (4,), i64)
    assert [get_attr(v.node, "index") for v in (x, y)] == [0, 1]
    assert (ge.shape(x), ge.dtype(x)) == ((2, 3), bf16) == described(x)
    assert described(y) == ((4,), i64)


def test_a_constant_has_the_asked_dtype_and_its_own_shape(ge):
    assert described(ge.const([[1, 2], [3, 4]], torch.int32)) == ((2, 2), torch.int32)
    assert described(ge.const(1e-6, f32)) == ((), f32)
    assert described(ge.const([], i64)) == ((0,), i64)


@pytest.mark.parametrize("make, expected", [
    (lambda ge, x: ge.cast(x, f32), ((2, 3), f32)),
    (lambda ge, x: ge.reshape(x, [6, 1]), ((6, 1), bf16)),
    (lambda ge, x: ge.broadcast(ge.reshape(x, [2, 1, 3]), [2, 5, 3]), ((2, 5, 3), bf16)),
    (lambda ge, x: ge.linear(x, ge.input("w", (7, 3), bf16)), ((2, 7), bf16)),
])  # fmt: skip
def test_values_of_the_room_are_known_at_once(ge, make, expected):
    made = make(ge, ge.input("x", (2, 3), bf16))
    assert (ge.shape(made), ge.dtype(made)) == expected
    assert described(made) == expected


def test_what_changes_nothing_makes_no_node(ge):
    x = ge.input("x", (2, 3), bf16)
    assert ge.cast(x, bf16) is x
    assert ge.reshape(x, [2, 3]) is x
    assert ge.broadcast(x, (2, 3)) is x


def test_a_helpers_result_is_not_known_before_the_lowering_is_done(ge):
    y = ge.Sigmoid(ge.input("x", (2, 3), bf16))
    assert not is_known(y.desc)
    with pytest.raises(AssertionError, match=r"Sigmoid:0 \(Sigmoid\): shape and dtype of an inner value are not known"):
        ge.shape(y)
    assert shape_of(ge.reshape(y, [6]).desc) == ()


def test_optional_inputs_that_are_not_given_are_unfed(ge):
    x = ge.input("x", (2, 4), bf16)
    made = ge.MatMul(x, ge.input("w", (4, 4), bf16))
    assert data_edges(made.node) == ["x:0", "w:0", ""]


def test_a_missing_required_input_is_refused(ge):
    with pytest.raises(AssertionError, match="can not be None"):
        ge.RmsNorm(ge.input("x", (2, 4), bf16))


def test_an_unknown_operator_is_named(ge):
    with pytest.raises(CompileError, match="no helper for a GE operator 'Nothing'"):
        ge.Nothing(1)


def test_an_own_type_takes_python_values(ge):
    x, memory = ge.input("x", (2, 4), bf16), ge.input("memory", (3, 4), f32)
    attrs = {"scale": 0.5, "steps": 3, "exact": True, "mode": "fast", "axes": [1, 2], "out": f32}
    made = ge.own("Mine", {"x": x, "mask": None, "parts": [x, x], "memory": memory}, ["y", "memory"], attrs)
    node = made[0].node
    assert node.type == "Mine"
    assert data_edges(node) == ["x:0", "", "x:0", "x:0", "memory:0"]
    assert [d.name for d in node.input_desc] == ["x", "mask", "parts0", "parts1", "memory"]
    assert [d.name for d in node.output_desc] == ["y", "memory"]
    assert {name: get_attr(node, name) for name in ("scale", "steps", "exact", "mode", "axes")} == {
        "scale": 0.5,
        "steps": 3,
        "exact": True,
        "mode": "fast",
        "axes": [1, 2],
    }
    assert get_attr(node, "out").torch_dtype == f32


def test_an_own_type_with_one_output_gives_it_bare(ge):
    assert ge.own("One", {"x": ge.input("x", (2,), f32)}, ["y"], {}).tensor == "One:0"


def test_a_constant_in_another_shape_is_another_constant(ge):
    made = ge.reshape(ge.const([3, 1, 2], torch.int32), [3, 1])
    assert made.node.type == "Const" and (ge.shape(made), ge.dtype(made)) == ((3, 1), torch.int32)


def test_a_declared_input_is_the_same_memory_in_another_shape(ge):
    pool = ge.input("pool", (9, 128, 512), bf16)
    declared = ge.declare(pool, [9, 128, 1, 512])
    assert declared.tensor == pool.tensor
    assert ge.shape(declared) == (9, 128, 1, 512)
    for desc in (declared.node.input_desc[0], declared.node.output_desc[0]):
        assert shape_of(desc) == (9, 128, 1, 512)
    with pytest.raises(AssertionError):
        ge.declare(pool, [9, 128])
    with pytest.raises(AssertionError, match="only an input of the graph"):
        ge.declare(ge.cast(pool, f32), [9, 128, 1, 512])


def test_the_causal_mask_is_one_input_however_often_it_is_asked_for(ge):
    ge.input("x", (2,), bf16)
    mask = ge.causal_mask()
    assert ge.causal_mask() is mask
    assert mask.tensor == f"{CAUSAL_MASK}:0"
    assert described(mask) == ((CAUSAL_MASK_SIZE, CAUSAL_MASK_SIZE), torch.bool)
    assert get_attr(mask.node, "index") == 1
