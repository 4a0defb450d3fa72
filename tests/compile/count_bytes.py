"""What the nodes of an `.air` file read and write, counted by a reader that shares nothing with the compiler.

The file is parsed with torchair's own messages; widths of dtypes and what each operator touches are written down here
again, from the operators' documentation. `kimi-graph inspect --cost` is compared with it.
"""

from math import prod

# Bits by number of the protobuf enum; the last line are INT4, E4M3, E8M0 and E2M1.
BITS = {
    1: 32, 2: 16, 3: 8, 4: 8, 5: 16, 7: 32, 8: 64, 9: 32, 11: 8, 12: 64, 27: 16,
    28: 4, 35: 8, 36: 8, 39: 4,
}  # fmt: skip
FREE = {
    "Data", "RefData", "Const", "FileConstant", "NetOutput", "Reshape", "Squeeze", "Unsqueeze", "ExpandDims", "Bitcast",
}  # fmt: skip
CUTS = {"GatherV2", "GatherElements", "StridedSliceV2", "StridedSlice", "Slice"}
SLOTTED = {
    "ShortConv": ("window", "slots"),
    "KdaChunk": ("memory", "slots"),
    "RecurrentGatedDeltaRule": ("state", "ssm_state_indices"),
}
SPARSE = {"SparseFlashAttention", "KvQuantSparseFlashAttention"}
ATTENTION = {"FusedInferAttentionScore", "LightningIndexer", "QuantLightningIndexer", *SPARSE}
KEYS = {"key", "value", "key_rope", "key0", "value0", "key_dequant_scale"}


class Tensor:
    def __init__(self, desc, source):
        self.shape, self.source = tuple(desc.shape.dim), source
        self.bytes = prod(self.shape) * BITS[desc.dtype] // 8 if desc.dtype else 0

    def rows(self, count, dims=1):
        """Bytes of `count` of what the first `dims` dimensions number."""
        return self.bytes // prod(self.shape[:dims]) * count


class Counted:
    """`nodes`: (bytes read, bytes written) by name. The rest is of the whole graph."""

    def __init__(self, data, messages, page):
        model = messages.ModelDef()
        model.ParseFromString(data)
        self.ops = {op.name: op for op in model.graph[0].op}
        self.nodes = {}
        self.seen = {}  # by input of the graph: what each node that touches it reads
        for op in self.ops.values():
            if op.type not in FREE:
                self.nodes[op.name] = self.count(op)
        self.total = sum(map(sum, self.nodes.values()))
        self.weights = sum(max(r) for name, r in self.seen.items() if name.startswith("p."))
        self.states = sum(sum(self.state(name, page)) for name, op in self.ops.items() if op.type == "RefData")

    def ports(self, op, side):
        """Tensors by name; an input that is not given is left out."""
        names, edges = op.attr[f"_{side}_name_key"].list, list(op.input)
        found = {}
        for name, index in zip(names.s, op.attr[f"_{side}_name_value"].list.i, strict=True):
            source = edges[index] if side == "input" else f"{op.name}:{index}"
            if source:
                found[name.decode()] = Tensor(getattr(op, f"{side}_desc")[index], self.home(source))
        return found

    def home(self, edge):
        """The edge that holds the memory of this one."""
        name, index = edge.rsplit(":", 1)
        op = self.ops[name]
        if op.type in FREE and op.input and op.input[0]:
            return self.home(op.input[0])
        numbers = dict(zip(op.attr["_output_name_value"].list.i, op.attr["_output_name_key"].list.s, strict=True))
        inputs = dict(zip(op.attr["_input_name_key"].list.s, op.attr["_input_name_value"].list.i, strict=True))
        place = inputs.get(numbers.get(int(index)))
        return edge if place is None or not op.input else self.home(op.input[place])

    def count(self, op):
        given, made = self.ports(op, "input"), self.ports(op, "output")
        read = {name: t.bytes for name, t in given.items()}
        written = {name: t.bytes for name, t in made.items()}
        self.correct(op.type, given, made, read, written)
        sources = {}
        for name, t in given.items():
            sources[t.source] = max(sources.get(t.source, 0), read[name])
        for source, size in sources.items():
            self.seen.setdefault(source.rsplit(":", 1)[0], []).append(size)
        return sum(sources.values()), sum(written.values())

    @staticmethod
    def correct(kind, given, made, read, written):
        """Where a node touches a part of a tensor only."""
        if kind in CUTS:
            read["x"] = made["y"].bytes
        elif kind == "ScatterNdUpdate":
            read["var"], written["var"] = 0, given["updates"].bytes
        elif kind == "ScatterPaKvCache":
            for half in ("key", "value"):
                read[f"{half}_cache"], written[f"{half}_cache"] = 0, given[half].bytes
        elif kind in SLOTTED:
            state, index = SLOTTED[kind]
            read[state] = written[state] = given[state].rows(prod(given[index].shape))
        elif kind == "GroupedMatmul":
            for name in {"weight0", "scale0", "antiquant_scale0"} & given.keys():
                stack = given[name]
                read[name] = stack.rows(min(stack.shape[0], given["x0"].shape[0]))
        elif kind in ATTENTION and "block_table" in given:
            table, chosen = prod(given["block_table"].shape), given.get("sparse_indices")
            for name in KEYS & given.keys():
                pool = given[name]
                read[name] = pool.rows(table) if chosen is None else pool.rows(prod(chosen.shape), 3)

    def state(self, name, page):
        """Bytes a step has to read and to write of a state, by what it is for."""
        (desc,), leaf = self.ops[name].output_desc, name.rsplit(".", 1)[1]
        state, slots = Tensor(desc, name), self.ops.get("batch.slots")
        if ".kda." in name:
            own = state.rows(slots.output_desc[0].shape.dim[0])
            return own, own
        row = state.bytes // prod(state.shape) * state.shape[-1]
        new = self.ops["batch.slot_mapping"].output_desc[0].shape.dim[0]
        held = prod(self.ops["batch.block_table"].output_desc[0].shape.dim) * page
        sparse = [op for op in self.ops.values() if op.type in SPARSE]
        if sparse and leaf in ("latent", "rope"):
            held = min(held, prod(self.ports(sparse[0], "input")["sparse_indices"].shape))
        return row * held, row * new
