"""Operators of this project: semantics written from their documents, apart from the references in `kimi_graph.ops`.

Letters: B rows, T tokens, H heads, K and V widths, S slots, W convolution width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kimi_graph.compile.executor.node import Op
from kimi_graph.compile.executor.registry import ge_op
from kimi_graph.ops import at_least_f32


@ge_op(
    "GatedRmsNorm", provenance="own reading", source="our operator: RmsNorm(x) * weight * sigmoid(gate), rounded once"
)
def gated_rms_norm(op: Op, x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    op.require(x.shape == gate.shape and weight.shape == x.shape[-1:], f"x {list(x.shape)}, gate {list(gate.shape)}")
    x32, gate32 = at_least_f32(x), at_least_f32(gate)
    mean = (x32 * x32).sum(-1, keepdim=True) / x.shape[-1]
    normed = x32 / torch.sqrt(mean + op.need("eps", float)) * at_least_f32(weight)
    return (normed / (1 + torch.exp(-gate32))).to(x.dtype)


@ge_op(
    "ResidualNormGate",
    provenance="own reading",
    source="our operator: sum = x + residual, rounded; y = RmsNorm(sum) * weight * sigmoid(gate), of what is given; "
    "float32 throughout",
    outputs="y sum",
)
def residual_norm_gate(
    op: Op, x: Tensor, residual: Tensor | None, weight: Tensor | None, gate: Tensor | None
) -> tuple[Tensor, Tensor]:
    eps, made, total = op.attr("eps", 0.0), at_least_f32(x), x.new_empty(0)
    for name, given, shape in (
        ("residual", residual, x.shape),
        ("weight", weight, x.shape[-1:]),
        ("gate", gate, x.shape),
    ):
        op.require(given is None or given.shape == shape, f"{name} {list(shape)} expected")
    if residual is not None:
        op.same_dtype(x, residual)
        total = (made + at_least_f32(residual)).to(x.dtype)
        made = at_least_f32(total)
    if weight is not None:
        made = _normed(made, weight, eps)
    if gate is not None:
        made = made / (1 + torch.exp(-at_least_f32(gate)))
    return made.to(x.dtype), total


@ge_op(
    "SituMul",
    provenance="own reading",
    source="our operator: beta tanh(gate / beta) sigmoid(gate) * lb tanh(up / lb), float32 inside, rounded once",
)
def situ_mul(op: Op, gate: Tensor, up: Tensor) -> Tensor:
    op.same_dtype(gate, up)
    op.require(gate.shape == up.shape, f"gate {list(gate.shape)}, up {list(up.shape)}")
    beta, linear = op.need("beta", float), op.need("linear_beta", float)
    g, u = at_least_f32(gate), at_least_f32(up)
    left = beta * torch.tanh(g / beta) / (1 + torch.exp(-g))
    return (left * (linear * torch.tanh(u / linear))).to(gate.dtype)


@ge_op(
    "SituMulQuant",
    provenance="own reading",
    source="our operator: SituMul in float32, the largest of a row / 127 is its scale, numbers over it rounded to the "
    "nearest even (as DynamicQuant); rows of zeros have the scale 0",
    outputs="y scale",
)
def situ_mul_quant(op: Op, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    made = situ_mul(op, at_least_f32(gate), at_least_f32(up))
    if op.exact:
        return made, made.new_ones(made.shape[:-1])
    if made.is_meta:
        return made.new_empty(made.shape, dtype=torch.int8), made.new_empty(made.shape[:-1])
    scale = made.abs().amax(-1) / 127
    over = torch.where(scale == 0, 1.0, scale)[..., None]
    return (made / over).round().to(torch.int8), scale


@ge_op(
    "ShortConv",
    provenance="own reading",
    source="our operator: silu of a causal depthwise convolution, oldest tap first, the last W - 1 real inputs kept; "
    "the window counts as zeros where the sequence starts in this step",
    outputs="y window",
    in_place="window",
)
def short_conv(
    op: Op, x: Tensor, weight: Tensor, window: Tensor, slots: Tensor, lengths: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor]:
    batch, _, heads, width = x.shape
    taps = weight.shape[-1]
    op.same_dtype(x, window)
    op.require(
        weight.shape == (heads, width, taps), f"weight [{heads}, {width}, W] expected, found {list(weight.shape)}"
    )
    op.require(window.shape[1:] == (heads, width, taps - 1), f"window [S, {heads}, {width}, {taps - 1}] expected")
    _check_rows(op, batch, slots, lengths, counts)
    if x.is_meta:
        return torch.empty_like(x), window
    y = torch.zeros_like(x)
    kept = []
    for row in range(batch):
        goes_on = int(lengths[row]) > int(counts[row])
        past = window[int(slots[row])] if goes_on else torch.zeros_like(window[0])
        seen = torch.cat([past, x[row].permute(1, 2, 0)], -1)
        made = (at_least_f32(seen).unfold(-1, taps, 1) * at_least_f32(weight)[:, :, None]).sum(-1)
        y[row] = F.silu(made).to(x.dtype).permute(2, 0, 1)
        count = int(counts[row])
        kept.append(seen[..., count : count + taps - 1])
    for row in range(batch):
        window[int(slots[row])] = kept[row]
    return y, window


@ge_op(
    "KdaStep",
    provenance="own reading",
    source="our operator: one step of the recurrence of RecurrentGatedDeltaRule with gk, for every row; q and k over "
    "sqrt(sum of squares + norm_eps), decay lower_bound sigmoid(rate (raw + bias)) or -rate softplus(raw + bias), and "
    "beta's sigmoid, each where asked for; float32 throughout",
    outputs="o memory",
    in_place="memory",
    prototype="q k v decay beta memory slots bias? log_rate?",
)
def kda_step(
    op: Op,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    memory: Tensor,
    slots: Tensor,
    bias: Tensor | None,
    log_rate: Tensor | None,
) -> tuple[Tensor, Tensor]:
    rows, tokens, heads, keys = k.shape
    width, scale = v.shape[-1], op.need("scale", float)
    eps, logits, bound = op.attr("norm_eps", -1.0), op.attr("beta_logits", False), op.attr("lower_bound", 0.0)
    op.same_dtype(q, k, v)
    op.same_dtype(decay, beta)
    op.of_dtype(torch.float32, bias=bias, log_rate=log_rate)
    op.require((bias is None) == (log_rate is None), "bias and log_rate, or neither, expected")
    op.require(bias is not None or bound == 0.0, f"lower_bound {bound} without bias and log_rate")
    op.require(bias is None or bias.shape == (heads, keys), f"bias [{heads}, {keys}] expected")
    op.require(log_rate is None or log_rate.shape == (heads,), f"log_rate [{heads}] expected")
    op.of_dtype(torch.float32, memory=memory)
    op.of_dtype(torch.int32, slots=slots)
    op.require(tokens == 1 and q.shape == k.shape == decay.shape, f"q {list(q.shape)}, k {list(k.shape)}")
    op.require(v.shape[:3] == beta.shape == k.shape[:3], f"beta {list(beta.shape)}, v {list(v.shape)}")
    op.require(memory.shape[1:] == (heads, width, keys), f"memory [S, {heads}, {width}, {keys}] expected")
    op.require(slots.shape == (rows,), f"{rows} slots expected")
    if v.is_meta:
        return torch.empty_like(v), memory
    o = torch.empty_like(v)
    for row, slot in enumerate(slots.tolist()):
        qt, kt, vt, kept, share = (at_least_f32(x[row, 0]) for x in (q, k, v, decay, beta))
        if eps >= 0:
            qt, kt = (x / torch.sqrt((x * x).sum(-1, keepdim=True) + eps) for x in (qt, kt))
        if bias is not None and log_rate is not None:
            kept = _decay(kept + bias, log_rate.exp()[:, None], bound)
        share = torch.sigmoid(share) if logits else share
        state = memory[slot] * kept.exp()[:, None]
        news = share[:, None] * (vt - (state * kt[:, None]).sum(-1))
        state = state + news[..., None] * kt[:, None]
        o[row, 0] = (state * (qt * scale)[:, None]).sum(-1).to(o.dtype)
        memory[slot] = state.to(memory.dtype)
    return o, memory


@ge_op(
    "KdaChunk",
    provenance="own reading",
    source="our operator: the recurrence of RecurrentGatedDeltaRule with gk over the real tokens of each row, from "
    "zeros where the sequence starts in this step; natural-log decay; float32 throughout",
    outputs="o memory",
    in_place="memory",
)
def kda_chunk(
    op: Op,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    memory: Tensor,
    slots: Tensor,
    lengths: Tensor,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    batch, _, heads, keys = k.shape
    width, scale = v.shape[-1], op.need("scale", float)
    op.same_dtype(q, k, v)
    op.of_dtype(torch.float32, decay=decay, beta=beta, memory=memory)
    op.require(q.shape == k.shape == decay.shape, f"q {list(q.shape)}, k {list(k.shape)}, decay {list(decay.shape)}")
    op.require(
        v.shape[:3] == beta.shape == k.shape[:3], f"v {list(v.shape)}, beta {list(beta.shape)}, k {list(k.shape)}"
    )
    op.require(memory.shape[1:] == (heads, width, keys), f"memory [S, {heads}, {width}, {keys}] expected")
    _check_rows(op, batch, slots, lengths, counts)
    if v.is_meta:
        return torch.empty_like(v), memory
    o = torch.zeros_like(v)
    ends = []
    for row in range(batch):
        goes_on = int(lengths[row]) > int(counts[row])
        state = memory[int(slots[row])] if goes_on else torch.zeros_like(memory[0])
        for t in range(int(counts[row])):
            kt, vt, qt = (at_least_f32(a[row, t]) for a in (k, v, q))
            state = state * decay[row, t].exp()[:, None]
            news = beta[row, t, :, None] * (vt - (state * kt[:, None]).sum(-1))
            state = state + news[..., None] * kt[:, None]
            o[row, t] = (state * (qt * scale)[:, None]).sum(-1).to(o.dtype)
        ends.append(state)
    for row in range(batch):
        memory[int(slots[row])] = ends[row].to(memory.dtype)
    return o, memory


@ge_op(
    "SparseAttend",
    provenance="own reading",
    source="our operator: softmax(scale * (q latent + q_rope rope)) latent over the selected positions of a row that "
    "are neither negative nor after the query, at lengths - counts + i; zeros and -1e30 where there is none and past "
    "counts; the weights are rounded to the query's dtype before they meet the latents, their sum is not",
    outputs="o lse",
)
def sparse_attend(
    op: Op,
    q: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    rope: Tensor,
    selected: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    scale = op.need("scale", float)
    rows, tokens, _, width = q.shape
    op.same_dtype(q, q_rope, latent, rope)
    op.of_dtype(torch.int32, selected=selected, block_table=block_table)
    op.require(latent.shape[2:] == (1, width), f"latent [P, page, 1, {width}] expected, found {list(latent.shape)}")
    op.require(q_rope.shape[:3] == q.shape[:3], f"q {list(q.shape)}, q_rope {list(q_rope.shape)}")
    op.require(rope.shape == (*latent.shape[:3], q_rope.shape[3]), f"rope {list(rope.shape)}")
    op.require(selected.shape[:2] == q.shape[:2], f"selected [{rows}, {tokens}, J] expected")
    op.require(block_table.shape[0] == rows, f"block_table of {rows} rows expected")
    wide = at_least_f32(q).dtype
    none = torch.full(q.shape[:3], -1e30, dtype=torch.float32, device=q.device)  # as float32 has it
    o, lse = torch.zeros_like(q), none.to(wide)
    if q.is_meta:
        return o, lse
    page = latent.shape[1]
    latents, ropes = latent.flatten(0, 2), rope.flatten(0, 2)
    for row in range(rows):
        for t in range(int(counts[row])):
            own = int(lengths[row] - counts[row]) + t
            at = selected[row, t].long()
            at = at[(at >= 0) & (at <= own)]
            if not len(at):
                continue
            pages = block_table[row].long()[at // page]
            op.require(int(pages.min()) >= 0 and int(pages.max()) < len(latent), f"block_table names {pages.tolist()}")
            k, k_rope = (at_least_f32(pool[pages * page + at % page]) for pool in (latents, ropes))
            scores = (at_least_f32(q[row, t]) @ k.mT + at_least_f32(q_rope[row, t]) @ k_rope.mT) * scale
            top = scores.amax(-1, keepdim=True)
            weights = torch.exp(scores - top)
            total = weights.sum(-1, keepdim=True)
            o[row, t] = (at_least_f32(weights.to(q.dtype)) @ k / total).to(q.dtype)
            lse[row, t] = (top + torch.log(total))[:, 0].to(wide)
    return o, lse


@ge_op(
    "AttnResMix",
    provenance="own reading",
    source="our operator: softmax over the sources of RmsNorm(source) * norm . query, times the sources as they are; "
    "the last one is its sum with the addend, rounded, which is total too; RmsNorm of the mix by gain, where there is "
    "one; float32 throughout",
    outputs="y total",
)
def attn_res_mix(
    op: Op, sources: list[Tensor], norm: Tensor, query: Tensor, addend: Tensor | None, gain: Tensor | None
) -> tuple[Tensor, Tensor]:
    op.same_dtype(*sources)
    shapes = {tuple(s.shape) for s in sources}
    op.require(len(shapes) == 1, f"sources of one shape expected, found {sorted(shapes)}")
    like, width, eps = sources[0], sources[0].shape[-1:], op.need("eps", float)
    op.require(norm.shape == query.shape == width, f"norm and query {list(width)} expected")
    total = like.new_empty(0)
    if addend is not None:
        op.require(addend.shape == like.shape, f"addend {list(like.shape)} expected, found {list(addend.shape)}")
        total = (at_least_f32(sources[-1]) + at_least_f32(addend)).to(like.dtype)
        sources = [*sources[:-1], total]
    values = [at_least_f32(s) for s in sources]
    scores = [(_normed(v, norm, eps) * at_least_f32(query)).sum(-1, keepdim=True) for v in values]
    top = torch.stack(scores).amax(0)
    shares = [torch.exp(s - top) for s in scores]
    mix = torch.stack([s * v for s, v in zip(shares, values, strict=True)]).sum(0) / torch.stack(shares).sum(0)
    norm_eps = op.attr("norm_eps", 0.0)
    if gain is not None:
        op.require(gain.shape == width, f"gain {list(width)} expected, found {list(gain.shape)}")
        mix = _normed(mix, gain, norm_eps)
    return mix.to(like.dtype), total


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * at_least_f32(weight)


def _decay(z: Tensor, rate: Tensor, bound: float) -> Tensor:
    """Natural logarithm of a decay; a bound of 0 is none."""
    return bound * torch.sigmoid(rate * z) if bound else -rate * F.softplus(z)


def _check_rows(op: Op, batch: int, slots: Tensor, lengths: Tensor, counts: Tensor) -> None:
    op.of_dtype(torch.int32, slots=slots)
    op.of_dtype(torch.int64, lengths=lengths, counts=counts)
    op.require(
        slots.shape == lengths.shape == counts.shape == (batch,), f"slots, lengths and counts of {batch} rows expected"
    )
