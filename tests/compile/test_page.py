"""`inspect --html`: what is drawn is what the bundle says, and the page is one file that loads nothing."""

import json
import random
import re
import time
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from typer.testing import CliRunner

from kimi_graph.cli import app
from kimi_graph.compile import page, picture
from kimi_graph.compile.driver import compile_model
from kimi_graph.compile.inspect import inspect_graph
from kimi_graph.compile.layering import lay_out
from kimi_graph.compile.picture import Box, Figure, Value, family_of
from kimi_graph.compile.targets import target
from kimi_graph.parallel import Mesh
from kimi_graph.read_config import load_config


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """Of a model with every kind of layer, on two stages of two ranks."""
    from kimi_graph.fixture import make_fixture

    folder = tmp_path_factory.mktemp("page")
    config = make_fixture(load_config("kimi-k3.1-pro"), folder / "k31").config
    made = folder / "bundle"
    compile_model(
        config, target=target("a3"), out=made, phases=("prefill", "decode"), batch=1, chunk=64, max_len=512,
        mesh=Mesh.parse("pp=2,tp=2"),
    )  # fmt: skip
    return made


@pytest.fixture(scope="module")
def seen(bundle):
    return picture.picture(bundle)


@pytest.fixture(scope="module")
def text(seen):
    return page.page(seen)


class Elements(HTMLParser):
    """Opening and closing elements match, and every attribute is seen."""

    def __init__(self):
        super().__init__()
        self.open, self.attributes, self.tags = [], [], []

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, *a) for a in attrs]
        self.tags.append(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag != "meta":
            assert self.open.pop() == tag


def parsed(text):
    found = Elements()
    found.feed(text)
    assert not found.open
    return found


def test_the_page_is_whole_and_loads_nothing(text):
    found = parsed(text)
    loading = [a for a in found.attributes if a[1] in ("src", "href", "action", "data", "srcset") and a[2][:1] != "#"]
    assert not loading
    assert not re.search(r"url\(|@import|https?://", text)
    assert "default-src 'none'" in text
    assert not {"link", "iframe", "object", "img", "foreignobject"} & set(found.tags)


def test_every_layer_is_in_the_schedule_and_leads_to_the_graph_of_its_kind(seen):
    titles = {(f.phase, f.title) for f in seen.figures}
    for phase in ("prefill", "decode"):
        cells = [cell for row in seen.rows if row.phase == phase for cell in row.cells]
        assert [c.number for c in cells] == list(range(8))
        assert all((phase, c.figure) in titles for c in cells)
    decode = {c.number: (c.mixer, c.feed) for row in seen.rows if row.phase == "decode" for c in row.cells}
    assert decode[0] == ("KDA", "dense") and decode[1] == ("KDA", "MoE") and decode[2] == ("DSA", "MoE")


def test_a_drawn_layer_has_the_nodes_that_inspect_lists_with_shapes_and_lines(bundle, seen):
    figure = next(f for f in seen.figures if (f.phase, f.title) == ("decode", "KDA + MoE"))
    listed = {n["name"]: n for n in inspect_graph(bundle, "decode").to_json()[figure.graph]}
    own = {name: n for name, n in listed.items() if name.startswith(f"{figure.where}.")}
    drawn = {f"{figure.where}.{b.name}": b for b in figure.boxes if b.type}
    folded = {name for name, n in own.items() if n["type"] in picture.VIEWS}
    assert drawn.keys() == own.keys() - folded and figure.folded == len(folded)
    for name, b in drawn.items():
        assert (b.type, b.source) == (own[name]["type"], own[name]["source"] or "")
        assert len(b.results) == len(own[name]["outputs"])
        first = own[name]["outputs"][0]
        assert first == f"{b.results[0].dtype}{list(b.results[0].shape)}"
    assert any(b.source.startswith("layers/kda.py:") for b in drawn.values())


def test_edges_are_what_nodes_read_through_views(seen):
    figure = next(f for f in seen.figures if (f.phase, f.title) == ("decode", "KDA + MoE"))
    names = [b.name for b in figure.boxes]
    edges = {(names[a], names[b]) for a, b, _ in figure.edges}
    assert ("kda/MatMul", "kda/ShortConv") in edges  # a Reshape is between them
    assert any(a.startswith("from layer 0") for a, _ in edges)
    assert any(b.startswith("to layer 2") for _, b in edges)


def test_placements_of_weights_and_groups_of_collectives_are_the_bundles(seen):
    figure = next(f for f in seen.figures if (f.phase, f.title) == ("decode", "KDA + MoE"))
    held = {v.name: v for b in figure.boxes for v in b.held}
    assert held["p.kda.query"].lies == "dim 0 over tensor"
    assert held["s.kda.memory"].lies == "dim 1 over tensor"
    assert held["p.mixer_norm"].lies == "whole on every rank"
    sums = [b.carries for b in figure.boxes if b.type == "HcomAllReduce"]
    assert sums and all(words.startswith("over tensor of 2 ranks, ") for words in sums)


def test_memory_is_the_liveness_of_the_graph_in_its_order(seen, bundle):
    """By another way: at every node, the sum of all values that were made and are still to be read."""
    curve = next(c for c in seen.curves if (c.phase, c.stage) == ("decode", 1))
    entry = next(g for g in seen.bundle.manifest["graphs"] if g["name"] == "decode_b1_s1")
    graph = picture._Drawn(seen.bundle, entry, {}).view
    nodes = [n for n in graph.nodes if n.type not in picture.STRUCTURE]
    costs = {c.name: c for c in picture.node_costs(graph)}
    order = [costs[n.name] for n in nodes if n.name in costs]
    made = {n.name for n in nodes}
    spans = {}
    for i, cost in enumerate(order):
        for t in cost.touches:
            if t.tensor.node in made:
                spans.setdefault(t.tensor, []).append(i)
    size = {e: picture._value(graph.by_name[e.node], e.index).bytes for e in spans}
    most = max(sum(size[e] for e, at in spans.items() if at[0] <= i <= at[-1]) for i in range(len(order)))
    assert curve.peak[0] == most == max(curve.live)
    stage = seen.bundle.manifest["memory"]["stages"][1]
    assert (curve.weights, curve.states) == (stage["weights"], stage["states"])
    assert [layer for layer, _ in curve.marks] == [4, 5, 6, 7]


def test_operators_are_counted_by_phase(seen):
    entries = [g for g in seen.bundle.manifest["graphs"] if g["phase"] == "decode"]
    assert seen.counts["MatMul"]["decode"] == sum(g["ops"]["MatMul"] for g in entries)
    assert "Const" not in seen.counts


@pytest.mark.parametrize(
    "type_, family",
    [
        ("HcomAllReduce", "collective"), ("MoeDistributeDispatchV2", "collective"), ("KdaChunk", "memory"),
        ("LightningIndexer", "memory"), ("GroupedMatmul", "product"), ("AttnResMix", "norm"),
        ("MoeGatingTopK", "route"),
        ("Cast", "move"), ("Reshape", "view"), ("Sigmoid", "other"),
    ],
)  # fmt: skip
def test_operators_have_the_family_of_what_they_are_for(type_, family):
    assert family_of(type_) == family


HOSTILE = "</script><img src=x onerror=alert(1)>&\"'"


def test_hostile_names_are_text(seen):
    value = Value(dtype="bfloat16", shape=(1,), bytes=2, name=f"p.{HOSTILE}", lies=HOSTILE)
    boxes = (
        Box(name=HOSTILE, type=HOSTILE, results=(value,), held=(value,), attributes={HOSTILE: HOSTILE}, source=HOSTILE),
        Box(name=HOSTILE, results=(value,), carries=HOSTILE),
    )
    figure = Figure("decode", HOSTILE, HOSTILE, HOSTILE, HOSTILE, boxes, ((0, 1, HOSTILE),), 0)
    text = page.page(picture.Picture(seen.bundle, (), (figure,), ()))
    found = parsed(text)
    assert "img" not in found.tags and found.tags.count("script") == 2
    assert not any(name.startswith("on") for _, name, _ in found.attributes)
    data = re.search(r'<script type="application/json" id="figures">(.*?)</script>', text, re.S)[1]
    assert json.loads(data)[0][0]["name"] == HOSTILE


# ---- layout ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_boxes_do_not_overlap_edges_go_down_and_no_edge_goes_through_a_box(seed):
    draw = random.Random(seed)
    count = 40
    sizes = [(draw.uniform(40, 160), draw.uniform(20, 80)) for _ in range(count)]
    edges = sorted({(a, b) for b in range(1, count) for a in draw.sample(range(b), min(b, draw.randint(0, 3)))})
    made = lay_out(sizes, edges)
    boxes = [(x, y, x + w, y + h) for (x, y), (w, h) in zip(made.places, sizes, strict=True)]
    for i, a in enumerate(boxes):
        assert a[0] >= -1e-6 and a[2] <= made.width + 1e-6 and a[1] >= 0 and a[3] <= made.height + 1e-6
        for b in boxes[:i]:
            assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
    for (a, b), route in zip(edges, made.routes, strict=True):
        assert boxes[a][3] < boxes[b][1]
        assert all(p[1] <= q[1] for p, q in pairwise(route))
        for p, q in pairwise(route):
            if p[0] == q[0]:  # through a layer, straight down: between its boxes
                assert not any(left < p[0] < right and top < q[1] and p[1] < low for left, top, right, low in boxes)


def test_a_ladder_is_drawn_without_crossings():
    """Two chains, given in an order in which they would cross: one straight line each."""
    edges = [(0, 3), (1, 2), (3, 4), (2, 5)]
    made = lay_out([(50, 20)] * 6, edges)
    x = [place[0] for place in made.places]
    assert x[0] == x[3] == x[4] and x[1] == x[2] == x[5]


def test_nothing_to_lay_out_takes_no_room():
    assert lay_out([], []) == lay_out((), ())
    assert lay_out([], []).width == 0


# ---- command ---------------------------------------------------------------------------------------------------------


def test_inspect_writes_the_page_and_says_where(bundle, tmp_path):
    where = tmp_path / "new" / "page.html"
    result = CliRunner().invoke(app, ["inspect", str(bundle), "--html", str(where), "-q"])
    assert (result.exit_code, result.stderr) == (0, "")
    assert f"-> {where} in " in result.stdout
    assert where.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert [p.name for p in where.parent.iterdir()] == ["page.html"]
    result = CliRunner().invoke(app, ["inspect", str(bundle), "--html", str(where), "--cost"])
    assert result.exit_code == 2 and "leave --graph and --cost out" in result.stderr


@pytest.mark.slow
def test_the_page_of_the_largest_preset_on_128_ranks_is_small_and_quick(tmp_path):
    made = tmp_path / "bundle"
    compile_model(load_config("kimi-k3.1-pro"), target=target("a3"), out=made, mesh=Mesh.parse("pp=4,tp=32"))
    before = time.process_time()
    text = page.page(picture.picture(made))
    assert time.process_time() - before < 5  # 1.7 s on a quiet machine
    assert len(text.encode()) < 2_000_000  # 0.5 MB
