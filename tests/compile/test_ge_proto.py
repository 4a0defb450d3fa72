import pytest
import torch

from kimi_graph.compile import ge_proto
from kimi_graph.compile.ge_proto import AttrDef, Dtype, OpDef, attr_value, fill_attr, get_attr, set_attr

VALUES = [
    True,
    3,
    -(2**63),
    0.5,
    "sum",
    b"\xff\x00",
    Dtype.BF16,
    [1, 2, 3],
    [0.5, 2.0],
    [True, False],
    ["a", "b"],
    [Dtype.FLOAT, Dtype.INT32],
    [[1], [2, 3]],
    [[0.5, 1.0], []],
    [],
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_an_attribute_gives_back_what_was_stored_also_through_bytes(value):
    attr = AttrDef()
    fill_attr(attr, value)
    assert attr_value(AttrDef.FromString(attr.SerializeToString())) == value


def test_every_stored_list_has_a_kind_because_ge_drops_lists_without():
    for value in VALUES:
        attr = AttrDef()
        fill_attr(attr, value)
        if attr.WhichOneof("value") == "list":
            assert attr.list.val_type > 0


def test_setting_an_attribute_again_replaces_it():
    op = OpDef(name="x", type="T")
    set_attr(op, "a", [1, 2])
    set_attr(op, "a", [3])
    assert get_attr(op, "a") == [3]
    set_attr(op, "a", "text")
    assert get_attr(op, "a") == "text"
    assert get_attr(op, "b", 7) == 7


def test_reading_a_missing_attribute_does_not_create_it():
    op = OpDef()
    get_attr(op, "a")
    assert not op.attr


@pytest.mark.parametrize("value", [object(), [1, "a"], [object()]], ids=str)
def test_what_ge_cannot_hold_is_refused(value):
    with pytest.raises(ValueError, match="GE"):
        fill_attr(AttrDef(), value)


def test_the_two_numberings_of_dtypes_differ_and_are_both_one_to_one():
    assert (Dtype.FLOAT.ge, Dtype.FLOAT.proto) == (0, 1)
    assert (Dtype.INT32.ge, Dtype.INT32.proto) == (3, 7)
    for dtype in Dtype:
        assert Dtype.of_ge(dtype.ge) is dtype
        assert Dtype.of_proto(dtype.proto) is dtype
        if dtype.shared is not None:
            assert Dtype.of_torch(dtype.torch_dtype) is dtype


@pytest.mark.parametrize("dtype", [d.shared for d in Dtype if d.shared not in (None, torch.complex32)], ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0, 3), (2, 5)], ids=str)
def test_a_constant_gives_back_its_tensor(shape, dtype):
    value = torch.randint(0, 2, shape).to(dtype)
    back = ge_proto.tensor_value(ge_proto.tensor_def(value))
    assert back.shape == value.shape
    assert back.dtype == dtype
    assert ge_proto.tensor_def(back) == ge_proto.tensor_def(value)


def test_a_constant_with_missing_bytes_is_refused():
    constant = ge_proto.tensor_def(torch.ones(4))
    constant.data = constant.data[:8]
    with pytest.raises(ValueError, match=r"\(4,\)"):
        ge_proto.tensor_value(constant)


def test_a_scalar_is_known_and_a_fresh_description_is_not():
    desc = ge_proto.TensorDescriptor()
    assert not ge_proto.is_known(desc)
    ge_proto.describe(desc, (), torch.bfloat16)
    assert ge_proto.is_known(ge_proto.TensorDescriptor.FromString(desc.SerializeToString()))
    assert ge_proto.shape_of(desc) == ()
    assert ge_proto.dtype_of(desc) == torch.bfloat16


def test_edges_are_split_into_data_and_control():
    op = OpDef(input=["a/b:0", "", "c:2", "d:-1"])
    assert ge_proto.data_edges(op) == ["a/b:0", "", "c:2"]
    assert ge_proto.control_edges(op) == ["d:-1"]
    assert [ge_proto.split_edge(e) for e in op.input] == [("a/b", 0), ("", 0), ("c", 2), ("d", -1)]
