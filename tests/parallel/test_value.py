"""Global values: what they do by themselves, what they refuse, and what they say then."""

import inspect
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kimi_graph import ops
from kimi_graph.compile.sharded import ShardedCapture, capture_on, check
from kimi_graph.errors import ShardingError
from kimi_graph.parallel import Mesh, Rules, constrain
from kimi_graph.parallel.collectives import own_index
from kimi_graph.parallel.value import Sharded

MESH = Mesh.parse("dp=2,tp=3,ep=3")
RULES = Rules.of(MESH, {"batch": "data", "token": ("data", "tensor"), "heads": "tensor", "embed": None})
ROWS = "batch embed"


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def pending() -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments whose product is pending over `tensor`."""
    return {"x": normal(12, 6), "w": normal(6, 5)}, {"x": "batch heads", "w": "heads embed"}


def issued(piece: ShardedCapture) -> list[str]:
    return [str(c) for c in piece.collectives]


def test_a_product_over_a_split_dimension_is_summed_where_it_leaves():
    piece = check(RULES, lambda x, w: {"y": x @ w}, *pending(), {"y": ROWS})
    assert issued(piece) == ["all_reduce tensor [6, 5] float64"]


def test_a_pending_sum_is_taken_once_however_often_it_is_used():
    def f(x, w):
        y = x @ w
        return {"y": y.relu() * y.sigmoid() + y}

    assert len(check(RULES, f, *pending(), {"y": ROWS}).collectives) == 1


def test_pending_sums_that_are_added_are_one_sum():
    def f(x, w):
        return {"y": ((x @ w) + 2 * (x.exp() @ w).flatten().unflatten(0, (-1, 5)) - (x @ -w)).clamp(min=0)}

    assert len(check(RULES, f, *pending(), {"y": ROWS}).collectives) == 1


def test_a_pending_sum_and_a_whole_value_are_added_after_the_sum():
    args, axes = pending()
    args, axes = args | {"z": normal(12, 5)}, axes | {"z": ROWS}
    assert len(check(RULES, lambda x, w, z: {"y": x @ w + z}, args, axes, {"y": ROWS}).collectives) == 1


def test_a_pending_sum_that_ends_up_split_is_a_reduce_scatter():
    piece = check(RULES, lambda x, w: {"y": x @ w}, *pending(), {"y": "token embed"})
    assert issued(piece) == ["reduce_scatter tensor [6, 5] float64"]


def test_a_pending_sum_that_ends_up_split_over_more_is_taken_and_sliced():
    rules = RULES.changed(wide=("tensor", "data"), batch=None)
    args, axes = pending()
    piece = check(rules, lambda x, w: {"y": x @ w}, args, axes, {"y": "wide embed"})
    assert issued(piece) == ["all_reduce tensor [12, 5] float64"]


def test_a_sum_that_was_taken_already_is_only_sliced():
    def f(x, w):
        y = x @ w
        return {"z": y.relu(), "y": constrain(y, "token", None)}

    piece = check(RULES, f, *pending(), {"z": ROWS, "y": "token embed"})
    assert issued(piece) == ["all_reduce tensor [6, 5] float64"]


def test_what_is_whole_is_sliced_without_a_collective():
    args, axes = {"x": normal(12, 6), "w": normal(6, 5)}, {"x": "batch embed", "w": "heads embed"}
    piece = check(RULES, lambda x, w: {"y": torch.einsum("bh,hd->bd", x, w)}, args, axes, {"y": ROWS})
    assert issued(piece) == ["all_reduce tensor [6, 5] float64"]
    targets = [str(n.target) for n in piece.captured.module.graph.nodes]
    assert "kimi.own_slice.default" in targets


def test_only_constrain_gathers():
    args = {"x": normal(12, 6)}
    piece = check(RULES, lambda x: {"y": constrain(x, "batch", None)}, args, {"x": "token embed"}, {"y": ROWS})
    assert issued(piece) == ["all_gather tensor [2, 6] float64"]


@pytest.mark.parametrize("before, after", [("heads embed", "embed heads"), ("token embed", "batch heads")])
def test_a_split_that_goes_to_another_dimension_is_an_all_to_all(before, after):
    f = lambda x: {"y": constrain(x, *after.split())}  # noqa: E731
    piece = check(RULES, f, {"x": normal(12, 6)}, {"x": before}, {"y": after})
    assert [c.name for c in piece.collectives] == ["all_to_all"]


def test_a_graph_knows_no_rank_and_costs_the_same_for_every_mesh():
    def f(x, w):
        return {"y": F.silu(x @ w)}

    def trace(text: str) -> list[str]:
        mesh = Mesh.parse(text)
        rules = Rules.of(mesh, {"batch": "data", "heads": "tensor", "embed": None})
        args, axes = {"x": meta(1024, 1024), "w": meta(1024, 5)}, {"x": "batch heads", "w": "heads embed"}
        return [str(n) for n in capture_on(rules, f, args, axes, {"y": ROWS}).captured.module.graph.nodes]

    assert trace("dp=2,tp=2") == trace("dp=128,tp=32")


def line_of(f: Any, text: str) -> str:
    lines, first = inspect.getsourcelines(f)
    return f"test_value.py:{first + next(i for i, line in enumerate(lines) if text in line)}"


def test_a_collective_is_said_to_be_of_the_line_that_left_the_sum_pending():
    def f(x, w):
        y = x @ w  # here
        return {"y": y.flatten().exp().unflatten(0, (-1, 5))}

    args, axes = pending()
    piece = capture_on(RULES, f, {n: meta(*x.shape) for n, x in args.items()}, axes, {"y": ROWS})
    assert [c.source for c in piece.collectives] == [line_of(f, "# here")]


def refusal(f: Any, *axes: str, shape: tuple[int, ...] = (12, 6)) -> str:
    names = [f"x{i}" for i in range(len(axes))]
    with pytest.raises(ShardingError) as error:
        capture_on(
            RULES, lambda **x: {"y": f(*x.values())}, {n: meta(*shape) for n in names},
            dict(zip(names, axes, strict=True)), {"y": "_ _"},
        )  # fmt: skip
    return str(error.value)


def test_an_error_names_line_values_reason_and_remedy():
    def f(x):
        return x.softmax(-1)

    assert refusal(f, "batch heads") == (
        f"{line_of(f, 'softmax')}: softmax([12@data, 6@tensor], -1): it works along dimension 1 of [12@data, 6@tensor],"
        " which is split over tensor; constrain(x, ...) gathers it, shard_map lets you write the distributed form."
    )


@pytest.mark.parametrize(
    "f, axes, message",
    [
        (lambda x, y: x + y, ("batch _", "heads _"), r"is split over data, and has to be over tensor|over data"),
        (lambda x: torch.kthvalue(x, 1)[0], ("batch _",), r"no sharding rule"),
        (lambda x: x.add_(1), ("batch _",), r"no sharding rule"),
        (lambda x: x.squeeze(), ("batch _",), r"does not know this form: missing a required argument: 'dim'"),
        (lambda x: constrain(x, None), ("batch _",), r"constrain\(\[12@data, 6\], None\): 1 axes"),
        (lambda x: F.silu(x, inplace=True), ("batch _",), r"never written in place"),
        (lambda x: x if x.sum() else -x, ("batch _",), r"truth of \[\]\+data is not known"),
        (lambda x: x.flatten(), ("_ heads",), r"dimension 1 of .* may not be merged into the one before"),
        (lambda x: x.unflatten(0, (3, 4)), ("batch _",), r"3, the first part of dimension 0 .* not divisible by data"),
        (lambda x: x[3:5], ("batch _",), r"works along dimension 0"),
        (lambda x: x[torch.zeros(3, dtype=torch.int64)], ("batch _",), r"use gather for tensors"),
        (lambda x: torch.einsum("ab,ab->", x, x), ("batch heads",), None),
        (lambda x, y: torch.einsum("ab,cd->", x, y), ("batch _", "batch _"), r"uses a mesh axis twice \(data\)"),
        (lambda x: torch.einsum("...b->b...", x), ("batch _",), r"name every dimension"),
        (lambda x: constrain(x, "batch"), ("batch _",), r"1 axes for the 2 dimensions"),
        (lambda x: constrain(x, "stage", None), ("batch _",), r"'stage' has no rule"),
        (lambda x: ops.l2_norm(x, 1e-6), ("_ heads",), r"'d' of .* is split over \('tensor',\)"),
        (lambda x, y: x.to(y), ("batch _", "batch _"), r"say the dtype"),
        (lambda x, y: x.max(y), ("batch _", "batch _"), r"use torch.maximum"),
    ],
)
def test_what_is_not_exact_by_itself_is_refused(f, axes, message):
    if message is not None:
        assert re.search(message, refusal(f, *axes))


def test_an_input_that_does_not_divide_is_refused_by_name():
    with pytest.raises(ShardingError, match="x: axis 'heads' has size 7, not divisible by tensor = 3"):
        capture_on(RULES, lambda x: {"y": x}, {"x": meta(7)}, {"x": "heads"}, {"y": "heads"})


def test_an_input_of_another_rank_than_its_axes_is_refused():
    with pytest.raises(ShardingError, match="x: 2 axes 'heads _' for the 1 dimensions"):
        capture_on(RULES, lambda x: {"y": x}, {"x": meta(6)}, {"x": "heads _"}, {"y": "heads"})


def test_a_value_prints_its_sizes_and_where_they_are():
    x = Sharded(RULES, meta(6, 2, 5), [("data",), ("tensor",), ()])
    assert str(x) == "[12@data, 6@tensor, 5]"
    assert str(Sharded(RULES, meta(2, 5), [("data", "tensor"), ()])) == "[12@data*tensor, 5]"
    assert str(Sharded(RULES, meta(5), [()], ["tensor", "data"])) == "[5]+data+tensor"
    assert (x.shape, x.ndim, x.size(0), x.dim(), len(x), x.numel()) == (torch.Size([12, 6, 5]), 3, 12, 3, 12, 360)


@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda x: x.like(x.local + own_index(("tensor",)), x.dims), r"ranks 0 and 1 should hold the same \[6, 6\]"),
        (lambda x: x.like(x.local * 2, x.dims), r"y: on the mesh dp=2,tp=3,ep=3 it differs by .* of the largest value"),
        (
            lambda x: x.float(),
            r"y: torch.float32 \[12, 6\] on the mesh dp=2,tp=3,ep=3, torch.float64 \[12, 6\] without",
        ),
    ],
)
def test_a_wrong_layer_is_noticed_by_check(wrong, message):
    def f(x):
        return {"y": wrong(x) if isinstance(x, Sharded) else x}

    with pytest.raises(ShardingError, match=message):
        check(RULES, f, {"x": normal(12, 6)}, {"x": ROWS}, {"y": ROWS})
