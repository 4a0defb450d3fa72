"""Every rule of global values x every placement of its operands, on meshes of 2 x 2 and 2 x 3: exact or refused."""

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kimi_graph.ops.einsum  # noqa: F401 (its operators register)
from kimi_graph.ops import OPERATORS
from kimi_graph.parallel import Mesh, constrain, value
from kimi_graph.parallel.value import OPERATOR, RULES, rule_of
from tests.ops.test_operators import INPUTS, letters
from tests.parallel.fuzz import Count, Place, every, places, tensors

MESHES = {name: Mesh.parse(name) for name in ("dp=2,tp=2", "dp=2,tp=3")}
CASES = 40  # of each form on each mesh; `-m heavy` runs all

A = (12, 6, 18)  # split by 2, 3, 4 and 6 into unequal parts, one of them a single row
B = (12, 6)


GENERATOR = torch.Generator().manual_seed(1)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=GENERATOR)


def index(*shape: int) -> Tensor:
    """Of 6."""
    return torch.arange(torch.Size(shape).numel()).mul(7).remainder(6).view(shape)


# name: operands, function
FORMS: dict[str, tuple[list[Tensor], Callable[..., Any]]] = {
    "add": ([normal(*A), normal(*A)], lambda x, y: x + y),
    "add alpha": ([normal(*B), normal(*B)], lambda x, y: torch.add(x, y, alpha=2)),
    "add number": ([normal(*A)], lambda x: 2 + (x + 1.5)),
    "add twice": ([normal(*B)], lambda x: x + x),
    "sub": ([normal(*B), normal(*B)], lambda x, y: (x - y) - 0.5),
    "rsub": ([normal(*B)], lambda x: 3 - x),
    "rsub pending": ([normal(*B), normal(*B)], lambda x, y: torch.rsub(x, y)),
    "mul": ([normal(*A), normal(*A)], lambda x, y: x * y),
    "mul number": ([normal(*B)], lambda x: 2 * (x * 2.5)),
    "mul itself": ([normal(*B)], lambda x: x * x),
    "div": ([normal(*B), normal(*B)], lambda x, y: x / (y.abs() + 1)),
    "div number": ([normal(*B)], lambda x: (x / 3).div(2)),
    "rtruediv": ([normal(*B)], lambda x: 1 / (x.abs() + 1)),
    "broadcast a row": ([normal(*A), normal(18)], lambda x, y: x * y),
    "broadcast inside": ([normal(*A), normal(12, 1, 18)], lambda x, y: x + y),
    "broadcast both": ([normal(12, 1), normal(1, 6)], lambda x, y: x + y),
    "neg": ([normal(*B), normal(*B)], lambda x, y: -x + y),
    "pow": ([normal(*B)], lambda x: x**2 + torch.pow(x, 2)),
    "rpow": ([normal(*B)], lambda x: 2**x),
    "activations": ([normal(*B)], lambda x: F.gelu(F.silu(x)) + x.sigmoid() + x.tanh() + F.softplus(x) + x.relu()),
    "functions": ([normal(*B)], lambda x: x.abs().sqrt() + x.exp() + x.square().add(1).log().add(1).rsqrt()),
    "reciprocal": ([normal(*B)], lambda x: x.abs().add(1).reciprocal()),
    "dtypes": ([normal(*B)], lambda x: x.float().double() + x.half().bfloat16().to(torch.float64) + x.long() + x.int()),
    "copies": ([normal(*B)], lambda x: x.clone() + x.contiguous()),
    "comparisons": (
        [normal(*B), normal(*B)],
        lambda x, y: ((x > y) & (x >= 0)) | ((x < y) ^ ~(y <= 0)) | (x == y) & (x != y),
    ),
    "logical": ([normal(*B)], lambda x: torch.logical_or(torch.logical_not(x > 0), torch.logical_and(x > 1, x < 2))),
    "bool": ([normal(*B)], lambda x: x.clamp(min=0).bool()),
    "clamp": ([normal(*B)], lambda x: x.clamp(min=-0.5, max=1)),
    "maximum": ([normal(*B), normal(*B)], lambda x, y: torch.maximum(x, y) - torch.minimum(x, y)),
    "where": ([normal(*B), normal(*B)], lambda x, y: torch.where(x > 0, x, y)),
    "masked_fill": ([normal(*B), normal(*B)], lambda x, y: x.masked_fill(y > 0, 0.0)),
    "like": (
        [normal(*B)],
        lambda x: (
            torch.zeros_like(x) + torch.ones_like(x) + torch.full_like(x, 3) + torch.ones_like(torch.empty_like(x)) * x
        ),
    ),
    "new": ([normal(*B)], lambda x: x + x.new_zeros(12, 6) + x.new_ones(6) + x.new_full((12, 1), 2)),
    "new empty": ([normal(*B)], lambda x: torch.zeros_like(x.new_empty(3, 2))),
    "sum": ([normal(*A)], lambda x: x.sum(0)),
    "sum keeps": ([normal(*A)], lambda x: x.sum((1, 2), keepdim=True)),
    "sum all": ([normal(*B)], lambda x: x.sum()),
    "mean": ([normal(*A)], lambda x: x.mean(-1, keepdim=True)),
    "mean two": ([normal(*A)], lambda x: torch.mean(x, (0, 1))),
    "norm": ([normal(*B), normal(6)], lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w),
    "einsum keeps": ([normal(*A), normal(18, 4)], lambda x, y: torch.einsum("abc,cd->abd", x, y)),
    "einsum batch": ([normal(*A), normal(*A)], lambda x, y: torch.einsum("abc,abc->ab", x, y)),
    "einsum mixed": ([normal(*A), normal(4, 6, 18)], lambda x, y: torch.einsum("abc,dbc->adb", x, y)),
    "einsum two sums": ([normal(*A), normal(6, 18, 4)], lambda x, y: torch.einsum("abc,bcd->ad", x, y)),
    "einsum turns": ([normal(*A)], lambda x: torch.einsum("abc->cb", x)),
    "einsum apart": ([normal(12), normal(6)], lambda x, y: torch.einsum("a,b->", x, y)),
    "einsum outer": ([normal(12), normal(6)], lambda x, y: torch.einsum("a, b -> ba", x, y)),
    "einsum three": (
        [normal(*B), normal(6, 4), normal(4, 12)],
        lambda x, y, z: torch.einsum("ab,bc,cd->ad", x, y, z),
    ),
    "matmul": ([normal(*A), normal(18, 4)], lambda x, y: x @ y),
    "softmax": ([normal(*A)], lambda x: F.softmax(x, -1) + x.softmax(dim=1) + torch.log_softmax(x, 0)),
    "softmax one": ([normal(*B)], lambda x: x.softmax(-1)),
    "topk": ([normal(*A)], lambda x: (x.topk(2, -1).values, x.topk(2, dim=1)[1])),
    "topk last": ([normal(*B)], lambda x: x.topk(2)[0]),
    "sort": ([normal(*A)], lambda x: (x.sort(1).values, x.argsort(1))),
    "sort last": ([normal(*B)], lambda x: torch.sort(x, dim=-1, descending=True, stable=True)[0]),
    "cumsum": ([normal(*A)], lambda x: x.cumsum(1)),
    "argmax": ([normal(*A)], lambda x: (x.argmax(-1), x.argmax(0, keepdim=True))),
    "argmax all": ([normal(*B)], lambda x: x.argmax()),
    "max": ([normal(*A)], lambda x: (*x.max(1), *x.min(0))),
    "max all": ([normal(*B)], lambda x: x.max()),
    "amax": ([normal(*A)], lambda x: x.amax(1) - x.amin((0, 2), keepdim=True).sum()),
    "gather": ([normal(*B), index(12, 4)], lambda x, i: torch.gather(x, 1, i)),
    "gather some rows": ([normal(*B), index(6, 6)], lambda x, i: x.gather(1, i)),
    "gather few": ([normal(*A), index(12, 6, 1)], lambda x, i: x.gather(2, i)),
    "embedding": ([index(12, 4), normal(6, 18)], F.embedding),
    "embedding int": ([index(12).int(), normal(6, 4)], lambda i, w: F.embedding(i, w) * 2),
    "cat": ([normal(*A), normal(*A)], lambda x, y: torch.cat([x, y, x[:, :3]], 1)),
    "cat rows": ([normal(*B), normal(*B)], lambda x, y: torch.cat([x, 2 * y])),
    "concat": ([normal(*B)], lambda x: torch.concat([x, x], -1)),
    "stack": ([normal(*B), normal(*B)], lambda x, y: (torch.stack([x, y], 1), torch.stack([x, y], -1))),
    "permute": ([normal(*A)], lambda x: x.permute(2, 0, 1)),
    "permute tuple": ([normal(*A)], lambda x: torch.permute(x, (-1, 1, 0))),
    "transpose": ([normal(*A)], lambda x: x.transpose(0, -1).mT.swapaxes(0, 1)),
    "movedim": ([normal(*A)], lambda x: x.movedim(0, 2).movedim(-1, 1)),
    "unsqueeze": ([normal(*A)], lambda x: x.unsqueeze(1).unsqueeze(-1)),
    "squeeze": ([normal(12, 1, 6)], lambda x: x.squeeze(1).unsqueeze(0).squeeze(0).squeeze(1)),
    "expand": ([normal(*B)], lambda x: x[:, None].expand(-1, 3, 6)),
    "expand more": ([normal(12, 1)], lambda x: x.expand((3, 12, 6))),
    "slice": ([normal(*A)], lambda x: x[..., :3]),
    "slice whole": ([normal(*A)], lambda x: x[0:12, :, :18][:, :99]),
    "slice step": ([normal(*B)], lambda x: x[::2]),
    "index": ([normal(*A)], lambda x: x[:, 1]),
    "index last": ([normal(*A)], lambda x: x[..., -1]),
    "index none": ([normal(*A)], lambda x: x[1:3, None]),
    "unpack": ([normal(4, 6)], lambda x: tuple(x)),
    "split": ([normal(*A)], lambda x: x.split(2, 1)[1]),
    "split sizes": ([normal(*A)], lambda x: torch.split(x, [5, 13], dim=-1)[1]),
    "chunk": ([normal(*A)], lambda x: (x.chunk(2, -1)[0], x.chunk(3)[2])),
    "unbind": ([normal(*A)], lambda x: x.unbind(1)[2] * x.unbind(dim=1)[0]),
    "unbind rows": ([normal(*A)], lambda x: x.unbind()[2]),
    "reshape merges": ([normal(*A)], lambda x: x.reshape(72, 18)),
    "reshape merges the last": ([normal(*A)], lambda x: x.reshape(12, 108)),
    "reshape cuts": ([normal(*A)], lambda x: x.reshape(12, 6, 3, 6)),
    "reshape cuts the first": ([normal(*A)], lambda x: x.view(2, 6, 6, 18)),
    "reshape all": ([normal(*A)], lambda x: x.reshape(-1)),
    "reshape moves": ([normal(*A)], lambda x: x.reshape((18, 4, -1))),
    "reshape adds ones": ([normal(*A)], lambda x: x.reshape(1, 12, 1, 6, 18, 1)),
    "reshape drops ones": ([normal(12, 1, 6)], lambda x: x.reshape(12, 6)),
    "flatten": ([normal(*A)], lambda x: (x.flatten(1), x.flatten(0, 1), x.flatten())),
    "flatten rows": ([normal(*A)], lambda x: x.flatten(0, 1)),
    "unflatten": ([normal(*A)], lambda x: x.unflatten(0, (6, -1)).unflatten(-1, (2, 9))),
    "there and back": ([normal(*A)], lambda x: x.flatten(0, 1).unflatten(0, x.shape[:2])),
    "constrain whole": ([normal(*B)], lambda x: constrain(x, None, None)),
    "constrain": ([normal(*B)], lambda x: constrain(x, "first", "last")),
    "constrain both": ([normal(*A)], lambda x: constrain(x, "both", None, None)),
    "constrain turned": ([normal(*B)], lambda x: constrain(x, "turned", None)),
    "constrain swapped": ([normal(*A)], lambda x: constrain(x, "last", "_", "first")),
    "constrain a used sum": ([normal(*B)], lambda x: x.relu() + constrain(x, "first", None)),
    "a sum used twice": ([normal(*B)], lambda x: x.relu() + x.sigmoid()),
}


def some(found: list[Any], everything: bool) -> list[Any]:
    """Some of all placements, the same every time; all on request."""
    return found if everything else random.Random(len(found)).sample(found, min(CASES, len(found)))


def fuzz_form(name: str, mesh: str, *, everything: bool = False) -> Count:
    args, f = FORMS[name]
    found = list(itertools.product(*(places(MESHES[mesh], x) for x in args)))
    return every(f, MESHES[mesh], args, some(found, everything))


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("form", FORMS)
def test_a_rule_is_exact_or_refuses(form, mesh):
    fuzz_form(form, mesh)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("form", [f"constrain{f}" for f in ("", " whole", " both", " turned", " swapped")])
def test_constrain_comes_from_everywhere(form, mesh):
    assert fuzz_form(form, mesh, everything=True).refused == 0


@pytest.mark.heavy
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("form", FORMS)
def test_a_rule_is_exact_or_refuses_whatever_the_placement(form, mesh):
    count = fuzz_form(form, mesh, everything=True)
    print(f"{form} on {mesh}: {count.accepted:,} exact, {count.refused:,} refused")


def test_every_rule_is_tried(monkeypatch):
    tried = set()
    monkeypatch.setattr(value, "rule_of", lambda f: tried.add(value.name_of(f)) or rule_of(f))
    for args, f in FORMS.values():
        every(f, MESHES["dp=2,tp=2"], args, [[Place(((),) * x.ndim) for x in args]])
    assert set(RULES) - tried == {OPERATOR, "shard_map", "splits", "ways"}  # the last two ask, and give no value


@pytest.mark.parametrize("form", FORMS)
def test_a_rule_accepts_more_than_whole_operands(form):
    args, f = FORMS[form]
    mesh = MESHES["dp=2,tp=2"]
    one_split = [[p if i == j else Place(((),) * x.ndim) for j, x in enumerate(args)] for i, p in _single(mesh, args)]
    assert every(f, mesh, args, one_split).split >= 1


def _single(mesh: Mesh, args: list[Tensor]) -> list[tuple[int, Place]]:
    return [(i, p) for i, x in enumerate(args) for p in places(mesh, x) if p.used]


# ---- operators -------------------------------------------------------------------------------------------------------

POOLS = "sp"  # split as their rows, and then ids count within a part: not the same numbers, see the tests of layers


def operator_cases(name: str, mesh: Mesh, args: list[Any]) -> list[list[Place]]:
    """Placements that go by the operator's letters, with some operands left whole and now and then one of its own."""
    groups, _ = letters(OPERATORS[name])
    lists = [len(a) if isinstance(a, list) else 1 for a in args if isinstance(a, (Tensor, list))]
    groups = [g for g, n in zip(groups, lists, strict=True) for _ in range(n)]
    names = sorted({letter for g in groups for letter in g})
    draw, found = random.Random(name), []
    for _ in range(4 * CASES):
        split = {axis: draw.choice([*names, "nothing"]) for axis in ("data", "tensor")}
        case = []
        for x, group in zip(tensors(args), groups, strict=True):
            legal = places(mesh, x)
            dims = tuple(tuple(a for a in split if split[a] == letter) for letter in _spelled(group, x.ndim))
            place = draw.choices([Place(dims), Place(((),) * x.ndim), draw.choice(legal)], [12, 3, 1])[0]
            case.append(place if place in legal else Place(((),) * x.ndim))
        pools = [p.dims[g.index(n)] for p, g in zip(case, groups, strict=True) for n in POOLS if n in g]
        if not any(pools) and case not in found:
            found.append(case)
    return found


def _spelled(group: list[str], ndim: int) -> list[str]:
    """Letters of a group with `...` as the letters it stands for."""
    dots = [str(i) for i in range(ndim - len(group) + 1)]
    return [x for letter in group for x in (dots if letter == "..." else [letter])]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", sorted(INPUTS))
def test_an_operator_is_exact_or_refuses(name, mesh):
    fuzz_operator(name, mesh)


def fuzz_operator(name: str, mesh: str) -> Count:
    args = INPUTS[name]()
    return every(OPERATORS[name], MESHES[mesh], args, some(operator_cases(name, MESHES[mesh], args), False))
