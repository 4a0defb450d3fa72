"""KDA on several devices that share out the new tokens: what goes on from one stretch of a sequence to the next.

Each device has a stretch of N tokens of every row. Before its first token the short convolutions need the last few
inputs of the stretch before, and the scan needs the memory that all stretches before it leave. One graph serves all
devices, so none can wait for another's result: scans in turn would be W scans on each.

But a token takes a memory S `[V, K]` to S diag(exp(decay)) (I - beta k k^T) + beta v k^T, so a stretch takes it to
S A + B, and a query q of its t-th token reads S A_t q + B_t q. A scan from the identity and without values gives A and
all A_t q, one from zeros with the values B and all B_t q. Both are one, with K more value channels. Devices gather each
other's A and B and compose them: W - 1 small products give the memory before every stretch. No factor of A is larger
than 1, so nothing grows.

Axes: B sequences, N tokens of a stretch, H heads, K key (L too), V value, J = K + V, C key or value, X = H * C of all
inputs, U conv width - 1, S slots, W devices.
Source: for the memory's recurrence Kimi Linear (arXiv:2510.26692), section 3.
"""

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kimi_graph import ops
from kimi_graph.ops import at_least_f32, contract
from kimi_graph.parallel import shard_map
from kimi_graph.parallel.annotate import all_gather, own_index, own_slice

Rows = tuple[Tensor, Tensor, Tensor]  # slots, lengths, counts: `[B]` each, see `Batch`

TOKENS, WEIGHT, STATE = ("batch", "queries", "heads", None), ("heads", None, None), ("slots", "heads", None, None)
ROWS = (("batch",),) * 3


def short_convs(
    inputs: Sequence[Tensor], weights: Sequence[Tensor], windows: Sequence[Tensor], rows: Rows
) -> list[tuple[Tensor, Tensor]]:
    """`ops.short_conv` of several inputs, on stretches of tokens.

    Args:
        inputs: `[B, T, H, C]` each.
        weights: `[H, C, U + 1]`.
        windows: `[S, H, C, U]`.

    Returns:
        of each input the result and the next windows.
    """
    many = len(inputs)
    given = (*[TOKENS] * many, *[WEIGHT] * many, *[STATE] * many, *ROWS)
    made = shard_map(_convolve, given, (*[TOKENS] * many, *[STATE] * many))(*inputs, *weights, *windows, *rows)
    return list(zip(made[:many], made[many:], strict=True))


def kda_chunk(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, memory: Tensor, rows: Rows, scale: float
) -> tuple[Tensor, Tensor]:
    """`ops.kda_chunk` on stretches of tokens: `[B, T, H, V]`, and the next memory `[S, H, V, K]`."""
    given = (TOKENS, TOKENS, TOKENS, TOKENS, TOKENS[:3], STATE, *ROWS)
    run = shard_map(functools.partial(_scan, scale=scale), given, (TOKENS, STATE))
    return run(q, k, v, decay, beta, memory, *rows)


# ---- bodies of a shard_map -------------------------------------------------------------------------------------------


def _convolve(*given: Tensor) -> tuple[Tensor, ...]:
    """Of inputs, weights and windows, as many of each, and rows: the results, then the next windows."""
    *values, slots, lengths, counts = given
    many = len(values) // 3
    inputs, weights, windows = values[:many], values[many : 2 * many], values[2 * many :]
    tokens, sizes = inputs[0].shape[1], [x[0, 0].numel() for x in inputs]
    first, own = _own_tokens(inputs[0], counts)
    old_BXU = torch.cat([window.index_select(0, slots).flatten(1, 2) for window in windows], 1)
    old_UBX = torch.where(_starts(lengths, counts, old_BXU), 0.0, old_BXU).permute(2, 0, 1)
    last_UBX = torch.cat([_last_inputs(x, own, len(old_UBX)) for x in inputs], 2)
    known = torch.cat([old_UBX.to(last_UBX.dtype)[None], all_gather(last_UBX[None], "queries", 0)])
    starts = _window(known, torch.minimum(first, counts), counts, tokens).split(sizes, 2)
    ends = _window(known, counts, counts, tokens).split(sizes, 2)
    here, outs, after = _here(own), [], []
    for x, weight, window, start, end in zip(inputs, weights, windows, starts, ends, strict=True):
        start, end = (y.unflatten(2, window.shape[1:3]).permute(1, 2, 3, 0) for y in (start, end))
        outs.append(ops.short_conv(x, weight, start, *here)[0])
        after.append(ops.state_write(end, window, slots))
    return (*outs, *after)


def _scan(
    q_BNHK: Tensor,
    k_BNHK: Tensor,
    v_BNHV: Tensor,
    decay_BNHK: Tensor,
    beta_BNH: Tensor,
    memory: Tensor,
    slots: Tensor,
    lengths: Tensor,
    counts: Tensor,
    *,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """What the tokens of this stretch read, and the memory after the last one."""
    key, value = q_BNHK.shape[3], v_BNHV.shape[3]
    first, own = _own_tokens(q_BNHK, counts)
    old_BHVK = memory.index_select(0, slots)
    old_BHVK = torch.where(_starts(lengths, counts, old_BHVK), 0.0, old_BHVK)
    # The first device knows its memory, and starts from that; the others from the identity, and zeros below it.
    identity_JK = torch.eye(key + value, key, dtype=memory.dtype, device=memory.device)
    start_BHJK = torch.where(first == 0, F.pad(old_BHVK, (0, 0, key, 0)), identity_JK)
    v_BNHJ = F.pad(v_BNHV, (key, 0))
    o_BNHJ, end_BHJK = ops.kda_chunk(q_BNHK, k_BNHK, v_BNHJ, decay_BNHK, beta_BNH, start_BHJK, *_here(own), scale)

    maps = (x.unbind(0) for x in all_gather(end_BHJK[None], "queries", 0).split((key, value), 3))
    before = [old_BHVK]  # of every stretch; the first one reads nothing of it, and its A is zero
    for i, (a_BHKL, b_BHVK) in enumerate(zip(*maps, strict=True)):
        before.append(contract("bhvk,bhkl->bhvl", before[-1], a_BHKL) + b_BHVK if i else b_BHVK)
    *before, after_BHVK = before
    own_BHVK = own_slice(torch.stack(before), "queries", 0).flatten(0, 1)
    image_BNHK, o_BNHV = o_BNHJ.split((key, value), 3)
    o_BNHV = at_least_f32(o_BNHV) + contract("bnhk,bhvk->bnhv", at_least_f32(image_BNHK), own_BHVK)
    return o_BNHV.to(v_BNHV.dtype), ops.state_write(after_BHVK, memory, slots)


def _own_tokens(x: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """New tokens of a row before this device's stretch `[1]`, and how many real ones are in it `[B]`."""
    first = own_index(x, "queries", x.shape[1])
    return first, (counts - first).clamp(0, x.shape[1])


def _here(own: Tensor) -> Rows:
    """Rows that all go on, each in the slot of its number: of a state that is this step's alone."""
    return torch.arange(len(own), dtype=torch.int32, device=own.device), own + 1, own


def _last_inputs(x_BNHC: Tensor, own: Tensor, width: int) -> Tensor:
    """The last U real inputs of a stretch, `[U, B, H * C]`; where it has fewer, the first of these mean nothing."""
    rows, tokens = x_BNHC.shape[:2]
    at_UB = _before(own, width).clamp(min=0) + torch.arange(0, rows * tokens, tokens, device=own.device)
    return F.embedding(at_UB, x_BNHC.flatten(2).flatten(0, 1))


def _window(known: Tensor, end: Tensor, counts: Tensor, tokens: int) -> Tensor:
    """The U inputs before some new token of each row, `[U, B, X]`.

    Args:
        known: `[1 + W, U, B, X]`, the window before the step, and the last inputs of each stretch.
        end: `[B]`, the token, 0 up to `counts`. tokens: of a stretch.
    """
    width, rows = known.shape[1:3]
    at_UB = _before(end, width)
    source_UB = (at_UB + tokens).clamp(min=0) // tokens  # 1 is the first stretch; the window is as one before it
    place_UB = (source_UB + 1) * width + at_UB - torch.minimum(counts, source_UB * tokens)  # back from the last input
    return F.embedding(place_UB * rows + torch.arange(rows, device=end.device), known.flatten(0, 2))


def _before(end: Tensor, width: int) -> Tensor:
    """The U places before each: `[B]` -> `[U, B]`."""
    return (end[:, None] + torch.arange(-width, 0, device=end.device)).mT


def _starts(lengths: Tensor, counts: Tensor, like: Tensor) -> Tensor:
    """Rows whose sequence starts in this step, `[B, 1, ..]` with as many dimensions as `like`."""
    return (lengths <= counts).view(-1, *[1] * (like.ndim - 1))
