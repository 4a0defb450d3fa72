"""What values look like: escaped in HTML, and short enough to be read in a terminal."""

import dataclasses
import html.parser
import re

import pytest

import kimi_graph as kg
from kimi_graph import display, tree
from kimi_graph.compile.nodes import GraphNode, Nodes
from kimi_graph.display import Html, card, columns, facts, fold, listed, strip, table, tag

HOSTILE = "<script>alert('1')</script>\"&"


class Reader(html.parser.HTMLParser):
    """Element names, attribute names, and text; refuses an end that has no start."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.attributes, self.text, self._open = set(), set(), "", []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag, attrs):
        self.elements.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.text += data


def hostile_config():
    return dataclasses.replace(kg.load_config("kimi-k3.1-pro"), name=HOSTILE, model_type=HOSTILE)


def hostile_nodes():
    node = GraphNode(
        name=f"{HOSTILE}/x", type=HOSTILE, inputs=(HOSTILE,), results=((HOSTILE, (1,)),), attributes={}, source=HOSTILE
    )
    return Nodes([node], HOSTILE)


def hostile_bundle(tiny, tmp_path):
    """A bundle in a folder of a hostile name, whose model is called so too."""
    folder = tmp_path / "<i>&amp;"
    config = dataclasses.replace(kg.load_config(tiny), name=HOSTILE)
    return kg.make_bundle(config, folder, phases=("decode",), max_len=128, keep=False)


PARTS = {
    "card": lambda: card(HOSTILE, HOSTILE, note=HOSTILE),
    "table": lambda: table([(HOSTILE, HOSTILE), (HOSTILE, "1")]),
    "facts": lambda: facts({HOSTILE: HOSTILE}),
    "fold": lambda: fold(HOSTILE, HOSTILE),
    "strip": lambda: strip([[(HOSTILE, "#000000", HOSTILE)]]),
    "tag": lambda: tag("b", HOSTILE, title=HOSTILE),
    "config": lambda: hostile_config()._repr_html_(),
    "tree": lambda: tree.replace(kg.model_specs(kg.load_config("kimi-linear-48b")), vision={HOSTILE: 1})._repr_html_(),
    "plan": lambda: kg.shard_plan(hostile_config(), "tp=2")._repr_html_(),
    "nodes": lambda: hostile_nodes()._repr_html_(),
}


@pytest.mark.parametrize("what", PARTS)
def test_hostile_names_are_text_and_never_markup(what):
    shown = Reader(PARTS[what]())
    assert "script" not in shown.elements and not {a for a in shown.attributes if a.startswith("on")}
    assert HOSTILE in shown.text


def test_hostile_names_of_a_bundle_are_text(tiny, tmp_path):
    bundle = hostile_bundle(tiny, tmp_path)
    for shown in (bundle, bundle.graph("decode")):
        assert not {"script", "i"} & Reader(shown._repr_html_()).elements
    assert HOSTILE in Reader(bundle._repr_html_()).text
    assert "<i>&amp;" in Reader(bundle._repr_html_()).text


def test_markup_is_made_in_one_place():
    assert isinstance(tag("b", "x"), Html) and tag("b", tag("i", "x")) == "<b><i>x</i></b>"
    assert not isinstance(tag("b", "x") + "<", Html), "what is put together elsewhere is text again"
    assert tag("b", tag("b", "x") + "<") == "<b>&lt;b&gt;x&lt;/b&gt;&lt;</b>"


def test_columns_of_numbers_are_to_the_right_in_both_forms():
    rows = [("what", "size"), ("a", "1,000"), ("bb", "1")]
    assert columns(rows) == ["what   size", "a     1,000", "bb        1"]
    assert re.findall(r"text-align:(\w+)", table(rows)) == ["left", "right"] * 3


def test_facts_are_wrapped_at_100_columns():
    lines = listed({"short": "word", "long": "word " * 60})
    assert lines[0] == "  short  word"
    assert all(len(line) <= 100 for line in lines) and all(line.startswith("         word") for line in lines[2:])


@pytest.mark.parametrize("name", kg.presets())
def test_a_config_prints_a_few_lines(name):
    config = kg.load_config(name)
    lines = repr(config).splitlines()
    assert lines[0] == f"ModelConfig {name!r} ({config.model_type})"
    assert len(lines) < 30 and max(map(len, lines)) <= 100
    assert Reader(config._repr_html_()).text.startswith(name)


def test_a_tree_prints_a_line_for_each_kind_of_leaf():
    specs = kg.model_specs(kg.load_config("kimi-k3.1-pro"))
    lines = repr(specs).splitlines()
    assert lines[0] == "Decoder" and len(lines) < 80 and max(map(len, lines)) < 120
    (line,) = (line.split(maxsplit=2) for line in lines if "moe.gate_up" in line)
    assert line == ["layers.*.moe.gate_up", "92", "[896, 2, 3072, 3584]  experts _ expert_ffn _"]
    assert sum(int(line.split()[1]) for line in lines[2:]) == len(tree.leaves(specs))
    assert Reader(specs._repr_html_()).text.startswith("Decoder")


def test_a_state_prints_shapes_and_not_numbers():
    state = kg.init_state(kg.load_config("kimi-linear-48b"), batch=1, max_len=128)
    assert repr(state.layers[0]).splitlines()[2] == "  memory  [2, 32, 128, 128]  float32"
    assert repr(state).splitlines()[-1].split() == ["page", "1", "128"], "a leaf without shape is shown as it is"


def test_a_mesh_shows_its_ranks_where_there_are_few():
    small, large = (kg.Mesh.parse(text) for text in ("pp=2,tp=4", "pp=16,tp=32"))
    assert repr(small) == "Mesh(pipe=2, data=1, context=1, tensor=4, experts=4)"
    assert "stage 1, rank 7" in small._repr_html_() and "rank 7" not in large._repr_html_()


def test_letters_are_read_on_every_colour():
    def light(colour):  # relative luminance of WCAG 2
        linear = [(v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4)
                  for v in (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))]  # fmt: skip
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for colour in display.COLOURS:
        ink = {"#000": 0.0, "#fff": 1.0}[display._ink(colour)]
        high, low = max(ink, light(colour)), min(ink, light(colour))
        assert (high + 0.05) / (low + 0.05) >= 4.5, f"{colour}: WCAG asks 4.5 of small letters"


def test_nodes_of_a_graph_are_found_by_part_and_type(tiny, tmp_path):
    bundle = kg.make_bundle(tiny, tmp_path / "b", phases=("decode",), batch=2, max_len=128, keep=False)
    graph = bundle.graph("decode")
    nodes = graph.nodes.within("layers.0.kda")
    assert graph.nodes.parts[:2] == ("embed", "layers.0.kda") and nodes.parts == ("layers.0.kda",)
    assert (
        len(graph.nodes)
        == sum(graph.nodes.types.values())
        == sum(len(graph.nodes.within(p)) for p in graph.nodes.parts)
    )
    (step,) = nodes.of_type("RecurrentGatedDeltaRule")
    assert "s.layers.0.kda.memory" in step.inputs and step.source.startswith("layers/kda.py:")
    assert step.results[0] == ("bfloat16", (2, 4, 128))
    assert len(graph.nodes.within("layers.0")) > len(nodes) and not len(graph.nodes.within("layers.9"))
    assert len(nodes[:3]) == 3 and nodes[0].type == "RmsNorm"
    lines = repr(graph.nodes).splitlines()
    assert len(lines) == 23 and lines[-1].strip().startswith("...")
    with pytest.raises(kg.errors.BundleError, match="no graph of phase 'encode'"):
        bundle.graph("encode")
    with pytest.raises(kg.errors.BundleError, match="decode has no stage 1; there are 0"):
        bundle.graph("decode", stage=1)


def test_a_bundle_that_was_made_from_a_checkpoint_verifies(tiny, tmp_path):
    bundle = kg.make_bundle(tiny, tmp_path / "b", batch=2, chunk=16, max_len=128, keep=False)
    report = bundle.verify(steps=1, modes=("exact",))
    assert report.passed and report.steps == bundle.verify(steps=2, modes=("exact",)).steps - 1


def test_a_bundle_of_a_preset_has_no_weights_to_verify_with(tmp_path):
    config = kg.make_fixture(kg.load_config("kimi-linear-48b"), tmp_path / "tiny", layers=2).config
    bundle = kg.make_bundle(config, tmp_path / "b", mesh="tp=2", max_len=128, keep=False)
    assert str(bundle.mesh) == "tp=2" and bundle.model == config
    with pytest.raises(kg.errors.BundleError, match="checkpoint"):
        bundle.verify()
