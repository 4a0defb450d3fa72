"""A valid graph passes every check; one change per rule is caught, with the node, what was found and expected."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from kimi_graph.compile import air
from kimi_graph.compile.checks import check_graph
from kimi_graph.compile.ge_proto import Dtype, ModelDef, OpDef, describe, fill_attr, set_attr, split_edge, tensor_def
from kimi_graph.compile.prototypes import Prototypes
from kimi_graph.compile.targets import target
from kimi_graph.errors import CompileError

BF16, F32, I32, I64 = torch.bfloat16, torch.float32, torch.int32, torch.int64
F16, I8, E4M3, E8M0 = torch.float16, torch.int8, torch.float8_e4m3fn, torch.float8_e8m0fnu

HELPERS = '''
def Add(x1, x2):
    """REG_OP(Add)\\n
    .INPUT(x1, TensorType({DT_FLOAT, DT_BF16, DT_INT32}))\\n
    .INPUT(x2, TensorType({DT_FLOAT, DT_BF16, DT_INT32}))\\n
    .OUTPUT(y, TensorType({DT_FLOAT, DT_BF16, DT_INT32}))\\n
    """


def MatMul(x1, x2, bias=None):
    """REG_OP(MatMul)\\n
    .INPUT(x1, TensorType({DT_FLOAT, DT_BF16}))\\n
    .INPUT(x2, TensorType({DT_FLOAT, DT_BF16}))\\n
    .OPTIONAL_INPUT(bias, TensorType({DT_FLOAT, DT_BF16}))\\n
    .OUTPUT(y, TensorType({DT_FLOAT, DT_BF16}))\\n
    .ATTR(transpose_x1, Bool, false)\\n
    .ATTR(transpose_x2, Bool, false)\\n
    """


def Reshape(x, shape):
    """REG_OP(Reshape)\\n
    .INPUT(x, TensorType::ALL())\\n
    .INPUT(shape, TensorType({DT_INT32, DT_INT64}))\\n
    .OUTPUT(y, TensorType::ALL())\\n
    .ATTR(axis, Int, 0)\\n
    .ATTR(num_axes, Int, -1)\\n
    """


def ConcatD(x, concat_dim):
    """REG_OP(ConcatD)\\n
    .DYNAMIC_INPUT(x, TensorType({DT_BF16, DT_FLOAT}))\\n
    .OUTPUT(y, TensorType({DT_BF16, DT_FLOAT}))\\n
    .REQUIRED_ATTR(concat_dim, Int)\\n
    .ATTR(N, Int, 1)\\n
    """


def Bitcast(x, type):
    """REG_OP(Bitcast)\\n
    .INPUT(x, TensorType({DT_FLOAT, DT_FLOAT16, DT_INT8}))\\n
    .OUTPUT(y, TensorType({DT_FLOAT, DT_FLOAT16, DT_INT8}))\\n
    .REQUIRED_ATTR(type, Type)\\n
    .ATTR(keep_dim, Bool, false)\\n
    """


def Cast(x, dst_type):
    """
    REG_OP(Cast)
        .INPUT(x, TensorType({DT_FLOAT, DT_BF16, DT_INT32,
                              DT_DOUBLE}))
        .OUTPUT(y, TensorType({DT_FLOAT, DT_BF16, DT_INT32, DT_DOUBLE}))
        .REQUIRED_ATTR(dst_type, Int)
    """
'''


@pytest.fixture(scope="module")
def helpers(tmp_path_factory) -> Path:
    """A folder with the helper files of torchair, and a few operators in them."""
    folder = tmp_path_factory.mktemp("torchair")
    for name in ("_ge_concrete_graph/dynamic_output_ops.py", "ge/_ge_graph.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("")
    (folder / "_ge_concrete_graph/auto_generated_ge_raw_ops.py").write_text(HELPERS)
    return folder


class Builder:
    """A graph made by hand: `add` gives the edge of a node's first output, `name:k` is the k-th."""

    def __init__(self) -> None:
        self.model = ModelDef()
        self.graph = self.model.graph.add(name="tiny")
        self.weights: set[str] = set()
        self.states: set[str] = set()
        self.inputs = 0

    def op(self, name: str) -> OpDef:
        return next(op for op in self.graph.op if op.name == name)

    def data(self, name: str, shape, dtype=BF16, kind: str = "Data") -> str:
        op = self.graph.op.add(name=name, type=kind)
        describe(op.output_desc.add(name="y"), shape, dtype)
        describe(op.input_desc.add(name="x"), shape, dtype)
        set_attr(op, "index", self.inputs)
        self.inputs += 1
        return f"{name}:0"

    def weight(self, name: str, shape, dtype=BF16) -> str:
        self.weights.add(name)
        return self.data(name, shape, dtype)

    def state(self, name: str, shape, dtype=F32) -> str:
        self.states.add(name)
        return self.data(name, shape, dtype, "RefData")

    def const(self, name: str, values, dtype=I64) -> str:
        op = self.graph.op.add(name=name, type="Const")
        value = torch.tensor(values, dtype=dtype)
        fill_attr(op.attr["value"], tensor_def(value))
        describe(op.output_desc.add(name="y"), value.shape, dtype)
        return f"{name}:0"

    def add(self, name: str, kind: str, inputs: dict, outputs: dict, after=(), **attrs) -> str:
        """inputs: edge by name, None for one that is not given; outputs: (shape, dtype) by name."""
        op = self.graph.op.add(name=name, type=kind)
        for input_, edge in inputs.items():
            op.input.append(edge or "")
            desc = op.input_desc.add()
            if edge:
                producer, index = split_edge(edge)
                desc.CopyFrom(self.op(producer).output_desc[index])
            else:
                unfed(desc)
            desc.name = input_
        op.input.extend(f"{other}:-1" for other in after)
        for output, (shape, dtype) in outputs.items():
            describe(op.output_desc.add(name=output), shape, dtype)
        for key, value in attrs.items():
            set_attr(op, key, value)
        return f"{name}:0"

    def done(self, *edges: str) -> "Builder":
        self.add("NetOutput", "NetOutput", {f"input{i}": e for i, e in enumerate(edges)}, {})
        return self


def unfed(desc) -> None:
    """Describe an optional input that is not given, as torchair does."""
    desc.dtype = Dtype.UNDEFINED.proto
    desc.ClearField("shape")
    desc.attr["_is_unfed_optional"].i = 1


def step_graph() -> Builder:
    """A KDA decode step in small: project, update the memory in place, project back, add."""
    g = Builder()
    x = g.data("x", [2, 64])
    slots, lengths = g.data("slots", [2], I32), g.const("ones", [1, 1], I32)
    gate, beta = g.data("gate", [2, 4, 16], F32), g.data("beta", [2, 4])
    memory = g.state("memory", [3, 4, 16, 16], BF16)
    q = g.add("q", "MatMul", {"x1": x, "x2": g.weight("wq", [64, 64]), "bias": None}, {"y": ([2, 64], BF16)},
              transpose_x1=False, transpose_x2=True)  # fmt: skip
    heads = g.add("heads", "Reshape", {"x": q, "shape": g.const("shape", [2, 4, 16])}, {"y": ([2, 4, 16], BF16)})
    inputs = {"query": heads, "key": heads, "value": heads, "beta": beta, "state": memory}
    inputs |= {"actual_seq_lengths": lengths, "ssm_state_indices": slots, "g": None, "gk": gate}
    made = {"out": ([2, 4, 16], BF16), "state": ([3, 4, 16, 16], BF16)}
    o = g.add("step", "RecurrentGatedDeltaRule", inputs, made, scale_value=0.25)
    flat = g.add("flat", "Reshape", {"x": o, "shape": g.const("shape2", [2, 64])}, {"y": ([2, 64], BF16)})
    normed = g.add("norm", "RmsNorm", {"x": flat, "gamma": g.weight("gamma", [64])},
                   {"y": ([2, 64], BF16), "rstd": ([2, 1], F32)}, epsilon=1e-6)  # fmt: skip
    y = g.add("sum", "Add", {"x1": x, "x2": normed}, {"y": ([2, 64], BF16)})
    return g.done(y)


def check(g: Builder, helpers: Path, name: str = "a3", cann: str = "9.1", **claims) -> None:
    t = target(name, cann=cann)
    claims = {"weights": g.weights, "states": g.states} | claims
    check_graph(g.model, t, Prototypes(t.soc, helpers), **claims)


@pytest.mark.parametrize("name", ["a2", "a3", "950pr", "950dt"])
def test_a_valid_graph_passes_on_every_target(helpers, name):
    check(step_graph(), helpers, name)


def test_a_graph_read_back_from_its_file_passes_too(helpers):
    for g in (step_graph(), moe_graph(), absorbed()):
        g.model = air.from_bytes(air.to_bytes(g.model), "tiny")
        check(g, helpers)


# ---- one mutation per rule: what is done, and what the message says --------------------------------------------------

MUTATIONS = {
    "a second node of a name": (
        lambda g: g.graph.op.add().CopyFrom(g.op("heads")),
        r"heads: 2 nodes of this name \(Reshape\); expected one",
    ),
    "a node without a name": (lambda g: setattr(g.op("norm"), "name", ""), r"1 nodes without a name"),
    "an edge from nowhere": (
        lambda g: g.op("q").input.__setitem__(0, "y:0"),
        r"q: input y:0 of MatMul; expected a node of this graph, and 'y' is none",
    ),
    "an output that does not exist": (
        lambda g: g.op("sum").input.__setitem__(1, "norm:2"),
        r"sum: input norm:2 of Add; expected one of the 2 outputs of norm",
    ),
    "a control edge from nowhere": (lambda g: g.op("q").input.append("y:-1"), r"control edge from 'y'"),
    "a description too many": (lambda g: g.op("q").input_desc.add(name="z"), r"3 data inputs and 4 input descriptions"),
    "no result": (lambda g: g.graph.op.pop(), r"tiny: 0 NetOutput nodes; expected one"),
    "two results": (lambda g: g.graph.op.add(name="again", type="NetOutput"), r"2 NetOutput nodes"),
    "a cycle": (lambda g: g.op("q").input.append("norm:-1"), r"nodes wait for each other"),
    "an index twice": (lambda g: set_attr(g.op("slots"), "index", 0), r"slots: index 0, which x has too"),
    "a gap in the indexes": (lambda g: set_attr(g.op("slots"), "index", 9), r"slots: index 9; expected 0 to 6"),
    "no index": (lambda g: g.op("slots").attr.clear(), r"slots: no attribute 'index'"),
    "an unknown operator": (lambda g: setattr(g.op("sum"), "type", "Plus"), r"sum: operator type 'Plus'"),
    "an unknown attribute": (
        lambda g: set_attr(g.op("norm"), "eps", 1e-6),
        r"norm: RmsNorm has an attribute 'eps'; expected one of: epsilon",
    ),
    "an attribute of the wrong type": (
        lambda g: set_attr(g.op("norm"), "epsilon", 1),
        r"norm: epsilon holds Int; expected Float",
    ),
    "inputs in the wrong order": (
        lambda g: [setattr(d, "name", n) for d, n in zip(g.op("sum").input_desc, ("x2", "x1"), strict=True)],
        r"sum: 'x2' where input x1 of Add belongs; expected x1, x2",
    ),
    "an input of another operator": (
        lambda g: setattr(g.op("q").input_desc[2], "name", "offset_w"),
        r"q: input 2 is called 'offset_w'; expected the order x1, x2, bias\?",
    ),
    "a required input not given": (
        lambda g: (g.op("sum").input.__setitem__(1, ""), unfed(g.op("sum").input_desc[1])),
        r"sum: input x2 of Add is not given; expected it is required",
    ),
    "an input not given, described as given": (
        lambda g: g.op("q").input_desc[2].attr.clear(),
        r"q: input 2 \(bias\) has no edge, but a description",
    ),
    "a missing output": (
        lambda g: g.op("norm").output_desc.pop(),
        r"norm: nothing where output rstd of RmsNorm belongs",
    ),
    "a dtype the operator does not take": (
        lambda g: setattr(g.op("beta").output_desc[0], "dtype", Dtype.FLOAT.proto) or copy_descs(g),
        r"step: beta of RecurrentGatedDeltaRule is F32; expected one of BF16",
    ),
    "two dtypes where one is needed": (
        lambda g: setattr(g.op("x").output_desc[0], "dtype", Dtype.FLOAT.proto) or copy_descs(g),
        r"sum: Add with x1 F32, x2 BF16, y BF16; expected one dtype for all of them\. Cast before it\.",
    ),
    "an input described otherwise than its producer": (
        lambda g: describe(g.op("flat").input_desc[0], (2, 4, 8), BF16),
        r"flat: input x of Reshape described as BF16 \[2, 4, 8\]; expected BF16 \[2, 4, 16\], as step:0 is",
    ),
    "a dim that is not known": (
        lambda g: describe(g.op("q").output_desc[0], (-1, 64), BF16),
        r"q: output 0 of MatMul: \[-1, 64\]; expected a static shape",
    ),
    "a dtype that is not known": (
        lambda g: setattr(g.op("q").output_desc[0], "dtype", 0),
        r"q: output 0 of MatMul: unknown dtype \[2, 64\]; expected both known",
    ),
    "a shape that is not known": (
        lambda g: g.op("q").output_desc[0].ClearField("shape"),
        r"q: output 0 of MatMul: BF16 unknown shape",
    ),
    "a result without elements": (
        lambda g: describe(g.op("sum").output_desc[0], (0, 64), BF16),
        r"sum: output 0 of Add, which is read, has no elements: \[0, 64\]",
    ),
    "a constant with too few bytes": (
        lambda g: setattr(g.op("shape").attr["value"].t, "data", b"\0" * 16),
        r"shape: 16 bytes for I64 \[3\]; expected 24",
    ),
    "a constant described otherwise": (
        lambda g: describe(g.op("shape").output_desc[0], (3,), I32),
        r"shape: a constant of I64 \[3\] described as I32 \[3\]",
    ),
    "float64": (
        lambda g: setattr(g.op("gate").output_desc[0], "dtype", Dtype.DOUBLE.proto),
        r"gate: Data gives F64; expected no float64 on the device",
    ),
    "an input on the CPU": (
        lambda g: setattr(g.op("x").output_desc[0], "device_type", "CPU"),
        r"x: Data is placed on the CPU; expected placed on the NPU\. Trace with meta tensors",
    ),
    "a host tensor": (lambda g: set_attr(g.op("x"), "_host_tensor", True), r"x: Data is marked as a host tensor"),
    "a state that is no RefData": (
        lambda g: setattr(g.op("memory"), "type", "Data"),
        r"memory: a Data node for a declared state",
    ),
    "a weight nobody made": (lambda g: g.weights.add("wk"), r"wk: no such Data node for a declared weight"),
    "a state nobody declared": (lambda g: g.states.clear(), r"memory: a RefData node that no state is declared for"),
}


def copy_descs(g: Builder) -> None:
    """Describe every input as the output it reads."""
    for op in g.graph.op:
        for edge, desc in zip((e for e in op.input if not e.endswith(":-1")), op.input_desc, strict=False):
            if edge:
                producer, index = split_edge(edge)
                name = desc.name
                desc.CopyFrom(g.op(producer).output_desc[index])
                desc.name = name


@pytest.mark.parametrize("what", MUTATIONS)
def test_a_graph_is_refused_with(helpers, what):
    mutate, message = MUTATIONS[what]
    g = step_graph()
    mutate(g)
    with pytest.raises(CompileError, match=message):
        check(g, helpers)


def test_a_required_attribute_must_be_there(helpers):
    g = Builder()
    x = g.data("x", [2, 4])
    y = g.add("join", "ConcatD", {"x0": x, "x1": x}, {"y": ([2, 8], BF16)}, concat_dim=1, N=2)
    g.done(y)
    check(g, helpers)
    g.op("join").attr.pop("concat_dim")
    with pytest.raises(CompileError, match=r"join: ConcatD without 'concat_dim'; expected it is required \(Int\)"):
        check(g, helpers)


def test_a_list_attribute_without_a_kind_is_refused_because_ge_drops_it(helpers):
    g = moe_graph()
    g.op("route").attr["active_expert_range"].list.val_type = 0
    with pytest.raises(
        CompileError, match=r"active_expert_range holds a list without a kind, which GE drops; expected ListInt"
    ):
        check(g, helpers)


def test_private_attributes_of_torchair_pass_and_others_do_not(helpers):
    g = step_graph()
    set_attr(g.op("q"), "_inference_rule", "{}")
    check(g, helpers)
    set_attr(g.op("q"), "_mystery", 1)
    with pytest.raises(CompileError, match="MatMul has an attribute '_mystery'"):
        check(g, helpers)


def test_an_operator_without_a_kernel_for_the_chip_is_refused_there_only(helpers):
    g = Builder()
    x, w, s = g.data("x", [2, 1, 64]), g.weight("w", [4, 64]), g.state("window", [3, 3, 64], BF16)
    outputs = {"conv_states": ([3, 3, 64], BF16), "y": ([2, 1, 64], BF16)}
    g.add("conv", "CausalConv1d", {"x": x, "weight": w, "conv_states": s}, outputs)
    g.done("conv:1")
    check(g, helpers, "950dt", "9.2")
    with pytest.raises(CompileError, match=r"conv: operator CausalConv1d on a3 \(a3\); expected one of its chips: 950"):
        check(g, helpers, "a3")


def test_an_operator_that_a_release_does_not_have_is_refused_there_only(helpers):
    g = Builder()
    g.done(g.add("act", "SituGlu", {"x": g.data("x", [2, 8])}, {"y": ([2, 4], BF16)}, beta=4.0, linear_beta=25.0))
    check(g, helpers, cann="9.2")
    with pytest.raises(
        CompileError,
        match=r"act: operator SituGlu on a3 with CANN 9.1; expected CANN 9.2 or later. Compile with --cann",
    ):
        check(g, helpers)


def test_eight_bit_floats_are_for_the_950_family(helpers):
    g = Builder()
    x, chosen = g.data("x", [4, 64], torch.float8_e4m3fn), g.data("chosen", [4, 2], I32)
    g.done(g.add("sort", "MoeInitRoutingV3", {"x": x, "expert_idx": chosen},
        {"expanded_x": ([8, 64], torch.float8_e4m3fn), "expanded_row_idx": ([8], I32),
         "expert_tokens_count_or_cumsum": ([8], I64), "expanded_scale": ([8], F32)},
        expert_num=8, expert_tokens_num_type=1, expert_tokens_num_flag=True))  # fmt: skip
    check(g, helpers, "950dt")
    with pytest.raises(CompileError, match="x of MoeInitRoutingV3 is E4M3"):
        check(g, helpers, "a3")


# ---- weights ---------------------------------------------------------------------------------------------------------


def test_a_node_that_reads_only_weights_is_refused(helpers):
    g = step_graph()
    g.graph.op.pop()
    other = g.add("turn", "Reshape", {"x": "wq:0", "shape": g.const("flat_shape", [4096])}, {"y": ([4096], BF16)})
    g.done("sum:0", other)
    with pytest.raises(
        CompileError, match=r"turn: Reshape reads only wq, flat_shape; .* Fold it into the weight's recipe"
    ):
        check(g, helpers)


def test_a_node_that_reads_only_constants_is_refused(helpers):
    g = step_graph()
    g.graph.op.pop()
    one = g.const("one", [1.0], F32)
    g.done("sum:0", g.add("two", "Add", {"x1": one, "x2": one}, {"y": ([1], F32)}))
    with pytest.raises(CompileError, match=r"two: Add reads only one, one"):
        check(g, helpers)


# ---- states ----------------------------------------------------------------------------------------------------------


def assign_graph() -> Builder:
    g = Builder()
    x, s = g.data("x", [2, 4], F32), g.state("s", [2, 4])
    new = g.add("new", "Add", {"x1": x, "x2": s}, {"y": ([2, 4], F32)})
    written = g.add("keep", "Assign", {"ref": s, "value": new}, {"ref": ([2, 4], F32)})
    return g.done(new, written)


def test_assign_writes_a_state_after_the_value_that_was_made_of_it(helpers):
    check(assign_graph(), helpers)


def test_a_state_that_should_be_updated_and_is_not_is_refused(helpers):
    g = step_graph()
    g.op("step").input[4] = g.data("copy", [3, 4, 16, 16])
    with pytest.raises(CompileError, match=r"memory: no operator writes it; expected its next value written in place"):
        check(g, helpers, updated={"memory"})


def test_a_state_that_is_only_read_must_be_declared_so(helpers):
    check(step_graph(), helpers, updated={"memory"})
    with pytest.raises(CompileError, match=r"memory: written by step; expected no writer: it is declared as only read"):
        check(step_graph(), helpers, updated=set())


def test_two_writers_of_a_state_are_refused(helpers):
    g = assign_graph()
    g.graph.op.pop()
    g.done(g.add("again", "Assign", {"ref": "keep:0", "value": "new:0"}, {"ref": ([2, 4], F32)}))
    with pytest.raises(CompileError, match=r"s: written 2 times, by keep, again; expected one operator that writes it"):
        check(g, helpers)


def test_an_in_place_operator_may_not_write_an_input_that_is_no_state(helpers):
    g = assign_graph()
    g.op("keep").input[0] = "x:0"
    with pytest.raises(CompileError, match=r"keep: Assign writes into x:0, a Data node; expected a state"):
        check(g, helpers, updated=set())


def test_a_state_is_not_written_through_a_view(helpers):
    g = Builder()
    x, s = g.data("x", [8], F32), g.state("s", [2, 4])
    flat = g.add("flat", "Reshape", {"x": s, "shape": g.const("shape", [8])}, {"y": ([8], F32)})
    g.done(g.add("keep", "Assign", {"ref": flat, "value": x}, {"ref": ([8], F32)}))
    with pytest.raises(
        CompileError, match=r"keep: Assign writes state s through flat:0; expected an edge from the RefData"
    ):
        check(g, helpers)


def test_what_is_written_in_place_has_the_buffers_shape(helpers):
    g = assign_graph()
    describe(g.op("keep").output_desc[0], (8,), F32)
    copy_descs(g)
    with pytest.raises(CompileError, match=r"keep: Assign writes F32 \[8\] over ref, F32 \[2, 4\]"):
        check(g, helpers)


def racing_graph(after=()) -> Builder:
    """A state is written while another node, which nothing orders, reads a view of it."""
    g = Builder()
    x, s = g.data("x", [2, 4], F32), g.state("s", [2, 4])
    view = g.add("view", "Reshape", {"x": s, "shape": g.const("shape", [4, 2])}, {"y": ([4, 2], F32)})
    old = g.add("old", "Add", {"x1": view, "x2": view}, {"y": ([4, 2], F32)})
    written = g.add("keep", "Assign", {"ref": s, "value": x}, {"ref": ([2, 4], F32)}, after=after)
    return g.done(old, written)


def test_a_reader_of_a_state_and_its_writer_must_have_an_order(helpers):
    with pytest.raises(
        CompileError, match=r"old: Add reads state s while keep may write it; expected a data or control edge"
    ):
        check(racing_graph(), helpers)


def test_a_control_edge_is_an_order(helpers):
    check(racing_graph(after=["old"]), helpers)


def test_a_node_that_no_result_needs_is_refused(helpers):
    g = assign_graph()
    net = g.op("NetOutput")
    net.input.pop()
    net.input_desc.pop()
    with pytest.raises(CompileError, match=r"keep: no result needs this Assign; .* let NetOutput wait for it"):
        check(g, helpers)
    net.input.append("keep:-1")
    check(g, helpers)


# ---- limits ----------------------------------------------------------------------------------------------------------


def moe_graph(experts: int = 8, rows: int = 4, k: int = 2, mode: int = 2, width: int = 64) -> Builder:
    g = Builder()
    x, scores = g.data("x", [rows, width]), g.data("scores", [rows, experts], F32)
    bias = g.weight("bias", [experts], F32)
    g.add("gate", "MoeGatingTopK", {"x": scores, "bias": bias},
          {"y": ([rows, k], F32), "expert_idx": ([rows, k], I32), "out": ([rows, experts], F32)},
          k=k, norm_type=1, routed_scaling_factor=2.0, eps=1e-20)  # fmt: skip
    g.add("route", "MoeInitRoutingV3", {"x": x, "expert_idx": "gate:1", "scale": None, "offset": None},
          {"expanded_x": ([rows * k, width], BF16), "expanded_row_idx": ([rows * k], I32),
           "expert_tokens_count_or_cumsum": ([experts], I64), "expanded_scale": ([rows * k], F32)},
          active_num=rows * k, expert_num=experts, expert_tokens_num_type=1, expert_tokens_num_flag=True,
          active_expert_range=[0, experts])  # fmt: skip
    weight = g.weight("up", [experts, 2 * width, width])
    inputs = {"x0": "route:0", "weight0": weight, "group_list": "route:2", "per_token_scale": None}
    g.add("up_rows", "GroupedMatmul", inputs,
          {"y0": ([rows * k, 2 * width], BF16)}, split_item=2, group_type=0, group_list_type=1,
          transpose_weight=True)  # fmt: skip
    act = g.add("act", "SwiGlu", {"x": "up_rows:0"}, {"y": ([rows * k, width], BF16)}, dim=-1)
    inputs = {
        "expanded_x": act,
        "expanded_row_idx": "route:1",
        "x1": None,
        "x2": None,
        "bias": None,
        "scales": "gate:0",
    }
    return g.done(g.add("mix", "MoeFinalizeRoutingV2", inputs, {"y": ([rows, width], BF16)}, drop_pad_mode=mode))


def test_a_mixture_of_experts_passes(helpers):
    check(moe_graph(), helpers)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"experts": 4096}, r"gate: MoeGatingTopK: the number of experts is 4,096; expected at most 2,048"),
        ({"experts": 1025}, r"up_rows: GroupedMatmul: the number of groups is 1,025; expected at most 1,024"),
        ({"k": 9}, r"gate: MoeGatingTopK: k is 9; expected 1 to 8"),
        ({"mode": 0}, r"mix: MoeFinalizeRoutingV2: drop_pad_mode 0 after MoeInitRoutingV3, .*; expected 2 or 3"),
    ],
)
def test_limits_of_expert_operators_hold(helpers, change, message):
    with pytest.raises(CompileError, match=message):
        check(moe_graph(**change), helpers)


@pytest.mark.parametrize(
    "node, attr, value, message",
    [
        ("gate", "norm_type", 2, r"norm_type is 2; expected one of 0, 1"),
        ("gate", "group_count", 3, r"group_count is 3 for 8 experts; expected a divisor"),
        ("route", "expert_num", 10241, r"expert_num is 10,241; expected at most 10,240"),
        ("route", "expert_tokens_num_flag", False, r"expert_tokens_num_flag is false; expected true"),
        ("route", "active_expert_range", [0, 9], r"active_expert_range is \[0, 9\]; expected within \[0, 8\]"),
        ("up_rows", "transpose_weight", False, r"x sums over 64, weight over 128; expected equal sizes"),
        ("up_rows", "split_item", 4, r"split_item is 4"),
    ],
)
def test_attributes_of_expert_operators_have_legal_values(helpers, node, attr, value, message):
    g = moe_graph()
    set_attr(g.op(node), attr, value)
    with pytest.raises(CompileError, match=message):
        check(g, helpers)


def packed_graph(form: str, groups: int = 3, n: int = 128, k: int = 256, **change: Any) -> Builder:
    """A grouped product of packed weights; `change`: the shape of a scale, or None where it is left out."""
    g, rows = Builder(), 4
    kinds = {"int4": (BF16, Dtype.INT4), "mx": (E4M3, Dtype.FLOAT4_E2M1), "blocks": (E4M3, Dtype.FLOAT8_E4M3FN)}
    blocks = [-(-k // 128)]
    scales = {
        "int4": {"antiquant_scale0": ([groups, k // 32, n], BF16)},
        "mx": {"antiquant_scale0": ([groups, n, k // 64, 2], E8M0), "per_token_scale": ([rows, k // 64, 2], E8M0)},
        "blocks": {"scale0": ([groups, -(-n // 128), *blocks], F32), "per_token_scale": ([rows, *blocks], F32)},
    }[form]
    inputs = {"x0": g.data("x", [rows, k], kinds[form][0]), "weight0": g.weight("w", [groups, n, k], kinds[form][1])}
    order = ("scale0", "antiquant_scale0", "group_list", "per_token_scale")
    scales["group_list"] = ([groups], I64)
    for name in order:
        shape, dtype = scales.get(name, (None, F32))
        shape = change.get(name, shape)
        if shape is not None:
            inputs[name] = g.data(name, shape, dtype)
        elif name == "per_token_scale":
            inputs[name] = None
    attrs = {"split_item": 2, "group_type": 0, "group_list_type": 1, "transpose_weight": change.get("transposed", True)}
    return g.done(g.add("up", "GroupedMatmul", inputs, {"y0": ([rows, n], BF16)}, dtype=int(form != "int4"), **attrs))


@pytest.mark.parametrize("form, chip", [("int4", "a3"), ("int4", "950dt"), ("mx", "950dt"), ("blocks", "950dt")])
def test_grouped_products_of_packed_weights_pass(helpers, form, chip):
    check(packed_graph(form), helpers, chip)


@pytest.mark.parametrize(
    "form, change, message",
    [
        ("mx", {"k": 96, "n": 96}, r"n is 96; expected a multiple of 64"),
        ("mx", {"antiquant_scale0": [3, 4, 128, 2]}, r"antiquant_scale is \[3, 4, 128, 2\]; expected \[3, 128, 4, 2\]"),
        ("mx", {"per_token_scale": [4, 8, 1]}, r"per_token_scale is \[4, 8, 1\]; expected \[4, 4, 2\]"),
        (
            "mx",
            {"per_token_scale": None},
            r"times FLOAT4_E2M1 with antiquant_scale; expected antiquant_scale, per",
        ),
        ("int4", {"antiquant_scale0": None}, r"BF16 times INT4 with no scale; expected antiquant_scale"),
        ("int4", {"antiquant_scale0": [3, 128, 8]}, r"antiquant_scale is \[3, 128, 8\]; expected \[3, 128, 128\]"),
        (
            "int4",
            {"antiquant_scale0": [3, 7, 128]},
            r"antiquant_scale \[3, 7, 128\]; expected \[groups, a divisor of",
        ),
        ("int4", {"antiquant_scale0": [3, 16, 128]}, r"the number of weights to a scale is 16; expected one of 32, 64"),
        ("blocks", {"scale0": [3, 2, 1]}, r"scale is \[3, 2, 1\]; expected \[3, 1, 2\]"),
        ("blocks", {"transposed": False}, r"weights that are not transposed; expected transpose_weight|sums over"),
    ],
)
def test_scales_of_packed_weights_are_those_of_their_scenario(helpers, form, change, message):
    with pytest.raises(CompileError, match=message):
        check(packed_graph(form, **change), helpers, "950dt")


@pytest.mark.parametrize("form", ["mx", "blocks"])
def test_short_floats_are_refused_where_the_hardware_has_none(helpers, form):
    with pytest.raises(CompileError, match="E4M3"):
        check(packed_graph(form), helpers, "a3")


def recurrent(
    tokens: int = 2, nk: int = 4, nv: int = 4, dk: int = 16, slots: int = 3, rows: int = 2, state=BF16
) -> Builder:
    g = Builder()
    keys = g.data("k", [tokens, nk, dk])
    inputs = {"query": keys, "key": keys, "value": g.data("v", [tokens, nv, 16]), "beta": g.data("beta", [tokens, nv])}
    inputs |= {"state": g.state("s", [slots, nv, 16, dk], state), "actual_seq_lengths": g.data("n", [rows], I32)}
    inputs |= {"ssm_state_indices": g.data("slots", [tokens], I32)}
    made = {"out": ([tokens, nv, 16], BF16), "state": ([slots, nv, 16, dk], state)}
    return g.done(g.add("step", "RecurrentGatedDeltaRule", inputs, made, scale_value=1.0))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"dk": 513}, "the key width is 513; expected at most 512"),
        ({"nv": 257, "nk": 1}, "the number of value heads is 257; expected at most 256"),
        ({"nk": 3}, "3 key heads and 4 value heads; expected a divisor"),
        ({"slots": 1}, "the number of tokens is 2; expected at most 1. The operator wants at least as many slots"),
        ({"tokens": 17, "slots": 32}, "17 tokens of 2 sequences; expected 1 to 8 tokens of each"),
        ({"state": F32}, "state is F32 in CANN 9.1; expected BF16. A float32 state is taken from CANN 9.2 on."),
    ],
)
def test_limits_of_the_recurrent_delta_rule_hold(helpers, change, message):
    check(recurrent(), helpers)
    with pytest.raises(CompileError, match=re.escape(message)):
        check(recurrent(**change), helpers)


def kda_step(*, rows=2, nk=4, nv=4, dk=128, dv=128, slots=3, starts=None, indices=None, v_first=True, rates=0, **attrs):
    g = Builder()
    inputs = {name: g.data(name, [rows, 1, nk, dk]) for name in ("query", "key")}
    inputs |= {"value": g.data("value", [rows, 1, nv, dv]), "gate": g.data("gate", [rows, 1, nv, dk], F32)}
    inputs |= {"beta": g.data("beta", [rows, 1, nv], F32), "initial_state": g.state("s", [slots, nv, dv, dk], F32)}
    inputs |= {"cu_seqlens": g.data("starts", [(starts or rows) + 1], I32)}
    inputs |= {"ssm_state_indices": g.data("slots", [indices or rows], I32)}
    inputs |= dict.fromkeys(("A_log", "dt_bias", "num_accepted_tokens"))
    inputs |= {"A_log": g.data("rates", [rates], F32)} if rates else {}
    made = {"attn_out": ([rows, 1, nv, dv], BF16)}
    made |= dict.fromkeys(("initial_state", "final_state"), ([slots, nv, dv, dk], F32))
    return g.done(g.add("step", "RecurrentKda", inputs, made, scale=1.0, state_v_first=v_first, **attrs))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"dk": 64}, "the key width is 64; expected 128"),
        ({"dv": 64}, "the value width is 64; expected one of 128, 256"),
        ({"nv": 257, "nk": 1}, "the number of value heads is 257; expected at most 256"),
        ({"nk": 3}, "the number of value heads is 4; expected a multiple of the 3 key heads"),
        ({"rows": 17, "starts": 2}, "the number of tokens is 17; expected at most 8 of each of 2 sequences"),
        ({"indices": 1}, "ssm_state_indices is [1]; expected [2] or [2, steps]"),
        ({"v_first": False}, "state_v_first is false"),
        ({"layout": "BNSD"}, "layout is BNSD; expected one of BSND, TND"),
        ({"safe_gate": True}, "A_log, dt_bias or safe_gate without use_gate_in_kernel; expected none"),
        ({"use_gate_in_kernel": True}, "use_gate_in_kernel without A_log; expected the rates' logarithms"),
        ({"use_gate_in_kernel": True, "rates": 3}, "A_log is [3]; expected [4]"),
        (
            {"use_gate_in_kernel": True, "rates": 4, "safe_gate": True, "lower_bound": -7.0},
            "lower_bound is -7.0; expected from -5 to below 0",
        ),
    ],
)
def test_limits_of_recurrent_kda_hold(helpers, change, message):
    check(kda_step(), helpers)
    check(kda_step(use_gate_in_kernel=True, rates=4, safe_gate=True, lower_bound=-5.0), helpers)
    with pytest.raises(CompileError, match=re.escape(message)):
        check(kda_step(**change), helpers)


def own(type_: str, width: int, taps: int = 4):
    """A node of an operator of ours, of some width."""
    g, x = Builder(), [2, 3, 1, width]
    if type_ == "GatedRmsNorm":
        inputs = {"x": g.data("x", x), "gate": g.data("gate", x), "weight": g.data("w", [width])}
        return g.done(g.add("it", type_, inputs, {"y": (x, BF16)}, eps=1e-5))
    if type_ == "AttnResMix":
        inputs = {"sources0": g.data("x", x[:2] + x[3:]), "norm": g.data("n", [width]), "query": g.data("q", [width])}
        made = {"y": (x[:2] + x[3:], BF16), "total": ([0], BF16)}
        return g.done(g.add("it", type_, inputs, made, eps=1e-5))
    if type_ == "KdaChunk":
        inputs = {n: g.data(n, x) for n in "qkv"} | {"decay": g.data("decay", x, F32), "beta": g.data("b", x[:3], F32)}
        inputs |= {"memory": g.state("s", [4, 1, width, width], F32), "slots": g.data("slots", [2], I32)}
        inputs |= {"lengths": g.data("n", [2], I64), "counts": g.data("c", [2], I64)}
        made = {"o": (x, BF16), "memory": ([4, 1, width, width], F32)}
        return g.done(g.add("it", type_, inputs, made, scale=1.0))
    window = [4, 1, width, taps - 1]
    inputs = {"x": g.data("x", x), "weight": g.data("w", [1, width, taps]), "window": g.state("s", window, BF16)}
    inputs |= {"slots": g.data("slots", [2], I32), "lengths": g.data("n", [2], I64), "counts": g.data("c", [2], I64)}
    return g.done(g.add("it", type_, inputs, {"y": (x, BF16), "window": (window, BF16)}))


@pytest.mark.parametrize(
    "type_, fits, change, message",
    [
        ("GatedRmsNorm", 512, {"width": 528}, "the width is 528; expected a multiple of 16 from 16 to 512"),
        ("AttnResMix", 8912, {"width": 8928}, "the width is 8,928; expected a multiple of 16 from 16 to 8,912"),
        ("AttnResMix", 7168, {"width": 7160}, "the width is 7,160; expected a multiple of 16 from 16 to 8,912"),
        ("KdaChunk", 256, {"width": 272}, "the key width is 272; expected a multiple of 16 from 16 to 256"),
        ("ShortConv", 128, {"width": 120}, "the number of channels is 120; expected a multiple of 16"),
        ("ShortConv", 128, {"width": 128, "taps": 3}, "the number of taps is 3; expected 4"),
    ],
)
def test_kernels_of_ours_take_the_sizes_they_can_hold(helpers, type_, fits, change, message):
    check(own(type_, fits), helpers)
    with pytest.raises(CompileError, match=re.escape(message)):
        check(own(type_, **change), helpers)


def attend(heads: int = 3, width: int = 512, rope_width: int = 64, **shapes: list[int]) -> Builder:
    """A node of our sparse attention; `shapes` of some inputs."""
    g, latent, rope = Builder(), width, rope_width
    wanted = {"q": [2, 3, heads, latent], "q_rope": [2, 3, heads, rope], "latent": [5, 128, 1, latent]}
    wanted |= {"rope": [5, 128, 1, rope], "selected": [2, 3, 7], "block_table": [2, 2], "lengths": [2], "counts": [2]}
    dtypes = {"selected": I32, "block_table": I32, "lengths": I64, "counts": I64}
    inputs = {n: g.data(n, x, dtypes.get(n, BF16)) for n, x in (wanted | shapes).items()}
    made = {"o": (wanted["q"], BF16), "lse": (wanted["q"][:3], F32)}
    return g.done(g.add("it", "SparseAttend", inputs, made, scale=0.1))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"heads": 129}, "the number of heads is 129; expected at most 128"),
        ({"width": 528}, "the width of latents is 528; expected a multiple of 16 from 16 to 512"),
        ({"rope_width": 72}, "the width of the rope part is 72; expected a multiple of 16 from 16 to 64"),
        ({"latent": [5, 128, 1, 528]}, "latent is [1, 528]; expected [1, 512]. It is [pages, page, 1, latent]."),
        ({"rope": [5, 64, 1, 64]}, "rope is [5, 64, 1, 64]; expected [5, 128, 1, 64]"),
        ({"selected": [2, 4, 7]}, "selected is [2, 4]; expected [2, 3]"),
        ({"q_rope": [2, 3, 4, 64]}, "q_rope is [2, 3, 4]; expected [2, 3, 3]"),
        ({"block_table": [3, 2]}, "block_table is [3]; expected [2]"),
        ({"counts": [3]}, "counts is [3]; expected [2]"),
        ({"selected": [2, 7]}, "selected is [2, 7]; expected 3 dims"),
    ],
    ids=str,
)
def test_limits_of_our_sparse_attention_hold(helpers, change, message):
    for heads in (1, 3, 12, 128):
        check(attend(heads), helpers)
    with pytest.raises(CompileError, match=re.escape(message)):
        check(attend(**change), helpers)


def test_cann_9_2_takes_a_float32_memory(helpers):
    check(recurrent(state=F32), helpers, cann="9.2")


def absorbed(heads: int = 4, page: int = 128, block: int | None = None, lengths: bool = True, **attrs) -> Builder:
    """MLA decode over the paged latent cache."""
    g = Builder()
    q, rope = g.data("q", [2, heads, 1, 512]), g.data("q_rope", [2, heads, 1, 64])
    pool, ropes = g.data("pool", [5, 1, page, 512]), g.data("ropes", [5, 1, page, 64])
    inputs = {"query": q, "key0": pool, "value0": pool, "atten_mask": None}
    inputs |= {
        "actual_seq_lengths_kv": g.data("n", [2], I64) if lengths else None,
        "block_table": g.data("table", [2, 2], I32),
    }
    inputs |= {"query_rope": rope, "key_rope": ropes}
    attrs = {
        "num_heads": heads,
        "num_key_value_heads": 1,
        "scale": 0.1,
        "input_layout": "BNSD",
        "sparse_mode": 0,
    } | attrs
    made = {"attention_out": ([2, heads, 1, 512], BF16), "softmax_lse": ([0], F32)}
    g.add("attend", "FusedInferAttentionScore", inputs, made, block_size=page if block is None else block, **attrs)
    return g.done("attend:0")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"page": 72}, "block_size is 72; expected a multiple of 16, at most 1,024. The nearest is 64"),
        ({"page": 2048}, "block_size is 2048; expected a multiple of 16, at most 1,024. The nearest is 1024"),
        ({"block": 64}, "the page size in key is 128; expected 64"),
        ({"heads": 3}, "the number of heads over the latent cache is 3; expected one of 1, 2, 4, 8, 16, 32, 64, 128"),
        ({"heads": 256}, "the number of heads over the latent cache is 256"),
        ({"lengths": False}, "block_table without actual_seq_lengths_kv"),
        ({"sparse_mode": 3}, "sparse_mode 3 without atten_mask; expected a [2048, 2048] mask"),
        ({"num_heads": 8}, "the number of heads in query is 4; expected 8"),
        ({"num_key_value_heads": 2}, "num_key_value_heads over the latent cache is 2; expected 1"),
    ],
)
def test_limits_of_attention_over_the_latent_cache_hold(helpers, change, message):
    check(absorbed(), helpers)
    with pytest.raises(CompileError, match=re.escape(message)):
        check(absorbed(**change), helpers)


def test_cann_9_2_takes_any_number_of_heads(helpers):
    check(absorbed(heads=3), helpers, cann="9.2")


LONG = 2**63 - 1


def sparse(
    heads: int = 4, index_heads: int = 64, page: int = 128, count: int = 8, weights=BF16, width: int = 128, **attrs
) -> Builder:
    """Selection of keys and attention to them."""
    g = Builder()
    key, pool = g.data("key", [5, page, 1, width]), g.data("pool", [5, page, 1, 512])
    ropes, lengths = g.data("ropes", [5, page, 1, 64]), {"n": g.data("n", [2], I32), "m": g.data("m", [2], I32)}
    table = g.data("table", [2, 2], I32)
    inputs = {"query": g.data("q", [2, 3, index_heads, width]), "key": key}
    inputs |= {"weights": g.data("w", [2, 3, index_heads], weights), "actual_seq_lengths_query": lengths["n"]}
    inputs |= {"actual_seq_lengths_key": lengths["m"], "block_table": table}
    window = {"sparse_mode": 3, "pre_tokens": LONG, "next_tokens": LONG}
    g.add("select", "LightningIndexer", inputs,
          {"sparse_indices": ([2, 3, 1, count], I32), "sparse_values": ([0], BF16)},
          layout_query="BSND", layout_key="PA_BSND", sparse_count=count, return_values=False, **window)  # fmt: skip
    inputs = {"query": g.data("ql", [2, 3, heads, 512]), "key": pool, "value": pool, "sparse_indices": "select:0"}
    inputs |= {"block_table": table, "actual_seq_lengths_query": lengths["n"], "actual_seq_lengths_kv": lengths["m"]}
    inputs |= {"query_rope": g.data("qr", [2, 3, heads, 64]), "key_rope": ropes}
    made = {"attention_out": ([2, 3, heads, 512], BF16), "softmax_max": ([0], F32), "softmax_sum": ([0], F32)}
    attrs = window | {"attention_mode": 2, "sparse_block_size": 1} | attrs
    g.add("attend", "SparseFlashAttention", inputs, made,
          scale_value=0.1, layout_query="BSND", layout_kv="PA_BSND", return_softmax_lse=False, **attrs)  # fmt: skip
    return g.done("attend:0")


@pytest.mark.parametrize(
    "place, change, message",
    [
        ("a3 9.1", {"heads": 3}, "the number of heads is 3; expected one of 1, 2, 4, 8, 16, 32, 64, 128"),
        ("950dt 9.1", {"heads": 129}, "the number of heads is 129; expected at most 128"),
        ("a3 9.1", {"attention_mode": 0}, "attention_mode is 0; expected 2"),
        ("a3 9.1", {"sparse_mode": 4}, "sparse_mode is 4; expected one of 0, 3"),
        ("a3 9.1", {"pre_tokens": 9}, "pre_tokens is 9; expected 9223372036854775807"),
        ("950dt 9.1", {"sparse_block_size": 2}, "sparse_block_size is 2; expected 1"),
        ("a3 9.1", {"page": 72}, "the page size is 72; expected a multiple of 16, at most 1,024"),
        ("a3 9.1", {"width": 64}, "the width of query and key is [64, 64]; expected [128, 128]"),
        ("a3 9.1", {"index_heads": 65}, "the number of index heads is 65; expected at most 64"),
        ("a3 8.5", {"index_heads": 32}, "the number of index heads is 32; expected 64"),
        ("950dt 9.1", {"index_heads": 12}, "the number of index heads is 12; expected one of 8, 16, 24, 32, 64"),
        ("a3 8.5", {"count": 3072}, "sparse_count is 3072; expected 1 to 2,048"),
        ("a3 9.1", {"count": 3000}, "sparse_count is 3000; expected 1 to 2,048, or a multiple of 1,024 up to 8,192"),
        ("a3 8.5", {"weights": F32}, "weights are F32; expected the dtype of query"),
        ("950dt 9.2", {"weights": F32}, "weights are F32; expected the dtype of query"),
        ("950dt 8.5", {}, "operator LightningIndexer on 950dt with CANN 8.5; expected CANN 9.1 or later"),
    ],
)
def test_limits_of_sparse_attention_hold(helpers, place, change, message):
    name, cann = place.split()
    check(sparse(), helpers, name, "9.1")
    with pytest.raises(CompileError, match=re.escape(message)):
        check(sparse(**change), helpers, name, cann)


def test_a_chip_takes_the_heads_and_dtypes_that_another_refuses(helpers):
    check(sparse(heads=3, index_heads=24), helpers, "950dt")
    check(sparse(index_heads=5, weights=F32, count=4096), helpers, "a3")
    check(sparse(), helpers, "a3", "8.5")


def sparse_in_8_bits(
    dtype=I8,
    weights=F16,
    scales=F16,
    heads: int = 4,
    index_heads: int = 64,
    row: int = 656,
    count: int = 8,
    key_scale: tuple[int, ...] = (5, 128, 1),
    **attrs,
) -> Builder:
    """Selection of 8-bit keys and attention to 8-bit rows."""
    g = Builder()
    table, n, m = g.data("table", [2, 2], I32), g.data("n", [2], I32), g.data("m", [2], I32)
    inputs = {"query": g.data("q", [2, 3, index_heads, 128], dtype), "key": g.data("key", [5, 128, 1, 128], dtype)}
    inputs |= {"weights": g.data("w", [2, 3, index_heads], weights)}
    inputs |= {"query_dequant_scale": g.data("qs", [2, 3, index_heads], scales)}
    inputs |= {"key_dequant_scale": g.data("ks", list(key_scale), scales), "actual_seq_lengths_query": n}
    inputs |= {"actual_seq_lengths_key": m, "block_table": table}
    window = {"sparse_mode": 3, "pre_tokens": LONG, "next_tokens": LONG}
    g.add("select", "QuantLightningIndexer", inputs, {"sparse_indices": ([2, 3, 1, count], I32)}, query_quant_mode=0,
          key_quant_mode=0, layout_query="BSND", layout_key="PA_BSND", sparse_count=count, **window)  # fmt: skip
    pool = g.data("pool", [5, 128, 1, row], dtype)
    inputs = {"query": g.data("ql", [2, 3, heads, 576]), "key": pool, "value": pool, "sparse_indices": "select:0"}
    inputs |= {"block_table": table, "actual_seq_lengths_query": n, "actual_seq_lengths_kv": m}
    modes = {"key_quant_mode": 2, "value_quant_mode": 2, "attention_mode": 2, "sparse_block_size": 1}
    g.add("attend", "KvQuantSparseFlashAttention", inputs, {"attention_out": ([2, 3, heads, 512], BF16)},
          scale_value=0.1, layout_query="BSND", layout_kv="PA_BSND", **(window | modes | attrs))  # fmt: skip
    return g.done("attend:0")


@pytest.mark.parametrize(
    "place, change, message",
    [
        ("a3 9.1", {"heads": 3}, "the number of heads is 3; expected one of 1, 2, 4, 8, 16, 32, 64, 128"),
        ("a3 9.1", {"heads": 48}, "the number of heads is 48; expected one of 1, 2, 4, 8, 16, 32, 64, 128"),
        ("950dt 9.1", {"heads": 96}, "the number of heads is 96; expected one of 1, 2, 4, 8, 16, 32, 64, 128, 48"),
        ("a3 9.1", {"key_quant_mode": 1}, "key_quant_mode is 1; expected 2"),
        ("a3 9.1", {"attention_mode": 0}, "attention_mode is 0; expected 2"),
        ("a3 9.1", {"tile_size": 64}, "tile_size is 64; expected 128"),
        ("a3 9.1", {"quant_scale_repo_mode": 0}, "quant_scale_repo_mode is 0; expected 1"),
        ("a3 9.1", {"sparse_block_size": 32}, "sparse_block_size is 32; expected one of 1, 2, 4, 8, 16"),
        ("a3 9.1", {"row": 640}, "the width of query and key is [576, 640]; expected [576, 656]"),
        ("a3 9.1", {"count": 4096}, "sparse_count is 4096; expected 1 to 2,048"),
        ("a3 8.5", {"index_heads": 32}, "the number of index heads is 32; expected 64"),
        ("950dt 9.1", {"index_heads": 12}, "the number of index heads is 12; expected one of 8, 16, 24, 32, 64"),
        ("a3 9.1", {"key_scale": (5, 128)}, "key_dequant_scale is [5, 128]; expected 3 dims"),
        ("a3 9.1", {"key_scale": (5, 64, 1)}, "key_dequant_scale is [5, 64, 1]; expected [5, 128, 1]"),
        ("a3 9.1", {"weights": BF16}, "query, weights and scales are I8 BF16 F16; expected I8 F16 F16"),
        ("950dt 9.1", {"scales": F32}, "query, weights and scales are I8 F16 F32; expected I8 F16 F16"),
        ("a3 9.1", {"dtype": E4M3, "weights": BF16, "scales": F32}, "expected one of I8"),
        ("950dt 8.5", {}, "operator QuantLightningIndexer on 950dt with CANN 8.5; expected CANN 9.1 or later"),
    ],
)
def test_limits_of_sparse_attention_in_8_bits_hold(helpers, place, change, message):
    name, cann = place.split()
    check(sparse_in_8_bits(), helpers, name, "9.1")
    with pytest.raises(CompileError, match=re.escape(message)):
        check(sparse_in_8_bits(**change), helpers, name, cann)


def test_8_bit_floats_and_48_heads_are_taken_by_950_alone(helpers):
    check(sparse_in_8_bits(E4M3, BF16, F32, heads=48, index_heads=24), helpers, "950dt")
    check(sparse_in_8_bits(index_heads=5), helpers, "a3")
    check(sparse_in_8_bits(), helpers, "a2", "8.5")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"scale": (4, 1)}, "scale is [4, 1]; expected [4]"),
        ({"dst_type": 36}, "dst_type 36 is E4M3, y I8; expected the same"),
        ({"made": (4, 64)}, "y is [4, 64]; expected [4, 128]"),
        ({"bytes": (4, 128)}, "output is [4, 128]; expected [4, 128, 2]"),
        ({"type": F16}, "type FLOAT16, y I8; expected the same"),
    ],
)
def test_limits_of_quantisation_and_of_bytes_hold(helpers, change, message):
    def quantise(scale=(4,), dst_type=2, made=(4, 128), bytes=(4, 128, 2), type=I8) -> Builder:  # noqa: A002
        g = Builder()
        x = g.data("x", [4, 128])
        outputs = {"y": (list(made), I8), "scale": (list(scale), F32)}
        g.add("quantise", "DynamicQuant", {"x": x}, outputs, dst_type=dst_type)
        g.add("cast", "Bitcast", {"x": x}, {"y": (list(bytes), I8)}, type=Dtype.of_torch(type))
        return g.done("quantise:0", "quantise:1", "cast:0")

    check(quantise(), helpers)
    with pytest.raises(CompileError, match=re.escape(message)):
        check(quantise(**change), helpers)


def rotation(x=(1, 6, 4, 64), cos=(1, 6, 1, 64), mode: int = 1) -> Builder:
    g = Builder()
    inputs = {"x": g.data("x", list(x)), "cos": g.data("cos", list(cos)), "sin": g.data("sin", list(cos))}
    return g.done(g.add("turn", "RotaryPositionEmbedding", inputs, {"y": (list(x), BF16)}, mode=mode))


@pytest.mark.parametrize(
    "place, change, message",
    [
        ("a3 9.1", {"mode": 2}, "mode is 2; expected one of 0, 1"),
        ("a3 9.1", {"cos": (1, 6, 1, 32)}, "x [1, 6, 4, 64] with cos [1, 6, 1, 32]; expected 3 or 4 dims each"),
        ("a3 9.1", {"x": (2, 6, 4, 64), "cos": (2, 6, 1, 64)}, "cos is [2, 6, 1, 64]; expected [1, 6, 1, 64]"),
        ("a3 9.1", {"x": (1, 6, 1000, 64)}, "rows times heads is 1,000; expected at most 999"),
        ("a3 9.1", {"x": (1, 6, 4, 896), "cos": (1, 6, 1, 896)}, "the width of x is 896; expected at most 894"),
        (
            "950dt 9.1",
            {"x": (1, 6, 4, 1026), "cos": (1, 6, 1, 1026)},
            "the width of x is 1,026; expected at most 1,024",
        ),
        ("a3 8.5", {"x": (6, 4, 64), "cos": (6, 1, 64)}, "x of 3 dims in CANN 8.5; expected 4 dims"),
    ],
)
def test_limits_of_rotation_hold(helpers, place, change, message):
    name, cann = place.split()
    check(rotation(), helpers, name, cann)
    with pytest.raises(CompileError, match=re.escape(message)):
        check(rotation(**change), helpers, name, cann)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"indices": (4,)}, "indices [4] for var [640, 128]; expected [.., 1 to 2], of 2 dims or more"),
        ({"updates": (4, 64)}, "updates is [4, 64]; expected [4, 128]"),
    ],
)
def test_rows_scattered_into_a_state_have_its_width(helpers, change, message):
    def write(indices=(4, 1), updates=(4, 128)) -> Builder:
        g = Builder()
        inputs = {"var": g.state("keys", [640, 128], BF16), "indices": g.data("at", list(indices), I64)}
        inputs |= {"updates": g.data("new", list(updates))}
        return g.done(g.add("write", "ScatterNdUpdate", inputs, {"var": ([640, 128], BF16)}))

    check(write(), helpers)
    with pytest.raises(CompileError, match=re.escape(message)):
        check(write(**change), helpers)


def test_sources_of_a_mix_have_one_shape(helpers):
    def mix(second=(2, 3, 16), query=(16,)) -> Builder:
        g = Builder()
        inputs = {"sources0": g.data("a", [2, 3, 16]), "sources1": g.data("b", list(second))}
        inputs |= {"norm": g.weight("norm", [16]), "query": g.weight("query", list(query))}
        made = {"y": ([2, 3, 16], BF16), "total": ([0], BF16)}
        return g.done(g.add("mix", "AttnResMix", inputs, made, eps=1e-5))

    check(mix(), helpers)
    with pytest.raises(CompileError, match=r"sources1 is \[2, 16\]; expected \[2, 3, 16\]"):
        check(mix(second=(2, 16)), helpers)
    with pytest.raises(CompileError, match=r"query is \[3\]; expected \[16\]"):
        check(mix(query=(3,)), helpers)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"width": 448}, "heads and width of key_cache is [1, 448]; expected [1, 512]"),
        ({"rows": 999}, "the number of new rows is 999; expected at most 640. The cache has no more rows."),
    ],
)
def test_a_cache_takes_rows_of_its_width_and_no_more_than_it_has(helpers, change, message):
    def write(width: int = 512, rows: int = 2) -> Builder:
        g = Builder()
        cache, ropes = g.state("cache", [5, 128, 1, width], BF16), g.state("ropes", [5, 128, 1, 64], BF16)
        inputs = {"key": g.data("k", [rows, 1, 512]), "key_cache": cache, "slot_mapping": g.data("at", [rows], I64)}
        inputs |= {"value": g.data("v", [rows, 1, 64]), "value_cache": ropes}
        made = {"key_cache": ([5, 128, 1, width], BF16), "value_cache": ([5, 128, 1, 64], BF16)}
        g.add("write", "ScatterPaKvCache", inputs, made, cache_mode="Norm", scatter_mode="None")
        return g.done("write:0", "write:1")

    check(write(), helpers)
    with pytest.raises(CompileError, match=re.escape(message)):
        check(write(**change), helpers)


@pytest.mark.parametrize(
    "mutate, message",
    [
        (
            lambda g: set_attr(g.op("q"), "transpose_x1", True),
            r"q: MatMul: \[2, 64\] times \[64, 64\] sums over 2 and 64",
        ),
        (
            lambda g: describe(g.op("heads").output_desc[0], (2, 4, 8), BF16),
            r"heads: Reshape: \[2, 64\] to \[2, 4, 8\]",
        ),
        (
            lambda g: describe(g.op("norm").output_desc[0], (2, 32), BF16),
            r"norm: RmsNorm: output is \[2, 32\]; expected \[2, 64\]",
        ),
        (
            lambda g: describe(g.op("sum").output_desc[0], (1, 64), BF16),
            r"sum: Add: output is \[1, 64\]; expected \[2, 64\]",
        ),
    ],
)
def test_shapes_follow_from_the_inputs(helpers, mutate, message):
    g = step_graph()
    mutate(g)
    with pytest.raises(CompileError, match=message):
        check(g, helpers)


def test_cast_counts_dtypes_as_ges_own_enum_does(helpers):
    g = Builder()
    y = g.add("cast", "Cast", {"x": g.data("x", [2])}, {"y": ([2], F32)}, dst_type=Dtype.FLOAT.ge)
    g.done(y)
    check(g, helpers)
    set_attr(g.op("cast"), "dst_type", Dtype.FLOAT.proto)
    with pytest.raises(CompileError, match=r"cast: Cast: dst_type 1 is F16, its output F32; expected the same"):
        check(g, helpers)


# ---- messages --------------------------------------------------------------------------------------------------------


def test_the_message_counts_faults_by_rule_and_shows_the_first_of_each(helpers):
    g = step_graph()
    others = [op for op in g.graph.op if op.name != "sum"]
    for op in others:
        set_attr(op, "_mystery", 1)
    describe(g.op("sum").output_desc[0], (1, 64), BF16)
    copy_descs(g)
    with pytest.raises(CompileError) as caught:
        check(g, helpers)
    first, *shown, last = str(caught.value).splitlines()
    assert first == f"graph 'tiny' has {len(others) + 1} faults (attribute {len(others)}, limit 1):"
    assert [line.rpartition("[")[2] for line in shown] == ["attribute]"] * 3 + ["limit]"]
    assert last == f"  and {len(others) - 3} more"


def test_the_message_names_the_source_line_where_it_is_known(helpers):
    g = step_graph()
    set_attr(g.op("norm"), "epsilon", 1)
    set_attr(g.op("norm"), "_source", "layers/kda.py:7")
    with pytest.raises(
        CompileError, match=r"norm \(layers/kda.py:7\): epsilon holds Int; expected Float\. \[attribute\]"
    ):
        check(g, helpers)
    with pytest.raises(CompileError, match=r"norm \(layers/kda.py:8\): epsilon"):
        check(g, helpers, sources={"norm": "layers/kda.py:8"})


def test_a_group_name_longer_than_hccl_takes_is_refused(helpers):
    g = step_graph()
    set_attr(g.op("sum"), "group", "tag=" + "0," * 100)
    with pytest.raises(CompileError, match=r"sum: a group name of 204 bytes; expected at most 127"):
        check(g, helpers)
