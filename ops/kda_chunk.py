"""KDA over many tokens, chunk by chunk (WY form): matrix products inside a chunk, a short scan between chunks.

Letters: B rows, T tokens, H heads, K key, V value; C tokens of a chunk, X chunks of all heads and rows in one group.

Inside a chunk every pair of tokens i >= j needs `exp(G_i - G_j)` per key channel, G the running sum of the decay, which
may fall by 40 a token: `exp(G_i)` vanishes and `exp(-G_j)` overflows. So the chunk is halved again and again, down to
single tokens. Between a half and the one before it, their boundary splits the decay in two factors, from j to the
boundary and from there to i, both exponentials of sums <= 0. The factors are kept up while halves are joined: each
decay is exponentiated once, no exponent is positive, nothing cancels, and no row depends on later tokens.
"""

import torch
from torch import Tensor

from .base import at_least_f32, at_once, empty_like, operator, recorded
from .kda_chunk_composed import composed
from .offers import Offer, cannot, own_widths
from .state import put_rows, state_rows

CHUNK = 64  # tokens; 32 to 128 measure alike
GROUP_BYTES = 2 << 20  # of the rows of chunks worked on together: they and their temporaries stay in cache


@operator(sharding="b t h k, b t h k, b t h v, b t h k, b t h, s h v k, b, b, b -> b t h v, s h v k", whole="tsk")
def kda_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    memory: Tensor,
    slots: Tensor,
    lengths: Tensor,
    counts: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The recurrence of `kda_step` over T tokens of every row.

    Args:
        q, k: `[B, T, H, K]`, unit length along K.
        v: `[B, T, H, V]`.
        decay: `[B, T, H, K]` natural log <= 0, any size.
        beta: `[B, T, H]` in (0, 1).
        memory: `[S, H, V, K]` float32; read as zeros where the row's sequence starts here (`lengths == counts`).
        slots, lengths, counts: `[B]`, see `Batch`; tokens past `counts` are padding and leave the memory unchanged.
        scale: multiplies q.

    Returns:
        `[B, T, H, V]` in v's dtype, zeros past `counts`; and the memory with the rows' slots updated.

    Source: Kimi Linear (arXiv:2510.26692), chunkwise form; fact sheet of models, section 3.3.
    """
    state = state_rows(memory, slots, lengths, counts).flatten(0, 1)
    state = state.double() if q.dtype == torch.float64 else state.float()
    (rows, tokens, heads, key), shortest, longest = q.shape, int(counts.min()), int(counts.max())
    chunk = min(CHUNK, 1 << (longest - 1).bit_length()) if longest else 1
    step = chunk * max(1, at_once(GROUP_BYTES, q) // (rows * heads * chunk * 2 * key * 4))
    outs = []
    for start in range(0, longest, step):
        size = min(step, longest - start)
        part = [x[:, start : start + size] for x in (q, k, v, decay, beta)]
        if shortest < start + size:  # what padding holds must not matter: without decay or write it changes nothing
            padding = torch.arange(start, start + size, device=q.device) >= counts.to(q.device)[:, None]
            part = [x.masked_fill(padding.view(*padding.shape, *[1] * (x.ndim - 2)), 0) for x in part]
        o, state = _group([_chunked(x, chunk) for x in part], state, scale)
        outs.append(o[:, :size].to(v.dtype))
    outs.append(v.new_zeros(rows, tokens - longest, *v.shape[2:]))
    return torch.cat(outs, 1), put_rows(memory, slots, state.unflatten(0, (rows, heads)))


def _chunked(x: Tensor, chunk: int) -> Tensor:
    """`[B, T, H, ...]` -> `[chunks, B, H, C, ...]` of at least float32, zeros after T."""
    x = at_least_f32(x)
    missing = -x.shape[1] % chunk
    if missing:
        x = torch.cat([x, x.new_zeros(x.shape[0], missing, *x.shape[2:])], 1)
    return x.unflatten(1, (-1, chunk)).permute(1, 0, 3, 2, *range(4, x.ndim + 1))


def _group(inputs: list[Tensor], state: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Some chunks in order: what a chunk knows of itself, all at once; then the scan over the state `[B * H, V, K]`."""
    q, k, v, decay, beta = inputs
    (chunks, rows, heads, chunk, key), value = q.shape, v.shape[-1]
    flat = (chunks * rows * heads, chunk)
    reads = torch.stack([q, k * -beta[..., None]], 4).view(*flat, 2, key)
    reads, writes, scores, inverse, total = _within(reads, k.reshape(*flat, key), decay.exp().reshape(*flat, key))
    reads = reads.transpose(1, 2).reshape(chunks, rows * heads, 2 * chunk, key)
    news = (v * beta[..., None]).reshape(chunks, rows * heads, chunk, value)
    writes, scores, inverse, total = (x.unflatten(0, (chunks, -1)) for x in (writes, scores, inverse, total))
    outs = []
    for i in range(chunks):
        read = torch.bmm(reads[i], state.mT)
        new = torch.bmm(inverse[i], news[i] + read[:, chunk:])
        outs.append(torch.baddbmm(read[:, :chunk], scores[i], new, beta=scale, alpha=scale))
        state = torch.baddbmm(state * total[i, :, None], new.mT, writes[i])
    o = torch.stack(outs).view(chunks, rows, heads, chunk, value)
    return o.permute(1, 0, 3, 2, 4).reshape(rows, chunks * chunk, heads, value), state


def _within(reads: Tensor, writes: Tensor, keep: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What a chunk knows of itself. In the fact sheet's letters (section 3.3), with q and k in place of a row index:

    Args:
        reads: `[X, C, 2, K]`: q, and -beta k. writes: `[X, C, K]`: k. keep: `[X, C, K]`, exp of the decay.

    Returns:
        reads times exp(G); writes times exp(G_C - G); P `[X, C, C]`; T = (I + A)^-1 `[X, C, C]`; exp(G_C) `[X, K]`.
    """
    (size, chunk, _, key), record = reads.shape, recorded(reads, writes, keep)
    scores = reads.new_zeros(size, chunk, chunk)
    scores.diagonal(dim1=1, dim2=2).copy_((reads[:, :, 0] * writes).sum(-1))
    reads = reads * keep[:, :, None]
    writes = writes.clone(memory_format=torch.contiguous_format)
    inverse, total = reads.new_ones(size * chunk, 1, 1), keep.reshape(-1, key)
    half = 1
    while half < chunk:  # join pairs of blocks of `half` tokens
        pairs = size * chunk // (2 * half)
        reads, writes = reads.view(pairs, 2, half * 2, key), writes.view(pairs, 2, half, key)
        late, early = reads[:, 1], writes[:, 0]
        if half == 1:
            cross = (late * early).sum(-1).view(pairs, 1, 2, 1)
        else:
            cross = torch.bmm(late, early.mT).view(pairs, half, 2, half)
        blocks = scores.view(size, -1, 2 * half, chunk // (2 * half), 2 * half).diagonal(dim1=1, dim2=3)
        blocks[:, half:, :half].copy_(cross[:, :, 0].view(size, -1, half, half).permute(0, 2, 3, 1))
        inverse = _join(inverse.view(pairs, 2, half, half), cross[:, :, 1])
        before, after = total.view(pairs, 2, 1, key).unbind(1)
        if record:
            reads = torch.stack([reads[:, 0], late * before], 1)
            writes = torch.stack([early * after, writes[:, 1]], 1)
        else:
            late.mul_(before)
            early.mul_(after)
        total = (before * after)[:, 0]
        half *= 2
    return reads.view(size, chunk, 2, key), writes.view(size, chunk, key), scores, inverse, total


def _join(inverse: Tensor, cross: Tensor) -> Tensor:
    """Inverse of a unit lower triangle, from those of its two halves `[N, 2, S, S]` and minus what links them."""
    pairs, _, half, _ = inverse.shape
    top, bottom = inverse.unbind(1)
    joined = inverse.new_zeros(pairs, 2 * half, 2 * half)
    joined[:, :half, :half] = top
    joined[:, half:, half:] = bottom
    joined[:, half:, :half] = cross if half == 1 else torch.bmm(torch.bmm(bottom, cross), top)
    return joined


@kda_chunk.fake
def _(q, k, v, decay, beta, memory, slots, lengths, counts, scale):
    return empty_like(v), empty_like(memory)


@kda_chunk.lowering
def _(ge, *args):
    return ge.serve("KDA in chunks", OFFERS, *args)


def _own(ge, q, k, v, decay, beta, memory, slots, lengths, counts, scale):
    inputs = {"q": q, "k": k, "v": v, "decay": decay, "beta": beta, "memory": memory, "slots": slots}
    inputs |= {"lengths": lengths, "counts": counts}
    return ge.own("KdaChunk", inputs, ["o", "memory"], {"scale": scale})


OFFERS = (
    cannot("builtin", "ChunkGatedDeltaRule", "has one decay for a whole head, KDA one for each channel"),
    cannot("vllm-ascend", "ChunkKdaFwd", "its tiling reads the scale as a double, which no attribute of a graph is"),
    Offer("own", "KdaChunk", _own, "in place over slots, padded rows included", own_widths),
    Offer(
        "composed",
        "Cumsum, Exp, Mul, ReduceSum, BatchMatMul, ScatterNdUpdate",
        composed,
        "float32, chunks of 16 tokens one after another",
    ),
)
