"""Writes into the paged cache."""

import torch
from torch import Tensor

from kimi_graph.compile.executor.node import Op
from kimi_graph.compile.executor.registry import ge_op


@ge_op(
    "ScatterPaKvCache",
    provenance="documented formula",
    source="ops-transformer's document, scenario 2: key [T, heads, width] into key_cache [P, page, heads, width] at "
    "row slot_mapping (page * page size + offset), value likewise; negative slots are skipped (read in the kernels)",
    outputs="key_cache value_cache",
    in_place="key_cache value_cache",
    prototype="key key_cache slot_mapping value value_cache compress_lens? compress_seq_offset? seq_lens?",
)
def scatter_pa_kv_cache(
    op: Op, key: Tensor, key_cache: Tensor, slot_mapping: Tensor, value: Tensor, value_cache: Tensor
) -> tuple[Tensor, Tensor]:
    op.expect(cache_mode="Norm", scatter_mode="None", strides=[1, 1], offsets=[0, 0])
    op.same_dtype(key, key_cache, value, value_cache)
    op.of_dtype(torch.int32, torch.int64, slot_mapping=slot_mapping)
    op.require(key.ndim == value.ndim == 3, "key and value of [tokens, heads, width] expected")
    op.require(slot_mapping.shape == key.shape[:1] == value.shape[:1], "one slot per token expected")
    for name, new, cache in (("key", key, key_cache), ("value", value, value_cache)):
        op.require(
            cache.ndim == 4 and cache.shape[2:] == new.shape[1:],
            f"{name}_cache {list(cache.shape)} is not [pages, page, {', '.join(map(str, new.shape[1:]))}]",
        )
        _write(op, cache, new, slot_mapping)
    return key_cache, value_cache


def _write(op: Op, cache: Tensor, new: Tensor, slots: Tensor) -> None:
    rows = cache.shape[0] * cache.shape[1]
    op.require(len(new) <= rows, f"{len(new)} tokens for {rows} cache rows")
    if cache.is_meta:
        return
    written = slots >= 0
    op.require(not written.any() or int(slots.max()) < rows, f"a slot outside 0..{rows - 1}")
    # The last of several tokens with one slot (padding) stays, whatever the number of threads; so ranks agree.
    cache.view(rows, *cache.shape[2:]).index_copy_(0, slots[written].long(), new[written])
