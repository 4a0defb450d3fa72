"""What the nodes of a traced part do on one rank: products, element-wise work, bytes, collectives.

The graph is the one that is converted: captured on the mesh, einsums as products, weight arithmetic folded away.
How it is counted:

* A view costs nothing; every other node reads its operands and writes its results once, and operators in `RULES` touch
  a part: gathered rows, selected keys, the pages of the sequences, the slots of the rows, experts that have rows.
* Weights and states come from memory (HBM). Other tensors are counted apart: they may stay in L2.
* Buffers for rows of experts have room for all that may come; counted are the rows that do.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from kimi_graph.compile.sharded import ShardedCapture
from kimi_graph.parallel.collectives import COLLECTIVES, Issued, issued

Node = Any  # an `fx.Node`, whose arguments may be anything
KDA_CHUNK = 64  # tokens that the kernel of a chunked prefill works on together


@dataclass(frozen=True, kw_only=True)
class Work:
    """One node.

    Attributes:
        name: of the operator.
        source: line of the layer.
        cube: FLOP of matrix products, in `dtype` ("bf16", "fp32", "fp8").
        vector: element-wise operations.
        weights, states: bytes from and to HBM.
        moved: bytes of other tensors.
        experts: the node works on rows of experts: its rows, and weights, depend on routing.
        issued: the collective that it is.
    """

    name: str
    source: str
    cube: float = 0
    dtype: str = "bf16"
    vector: float = 0
    weights: float = 0
    states: float = 0
    moved: float = 0
    experts: bool = False
    issued: Issued | None = None


# ---- sizes -----------------------------------------------------------------------------------------------------------


def _vals(node: Any) -> Iterator[torch.Tensor]:
    val = node.meta.get("val") if isinstance(node, fx.Node) else None
    if isinstance(val, torch.Tensor):
        yield val
    elif isinstance(val, (list, tuple)):
        yield from (x for x in val if isinstance(x, torch.Tensor))


def size(node: Any) -> int:
    """Bytes of what a node gives."""
    return sum(x.numel() * x.element_size() for x in _vals(node))


def _count(node: Any) -> int:
    return sum(x.numel() for x in _vals(node))


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


# ---- operators that are not read and written whole -------------------------------------------------------------------

Found = dict[str, Any]  # fields of `Work`
_ROW = 2  # bytes of a number in a cache


def _product(node: Node) -> Found:
    x = node.args[0].meta["val"]
    rows, inner = math.prod(x.shape[:-1]), x.shape[-1]
    groups = x.shape[0] if node.target is torch.ops.kimi.batch_matmul.default else 1
    padded = groups * -(-max(1, rows // groups) // 16) * 16  # a tile of the cube has 16 rows
    outs = _count(node) // max(1, rows)
    return {"cube": 2.0 * padded * inner * outs, "dtype": "fp32" if x.dtype == torch.float32 else "bf16"}


def _grouped(node: Node) -> Found:
    x, weight = node.args[0].meta["val"], node.args[1].meta["val"]
    return {"cube": 2.0 * x.shape[0] * math.prod(weight.shape[1:])}


def _attention(node: Node) -> Found:
    """All heads of the queries with all keys that were expanded."""
    (rows, tokens, heads, nope), rope = _shape(node.args[0]), _shape(node.args[1])[-1]
    keys, value = _shape(node.args[2])[1], _shape(node.args[4])[-1]
    pairs = rows * tokens * heads * keys
    return {"cube": 2.0 * pairs * (nope + rope + value), "vector": 6.0 * pairs}


def _latent(node: Node) -> Found:
    (rows, _, heads, latent), rope = _shape(node.args[0]), _shape(node.args[1])[-1]
    keys = _shape(node.args[4])[1] * _shape(node.args[2])[1]
    pairs = rows * heads * keys
    return {
        "cube": 2.0 * pairs * (2 * latent + rope),
        "vector": 6.0 * pairs,
        "states": rows * keys * (latent + rope) * _ROW,
        "moved": size(node) + size(node.args[0]),
    }


def _sparse(node: Node, selected: int = 4, row: int = 0) -> Found:
    """Every query reads the rows selected for it: from HBM each row once, the others from L2.

    Args:
        selected: which argument that is; the block table follows. row: bytes of a cache's row; 0: in 16 bits.
    """
    (rows, tokens, heads, latent), rope = _shape(node.args[0]), _shape(node.args[1])[-1]
    top_k, (_, pages) = _shape(node.args[selected])[-1], _shape(node.args[selected + 1])
    width, cached = row or (latent + rope) * _ROW, pages * _shape(node.args[2])[1]
    pairs = rows * tokens * heads * top_k
    return {
        "cube": 2.0 * pairs * (2 * latent + rope),
        "vector": 6.0 * pairs,
        "states": rows * min(tokens * top_k, cached) * width,
        "moved": rows * tokens * top_k * width + size(node),
    }


def _of_part(node: Node) -> Found:
    """`_sparse` of a part of a cache as CANN's operators do it: rows are copied to pools of their own, then read."""
    found, top_k = _sparse(node), _shape(node.args[4])[-1]
    (rows, tokens, _, latent), rope = _shape(node.args[0]), _shape(node.args[1])[-1]
    return found | {"moved": found["moved"] + 2 * rows * tokens * top_k * (latent + rope) * _ROW}


def _select(node: Node, table: int = 3, number: int = _ROW) -> Found:
    """Index scores of all cached tokens; quadratic in a prefill.

    Args:
        table: which argument that is. number: bytes of a number of a key.
    """
    (rows, tokens, heads, key), (_, pages) = _shape(node.args[0]), _shape(node.args[table])
    cached = pages * _shape(node.args[2])[1]
    pairs = rows * tokens * cached
    return {
        "cube": 2.0 * pairs * heads * key,
        "vector": (2.0 * heads + 4) * pairs,
        "states": rows * cached * key * number,
        "moved": size(node) + size(node.args[0]),
    }


def _kda_chunk(node: Node) -> Found:
    """In a chunk of C tokens five products of C x C with K or V and an inverse, between chunks four of C with K x V."""
    (rows, tokens, heads, key), value = _shape(node.args[0]), _shape(node.args[2])[-1]
    chunk = min(KDA_CHUNK, tokens)
    each = 2.0 * (chunk * (3 * key + 2 * value) + 4 * key * value + chunk * chunk / 3)
    return {
        "cube": rows * tokens * heads * each,
        "vector": 12.0 * rows * tokens * heads * key,
        "states": 2 * rows * heads * key * value * 4,
        "moved": sum(size(x) for x in node.args[:5]) + size(node.args[2]),
    }


def _kda_step(node: Node) -> Found:
    (rows, *_, heads, key), value = _shape(node.args[0]), _shape(node.args[2])[-1]
    numbers = rows * heads * key * value
    return {"vector": 8.0 * numbers, "states": 2 * numbers * 4, "moved": 4 * size(node.args[0])}


def _conv(node: Node) -> Found:
    x, window = node.args[0], node.args[2]
    rows = _shape(x)[0]
    state = size(window) // max(1, _shape(window)[0]) * rows
    return {"vector": 10.0 * _count(x), "states": 2 * state, "moved": 2 * size(x)}


def _write(news: int) -> Callable[[Node], Found]:
    return lambda node: {
        "states": sum(size(x) for x in node.args[:news]),
        "moved": sum(size(x) for x in node.args[:news]),
    }


def _read(node: Node) -> Found:
    return {"states": size(node), "moved": size(node)}


def _taken(node: Node) -> Found:
    return {"moved": 2 * size(node)}


def _looked_up(node: Node) -> Found:
    return {"weights": size(node), "moved": size(node)}


_VIEWS = {
    "view",
    "_unsafe_view",
    "unsqueeze",
    "squeeze",
    "expand",
    "getitem",
    "own_index",
    "scalar_tensor",
    "arange",
    "unbind",
}
_VECTOR = {  # operations of an element of the result; 1 unless said
    "rms_norm": 6, "gated_rms_norm": 16, "layer_norm": 8, "l2_norm": 4, "kda_gate": 20, "sigmoid": 8, "silu": 9,
    "gelu": 12, "exp": 6, "situ": 40, "situ_mul": 40, "swiglu": 10, "rope": 6, "residual_mix": 8, "moe_route": 40,
    "best_positions": 40, "sort": 40,
}  # fmt: skip
RULES: Mapping[str, Callable[[Node], Found]] = {
    "matmul": _product,
    "batch_matmul": _product,
    "grouped_matmul": _grouped,
    "attention": _attention,
    "full_attention": lambda n: {
        "cube": 4.0 * math.prod(_shape(n.args[0])) * _shape(n.args[1])[1],
        "vector": 6.0 * math.prod(_shape(n.args[0])[:3]) * _shape(n.args[1])[1],
    },
    "latent_attention": _latent,
    "latent_attention_lse": _latent,
    "sparse_attention": _sparse,
    "sparse_attention_lse": _of_part,
    "select_keys": _select,
    "quantised_sparse_attention": lambda n: _sparse(n, 3, _shape(n.args[2])[-1]),
    "quantised_select_keys": lambda n: _select(n, 4, 1),
    "quantised_cache_write": _write(2),
    "quantised_index_write": _write(1),
    "state_write": _write(1),
    "kda_chunk": _kda_chunk,
    "kda_step": _kda_step,
    "short_conv": _conv,
    "cache_write": _write(2),
    "index_write": _write(1),
    "cache_read": _read,
    "slice": _taken,
    "select": _taken,
    "gather": _taken,
    "split_with_sizes": _taken,
    "own_slice": _taken,
    "embedding": _looked_up,
}


def node_name(node: Node) -> str:
    """`matmul` of `kimi::matmul`."""
    name = getattr(node.target, "_schema", None)
    return name.name.partition("::")[2] if name is not None else getattr(node.target, "__name__", str(node.target))


# ---- a part ----------------------------------------------------------------------------------------------------------


def part_work(piece: ShardedCapture) -> list[Work]:
    """The nodes of a part that cost something, in order. `piece` has been through `fold_piece`."""
    captured = piece.captured
    graph = captured.module.graph
    placeholders = graph.find_nodes(op="placeholder")
    kinds = {n: name[0] for n, name in zip(placeholders, captured.inputs, strict=True) if name[:2] in ("p.", "s.")}
    crossing = iter(issued(graph))
    share: dict[fx.Node, float] = {}  # of rows in a buffer that are there, where those are rows of experts
    found = []
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        collective = COLLECTIVES.get(node.target)
        crosses = next(crossing) if collective is not None and collective.moves else None
        name = node_name(node)
        part = _share(node, name, share)
        if part is not None and name not in ("moe_combine", "expert_combine"):
            share[node] = part
        if name not in _VIEWS:
            work = _work(node, name, kinds)
            found.append(replace(_scaled(work, part), issued=crosses))
    return found


def _share(node: Node, name: str, share: Mapping[fx.Node, float]) -> float | None:
    """The part of a buffer's rows that come, if all experts are chosen as often; None where it holds no such rows."""
    if name == "moe_dispatch":
        experts, others = node.args[2], node.args[3] if len(node.args) > 3 else 0
        return experts / (experts + others)
    if name == "expert_dispatch":
        _, _, chosen, ways, experts = node.args
        top_k = _shape(chosen)[1]
        return top_k / (ways * min(experts, top_k))
    return next((share[n] for n in node.all_input_nodes if n in share), None)


def _work(node: Node, name: str, kinds: Mapping[fx.Node, str]) -> Work:
    inputs = node.all_input_nodes
    weights = sum(size(n) for n in inputs if kinds.get(n) == "p")
    moved = sum(size(n) for n in inputs if n not in kinds) + size(node)
    whole: Found = {"weights": weights, "moved": moved, "vector": float(_VECTOR.get(name, 1) * _count(node))}
    if name == "residual_mix":
        whole["vector"] *= len(inputs)
    if name in COLLECTIVES_NAMES:
        whole = {}
    rule = RULES.get(name)
    special = {} if rule is None else rule(node)
    if "cube" in special:
        whole.pop("vector", None)
    return Work(name=name, source=node.meta.get("source", ""), **(whole | special))


COLLECTIVES_NAMES = {c.name for c in COLLECTIVES.values() if c.moves}


def _scaled(work: Work, share: float | None) -> Work:
    if share is None:
        return work
    of_rows = {name: getattr(work, name) * share for name in ("cube", "vector", "moved")}
    return replace(work, **of_rows, experts=True)


SCORES = {"select_keys": 3, "quantised_select_keys": 4}  # the argument that is the block table


def score_bytes(piece: ShardedCapture) -> int:
    """Bytes of the index scores of all queries of a part with all cached tokens, in float32; 0 where none are made."""
    calls = (n for n in piece.captured.module.graph.nodes if n.op == "call_function" and node_name(n) in SCORES)
    return sum(
        4 * math.prod(_shape(n.args[0])[:2]) * _shape(n.args[SCORES[node_name(n)]])[1] * _shape(n.args[2])[1]
        for n in calls
    )


# ---- memory that a graph works in ------------------------------------------------------------------------------------


def peak_bytes(piece: ShardedCapture) -> int:
    """The most bytes of tensors that are needed at once while a part runs in its order, its inputs aside.

    States are written in place, and views are no tensors of their own.
    """
    captured = piece.captured
    graph = captured.module.graph
    (results,) = graph.find_nodes(op="output")
    after = dict(zip(captured.outputs, results.args[0], strict=True))
    in_place = {n for name, n in after.items() if name.startswith("s.")}
    storage: dict[Node, Node] = {}  # whose memory a node's result is in
    held: dict[Node, int] = {}
    for node in graph.nodes:
        if node.op == "call_function":
            view = node_name(node) in _VIEWS and node.all_input_nodes
            storage[node] = storage.get(node.args[0], node.args[0]) if view else node
            if not view:
                held[node] = _held(node, in_place)
    last: dict[Node, Node] = {}
    for node in graph.nodes:
        for n in node.all_input_nodes:
            last[storage.get(n, n)] = node
    live = peak = 0
    ends: dict[Node, list[Node]] = {}
    for n, user in last.items():
        ends.setdefault(user, []).append(n)
    for node in graph.nodes:
        live += held.get(node, 0)
        peak = max(peak, live)
        live -= sum(held.get(n, 0) for n in ends.get(node, ()))
    return peak


def _held(node: Node, in_place: set[fx.Node]) -> int:
    """Bytes of a node's results that are no states."""
    if node in in_place:
        return 0
    parts = [n for n in node.users if node_name(n) == "getitem"]
    if isinstance(node.meta.get("val"), (list, tuple)):
        return sum(size(n) for n in parts if n not in in_place)
    return size(node)
