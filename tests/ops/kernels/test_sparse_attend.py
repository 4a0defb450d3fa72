"""SparseAttend on the twin is the reference `sparse_attention_lse`: any selection, any heads, packed rows."""

import math

import pytest
import torch

from kimi_graph import ops
from kimi_graph.errors import KernelError
from kimi_graph.ops import NO_SCORE
from kimi_graph.ops.twin import ARCHES, Kernel

BF16, F16 = torch.bfloat16, torch.float16
EPS = {BF16: 2**-8, F16: 2**-11}  # half of the last place, of what is rounded to nearest
LSE = 1e-5  # of its size: scores are float32 sums, in another order
SCALE = 192**-0.5


@pytest.fixture(scope="module")
def kernel(twin_cache):
    return Kernel("sparse_attend", twin_cache)


def made(lengths, counts, heads, room, latent=512, rope=64, page=16, dtype=BF16, tokens=None, empty=0.1):
    """Rows of some lengths, of which the last `counts` tokens ask. Positions are any, some of them after the query."""
    batch, tokens = len(lengths), max(1, *counts) if tokens is None else tokens
    pages = max(1, -(-max(lengths) // page))
    table = torch.randint(-9, 1 << 20, (batch, pages))  # what is past a sequence's end may be anything
    free = torch.randperm(sum(-(-n // page) for n in lengths) + 1).tolist()
    for row, length in enumerate(lengths):
        for i in range(-(-length // page)):
            table[row, i] = free.pop()
    selected = torch.full((batch, tokens, room), -1)
    for row, length in enumerate(lengths):
        for t in range(tokens):
            some = torch.randperm(max(1, length))[:room]
            selected[row, t, : len(some)] = some
    selected[torch.rand(selected.shape) < empty] = -1
    pool = int(sum(-(-n // page) for n in lengths)) + 1

    def rand(*shape):
        return torch.randn(*shape).to(dtype)

    return {
        "q": rand(batch, tokens, heads, latent),
        "q_rope": rand(batch, tokens, heads, rope),
        "latent": rand(pool, page, 1, latent),
        "rope": rand(pool, page, 1, rope),
        "selected": selected.int(),
        "block_table": table.int(),
        "lengths": torch.tensor(lengths),
        "counts": torch.tensor(counts),
    }


def reference(values, scale=SCALE):
    """In float32, of the same numbers: what the kernel rounds beyond is told by the tolerance."""
    wide = {n: x.float() if x.is_floating_point() else x for n, x in values.items()}
    pools = (wide["latent"][:, :, 0], wide["rope"][:, :, 0])
    rows = (wide["selected"], wide["block_table"], wide["lengths"], wide["counts"])
    return ops.sparse_attention_lse(wide["q"], wide["q_rope"], *pools, *rows, scale)


def compare(run, values, scale=SCALE):
    """Each weight is rounded, and the result: an error of that share of the largest latent, and of the result."""
    o, lse = reference(values, scale)
    eps, most = EPS[values["q"].dtype], values["latent"].float().abs().max().item()
    torch.testing.assert_close(run.outputs["o"].float(), o, rtol=eps, atol=eps * most)
    torch.testing.assert_close(run.outputs["lse"], lse, rtol=LSE, atol=LSE)


# every combination is a library to build: another type on one chip
@pytest.mark.parametrize("arch, dtype", [(2201, BF16), (3510, BF16), (2201, F16)], ids=str)
@pytest.mark.parametrize(
    "lengths, counts, heads, room",
    [
        ([1], [1], 1, 1),
        ([700], [1], 12, 700),
        ([40, 700, 0, 3], [3, 2, 0, 3], 3, 100),
        (list(range(1, 34)), [1] * 33, 5, 40),
        ([385, 193], [1, 1], 7, 390),
        ([300], [2], 33, 220),
    ],
    ids=str,
)
def test_it_is_the_references(lengths, counts, heads, room, dtype, arch, kernel):
    values = made(lengths, counts, heads, room, dtype=dtype)
    compare(kernel.run(values, {"scale": SCALE}, arch=arch), values)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize(
    "heads, latent, rope, page, room",
    [(1, 16, 16, 1, 9), (2, 48, 32, 5, 50), (3, 128, 64, 128, 200), (16, 144, 48, 16, 64), (128, 512, 64, 32, 90)],
    ids=str,
)
def test_smaller_and_the_largest_sizes_are_the_references(heads, latent, rope, page, room, arch, kernel):
    values = made([77, 30], [2, 1], heads, room, latent, rope, page)
    compare(kernel.run(values, {"scale": 0.3}, arch=arch), values, 0.3)


@pytest.mark.parametrize("room", [15, 16, 17, 128, 129, 191, 192, 193, 384, 385, 512, 513])
@pytest.mark.parametrize("heads", [3, 12])
def test_selections_that_just_fill_a_fractal_a_tile_a_block_or_a_list_are_the_references(heads, room, kernel):
    values = made([room + 7], [1], heads, room, 32, 16, empty=0.0)
    for cores in (2, 48):  # by one group of cores, and in parts by several
        compare(kernel.run(values, {"scale": 0.2}, cores=cores), values, 0.2)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("heads, cores, groups", [(1, 10, 5), (3, 48, 10), (12, 48, 8), (33, 12, 3)])
def test_few_queries_are_shared_out_and_joined(heads, cores, groups, arch, kernel):
    values = made([1400, 1390], [1, 1], heads, 1380, page=128, empty=0.3)
    values["selected"][1, 0, 200:] = -1  # most parts have nothing
    run = kernel.run(values, {"scale": SCALE}, arch=arch, cores=cores)
    compare(run, values)
    assert run.cores >= groups


def test_a_query_without_a_key_is_nothing_in_parts_too(kernel):
    values = made([900], [2], 3, 800, 32, 16, tokens=4)
    values["selected"][0, 1] = -1
    run = kernel.run(values, {"scale": SCALE})
    assert run.cores > 4
    compare(run, values)
    for token in (1, 2, 3):
        assert not run.outputs["o"][0, token].any() and (run.outputs["lse"][0, token] == NO_SCORE).all()


def test_what_is_not_seen_is_not_read_and_does_not_matter(kernel):
    values = made([50, 20, 9], [4, 1, 0], 3, 30, 64, 16)
    first = kernel.run(values, {"scale": SCALE}).outputs
    dirty = {n: x.clone() for n, x in values.items()}
    read = torch.zeros(len(dirty["latent"]), 16, dtype=torch.bool)
    for row, (length, count) in enumerate(zip(values["lengths"].tolist(), values["counts"].tolist(), strict=True)):
        for t in range(count):
            at = values["selected"][row, t]
            at = at[(at >= 0) & (at <= length - count + t)].long()
            read[values["block_table"][row].long()[at // 16], at % 16] = True
    for pool in ("latent", "rope"):
        dirty[pool][~read] = math.nan
    for query in ("q", "q_rope"):
        dirty[query][1, 1:] = dirty[query][2] = math.nan
    second = kernel.run(dirty, {"scale": SCALE}).outputs
    assert torch.equal(first["o"], second["o"]) and torch.equal(first["lse"], second["lse"])
    assert not first["o"][1, 1:].any() and not first["o"][2].any() and (first["lse"][2] == NO_SCORE).all()


def test_a_row_that_is_no_number_shows_in_the_queries_that_keep_it_alone(kernel):
    values = made([60], [6], 3, 20, 32, 16, empty=0.0)
    values["selected"][0], values["selected"][0, :, :8] = -1, torch.arange(48).view(6, 8)
    page = values["block_table"][0, 1]  # positions 16 to 31: of the third and fourth query
    values["latent"][page] = math.nan
    o = kernel.run(values, {"scale": SCALE}, cores=2).outputs["o"]  # one group of cores: L1 holds what came before
    assert o.isnan().flatten(2).any(2).tolist() == [[False, False, True, True, False, False]]


def test_nothing_selected_gives_zeros_and_no_score(kernel):
    values = made([40, 40], [2, 2], 5, 24, 32, 16)
    values["selected"][0, 0], values["selected"][1] = -1, 39  # the last token; its row's first query does not see it
    run = kernel.run(values, {"scale": SCALE}).outputs
    for row, token in ((0, 0), (1, 0)):
        assert not run["o"][row, token].any() and (run["lse"][row, token] == NO_SCORE).all()
    assert (run["lse"][1, 1] > NO_SCORE).all() and run["o"].isfinite().all()


@pytest.mark.parametrize("size", [1e-3, 30.0], ids=str)
def test_scores_of_any_size_give_numbers(size, kernel):
    values = made([90], [3], 4, 80, 64, 16, dtype=F16)
    values["q"] *= size
    run = kernel.run(values, {"scale": 1.0})
    assert run.outputs["o"].isfinite().all()
    o, lse = reference(values, 1.0)
    torch.testing.assert_close(run.outputs["lse"], lse, rtol=LSE, atol=LSE * max(1.0, size))
    torch.testing.assert_close(run.outputs["o"].float(), o, rtol=2**-9, atol=2**-9 * 5)


@pytest.mark.parametrize("ways", [2, 3])
def test_parts_of_a_selection_are_merged_to_the_whole(ways, kernel):
    values = made([200], [1], 3, 190, 64, 16)
    whole = kernel.run(values, {"scale": SCALE}).outputs
    outs, sums = [], []
    for i in range(ways):
        mine = torch.where(values["selected"] // 16 % ways == i, values["selected"], -1)
        part = kernel.run(values | {"selected": mine}, {"scale": SCALE}).outputs
        outs.append(part["o"].float())
        sums.append(part["lse"])
    weights = torch.stack(sums).softmax(0)
    merged = (torch.stack(outs) * weights[..., None]).sum(0)
    torch.testing.assert_close(torch.stack(sums).logsumexp(0), whole["lse"], rtol=LSE, atol=LSE)
    torch.testing.assert_close(merged, whole["o"].float(), rtol=2**-7, atol=2**-7)  # parts are rounded once more


NAMES = ("q", "q_rope", "latent", "rope", "selected", "block_table", "lengths", "counts", "scale")


@pytest.mark.parametrize("name", NAMES)
def test_every_input_matters(name, kernel):
    values, scale = made([48, 48], [2, 2], 2, 20, 32, 16), 0.2
    first = kernel.run(values, {"scale": scale}).outputs
    changed = {
        "selected": values["selected"].roll(1, 0),
        "block_table": values["block_table"].flip(0),
        "lengths": values["lengths"] - 20,
        "counts": values["counts"] - 1,
    }
    if name == "scale":
        scale = 0.7
    else:
        values[name] = changed.get(name, values.get(name) * 1.5)
    second = kernel.run(values, {"scale": scale}).outputs
    assert any(not torch.equal(first[n], second[n]) for n in first)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("heads", [3, 12])
def test_selected_rows_are_read_once(heads, arch, kernel):
    values = made([700] * 4, [1] * 4, heads, 640, page=128)
    run = kernel.run(values, {"scale": SCALE}, arch=arch, cores=8)
    rows = int((values["selected"] >= 0).sum())
    others = sum(values[n].nbytes for n in ("q", "q_rope", "selected", "block_table", "lengths", "counts"))
    least = rows * (512 + 64) * 2 + others + sum(x.nbytes for x in run.outputs.values())
    assert 1 <= run.counters.bytes / least <= 1.02
    assert (run.counters.bytes + sum(run.counters.workspace)) / least <= 1.3  # and what goes between cores
    more = kernel.run(values, {"scale": SCALE}, arch=arch)  # in parts: each reads the query
    assert more.cores > run.cores
    assert 1 <= more.counters.bytes / least <= 1.1 and more.counters.touched / least <= 1.01


@pytest.mark.parametrize(
    "change", [{"heads": 129}, {"latent": 528}, {"latent": 24}, {"rope": 80}, {"rope": 8}], ids=str
)
def test_sizes_the_kernel_does_not_claim_are_refused(change, kernel):
    sizes = {"heads": 2, "room": 8, "latent": 32, "rope": 16} | change
    with pytest.raises(KernelError, match="SparseAttend: tiling refuses q"):
        kernel.run(made([20], [1], **sizes), {"scale": 1.0})
