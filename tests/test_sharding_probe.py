"""Every rule of the sharding probe, every placement of its inputs on a 2 x 2 mesh: exact or refused, never wrong."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kimi_graph import ops
from kimi_graph.errors import ShardingError
from kimi_graph.ops.einsum import matmul
from kimi_graph.parallel import constrain
from tests.sharding_probe import RULES, Local, Mesh, Sharded, replicate

SHAPE = (4, 8)
INDEX = torch.tensor([[3, 0, 1, 2], [1, 1, 5, 7], [0, 6, 2, 2], [4, 4, 4, 0]])
FORMS = {
    "add": (2, lambda x, y: x + y),
    "add broadcast": (2, lambda x, y: x[:, None] + y[None, :, :] + 1.5),
    "radd, rsub": (1, lambda x: 2 + (3 - x)),
    "sub": (2, lambda x, y: (x - y) - 0.5),
    "add twice": (1, lambda x: x + x),
    "mul": (2, lambda x, y: 2 * (x * y)),
    "elementwise": (1, lambda x: F.gelu(F.silu(x)).sigmoid().clamp(min=0.2).float().double()),
    "einsum keeps": (2, lambda x, y: torch.einsum("ab,cb->ac", x, y)),
    "einsum batch": (2, lambda x, y: torch.einsum("ab,ab->a", x, y)),
    "einsum transposes": (1, lambda x: torch.einsum("ab->ba", x)),
    "flatten": (1, lambda x: x.flatten(0, 1)),
    "unflatten": (1, lambda x: x.unflatten(1, (2, 4))),
    "unflatten, flatten": (1, lambda x: x.unflatten(0, (2, 2)).flatten(0, 1)),
    "getitem": (1, lambda x: x[..., :3]),
    "getitem None": (1, lambda x: x[1:3, None, :]),
    "cat": (2, lambda x, y: torch.cat([x, y, x[:, :3]], -1)),
    "cat rows": (2, lambda x, y: torch.cat([x, y])),
    "expand": (1, lambda x: x[:, None].expand(-1, 3, 8)),
    "gather": (1, lambda x: torch.gather(x, 1, INDEX)),
    "embedding": (1, lambda x: F.embedding(INDEX % 4, x)),
    "constrain whole": (1, lambda x: constrain(x, None, None)),
    "constrain": (1, lambda x: constrain(x, "first", "last")),
    "constrain both": (1, lambda x: constrain(x, "both", None)),
    "an operator that sums": (2, lambda x, y: matmul(x, y, True)),
    "an operator of a list": (2, lambda x, y: mix([x[None], y[None], x[None]])),
    "an operator along a dimension": (2, lambda x, y: ops.gated_rms_norm(x, y, torch.ones(8).double(), 1e-5)),
}


def mix(sources: list[Any]) -> Any:
    return ops.residual_mix(sources, torch.ones(8).double(), torch.linspace(-1, 1, 8).double(), 1e-5).flatten(0, 1)


def placements(mesh: Mesh, x: Tensor) -> Iterator[Sharded]:
    """Each mesh axis splits one of the dimensions, or nothing, or leaves a partial sum."""
    for where in itertools.product((0, 1, "replicated", "partial"), repeat=2):
        placed = replicate(mesh, x)
        for axis, at in zip(mesh.axes, where, strict=True):
            if isinstance(at, int):
                placed = placed.split(at, (*placed.dims[at], axis))
            elif at == "partial":
                shares = [(0.375, 0.625)[i] for i in mesh.at((axis,)).parts]  # exact in binary
                parts = [part * share for part, share in zip(placed.local.parts, shares, strict=True)]
                placed = Sharded(Local(mesh, parts), placed.dims, (*placed.partial, axis))
        yield placed


@pytest.mark.parametrize("form", FORMS)
def test_a_rule_is_exact_or_refuses(form):
    count, f = FORMS[form]
    mesh = Mesh({"a": 2, "b": 2}, {"first": "a", "last": "b", "both": ("a", "b")})
    inputs = [torch.randn(SHAPE, dtype=torch.float64) for _ in range(count)]
    want, exact = f(*inputs), 0
    for placed in itertools.product(*(placements(mesh, x) for x in inputs)):
        try:
            got = f(*placed)
        except ShardingError:
            continue
        assert torch.allclose(got.whole(), want, rtol=1e-12, atol=1e-12), placed
        exact += any(x.used for x in placed)
    assert exact >= 4


def test_every_rule_is_tried():
    tried = " ".join(FORMS) + " silu gelu sigmoid clamp float double rmul rsub"
    assert {name for name in RULES if name not in tried} == {"shard_map"}
