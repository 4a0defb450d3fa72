"""What holds for every operator: fake, dtypes, gradients, and the free letters of its sharding rule."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import kimi_graph.ops.einsum  # noqa: F401 (its operators register)
from kimi_graph.ops import OPERATORS, Operator

# Odd, unequal sizes: B rows, T tokens, H heads, K key, V value, S slots, P pages of G tokens, L latent, R rope.
B, T, H, K, V, S, P, G, L, R = 2, 7, 3, 5, 4, 4, 6, 4, 6, 3
SLOTS = torch.tensor([3, 1], dtype=torch.int32)
LENGTHS, COUNTS = torch.tensor([9, 5]), torch.tensor([7, 5])  # one row goes on and is full, one starts and is padded
TABLE = torch.tensor([[2, 5, 1], [4, 3, 0]], dtype=torch.int32)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def unit(*shape: int) -> torch.Tensor:
    return torch.nn.functional.normalize(normal(*shape), dim=-1)


def kda(tokens: int) -> list[Any]:
    row = (B, tokens, H)
    return [
        unit(*row, K),
        unit(*row, K),
        normal(*row, V),
        -normal(*row, K).exp(),
        normal(*row).sigmoid(),
        normal(S, H, V, K),
    ]


def attention() -> list[Any]:
    q = [normal(B, T, H, K), normal(B, T, H, R)]
    return [*q, normal(B, 12, H, K), normal(B, 12, R), normal(B, 12, H, V), LENGTHS, COUNTS, 0.4]


def latent_attention() -> list[Any]:
    return [normal(B, 1, H, L), normal(B, 1, H, R), normal(P, G, L), normal(P, G, R), TABLE, LENGTHS, 0.4]


def chosen() -> torch.Tensor:
    return torch.rand(T, 5).argsort(1)[:, :2].int()


def combine() -> list[Any]:
    return [normal(2 * T, 5), torch.randperm(2 * T).int(), torch.rand(T, 2, dtype=torch.float64)]


# Inputs of every operator in float64; an integer stays an integer in every dtype.
INPUTS: dict[str, Callable[[], list[Any]]] = {
    "attention": attention,
    "batch_matmul": lambda: [normal(3, 5, 4), normal(3, 6, 4), True],
    "cache_read": lambda: [normal(P, G, L), normal(P, G, R), TABLE],
    "cache_write": lambda: [
        normal(B, T, L),
        normal(B, T, R),
        normal(P, G, L),
        normal(P, G, R),
        torch.randperm(24)[:14],
    ],
    "gated_rms_norm": lambda: [normal(B, T, H, V), normal(B, T, H, V), normal(V), 1e-5],
    "grouped_matmul": lambda: [normal(9, 6), normal(4, 5, 6), torch.tensor([3, 0, 5, 1])],
    "kda_chunk": lambda: [*kda(T), SLOTS, LENGTHS, COUNTS, 0.4],
    "kda_gate": lambda: [normal(B, T, H, K), normal(H, K), normal(H), -5.0],
    "kda_step": lambda: [*kda(1), SLOTS, 0.4],
    "l2_norm": lambda: [normal(B, T, H, K), 1e-6],
    "latent_attention": latent_attention,
    "matmul": lambda: [normal(5, 4), normal(6, 4), True],
    "moe_combine": combine,
    "moe_dispatch": lambda: [normal(T, 6), chosen(), 5],
    "moe_route": lambda: [normal(T, 5), normal(5), 2, 2.5],
    "rms_norm": lambda: [normal(B, T, V), normal(V), 1e-5],
    "short_conv": lambda: [normal(B, T, H, K), normal(H, K, 4), normal(S, H, K, 3), SLOTS, LENGTHS, COUNTS],
    "swiglu": lambda: [normal(T, 6)],
}
OURS = {name: op for name, op in OPERATORS.items() if op.reference.__module__.startswith("kimi_graph.ops.")}
every_operator = pytest.mark.parametrize("op", [OURS[name] for name in sorted(INPUTS)], ids=sorted(INPUTS))
F32 = {"decay", "beta", "memory", "bias", "log_rate", "scores", "weights"}  # arguments that are float32 in any model


def inputs(op: Operator, dtype: torch.dtype = torch.float64) -> list[Any]:
    """Arguments of `op` as a model of this dtype has them."""
    made = []
    for name, value in zip(op.__signature__.parameters, INPUTS[op.name](), strict=True):
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            value = value.to(torch.float32 if name in F32 and dtype == torch.bfloat16 else dtype)
        made.append(value)
    return made


def results(out: Any) -> tuple[torch.Tensor, ...]:
    return out if isinstance(out, tuple) else (out,)


def test_every_operator_has_inputs_here():
    assert set(INPUTS) == set(OURS)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@every_operator
def test_fake_agrees_with_reference(op, dtype):
    args = inputs(op, dtype)
    with FakeTensorMode() as mode:
        fake = op.op(*[mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args])
    for r, f in zip(results(op(*args)), results(fake), strict=True):
        assert (r.shape, r.dtype, r.stride()) == (f.shape, f.dtype, f.stride())


@every_operator
def test_float64_stays_float64(op):
    assert all(r.dtype == torch.float64 for r in results(op(*inputs(op))) if r.is_floating_point())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every_operator
def test_narrow_dtypes_agree_with_float64_on_the_same_numbers(op, dtype):
    narrow = inputs(op, dtype)
    wide = [a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in narrow]
    # rounded once to its dtype (half an ulp of bfloat16 is 2^-9) after sums in float32, some of them of rounded terms
    tolerance = 2**-7 if dtype == torch.bfloat16 else 2**-20
    for r, w in zip(results(op(*narrow)), results(op(*wide)), strict=True):
        if r.is_floating_point():
            assert (r.double() - w).abs().max() <= tolerance * w.abs().max()
        else:
            assert torch.equal(r, w)


@every_operator
def test_inputs_are_left_alone(op):
    args = inputs(op)
    before = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    op(*args)
    for a, b in zip(args, before, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@every_operator
def test_gradients_are_those_of_finite_differences(op):
    args = inputs(op)
    at = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor) and a.is_floating_point()]

    def f(*values):
        full = list(args)
        for i, value in zip(at, values, strict=True):
            full[i] = value
        return tuple(r for r in results(op(*full)) if r.is_floating_point())

    assert torch.autograd.gradcheck(f, [args[i].requires_grad_() for i in at], fast_mode=True)


@every_operator
def test_watched_by_autograd_the_result_is_the_same(op):
    args = inputs(op, torch.float32)
    plain = results(op(*args))
    watched = results(
        op(*[a.requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args])
    )
    for p, w in zip(plain, watched, strict=True):
        torch.testing.assert_close(w, p)  # buffers are reused or not, and products may be blocked otherwise


def letters(op: Operator) -> tuple[list[list[str]], list[list[str]]]:
    """Letter groups of the tensor arguments and of the results; `...` stands for as many letters as are there."""
    left, right = op.sharding.split("->")
    return [g.split() for g in left.split(",")], [g.split() for g in right.split(",")]


def splits() -> list[Any]:
    """Every operator with every letter that its rule lets a mesh axis take."""
    found = []
    for name in sorted(INPUTS):
        groups, out = letters(OURS[name])
        free = {letter for group in groups + out for letter in group} - set(OURS[name].whole)
        found += [pytest.param(OURS[name], letter, id=f"{name}-{letter}") for letter in sorted(free)]
    return found


@pytest.mark.parametrize("op, letter", splits())
def test_a_free_letter_may_be_split(op, letter):
    """Parts concatenate to the whole where a result has the letter, and add up to it where none has."""
    groups, out = letters(op)
    args = inputs(op)
    tensors = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]
    dims = {i: g.index(letter) for i, g in zip(tensors, groups, strict=True) if letter in g}
    size = min(args[i].shape[d] for i, d in dims.items())
    parts = []
    for first, last in ((0, size // 3 + 1), (size // 3 + 1, size)):
        cut = list(args)
        for i, d in dims.items():
            each = args[i].shape[d] // size  # a dimension may hold a whole number of entries for each of the letter's
            cut[i] = args[i].narrow(d, first * each, (last - first) * each)
        parts.append(results(op(*cut)))
    summed = letter != "b" and not any(letter in g for g in out)  # rows own their slots and pages: no sum of states
    for i, (whole, group) in enumerate(zip(results(op(*args)), out, strict=True)):
        if letter in group:
            torch.testing.assert_close(torch.cat([p[i] for p in parts], group.index(letter)), whole)
        elif summed:
            torch.testing.assert_close(sum(p[i] for p in parts), whole)
        elif letter != "b":
            assert all(torch.equal(p[i], whole) for p in parts)
