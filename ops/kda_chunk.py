"""KDA over many tokens, chunk by chunk (WY form): matrix products inside a chunk, a short scan between chunks."""

import torch
from torch import Tensor

from .base import at_least_f32, operator
from .short_conv import put_rows


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
        q, k: `[B, T, H, K]`, unit length along K. v: `[B, T, H, V]`.
        decay: `[B, T, H, K]` natural log <= 0, any size. beta: `[B, T, H]` in (0, 1).
        memory: `[S, H, V, K]` float32; read as zeros where the row's sequence starts here (`lengths == counts`).
        slots, lengths, counts: `[B]`, see `Batch`; tokens past `counts` are padding and leave the memory unchanged.
        scale: multiplies q.

    Returns:
        `[B, T, H, V]` in v's dtype, and the memory with the rows' slots updated.

    Source: Kimi Linear (arXiv:2510.26692), chunkwise form; fact sheet of models 3.3.
    """
    started = (lengths > counts)[:, None, None, None]
    state = torch.where(started, memory[slots.long()], 0)
    outs = []
    real = torch.arange(q.shape[1], device=q.device) < counts[:, None]
    for t in range(q.shape[1]):
        on = real[:, t, None, None]
        q32, k32, v32 = (at_least_f32(x[:, t]) for x in (q, k, v))
        state = state * torch.where(on, decay[:, t], 0).exp()[..., None, :]
        news = torch.where(on[..., 0], beta[:, t], 0)[..., None] * (v32 - torch.einsum("bhk,bhvk->bhv", k32, state))
        state = state + torch.einsum("bhv,bhk->bhvk", news, k32)
        outs.append(torch.einsum("bhk,bhvk->bhv", q32 * scale, state))
    return torch.stack(outs, 1).to(v.dtype), put_rows(memory, slots, state)


@kda_chunk.fake
def _(q, k, v, decay, beta, memory, slots, lengths, counts, scale):
    return torch.empty_like(v), torch.empty_like(memory)


@kda_chunk.lowering
def _(ge, q, k, v, decay, beta, memory, slots, lengths, counts, scale):
    inputs = {"q": q, "k": k, "v": v, "decay": decay, "beta": beta, "memory": memory, "slots": slots}
    inputs |= {"lengths": lengths, "counts": counts}
    return ge.own("KdaChunk", inputs, ["o", "memory"], {"scale": scale})
