"""States are memory: in-place operators write it, readers see it in their turn, and a race is refused."""

import pytest
import torch

from kimi_graph.compile.executor import Executor, infer_shapes
from kimi_graph.errors import BundleError, CompileError


def assign(b, ref, value, name="write", after=()):
    (edge,) = b.node("Assign", {"ref": ref, "value": value}, outputs="ref", name=name, after=after)
    return edge


def start(b):
    """A state of zeros and an input of ones."""
    return b.state("s", torch.zeros(2)), b.source("x", torch.ones(2))


def values(ran):
    return [t.tolist() for t in ran.outputs]


def test_a_write_changes_the_state_and_not_the_tensor_given(build):
    s, x = start(build)
    build.result(assign(build, s, x))
    ran = build.run()
    assert ran.states["s"].tolist() == [1, 1]
    assert build.values["s"].tolist() == [0, 0]


def test_a_read_after_the_write_sees_the_new_value(build):
    s, x = start(build)
    assign(build, s, x)
    (read,) = build.node("Neg", {"x": s}, name="read", after=("write",))
    build.result(read, after=("write",))
    assert values(build.run()) == [[-1, -1]]


def test_a_read_before_the_write_sees_the_old_value(build):
    s, x = start(build)
    (read,) = build.node("Neg", {"x": s}, name="read")
    assign(build, s, x, after=("read",))
    build.result(read, after=("write",))
    assert values(build.run()) == [[0, 0]]


def test_a_copy_made_before_the_write_keeps_the_old_value(build):
    s, x = start(build)
    (copy,) = build.node("TensorMove", {"x": s}, name="copy")
    assign(build, s, x, after=("copy",))
    (late,) = build.node("Neg", {"x": copy}, after=("write",))
    build.result(late, after=("write",))
    assert values(build.run()) == [[0, 0]]


def test_a_slice_is_a_copy_though_torch_makes_a_view(build):
    s, x = start(build)
    (part,) = build.node("Slice", {"x": s, "offsets": build.const([0]), "size": build.const([1])}, name="part")
    assign(build, s, x, after=("part",))
    (late,) = build.node("Neg", {"x": part}, after=("write",))
    build.result(late, after=("write",))
    assert values(build.run()) == [[0]]


def test_net_output_reads_states_last(build):
    s, x = start(build)
    assign(build, s, x)
    build.result(s, after=("write",))
    assert values(build.run()) == [[1, 1]]


def test_a_reader_neither_before_nor_after_the_writer_is_a_race(build):
    s, x = start(build)
    (read,) = build.node("Neg", {"x": s}, name="read")
    build.result(read, assign(build, s, x))
    with pytest.raises(
        BundleError, match=r"read \(Neg\) reads s, write \(Assign\) writes it: neither is before the other"
    ):
        Executor(build.model)
    with pytest.raises(CompileError, match="neither is before the other"):
        infer_shapes(build.model)


def test_two_writers_without_an_order_are_a_race(build):
    s, x = start(build)
    build.result(assign(build, s, x, "one"), assign(build, s, x, "two"))
    with pytest.raises(BundleError, match=r"(one|two) \(Assign\) reads s, (one|two) \(Assign\) writes it: neither"):
        Executor(build.model)


def test_two_writers_in_a_row_are_fine(build):
    s, x = start(build)
    (double,) = build.node("Add", {"x1": x, "x2": x})
    first = assign(build, s, x, "one")
    (read,) = build.node("Neg", {"x": first}, name="between")
    build.result(read, assign(build, first, double, "two", after=("between",)))
    assert values(build.run()) == [[-1, -1], [2, 2]]


def test_reading_what_a_later_writer_has_overwritten_is_refused(build):
    s, x = start(build)
    first = assign(build, s, x, "one")
    second = assign(build, first, x, "two")
    (late,) = build.node("Neg", {"x": first}, name="late", after=("two",))
    build.result(second, late)
    with pytest.raises(BundleError, match=r"late \(Neg\) reads s, two \(Assign\) writes it: the value read was taken"):
        Executor(build.model)


def test_a_view_taken_before_the_write_may_not_be_read_after_it(build):
    s, x = start(build)
    (view,) = build.node("Reshape", {"x": s, "shape": build.const([2, 1])}, name="view")
    assign(build, s, x, after=("view",))
    (late,) = build.node("Neg", {"x": view}, name="late", after=("write",))
    build.result(late, after=("write",))
    with pytest.raises(
        BundleError, match=r"late \(Neg\) reads s, .*the value read was taken from view, before the write"
    ):
        Executor(build.model)


def test_a_view_of_the_written_state_sees_the_new_value(build):
    s, x = start(build)
    (view,) = build.node("Reshape", {"x": assign(build, s, x), "shape": build.const([2, 1])})
    (read,) = build.node("Neg", {"x": view})
    build.result(read)
    assert values(build.run()) == [[[-1], [-1]]]


def test_a_write_through_a_view_is_refused(build):
    s, x = start(build)
    (view,) = build.node("Reshape", {"x": s, "shape": build.const([2])}, name="view")
    build.result(assign(build, view, x))
    with pytest.raises(BundleError, match=r"write \(Assign\): writes input 'ref' in place through view \(Reshape\)"):
        Executor(build.model)


def test_a_write_into_an_input_is_refused(build):
    _, x = start(build)
    build.result(assign(build, x, x))
    with pytest.raises(BundleError, match=r"write \(Assign\): writes input 'ref' in place, which is Data x"):
        Executor(build.model)


def test_a_write_that_net_output_does_not_need_is_refused(build):
    s, x = start(build)
    assign(build, s, x)
    build.result(x)
    with pytest.raises(
        BundleError, match=r"write \(Assign\): writes s but NetOutput does not depend on it; GE drops it"
    ):
        Executor(build.model)


def test_a_write_into_a_copy_leaves_the_state(build):
    s, x = start(build)
    (copy,) = build.node("TensorMove", {"x": s})
    build.result(assign(build, copy, x), s)
    ran = build.run()
    assert values(ran) == [[1, 1], [0, 0]]
    assert ran.states["s"].tolist() == [0, 0]


def test_rows_of_a_state_are_written_by_index(build):
    s = build.state("s", torch.zeros(3, 2))
    updates = build.source("u", torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    (edge,) = build.node(
        "ScatterNdUpdate",
        {"var": s, "indices": build.const([[2], [0]]), "updates": updates},
        outputs="var",
        attrs={"use_locking": False},
    )
    build.result(edge)
    infer_shapes(build.model)
    ran = build.run("native")
    assert ran.states["s"].tolist() == [[3, 4], [0, 0], [1, 2]]


def test_a_state_nobody_reads_comes_back_as_it_was(build):
    _, x = start(build)
    build.result(x)
    ran = build.run()
    assert torch.equal(ran.states["s"], torch.zeros(2, dtype=torch.float64))
