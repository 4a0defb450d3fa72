import pytest
import torch

from kimi_graph.compile import air
from kimi_graph.compile.ge_proto import GraphDef, ModelDef, OpDef, describe, get_attr, set_attr, tensor_def
from kimi_graph.errors import BundleError, CompileError


def add(graph: GraphDef, op_type: str, name: str, inputs: dict[str, str], outputs: tuple[str, ...] = ("y",)) -> OpDef:
    op = graph.op.add(type=op_type, name=name)
    for key, edge in inputs.items():
        op.input.append(edge)
        describe(op.input_desc.add(name=key), (2, 3), torch.float32)
    for key in outputs:
        describe(op.output_desc.add(name=key), (2, 3), torch.float32)
    return op


def small_model() -> ModelDef:
    model = ModelDef()
    graph = model.graph.add(name="small")
    set_attr(add(graph, "Data", "tokens", {"x": ""}), "index", 0)
    set_attr(add(graph, "Const", "two", {}), "value", tensor_def(torch.full((2, 3), 2.0)))
    mul = add(graph, "Mul", "double", {"x2": "tokens:0", "x1": "two:0"})
    set_attr(mul, "_readable_value", "a note")
    set_attr(mul.output_desc[0], "_meta", "Tensor(dtype=...)")
    set_attr(mul, "axes", [1, 2])
    mul.attr["dropped"].list.i.append(1)  # a list without a kind: GE drops it
    add(graph, "NetOutput", "out", {"input0": "double:0"}, ())
    return model


def test_what_was_read_is_written_to_the_same_bytes(tmp_path):
    path = tmp_path / "a.air"
    size = air.write(small_model(), path)
    assert size == path.stat().st_size
    assert air.to_bytes(air.read(path)) == path.read_bytes()


def test_the_order_in_which_attributes_were_set_does_not_change_the_bytes():
    def model(names):
        made = small_model()
        for name in names:
            set_attr(made.graph[0].op[2], name, name)
        return made

    names = [f"attr_{i}" for i in range(40)]
    assert air.to_bytes(model(names)) == air.to_bytes(model(names[::-1]))


def test_names_of_inputs_and_outputs_survive_a_file_in_any_order():
    op = air.from_bytes(air.to_bytes(small_model()), "a").graph[0].op[2]
    assert [desc.name for desc in op.input_desc] == ["x2", "x1"]
    assert [desc.name for desc in op.output_desc] == ["y"]
    assert not [name for name in op.attr if name.startswith("_input_name")]


def test_notes_and_unset_attributes_do_not_reach_a_file():
    op = air.from_bytes(air.to_bytes(small_model()), "a").graph[0].op[2]
    assert get_attr(op, "axes") == [1, 2]
    assert not {"_readable_value", "dropped"} & set(op.attr)
    assert "_meta" not in op.output_desc[0].attr


def test_the_file_has_the_form_ge_gives_it():
    file = ModelDef.FromString(air.to_bytes(small_model()))
    graph = file.graph[0]
    assert graph.input == ["tokens:0"]
    assert get_attr(file, "target_type") == "MINI"
    assert get_attr(file, "memory_size") == 0
    desc = graph.op[2].output_desc[0]
    assert (desc.name, desc.layout, desc.device_type) == ("", "ND", "NPU")
    assert {name: get_attr(desc, name) for name in desc.attr} == {
        "format_for_int": 2,
        "origin_format": "ND",
        "origin_format_for_int": 2,
        "origin_shape_initialized": False,
    }
    assert list(graph.op[2].attr["_input_name_key"].list.s) == [b"x1", b"x2"]
    assert list(graph.op[2].attr["_input_name_value"].list.i) == [1, 0]


def test_unfed_inputs_are_padded_and_control_edges_come_last():
    model = small_model()
    op = model.graph[0].op[2]
    op.input.insert(0, "two:-1")
    op.input_desc.add(name="bias").attr["_is_unfed_optional"].i = 1
    assert ModelDef.FromString(air.to_bytes(model)).graph[0].op[2].input == ["tokens:0", "two:0", "", "two:-1"]


def test_writing_leaves_the_model_as_it_was(tmp_path):
    model = small_model()
    air.write(model, tmp_path / "a.air")
    assert model == small_model()


def test_every_truncation_is_refused():
    data = air.to_bytes(small_model())
    whole = air.from_bytes(data, "a").graph[0]
    for length in range(len(data)):
        try:
            read = air.from_bytes(data[:length], "a")
        except BundleError as error:
            assert str(error).startswith("a: ")  # noqa: PT017 (one length may pass, see below)
        else:
            # Cut exactly behind the graph: a plain ModelDef without memory attributes, nothing of the graph is lost.
            assert read.graph[0] == whole
            assert not read.attr


@pytest.mark.parametrize("data", [b"", b"\x00" * 40, b"not a graph at all", b"PK\x03\x04" + b"\x07" * 100], ids=repr)
def test_garbage_is_refused(tmp_path, data):
    path = tmp_path / "a.air"
    path.write_bytes(data)
    with pytest.raises(BundleError, match=r"a\.air: "):
        air.read(path)


def test_a_missing_file_is_named():
    with pytest.raises(BundleError, match=r"nowhere\.air: cannot be read"):
        air.read("nowhere.air")


def test_names_that_point_nowhere_are_refused():
    file = ModelDef.FromString(air.to_bytes(small_model()))
    file.graph[0].op[2].attr["_input_name_value"].list.i[1] = 9
    with pytest.raises(BundleError, match="op 'double' \\(Mul\\) names inputs it does not have"):
        air.from_bytes(file.SerializeToString(), "a")


def test_a_graph_too_large_for_ge_is_refused_and_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(air, "SIZE_LIMIT", 100)
    with pytest.raises(CompileError, match="small: the graph is"):
        air.write(small_model(), tmp_path / "a.air")
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.air"
    path.write_bytes(b"old")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(type(path), "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        air.write(small_model(), path)
    assert [p.read_bytes() for p in tmp_path.iterdir()] == [b"old"]
