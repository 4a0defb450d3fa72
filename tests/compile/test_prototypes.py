import re
from collections import Counter
from pathlib import Path

import pytest

import kimi_graph.ops
from kimi_graph.compile.executor.registry import PROVENANCES, SEMANTICS
from kimi_graph.compile.ge_proto import Dtype
from kimi_graph.compile.prototype_rows import EVERYTHING, ROWS
from kimi_graph.compile.prototypes import IN_PLACE, SHORT, Prototypes, dtypes, find, parse_registration, read_helper
from kimi_graph.compile.torchair_host import Host

KERNELS = sorted((Path(kimi_graph.ops.__file__).parent / "kernels").glob("*/op_graph/*_proto.h"))
COMPLETE = sorted(name for name, row in ROWS.items() if row.ins is not None)
BASIC = sorted(ROWS.keys() - set(COMPLETE))


@pytest.fixture(scope="module")
def torchair(host: Host) -> Path:
    """torchair's folder."""
    return host.root


# ---- parsing ---------------------------------------------------------------------------------------------------------


def names(numbers) -> set[str]:
    return {SHORT[n] for n in numbers}


def test_a_registration_becomes_ports_and_attributes():
    p = parse_registration(
        "Mix",
        """REG_OP(Mix)
    .INPUT(x, TensorType({DT_FLOAT, DT_BFLOAT16, DT_STRANGE}))
    .OPTIONAL_INPUT(bias, TensorType::IndexNumberType())
    .DYNAMIC_INPUT(rest, TensorType({BasicType(), DT_BOOL}))
    .OUTPUT(y, "T")
    .DYNAMIC_OUTPUT(z, TensorType(DT_INT8, DT_FLOAT8_E4M3FN))
    .REQUIRED_ATTR(k, Int)
    .ATTR(axes, ListInt, {0, -1})
    .ATTR(eps, Float, 1e-6f)
    .ATRR(flag, Bool, false)
    .ATTR(mode, String, "Norm")
    .ATTR(dtype, Type, DT_INT32)
    .DATATYPE(T, TensorType({DT_FLOAT16,
                             DT_FLOAT}))
    .OP_END_FACTORY_REG(Mix)
    """,
    )
    assert [(q.name, q.kind) for q in p.inputs] == [("x", "required"), ("bias", "optional"), ("rest", "dynamic")]
    assert [(q.name, q.kind) for q in p.outputs] == [("y", "required"), ("z", "dynamic")]
    assert [names(q.dtypes) for q in p.inputs[:2]] == [{"F32", "BF16"}, {"I32", "I64"}]
    assert {"BF16", "I8", "BOOL"} < names(p.inputs[2].dtypes)
    assert [names(q.dtypes) for q in p.outputs] == [{"F16", "F32"}, {"I8", "E4M3"}]
    defaults = {a.name: (a.type, a.required, a.default) for a in p.attributes.values()}
    assert defaults == {
        "k": ("Int", True, None),
        "axes": ("ListInt", False, [0, -1]),
        "eps": ("Float", False, 1e-6),
        "flag": ("Bool", False, False),
        "mode": ("String", False, "Norm"),
        "dtype": ("Type", False, "DT_INT32"),
    }


def test_ports_of_one_symbol_share_a_dtype_even_where_the_symbol_is_not_declared():
    p = parse_registration("Add", 'REG_OP(Add)\n.INPUT(a, "T")\n.INPUT(b, "T")\n.INPUT(c, "U")\n.OUTPUT(y, "T")')
    assert p.same == (("a", "b", "y"),)
    assert p.inputs[0].dtypes is None


# ---- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMPLETE)
def test_a_complete_row_is_a_prototype_without_torchair(name):
    p = find(name)
    assert p is not None and p.source and set(p.socs) <= {"a2", "a3", "950"}
    assert all(port.dtypes for port in p.inputs + p.outputs)
    known = {port.name for port in p.inputs + p.outputs}
    assert {name for group in p.same for name in group} <= known


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.parent.parent.name)
def test_a_kernel_of_ours_registers_what_the_table_says(path):
    """Names, order, dtypes and attributes; a float written as `-1.0f` is -1.0."""
    text = path.read_text()
    name = re.search(r"REG_OP\((\w+)\)", text)[1]
    made, row = parse_registration(name, text), find(name)
    assert ROWS[name].provider == "own"
    assert (made.inputs, made.outputs) == (row.inputs, row.outputs)
    assert made.attributes == row.attributes


def test_no_two_providers_have_an_operator_of_one_name():
    """GE would take the one whose package comes first, for both."""
    assert [name for name, n in Counter(row.type for row in EVERYTHING).items() if n > 1] == []


def test_how_an_operator_is_known_to_work_on_a_device_goes_by_who_provides_it():
    assert {row.evidence for row in ROWS.values() if row.provider == "own"} == {"never run"}
    assert all(row.evidence.startswith("ran: ") for row in ROWS.values() if row.provider == "vllm-ascend")
    assert ROWS["SituGlu"].evidence == "documented" and "950" in ROWS["MoeGatingTopK"].evidence


@pytest.mark.parametrize("name", COMPLETE)
def test_what_an_operator_of_the_table_computes_is_known_with_where_from(name):
    structure = {"Data", "RefData", "Const", "FileConstant", "NetOutput"}
    assert name in structure or (SEMANTICS[name].provenance in PROVENANCES and SEMANTICS[name].source)


def test_an_operator_writes_in_place_what_it_names_like_an_input():
    assert IN_PLACE == {
        "Assign": {"ref": "ref"},
        "ScatterNdUpdate": {"var": "var"},
        "ScatterPaKvCache": {"key_cache": "key_cache", "value_cache": "value_cache"},
        "RecurrentGatedDeltaRule": {"state": "state"},
        "RecurrentKda": {"initial_state": "initial_state"},
        "CausalConv1d": {"conv_states": "conv_states"},
        "ShortConv": {"window": "window"},
        "KdaChunk": {"memory": "memory"},
        "KdaStep": {"memory": "memory"},
    }


def test_eight_bit_floats_are_taken_away_off_the_950_family():
    e4m3 = Dtype.FLOAT8_E4M3FN.proto
    a3, a950 = (Prototypes(soc).find("MoeInitRoutingV3") for soc in ("a3", "950"))
    assert e4m3 in a950.inputs[0].dtypes and e4m3 not in a3.inputs[0].dtypes


def test_basic_operators_need_torchair():
    assert Prototypes("a3").find("Add") is None


# ---- against the helpers of a torch-npu wheel ------------------------------------------------------------------------


@pytest.mark.parametrize("name", BASIC)
def test_a_basic_operator_is_read_from_its_helper(torchair, name):
    p = Prototypes("a3", torchair).find(name)
    assert p is not None and (p.inputs or name in ("Fill", "Range")) and p.outputs
    assert all(port.dtypes for port in p.inputs + p.outputs), "a port without dtypes: the row must name them"


# BF16 is missing in older helpers; it is in every activation of ours, so a row that forgets it is found here.
CARRY_BF16 = [
    *("Add", "Sub", "Mul", "RealDiv", "Neg", "Exp", "Sigmoid", "Swish", "SoftplusV2", "Rsqrt", "Square", "Maximum"),
    *("ReduceSum", "Identity", "TensorMove", "Reshape", "Transpose", "Cast", "GatherV2", "MatMul", "BatchMatMul"),
    *("StridedSlice", "Slice", "SplitV", "SplitD", "ConcatD", "ConcatV2", "Pack", "Unsqueeze", "Squeeze"),
    *("ExpandDims", "BroadcastTo", "SelectV2", "GatherElements"),
]


@pytest.mark.parametrize("name", CARRY_BF16)
def test_what_carries_activations_takes_bf16(torchair, name):
    p = Prototypes("a3", torchair).find(name)
    data = [port for port in p.inputs if port.name in ("x", "x1", "x2", "then")]
    assert data and all(Dtype.BF16.proto in port.dtypes for port in data)


# Why a row differs from the registration in the helper of torch-npu 2.13, by operator and port or attribute.
NEWER = "the public registration of 2026 is newer than the helper"
DIFFERENCES = {
    "MoeGatingTopK": {"y2": "the helper itself calls its third output `out`", "out": "as above"},
    "MoeFinalizeRoutingV2": {
        "K": "the helper itself writes the attribute `k`",
        "k": "as above",
        **dict.fromkeys(("x", "alpha1", "alpha2", "v"), NEWER),
        **dict.fromkeys(("zero_expert_range", "copy_expert_range", "constant_expert_range"), NEWER),
    },
    "RecurrentGatedDeltaRule": {"state": "the OpDef lists a float32 state; the helper's symbol knows BF16 only"},
    "MoeInitRoutingV3": {"x": NEWER, "expanded_x": NEWER},
    "MoeDistributeDispatchV2": {
        **dict.fromkeys(("x", "expand_x", "scales"), "8-bit and 4-bit floats of the 950 family"),
        "expand_idx": "the helper has the first form's name for its third output, which is longer here",
        "assist_info_for_combine": "as above",
        "y_dtype": NEWER,
    },
    "GroupedMatmul": dict.fromkeys(
        ("x", "weight", "scale", "antiquant_scale", "per_token_scale"), "8-bit and 4-bit floats of the 950 family"
    ),
    "DynamicMxQuant": {
        "x": NEWER,
        "block_size": "the helper itself writes the attribute `blocksize`",
        "blocksize": "as above",
        "dst_type": "the same number, 40, by its name",
    },
    "DynamicBlockQuant": {"x": NEWER, "y": NEWER, "dst_type": "34 in the helper; it is always written"},
    "ScatterPaKvCache": dict.fromkeys(
        ("key", "key_cache", "value", "value_cache"), "the helper's symbol has no dtypes"
    ),
    "FusedInferAttentionScore": {
        **dict.fromkeys(("query", "key", "value"), "8-bit and 4-bit floats of the 950 family"),
        **dict.fromkeys(("dequant_scale1", "dequant_scale2", "antiquant_scale", "antiquant_offset"), NEWER),
        "key_rope_antiquant_scale": "the helper lists I8, the registration does not",
        "attention_out": "the helper lists F32 for float32 queries, which no registration takes",
        "softmax_lse": "float32 by the documents",
        "inner_precise": "the helper's own default is 0, the registration's 1; it is always written",
    },
    "DynamicQuant": {
        "y": "the registration has INT4 too, which the helper's docstring leaves out",
        "dst_type": "the helper's docstring names the dtype, INT8, and passes its number",
    },
    "ScatterNdUpdate": dict.fromkeys(("var", "updates"), NEWER),
    "SwiGlu": {"x": "the helper's symbol has no dtypes", "y": "as above"},
    "RefData": {
        "x": "optional here: a RefData node has a description but no edge",
        "y": "the helper's symbol has no dtypes",
    },
    "FileConstant": {
        "y": "GE's own copy says every dtype",
        **dict.fromkeys(("location", "offset", "length"), "read by GE's loader before file_path"),
    },
}
# Structure of graphs, our own operators, and operators newer than the wheel or without a registration it could read.
WITHOUT_HELPER = {
    "Data", "Const", "NetOutput", "AttnResMix", "GatedRmsNorm", "ShortConv", "KdaChunk", "KdaStep", "SituMul",
    "ResidualNormGate", "SituMulQuant", "CausalConv1d", "KvQuantSparseFlashAttention",
    "LightningIndexer", "QuantLightningIndexer", "RecurrentKda", "SituGlu", "SituMxQuant",
    "SparseAttend", "SparseFlashAttention",
}  # fmt: skip


def described(p, name: str):
    """A port or attribute, as compared."""
    for side in (p.inputs, p.outputs):
        for port in side:
            if port.name == name:
                return port.kind, port.dtypes
    a = p.attributes.get(name)
    return None if a is None else (a.type, a.required, a.default)


@pytest.mark.parametrize("name", COMPLETE)
def test_a_complete_row_agrees_with_the_helper_but_for_listed_differences(torchair, name):
    row, helper = find(name), read_helper(torchair, name)
    if helper is None:
        assert name in WITHOUT_HELPER
        return
    mine, theirs = ([[p.name for p in side] for side in (x.inputs, x.outputs)] for x in (row, helper))
    everything = {n for side in mine + theirs for n in side} | row.attributes.keys() | helper.attributes.keys()
    differ = {n for n in everything if described(row, n) != described(helper, n)}
    assert differ == set(DIFFERENCES.get(name, {})), {n: (described(row, n), described(helper, n)) for n in differ}
    for ours, others in zip(mine, theirs, strict=True):
        common = [n for n in ours if n in others]
        assert common == [n for n in others if n in ours], "the order of ports"
    listed = dtypes("ALL")
    assert all((p.dtypes or listed) <= listed for p in helper.inputs)


def test_every_helper_of_the_wheel_can_be_read(torchair):
    """Some 1,700 registrations: each has at least a port, and attributes of known types."""
    from kimi_graph.compile.prototypes import FIELDS, _helper_sources

    found = {m for source in _helper_sources(torchair) for m in re.findall(r"\ndef ([A-Z]\w+)\(", source)}
    read = [p for p in (read_helper(torchair, name) for name in sorted(found)) if p is not None]
    assert len(read) > 1500
    assert not [p.type for p in read for a in p.attributes.values() if a.type not in FIELDS]
    assert len([p.type for p in read if not p.inputs and not p.outputs]) < 20
