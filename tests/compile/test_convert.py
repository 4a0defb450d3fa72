import copy

import pytest
import torch
import torch.nn.functional as F

from kimi_graph import ops
from kimi_graph.compile import air
from kimi_graph.compile.capture import Captured, capture
from kimi_graph.compile.convert import Converted, convert, default_lowerings
from kimi_graph.compile.ge_proto import (
    GraphDef,
    OpDef,
    data_edges,
    dtype_of,
    get_attr,
    is_known,
    shape_of,
    split_edge,
    tensor_value,
)
from kimi_graph.compile.targets import target
from kimi_graph.errors import CompileError

bf16, f32, i32, i64 = torch.bfloat16, torch.float32, torch.int32, torch.int64


def meta(*shape: int, dtype: torch.dtype = bf16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.fixture(scope="module")
def lower(host):
    def lower(f, *, lowerings=None, **args) -> Converted:
        captured = f if isinstance(f, Captured) else capture(f, args)
        return convert(captured.module, name="piece", host=host, target=target("a3"), cann="9.1", lowerings=lowerings)

    return lower


def show(made: Converted) -> str:
    """Nodes as text, without inputs and constants; a constant is shown where it is read."""
    graph = made.model.graph[0]
    constants = {op.name: tensor_value(op.attr["value"].t).tolist() for op in graph.op if op.type == "Const"}

    def edge(text: str) -> str:
        name, index = split_edge(text)
        if not name:
            return "-"
        return str(constants[name]) if name in constants else f"{name}:{index}" if index else name

    def line(op: OpDef) -> str:
        ins = ", ".join(f"{d.name}={edge(e)}" for e, d in zip(data_edges(op), op.input_desc, strict=True))
        outs = ", ".join(f"{d.name} {list(shape_of(d))}" for d in op.output_desc if is_known(d))
        attrs = "".join(f" {name}={get_attr(op, name)}" for name in sorted(op.attr))
        return f"{op.name}({ins}) -> {outs}{attrs}"

    return "\n".join(line(op) for op in graph.op if op.type not in ("Const", "Data", "NetOutput"))


def outputs(graph: GraphDef) -> list[str]:
    return data_edges(next(op for op in graph.op if op.type == "NetOutput"))


# ---- the graph as a whole ----


def test_inputs_come_in_order_of_the_arguments_and_stay_even_if_nobody_reads_them(lower):
    def f(x, unused, y):
        return {"out": y + x}

    graph = lower(f, x=meta(2, 3), unused=meta(5, dtype=i64), y=meta(2, 3)).model.graph[0]
    inputs = graph.op[:3]
    assert [(op.type, get_attr(op, "index")) for op in inputs] == [("Data", 0), ("Data", 1), ("Data", 2)]
    assert [shape_of(op.output_desc[0]) for op in inputs] == [(2, 3), (5,), (2, 3)]
    assert dtype_of(inputs[1].output_desc[0]) == i64
    assert [d.name for d in inputs[0].input_desc] == ["x"]
    add = graph.op[3]
    assert data_edges(add) == [f"{inputs[2].name}:0", f"{inputs[0].name}:0"]


def test_inputs_are_named_by_their_placeholders(lower):
    captured = capture(lambda x: {"out": x.sigmoid()}, {"x": meta(2)})
    placeholder = next(n for n in captured.module.graph.nodes if n.op == "placeholder")
    assert lower(captured).model.graph[0].op[0].name == placeholder.name


def test_outputs_come_in_order_also_when_they_repeat_or_are_inputs(lower):
    def f(x):
        y = x.sigmoid()
        return {"a": y, "b": x, "c": y, "d": y.neg()}

    graph = lower(f, x=meta(4)).model.graph[0]
    assert outputs(graph) == ["Sigmoid:0", f"{graph.op[0].name}:0", "Sigmoid:0", "Neg:0"]
    assert graph.op[-1].type == "NetOutput"
    assert [d.name for d in graph.op[-1].input_desc] == ["input0", "input1", "input2", "input3"]


def test_dead_nodes_are_left_out(lower):
    def f(x):
        x.exp()
        return {"out": x.sigmoid()}

    assert [op.type for op in lower(f, x=meta(4)).model.graph[0].op] == ["Data", "Sigmoid", "NetOutput"]


def test_descriptions_of_inputs_are_those_of_the_producers(lower):
    def f(x, w):
        return {"out": ops.rms_norm(x, w, 1e-5).float() * 0.5}

    graph = lower(f, x=meta(4, 8), w=meta(8)).model.graph[0]
    producers = {op.name: op for op in graph.op}
    for op in graph.op:
        for edge, desc in zip(data_edges(op), op.input_desc, strict=False):
            name, index = split_edge(edge)
            theirs = copy.deepcopy(producers[name].output_desc[index])
            theirs.name = desc.name
            assert desc == theirs


def test_the_same_graph_is_the_same_bytes(lower):
    def f(x, w):
        return {"out": F.silu(ops.rms_norm(x, w, 1e-5))}

    args = {"x": meta(4, 8), "w": meta(8)}
    assert air.to_bytes(lower(f, **args).model) == air.to_bytes(lower(f, **args).model)


def test_notes_of_torchair_are_gone(lower):
    for op in lower(lambda x: {"out": x * 2.0}, x=meta(4, dtype=f32)).model.graph[0].op:
        assert not {"_readable_value", "_meta"} & set(op.attr)
        for desc in [*op.input_desc, *op.output_desc]:
            assert not desc.attr
            assert desc.layout == "ND"


def test_every_node_knows_the_line_it_comes_from(lower):
    made = lower(lambda x, w: {"out": ops.rms_norm(x, w, 1e-5).sigmoid()}, x=meta(4, 8), w=meta(8))
    captured = capture(lambda x: {"out": x.sigmoid()}, {"x": meta(2)})
    for node in captured.module.graph.nodes:
        node.meta["source"] = "layers/kda.py:12"
    assert lower(captured).sources == {"Sigmoid": "layers/kda.py:12"} | {
        op.name: "layers/kda.py:12" for op in lower(captured).model.graph[0].op if op.type != "Sigmoid"
    }
    assert set(made.sources) <= {op.name for op in made.model.graph[0].op}


# ---- ATen ----


def test_a_transposed_weight_is_read_as_it_is_stored(lower):
    text = show(lower(lambda x, w: {"out": F.linear(x, w)}, x=meta(4, 8), w=meta(16, 8)))
    assert text == "MatMul(x1=arg0_1, x2=arg1_1, bias=-) -> y [4, 16] transpose_x1=False transpose_x2=True"


def test_a_product_without_transpose_stays_one(lower):
    text = show(lower(lambda x, w: {"out": x @ w}, x=meta(4, 8), w=meta(8, 16)))
    assert text == "MatMul(x1=arg0_1, x2=arg1_1, bias=-) -> y [4, 16] transpose_x1=False transpose_x2=False"


MASKS = "begin_mask=0 ellipsis_mask=0 end_mask=0 new_axis_mask=0 shrink_axis_mask=0"
ATEN_CALLS = [
    (lambda x: F.softplus(x), "SoftplusV2(x=arg0_1) -> y [2, 6] beta=1.0 threshold=20.0"),
    (lambda x: x.amax(-1, keepdim=True), "ReduceMax(x=arg0_1, axes=[-1]) -> y [2, 1] keep_dims=True"),
    (lambda x: x.sigmoid(), "Sigmoid(x=arg0_1) -> y [2, 6]"),
    (lambda x: F.silu(x), "Swish(x=arg0_1) -> y [2, 6] scale=1.0"),
    (lambda x: x.rsqrt(), "Rsqrt(x=arg0_1) -> y [2, 6]"),
    (lambda x: x.to(bf16), "Cast(x=arg0_1) -> y [2, 6] dst_type=27"),
    (lambda x: x.clone().detach().sigmoid(), "Sigmoid(x=arg0_1) -> y [2, 6]"),
    (lambda x: x * 0.5, "Mul(x1=arg0_1, x2=0.5) -> y [2, 6]"),
    (lambda x: x.to(bf16) * 0.5, "Cast(x=arg0_1) -> y [2, 6] dst_type=27\nMuls(x=Cast) -> y [2, 6] value=0.5"),
    (lambda x: x.view(3, -1), "Reshape(x=arg0_1, shape=[3, 4]) -> y [3, 4] axis=0 num_axes=-1"),
    (lambda x: x.permute(1, 0), "Transpose(x=arg0_1, perm=[1, 0]) -> y [6, 2]"),
    (lambda x: x.transpose(-1, 0), "Transpose(x=arg0_1, perm=[1, 0]) -> y [6, 2]"),
    (lambda x: x[:, 2:5], f"StridedSliceV2(x=arg0_1, begin=[2], end=[5], axes=[1], strides=[1]) -> y [2, 3] {MASKS}"),
]


@pytest.mark.parametrize("f, expected", ATEN_CALLS, ids=[text.partition(" ")[0] for _, text in ATEN_CALLS])
def test_an_aten_call_becomes_the_nodes_written_here(lower, f, expected):
    assert show(lower(lambda x: {"out": f(x)}, x=meta(2, 6, dtype=f32))) == expected


def test_moving_a_dimension_of_size_one_is_a_reshape(lower):
    text = show(lower(lambda x: {"out": x.permute(2, 1, 0)}, x=meta(1, 5, 1)))
    assert text == ""  # and to the same shape it is nothing
    text = show(lower(lambda x: {"out": x.permute(1, 0, 2)}, x=meta(1, 5, 4)))
    assert text == "Reshape(x=arg0_1, shape=[5, 1, 4]) -> y [5, 1, 4] axis=0 num_axes=-1"


def test_a_product_of_two_dtypes_is_cast_once_and_only_where_needed(lower):
    text = show(lower(lambda x, y: {"out": x * y}, x=meta(2), y=meta(2, dtype=f32)))
    assert text == "Cast(x=arg0_1) -> y [2] dst_type=0\nMul(x1=Cast, x2=arg1_1) -> y [2]"


def test_an_embedding_gathers_rows(lower):
    text = show(lower(lambda t, w: {"out": F.embedding(t, w)}, t=meta(2, 3, dtype=i64), w=meta(10, 8)))
    assert text.startswith("GatherV2(x=arg1_1, indices=arg0_1, axis=[0]) -> y [2, 3, 8]")


def test_a_tensor_made_while_tracing_becomes_a_constant(lower):
    class Adds(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("two", torch.full((3,), 2.0)[::1])

        def forward(self, x):
            return torch.ops.aten.add.Tensor(x, self.two)

    module = torch.fx.symbolic_trace(Adds())
    for node in module.graph.nodes:
        node.meta["val"] = meta(3, dtype=f32)
    text = show(lower(Captured(module, ("x",), ("out",))))
    assert text == "Add(x1=x, x2=[2.0, 2.0, 2.0]) -> y [3]"


def test_a_call_nobody_lowers_is_refused_with_its_line(lower):
    captured = capture(lambda x: {"out": torch.linalg.matrix_exp(x)}, {"x": meta(4, 4, dtype=f32)})
    for node in captured.module.graph.nodes:
        node.meta["source"] = "layers/new.py:7"
    with pytest.raises(CompileError, match=r"layers/new\.py:7: aten\.\w+"):
        lower(captured)


# ---- operators ----


def kda_args(tokens: int):
    heads = {n: meta(2, tokens, 4, 8) for n in "qkv"}
    return heads | {
        "decay": meta(2, tokens, 4, 8, dtype=f32),
        "beta": meta(2, tokens, 4, dtype=f32),
        "memory": meta(3, 4, 8, 8, dtype=f32),
        "slots": meta(2, dtype=i32),
    }


def test_own_types_keep_names_of_inputs_outputs_and_attributes(lower):
    def f(lengths, counts, **kda):
        o, memory = ops.kda_chunk(*kda.values(), lengths, counts, 0.1)
        return {"o": o, "memory": memory}

    made = lower(f, lengths=meta(2, dtype=i64), counts=meta(2, dtype=i64), **kda_args(5))
    (op,) = (op for op in made.model.graph[0].op if op.type == "KdaChunk")
    assert [d.name for d in op.input_desc] == [*kda_args(5), "lengths", "counts"]
    assert [(d.name, shape_of(d)) for d in op.output_desc] == [("o", (2, 5, 4, 8)), ("memory", (3, 4, 8, 8))]
    assert get_attr(op, "scale") == pytest.approx(0.1, rel=1e-7)  # kept as float32
    assert outputs(made.model.graph[0]) == ["KdaChunk:0", "KdaChunk:1"]


@pytest.mark.parametrize("op", [o for o in default_lowerings() if "kimi" in str(o)], ids=str)
def test_every_operator_with_a_lowering_is_among_ours(op):
    assert default_lowerings()[op] is not None


def test_lowerings_given_by_the_caller_come_first(lower):
    def square(ge, x):
        return ge.Square(x)

    text = show(lower(lambda x: {"out": x.sigmoid()}, lowerings={torch.ops.aten.sigmoid.default: square}, x=meta(2)))
    assert text == "Square(x=arg0_1) -> y [2]"


def test_an_error_of_a_lowering_names_call_and_line(lower):
    def bad(ge, x):
        return ge.NoSuchOperator(x)

    with pytest.raises(CompileError, match=r"sigmoid.*no helper for a GE operator 'NoSuchOperator'"):
        lower(lambda x: {"out": x.sigmoid()}, lowerings={torch.ops.aten.sigmoid.default: bad}, x=meta(2))
