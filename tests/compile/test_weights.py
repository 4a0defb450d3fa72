"""Weights that are written ahead: every rank's, to the byte, once, whatever happens on the way."""

import dataclasses
import json
import math
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from typer.testing import CliRunner

from kimi_graph.checkpoint import Checkpoint, load_params
from kimi_graph.cli import app
from kimi_graph.compile import in_place, journal, making, write_weights, written
from kimi_graph.compile.bundle import LOCAL, MANIFEST, WEIGHTS, Bundle, dump, open_bundle, read_json
from kimi_graph.compile.expect import bundle_config
from kimi_graph.compile.inspect import inspect_bundle
from kimi_graph.compile.making import Maker, blocks
from kimi_graph.compile.parts import ALIGNMENT, part_files
from kimi_graph.compile.ranks import Plan, make_ranks
from kimi_graph.compile.recipe import Step, to_json
from kimi_graph.compile.verify import verify_bundle
from kimi_graph.compile.weight_formats import as_read
from kimi_graph.compile.write_weights import parse_ranks
from kimi_graph.compile.written import INDEX, JOURNAL, SOURCE, open_written
from kimi_graph.config import MoeConfig
from kimi_graph.errors import BundleError, CheckpointError, VerifyError
from kimi_graph.headers import INDEX as CHECKPOINT_INDEX
from kimi_graph.headers import SINGLE
from kimi_graph.parallel import Mesh
from kimi_graph.spec import weight

ROOT = Path(__file__).parents[2]
MESHES = {
    "k3, packed, on dp x tp": ("kimi-k3", "950dt", {"mesh": "dp=2,tp=2", "weights_format": "native"}),
    "k3.1 in two stages": ("kimi-k3.1-pro", "950dt", {"mesh": "pp=2,tp=2"}),
    "k3.1, int4": ("kimi-k3.1-pro", "a3", {"mesh": "tp=2", "weights_format": "int4"}),
    "deepseek, fp8": ("deepseek-v3.2", "950dt", {"mesh": "dp=2", "weights_format": "native"}),
    "deepseek, fp8 made bf16": ("deepseek-v3.2", "a3", {"mesh": "tp=2", "weights_format": "bf16"}),
    "linear, padded": ("kimi-linear-48b", "a3", {"mesh": "tp=3,dp=2,ep=3", "pad": True, "ways": 3, "batch": 6}),
    "linear, copies of experts": (
        "kimi-linear-48b",
        "a3",
        {"mesh": "tp=4", "redundant_experts": 4, "exchange": True, "batch": 4},
    ),
}


@pytest.fixture(scope="module")
def made(family_bundle):
    """`made(case)`: a bundle of a mesh, and its checkpoint. Read only."""

    def made(case):
        name, chip, options = MESHES[case]
        folder = family_bundle(name, chip, **{**options, "mesh": Mesh.parse(options["mesh"])})
        return folder, Path(json.loads((folder / LOCAL).read_bytes())["checkpoint"])

    return made


@pytest.fixture
def mesh_copy(made, tmp_path):
    """A bundle of four ranks in two stages that may be changed."""
    return Path(shutil.copytree(made("k3.1 in two stages")[0], tmp_path / "bundle"))


@pytest.fixture
def copy(bundle, tmp_path):
    """A bundle of one rank that may be changed."""
    return Path(shutil.copytree(bundle, tmp_path / "bundle"))


def content(folder, leave_out=(SOURCE,)):
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name not in leave_out}


# ---- what is written -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", MESHES)
def test_every_rank_finds_what_the_recipes_make(made, tmp_path, monkeypatch, case):
    """The writer works in blocks of 20,000 bytes here; beside it, recipes run on whole parameters."""
    source, checkpoint = made(case)
    folder = Path(shutil.copytree(source, tmp_path / "bundle"))
    monkeypatch.setattr(making, "BLOCK", 20_000)
    write_weights.write_weights(folder, jobs=1, verify=True)
    bundle = open_bundle(folder)
    config, found = bundle_config(bundle), open_written(bundle)
    plan, weights = Plan.read(bundle, config), load_params(checkpoint, config)
    ranks = make_ranks(plan, range(plan.mesh.world), weights, Checkpoint.open(checkpoint), "exact")  # not from files
    assert found.ranks == tuple(range(plan.mesh.world))
    compared = 0
    for rank in ranks:
        read = found.of(rank.rank)
        assert read.keys() == {name for phase in rank.phases for name in rank.weights[phase]}
        for phase in rank.phases:
            ops = plan.models[phase, rank.stage].graph[0].op
            descs = {op.name: op.output_desc[0] for op in ops if op.type == "Data"}
            for name, expected in rank.weights[phase].items():
                mine = as_read(descs[name], found.read(rank.rank, name))
                assert mine.shape == expected.shape
                assert torch.equal(mine.view(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8)), name
                compared += 1
    assert compared > 100


@pytest.mark.parametrize("case", ["k3, packed, on dp x tp", "k3.1 in two stages"])
def test_replicas_are_written_once_and_a_rank_reads_what_its_ledger_says(made, tmp_path, case):
    folder = Path(shutil.copytree(made(case)[0], tmp_path / "bundle"))
    report = write_weights.write_weights(folder)
    bundle, index = open_bundle(folder), read_json(folder / "weights" / INDEX)
    files = index["files"]
    assert {f.stem for f in part_files(bundle)} == {name.rpartition("-")[0] for name in files}
    assert report.made == sum(w["bytes"] for f in files.values() for w in f["weights"].values())
    assert sum((folder / "weights" / name).stat().st_size for name in files) == report.bytes
    contents = [(name, w["sha256"]) for f in files.values() for name, w in f["weights"].items() if len(f["ranks"]) > 1]
    assert contents and len(set(contents)) == len(contents)
    assert not any(w["offset"] % ALIGNMENT for f in files.values() for w in f["weights"].values())
    for stage, held in enumerate(bundle.manifest["memory"]["stages"]):
        for rank in Plan.read(bundle, bundle_config(bundle)).ranks(stage):
            assert sum(w.bytes for w in open_written(bundle).of(rank).values()) == held["weights"]


def test_files_are_named_by_the_ranks_that_read_them(made):
    files = part_files(open_bundle(made("k3, packed, on dp x tp")[0]))
    assert [(f.stem, f.ranks) for f in files] == [
        ("rank_0000", (0,)),
        ("shared_data.tensor_0000", (0, 1, 2, 3)),
        ("shared_data_0000", (0, 2)),
        ("rank_0001", (1,)),
        ("shared_data_0001", (1, 3)),
        ("rank_0002", (2,)),
        ("rank_0003", (3,)),
    ]


def test_an_embedding_that_is_the_head_too_is_there_once_for_both_stages(made):
    bundle = open_bundle(made("k3.1 in two stages")[0])
    manifest = json.loads(json.dumps(bundle.manifest))
    next(g for g in manifest["graphs"] if g["stage"] == 1)["weights"].append("p.embed")
    tied = dataclasses.replace(bundle, manifest=manifest)
    assert [f.ranks for f in part_files(tied) if "p.embed" in f.held] == [(0, 2), (1, 3)]
    assert [f.stem for f in part_files(tied) if "p.embed" in f.held] == ["shared_pipe_0000", "shared_pipe_0001"]


def test_parts_of_some_ranks_then_of_the_others_are_all_of_them(mesh_copy, tmp_path):
    other = Path(shutil.copytree(mesh_copy, tmp_path / "other"))
    write_weights.write_weights(mesh_copy)
    first = write_weights.write_weights(other, ranks=[1])
    assert open_written(open_bundle(other)).ranks == (1,)
    with pytest.raises(BundleError, match=r"weights of rank 2 were not written; there are those of 1\."):
        open_written(open_bundle(other)).of(2)
    second = write_weights.write_weights(other, ranks=[0, 2, 3])
    assert content(other / "weights") == content(mesh_copy / "weights")
    assert 0 < first.made < second.made


@pytest.mark.parametrize("text, ranks", [("0", [0]), ("0-3,7", [0, 1, 2, 3, 7]), (" 2 , 0-1", [0, 1, 2])])
def test_ranks_are_numbers_and_ranges(text, ranks):
    assert parse_ranks(text) == ranks


@pytest.mark.parametrize(
    "text, words",
    [
        *((text, "is neither a rank nor a first and a last one, as in 0-3,7") for text in ("a", "-1", "1.5")),
        *((text, "is empty; expected ranks, and first and last ones, as in 0-3,7.") for text in ("", " ", ",")),
        *((text, "has a comma too many; expected ranks") for text in ("1,", ",1", "1,,2", "0-1, ")),
        ("3-1", "'3-1' ends before it starts; write 1-3."),
        ("0-99999999", "rank 99,999,999 is beyond any mesh; the last is"),
    ],
)
def test_what_is_no_list_of_ranks_is_refused(text, words):
    with pytest.raises(BundleError, match=f"--ranks {text!r}: .*{re.escape(words)}"):
        parse_ranks(text)


def test_a_rank_that_is_not_there_is_refused(mesh_copy):
    with pytest.raises(BundleError, match=r"--ranks: rank 5 is not there; the bundle's ranks are 0 to 3\."):
        write_weights.write_weights(mesh_copy, ranks=[3, 4, 5])
    assert not (mesh_copy / "weights").exists()


def test_inspect_says_what_was_made_ahead(mesh_copy):
    size = write_weights.write_weights(mesh_copy, ranks=[2, 3]).bytes
    text = " ".join(inspect_bundle(mesh_copy).text().split())  # lines are wrapped
    assert f"{size:,} bytes made ahead for 2 ranks, in" in " ".join(text.split())
    assert f"not read: kimi-graph weights {mesh_copy} --verify does" in " ".join(text.split())


def test_a_dry_run_writes_nothing(mesh_copy):
    before = sorted(mesh_copy.rglob("*"))
    report = write_weights.write_weights(mesh_copy, dry=True)
    assert report.summary.endswith("nothing was written")
    assert sorted(mesh_copy.rglob("*")) == before
    assert report.shares.total == sum(h.bytes for f in part_files(open_bundle(mesh_copy)) for h in f.held.values())


def test_progress_counts_bytes_to_the_last(copy):
    told = []
    report = write_weights.write_weights(copy, verify=True, progress=lambda *now: told.append(now))
    assert told[-1] == ("read again", report.read, report.read)
    assert [done for what, done, _ in told if what == "write weights"][-1] == report.made == report.read
    assert [done for what, done, _ in told if what == "write weights"] == sorted(
        done for what, done, _ in told if what == "write weights"
    )


# ---- twice, elsewhere, moved -----------------------------------------------------------------------------------------


def test_writing_twice_is_writing_once(mesh_copy):  # case W10
    write_weights.write_weights(mesh_copy)
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in (mesh_copy / "weights").iterdir()}
    again = write_weights.write_weights(mesh_copy)
    assert again.made == 0
    assert "all were there" in again.summary
    assert {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in (mesh_copy / "weights").iterdir()} == before
    (mesh_copy / "weights" / SOURCE).unlink()  # nobody knows any more what they were made of: they are made anew
    assert write_weights.write_weights(mesh_copy).made > 0
    assert content(mesh_copy / "weights") == {p.name: data for p, (data, _) in before.items() if p.name != SOURCE}


def test_copies_are_of_the_experts_that_were_counted_most(made, tmp_path):
    """Written for loads, verified with their tables, kept by later runs that are told no others."""
    folder = Path(shutil.copytree(made("linear, copies of experts")[0], tmp_path / "bundle"))
    moe = bundle_config(open_bundle(folder)).layers[2].ffn
    layers = [
        i for i, layer in enumerate(bundle_config(open_bundle(folder)).layers) if isinstance(layer.ffn, MoeConfig)
    ]
    hot, file = moe.experts - 1, tmp_path / "loads.json"

    def counted(expert, count=None, of=None):
        loads = [100 if e == expert else 1 for e in range(moe.experts if count is None else count)]
        file.write_text(json.dumps({str(i): loads for i in (layers if of is None else of)}))
        return file

    first = write_weights.write_weights(folder, loads=counted(hot))
    slots = read_index(folder)["slots"]
    assert {path.split(".")[1] for path in slots} == {str(i) for i in layers}
    assert all(held.count(hot) > 1 for held in slots.values())
    assert verify_bundle(folder, steps=2).passed
    before = content(folder / "weights")
    assert write_weights.write_weights(folder).made == 0
    assert write_weights.write_weights(folder, loads=file).made == 0
    assert content(folder / "weights") == before
    assert write_weights.write_weights(folder, loads=counted(0)).made == first.made
    assert all(held.count(hot) == 1 < held.count(0) for held in read_index(folder)["slots"].values())
    for given, said in [
        (counted(0, count=3).read_bytes(), f"layer {layers[0]} has 3 numbers; expected {moe.experts}, its experts"),
        (counted(0, of=layers[1:]).read_bytes(), f"layer {layers[0]} is not there; expected layers "),
        (counted(0, of=[0, *layers]).read_bytes(), "layer 0 holds no copies of experts; expected layers "),
        (b"[1, 2]", "expected an object by layer"),
        (json.dumps({str(i): [-1] * moe.experts for i in layers}).encode(), "found -1, expected numbers from 0 on"),
        (b'{"1": "many"}', "layer 1: expected a list of numbers"),
        (b"{", "--loads .*loads.json: "),
    ]:
        file.write_bytes(given)
        with pytest.raises(BundleError, match=said):
            write_weights.write_weights(folder, loads=file)
    with pytest.raises(BundleError, match=r"--loads .*none.json: No such file"):
        write_weights.write_weights(folder, loads=tmp_path / "none.json")


def test_another_process_and_hash_seed_write_the_same_bytes(copy, small, tmp_path):
    write_weights.write_weights(copy)
    other = Path(shutil.copytree(copy, tmp_path / "else" / "where"))
    shutil.rmtree(other / "weights")
    environ = {**os.environ, "PYTHONHASHSEED": "4321", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "kimi_graph", "weights", str(other), "--checkpoint", str(small), "--jobs", "3"]
    subprocess.run(command, env=environ, check=True, capture_output=True, cwd=tmp_path)
    assert content(other / "weights") == content(copy / "weights")
    assert not any(str(tmp_path).encode() in data for data in content(other / "weights", ()).values())


def test_weights_of_another_checkpoint_replace_those_that_were_there(copy, small, tmp_path):
    """Of one with the same headers too: whether they were the same bytes nobody has to know."""
    write_weights.write_weights(copy)
    old = content(copy / "weights")
    other = Path(shutil.copytree(small, tmp_path / "other"))
    file = sorted(other.glob("*.safetensors"))[0]
    data = bytearray(file.read_bytes())
    data[-2:] = b"\x80\x3f"
    file.write_bytes(data)
    report = write_weights.write_weights(copy, checkpoint=other)
    assert report.made == sum(w["bytes"] for f in read_index(copy)["files"].values() for w in f["weights"].values())
    assert content(copy / "weights").keys() != old.keys()
    with pytest.raises(VerifyError, match="is not what its recipe makes of the checkpoint; run kimi-graph weights"):
        verify_bundle(copy, checkpoint=small, steps=0)
    assert verify_bundle(copy, checkpoint=other, steps=0).passed


def read_index(bundle):
    return read_json(bundle / "weights" / INDEX)


def test_a_bundle_that_moved_is_verified_with_its_weights(copy, small, tmp_path, monkeypatch):  # case A1
    write_weights.write_weights(copy)
    shutil.move(copy, tmp_path / "moved")
    reads = []
    read = written.Written.read
    monkeypatch.setattr(written.Written, "read", lambda self, rank, name: reads.append(name) or read(self, rank, name))
    assert verify_bundle(tmp_path / "moved", checkpoint=small, steps=1).passed
    assert set(reads) == set(open_bundle(tmp_path / "moved").weights["weights"])


@pytest.mark.slow
def test_a_mesh_is_verified_with_its_weights_in_one_process_and_in_many(made, tmp_path):
    source, checkpoint = made("linear, copies of experts")
    folder = Path(shutil.copytree(source, tmp_path / "bundle"))
    write_weights.write_weights(folder)
    assert read_index(folder)["slots"]["layers.2.moe.down"][-4:] == [0, 1, 2, 3]
    assert verify_bundle(folder, checkpoint=checkpoint, steps=1).passed
    assert verify_bundle(folder, checkpoint=checkpoint, steps=1, processes=True).passed


def test_compile_does_not_replace_a_bundle_that_holds_weights(copy, compile_small):
    write_weights.write_weights(copy)
    with pytest.raises(BundleError, match=r"holds weights that were written .* would be lost; delete .*weights"):
        compile_small(copy)
    assert open_written(open_bundle(copy)) is not None


def test_a_bundle_with_constants_has_nothing_to_write(compile_small, tmp_path):
    compile_small(tmp_path / "b", weights="constant", phases=("decode",))
    with pytest.raises(BundleError, match="holds its weights as constants; there is nothing to write"):
        write_weights.write_weights(tmp_path / "b")


# ---- a part of a parameter -------------------------------------------------------------------------------------------


@hypothesis.given(st.integers(0, 3), st.integers(1, 5), st.lists(st.integers(1, 6), max_size=3), st.integers(1, 200))
def test_blocks_are_all_elements_in_order_in_runs_of_at_most_the_room(first, count, inner, room):
    shape = (first + count, *inner)
    whole = torch.arange(math.prod(shape)).view(shape)
    found = []
    for ranges in blocks((first, first + count), inner, room):
        x = whole
        for dim, (a, b) in enumerate(ranges):
            x = x.narrow(dim, a, b - a)
        assert x.is_contiguous()
        assert x.numel() <= max(room, 1)
        found.append(x.reshape(-1))
    assert torch.equal(torch.cat(found), whole[first:].reshape(-1))


def test_two_names_that_differ_in_a_dot_are_two_weights(tmp_path):  # case W7
    """Where files are named by weights and "." becomes "_", one would be lost; and an older spelling is found."""
    import safetensors.torch

    values = {name: torch.randn(2, 8) for name in ("a.b_c", "a_b.c", "self_attention_res.proj_weight")}
    safetensors.torch.save_file({k: v.bfloat16() for k, v in values.items()}, tmp_path / SINGLE)
    specs = {
        "res": weight((2, 8), "_ _", source="language_model.model.self_attention_res_proj.weight"),
        "p": weight((2, 8), "_ _", source="a.b_c"),
        "q": weight((2, 8), "_ _", source="a_b.c"),
    }
    plan = {f"p.{name}": entry(path, specs[path]) for name, path in (("x.y_z", "p"), ("x_y.z", "q"), ("res", "res"))}
    bundle = Bundle(tmp_path, {"mesh": None, "graphs": [{"name": "g", "weights": sorted(plan)}]}, {"weights": plan})
    maker = Maker(Checkpoint.open(tmp_path, mapped=False), torch.bfloat16, specs, making.planned_weights(bundle, specs))
    assert len({h.offset for f in part_files(bundle) for h in f.held.values()}) == 3
    for name, source in (("p.x.y_z", "a.b_c"), ("p.x_y.z", "a_b.c"), ("p.res", "self_attention_res.proj_weight")):
        made = maker.part(name, (0, 0)).view(torch.bfloat16)
        assert torch.equal(made, values[source].bfloat16().reshape(-1))


def entry(path, spec, steps=(), over=None):
    """An entry of a plan of a plain bfloat16 weight."""
    shape = list(spec.shape)
    return {
        "parameter": path, "shape": shape, "dtype": "bfloat16", "bytes": 2 * math.prod(shape), "steps": to_json(steps),
        "over": over or [[] for _ in shape],
    }  # fmt: skip


def test_one_tensor_cut_for_two_weights_is_read_once_and_counted_in_both(mesh_copy):  # case W12
    """Keys and values of kv_b: absorbed on one side each; the ledger counts what a rank holds, not what is stored."""
    write_weights.write_weights(mesh_copy)
    plan, files = open_bundle(mesh_copy).weights["weights"], open_written(open_bundle(mesh_copy)).of(0)
    names = [n for n in plan if plan[n]["parameter"] == "layers.2.mla.up"]
    assert len(names) == 2
    assert plan[names[0]]["tensors"] == plan[names[1]]["tensors"]
    assert sum(files[n].bytes for n in names) * 2 == math.prod(plan[names[0]]["stored"]) * 2  # on two ranks, bfloat16
    assert files[names[0]].sha256 != files[names[1]].sha256
    maker = Maker.open(open_bundle(mesh_copy), bundle_config(open_bundle(mesh_copy)), checkpoint_of(mesh_copy))
    wanted = [making.Wanted(n, (i, 0, 0)) for n in names for i in range(2)]
    assert [task.parts for task in maker.tasks(wanted)] == [tuple(wanted)]


def checkpoint_of(bundle):
    return Checkpoint.open(read_json(bundle / LOCAL)["checkpoint"], mapped=False)


def test_what_is_not_contiguous_in_the_checkpoint_is_one_run_in_a_file_and_said(mesh_copy):  # case A4
    report = write_weights.write_weights(mesh_copy)
    assert report.shares.bytes["cut"] > 0
    assert re_line(report.text(), "cut").endswith("bytes of the checkpoint, in more ranges: columns of matrices")
    bundle = open_bundle(mesh_copy)
    config = bundle_config(bundle)
    out = load_params(read_json(mesh_copy / LOCAL)["checkpoint"], config).layers[0].kda.out
    own = out[:, out.shape[1] // 2 :]
    assert not own.is_contiguous()
    assert torch.equal(open_written(bundle).read(1, "p.layers.0.kda.out").view(torch.bfloat16), own.reshape(-1))


def re_line(text, start):
    return next(line for line in text.splitlines() if line.startswith(start))


# ---- what can be read straight into a device -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case, name, way",
    [
        ("k3.1 in two stages", "p.embed", ("in place", "")),  # rows of a matrix
        ("k3.1 in two stages", "p.layers.0.kda.out", ("cut", "")),  # columns
        ("k3.1 in two stages", "p.layers.2.mla.up.slice1_0_128", ("cut", "")),  # rows of every head
        ("k3.1 in two stages", "p.layers.1.moe.down", ("in place", "")),  # experts, each a tensor
        ("k3.1 in two stages", "p.layers.1.moe.router.float32", ("made", "cast float32")),
        ("k3.1 in two stages", "p.layers.0.kda.log_rate.exp", ("made", "exp")),
        ("k3, packed, on dp x tp", "p.layers.1.moe.down.mxfp4.weight_packed.tile", ("made", "tiles (FRACTAL_NZ)")),
        ("k3, packed, on dp x tp", "p.layers.1.moe.down.mxfp4.weight_scale", ("in place", "")),
        ("k3.1, int4", "p.layers.1.moe.down.int4_g32.weight", ("made", "mxfp4 to int4-g32")),
        ("deepseek, fp8", "p.layers.1.moe.down.fp8.weight", ("in place", "")),
        ("deepseek, fp8 made bf16", "p.layers.1.moe.down", ("made", "fp8 to bfloat16")),
        ("linear, padded", "p.embed", ("made", "zeros or copies of experts beside")),
    ],
)
def test_how_the_bytes_of_a_weight_come_about(made, case, name, way):
    folder, checkpoint = made(case)
    bundle = open_bundle(folder)
    maker = Maker.open(bundle, bundle_config(bundle), Checkpoint.open(checkpoint))
    assert in_place.way_of(maker, name, bundle.weights["weights"][name]["dtype"]) == way


@pytest.mark.parametrize("case", MESHES)
def test_what_is_in_place_is_one_range_of_bytes_of_a_file(made, case):
    """Held against the bytes: each part of such a weight is found in the checkpoint's files, tensor by tensor."""
    folder, source = made(case)
    bundle, checkpoint = open_bundle(folder), Checkpoint.open(source, mapped=False)
    maker = Maker.open(bundle, bundle_config(bundle), checkpoint)
    files = b"".join(p.read_bytes() for p in sorted(source.glob("*.safetensors")))
    found = 0
    for file in part_files(bundle)[:2]:
        for name, held in file.held.items():
            how, _ = in_place.way_of(maker, name, bundle.weights["weights"][name]["dtype"])
            spec, local = maker.specs[maker.weights[name].path], maker.weights[name].local
            pieces = max(1, round(math.prod(local) / math.prod(spec.stored))) if len(spec.source) > 1 else 1
            data = maker.part(name, held.index)
            if how == "in place":
                assert all(piece.numpy().tobytes() in files for piece in data.chunk(pieces)), name
                found += 1
    assert found


# ---- damage ----------------------------------------------------------------------------------------------------------


def test_a_changed_byte_is_refused_with_the_name_of_the_weight(copy, small):
    write_weights.write_weights(copy)
    entry = open_written(open_bundle(copy)).of(0)["p.layers.0.kda.key"]
    file = copy / "weights" / entry.file
    data = bytearray(file.read_bytes())
    data[entry.offset + 7] ^= 1
    file.write_bytes(data)
    words = r"weight p\.layers\.0\.kda\.key: SHA-256 is \w{16}\.\.\., the index says"
    with pytest.raises(BundleError, match=words):
        open_written(open_bundle(copy)).read(0, "p.layers.0.kda.key")
    with pytest.raises(BundleError, match=words):
        verify_bundle(copy, checkpoint=small, steps=0)
    with pytest.raises(BundleError, match=words + rf".* kimi-graph weights {copy} --repair makes this file anew"):
        write_weights.write_weights(copy, verify=True)


def damage(folder, name, start="rank_"):
    """Change a byte of a weight in a file whose name starts so; returns that."""
    index = read_index(folder)
    file, entry = next((f, e) for f, e in index["files"].items() if name in e["weights"] and f.startswith(start))
    with (folder / "weights" / file).open("rb+") as f:
        f.seek(entry["weights"][name]["offset"] + 7)
        old = f.read(1)
        f.seek(-1, os.SEEK_CUR)
        f.write(bytes([old[0] ^ 1]))
    return file


def inodes(folder):
    return {p.name: p.stat().st_ino for p in (folder / "weights").glob("*.bin")}


def test_repair_makes_damaged_files_anew_and_no_others(mesh_copy):
    write_weights.write_weights(mesh_copy)
    whole, before = content(mesh_copy / "weights"), inodes(mesh_copy)
    files = [f for f in read_index(mesh_copy)["files"] if f.startswith("rank_")][1:3]
    bad = {damage(mesh_copy, next(iter(read_index(mesh_copy)["files"][f]["weights"])), f) for f in files}
    with pytest.raises(BundleError, match=r"--repair makes this file anew"):
        write_weights.write_weights(mesh_copy, verify=True)
    report = write_weights.write_weights(mesh_copy, repair=True)
    assert set(report.repaired) == bad
    assert f"{len(bad)} damaged and made anew, " in report.summary
    assert report.made == sum(
        sum(w["bytes"] for w in read_index(mesh_copy)["files"][f]["weights"].values()) for f in bad
    )
    assert content(mesh_copy / "weights") == whole
    assert {name for name, inode in inodes(mesh_copy).items() if inode != before[name]} == bad
    again = write_weights.write_weights(mesh_copy, repair=True)
    assert (again.repaired, again.made, again.read) == ((), 0, report.read)


@pytest.mark.parametrize("how", ["gone", "cut", "a link"])
def test_a_file_that_is_not_whole_is_made_anew_and_no_other(mesh_copy, tmp_path, how):
    write_weights.write_weights(mesh_copy)
    whole, before = content(mesh_copy / "weights"), inodes(mesh_copy)
    file = next((mesh_copy / "weights").glob("rank_*.bin"))
    if how == "cut":
        os.truncate(file, 100)
    else:
        file.rename(tmp_path / "elsewhere")
        if how == "a link":
            file.symlink_to(tmp_path / "elsewhere")
    words = rf"{file.name}: (is missing|has 100 bytes|is a link)"
    for command in ("inspect", "lint"):
        result = CliRunner().invoke(app, [command, str(mesh_copy)])
        assert result.exit_code == 1 and re.search(words, result.output), command
    write_weights.write_weights(mesh_copy)
    assert content(mesh_copy / "weights") == whole
    assert {name for name, inode in inodes(mesh_copy).items() if inode != before.get(name)} <= {file.name}


def test_weights_are_read_again_without_the_checkpoint_they_were_made_of(mesh_copy):
    """On a host that got bundle and weights alone."""
    write_weights.write_weights(mesh_copy)
    (mesh_copy / LOCAL).unlink()
    report = write_weights.write_weights(mesh_copy, verify=True)
    assert (report.made, report.shares) == (0, None)
    assert report.read == sum(
        w["bytes"] for e in read_index(mesh_copy)["files"].values() for w in e["weights"].values()
    )
    damage(mesh_copy, "p.embed", "")
    with pytest.raises(BundleError, match=r"weight p\.embed: SHA-256"):
        write_weights.write_weights(mesh_copy, verify=True)
    next((mesh_copy / "weights").glob("rank_*.bin")).unlink()
    with pytest.raises(BundleError, match="is missing"):
        write_weights.write_weights(mesh_copy, verify=True)


def test_nan_and_infinity_of_a_checkpoint_are_named(copy, small, tmp_path):
    checkpoint = Path(shutil.copytree(small, tmp_path / "checkpoint"))
    name = "model.layers.0.self_attn.o_proj.weight"
    stored = Checkpoint.open(checkpoint).tensors[name]
    with stored.file.open("rb+") as f:
        f.seek(stored.begin)
        f.write(struct.pack("<3H", 0x7FC0, 0x3F80, 0xFF80))  # NaN, one, minus infinity
    report = write_weights.write_weights(copy, checkpoint=checkpoint, verify=True)
    assert {weight: n for (_, weight), n in report.not_finite.items()} == {"p.layers.0.kda.out": 2}
    assert report.summary.endswith("NaN or infinity in 1 weights")
    assert "p.layers.0.kda.out in rank_0000-" in report.text()
    assert report.to_json()["not_finite"][0]["numbers"] == 2
    assert CliRunner().invoke(app, ["check", str(checkpoint)]).exit_code == 0
    result = CliRunner().invoke(app, ["check", str(checkpoint), "--values"])
    assert result.exit_code == 1
    assert re.search(rf"{name}: 2 of [\d,]+ numbers are NaN or infinite", result.stdout)
    assert result.stderr.endswith(": 1 with NaN or infinity\n")
    assert CliRunner().invoke(app, ["check", str(small), "--values"]).stdout.splitlines()[-1].count(", all finite") == 1


def other_name(index, name):
    file = next(iter(index["files"]))
    index["files"][name] = index["files"].pop(file)


DAMAGE = {
    "absolute": (lambda i: other_name(i, "/etc/passwd"), r"files\.\(/etc/passwd\) is .*; expected text like"),
    "parent": (lambda i: other_name(i, "../rank_0000-0123456789ab.bin"), "expected text like"),
    "format": (lambda i: i.update(format=2), r"format is 2; expected 1\."),
    "renamed": (lambda i: i.update(shards=i.pop("files")), "no entry 'files'"),
    "model": (lambda i: i["bundle"].update(model="0" * 64), r"made for bundle\.model 0{32}, .*manifest\.json has"),
    "mesh": (lambda i: i["bundle"].update(mesh="tp=8"), r"made for bundle\.mesh tp=8, .* has None"),
    "target": (lambda i: i["bundle"].update(target="a2"), r"made for bundle\.target a2, .* has a3"),
    "plan": (lambda i: i["bundle"].update(plan="f" * 64), r"made for bundle\.plan f{32}"),
    "offset": (
        lambda i: next(iter(i["files"].values()))["weights"]["p.embed"].update(offset=1 << 40),
        r"weights\.p\.embed ends after the file",
    ),
    "negative": (
        lambda i: next(iter(i["files"].values()))["weights"]["p.embed"].update(offset=-512),
        r"offset is -512; the smallest is 0",
    ),
    "truth": (lambda i: next(iter(i["files"].values())).update(bytes=True), r"bytes is true; expected an integer"),
    "size": (lambda i: next(iter(i["files"].values())).update(bytes=1 << 50), r"has [\d,]+ bytes, the index says"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_an_index_that_says_something_else_is_refused_with_the_key(copy, small, what):
    write_weights.write_weights(copy)
    change, words = DAMAGE[what]
    index = read_index(copy)
    change(index)
    (copy / "weights" / INDEX).write_bytes(dump(index))
    with pytest.raises(BundleError, match=words):
        open_written(open_bundle(copy))
    with pytest.raises(BundleError, match=words):
        verify_bundle(copy, checkpoint=small, steps=0)
    assert write_weights.write_weights(copy).made > 0  # it is written anew
    assert open_written(open_bundle(copy)) is not None


def test_weights_of_another_bundle_are_refused(copy, compile_small, tmp_path):
    write_weights.write_weights(copy)
    compile_small(tmp_path / "other", phases=("decode",))
    shutil.copytree(copy / "weights", tmp_path / "other" / "weights")
    with pytest.raises(BundleError, match=r"weights were made for bundle\.plan \w{32}, .*other/manifest\.json has"):
        open_written(open_bundle(tmp_path / "other"))


def test_a_missing_file_is_named(copy):
    write_weights.write_weights(copy)
    file = next((copy / "weights").glob("rank_*.bin"))
    file.unlink()
    with pytest.raises(BundleError, match=rf"{file.name}: is missing, the index says"):
        open_written(open_bundle(copy))


def test_links_are_neither_read_nor_written_through(copy, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (copy / "weights").symlink_to(outside)
    with pytest.raises(BundleError, match=r"weights: a link to .*outside, outside the bundle"):
        write_weights.write_weights(copy)
    inner = copy / "inner"
    inner.mkdir()
    (copy / "weights").unlink()
    (copy / "weights").symlink_to(inner)
    with pytest.raises(BundleError, match=r"weights: is a link; expected a folder inside the bundle"):
        write_weights.write_weights(copy)
    with pytest.raises(BundleError, match="is a link"):
        open_written(open_bundle(copy))
    (copy / "weights").unlink()
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (copy / "weights").mkdir()
    for name in ("rank_0000.part", "index.json.part", "local.json.part"):
        (copy / "weights" / name).symlink_to(victim)
    write_weights.write_weights(copy)
    file = next((copy / "weights").glob("rank_*.bin"))
    file.rename(tmp_path / "elsewhere.bin")
    file.symlink_to(tmp_path / "elsewhere.bin")
    with pytest.raises(BundleError, match=r"is a link to .*elsewhere\.bin; a bundle's weights lie in the bundle"):
        open_written(open_bundle(copy))
    (copy / "weights" / JOURNAL).symlink_to(victim)
    with pytest.raises(BundleError, match=r"journal\.jsonl: Too many levels of symbolic links"):
        write_weights.write_weights(copy)
    assert victim.read_text() == "mine"
    assert list(outside.iterdir()) == []


def test_files_that_are_not_ours_stay(copy):
    (copy / "weights").mkdir()
    for name in ("notes.txt", "my-model.bin", "other.part"):
        (copy / "weights" / name).write_text("mine")
    write_weights.write_weights(copy)
    assert all((copy / "weights" / n).read_text() == "mine" for n in ("notes.txt", "my-model.bin", "other.part"))


def test_a_missing_or_short_shard_is_one_line_and_nothing_is_written(copy, small, tmp_path):
    other = Path(shutil.copytree(small, tmp_path / "other"))
    file = sorted(other.glob("*.safetensors"))[1]
    data = file.read_bytes()
    file.write_bytes(data[:-100])
    with pytest.raises(CheckpointError, match=rf"{file.name}: .* cut short"):
        write_weights.write_weights(copy, checkpoint=other)
    file.unlink()
    with pytest.raises(CheckpointError, match=rf"{file.name}: there is no such file, but the index names it"):
        write_weights.write_weights(copy, checkpoint=other)
    index = json.loads((other / CHECKPOINT_INDEX).read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], "../x.safetensors")
    (other / CHECKPOINT_INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"file name '\.\./x\.safetensors'; expected a plain name"):
        write_weights.write_weights(copy, checkpoint=other)
    assert not (copy / "weights").exists()


def test_a_shard_that_is_cut_short_meanwhile_is_named_and_the_old_weights_stay(copy, small, tmp_path, monkeypatch):
    write_weights.write_weights(copy)
    before = content(copy / "weights")
    other = Path(shutil.copytree(small, tmp_path / "other"))
    file = sorted(other.glob("*.safetensors"))[1]
    file.touch()
    lay_out = write_weights._Run._laid_out

    def cut(self, *args):
        os.truncate(file, file.stat().st_size - 100)
        return lay_out(self, *args)

    monkeypatch.setattr(write_weights._Run, "_laid_out", cut)
    with pytest.raises(CheckpointError, match=rf"{file.name}: .* bytes are missing: the file was cut short"):
        write_weights.write_weights(copy, checkpoint=other)
    after = content(copy / "weights")
    assert {name: after[name] for name in before} == before
    assert open_written(open_bundle(copy)).ranks == (0,)


# ---- no room ---------------------------------------------------------------------------------------------------------


def test_a_disk_without_room_is_refused_before_anything_is_made(copy, monkeypatch):
    usage = shutil.disk_usage(copy)
    monkeypatch.setattr(write_weights.shutil, "disk_usage", lambda folder: usage._replace(free=1000))
    with pytest.raises(BundleError, match=r"weights: [\d,]+ bytes are to be written, the disk has 1,000 left\."):
        write_weights.write_weights(copy)
    assert open_written(open_bundle(copy)) is None


def alone(*arguments, **options):
    """What `stop_weights.py` prints."""
    command = [sys.executable, str(Path(__file__).with_name("stop_weights.py")), *map(str, arguments)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, **options)
    assert not done.stderr, done.stderr
    return done.stdout.strip()


def test_a_disk_that_becomes_full_keeps_what_is_done_and_the_next_run_goes_on(copy, tmp_path):
    """The system's limit of a file's size stands for a disk: writing fails in the same way."""
    whole = Path(shutil.copytree(copy, tmp_path / "whole"))
    report = write_weights.write_weights(whole)
    words = alone("limited", copy, report.bytes // 2)
    assert words.startswith(f"error: {copy}/weights: File too large; what was there is as it was; make room, and run")
    assert open_written(open_bundle(copy)) is None
    lines = (copy / "weights" / JOURNAL).read_text().splitlines()
    assert len(lines) > 1
    assert f"{report.made:,} written" not in (resumed := alone("limited", copy, 0))
    assert " written" in resumed
    assert content(copy / "weights") == content(whole / "weights")


@pytest.mark.usefixtures("nobody")  # folders above can be reached then
def test_a_folder_that_cannot_be_written_is_one_line(copy):
    copy.chmod(0o555)
    try:
        words = (
            f"error: {copy}/weights/index.json: {copy} cannot be written to (Permission denied); choose another place."
        )
        assert alone("nobody", copy, 0) == words
    finally:
        copy.chmod(0o755)
    assert not (copy / "weights").exists()


# ---- interruption ----------------------------------------------------------------------------------------------------


@pytest.fixture
def two_checkpoints(made, tmp_path):
    """Of the same model: bytes differ, headers do not."""
    first = made("k3.1 in two stages")[1]
    second = Path(shutil.copytree(first, tmp_path / "second"))
    for file in second.glob("*.safetensors"):
        data = bytearray(file.read_bytes())
        data[-2:] = b"\x80\x3f"
        file.write_bytes(data)
    return first, second


@pytest.mark.parametrize("over", [False, True], ids=["nothing", "other weights"])
def test_a_run_that_is_killed_leaves_the_old_weights_or_goes_on_to_the_same_bytes(mesh_copy, two_checkpoints, over):
    found = json.loads(alone("killed", mesh_copy, 4, *two_checkpoints[: 1 + over]))
    assert found["killed"] == 4


@pytest.mark.heavy
@pytest.mark.parametrize("over", [False, True], ids=["nothing", "other weights"])
def test_fifty_kills_at_random_moments_change_nothing(mesh_copy, two_checkpoints, over):
    found = json.loads(alone("killed", mesh_copy, 50, *two_checkpoints[: 1 + over]))
    assert found["killed"] == 50
    assert found["resumed"] > 5  # kills were where something had been done


def test_what_the_journal_says_is_not_made_again(mesh_copy, monkeypatch):
    """Stopped after some parts, as by Ctrl-C; then only the others are made."""
    whole = write_weights.write_weights(mesh_copy).made
    expected = content(mesh_copy / "weights")
    shutil.rmtree(mesh_copy / "weights")
    make, count = Maker.make, []

    def stopped(self, task, sink):
        count.append(task)
        if len(count) > 100:
            raise KeyboardInterrupt
        make(self, task, sink)

    monkeypatch.setattr(Maker, "make", stopped)
    with pytest.raises(KeyboardInterrupt):
        write_weights.write_weights(mesh_copy, jobs=1)
    done = count[:100]
    monkeypatch.setattr(Maker, "make", make)
    again = write_weights.write_weights(mesh_copy, jobs=1)
    assert again.made == whole - sum(task.bytes for task in done)
    assert content(mesh_copy / "weights") == expected


def test_a_last_line_that_was_cut_off_does_not_count(tmp_path):
    about, path = {"for": "this"}, tmp_path / "journal.jsonl"
    with journal.Journal.held(path) as j:
        assert j.start(about) == {}
        j.add({("rank_0000", "p.a"): "1"})
        j.add({("rank_0000", "p.b"): "2"})
    path.write_bytes(path.read_bytes()[:-4])
    with journal.Journal.held(path) as j:
        assert j.start(about) == {("rank_0000", "p.a"): "1"}
        j.add({("rank_0000", "p.c"): "3"})
    with journal.Journal.held(path) as j:
        assert j.start(about) == {("rank_0000", "p.a"): "1", ("rank_0000", "p.c"): "3"}
        assert j.start({"for": "that"}) == {}
        assert j.start({"for": "that"}) == {}


@pytest.mark.parametrize(
    "text", ["", "\x00", "[]\n", "{}\n[1]\n", "null\n", '{"for": "this"}\n[["a", "b"]]\n', "{" * 9000]
)
def test_a_damaged_journal_is_forgotten(tmp_path, text):
    (tmp_path / "journal.jsonl").write_text(text)
    with journal.Journal.held(tmp_path / "journal.jsonl") as j:
        assert j.start({"for": "this"}) == {}
        j.add({("rank_0000", "p.a"): "1"})
        assert j.start({"for": "this"}) == {("rank_0000", "p.a"): "1"}


def test_two_runs_at_once_are_refused(copy):
    (copy / "weights").mkdir()
    with (
        journal.Journal.held(copy / "weights" / JOURNAL),
        pytest.raises(BundleError, match="another run of kimi-graph weights is writing here"),
    ):
        write_weights.write_weights(copy)


def test_lines_of_files_that_are_gone_do_not_count(mesh_copy):
    """A journal that names parts of a file that another run made anew would give zeros."""
    expected = write_weights.write_weights(mesh_copy)
    whole = content(mesh_copy / "weights")
    index = read_index(mesh_copy)
    about = {
        "for": written.described(open_bundle(mesh_copy)),
        "source": write_weights._identity(checkpoint_of(mesh_copy)),
    }
    shutil.rmtree(mesh_copy / "weights")
    (mesh_copy / "weights").mkdir()
    lines = {
        (name.rpartition("-")[0], w): e["sha256"] for name, f in index["files"].items() for w, e in f["weights"].items()
    }
    with journal.Journal.held(mesh_copy / "weights" / JOURNAL) as j:
        j.restart(about, lines)
    assert write_weights.write_weights(mesh_copy).made == expected.made
    assert content(mesh_copy / "weights") == whole


def test_every_weight_that_graphs_read_has_a_recipe(copy):
    manifest = read_json(copy / MANIFEST)
    manifest["graphs"][0]["weights"].append("p.nothing")
    bundle = Bundle(copy, manifest, read_json(copy / WEIGHTS))
    with pytest.raises(BundleError, match=r"weight p\.nothing of prefill_b2_t16 has no recipe"):
        part_files(bundle)


def test_recipes_that_do_not_work_by_rows_are_run_on_whole_parts():
    spec = weight((4, 3), "_ _", source="x")
    for steps, grain in [
        ((), "elements"),
        ((Step("exp"), Step("neg"), Step("cast", ("float32",))), "elements"),
        ((Step("slice", (1, 0, 2)),), "rows"),
        ((Step("slice", (0, 0, 2)),), "whole"),
        ((Step("permute", (1, 0)),), "whole"),
        ((Step("slice", (1, 0, 2)), Step("view", (8,))), "whole"),
        ((Step("slice", (1, 0, 2)), Step("view", (4, 2, 1))), "rows"),
    ]:
        assert making.Weight("x", "", "", steps, (1, 1), spec.shape, 24).grain == grain, steps
