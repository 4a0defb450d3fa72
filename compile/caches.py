"""`--kv-dtype`: caches of sparse attention in 8 bits, which the model knows nothing of.

The model's cache of a layer is `latent`, `rope` and, where it has an indexer of its own, `index`. In 8 bits `latent`
holds rows of all a token has in attention (`ops.quantised_cache`), there is no `rope`, and `index_scale` goes with
`index`. Everything that must know reads it here: which states there are, the graph that has them, and what they hold.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from kimi_graph import ops
from kimi_graph.config import LayerConfig, MlaConfig, ModelConfig
from kimi_graph.errors import CompileError
from kimi_graph.models import decoder
from kimi_graph.ops.quantised_cache import INDEX_SCALE, pack_rows, quantise, row_width, unpack_rows
from kimi_graph.spec import weight

from .capture import Captured
from .targets import Target

KV_DTYPES = ("bf16", "int8", "fp8")
STORED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
CHIPS = {"int8": ("a2", "a3", "950"), "fp8": ("950",)}  # whose sparse attention takes the dtype
RULES = [
    "latent: a row is the token's 8-bit latents, the bytes of its rope channels in bfloat16, and the bytes of a "
    "float32 scale for each 128 latents. A quantised number times its scale is the number.",
    "index: an 8-bit key of each token; index_scale: its scale.",
]


def quantised_layer(layer: LayerConfig) -> bool:
    """Whether a layer's cache is read by sparse attention, so that it may have 8 bits."""
    return isinstance(layer.mixer, MlaConfig) and layer.mixer.indexer is not None


def check_kv_dtype(c: ModelConfig, target: Target, kv_dtype: str, capacity: int, *, split: bool = False) -> None:
    """Refuse a cache that no operator reads.

    Args:
        capacity: tokens that a sequence's pages hold. split: over several ranks.

    Raises:
        CompileError: unknown, not of this chip, split, or a model or length whose attention is dense.
    """
    if kv_dtype not in KV_DTYPES:
        raise CompileError(f"--kv-dtype {kv_dtype!r}: unknown; one of {', '.join(KV_DTYPES)}.")
    if kv_dtype == "bf16":
        return
    if split:
        raise CompileError(
            f"--kv-dtype {kv_dtype}: 8-bit caches are not split by sequence yet; take bf16, or a mesh without cp and "
            f"--split-cache."
        )
    if target.soc not in CHIPS[kv_dtype]:
        legal = ", ".join(name for name in KV_DTYPES if target.soc in CHIPS.get(name, (target.soc,)))
        raise CompileError(f"--kv-dtype {kv_dtype}: {target.name} has no 8-bit floats; it takes {legal}.")
    why = "caches of 8 bits are for sparse attention alone"
    top_k = max((x.mixer.indexer.top_k for x in c.layers if quantised_layer(x)), default=0)  # type: ignore[union-attr]
    if not top_k:
        raise CompileError(f"--kv-dtype {kv_dtype}: {why}, and {c.name} has no indexer; take bf16.")
    if capacity <= top_k:
        raise CompileError(
            f"--kv-dtype {kv_dtype}: {why}, and sequences of {capacity:,} tokens are attended to whole, as the indexer "
            f"keeps {top_k:,}; take bf16, or --max-len {top_k + 1} or more."
        )


# ---- states ----------------------------------------------------------------------------------------------------------


def state_specs(c: ModelConfig, kv_dtype: str, *, slots: int, pages: int, page: int) -> tuple[Any, ...]:
    """The state a bundle keeps for every layer, in order: trees of specs. See `decoder.state_specs`."""
    specs = decoder.state_specs(c, slots=slots, pages=pages, page=page, dtype=c.dtype)
    if kv_dtype == "bf16":
        return specs
    return tuple(_quantised(s, kv_dtype) if quantised_layer(x) else s for x, s in zip(c.layers, specs, strict=True))


def _quantised(spec: Any, kv_dtype: str) -> dict[str, Any]:
    dtype, (pages, page, latent) = STORED[kv_dtype], spec.latent.shape
    rows = (pages, page, row_width(latent, spec.rope.shape[2]))
    made = {"latent": weight(rows, "pages _ _", source="", dtype=dtype)}
    if spec.index is not None:
        made["index"] = weight(spec.index.shape, "pages _ _", source="", dtype=dtype)
        made["index_scale"] = weight((pages, page), "pages _", source="", dtype=INDEX_SCALE[dtype])
    return made


def model_states(c: ModelConfig, kv_dtype: str, states: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What states hold, under the model's names and as numbers: `[.., width]`, some dimensions may be one.

    Args:
        states: by name, as a bundle keeps them; floats of 64 bits are not rounded (see `ops.quantised_cache`).
    """
    found = dict(states)
    for prefix, mixer in _prefixes(c, kv_dtype):
        rows = found.pop(f"{prefix}.latent")
        found[f"{prefix}.latent"], found[f"{prefix}.rope"] = unpack_rows(rows, mixer.latent)
        if f"{prefix}.index" in found:
            keys, scales = found[f"{prefix}.index"], found.pop(f"{prefix}.index_scale")
            found[f"{prefix}.index"] = keys.to(scales.dtype) * scales.reshape(*keys.shape[:-1], 1)
    return found


def kept_states(c: ModelConfig, kv_dtype: str, states: Mapping[str, Tensor], *, exact: bool) -> dict[str, Tensor]:
    """The model's states as a bundle keeps them; the other way round than `model_states`."""
    found = dict(states)
    for prefix, _ in _prefixes(c, kv_dtype):
        dtype = torch.float64 if exact else STORED[kv_dtype]
        found[f"{prefix}.latent"] = pack_rows(found[f"{prefix}.latent"], found.pop(f"{prefix}.rope"), dtype)
        if f"{prefix}.index" in found:
            found[f"{prefix}.index"], scale = quantise(found[f"{prefix}.index"], dtype)
            found[f"{prefix}.index_scale"] = scale.to(INDEX_SCALE.get(dtype, dtype))
    return found


def _prefixes(c: ModelConfig, kv_dtype: str) -> list[tuple[str, MlaConfig]]:
    """What the names of states in 8 bits start with."""
    if kv_dtype == "bf16":
        return []
    layers = [(i, x.mixer) for i, x in enumerate(c.layers) if quantised_layer(x)]
    return [(f"s.layers.{i}.mla", mixer) for i, mixer in layers if isinstance(mixer, MlaConfig)]


# Writes of the model's caches that are others in 8 bits, by their names in captured graphs.
WRITES = {
    "cache_write_default": "quantised_cache_write_default",
    "index_write_default": "quantised_index_write_default",
}


def written(kept: Sequence[Tensor], model: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """What a write in 8 bits and the model's own gave, side by side, as numbers of one shape `[rows, width]`."""
    theirs = torch.cat([x.flatten(0, 1) for x in model], -1)
    rows = kept[0].reshape(len(theirs), -1)
    mine = torch.cat(unpack_rows(rows, model[0].shape[-1]), -1) if len(kept) == 1 else rows * kept[1].reshape(-1, 1)
    return mine, theirs


# ---- graphs ----------------------------------------------------------------------------------------------------------


def quantise_caches(captured: Captured, kv_dtype: str) -> Captured:
    """The graph of a part with its caches in 8 bits: operators that write and read them take the place of the model's.

    Reads keep their names in the graph, as they give what the model's do (`bisect`). A part without sparse attention
    is left as it is.
    """
    graph = captured.module.graph
    calls = {node.target: node for node in graph.nodes if node.op == "call_function"}
    attend = calls.get(ops.sparse_attention.op)
    if kv_dtype == "bf16" or attend is None:
        return captured
    edit, dtype = _Edit(captured), STORED[kv_dtype]
    write = calls[ops.cache_write.op]
    latent, rope, pool, _, slots = write.args
    width = row_width(*(node.meta["val"].shape[-1] for node in (latent, rope)))
    edit.describe("s.latent", (*pool.meta["val"].shape[:2], width), dtype)
    edit.states["s.latent"] = rows = edit.call(write, ops.quantised_cache_write, latent, rope, pool, slots)
    del edit.states["s.rope"]
    q_latent, q_rope, _, _, *rest = attend.args
    attend.target, attend.args = ops.quantised_sparse_attention.op, (q_latent, q_rope, rows, *rest)
    if ops.index_write.op in calls:
        write, select = calls[ops.index_write.op], calls[ops.select_keys.op]
        key, pool, slots = write.args
        edit.describe("s.index", pool.meta["val"].shape, dtype)
        scales = edit.input("s.index_scale", pool.meta["val"].shape[:2], INDEX_SCALE[dtype])
        keys, scaled = edit.parts(edit.call(write, ops.quantised_index_write, key, pool, scales, slots))
        edit.states |= {"s.index": keys, "s.index_scale": scaled}
        q, weights, _, *rest = select.args
        select.target, select.args = ops.quantised_select_keys.op, (q, weights, keys, scaled, *rest)
    return edit.finish()


class _Edit:
    """Changes the states of a captured graph. `states`: their next values, by name."""

    def __init__(self, captured: Captured) -> None:
        self.captured, self.graph = captured, captured.module.graph
        (self.results,) = self.graph.find_nodes(op="output")
        self.inputs = dict(zip(captured.inputs, self.graph.find_nodes(op="placeholder"), strict=True))
        self.states = dict(zip(captured.outputs, self.results.args[0], strict=True))  # type: ignore[arg-type]

    def describe(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Another shape and dtype for an input."""
        self.inputs[name].meta = {"val": torch.empty(tuple(shape), dtype=dtype, device="meta"), "source": ""}

    def input(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> fx.Node:
        """A new input, after those there are."""
        with self.graph.inserting_after([*self.inputs.values()][-1]):
            self.inputs[name] = self.graph.placeholder(name.replace(".", "_"))
        self.describe(name, shape, dtype)
        return self.inputs[name]

    def call(self, at: fx.Node, operator: ops.Operator, *args: fx.Node) -> fx.Node:
        """A call of an operator before another one, from the same line."""
        with self.graph.inserting_before(at):
            node = self.graph.call_function(operator.op, args)
        node.meta = {"val": operator.op(*(x.meta["val"] for x in args)), "source": at.meta["source"]}
        return node

    def parts(self, node: fx.Node) -> list[fx.Node]:
        """The results of a call that has several."""
        made = []
        for index, value in enumerate(node.meta["val"]):
            with self.graph.inserting_after(made[-1] if made else node):
                made.append(self.graph.call_function(getitem, (node, index)))
            made[-1].meta = {"val": value, "source": node.meta["source"]}
        return made

    def finish(self) -> Captured:
        """The graph with its next states, without calls and inputs that nothing needs."""
        self.results.args = (tuple(self.states.values()),)
        self.graph.eliminate_dead_code()
        for name in [name for name, node in self.inputs.items() if name.startswith("s.") and not node.users]:
            self.graph.erase_node(self.inputs.pop(name))
        self.captured.module.recompile()
        return replace(self.captured, inputs=tuple(self.inputs), outputs=tuple(self.states))
