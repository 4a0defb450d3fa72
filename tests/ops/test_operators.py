"""What holds for every operator: fake, dtypes, gradients, and the free letters of its sharding rule."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensorMode

import kimi_graph.ops.einsum  # noqa: F401 (its operators register)
from kimi_graph.ops import OPERATORS, Operator
from kimi_graph.ops.quantised_cache import pack_rows

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
    place = torch.randperm(2 * T).int()
    return [normal(2 * T, 5), torch.where(place % 5 == 0, -1, place), torch.rand(T, 2, dtype=torch.float64), True]


def rotation() -> list[Any]:
    angle = normal(B, T, 3)
    return [normal(B, T, H, 6), angle.cos(), angle.sin(), True]


def sparse_attention() -> list[Any]:
    selected = torch.tensor([[[0, -1, 1]] * 3 + [[2, 4, 0]] * 4, [[0, -1, -1]] * 2 + [[1, 0, 2]] * 5])
    pools = [normal(P, G, L), normal(P, G, R)]
    return [normal(B, T, H, L), normal(B, T, H, R), *pools, selected.int(), TABLE, LENGTHS, COUNTS, 0.4]


def eight(*shape: int) -> torch.Tensor:
    return torch.randint(-127, 128, shape, dtype=torch.int8)


def rows() -> torch.Tensor:
    return pack_rows(normal(P, G, 256), normal(P, G, R), torch.int8)


def quantised_sparse_attention() -> list[Any]:
    _, _, _, _, *rest = sparse_attention()
    return [normal(B, T, H, 256), normal(B, T, H, R), rows(), *rest]


# Inputs of every operator in float64; an integer stays an integer in every dtype.
INPUTS: dict[str, Callable[[], list[Any]]] = {
    "attention": attention,
    "batch_matmul": lambda: [normal(3, 5, 4), normal(3, 6, 4), True],
    "best_positions": lambda: [normal(B, T, 9), torch.rand(B, T, 9).argsort(2).int(), 4],
    "cache_read": lambda: [normal(P, G, L), normal(P, G, R), TABLE],
    "cache_write": lambda: [
        normal(B, T, L),
        normal(B, T, R),
        normal(P, G, L),
        normal(P, G, R),
        torch.randperm(24)[:14],
    ],
    "full_attention": lambda: [*[normal(B, T, H, K) for _ in range(3)], torch.tensor([7, 4]), 0.4],
    "gated_rms_norm": lambda: [normal(B, T, H, V), normal(B, T, H, V), normal(V), 1e-5],
    "grouped_matmul": lambda: [normal(9, 6), normal(4, 5, 6), torch.tensor([3, 0, 5, 1])],
    "index_write": lambda: [normal(B, T, K), normal(P, G, K), torch.randperm(24)[:14]],
    "kda_chunk": lambda: [*kda(T), SLOTS, LENGTHS, COUNTS, 0.4],
    "kda_gate": lambda: [normal(B, T, H, K), normal(H, K), normal(H), -5.0],
    "kda_step": lambda: [*kda(1), SLOTS, 0.4],
    "l2_norm": lambda: [normal(B, T, H, K), 1e-6],
    "latent_attention": latent_attention,
    "latent_attention_lse": latent_attention,
    "layer_norm": lambda: [normal(B, T, V), normal(V), normal(V), 1e-6],
    "matmul": lambda: [normal(5, 4), normal(6, 4), True],
    "moe_combine": combine,
    "moe_dispatch": lambda: [normal(T, 6), chosen(), 3, 2],
    "moe_route": lambda: [normal(T, 6), normal(6), 2, 2.5, 3, 2],
    "numbered_pages": lambda: [TABLE],
    "quantised_cache_write": lambda: [normal(B, T, 256), normal(B, T, R), rows(), torch.randperm(24)[:14]],
    "quantised_index_write": lambda: [normal(B, T, K), eight(P, G, K), normal(P, G).exp(), torch.randperm(24)[:14]],
    "quantised_select_keys": lambda: [
        *(normal(B, T, H, K), normal(B, T, H), eight(P, G, K), normal(P, G).exp(), TABLE, LENGTHS, COUNTS),
        3,
    ],
    "quantised_sparse_attention": quantised_sparse_attention,
    "residual_mix": lambda: [[normal(B, T, V) for _ in range(3)], normal(V), normal(V), 1e-5],
    "rms_norm": lambda: [normal(B, T, V), normal(V), 1e-5],
    "rope": rotation,
    "select_keys": lambda: [normal(B, T, H, K), normal(B, T, H), normal(P, G, K), TABLE, LENGTHS, COUNTS, 3],
    "short_conv": lambda: [normal(B, T, H, K), normal(H, K, 4), normal(S, H, K, 3), SLOTS, LENGTHS, COUNTS],
    "sigmoid_gate": lambda: [normal(B, T, H, V), normal(B, T, H, V)],
    "situ": lambda: [normal(T, 6), 4.0, 25.0],
    "situ_mul": lambda: [normal(B, T, 6), normal(B, T, 6), 4.0, 25.0],
    "sparse_attention": sparse_attention,
    "sparse_attention_lse": sparse_attention,
    "state_write": lambda: [normal(B, H, V, K), normal(S, H, V, K), SLOTS],
    "swiglu": lambda: [normal(T, 6)],
}
OURS = {name: op for name, op in OPERATORS.items() if op.reference.__module__.startswith("kimi_graph.ops.")}
every_operator = pytest.mark.parametrize("op", [OURS[name] for name in sorted(INPUTS)], ids=sorted(INPUTS))
F32 = {
    "decay",
    "beta",
    "memory",
    "bias",
    "log_rate",
    "score",
    "scores",
    "weights",
    "cos",
    "sin",
}  # arguments that are float32 in any model


def inputs(op: Operator, dtype: torch.dtype = torch.float64) -> list[Any]:
    """Arguments of `op` as a model of this dtype has them."""

    def cast(name: str, x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.float32 if name in F32 and dtype == torch.bfloat16 else dtype) if floating(x) else x

    named = zip(op.__signature__.parameters, INPUTS[op.name](), strict=True)
    return [pytree.tree_map(lambda x, name=name: cast(name, x), value) for name, value in named]


def floating(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def each(f: Callable[[torch.Tensor], Any], args: list[Any]) -> list[Any]:
    """`f` of every tensor of floating point numbers, in lists too."""
    return pytree.tree_map(lambda x: f(x) if floating(x) else x, args)


def results(out: Any) -> tuple[torch.Tensor, ...]:
    return out if isinstance(out, tuple) else (out,)


def test_every_operator_has_inputs_here():
    assert set(INPUTS) == set(OURS)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@every_operator
def test_fake_agrees_with_reference(op, dtype):
    args = inputs(op, dtype)
    with FakeTensorMode() as mode:
        fake = op.op(*pytree.tree_map_only(torch.Tensor, mode.from_tensor, args))
    for r, f in zip(results(op(*args)), results(fake), strict=True):
        assert (r.shape, r.dtype, r.stride()) == (f.shape, f.dtype, f.stride())


@every_operator
def test_float64_stays_float64(op):
    assert all(r.dtype == torch.float64 for r in results(op(*inputs(op))) if r.is_floating_point())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every_operator
def test_narrow_dtypes_agree_with_float64_on_the_same_numbers(op, dtype):
    narrow = inputs(op, dtype)
    wide = each(lambda x: x.double(), narrow)
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
    before = pytree.tree_map_only(torch.Tensor, torch.clone, args)
    op(*args)
    for a, b in zip(pytree.tree_leaves(args), pytree.tree_leaves(before), strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@every_operator
def test_gradients_are_those_of_finite_differences(op):
    args = inputs(op)
    leaves = [x for x in pytree.tree_leaves(args) if floating(x)]

    def f(*values):
        rest = iter(values)
        return tuple(r for r in results(op(*each(lambda _: next(rest), args))) if r.is_floating_point())

    if f(*leaves):  # a choice has no derivative
        assert torch.autograd.gradcheck(f, [x.requires_grad_() for x in leaves], fast_mode=True)
    else:
        assert not any(r.requires_grad for r in results(op(*each(lambda x: x.requires_grad_(), args))))


@every_operator
def test_watched_by_autograd_the_result_is_the_same(op):
    args = inputs(op, torch.float32)
    plain = results(op(*args))
    watched = results(op(*each(lambda x: x.requires_grad_(), args)))
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
    tensors = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor | list)]
    dims = {i: g.index(letter) for i, g in zip(tensors, groups, strict=True) if letter in g}
    shapes = {i: (args[i][0] if isinstance(args[i], list) else args[i]).shape for i in dims}
    size = min(shapes[i][d] for i, d in dims.items())
    parts = []
    for first, last in ((0, size // 3 + 1), (size // 3 + 1, size)):
        cut = list(args)
        for i, d in dims.items():
            many = shapes[i][d] // size  # a dimension may hold a whole number of entries for each of the letter's
            at = (d, first * many, (last - first) * many)
            cut[i] = pytree.tree_map(lambda x, at=at: x.narrow(*at), args[i])
        parts.append(results(op(*cut)))
    summed = letter != "b" and not any(letter in g for g in out)  # rows own their slots and pages: no sum of states
    for i, (whole, group) in enumerate(zip(results(op(*args)), out, strict=True)):
        if letter in group:
            torch.testing.assert_close(torch.cat([p[i] for p in parts], group.index(letter)), whole)
        elif summed:
            torch.testing.assert_close(sum(p[i] for p in parts), whole)
        elif letter != "b":
            assert all(torch.equal(p[i], whole) for p in parts)
