"""Reading and writing `.air` files: a `ModelDef` as bytes, in the form GE's own `Graph::SaveToFile` gives it.

The same model is always the same bytes (under protobuf's compiled implementation, which its wheels carry; the pure
Python one orders a name and its prefix the other way round). The form on disk differs from the one in memory in ways
GE expects:

* descriptions have no name; ops keep the names of inputs and outputs in attributes, sorted by name;
* every description says its format and origin format as numbers, and which device it is on;
* every op has as many data inputs as input descriptions, control edges come last;
* the graph lists its inputs, the model carries the memory attributes of a model that was never compiled.

`read` undoes the first, so that passes and the executor find names where torchair puts them.
Source: public GE source, checked against files written by it; fact sheet of torchair, section 1.
"""

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from google.protobuf.message import DecodeError

from kimi_graph.errors import BundleError, CompileError

from .ge_proto import AttrDef, GraphDef, ModelDef, OpDef, TensorDescriptor, control_edges, data_edges

SIZE_LIMIT = 2**31 - 1  # GE reads no larger file
INPUT_TYPES = ("Data", "RefData", "AnnData", "AippData")

# Read by people only. They name torch tensors and source files, and are a third of a file's bytes.
NOTES = frozenset({"_meta", "_fx_tensor_name", "_readable_value", "_source"})

_FORMATS = {
    "NCHW": 0,
    "NHWC": 1,
    "ND": 2,
    "NC1HWC0": 3,
    "FRACTAL_Z": 4,
    "FRACTAL_NZ": 29,
    "NCDHW": 30,
    "NDC1HWC0": 32,
    "FORMAT_RESERVED": 40,
}
_FORMAT_NAMES = {number: name for name, number in _FORMATS.items()}
_MEMORY_ATTRS = ("memory_size", "p2p_memory_size", "stream_num", "event_num", "label_num", "weight_size")
_NAME_ATTRS = {
    "input": ("_input_name_key", "_input_name_value"),
    "output": ("_output_name_key", "_output_name_value"),
}
_ALL_NAME_ATTRS = frozenset(name for pair in _NAME_ATTRS.values() for name in pair)


def to_bytes(model: ModelDef) -> bytes:
    """The model as the bytes of a file; `model` is left as it is.

    Raises:
        CompileError: more bytes than GE reads.
    """
    data = canonical(model).SerializeToString(deterministic=True)
    if len(data) > SIZE_LIMIT:
        raise CompileError(
            f"{_name(model)}: the graph is {len(data):,} bytes, GE reads at most {SIZE_LIMIT:,}. "
            "Keep weights out of the graph (--weights input)."
        )
    return data


def write(model: ModelDef, path: str | Path) -> int:
    """Write a model to `path` and give its size in bytes. The file appears whole or not at all.

    Raises:
        CompileError: more bytes than GE reads.
    """
    data, path = to_bytes(model), Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(temporary).chmod(0o644)  # mkstemp makes files that only their owner may read
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return len(data)


def read(path: str | Path) -> ModelDef:
    """The model of a file, with names of inputs and outputs in the descriptions.

    Raises:
        BundleError: no such file, not an `.air` file, or one that is cut off or damaged.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise BundleError(f"{path}: cannot be read: {error.strerror}") from error
    return from_bytes(data, str(path))


def from_bytes(data: bytes, where: str) -> ModelDef:
    """The model of a file's bytes; `where` names them in errors. See `read`."""
    try:
        model = ModelDef.FromString(data)
    except DecodeError as error:
        raise BundleError(f"{where}: {len(data):,} bytes that are not a GE graph, or one that is cut off") from error
    if not any(graph.op for graph in model.graph):
        raise BundleError(f"{where}: holds no graph; it is cut off or not an .air file")
    missing = [name for name in _MEMORY_ATTRS if name not in model.attr]
    if 0 < len(missing) < len(_MEMORY_ATTRS):
        raise BundleError(f"{where}: is cut off, the model's attribute {missing[0]!r} is missing")
    for graph in model.graph:
        for op in graph.op:
            _restore_names(op, where)
    return model


def canonical(model: ModelDef) -> ModelDef:
    """A copy in the form of a file."""
    out = ModelDef()
    for name in _MEMORY_ATTRS:
        out.attr[name].i = 0
    out.attr["target_type"].s = b"MINI"
    for graph in model.graph:
        _write_graph(graph, out.graph.add())
    return out


def _write_graph(graph: GraphDef, out: GraphDef) -> None:
    out.name = graph.name
    _copy_attrs(graph, out)
    out.input.extend(f"{op.name}:0" for op in graph.op if op.type in INPUT_TYPES)
    out.output.extend(graph.output)
    for op in graph.op:
        _write_op(op, out.op.add())


def _write_op(op: OpDef, out: OpDef) -> None:
    out.name, out.type, out.id = op.name, op.type, op.id
    out.subgraph_name.extend(op.subgraph_name)
    data = data_edges(op)
    out.input.extend(data + [""] * (len(op.input_desc) - len(data)) + control_edges(op))
    _copy_attrs(op, out, leave_out=_ALL_NAME_ATTRS)
    for side, descs, written in (
        ("input", op.input_desc, out.input_desc),
        ("output", op.output_desc, out.output_desc),
    ):
        _write_names(out, side, _names(op, side, descs))
        for desc in descs:
            _write_desc(desc, written.add())


def _write_desc(desc: TensorDescriptor, out: TensorDescriptor) -> None:
    out.CopyFrom(desc)
    out.ClearField("name")
    out.ClearField("attr")
    _copy_attrs(desc, out)
    number = desc.attr["format_for_int"].i if "format_for_int" in desc.attr else _format(desc.layout)
    origin = _origin_format(desc)
    out.layout = _FORMAT_NAMES[number]
    out.attr["format_for_int"].i = number
    out.attr["origin_format"].s = _FORMAT_NAMES[origin].encode()
    out.attr["origin_format_for_int"].i = origin
    if "origin_shape_initialized" not in out.attr:
        out.attr["origin_shape_initialized"].b = False
    out.shape.SetInParent()
    out.device_type = desc.device_type or "NPU"


def _format(layout: str) -> int:
    return _FORMATS[layout or "FORMAT_RESERVED"]


def _origin_format(desc: TensorDescriptor) -> int:
    if "origin_format_for_int" in desc.attr:
        return desc.attr["origin_format_for_int"].i
    if "origin_format" in desc.attr:
        return _format(desc.attr["origin_format"].s.decode())
    return _FORMATS["ND"]


def _copy_attrs(
    holder: OpDef | GraphDef | TensorDescriptor,
    out: OpDef | GraphDef | TensorDescriptor,
    leave_out: frozenset[str] = frozenset(),
) -> None:
    """Copy what GE keeps: no notes, no unset attributes, no list without a kind."""
    for name, attr in holder.attr.items():
        if name in NOTES or name in leave_out or _is_unset(attr):
            continue
        out.attr[name].CopyFrom(attr)
        if attr.WhichOneof("value") == "t":
            _write_desc(attr.t.desc, out.attr[name].t.desc)


def _is_unset(attr: AttrDef) -> bool:
    kind = attr.WhichOneof("value")
    return kind is None or (kind == "list" and attr.list.val_type == 0)


def _names(op: OpDef, side: str, descs: Iterable[TensorDescriptor]) -> dict[str, int]:
    """Index of each name: from the descriptions, or from the attributes where descriptions have none."""
    names = {desc.name: index for index, desc in enumerate(descs) if desc.name}
    return names or _stored_names(op, side)


def _stored_names(op: OpDef, side: str) -> dict[str, int]:
    keys, values = _NAME_ATTRS[side]
    if keys not in op.attr or values not in op.attr:
        return {}
    return {k.decode(): v for k, v in zip(op.attr[keys].list.s, op.attr[values].list.i, strict=True)}


def _write_names(op: OpDef, side: str, names: dict[str, int]) -> None:
    if names:
        keys, values = _NAME_ATTRS[side]
        op.attr[keys].list.s.extend(name.encode() for name in sorted(names))  # GE gives these two lists no kind
        op.attr[values].list.i.extend(names[name] for name in sorted(names))


def _restore_names(op: OpDef, where: str) -> None:
    for side, descs in (("input", op.input_desc), ("output", op.output_desc)):
        try:
            for name, index in _stored_names(op, side).items():
                descs[index].name = name
        except (IndexError, ValueError) as error:
            raise BundleError(f"{where}: op {op.name!r} ({op.type}) names {side}s it does not have") from error
        for attr in _NAME_ATTRS[side]:
            op.attr.pop(attr, None)


def _name(model: ModelDef) -> str:
    return model.graph[0].name if model.graph else "model"
