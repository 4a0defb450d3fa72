"""Bodies of `shard_map`: explicit collectives by logical axis are exact, and forgotten or doubled ones are refused."""

from typing import Any

import pytest
import torch

from kimi_graph.compile.sharded import capture_on, check
from kimi_graph.errors import ShardingError
from kimi_graph.parallel import Mesh, Rules, constrain, shard_map, summand
from kimi_graph.parallel.annotate import (
    all_gather,
    all_reduce,
    all_to_all,
    local_ids,
    own_index,
    own_slice,
    reduce_scatter,
    ways,
)

MESH = Mesh.parse("dp=2,tp=3,ep=3")


def rules(**changed: Any) -> Rules:
    plain = {"batch": "data", "heads": "tensor", "cached": None, "experts": "tensor", "token": ("data", "tensor")}
    return Rules.of(MESH, plain | changed)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


# ---- attention to a cache that is split by sequence: a maximum and a sum over its parts ------------------------------

QUERY, CACHE = ("batch", "heads", None), ("batch", "cached", None)


def merged(q_BHK: Any, cache_BCK: Any) -> Any:
    """Attention of a step's query to the cached rows, by this device's part of them."""
    score_BHC = torch.einsum("bhk,bck->bhc", q_BHK, cache_BCK)
    peak_BH1 = all_reduce(score_BHC.amax(-1, keepdim=True), "cached", op="max")
    share_BHC = (score_BHC - peak_BH1).exp()
    read_BHK = torch.einsum("bhc,bck->bhk", share_BHC, cache_BCK)
    both = all_reduce(torch.cat([read_BHK, share_BHC.sum(-1, keepdim=True)], -1), "cached")
    return both[..., :-1] / both[..., -1:]


def attend(body: Any = merged, heads: str | None = "heads") -> Any:
    query = ("batch", heads, None)
    return lambda q, c: {"o": shard_map(body, (query, CACHE), query)(q, c)}


def run(body: Any, r: Rules, heads: str | None = "heads") -> Any:
    args = {"q": normal(4, 6, 5), "c": normal(4, 12, 5)}
    axes = {"q": f"batch {heads or '_'} _", "c": "batch cached _"}
    return check(r, attend(body, heads), args, axes, {"o": axes["q"]})


@pytest.mark.parametrize("r", [rules(), rules(heads=None, cached="tensor"), rules(batch=None, cached="data")])
def test_a_cache_may_be_split_by_sequence_by_rule_alone(r):
    piece = run(merged, r)
    assert len(piece.collectives) == (2 if r.on("cached") else 0)
    assert all(c.axes == r.on("cached") for c in piece.collectives)


def test_a_body_computes_the_plain_algorithm_without_a_mesh():
    q, c = normal(4, 6, 5), normal(4, 12, 5)
    want = torch.einsum("bhk,bck->bhc", q, c).softmax(-1) @ c
    torch.testing.assert_close(attend()(q, c)["o"], want, rtol=1e-12, atol=1e-12)


def test_a_forgotten_sum_is_refused():
    def forgets(q, c):
        return torch.einsum("bhc,bck->bhk", torch.einsum("bhk,bck->bhc", q, c), c)

    with pytest.raises(ShardingError, match=r"result .* is not the same along cached, .* is a summand missing"):
        run(forgets, rules(heads=None, cached="tensor"))


def test_a_sum_taken_twice_is_refused():
    """Public case K8, its companion."""

    def twice(q, c):
        return all_reduce(all_reduce(torch.einsum("bhk,bck->bhk", q, c), "cached"), "cached")

    with pytest.raises(ShardingError, match="is the same along cached; was it summed or gathered there before"):
        run(twice, rules(heads=None, cached="tensor"))


def test_a_sum_over_one_logical_axis_does_not_mix_another_on_its_mesh_axis():
    with pytest.raises(ShardingError, match="also varies by 'heads', on the same mesh axis as cached"):
        run(merged, rules(cached="tensor"))


def test_the_names_of_the_mesh_axes_alone_would_not_tell():
    run(merged, rules(cached="tensor", heads="tensor"), heads=None)  # the query's heads are whole here: legal


# ---- the other collectives -------------------------------------------------------------------------------------------


def test_a_gather_is_the_concatenation_and_a_reduce_scatter_the_part_of_the_sum():
    def body(x, w):
        y = torch.einsum("bh,hd->bd", x, w)  # a summand, of all rows of this rank
        return reduce_scatter(y, "heads", 0) + 0 * all_gather(x, "heads", 1).sum()

    def f(x, w):
        if isinstance(x, torch.Tensor):
            return {"y": x @ w}
        return {"y": shard_map(body, (("batch", "heads"), ("heads", None)), ("token", None))(x, w)}

    args, axes = {"x": normal(12, 6), "w": normal(6, 5)}, {"x": "batch heads", "w": "heads _"}
    piece = check(rules(), f, args, axes, {"y": "token _"})
    assert [c.name for c in piece.collectives] == ["reduce_scatter", "all_gather"]


def test_rows_go_to_their_experts_and_come_back():
    """Every device sends each expert the same rows; its own expert scales what it gets."""

    def body(x, scale):
        sent = all_to_all(x, "experts", 0, 1)  # [experts, rows, D] -> [1, ways * rows, D]
        return all_to_all(sent * scale[:, None, None], "experts", 1, 0)

    def f(x, scale):
        axes = (None, "token", None)
        return {"y": shard_map(body, (axes, ("experts",)), axes)(x, scale)}

    args, axes = {"x": normal(3, 12, 5), "scale": normal(3)}, {"x": "_ token _", "scale": "experts"}
    piece = check(rules(), f, args, axes, {"y": "_ token _"})
    assert [(c.name, c.shape) for c in piece.collectives] == [("all_to_all", (3, 2, 5)), ("all_to_all", (1, 6, 5))]


def test_a_device_knows_its_place_and_its_part():
    def body(x, whole):
        assert ways(x, "heads") in (1, 3)
        first = own_index(x, "heads", times=2)
        return x + own_slice(whole, "heads", 0) + first * (ways(x, "heads") > 1)

    def f(x, whole):
        if isinstance(x, torch.Tensor):
            return {"y": x + whole + torch.arange(6) // 2 * 2}
        return {"y": shard_map(body, (("heads",), (None,)), ("heads",))(x, whole)}

    check(rules(), f, {"x": normal(6), "whole": normal(6)}, {"x": "heads", "whole": "_"}, {"y": "heads"})


def test_own_ids_come_first_and_the_others_follow():
    def body(ids, table):
        own = local_ids(ids, "experts", len(table))
        mine = own < len(table)
        rows = torch.einsum("ne,ed->nd", (own[:, None] == torch.arange(len(table), device=ids.device)).double(), table)
        return summand(rows * mine[:, None], "experts")

    def f(ids, table):
        return {"y": shard_map(body, ((None,), ("experts", None)), (None, None))(ids, table)}

    args, axes = {"ids": torch.tensor([0, 5, 3, 3, 1]), "table": normal(6, 4)}, {"ids": "_", "table": "experts _"}
    piece = check(rules(), f, args, axes, {"y": "_ _"})
    assert [str(c) for c in piece.collectives] == ["all_reduce tensor [5, 4] float64"]


def test_everything_a_body_may_say_is_the_identity_without_a_mesh():
    x = normal(4, 6)
    for same in (
        all_reduce(x, "heads"), all_gather(x, "heads", 0), reduce_scatter(x, "heads", 0), own_slice(x, "heads", 1),
        all_to_all(x, "heads", 0, 1), local_ids(x, "heads", 3), summand(x, "heads"),
    ):  # fmt: skip
        assert same is x
    assert ways(x, "heads") == 1
    assert own_index(x, "heads", times=3) == 0


def test_an_axis_that_is_not_split_needs_no_collective():
    r = rules(heads=None)
    same = lambda x: all_to_all(all_gather(all_reduce(x, "heads"), "heads", 0), "heads", 0, 1)  # noqa: E731
    piece = check(
        r, lambda x: {"y": shard_map(same, (("heads",),), ("heads",))(x)}, {"x": normal(6)}, {"x": "heads"},
        {"y": "heads"},
    )  # fmt: skip
    assert piece.collectives == []


@pytest.mark.parametrize(
    "body, message",
    [
        (lambda x: summand(x, "heads") * 2, "a summand is the last thing that a body says"),
        (lambda x: summand(x, "experts"), "is the same along experts"),
        (lambda x: x.sum(), r"a result <\[\] by heads> for the axes"),
        (lambda x: torch.zeros(6), "a result tensor"),
        (lambda x: (x, x), "2 results, but axes of 1"),
    ],
)
def test_a_body_that_says_something_wrong_is_refused(body, message):
    axes = {"x": "heads"}
    with pytest.raises(ShardingError, match=message):
        capture_on(
            rules(), lambda x: {"y": shard_map(body, (("heads",),), ("heads",))(x)},
            {"x": torch.empty(6, device="meta")}, axes, {"y": "heads"},
        )  # fmt: skip


def test_a_global_value_is_not_taken_from_around_a_body():
    def f(x):
        return {"y": shard_map(lambda part: part + x, (("heads",),), ("heads",))(x)}

    with pytest.raises(ShardingError, match="has to be an argument of the shard_map"):
        capture_on(rules(), f, {"x": torch.empty(6, device="meta")}, {"x": "heads"}, {"y": "heads"})


def test_what_a_factory_makes_varies_by_nothing():
    def body(x):
        return x + x.new_ones(2) + torch.zeros_like(x)

    def f(x):
        return {"y": shard_map(body, (("heads",),), ("heads",))(x) if not isinstance(x, torch.Tensor) else x + 1}

    check(rules(), f, {"x": normal(6)}, {"x": "heads"}, {"y": "heads"})


# ---- sums that wait --------------------------------------------------------------------------------------------------


def waiting(late: bool, then: Any) -> Any:
    """A summand of each device along `cached`, and what is computed with it afterwards."""

    def body(x):
        return summand(x.sum(1), "cached", late=late)

    def f(x, w):
        return {"y": then(shard_map(body, (("batch", "cached", "heads"),), ("batch", "heads"))(x), w)}

    return f


def project(x: Any, w: Any) -> Any:
    return torch.einsum("bh,hd->bd", x * torch.sigmoid(w).sum(1), w)


@pytest.mark.parametrize("late", [False, True])
def test_a_sum_that_may_wait_is_taken_with_the_one_that_follows_it(late):
    r = Rules.of(Mesh.parse("cp=2,tp=3"), {"batch": None, "heads": "tensor", "cached": "context"})
    args, axes = {"x": normal(4, 8, 6), "w": normal(6, 5)}, {"x": "batch cached heads", "w": "heads _"}
    piece = check(r, waiting(late, project), args, axes, {"y": "batch _"})
    each = ["all_reduce context [4, 2] float64", "all_reduce tensor [4, 5] float64"]
    assert [str(c) for c in piece.collectives] == (["all_reduce context,tensor [4, 5] float64"] if late else each)


@pytest.mark.parametrize(
    "then, taken",
    [
        (lambda x, w: x * x, 1),  # a product of two sums is no sum of products
        (lambda x, w: torch.einsum("bh,ch->bc", x, x), 1),
        (lambda x, w: torch.exp(x) + x, 1),
        (lambda x, w: (x * 2) * w[:, 0], 1),
        (lambda x, w: x + w[:, 0], 1),  # what is added is added once
    ],
)
def test_a_sum_that_may_wait_is_taken_before_what_is_not_linear_in_it(then, taken):
    r = Rules.of(Mesh.parse("cp=2"), {"batch": None, "heads": None, "cached": "context"})
    args, axes = {"x": normal(4, 8, 6), "w": normal(6, 5)}, {"x": "batch cached heads", "w": "heads _"}
    out = {"y": "batch _"}
    assert len(check(r, waiting(True, then), args, axes, out).collectives) == taken


def test_a_sum_that_waits_may_be_scattered_in_part():
    r = Rules.of(
        Mesh.parse("cp=2,tp=3"), {"batch": None, "heads": None, "cached": ("context", "tensor"), "own": "tensor"}
    )

    def then(x, w):
        return torch.einsum("bh,hd->bd", constrain(x, None, "own"), constrain(w, "own", None))

    args, axes = {"x": normal(4, 12, 6), "w": normal(6, 5)}, {"x": "batch cached heads", "w": "_ _"}
    piece = check(r, waiting(True, then), args, axes, {"y": "batch _"})
    names = [(c.name, c.axes) for c in piece.collectives]
    assert names == [("reduce_scatter", ("tensor",)), ("all_reduce", ("context", "tensor"))]


def test_a_dimension_may_be_split_by_two_logical_axes():
    """Pages are split by the rows that own them and by stretches: a sum over the stretches does not mix rows."""
    r = Rules.of(Mesh.parse("dp=2,cp=3"), {"batch": "data", "cached": "context", "pages": ("data", "context")})

    def body(x, y):
        return x + all_reduce(x.sum(), "cached") + y, y

    def f(x, y):
        if isinstance(x, torch.Tensor):
            return {"x": x + x.view(2, -1).sum(1).repeat_interleave(6) + y.repeat_interleave(6)}
        pool = (("batch", "cached"),)
        return {"x": shard_map(body, (pool, ("batch",)), (pool, ("batch",)))(x, y)[0]}

    check(r, f, {"x": normal(12), "y": normal(2)}, {"x": "pages", "y": "batch"}, {"x": "pages"})
