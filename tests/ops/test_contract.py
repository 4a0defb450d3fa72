"""`contract` is `torch.einsum`, for few rows and many, on one thread and two."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

from kimi_graph import ops
from kimi_graph.ops.contract import _trailing

SIZES = {"b": 1, "n": 3, "d": 256, "h": 4, "k": 64, "v": 64, "r": 32, "f": 256, "e": 5, "l": 48, "c": 6}
EQUATIONS = [
    "btd,hkd->bthk",
    "btd,hd->bth",
    "btr,hvr->bthv",
    "bthv,dhv->btd",
    "btf,df->btd",
    "nd,ed->ne",
    "bthn,hnl->bthl",  # heads are on both sides: not a plain product of rows and a weight
    "bthl,hvl->bthv",
    "bcl,hnl->bchn",
]


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("tokens", [1, 2, 16, 40])
@pytest.mark.parametrize("equation", EQUATIONS)
def test_it_gives_what_einsum_gives(equation, tokens, threads):
    sizes = SIZES | {"t": tokens}
    x, y = (
        torch.randn([sizes[letter] for letter in part], dtype=torch.float64)
        for part in equation.split("->")[0].split(",")
    )
    got, want = ops.contract(equation, x, y), torch.einsum(equation, x, y)
    assert got.shape == want.shape
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_narrow_dtypes_are_rounded_once(dtype, threads):
    x, y = torch.randn(1, 1, 256).to(dtype), torch.randn(4, 64, 256).to(dtype)
    exact = torch.einsum("btd,hkd->bthk", x.double(), y.double())
    tolerance = 2**-8 if dtype == torch.bfloat16 else 2**-18
    assert (ops.contract("btd,hkd->bthk", x, y) - exact).abs().max() <= tolerance * exact.abs().max()


def test_gradients_pass_through_both_forms(threads):
    for tokens in (1, 2, 40):
        x = torch.randn(1, tokens, 256, dtype=torch.float64, requires_grad=True)
        y = torch.randn(4, 64, 256, dtype=torch.float64, requires_grad=True)
        weigh = torch.randn(1, tokens, 4, 64, dtype=torch.float64)
        got = torch.autograd.grad((weigh * ops.contract("btd,hkd->bthk", x, y)).sum(), (x, y))
        want = torch.autograd.grad((weigh * torch.einsum("btd,hkd->bthk", x, y)).sum(), (x, y))
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w)


def test_a_mode_sees_einsum_itself():
    class Watch(TorchFunctionMode):
        seen = ()

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.seen += (func,)
            return func(*args, **(kwargs or {}))

    x, y = torch.randn(1, 1, 4), torch.randn(2, 3, 4)
    with Watch() as watch:
        ops.contract("btd,hkd->bthk", x, y)
    assert watch.seen == (torch.einsum,)


def test_only_plain_products_of_rows_and_a_weight_are_recognised():
    assert [_trailing(e) for e in EQUATIONS] == [1, 1, 1, 2, 1, 1, 0, 0, 1]
    for other in ("ij,jk->ik", "ij,kj->ki", "ij,kj->kij", "ij,ij->ij", "ii,ki->k"):
        assert _trailing(other) == 0
