"""Work of traced parts in closed form, the law of a prefill, and work memory against compiled graphs."""

import functools

import pytest

from kimi_graph.compile.cost import STRUCTURE, _size, _trace
from kimi_graph.compile.driver import Clock, Request, build_all
from kimi_graph.compile.targets import target
from kimi_graph.compile.view import Edge, View, view
from kimi_graph.parallel import Mesh
from kimi_graph.plan.buffers import LOWERING, full_ledger
from kimi_graph.plan.estimate import Spent, bucket_at, decode, machine, prefill, step, traced, workspace
from kimi_graph.plan.factors import Factors
from kimi_graph.read_config import load_config
from tests.plan.test_ledger import small_request


@functools.cache
def k3(name: str = "kimi-k3", mesh: str = "tp=16", **given) -> Request:
    config = load_config(name)
    given = {"rows": 4, "max_len": 8192, "chunk": 512} | given
    return Request(
        config=config, target=target("a3-superpod"), phases=("prefill", "decode"), mesh=Mesh.parse(mesh), **given
    )


def works(part: str, phase: str = "decode", **given):
    request = k3(**given)
    b = next(b for b in request.buckets() if b.phase == phase)
    return traced(request, b)[part].works


def of(found, name: str):
    return [w for w in found if w.name == name]


def test_a_kda_step_reads_and_writes_the_memory_of_its_rows():
    (w,) = of(works("kda"), "kda_step")
    assert w.states == 2 * 4 * 6 * 128 * 128 * 4  # rows x heads of a rank x V x K x bytes


def test_attention_of_a_step_reads_the_cache_once():
    (w,) = of(works("mla"), "latent_attention")
    assert w.states == 4 * 8192 * 576 * 2
    assert w.cube == 2 * 4 * 6 * 8192 * (2 * 512 + 64)


def test_index_scores_grow_with_queries_and_with_what_is_cached():
    (w,) = of(works("mla", "prefill", name="kimi-k3.1-pro"), "select_keys")
    assert w.cube == 2 * 4 * (512 // 16) * 8192 * 32 * 128  # the queries of a rank


def test_caches_in_8_bits_are_read_as_such():
    given = {"name": "deepseek-v3.2", "max_len": 8192}
    (plain,), (packed,) = (
        of(works("mla", **given, kv_dtype=kv), name)
        for kv, name in (("bf16", "sparse_attention"), ("int8", "quantised_sparse_attention"))
    )
    assert plain.states == 4 * 2048 * 576 * 2 and packed.states == 4 * 2048 * (512 + 2 * 64 + 4 * 4)


def test_products_of_a_mixer_are_those_of_its_weights():
    found = of(works("kda", "prefill"), "matmul")
    weights = sum(w.weights for w in found) / 2
    assert sum(w.cube for w in found) == pytest.approx(2 * 4 * 512 * weights, rel=0.01)  # b_proj has 6 columns


def test_rows_of_experts_are_those_that_come_not_those_there_is_room_for():
    found = of(works("moe", "prefill"), "grouped_matmul")
    rows = 4 * 512 * 16 / 16  # rows x experts of a row, shared out over 16 ranks
    assert sum(w.cube for w in found) == pytest.approx(2 * rows * 3 * 3584 * 3072)
    assert all(w.experts for w in found)


def test_a_prefill_by_the_law_takes_as_long_as_its_steps():
    request, f = k3(name="kimi-k3.1-pro"), Factors()
    p = prefill(request, f)
    count = request.max_len // request.chunk
    total = 0.0
    for i in range(count):
        b = bucket_at(request, "prefill", rows=1, tokens=512, context=max((i + 1) * 512, 2048 + 128))
        total += step(request, b, traced(request, b), machine(request, f, b)).slowest
    assert p.seconds(request.max_len) == pytest.approx(total + p.fill, rel=0.05)  # nodes change what binds them


def test_both_terms_of_a_prefill_are_equal_where_it_says():
    p = prefill(k3(name="kimi-k3.1-pro"), Factors())
    assert p.b > 0 and p.a * p.equal == pytest.approx(p.b * p.equal**2)
    assert prefill(k3(name="kimi-linear-48b", max_len=4096), Factors()).b >= 0


def test_pictures_cost_less_when_the_tower_works_ahead():
    request = Request(config=load_config("kimi-k3"), target=target("a3"), phases=("vision", "prefill", "decode"),
                      mesh=Mesh.parse("tp=16"), max_len=8192)  # fmt: skip
    p = prefill(request, Factors())
    for images in (1, 8, 64):
        first, ahead = p.with_images(2048, images)
        assert p.seconds(2048) < ahead <= first
    assert p.image_tokens == 1024


def test_decode_takes_longer_with_more_sequences_and_longer_ones_and_when_experts_are_uneven():
    f = Factors()
    base = decode(k3(), f)
    assert decode(k3(), f, rows=32).seconds > base.seconds
    assert decode(k3(), f, context=65_536).seconds > base.seconds
    assert base.even.seconds <= base.median.seconds <= base.high.seconds


def test_what_binds_a_step_is_what_it_spends_most_on():
    assert Spent({"memory": 2.0, "launches": 1.0}).bound == "memory"
    assert decode(k3(), Factors(memory=0.01)).median.spent.bound == "memory"
    assert decode(k3(), Factors(launch_us=1000.0)).median.spent.bound == "launches"


def test_stages_are_passed_one_after_another_and_idle_with_one_batch():
    d = decode(k3(mesh="pp=4,tp=16"), Factors())
    assert len(d.median.stages) == 4 and d.idle == 0.75
    assert d.seconds > 3 * d.median.slowest


# ---- work memory -----------------------------------------------------------------------------------------------------


def peak(graph: View) -> int:
    """Most bytes of live tensors of a GE graph in its order; inputs, weights and states aside."""
    origin: dict[Edge, Edge] = {}
    for node in graph.order:
        _trace(node, origin)
    held, last = {}, {}
    for at, node in enumerate(graph.order):
        for index, desc in enumerate(node.outs):
            if (edge := Edge(node.name, index)) not in origin and node.type not in STRUCTURE:
                held[edge], last[edge] = _size(desc), at
        for edge in filter(None, node.inputs):
            last[origin.get(edge, edge)] = at
    live = most = 0
    for at, node in enumerate(graph.order):
        live += sum(size for edge, size in held.items() if edge.node == node.name)
        most = max(most, live)
        live -= sum(size for edge, size in held.items() if last[edge] == at)
    return most


@pytest.mark.parametrize(
    "name, mesh, options",
    [("kimi-linear-48b", "tp=2", {}), ("kimi-k3.1-pro", "tp=2", {}), ("kimi-k3", "dp=2,tp=2", {"exchange": True})],
    ids=str,
)
def test_activations_of_the_traced_graph_are_those_of_the_compiled_one(host, name, mesh, options):
    request = small_request(name, mesh, options)
    for b in request.buckets():
        (graph,) = build_all(request, b, host, Clock())
        (sizes,) = workspace(request, b, traced(request, b)).values()
        compiled, planned = peak(view(graph.model.graph[0])), sum(sizes)
        up, down = LOWERING
        assert 0.85 * planned < compiled < planned * up / down  # lowering pads, casts, and views less


def test_a_full_ledger_has_a_line_for_everything_that_is_in_a_die():
    request = k3(name="kimi-k3.1-pro", mesh="pp=2,tp=16")
    for stage in full_ledger(request, Factors()).stages:
        parts = {line.part for line in stage.lines if line.kind == "buffers"}
        assert parts == {"AttnRes and hidden", "workspace", "index scratch", "layout", "HCCL", "runtime"}
        assert stage.total == stage.of("weights") + stage.of("states") + stage.of("buffers")
