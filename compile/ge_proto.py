"""Messages of GE's graph format (`.air` files), declared here so that a bundle is read without torchair and CANN.

Field names, numbers and types are those of GE's wire format; nested message types are flattened, which bytes do not
show. `attr_groups` (symbolic shapes, unused in static graphs) are kept as opaque bytes.

Two numberings of dtypes meet in a file and must not be mixed:

* `TensorDescriptor.dtype` counts as the protobuf enum does (float 1, float16 2, int32 7, bfloat16 27);
* `dt` attributes, and the integer attributes that name a dtype (`dst_type` of Cast), count as GE's C++ enum does
  (float 0, float16 1, int32 3, bfloat16 27).

`Dtype` holds both. In memory a tensor is described by its producer's `output_desc`; the name of an input or output is
`desc.name` (a file keeps it in attributes, see `air`). A description is *known* when it has a dtype and a shape.
"""

import math
from collections.abc import Iterable, Mapping, MutableMapping, MutableSequence
from enum import Enum
from typing import Any, NamedTuple, TypeVar

import torch
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message

from kimi_graph.errors import BundleError

T = TypeVar("T")


class Many(MutableSequence[T]):
    """A repeated field."""

    def add(self, **fields: Any) -> T:
        """Append an empty message and give it back (message fields only)."""
        raise NotImplementedError


class _Field(NamedTuple):
    number: int
    kind: str
    repeated: bool = False
    keyed: bool = False
    oneof: bool = False


def _one(number: int, kind: str) -> Any:
    return _Field(number, kind)


def _value(number: int, kind: str) -> Any:
    return _Field(number, kind, oneof=True)


def _many(number: int, kind: str) -> Any:
    return _Field(number, kind, repeated=True)


def _map(number: int, kind: str) -> Any:
    return _Field(number, kind, repeated=True, keyed=True)


class _Declared(Message):
    __slots__ = ()

    def __init__(self, **fields: Any) -> None: ...


class ShapeDef(_Declared):
    dim: Many[int] = _many(1, "int64")


class TensorDescriptor(_Declared):
    name: str = _one(1, "string")
    dtype: int = _one(2, "int32")
    shape: ShapeDef = _one(3, "ShapeDef")
    layout: str = _one(4, "string")
    attr: MutableMapping[str, "AttrDef"] = _map(5, "AttrDef")
    attr_groups: bytes = _one(6, "bytes")
    has_out_attr: bool = _one(9, "bool")
    size: int = _one(10, "int64")
    weight_size: int = _one(11, "int64")
    reuse_input: bool = _one(12, "bool")
    output_tensor: bool = _one(13, "bool")
    device_type: str = _one(14, "string")
    input_tensor: bool = _one(15, "bool")
    real_dim_cnt: int = _one(16, "int64")
    reuse_input_index: int = _one(17, "int64")
    data_offset: int = _one(18, "int64")
    cmps_size: int = _one(19, "int64")
    cmps_tab: str = _one(20, "string")
    cmps_tab_offset: int = _one(21, "int64")


class TensorDef(_Declared):
    desc: TensorDescriptor = _one(1, "TensorDescriptor")
    data: bytes = _one(2, "bytes")


class NamedAttrs(_Declared):
    name: str = _one(1, "string")
    attr: MutableMapping[str, "AttrDef"] = _map(2, "AttrDef")


class ListValue(_Declared):
    s: Many[bytes] = _many(2, "bytes")
    i: Many[int] = _many(3, "int64")
    f: Many[float] = _many(4, "float")
    b: Many[bool] = _many(5, "bool")
    bt: Many[bytes] = _many(7, "bytes")
    td: Many[TensorDescriptor] = _many(8, "TensorDescriptor")
    t: Many[TensorDef] = _many(9, "TensorDef")
    g: Many["GraphDef"] = _many(10, "GraphDef")
    na: Many[NamedAttrs] = _many(11, "NamedAttrs")
    dt: Many[int] = _many(12, "int64")
    val_type: int = _one(20, "int32")


class ListInt(_Declared):
    list_i: Many[int] = _many(1, "int64")


class ListListInt(_Declared):
    list_list_i: Many[ListInt] = _many(1, "ListInt")


class ListFloat(_Declared):
    list_f: Many[float] = _many(1, "float")


class ListListFloat(_Declared):
    list_list_f: Many[ListFloat] = _many(1, "ListFloat")


class AttrDef(_Declared):
    list: ListValue = _value(1, "ListValue")
    s: bytes = _value(2, "bytes")
    i: int = _value(3, "int64")
    f: float = _value(4, "float")
    b: bool = _value(5, "bool")
    bt: bytes = _value(7, "bytes")
    func: NamedAttrs = _value(10, "NamedAttrs")
    td: TensorDescriptor = _value(11, "TensorDescriptor")
    t: TensorDef = _value(12, "TensorDef")
    g: "GraphDef" = _value(13, "GraphDef")
    list_list_int: ListListInt = _value(14, "ListListInt")
    dt: int = _value(15, "int64")
    list_list_float: ListListFloat = _value(16, "ListListFloat")
    expression: bytes = _value(17, "bytes")


class OpDef(_Declared):
    name: str = _one(1, "string")
    type: str = _one(2, "string")
    input: Many[str] = _many(5, "string")
    attr: MutableMapping[str, AttrDef] = _map(10, "AttrDef")
    attr_groups: bytes = _one(11, "bytes")
    has_out_attr: bool = _one(20, "bool")
    id: int = _one(21, "int64")
    stream_id: int = _one(22, "int64")
    input_name: Many[str] = _many(23, "string")
    src_name: Many[str] = _many(24, "string")
    src_index: Many[int] = _many(25, "int64")
    dst_name: Many[str] = _many(26, "string")
    dst_index: Many[int] = _many(27, "int64")
    input_i: Many[int] = _many(28, "int64")
    output_i: Many[int] = _many(29, "int64")
    workspace: Many[int] = _many(30, "int64")
    workspace_bytes: Many[int] = _many(31, "int64")
    is_input_const: Many[bool] = _many(32, "bool")
    input_desc: Many[TensorDescriptor] = _many(33, "TensorDescriptor")
    output_desc: Many[TensorDescriptor] = _many(34, "TensorDescriptor")
    subgraph_name: Many[str] = _many(35, "string")


class GraphDef(_Declared):
    name: str = _one(1, "string")
    input: Many[str] = _many(4, "string")
    output: Many[str] = _many(5, "string")
    op: Many[OpDef] = _many(6, "OpDef")
    attr: MutableMapping[str, AttrDef] = _map(11, "AttrDef")
    attr_groups: bytes = _one(12, "bytes")


class ModelDef(_Declared):
    name: str = _one(1, "string")
    version: int = _one(2, "uint32")
    custom_version: str = _one(3, "string")
    graph: Many[GraphDef] = _many(7, "GraphDef")
    attr: MutableMapping[str, AttrDef] = _map(11, "AttrDef")
    attr_groups: bytes = _one(12, "bytes")


_PACKAGE = "ge.proto"


def _set_kind(field: descriptor_pb2.FieldDescriptorProto, kind: str) -> None:
    scalar = getattr(descriptor_pb2.FieldDescriptorProto, f"TYPE_{kind.upper()}", None)
    if scalar is not None:
        field.type = scalar
    else:
        field.type = descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE
        field.type_name = f".{_PACKAGE}.{kind}"


def _entry_type(message: descriptor_pb2.DescriptorProto, name: str, kind: str) -> str:
    """Declare the key-value message that stands for a map field; its protobuf name is `AttrEntry` for `attr`."""
    entry = message.nested_type.add(name=f"{name.capitalize()}Entry")
    entry.options.map_entry = True
    for number, part, part_kind in ((1, "key", "string"), (2, "value", kind)):
        _set_kind(entry.field.add(name=part, number=number, label=1), part_kind)
    return f"{message.name}.{entry.name}"


def _describe(message: descriptor_pb2.DescriptorProto, fields: Mapping[str, _Field]) -> None:
    for name, (number, kind, repeated, keyed, oneof) in fields.items():
        field = message.field.add(name=name, number=number, label=3 if repeated else 1)
        _set_kind(field, _entry_type(message, name, kind) if keyed else kind)
        if oneof:
            if not message.oneof_decl:
                message.oneof_decl.add(name="value")
            field.oneof_index = 0


def _build(declared: list[type]) -> dict[str, type]:
    """Protobuf classes for the declarations, in a pool of their own: torchair's live in the default pool."""
    file = descriptor_pb2.FileDescriptorProto(name="kimi_graph/ge_ir.proto", package=_PACKAGE, syntax="proto3")
    for cls in declared:
        fields = {name: value for name, value in vars(cls).items() if isinstance(value, _Field)}
        _describe(file.message_type.add(name=cls.__name__), fields)
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    # GetMessageClass came with protobuf 4.22, GetPrototype left with 5.
    make = getattr(message_factory, "GetMessageClass", None)
    make = make or message_factory.MessageFactory(pool).GetPrototype  # type: ignore[attr-defined]
    return {cls.__name__: make(pool.FindMessageTypeByName(f"{_PACKAGE}.{cls.__name__}")) for cls in declared}


globals().update(_build(_Declared.__subclasses__()))


class Dtype(Enum):
    """A dtype of GE: its number in `dt` attributes, its number in descriptions, and torch's dtype if there is one."""

    FLOAT = (0, 1, torch.float32)
    FLOAT16 = (1, 2, torch.float16)
    INT8 = (2, 3, torch.int8)
    INT32 = (3, 7, torch.int32)
    UINT8 = (4, 4, torch.uint8)
    INT16 = (6, 5, torch.int16)
    UINT16 = (7, 6, torch.uint16)
    UINT32 = (8, 9, torch.uint32)
    INT64 = (9, 8, torch.int64)
    UINT64 = (10, 10, torch.uint64)
    DOUBLE = (11, 12, torch.float64)
    BOOL = (12, 11, torch.bool)
    STRING = (13, 13, None)
    COMPLEX64 = (16, 16, torch.complex64)
    COMPLEX128 = (17, 17, torch.complex128)
    BF16 = (27, 27, torch.bfloat16)
    UNDEFINED = (28, 0, None)
    INT4 = (29, 28, None)
    UINT1 = (30, 29, None)
    INT2 = (31, 30, None)
    UINT2 = (32, 31, None)
    COMPLEX32 = (33, 32, torch.complex32)
    HIFLOAT8 = (34, 33, None)
    FLOAT8_E5M2 = (35, 34, torch.float8_e5m2)
    FLOAT8_E4M3FN = (36, 35, torch.float8_e4m3fn)
    FLOAT8_E8M0 = (37, 36, torch.float8_e8m0fnu)
    FLOAT6_E3M2 = (38, 37, None)
    FLOAT6_E2M3 = (39, 38, None)
    FLOAT4_E2M1 = (40, 39, None)
    FLOAT4_E1M2 = (41, 40, None)

    def __init__(self, ge: int, proto: int, shared: torch.dtype | None) -> None:
        self.ge, self.proto, self.shared = ge, proto, shared

    @property
    def torch_dtype(self) -> torch.dtype:
        """torch's dtype. Raises ValueError where torch has none (then `shared` is None)."""
        if self.shared is None:
            raise ValueError(f"torch has no dtype for GE's {self.name}")
        return self.shared

    @property
    def held(self) -> torch.dtype:
        """The dtype of a torch tensor that holds the values, torch's own or a wider one where torch has none.

        Raises ValueError where nothing is known to hold them.
        """
        return _HELD.get(self.name) or self.torch_dtype

    @property
    def text(self) -> str:
        """For people and files: torch's name, or GE's in small letters."""
        return self.name.lower() if self.shared is None else str(self.shared).removeprefix("torch.")

    @property
    def bits(self) -> int:
        """Of an element in memory; elements lie close together."""
        return 8 * self.shared.itemsize if self.shared is not None else _BITS[self.name]

    @staticmethod
    def of_ge(number: int) -> "Dtype":
        """By the number used in attributes. Raises ValueError if unknown."""
        return _lookup(_BY_GE, number, "GE's dtype enum")

    @staticmethod
    def of_proto(number: int) -> "Dtype":
        """By the number used in descriptions. Raises ValueError if unknown."""
        return _lookup(_BY_PROTO, number, "the dtypes of descriptions")

    @staticmethod
    def of_torch(dtype: torch.dtype) -> "Dtype":
        """Raises ValueError if GE has no such dtype."""
        return _lookup(_BY_TORCH, dtype, "the dtypes GE shares with torch")


_HELD = {"INT4": torch.int8, "FLOAT4_E2M1": torch.bfloat16}
_BITS = {
    **dict.fromkeys(("INT4", "FLOAT4_E2M1", "FLOAT4_E1M2"), 4),
    **dict.fromkeys(("FLOAT6_E3M2", "FLOAT6_E2M3"), 6),
    **dict.fromkeys(("INT2", "UINT2"), 2),
    **dict.fromkeys(("UINT1", "STRING", "UNDEFINED"), 1),
    "HIFLOAT8": 8,
}
_BY_GE = {d.ge: d for d in Dtype}
_BY_PROTO = {d.proto: d for d in Dtype}
_BY_TORCH = {d.shared: d for d in Dtype if d.shared is not None}


def _lookup(table: Mapping[Any, Dtype], key: Any, what: str) -> Dtype:
    if key not in table:
        raise ValueError(f"{key} is not one of {what}")
    return table[key]


# Kinds of a list attribute: GE drops a list whose kind is not set, whatever it holds.
_LIST_KINDS = {"s": 1, "i": 2, "f": 3, "b": 4, "bt": 5, "td": 6, "t": 7, "g": 8, "na": 9, "dt": 10}
_LIST_FIELDS = {kind: field for field, kind in _LIST_KINDS.items()}


def fill_attr(attr: AttrDef, value: Any) -> None:
    """Store a Python value: bool, int, float (as float32), str or bytes, dtype, tensor, or a list of one of them.

    A list of lists of ints or floats has its own field. An empty list is stored as a list of ints.

    Raises:
        ValueError: a value that GE attributes cannot hold.
    """
    if isinstance(value, (list, tuple)):
        _fill_list(attr, list(value))
    elif isinstance(value, TensorDef):
        attr.t.CopyFrom(value)
    else:
        field, stored = _scalar(value)
        setattr(attr, field, stored)


def _scalar(value: Any) -> tuple[str, Any]:
    """Field of AttrDef and value as stored there. bool before int: Python's bool is an int."""
    for kind, field in ((bool, "b"), (int, "i"), (float, "f"), (bytes, "s")):
        if isinstance(value, kind):
            return field, value
    if isinstance(value, str):
        return "s", value.encode()
    if isinstance(value, torch.dtype):
        return "dt", Dtype.of_torch(value).ge
    if isinstance(value, Dtype):
        return "dt", value.ge
    raise ValueError(f"a GE attribute cannot hold {type(value).__name__} {value!r}")


def _fill_list(attr: AttrDef, values: list[Any]) -> None:
    if values and isinstance(values[0], (list, tuple)):
        _fill_list_of_lists(attr, values)
        return
    stored = [_scalar(v) for v in values]
    fields = {field for field, _ in stored} or {"i"}
    if fields == {"i", "f"}:
        fields = {"f"}
    if len(fields) > 1:
        raise ValueError(f"a GE list attribute holds values of one type, got {values!r}")
    (field,) = fields
    attr.list.SetInParent()
    del getattr(attr.list, field)[:]
    getattr(attr.list, field).extend(v for _, v in stored)
    attr.list.val_type = _LIST_KINDS[field]


def _fill_list_of_lists(attr: AttrDef, values: list[Any]) -> None:
    if any(isinstance(v, float) for row in values for v in row):
        attr.list_list_float.CopyFrom(ListListFloat(list_list_f=[ListFloat(list_f=row) for row in values]))
    else:
        attr.list_list_int.CopyFrom(ListListInt(list_list_i=[ListInt(list_i=row) for row in values]))


def attr_value(attr: AttrDef) -> Any:
    """The Python value `fill_attr` would store: strings as str (bytes if not UTF-8), dtypes as `Dtype`, unset as None.

    Raises:
        ValueError: a list of unknown kind, or a dtype number GE does not have.
    """
    field = attr.WhichOneof("value")
    if field is None:
        return None
    if field == "list":
        if attr.list.val_type not in _LIST_FIELDS:
            raise ValueError(f"list attribute of unknown kind {attr.list.val_type}")
        inner = _LIST_FIELDS[attr.list.val_type]
        return [_plain(inner, v) for v in getattr(attr.list, inner)]
    if field == "list_list_int":
        return [list(row.list_i) for row in attr.list_list_int.list_list_i]
    if field == "list_list_float":
        return [list(row.list_f) for row in attr.list_list_float.list_list_f]
    return _plain(field, getattr(attr, field))


def _plain(field: str, value: Any) -> Any:
    if field == "dt":
        return Dtype.of_ge(value)
    if field == "s":
        try:
            return value.decode()
        except UnicodeDecodeError:
            return value
    return value


def set_attr(holder: OpDef | GraphDef | TensorDescriptor, name: str, value: Any) -> None:
    """Set an attribute of an op, a graph or a description from a Python value, replacing what was there."""
    holder.attr[name].Clear()
    fill_attr(holder.attr[name], value)


def get_attr(holder: OpDef | GraphDef | TensorDescriptor, name: str, default: Any = None) -> Any:
    """An attribute as a Python value, or `default` where it is missing or unset."""
    if name not in holder.attr:
        return default
    value = attr_value(holder.attr[name])
    return default if value is None else value


def describe(desc: TensorDescriptor, shape: tuple[int, ...] | torch.Size, dtype: torch.dtype | Dtype) -> None:
    """Make a description known: shape, dtype, plain (ND) layout."""
    desc.dtype = (dtype if isinstance(dtype, Dtype) else Dtype.of_torch(dtype)).proto
    desc.shape.SetInParent()
    desc.shape.dim[:] = shape
    desc.layout = "ND"


def is_known(desc: TensorDescriptor) -> bool:
    """Whether a description has both a dtype and a shape."""
    return desc.dtype != Dtype.UNDEFINED.proto and desc.HasField("shape")


def is_unfed(desc: TensorDescriptor) -> bool:
    """Whether it stands for an optional input that is not given."""
    return "_is_unfed_optional" in desc.attr


FRACTAL_NZ, ND = 29, 2  # numbers of formats


def describe_tiled(desc: TensorDescriptor, shape: Iterable[int], dtype: Dtype) -> None:
    """Make a description that of a matrix, or a stack of them, that lies in memory in tiles (FRACTAL_NZ).

    As torchair describes such an input from CANN 8.2 on: without a shape in memory, which GE computes.
    """
    describe(desc, (), dtype)
    desc.layout = "FRACTAL_NZ"
    set_attr(desc, "format_for_int", FRACTAL_NZ)
    set_attr(desc, "origin_format_for_int", ND)
    set_attr(desc, "origin_format_is_set", True)
    set_attr(desc, "origin_shape", list(shape))
    set_attr(desc, "origin_shape_initialized", True)


def is_tiled(desc: TensorDescriptor) -> bool:
    """Whether it was described by `describe_tiled`."""
    return desc.layout == "FRACTAL_NZ"


def shape_of(desc: TensorDescriptor) -> tuple[int, ...]:
    """Shape of a known description, whatever its layout in memory."""
    return tuple(desc.attr["origin_shape"].list.i) if is_tiled(desc) else tuple(desc.shape.dim)


def dtype_of(desc: TensorDescriptor) -> torch.dtype:
    """The dtype of tensors that hold the values of a known description: see `Dtype.held`."""
    return Dtype.of_proto(desc.dtype).held


def bytes_of(desc: TensorDescriptor) -> int:
    """Bytes of a known description in memory."""
    return -(-math.prod(shape_of(desc)) * Dtype.of_proto(desc.dtype).bits // 8)


def describe_inputs(graph: GraphDef) -> None:
    """Make every input description that of its producer's output, under the input's own name."""
    producers = {op.name: op for op in graph.op}
    for op in graph.op:
        for edge, desc in zip(data_edges(op), op.input_desc, strict=False):  # Data has a description but no edge
            name, index = split_edge(edge)
            if name:
                port, produced = desc.name, producers[name].output_desc[index]
                if is_tiled(produced):  # a reader sees the matrix; GE brings the layout to it
                    desc.ClearField("attr")
                    describe(desc, shape_of(produced), Dtype.of_proto(produced.dtype))
                else:
                    desc.CopyFrom(produced)
                desc.name = port


def tensor_def(value: torch.Tensor) -> TensorDef:
    """A constant: description and little-endian row-major bytes."""
    made = TensorDef()
    describe(made.desc, value.shape, value.dtype)
    flat = value.detach().cpu().contiguous().reshape(-1)
    made.data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return made


def tensor_value(constant: TensorDef) -> torch.Tensor:
    """The tensor of a constant.

    Raises:
        ValueError: bytes that do not fill the described shape, or a dtype torch does not have.
    """
    shape, dtype = shape_of(constant.desc), dtype_of(constant.desc)
    flat = torch.frombuffer(bytearray(constant.data), dtype=dtype) if constant.data else torch.empty(0, dtype=dtype)
    if flat.numel() != torch.Size(shape).numel():
        raise ValueError(f"constant of shape {shape} and {dtype} holds {len(constant.data)} bytes")
    return flat.reshape(shape)


def results_of(ops: Iterable[OpDef]) -> OpDef:
    """The NetOutput of a graph's nodes.

    Raises:
        BundleError: there is none, or more than one.
    """
    found = [op for op in ops if op.type == "NetOutput"]
    if len(found) != 1:
        raise BundleError(f"a graph has {len(found)} NetOutput nodes, expected one; its file was changed or damaged.")
    return found[0]


def split_edge(edge: str) -> tuple[str, int]:
    """`"name:0"` -> op name and output index; index -1 is a control edge, an empty edge (unfed input) is `("", 0)`."""
    name, _, index = edge.rpartition(":")
    return (name, int(index)) if name else ("", 0)


def data_edges(op: OpDef) -> list[str]:
    """Data inputs in order, "" for an unfed one; one per `input_desc`. Control edges are left out."""
    return [edge for edge in op.input if not edge.endswith(":-1")]


def control_edges(op: OpDef) -> list[str]:
    """Control edges (`"name:-1"`): ops that must have run before."""
    return [edge for edge in op.input if edge.endswith(":-1")]
