"""KDA in chunks is the recurrence token by token, for every length and gate, and looks neither ahead nor aside."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from kimi_graph import ops

GATES = ["mild", "strong", "mixed", "bounded"]
ROUNDING = 1e-12  # float64: sums of a chunk in another order


def gate(kind, *shape, dtype=torch.float64):
    """Natural-log decays: around -0.1; -40 a step in every channel; some tokens -40, most none; saturated at -5."""
    if kind == "mild":
        return -0.2 * torch.rand(shape, dtype=dtype)
    if kind == "strong":
        return torch.full(shape, -40.0, dtype=dtype)
    if kind == "mixed":
        return torch.where(torch.rand(shape) < 0.1, -40.0, -0.01).to(dtype)
    raw = torch.full(shape, 30.0, dtype=dtype)
    return ops.kda_gate(raw, raw.new_zeros(shape[-2:]), raw.new_zeros(shape[-2]), -5.0)


def inputs(rows, tokens, heads=2, key=8, value=6, kind="mild", dtype=torch.float64):
    """q, k, v, decay, beta and a memory whose slots are all in use; slot 0 is nobody's."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    lead = (rows, tokens, heads)
    q, k = (F.normalize(torch.randn(*lead, key, dtype=torch.float64), dim=-1).to(dtype) for _ in range(2))
    v, beta = torch.randn(*lead, value, dtype=torch.float64).to(dtype), torch.rand(lead, dtype=wide)
    memory = torch.randn(rows + 1, heads, value, key, dtype=wide)
    return q, k, v, gate(kind, *lead, key, dtype=wide), beta, memory


def where(lengths, counts):
    """Slots (in reverse, to be told from rows), lengths, counts."""
    rows = len(counts)
    return torch.arange(rows, 0, -1, dtype=torch.int32), torch.tensor(lengths), torch.tensor(counts)


def recurrence(q, k, v, decay, beta, state, scale):
    """The definition for one row `[T, H, ...]` and its state `[H, V, K]`, in float64 (fact sheet of models, 3.2)."""
    q, k, v, decay, beta, state = (x.double() for x in (q, k, v, decay, beta, state))
    scale = float(torch.tensor(scale))  # operators round their float attributes to float32
    outs = []
    for t in range(len(q)):
        state = state * decay[t].exp()[:, None]
        news = beta[t, :, None] * (v[t] - torch.einsum("hvk,hk->hv", state, k[t]))
        state = state + news[..., None] * k[t, :, None]
        outs.append(scale * torch.einsum("hvk,hk->hv", state, q[t]))
    return torch.stack(outs), state


def differ(a, b):
    """Largest difference, as a share of the largest value."""
    return float((a.double() - b).abs().max() / b.abs().max())


def check(args, at, scale, tolerance):
    o, memory = ops.kda_chunk(*args, *at, scale)
    for row, (slot, length, count) in enumerate(zip(*(x.tolist() for x in at), strict=True)):
        state = args[5][slot] if length > count else torch.zeros_like(args[5][slot])
        want, last = recurrence(*(x[row, :count] for x in args[:5]), state, scale)
        assert differ(o[row, :count], want) < tolerance
        assert differ(memory[slot], last) < tolerance
        assert not o[row, count:].any()
    assert torch.equal(memory[0], args[5][0])


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("tokens", [1, 3, 15, 16, 17, 63, 64, 65, 127, 500, 1000, 1500])
def test_chunks_equal_the_recurrence_in_float64(tokens, kind):
    check(inputs(1, tokens, kind=kind), where([tokens + 1], [tokens]), 0.3, ROUNDING)


def test_a_very_long_row_equals_the_recurrence():
    check(inputs(1, 4096, heads=1, key=5, value=3), where([4096], [4096]), 0.3, ROUNDING)


def test_many_heads_equal_the_recurrence():
    check(inputs(1, 65, heads=96), where([65], [65]), 0.3, ROUNDING)


@pytest.mark.parametrize("kind", GATES)
def test_rows_of_unequal_length_equal_the_recurrence_each(kind):
    counts = [130, 1, 204, 0, 64, 63]
    lengths = [130, 1, 300, 7, 65, 63]
    args, at = inputs(6, 210, kind=kind), where(lengths, counts)
    counted = [i for i, count in enumerate(counts) if count]
    o, memory = ops.kda_chunk(*args, *at, 0.3)
    assert torch.equal(memory[3], args[5][3])  # no new tokens: the memory stays
    assert not o[3].any()
    check([x[counted] for x in args[:5]] + [args[5]], [x[counted] for x in at], 0.3, ROUNDING)


@pytest.mark.slow
def test_packed_lengths_of_a_public_test_equal_the_recurrence():
    counts = [1300, 547, 2048, 963, 271, 3063]
    check(inputs(6, max(counts), heads=1, key=4, value=3), where(counts, counts), 0.3, ROUNDING)


@pytest.mark.parametrize("key, value", [(60, 100), (100, 60), (128, 128), (16, 32)])
def test_any_head_dimensions_are_taken(key, value):
    check(inputs(2, 70, key=key, value=value), where([70, 50], [70, 50]), key**-0.5, ROUNDING)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2**-8)], ids=str)
@pytest.mark.parametrize("kind", GATES)
def test_narrow_inputs_lose_only_their_rounding(kind, dtype, tolerance):
    check(inputs(1, 300, key=64, value=64, kind=kind, dtype=dtype), where([301], [300]), 0.125, tolerance)


def test_chunks_equal_repeated_steps():
    args, (slots, lengths, counts) = inputs(2, 40), where([41, 41], [40, 40])
    o, memory = ops.kda_chunk(*args, slots, lengths, counts, 0.3)
    now, outs = args[5], []
    for t in range(40):
        step, now = ops.kda_step(*(x[:, t : t + 1] for x in args[:5]), now, slots, 0.3)
        outs.append(step)
    assert differ(torch.cat(outs, 1), o) < ROUNDING
    assert differ(now, memory) < ROUNDING


def test_a_row_read_in_parts_equals_the_row_read_at_once():
    args, (slots, _, counts) = inputs(1, 150), where([150], [150])
    whole, memory = ops.kda_chunk(*args, slots, counts, counts, 0.3)
    now, outs, seen = args[5], [], 0
    for size in (1, 63, 70, 16):
        part = [x[:, seen : seen + size] for x in args[:5]]
        seen += size
        o, now = ops.kda_chunk(*part, now, slots, torch.tensor([seen]), torch.tensor([size]), 0.3)
        outs.append(o)
    assert differ(torch.cat(outs, 1), whole) < ROUNDING
    assert differ(now, memory) < ROUNDING


def test_zero_beta_only_decays():
    q, k, v, decay, beta, memory = inputs(1, 70)
    o, after = ops.kda_chunk(q, k, v, decay, 0 * beta, memory, *where([71], [70]), 1.0)
    kept = memory[1] * decay[0].sum(0).exp()[:, None]
    torch.testing.assert_close(after[1], kept)
    torch.testing.assert_close(o[0, -1], torch.einsum("hvk,hk->hv", kept, q[0, -1]))


def test_beta_one_makes_the_memory_answer_with_what_was_written_last():
    _, k, v, decay, beta, memory = inputs(1, 70)
    o, _ = ops.kda_chunk(k, k, v, decay, torch.ones_like(beta), memory, *where([71], [70]), 1.0)
    torch.testing.assert_close(o, v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", GATES)
def test_a_changed_token_leaves_outputs_before_it_bitwise_equal(kind, dtype):
    args, at = inputs(1, 200, key=16, kind=kind, dtype=dtype), where([201], [200])
    before, _ = ops.kda_chunk(*args, *at, 0.3)
    for t in (0, 1, 2, 7, 8, 15, 16, 31, 32, 63, 64, 65, 100, 127, 128, 191, 192, 199):
        changed = [x.clone() for x in args[:5]]
        for x, other in zip(changed, inputs(1, 1, key=16, dtype=dtype), strict=False):
            x[:, t] = other[:, 0]
        after, _ = ops.kda_chunk(*changed, args[5], *at, 0.3)
        assert torch.equal(after[:, :t], before[:, :t])
        assert not torch.equal(after[:, t], before[:, t])


def test_nothing_in_padding_or_in_a_stale_slot_matters():
    args, at = inputs(2, 70), where([40, 80], [40, 33])
    want, memory = ops.kda_chunk(*args, *at, 0.3)
    dirty = [x.clone() for x in args]
    for x in dirty[:5]:
        x[0, 40:] = x[1, 33:] = math.nan
    dirty[5][0] = dirty[5][2] = math.nan  # nobody's slot, and the slot of the row that starts
    o, after = ops.kda_chunk(*dirty, *at, 0.3)
    assert torch.equal(o, want)
    assert torch.equal(after[1:], memory[1:])


def test_memory_is_overwritten_only_when_given_away():
    args, at = inputs(1, 9), where([10], [9])
    kept = args[5].clone()
    o, memory = ops.kda_chunk(*args, *at, 0.3)
    assert torch.equal(args[5], kept)
    with ops.donating():
        again, same = ops.kda_chunk(*args, *at, 0.3)
    assert same.data_ptr() == args[5].data_ptr() and torch.equal(same, memory) and torch.equal(again, o)


def test_no_temporary_is_much_larger_than_the_inputs():
    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and "view" not in func.name():
                self.size = max(self.size, out.untyped_storage().nbytes())
            return out

    args = inputs(1, 4096, heads=4, key=32, value=32, dtype=torch.float32)
    with Largest() as seen:
        ops.kda_chunk(*args, *where([4096], [4096]), 0.3)
    assert seen.size <= 2 * args[0].nbytes  # pairs of tokens of one chunk: 64 times that if all were held at once


def test_gradients_pass_through_transforms():
    args, at = inputs(3, 20), where([21] * 3, [20] * 3)
    one = where([21], [20])

    def loss(q, k, v, decay, beta, memory, at):
        o, after = ops.kda_chunk(q, k, v, decay, beta, memory, *at, 0.3)
        return o.square().sum() + after[1:].square().sum()

    want = grad(loss, argnums=(0, 1, 2, 3, 4))(*args, at)

    def row(*xs):
        return loss(*(x[None] for x in xs[:5]), torch.stack([args[5][0], xs[5]]), one)

    memories = args[5][1:].flip(0)  # slots are given out in reverse
    each = vmap(grad(row, argnums=(0, 1, 2, 3, 4)))(*args[:5], memories)
    whole = grad(lambda *xs: vmap(row)(*xs, memories).sum(), argnums=(0, 1, 2, 3, 4))(*args[:5])
    for w, e, a in zip(want, each, whole, strict=True):
        torch.testing.assert_close(e, w)
        torch.testing.assert_close(a, w)
