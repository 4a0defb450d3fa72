"""KDA over many tokens out of CANN's basic operators: where nobody's kernel is to be had.

Letters: B rows, T tokens, H heads, K key, V value; C tokens of a chunk, N chunks of a row, X = B H N.

With G the running sum of a chunk's decays and M the memory before it:

    A[i, j] = beta_i sum_k k_i k_j exp(G_i - G_j)  for j < i
    P[i, j] = sum_k q_i k_j exp(G_i - G_j)  for j <= i
    (I + A) U = beta (v - (k exp G) M')
    o = scale ((q exp G) M' + P U)
    M <- M exp G_C + U' (k exp(G_C - G))

Source: Kimi Linear (arXiv:2510.26692), chunkwise form; fact sheet of models, section 3.3.

All exponents are <= 0: pairs are taken one by one, which is why a chunk is short. What does not need M is computed for
all chunks at once; the rest is a chain of N steps. All of it is float32.
"""

import torch

CHUNK = 16  # tokens; pairs cost memory, [X, C, C, K], and steps cost nodes, eight for every chunk
F32 = torch.float32


def composed(ge, q, k, v, decay, beta, memory, slots, lengths, counts, scale):
    """A lowering of `kda_chunk`. Padding tokens neither decay nor write."""
    rows, tokens, heads, key = ge.shape(q)
    value, size = ge.shape(v)[-1], min(CHUNK, tokens)
    parts = -(-tokens // size)
    real = ge.mark(ge.Less(ge.const([list(range(tokens))], torch.int64), ge.reshape(counts, [rows, 1])),
                   (rows, tokens), torch.bool)  # fmt: skip
    decay = ge.SelectV2(ge.reshape(real, [rows, tokens, 1, 1]), decay, ge.const(0.0, F32))
    beta = ge.SelectV2(ge.reshape(real, [rows, tokens, 1]), beta, ge.const(0.0, F32))
    beta = ge.reshape(ge.mark(beta, (rows, tokens, heads), F32), [rows, tokens, heads, 1])
    decay = ge.mark(decay, (rows, tokens, heads, key), F32)

    def chunks(x):
        """`[B, T, H, D]` as `[X, C, D]`."""
        width = ge.shape(x)[-1]
        x = ge.pad(ge.cast(x, F32), 1, parts * size)
        x = ge.reshape(x, [rows, parts, size, heads, width])
        x = ge.Transpose(x, ge.const([0, 3, 1, 2, 4], torch.int64))
        x = ge.mark(x, (rows, heads, parts, size, width), F32)
        return ge.reshape(x, [rows * heads * parts, size, width])

    q, k, v, decay, beta = map(chunks, (q, k, v, decay, beta))
    steps = _all_chunks(ge, ge.Mul(q, ge.const(scale, F32)), k, v, decay, beta)
    old = ge.GatherV2(memory, slots, ge.const([0], torch.int64), negative_index_support=False)
    goes_on = ge.reshape(ge.mark(ge.Greater(lengths, counts), (rows,), torch.bool), [rows, 1, 1, 1])
    old = ge.SelectV2(goes_on, old, ge.const(0.0, F32))  # whatever the slot holds, no number included
    old = ge.reshape(ge.mark(old, (rows, heads, value, key), F32), [rows * heads, value, key])
    outs, new = _chain(ge, steps, old, rows * heads, parts)
    o = ge.reshape(ge.concat(outs, 1), [rows, heads, parts * size, value])
    o = ge.Transpose(o, ge.const([0, 2, 1, 3], torch.int64))
    o = ge.first(ge.mark(o, (rows, parts * size, heads, value), F32), 1, tokens)
    new = ge.reshape(ge.mark(new, (rows * heads, value, key), F32), [rows, heads, value, key])
    return ge.cast(o, ge.result[0].dtype), ge.ScatterNdUpdate(memory, ge.reshape(slots, [rows, 1]), new)


def _all_chunks(ge, q, k, v, decay, beta):
    """What does not need the memory: T beta v, T beta k exp G, q exp G, P, k exp(G_C - G), exp G_C; T = (I + A)^-1."""
    count, size, key = ge.shape(k)
    total = ge.mark(ge.Cumsum(decay, ge.const(1, torch.int64)), (count, size, key), F32)
    late, early = ge.reshape(total, [count, size, 1, key]), ge.reshape(total, [count, 1, size, key])
    between = ge.Exp(ge.Minimum(ge.Sub(late, early), ge.const(0.0, F32)))  # later tokens are masked below
    weighed = ge.Mul(between, ge.reshape(k, [count, 1, size, key]))

    def pairs(x, mask):
        x = ge.reshape(ge.mark(x, (count, size, key), F32), [count, size, 1, key])
        summed = ge.ReduceSum(ge.Mul(weighed, x), ge.const([3], torch.int64), keep_dims=False)
        return ge.Mul(summed, ge.const(mask.tolist(), F32))

    ones = torch.ones(size, size)
    scores = pairs(q, ones.tril())
    linked = ge.Mul(pairs(k, ones.tril(-1)), beta)
    inverse = _inverse(ge, linked, size)
    grown = ge.Exp(total)
    last = ge.cut(total, 1, size - 1, 1)
    return {
        "news": (ge.BatchMatMul(inverse, ge.Mul(beta, v)), size, ge.shape(v)[-1]),
        "reads": (ge.BatchMatMul(inverse, ge.Mul(beta, ge.Mul(k, grown))), size, key),
        "queries": (ge.Mul(q, grown), size, key),
        "scores": (scores, size, size),
        "writes": (ge.Mul(k, ge.Exp(ge.Sub(last, total))), size, key),
        "keep": (ge.Exp(last), 1, key),
    }


def _inverse(ge, linked, size):
    """`(I + A)^-1` of a strict lower triangle A: (I - A) (I + A^2) (I + A^4) ..., until a power of A is zero."""
    unit = ge.const(torch.eye(size).tolist(), F32)
    inverse, power, done = ge.Sub(unit, linked), linked, 2
    while done < size:
        power = ge.BatchMatMul(power, power)
        inverse = ge.BatchMatMul(inverse, ge.Add(unit, power))
        done *= 2
    return inverse


def _chain(ge, steps, memory, lanes, parts):
    """The chunks of every row and head one after another: `[B H, C, V]` of each, and the memory after the last."""
    cut = {}
    for name, (x, size, width) in steps.items():
        x = ge.reshape(ge.mark(x, (lanes * parts, size, width), F32), [lanes, parts * size, width])
        pieces = [x] if parts == 1 else ge.SplitV(
            x, ge.const([size] * parts, torch.int64), ge.const(1, torch.int64), num_split=parts
        )  # fmt: skip
        cut[name] = pieces
    width, outs = steps["news"][2], []
    for i in range(parts):
        c = {name: pieces[i] for name, pieces in cut.items()}
        news = ge.Sub(c["news"], ge.BatchMatMul(c["reads"], memory, adj_x2=True))
        o = ge.Add(ge.BatchMatMul(c["queries"], memory, adj_x2=True), ge.BatchMatMul(c["scores"], news))
        outs.append(ge.mark(o, (lanes, steps["news"][1], width), F32))
        memory = ge.Add(ge.Mul(memory, c["keep"]), ge.BatchMatMul(news, c["writes"], adj_x1=True))
    return outs, memory
