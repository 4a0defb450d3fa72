"""`verify --bisect`: a wrong node is named with the line of layer code it comes from."""

import hashlib
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch

from kimi_graph.checkpoint import load_params
from kimi_graph.compile import air
from kimi_graph.compile.bisect import first_difference
from kimi_graph.compile.bundle import MANIFEST, SOURCES, dump, open_bundle, read_json
from kimi_graph.compile.ge_proto import get_attr, set_attr, split_edge, tensor_def, tensor_value
from kimi_graph.compile.verify import find_checkpoint, script, verify_bundle
from kimi_graph.read_config import load_config
from tests.compile.family import FAMILY


@pytest.fixture
def changed(bundle, tmp_path):
    """`changed(phase, change)`: a bundle whose graph of a phase was changed, with hashes made again."""

    def make(phase, change, source=bundle):
        folder = Path(shutil.copytree(source, tmp_path / "bundle"))
        manifest = read_json(folder / MANIFEST)
        entry = next(g for g in manifest["graphs"] if g["phase"] == phase)
        model = air.read(folder / entry["file"])
        ops = model.graph[0].op
        change({op.name: op for op in ops})
        data = air.to_bytes(model)
        (folder / entry["file"]).write_bytes(data)
        entry |= {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data), "ops": Counter(op.type for op in ops)}
        (folder / MANIFEST).write_bytes(dump(manifest))
        return folder

    return make


def scaled(name, attribute):
    def change(ops):
        set_attr(ops[name], attribute, get_attr(ops[name], attribute) * 1.5)

    return change


def reads(name, position, edge):
    def change(ops):
        ops[name].input[position] = edge

    return change


def first(ops, prefix, type_):
    return next(op for op in ops.values() if op.name.startswith(prefix) and op.type == type_)


def other_constant(ops):
    """The epsilon of layer 1's L2 norm becomes another (and in every place that shares the constant)."""
    adds = (op for op in ops.values() if op.name.startswith("layers.1.kda/") and op.type == "Add")
    constant = next(ops[split_edge(op.input[1])[0]] for op in adds if op.input[1].startswith("const"))
    constant.attr["value"].t.CopyFrom(tensor_def(tensor_value(constant.attr["value"].t) * 1000))


def other_type(ops):
    first(ops, "layers.2.moe/", "Swish").type = "Sigmoid"
    del first(ops, "layers.2.moe/", "Sigmoid").attr["scale"]


CASES = {
    "an epsilon": ("prefill", scaled("layers.1.kda/RmsNorm", "epsilon"), "layers.1.kda/RmsNorm", "models/decoder.py"),
    "a scale": ("prefill", scaled("layers.0.kda/KdaChunk", "scale"), "layers.0.kda/KdaChunk", "layers/kda.py"),
    "a decode step's scale": (
        "decode",
        scaled("layers.1.kda/RecurrentGatedDeltaRule", "scale_value"),
        "layers.1.kda/RecurrentGatedDeltaRule",
        "layers/kda.py",
    ),
    "attention's scale": (
        "decode",
        scaled("layers.2.mla/FusedInferAttentionScore", "scale"),
        "layers.2.mla/FusedInferAttentionScore",
        "layers/mla.py",
    ),
    "another weight": (
        "prefill",
        reads("layers.1.kda/MatMul_1", 1, "p.layers.1.kda.value:0"),
        "layers.1.kda/MatMul_1",
        "layers/kda.py",
    ),
    "another layer's weight": (
        "decode",
        reads("layers.1.kda/MatMul", 1, "p.layers.0.kda.query:0"),
        "layers.1.kda/MatMul",
        "layers/kda.py",
    ),
    "a constant": ("prefill", other_constant, r"layers.0.kda/Square(_\d+)?", "layers/kda.py"),
    "an operator": ("decode", other_type, r"layers.2.moe/Swish(_\d+)?", "layers/ffn.py"),
    "the head's norm": ("decode", scaled("head/RmsNorm", "epsilon"), "head/RmsNorm", "models/decoder.py"),
    "the residual stream": (
        "prefill",
        reads("layers.1.kda/RmsNorm", 0, "embed/GatherV2:0"),
        "layers.1.kda/RmsNorm",
        "models/decoder.py",
    ),
}


@pytest.mark.parametrize("what", CASES)
def test_the_first_wrong_node_is_named_with_its_line(changed, what):
    phase, change, node, file = CASES[what]
    report = verify_bundle(changed(phase, change), steps=2, modes=("exact",), bisect=True)
    assert not report.passed
    pattern = rf"first difference: {phase}_\w+: {node} \(\w+\), from {file}:\d+: off by [\d.e+-]+ of scale.*"
    assert re.fullmatch(pattern, report.difference), report.difference
    assert report.difference in report.text()
    assert report.to_json()["difference"] == report.difference


def test_the_line_it_names_makes_the_node(changed):
    folder = changed("prefill", scaled("layers.0.kda/KdaChunk", "scale"))
    report = verify_bundle(folder, steps=0, modes=("exact",), bisect=True)
    file, line = re.search(r"from ([\w/.]+):(\d+):", report.difference).groups()
    root = Path(verify_bundle.__code__.co_filename).parents[1]
    assert "kda_chunk(" in (root / file).read_text().splitlines()[int(line) - 1]


def test_a_node_that_is_not_there_is_missing(changed):
    """The one norm that no sum is fused with."""

    def change(ops):
        norm = ops["layers.0.kda/RmsNorm"]
        for op in ops.values():
            for i, edge in enumerate(op.input):
                if edge == "layers.0.kda/RmsNorm:0":
                    op.input[i] = norm.input[0]

    report = verify_bundle(changed("prefill", change), steps=0, modes=("exact",), bisect=True)
    assert "layers.0.kda/RmsNorm (missing), from models/decoder.py:" in report.difference


def test_nothing_is_looked_for_where_nothing_differs(bundle, monkeypatch):
    monkeypatch.setattr("kimi_graph.compile.bisect.first_difference", None)  # calling it would be an error
    report = verify_bundle(bundle, steps=1, modes=("exact",), bisect=True)
    assert report.passed and report.difference == ""


def test_a_bundle_that_is_the_model_has_no_such_node(bundle, small):
    """Integers too: chosen experts, places, counts."""
    opened, config = open_bundle(bundle), load_config(small)
    params = load_params(small, config, dtype=torch.float64)
    found = first_difference(opened, config, params, list(script(opened, config, steps=2, seed=0)))
    assert found.startswith("no single node differs")


@pytest.mark.parametrize("name", FAMILY)
def test_no_fixture_of_the_family_has_such_a_node(family_bundle, name):
    """Also where stamping left out what no layer reads: a selection of keys that the next one makes anew."""
    opened = open_bundle(family_bundle(name))
    checkpoint = find_checkpoint(opened, None)
    config = load_config(checkpoint.folder)
    params = load_params(checkpoint, config, dtype=torch.float64)
    steps = list(script(opened, config, steps=1, seed=0))
    phases = [s.phase for s in steps]
    last = [s for i, s in enumerate(steps) if s.phase not in phases[i + 1 :]]  # the longest of each phase
    found = first_difference(opened, config, params, [s for s in steps if s.phase == "prefill"][:-1] + last)
    assert found.startswith("no single node differs"), found


@pytest.mark.parametrize(
    "name, phase, node, attribute",
    [
        ("kimi-k3", "prefill", "layers.5.moe/RmsNorm", "eps"),  # a mix and the norm after it
        ("kimi-k3", "vision", "vision.blocks.1.vision_block/RmsNorm_1", "epsilon"),
        ("kimi-k3.1-pro", "decode", "layers.6.mla/SparseFlashAttention", "scale_value"),
        ("deepseek-v3.2", "decode", "layers.2.mla/RmsNorm", "epsilon"),
        ("glm-5.2", "prefill", "layers.5.mla_shared/RmsNorm_1", "epsilon"),
    ],
)
def test_the_first_wrong_node_of_other_models_is_named(changed, family_bundle, name, phase, node, attribute):
    folder = changed(phase, scaled(node, attribute), family_bundle(name))
    report = verify_bundle(folder, steps=1, modes=("exact",), bisect=True)
    assert not report.passed
    assert f"{phase}_" in report.difference and f": {node} (" in report.difference, report.difference


def test_another_choice_of_experts_is_named(changed):
    """The router's bias read from another layer: weights of the chosen stay sigmoids, the choice is another."""
    folder = changed("prefill", reads("layers.2.moe/MoeGatingTopK", 1, "p.layers.1.moe.bias:0"))
    report = verify_bundle(folder, steps=0, modes=("exact",), bisect=True)
    assert "layers.2.moe/MoeGatingTopK (MoeGatingTopK), from layers/moe.py:" in report.difference


def test_without_sources_it_says_that_they_are_missing(changed):
    folder = changed("prefill", scaled("layers.1.kda/RmsNorm", "epsilon"))
    (folder / SOURCES).unlink()
    report = verify_bundle(folder, steps=0, modes=("exact",), bisect=True)
    assert not report.passed
    assert "is sources.json of this bundle missing?" in report.difference
