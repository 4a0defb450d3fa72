import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from kimi_graph.compile import air, ge_proto
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


@pytest.mark.parametrize("value", [object(), [1, "a"], [object()]], ids=["object", "mixed", "objects"])
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


def test_a_tiled_matrix_has_its_shape_in_a_file_and_for_its_readers():
    model = ge_proto.ModelDef()
    graph = model.graph.add(name="g")
    data = graph.op.add(name="w", type="Data")
    for desc in (data.output_desc.add(name="y"), data.input_desc.add(name="x")):
        ge_proto.describe_tiled(desc, (2, 64, 128), Dtype.FLOAT4_E2M1)
    reader = graph.op.add(name="r", type="GroupedMatmul", input=["w:0"])
    reader.input_desc.add(name="weight0")
    ge_proto.describe_inputs(graph)
    read = air.from_bytes(air.to_bytes(model), "file").graph[0].op
    tiled, plain = read[0].output_desc[0], read[1].input_desc[0]
    assert (tiled.layout, plain.layout) == ("FRACTAL_NZ", "ND")
    assert [ge_proto.is_tiled(d) for d in (tiled, plain)] == [True, False]
    assert [ge_proto.shape_of(d) for d in (tiled, plain)] == [(2, 64, 128)] * 2
    assert [ge_proto.bytes_of(d) for d in (tiled, plain)] == [2 * 64 * 64] * 2


def test_every_dtype_has_a_size_and_those_without_a_torch_dtype_are_held_in_a_wider_one():
    assert {d.name: d.held for d in Dtype if d in (Dtype.INT4, Dtype.FLOAT4_E2M1, Dtype.BF16)} == {
        "INT4": torch.int8, "FLOAT4_E2M1": torch.bfloat16, "BF16": torch.bfloat16,
    }  # fmt: skip
    assert all(d.bits > 0 for d in Dtype)
    with pytest.raises(ValueError, match="no dtype for GE's HIFLOAT8"):
        _ = Dtype.HIFLOAT8.held


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


# ---- against torchair's messages ----


@pytest.fixture(scope="module")
def theirs(host):
    import torchair._ge_concrete_graph.ge_ir_pb2 as messages  # pyright: ignore[reportMissingImports]

    return messages


def fields(descriptor):
    """Number, type, repeated and oneof by name; enums are varints like int32, opaque messages are like bytes."""
    kinds = {"AttrGroups": 12}

    def kind(field):
        if field.message_type is not None:
            return kinds.get(field.message_type.name, field.type)
        return 5 if field.type == field.TYPE_ENUM else field.type

    return {
        f.name: (f.number, kind(f), f.is_repeated, f.containing_oneof.name if f.containing_oneof else None)
        for f in descriptor.fields
    }


def messages_of(descriptor, found):
    """Message types reachable from one, by name; map entries are walked through."""
    if descriptor.name != "AttrGroups" and descriptor.name not in found:
        if not descriptor.GetOptions().map_entry:
            found[descriptor.name] = descriptor
        for f in descriptor.fields:
            if f.message_type is not None:
                messages_of(f.message_type, found)
    return found


def test_every_field_is_as_torchair_has_it(theirs):
    mine = messages_of(ge_proto.ModelDef.DESCRIPTOR, {})
    other = messages_of(theirs.ModelDef.DESCRIPTOR, {})
    assert mine.keys() == other.keys()
    for name in mine:
        assert fields(mine[name]) == fields(other[name]), name


def test_the_pools_are_separate(theirs):
    assert theirs.OpDef is not OpDef
    assert theirs.OpDef.DESCRIPTOR.full_name == OpDef.DESCRIPTOR.full_name


scalars = {
    1: st.floats(width=64, allow_nan=False),
    2: st.floats(width=32, allow_nan=False),
    3: st.integers(-(2**63), 2**63 - 1),
    5: st.integers(0, 41),
    8: st.booleans(),
    9: st.text(max_size=4),
    12: st.binary(max_size=4),
    13: st.integers(0, 2**32 - 1),
}


def fill(message, draw, depth):
    """Random fields, to a depth."""
    for f in message.DESCRIPTOR.fields:
        if draw(st.integers(0, 2)) == 0 or f.name == "attr_groups":
            continue
        if f.message_type is None:
            draw_one = scalars[f.type]
            if f.is_repeated:
                getattr(message, f.name).extend(draw(st.lists(draw_one, max_size=2)))
            else:
                setattr(message, f.name, draw(draw_one))
        elif depth:
            entry = f.message_type.GetOptions().map_entry
            if entry:
                for key in draw(st.lists(st.text(max_size=3), max_size=2)):
                    fill(getattr(message, f.name)[key], draw, depth - 1)
            else:
                inner = getattr(message, f.name)
                inner = inner.add() if f.is_repeated else inner
                inner.SetInParent()
                fill(inner, draw, depth - 1)


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=60, suppress_health_check=list(hypothesis.HealthCheck))
def test_bytes_are_those_of_torchairs_messages_both_ways(theirs, data):
    model = ge_proto.ModelDef()
    fill(model, data.draw, 4)
    mine = model.SerializeToString(deterministic=True)
    other = theirs.ModelDef.FromString(mine).SerializeToString(deterministic=True)
    assert other == mine
    assert ge_proto.ModelDef.FromString(other) == model
