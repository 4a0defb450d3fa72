"""`kg.open_bundle`: what a program sees of a bundle, and what is refused because it is for something else."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import kimi_graph as kg
from kimi_graph.checkpoint import load_params
from kimi_graph.compile.bundle import LOCAL, MANIFEST, dump, read_json
from kimi_graph.compile.write_weights import write_weights
from kimi_graph.errors import BundleError
from kimi_graph.parallel import Mesh


@pytest.fixture(scope="module")
def mesh_bundle(family_bundle):
    """K3 on data x tensor, with packed experts: the bundle and its checkpoint. Read only."""
    folder = family_bundle("kimi-k3", "950dt", mesh=Mesh.parse("dp=2,tp=2"), weights_format="native")
    return folder, Path(json.loads((folder / LOCAL).read_bytes())["checkpoint"])


def test_a_bundle_says_what_it_is(mesh_bundle):
    folder, checkpoint = mesh_bundle
    b = kg.open_bundle(folder)
    assert b.model == kg.load_config(checkpoint)
    assert (b.target.name, b.target.cann, str(b.mesh)) == ("950dt", "9.2", "dp=2,tp=2")
    assert [g.phase for g in b.graphs.values()] == ["vision", "prefill", "decode"]
    decode = next(g for g in b.graphs.values() if g.phase == "decode")
    assert decode.inputs["tokens"] == ("int64", (1, 1))  # a rank has one of two rows
    assert decode.outputs["logits"][1] == (1, b.model.vocab // 2)
    memory = b.states["s.layers.0.kda.memory"]
    assert (memory.dtype, memory.axes[0], memory.shape[0], memory.local[0]) == ("float32", "slots", 4, 2)
    assert set(decode.weights) <= set(b.weights_of(3)) <= set(b.weights)
    assert b.weights["p.layers.1.moe.down.mxfp4.weight_scale"].dtype == "float8_e8m0fnu"


def test_its_repr_is_a_few_lines_to_read(mesh_bundle, tmp_path):
    folder = Path(shutil.copytree(mesh_bundle[0], tmp_path / "b"))
    write_weights(folder, ranks=[0])
    lines = repr(kg.open_bundle(folder)).splitlines()
    assert lines[0] == f"Bundle {str(folder)!r}"
    assert lines[2].startswith("  target   950dt, CANN 9.2, torch-npu 2.")
    assert lines[3] == "  mesh     dp=2,tp=2: 4 ranks"
    assert lines[4] == "  graphs   3: vision 2 x 16, prefill 2 x 16, decode 2 x 1"
    assert lines[6].endswith("; made ahead for 1 of 4 ranks")
    assert len(lines) == 7 and max(map(len, lines[1:])) < 100


@pytest.mark.parametrize("ahead", [False, True])
def test_a_weight_is_read_as_a_graph_reads_it_made_at_load_or_ahead(mesh_bundle, tmp_path, ahead):
    folder = Path(shutil.copytree(mesh_bundle[0], tmp_path / "b"))
    if ahead:
        write_weights(folder)
        (folder / LOCAL).unlink()  # there is no other place to have them from
    b, params = kg.open_bundle(folder), load_params(mesh_bundle[1], kg.load_config(mesh_bundle[1]))
    out = params.layers[0].kda.out
    for rank in range(4):
        own = out.chunk(2, 1)[rank % 2]
        assert torch.equal(b.read("p.layers.0.kda.out", rank).reshape(own.shape), own)
    scale = [b.read("p.layers.1.moe.down.mxfp4.weight_scale", rank) for rank in range(4)]
    weight = [b.read("p.layers.1.moe.down.mxfp4.weight_packed.tile", rank) for rank in range(4)]
    values = torch.cat(weight).float() * torch.cat(scale).float().flatten(-2).repeat_interleave(32, -1)
    assert torch.equal(values, params.layers[1].moe.down.float())


def test_a_weight_that_a_rank_does_not_hold_is_refused(family_bundle):
    b = kg.open_bundle(family_bundle("kimi-k3.1-pro", "950dt", mesh=Mesh.parse("pp=2,tp=2")))
    assert b.read("p.embed", 1).shape == (b.model.vocab // 2, b.model.embed)
    with pytest.raises(BundleError, match=r"rank 2 has no weight 'p\.embed'"):
        b.read("p.embed", 2)
    with pytest.raises(BundleError, match=r"no rank 4; there are 0 to 3\."):
        b.weights_of(4)


FOR_ELSE = {
    "model": ({"model": "kimi-k3"}, "made for another model than kimi-k3: there the number of layers is 93, was 8"),
    "target": ({"target": "a3"}, r"manifest\.json: target\.name is 950dt, expected a3"),
    "cann": ({"cann": "9.1"}, r"manifest\.json: target\.cann is 9\.2, expected 9\.1"),
    "torch-npu": ({"torch_npu": "2.9.0"}, r"manifest\.json: made_by\.torch_npu is 2\.\S+, expected 2\.9\.0"),
    "mesh": ({"mesh": "dp=4"}, r"manifest\.json: mesh is dp=2,tp=2, expected dp=4"),
    "one rank": ({"mesh": "none"}, r"manifest\.json: mesh is dp=2,tp=2, expected none"),
    "other experts": ({"mesh": Mesh(data=2, tensor=2, experts=2)}, r"mesh is dp=2,tp=2, expected dp=2,tp=2,ep=2"),
}


@pytest.mark.parametrize("what", FOR_ELSE)
def test_a_bundle_for_something_else_is_refused_with_the_field(mesh_bundle, what):  # case A8
    """Sharding, chip or release that are not those of compile time: refused, never compiled again in silence."""
    expected, words = FOR_ELSE[what]
    with pytest.raises(BundleError, match=words):
        kg.open_bundle(mesh_bundle[0], **expected)


def test_a_bundle_for_just_that_is_opened(mesh_bundle):
    folder, checkpoint = mesh_bundle
    same = {"model": checkpoint, "target": "950dt", "cann": "9.2", "mesh": "tp=2,dp=2"}
    assert kg.open_bundle(folder, **same).mesh == Mesh(data=2, tensor=2)


def test_a_changed_config_is_refused(mesh_bundle, tmp_path):
    folder = Path(shutil.copytree(mesh_bundle[0], tmp_path / "b"))
    manifest = read_json(folder / MANIFEST)
    manifest["model"]["config"]["text_config"]["rms_norm_eps"] = 1e-4
    (folder / MANIFEST).write_bytes(dump(manifest))
    with pytest.raises(BundleError, match=r"model\.config has the fingerprint .*made for another model"):
        _ = kg.open_bundle(folder).model


def test_a_pipeline_stage_has_its_layers_and_gets_the_closed_blocks_of_those_before(family_bundle):  # case M3
    """K3's fixture in four stages: hidden states and the residual blocks that are closed cross, and no weight twice."""
    b = kg.open_bundle(family_bundle("kimi-k3", "950dt", mesh=Mesh.parse("pp=4"), weights_format="native"))
    graphs = [g for g in b.source.manifest["graphs"] if g["phase"] == "decode"]
    layers = [s["layers"] for s in b.source.manifest["mesh"]["stages"]]
    assert [first for first, _ in layers[1:]] == [last + 1 for _, last in layers[:-1]]
    for graph, (first, last) in zip(graphs, layers, strict=True):
        held = {int(name.split(".")[2]) for name in graph["weights"] if name.startswith("p.layers.")}
        assert held == set(range(first, last + 1))
    assert [g["reads"] for g in graphs] == [[], ["x", "1.x"], ["x", "2.x", "4.x"], ["x", "2.x", "5.x", "6.x"]]
    crossing = [i["shape"] for g in graphs for i in g["inputs"] if i["name"] in g["reads"]]
    assert crossing == [[2, 1, b.model.embed]] * 9
    names = [name for rank in range(4) for name in b.weights_of(rank)]
    assert len(names) == len(set(names)) == len(b.weights)
