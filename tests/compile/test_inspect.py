"""Inspect: what a bundle holds, for a reader and for a program."""

import json
import shutil
from pathlib import Path

import pytest

from kimi_graph.compile.bundle import SOURCES, open_bundle
from kimi_graph.compile.inspect import inspect_bundle, inspect_graph, sizes
from kimi_graph.compile.wrap import wrapped_items
from kimi_graph.errors import BundleError
from kimi_graph.models import count_parameters
from kimi_graph.read_config import load_config


def test_a_reader_sees_model_target_sizes_phases_and_what_is_not_proved(bundle):
    text = inspect_bundle(bundle).text()
    for line in (
        "model     small (kimi_linear), fingerprint ",
        "target    a3 (Atlas 800 A3), CANN 9.2",
        "made by   kimi-graph ",
        " graph weights, bound at load",
        "3 slots, 9 pages of 16 tokens, 64 tokens a sequence",
        "prefill_b2_t16: 2 rows x 16 tokens, ",
        "decode_b2: 2 rows x 1 token, ",
        "batch.block_table int32[2, 4]",
        "outputs  logits bfloat16[2, 512]",
        "not proved\n  No graph was compiled by GE or run on an NPU",
    ):
        assert line in text, line
    commands = "  cmake -S "  # the bundle's path is in it, and a command is not broken
    assert max(len(line) for line in text.splitlines() if not line.startswith(commands)) <= 100


def test_the_commands_that_build_its_kernels_hold_in_a_folder_with_spaces(bundle, tmp_path):
    spaced = shutil.copytree(bundle, tmp_path / "a bundle")
    assert f"  cmake -S '{spaced.as_posix()}/kernels' -B kernels-build " in inspect_bundle(spaced).text()


def test_no_shape_is_broken_at_the_end_of_a_line():
    lines = wrapped_items("  inputs   ", [f"tokens.{i} int64[1, 16]" for i in range(9)])
    assert len(lines) > 1 and all(line.rstrip(",").endswith("int64[1, 16]") for line in lines)


def test_operators_are_counted_by_type_most_first(bundle):
    text = inspect_bundle(bundle).text()
    entry = open_bundle(bundle).graph("decode")
    for name, count in entry["ops"].items():
        assert f"{count:>6} {name}" in text
    assert sum(entry["ops"].values()) == len(inspect_graph(bundle, "decode").stages[0].graph.op)


def test_sizes_are_those_of_the_checkpoint_and_the_states(bundle, small):
    found = sizes(open_bundle(bundle))
    config = load_config(small)
    narrow = 2 * count_parameters(config)
    extra = found["weights"] - narrow  # float32 where the graph reads it so
    assert 0 < extra < narrow / 50
    kda = 3 * 4 * 128 * 128 * 4 + 3 * (3 * 4 * 128 * 3) * 2
    assert found["states"] == 2 * kda + 9 * 16 * (512 + 64) * 2
    assert found["graphs"] == sum(f.stat().st_size for f in (bundle / "graphs").iterdir())


def test_constants_are_named_as_such(compile_small, tmp_path):
    compile_small(tmp_path / "b", weights="constant", phases=("decode",))
    assert "in constants.bin" in inspect_bundle(tmp_path / "b").text()


def test_a_program_reads_the_manifest_and_the_sizes(bundle):
    found = json.loads(json.dumps(inspect_bundle(bundle).to_json()))
    assert found["bytes"] == sizes(open_bundle(bundle))
    assert found["graphs"] == open_bundle(bundle).manifest["graphs"]
    assert inspect_bundle(bundle).summary == "bundle of small for a3: 2 graphs"


@pytest.mark.parametrize("phase", ["prefill", "decode", "decode_b2"])
def test_nodes_of_a_graph_are_lines_with_types_edges_shapes_and_sources(bundle, phase):
    (nodes,) = inspect_graph(bundle, phase).stages
    lines = nodes.text().splitlines()
    assert len(lines) == sum(op.type not in ("Const", "Data", "RefData") for op in nodes.graph.op)
    norm = next(line for line in lines if line.startswith("layers.1.moe/RmsNorm: "))
    chain = "AddRmsNorm(layers.1.kda/RmsNorm:2, layers.1.kda/Reshape_"  # of the sum and the norm after it
    assert norm.startswith(f"layers.1.moe/RmsNorm: {chain}") and ", p.layers.1.ffn_norm) -> bfloat16[2, " in norm
    assert "epsilon=1e-05 " in f"{norm} "
    assert "  # models/decoder.py:" in norm
    assert nodes.summary == f"graph {nodes.name}: {len(nodes.graph.op):,} nodes"


def test_a_program_reads_every_node(bundle):
    found = json.loads(json.dumps(inspect_graph(bundle, "decode").to_json(), allow_nan=False))
    by_name = {node["name"]: node for node in found}
    assert len(by_name) == len(found)
    step = by_name["layers.0.kda/RecurrentGatedDeltaRule"]
    assert step["type"] == "RecurrentGatedDeltaRule"
    assert step["inputs"][4] == "s.layers.0.kda.memory:0"
    assert step["outputs"] == ["bfloat16[2, 4, 128]", "float32[3, 4, 128, 128]"]
    assert step["attributes"]["scale_value"] == pytest.approx(128**-0.5)
    assert step["source"].startswith("layers/kda.py:")


def test_a_phase_that_is_not_there_is_refused(bundle):
    with pytest.raises(BundleError, match="no graph of phase 'train'"):
        inspect_graph(bundle, "train")


def test_a_folder_that_is_no_bundle_is_refused(tmp_path):
    with pytest.raises(BundleError, match="a bundle is a folder written by"):
        inspect_bundle(tmp_path)


def test_without_sources_nodes_are_listed_without_lines(bundle, tmp_path):
    folder = Path(shutil.copytree(bundle, tmp_path / "b"))
    (folder / SOURCES).unlink()
    assert ".py:" not in inspect_graph(folder, "decode").text()


def test_a_graph_that_was_changed_is_not_described(bundle, tmp_path):
    shutil.copytree(bundle, tmp_path / "b")
    file = next((tmp_path / "b" / "graphs").iterdir())
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(BundleError, match="it was changed or damaged"):
        inspect_bundle(tmp_path / "b")
