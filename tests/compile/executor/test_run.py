"""The executor: modes, checks of what it is given, order, choices, and graphs that are refused."""

import weakref

import pytest
import torch

from kimi_graph.compile import air
from kimi_graph.compile.executor import Executor, Selections, infer_shapes, provenance_counts, provenance_table
from kimi_graph.compile.ge_proto import ModelDef, describe, set_attr
from kimi_graph.errors import BundleError, CompileError

BF16, F32 = torch.bfloat16, torch.float32


def two_casts(b) -> ModelDef:
    """x / 3 through bfloat16: exact where floats are exact."""
    x = b.source("x", torch.tensor([1.0, 2.0]))
    (half,) = b.node("Cast", {"x": x}, attrs={"dst_type": 27}, name="narrow")
    (third,) = b.node("RealDiv", {"x1": half, "x2": b.const([3.0], BF16)}, name="third")
    (back,) = b.node("Cast", {"x": third}, attrs={"dst_type": 0}, name="widen")
    return b.result(back, third)


def test_exact_mode_keeps_every_float_in_float64(build):
    two_casts(build)
    wide, third = build.run("exact").outputs
    assert wide.dtype == third.dtype == torch.float64
    assert torch.equal(wide, torch.tensor([1 / 3, 2 / 3], dtype=torch.float64))


def test_native_mode_rounds_as_the_casts_say(build):
    two_casts(build)
    wide, third = build.run("native").outputs
    assert (wide.dtype, third.dtype) == (F32, BF16)
    assert torch.equal(wide, torch.tensor([1 / 3, 2 / 3]).to(BF16).float())


def test_a_described_graph_survives_its_bytes(build):
    model = two_casts(build)
    infer_shapes(model)
    executor = Executor(air.from_bytes(air.to_bytes(model), "graph"))
    assert executor.inputs == ("x",)
    for mode in ("exact", "native"):
        from_bytes, in_memory = executor.run(build.values, {}, mode).outputs, build.run(mode).outputs
        assert all(torch.equal(a, b) for a, b in zip(from_bytes, in_memory, strict=True))


def test_an_output_that_is_not_as_described_is_refused_in_native_mode(build):
    model = two_casts(build)
    describe(next(op for op in model.graph[0].op if op.name == "third").output_desc[0], (2,), F32)
    with pytest.raises(BundleError, match=r"third \(RealDiv\): output y is \[2\] bfloat16, described as \[2\] float32"):
        build.run("native")
    build.run("exact")  # only the class of a float counts there
    with pytest.raises(
        CompileError, match=r"third \(RealDiv\): output y is \[2\] bfloat16, described as \[2\] float32"
    ):
        infer_shapes(model)


def test_a_shape_that_is_not_as_described_is_refused_in_both_modes(build):
    model = two_casts(build)
    describe(next(op for op in model.graph[0].op if op.name == "third").output_desc[0], (3,), BF16)
    for mode in ("exact", "native"):
        with pytest.raises(BundleError, match=r"third \(RealDiv\): output y is \[2\]"):
            build.run(mode)


def test_inputs_are_checked_by_name_shape_and_dtype(build):
    executor = Executor(two_casts(build))
    with pytest.raises(BundleError, match=r"missing x; unknown y"):
        executor.run({"y": torch.zeros(2)}, {}, "exact")
    with pytest.raises(BundleError, match=r"x \(Data\): the tensor given is \[3\] float32, described as \[2\] float32"):
        executor.run({"x": torch.zeros(3)}, {}, "native")
    with pytest.raises(BundleError, match=r"x \(Data\): the tensor given is \[2\] bfloat16"):
        executor.run({"x": torch.zeros(2, dtype=BF16)}, {}, "native")
    with pytest.raises(BundleError, match="mode 'fast' is not one of exact, native"):
        executor.run({"x": torch.zeros(2)}, {}, "fast")


def test_every_node_that_is_needed_is_observed_in_order(build):
    two_casts(build)
    seen = []
    build.run(observe=lambda node, outputs: seen.append((node.name, tuple(outputs[0].shape))))
    assert [name for name, _ in seen] == ["x", "narrow", "Const_2", "third", "widen"]
    assert seen[0] == ("x", (2,))


def test_nodes_nobody_needs_do_not_run(build):
    x = build.source("x", torch.ones(2))
    build.node("Reshape", {"x": x, "shape": build.const([7])}, name="wrong")
    build.result(x)
    assert torch.equal(build.run().outputs[0], torch.ones(2, dtype=torch.float64))


def test_values_are_let_go_after_their_last_reader(build):
    x = build.source("x", torch.ones(2))
    for _ in range(4):
        (x,) = build.node("Neg", {"x": x})
    build.result(x)
    made: list[weakref.ref] = []
    alive: list[int] = []

    def watch(node, outputs):
        made.append(weakref.ref(outputs[0]))
        alive.append(sum(tensor() is not None for tensor in made))

    build.run(observe=watch)
    assert alive == [1, 2, 2, 2, 2]  # what a node reads and what it makes, nothing older


def test_nodes_may_come_in_any_order_in_the_file(build):
    model = two_casts(build)
    ops = list(model.graph[0].op)
    del model.graph[0].op[:]
    for op in reversed(ops):
        model.graph[0].op.add().CopyFrom(op)
    assert torch.equal(build.run().outputs[0], torch.tensor([1 / 3, 2 / 3], dtype=torch.float64))


def test_control_edges_order_nodes(build):
    x = build.source("x", torch.ones(2))
    (late,) = build.node("Neg", {"x": x}, name="late", after=("early",))
    (early,) = build.node("Abs", {"x": x}, name="early")
    build.result(late, early)
    seen = []
    build.run(observe=lambda node, _: seen.append(node.name))
    assert seen == ["x", "early", "late"]


# ---- graphs that are refused ---------------------------------------------------------------------------------------


def test_an_edge_to_nowhere_is_refused(build):
    build.source("x", torch.ones(2))
    build.node("Neg", {"x": "y:0"}, name="n")
    with pytest.raises(BundleError, match=r"n \(Neg\): reads 'y:0', but there is no node 'y'"):
        Executor(build.model)


def test_an_edge_to_an_output_that_does_not_exist_is_refused(build):
    build.source("x", torch.ones(2))
    build.node("Neg", {"x": "x:1"}, name="n")
    with pytest.raises(BundleError, match=r"n \(Neg\): reads 'x:1', but 'x' has 1 outputs"):
        Executor(build.model)


def test_a_cycle_is_refused(build):
    build.node("Neg", {"x": "b:0"}, name="a")
    (b,) = build.node("Neg", {"x": "a:0"}, name="b")
    build.result(b)
    with pytest.raises(BundleError, match="a cycle: a, b"):
        Executor(build.model)


def test_two_nodes_of_one_name_are_refused(build):
    x = build.source("x", torch.ones(2))
    build.node("Neg", {"x": x}, name="n")
    build.node("Abs", {"x": x}, name="n")
    with pytest.raises(BundleError, match=r"n: two nodes have this name \(Neg and Abs\)"):
        Executor(build.model)


def test_two_inputs_of_one_index_are_refused(build):
    build.source("x", torch.ones(2))
    build.state("y", torch.ones(2))
    set_attr(build.graph.op[1], "index", 0)
    with pytest.raises(BundleError, match="y and x: two inputs have index 0"):
        Executor(build.model)


def test_an_operator_without_semantics_is_refused(build):
    build.node("FlyToTheMoon", {"x": build.source("x", torch.ones(2))}, name="n")
    with pytest.raises(BundleError, match=r"n: operator type 'FlyToTheMoon' has no semantics"):
        Executor(build.model)


@pytest.mark.parametrize(
    "inputs, message",
    [
        ({"x2": "x:0", "x1": "x:0"}, "required input 'x1' is missing or out of order"),
        ({"x1": "x:0"}, "required input 'x2' is missing"),
        ({"x1": "x:0", "x2": "x:0", "x3": "x:0"}, "input 'x3' is unknown or out of order; the prototype has x1, x2"),
    ],
)
def test_inputs_must_be_those_of_the_prototype_in_its_order(build, inputs, message):
    build.source("x", torch.ones(2))
    build.node("Add", inputs, name="n")
    with pytest.raises(BundleError, match=rf"n \(Add\): {message}"):
        Executor(build.model)


def test_outputs_must_be_those_of_the_prototype(build):
    x = build.source("x", torch.ones(2, 2))
    build.result(*build.node("RmsNorm", {"x": x, "gamma": x}, outputs="rstd y", name="n"))
    with pytest.raises(BundleError, match=r"n \(RmsNorm\): outputs are \['rstd', 'y'\], the prototype has"):
        Executor(build.model)


def test_shapes_that_do_not_fit_are_refused_with_the_node(build):
    x1, x2 = build.source("a", torch.ones(2, 3)), build.source("b", torch.ones(2, 3))
    build.result(*build.node("MatMul", {"x1": x1, "x2": x2}, name="m"))
    with pytest.raises(CompileError, match=r"m \(MatMul\): .*\[x1 \[2, 3\], x2 \[2, 3\]\]"):
        infer_shapes(build.model)


def test_a_shape_that_is_not_constant_is_refused(build):
    x, shape = build.source("x", torch.ones(4)), build.source("s", torch.tensor([2, 2]))
    build.result(*build.node("Reshape", {"x": x, "shape": shape}, name="r"))
    with pytest.raises(CompileError, match=r"r \(Reshape\): an input that decides shapes is not made of constants"):
        infer_shapes(build.model)


def test_a_graph_without_net_output_has_shapes_but_does_not_run(build):
    x = build.source("x", torch.ones(2))
    build.node("Neg", {"x": x}, name="n")
    infer_shapes(build.model)
    with pytest.raises(BundleError, match="no NetOutput"):
        Executor(build.model)


def test_data_takes_no_other_attribute_than_its_index(build):
    x = build.source("x", torch.ones(2))
    set_attr(build.graph.op[0], "layout", "NZ")
    build.result(x)
    with pytest.raises(BundleError, match=r"x \(Data\): one attribute, an integer index, expected"):
        Executor(build.model)


def test_an_attribute_of_another_kind_is_refused(build):
    x = build.source("x", torch.ones(2, 2))
    build.result(*build.node("RmsNorm", {"x": x, "gamma": x}, outputs="y rstd", attrs={"epsilon": 1}, name="n"))
    with pytest.raises(BundleError, match=r"n \(RmsNorm\): attribute 'epsilon' is 1, the prototype wants a float"):
        build.run()


# ---- choices -------------------------------------------------------------------------------------------------------


def test_choices_of_an_exact_run_are_replayed(build):
    x = build.source("x", torch.tensor([[1.0, 1.0 + 2**-9, 0.0]]))
    (half,) = build.node("Cast", {"x": x}, attrs={"dst_type": 27})
    values, indices = build.node("TopKV2", {"x": half, "k": build.const(1)}, outputs="values indices", name="top")
    build.result(values, indices)
    recorded = Selections()
    assert build.run("exact", selections=recorded).outputs[1].item() == 1
    assert build.run("native").outputs[1].item() == 0  # bfloat16 cannot tell the two apart
    replayed = build.run("native", selections=recorded.replay())
    assert replayed.outputs[1].item() == 1
    assert replayed.outputs[0].item() == 1.0
    with pytest.raises(BundleError, match=r"top \(TopKV2\): no choice of this shape was recorded"):
        build.run("native", selections=Selections(replaying=True))


# ---- evidence ------------------------------------------------------------------------------------------------------


def test_provenance_is_counted_and_listed(build):
    two_casts(build)
    types = Executor(build.model).types
    assert types == {"Cast", "RealDiv", "Const"}
    assert provenance_counts(types) == {"documented formula": 2, "torch semantics": 1}
    assert sum(provenance_counts().values()) == len(provenance_table().splitlines())
    assert "RealDiv  torch semantics" in provenance_table(types)
