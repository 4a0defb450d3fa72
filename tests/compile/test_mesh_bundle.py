"""Bundles of a mesh: what compile writes, verify and lint find, and what they notice."""

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from kimi_graph.checkpoint import write_shards
from kimi_graph.compile import air
from kimi_graph.compile.bundle import GRAPHS, MANIFEST, WEIGHTS, dump, file_hash, open_bundle, read_json
from kimi_graph.compile.cost import inspect_cost
from kimi_graph.compile.driver import Request, compile_model
from kimi_graph.compile.ge_proto import ModelDef, dtype_of, shape_of
from kimi_graph.compile.inspect import inspect_bundle, inspect_graph
from kimi_graph.compile.lint import lint_bundle
from kimi_graph.compile.order import overlaps
from kimi_graph.compile.ranks import Plan
from kimi_graph.compile.targets import target
from kimi_graph.compile.verify import bundle_config, verify_bundle
from kimi_graph.errors import BundleError, CompileError, ShardingError, VerifyError
from kimi_graph.fixture import small_config
from kimi_graph.models import decoder, init_params
from kimi_graph.parallel import Mesh
from kimi_graph.read_config import load_config, parse_config


@pytest.fixture(scope="module")
def on_mesh(family_bundle):
    """`on_mesh("tp=2")`: the bundle of a small model on a mesh, made when first asked for. Read only."""

    @functools.cache
    def made(mesh: str, name: str = "kimi-linear-48b", **options) -> Path:
        return family_bundle(f"{name}", "a3", mesh=Mesh.parse(mesh), **{"batch": 4} | options)

    return made


@pytest.fixture
def copy(on_mesh, tmp_path):
    """A bundle of two stages of two ranks that may be changed."""
    return Path(shutil.copytree(on_mesh("pp=2,tp=2"), tmp_path / "bundle"))


def change_manifest(folder: Path, change) -> None:
    manifest = read_json(folder / MANIFEST)
    change(manifest)
    (folder / MANIFEST).write_bytes(dump(manifest))


def change_graph(folder: Path, name: str, change) -> None:
    """Change a graph's file, and the manifest's hash with it."""
    file = folder / GRAPHS / f"{name}.air"
    model = air.from_bytes(file.read_bytes(), file.name)
    change(model.graph[0])
    file.write_bytes(air.to_bytes(model))

    def note(manifest) -> None:
        (entry,) = [g for g in manifest["graphs"] if g["name"] == name]
        entry |= {"sha256": file_hash(file), "bytes": file.stat().st_size}

    change_manifest(folder, note)


# ---- what is written -------------------------------------------------------------------------------------------------


def test_there_is_a_graph_for_each_stage_and_phase(on_mesh):
    manifest = open_bundle(on_mesh("pp=2,tp=2")).manifest
    names = [g["name"] for g in manifest["graphs"]]
    assert names == ["prefill_b4_t16_s0", "prefill_b4_t16_s1", "decode_b4_s0", "decode_b4_s1"]
    assert [g["stage"] for g in manifest["graphs"]] == [0, 1, 0, 1]
    first, last = manifest["graphs"][2:]
    assert first["reads"] == [] and last["reads"] == first["gives"] and last["gives"] == ["logits"]


def test_the_manifest_says_ranks_groups_rules_and_collectives(on_mesh):
    manifest = open_bundle(on_mesh("pp=2,dp=2,tp=2")).manifest
    mesh = manifest["mesh"]
    assert (mesh["text"], mesh["ranks"]) == ("pp=2,dp=2,tp=2", 8)
    assert [s["ranks"] for s in mesh["stages"]] == [[0, 3], [4, 7]]
    assert mesh["groups"]["tensor"] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert mesh["rules"]["decode"]["heads"] == "tensor" and mesh["rules"]["decode"]["embed"] == "whole"
    shards = manifest["state"]["shards"]
    assert [(s["ranks"], s["rows"], s["slots"]) for s in shards] == [
        ([0, 1, 4, 5], [0, 2], [0, 3]),
        ([2, 3, 6, 7], [2, 4], [3, 6]),
    ]
    assert all(c["bytes"] > 0 for g in manifest["graphs"] for c in g["collectives"])
    memory = manifest["memory"]
    assert max(s["weights"] + s["states"] for s in memory["stages"]) == memory["weights"] + memory["states"]


def test_a_bundle_of_one_rank_has_no_mesh(bundle):
    manifest = open_bundle(bundle).manifest
    assert manifest["mesh"] is None and "shards" not in manifest["state"]
    assert all("stage" not in g for g in manifest["graphs"])


def test_a_weight_says_which_part_of_its_parameter_a_rank_has(on_mesh):
    plan = open_bundle(on_mesh("tp=2")).weights
    entry = plan["weights"]["p.layers.0.kda.query"]
    assert entry["over"] == [["tensor"], [], []]
    assert plan["generated"]["own_index.tensor"] == ["own_index", ["tensor"]]


def test_the_defaults_share_out_over_the_mesh(compile_small):
    made = compile_small(None, mesh=Mesh.parse("dp=2,tp=2"), batch=None, chunk=None)
    assert [(g["rows"], g["tokens"]) for g in made.manifest["graphs"]] == [(2, 64), (2, 1)]
    assert "mesh      dp=2,tp=2: 4 ranks" in made.text()


@pytest.mark.parametrize(
    "mesh, options, message",
    [
        ("tp=8", {}, r"cannot be on tp=8:\n.*heads=4 does not divide over 8 \(rule heads -> tensor\)"),
        ("dp=2", {"batch": 3}, r"--batch: batch=3 does not divide over 2 \(rule batch -> data\)\. Nearest: 2, 4"),
        ("dp=2", {"batch": 2, "pages": 13}, r"--pages: pages=13 does not divide over 2"),
        ("pp=4", {}, r"pp=4: there are 3 layers"),
        ("tp=2", {"weights": "constant"}, r"--weights constant: ranks of a mesh have different weights"),
        ("cp=2", {"chunk": 15}, r"--chunk: queries=15 does not divide over 2 \(rule queries -> context\)"),
        ("cp=2", {"pages": 13}, r"--pages: pages=13 does not divide over 2 \(rule pages -> context\)"),
        ("cp=2", {"pages": 4}, r"--pages 4: .* page 0 is nobody's on each of 2 ranks that share them out; at least 6"),
        ("tp=3", {}, r"vocab=512 does not divide over 3 .* or --pad: 513 rows, the last ones zero"),
        (
            "tp=2",
            {"redundant_experts": 3},
            r"--redundant-experts 3: 19 slots do not divide over 2 ranks. Nearest: 2, 4",
        ),
        ("tp=2", {"moe_chunks": 99, "exchange": True}, r"--moe-chunks 99: a rank sends 16 rows of a step; at most 16"),
        ("tp=2", {"moe_chunks": 2}, r"--moe-chunks 2: rows are sent to their experts with --exchange alone"),
        (None, {"split_cache": True}, r"--split-cache is for many ranks; give a --mesh"),
        (None, {"redundant_experts": 2}, r"--redundant-experts is for many ranks; give a --mesh"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused_before_anything_is_traced(compile_small, monkeypatch, mesh, options, message):
    monkeypatch.setattr("kimi_graph.compile.driver.Late", lambda *_, **__: pytest.fail("went on"))
    with pytest.raises((ShardingError, CompileError), match=message):
        compile_small(None, mesh=None if mesh is None else Mesh.parse(mesh), **options)


def test_the_nearest_mesh_that_is_named_needs_no_padding():
    """Six heads, a vocabulary of 512: tp=3 is as near to 4, and has to be padded."""
    small = parse_config(small_config(load_config("kimi-linear-48b"), ways=3), origin="six heads", name="six")
    request = Request(config=small, target=target("a3"), max_len=64, mesh=Mesh.parse("tp=4"), pad=True, chunk=64)
    with pytest.raises(ShardingError, match=r"everything divides, nothing padded: 2\."):
        request.check()


def test_of_sizes_that_were_chosen_no_other_mesh_is_proposed(compile_small):
    with pytest.raises(ShardingError, match=r"token=1 does not divide over 2 .* Nearest: 2$"):
        compile_small(None, mesh=Mesh.parse("tp=2"), exchange=True, batch=1, phases=("decode",))


def test_a_chunk_that_the_queries_of_an_indexer_do_not_divide_is_refused(monkeypatch):
    from tests.compile.family import small_model

    monkeypatch.setattr("kimi_graph.compile.driver.Late", lambda *_, **__: pytest.fail("went on"))
    with pytest.raises(ShardingError, match=r"--chunk: index_queries=18 does not divide over 4 .* Nearest: 16, 20"):
        compile_model(
            small_model("kimi-k3.1-pro"), target=target("a3"), out=None, mesh=Mesh.parse("tp=4"), chunk=18,
            max_len=96, page=16, patches=16,
        )  # fmt: skip


# ---- verify ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", ["tp=2", "dp=2,tp=2", "pp=2,dp=2", "cp=2", "dp=2,cp=2"])
def test_a_bundle_of_a_mesh_is_its_model(on_mesh, mesh):
    report = verify_bundle(on_mesh(mesh), steps=2)
    assert report.passed, report.text()
    assert all(r.error < 1e-13 for r in report.rows if r.mode == "exact")
    assert {r.what for r in report.rows} >= {"logits", "kda.memory", "mla.latent"}


EXCHANGE = {"exchange": True, "moe_chunks": 2, "redundant_experts": 4}
SHARED = (  # a mesh, and how rows, caches and experts lie on it
    ("tp=4", {}),
    ("tp=2,dp=2", {}),
    ("dp=2,tp=2,ep=2", {}),
    ("pp=2,tp=2", {}),
    ("cp=4", {}),
    ("cp=2,tp=2", {}),
    ("pp=2,dp=2,tp=2", {}),
    ("tp=2", {"split_cache": True}),
    ("tp=3", {"pad": True, "ways": 3}),
    ("dp=2,tp=2", {"exchange": True}),
    ("dp=2,tp=2", EXCHANGE),
    ("dp=2,tp=2,ep=2", {"redundant_experts": 2}),
)


@pytest.mark.heavy
@pytest.mark.parametrize("mesh, options", SHARED, ids=str)
@pytest.mark.parametrize("name", ["kimi-linear-48b", "kimi-k3", "kimi-k3.1-pro", "deepseek-v3.2", "glm-5.2"])
def test_bundles_of_every_mesh_are_their_models(on_mesh, host, name, mesh, options):
    chunk = {"chunk": 24 if "ways" in options else 16}
    report = verify_bundle(on_mesh(mesh, name, **options, **chunk), steps=4)
    assert report.passed, report.text()
    assert lint_bundle(on_mesh(mesh, name, **options, **chunk), host.root).passed


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, mesh, options",
    [
        ("kimi-k3.1-pro", "cp=2,tp=2", {}),
        ("kimi-linear-48b", "tp=3", {"pad": True, "ways": 3, "batch": 3}),
        pytest.param("deepseek-v3.2", "tp=2", {"split_cache": True}, marks=pytest.mark.heavy),
        pytest.param("kimi-linear-48b", "dp=2,tp=2", EXCHANGE, marks=pytest.mark.heavy),
    ],
    ids=str,
)
def test_choices_of_a_mesh_are_kept_through_bundle_and_verify(on_mesh, host, name, mesh, options):
    folder = on_mesh(mesh, name, **options)
    report = verify_bundle(folder, steps=2)
    assert report.passed, report.text()
    assert all(r.error < 1e-13 for r in report.rows if r.mode == "exact")
    assert lint_bundle(folder, host.root).passed


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"weights_format": "int4"}, {"kv_dtype": "int8"}], ids=str)
def test_packed_experts_and_caches_in_8_bits_are_shared_out(on_mesh, options):
    name = "kimi-linear-48b" if "weights_format" in options else "deepseek-v3.2"
    report = verify_bundle(on_mesh("dp=2,tp=2", name, **options), steps=1)
    assert report.passed, report.text()


@pytest.mark.slow
def test_processes_find_what_lockstep_finds(on_mesh):
    folder = on_mesh("pp=2,tp=2")
    lockstep, processes = verify_bundle(folder, steps=1), verify_bundle(folder, steps=1, processes=True)
    assert processes.passed, processes.text()
    logits = [[r for r in report.rows if r.what == "logits"] for report in (lockstep, processes)]
    assert logits[0] == logits[1]  # to the bit
    assert "4 ranks, each in a process of its own, over gloo" in processes.text()


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [pytest.param(4, marks=pytest.mark.heavy), 9])  # while they start, and run
def test_ctrl_c_ends_all_processes_at_once_and_quietly(on_mesh, seconds):
    command = [sys.executable, "-m", "kimi_graph", "verify", str(on_mesh("pp=2,tp=2")), "--processes", "--steps", "20"]
    quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    process = subprocess.Popen(
        command, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler), **quiet
    )
    time.sleep(seconds)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole group
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130 and errors.splitlines()[-1] == "interrupted"
    assert "Traceback" not in errors


def test_processes_are_for_a_mesh(bundle):
    with pytest.raises(VerifyError, match=r"--processes: .* is of one rank; compile it with --mesh"):
        verify_bundle(bundle, processes=True)


def test_a_weight_of_the_wrong_part_is_noticed(copy, monkeypatch):
    monkeypatch.setattr("kimi_graph.compile.ranks.cut", lambda x, dims, mesh, rank: cut(x, dims, mesh, rank ^ 1))
    from kimi_graph.parallel.simulate import scatter

    def cut(x, dims, mesh, rank):
        return scatter(mesh, x, dims)[rank]

    assert not verify_passes(copy)


def verify_passes(folder: Path) -> bool:
    try:
        return verify_bundle(folder, steps=1, modes=("exact",)).passed
    except (BundleError, VerifyError):
        return False


@pytest.mark.parametrize(
    "path, value",
    [
        (("mesh", "text"), "tp=4"),
        (("mesh", "text"), 3),
        (("mesh", "split_cache"), True),
        (("mesh", "exchange"), True),
        (("mesh", "padded"), 3),
        (("mesh", "redundant_experts"), 2),
        (("mesh", "moe_chunks"), "2"),
        (("mesh", "moe_chunks"), 2),  # without exchange
        (("mesh", "moe_chunks"), -1),
        (("mesh", "axes"), [["tensor", 2], ["pipe", 2]]),
        (("weights", "file"), "/etc/hostname"),
        (("assumptions",), ["none"]),
        (("state", "pools"), 2),
        (("mesh", "groups", "tensor"), [[0, 2], [1, 3]]),
        (("mesh", "rules", "decode", "heads"), "whole"),
        (("mesh", "stages", 0, "ranks"), [0, 2]),
        (("graphs", 3, "reads"), []),
        (("graphs", 2, "stage"), 1),
        (("graphs", 2, "stage"), 7),
        (("graphs", 2, "collectives", 0, "count"), 1),
        (("graphs", 2, "inputs", 0, "over"), [["tensor"], []]),
        (("state", "shards", 0, "rows"), [0, 1]),
        (("state", "states", 0, "local", 0), 1),
        (("state", "states", 0, "stage"), 1),
        (("memory", "weights"), 1),
    ],
)
def test_a_manifest_that_says_otherwise_is_noticed(copy, path, value):
    def change(manifest) -> None:
        at = manifest
        for key in path[:-1]:
            at = at[key]
        assert at[path[-1]] != value
        at[path[-1]] = value

    change_manifest(copy, change)
    with pytest.raises(BundleError):
        verify_bundle(copy, steps=1)
    with contextlib.suppress(BundleError):  # what the schema does not know is not read at all
        assert not lint_bundle(copy).passed


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda graphs: graphs.pop(3), "phase decode: stage 1 of 2 has no graphs, expected one"),
        (lambda graphs: graphs.append(graphs[3]), "phase decode: stage 1 of 2 has 2 graphs, expected one"),
    ],
)
def test_every_stage_has_one_graph(copy, change, words):
    change_manifest(copy, lambda m: change(m["graphs"]))
    with pytest.raises(BundleError, match=words):
        verify_bundle(copy, steps=1)
    assert words in faults(copy)["files"]


@pytest.mark.parametrize(
    "path, value",
    [
        (("mesh",), []),
        (("mesh", "groups"), None),
        (("mesh", "stages"), None),
        (("mesh", "stages", 0, "ranks"), [0, 1, 4, 5]),
        (("graphs",), []),
        (("graphs", 3, "stage"), "1"),
        (("state",), None),
        (("model",), None),
        (("target", "name"), ["a3"]),
    ],
)
def test_lint_says_of_any_manifest_in_a_line_that_it_is_no_such_one(copy, path, value):
    def change(manifest) -> None:
        at = manifest
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value

    change_manifest(copy, change)
    with contextlib.suppress(BundleError):
        assert not lint_bundle(copy).passed


def test_a_rule_that_is_missing_is_named(copy):
    change_manifest(copy, lambda m: m["mesh"]["rules"]["decode"].pop("vocab"))
    with pytest.raises(BundleError, match=r'mesh\.rules\.decode\.vocab is "nothing"; .* make it "tensor"'):
        verify_bundle(copy, steps=1)


def test_a_plan_that_cuts_elsewhere_is_noticed(copy):
    weights = json.loads((copy / WEIGHTS).read_bytes())
    weights["weights"]["p.layers.0.kda.query"]["over"] = [[], [], []]
    (copy / WEIGHTS).write_bytes(dump(weights))
    change_manifest(copy, lambda m: m["weights"].update(sha256=file_hash(copy / WEIGHTS)))
    with pytest.raises(BundleError, match=r"weights\.p\.layers\.0\.kda\.query\.over\.0 is \[\]"):
        verify_bundle(copy, steps=1)


@pytest.mark.parametrize("name, given", [("tokens", (4, 1)), ("p.embed", (512, 256))])
def test_what_is_split_otherwise_than_when_it_was_compiled_is_refused(on_mesh, name, given):
    """Public case A8: a graph has one shape for each input and is never compiled anew; here all rows, and all words."""
    bundle = open_bundle(on_mesh("dp=2,tp=2"))
    plan = Plan.read(bundle, bundle_config(bundle))
    executor = plan.executor("decode", 0)
    ops = plan.models["decode", 0].graph[0].op
    made = {op.name: torch.zeros(shape_of(d), dtype=dtype_of(d)) for op in ops for d in op.output_desc[:1]}
    assert list(made[name].shape) == [given[0] // 2, *given[1:]]
    inputs, states = ({n: made[n] for n in names} for names in (executor.inputs, executor.states))
    inputs[name] = torch.zeros(given, dtype=made[name].dtype)
    with pytest.raises(BundleError, match=rf"{re.escape(name)} \(Data\): .*{re.escape(str(list(given)))}"):
        for _ in executor.steps(inputs, states, "native"):
            pass


# ---- places --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def placed(host, tmp_path_factory):
    """A bundle whose rows go to experts through CANN's pair: experts as wide as it wants them."""
    source = small_config(load_config("kimi-k3"), 4)
    source["text_config"]["routed_expert_hidden_size"] = 1024
    config = parse_config(source, origin="wide experts", name="wide")
    folder, out = tmp_path_factory.mktemp("wide"), tmp_path_factory.mktemp("bundles") / "wide"
    write_shards(folder, decoder.model_specs(config), init_params(config, 0, config.dtype), config.dtype, 1 << 40)
    (folder / "config.json").write_text(json.dumps(source))
    compile_model(
        config, target=target("a3"), out=out, checkpoint=folder, mesh=Mesh.parse("dp=2,tp=2"), exchange=True,
        redundant_experts=4, batch=4, chunk=16, max_len=64, page=16, patches=16,
    )  # fmt: skip
    return out


@pytest.mark.slow
def test_a_rank_is_told_its_place_when_its_graph_is_loaded(placed, host):
    manifest = open_bundle(placed).manifest
    (entry,) = [g for g in manifest["graphs"] if g["phase"] == "decode"]
    assert entry["places"] == {
        kind: {"attribute": "ep_rank_id", "group": "experts:data,tensor"}
        for kind in ("MoeDistributeCombineV2", "MoeDistributeDispatchV2")
    }
    assert manifest["mesh"]["groups"]["experts:data,tensor"] == [[0, 1, 2, 3]]
    report = verify_bundle(placed, steps=2)
    assert report.passed, report.text()
    assert lint_bundle(placed, host.root).passed


@pytest.mark.slow
def test_ranks_at_another_place_are_noticed(placed, monkeypatch):
    monkeypatch.setattr("kimi_graph.compile.ranks.bind_rank", lambda model, place: model)
    assert not verify_passes(placed)


# ---- lint ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", ["tp=2", "pp=2,tp=2", "pp=2,dp=2,tp=2"])
def test_what_compile_writes_is_proved(on_mesh, host, mesh):
    report = lint_bundle(on_mesh(mesh), host.root)
    assert report.passed, report.text()
    assert [p.name for p in report.proofs] == ["files", "kernels", "graphs", "groups", "collectives", "sums", "stages"]


def test_a_bundle_of_one_rank_is_proved_too(bundle, host):
    assert lint_bundle(bundle, host.root).passed


def test_damage_is_found_from_the_hash(copy):
    file = copy / GRAPHS / "decode_b4_s0.air"
    file.write_bytes(file.read_bytes() + b"\0")
    with pytest.raises(BundleError, match="it was changed or damaged"):
        lint_bundle(copy)


def collectives(graph):
    return [op for op in graph.op if op.type.startswith("Hcom")]


def faults(folder: Path) -> dict[str, str]:
    return {p.name: p.found for p in lint_bundle(folder).proofs if not p.passed}


def test_a_group_that_is_not_in_the_manifest_is_named(copy):
    def change(graph) -> None:
        collectives(graph)[0].attr["group"].s = b"other"

    change_graph(copy, "decode_b4_s0", change)
    assert "group 'other' is not in the manifest" in faults(copy)["groups"]


def test_a_group_across_stages_differs_at_a_step_that_is_named(copy):
    change_manifest(copy, lambda m: m["mesh"]["groups"].update(tensor=[[0, 2], [1, 3]]))
    found = faults(copy)
    assert "rank 0 is at" in found["collectives"] and "rank 2 at" in found["collectives"]


def test_an_edge_of_another_shape_is_named(copy):
    def change(graph) -> None:
        (x,) = [op for op in graph.op if op.name == "2.x"]
        x.output_desc[0].shape.dim[0] = 2

    change_graph(copy, "decode_b4_s1", change)
    assert "decode: 2.x is given as bfloat16[4, 1, 256], stage 1 reads bfloat16[2, 1, 256]" in faults(copy)["stages"]


def test_a_stage_that_reads_what_nobody_gives_waits_in_a_circle(copy):
    def change(manifest) -> None:
        entries = {g["name"]: g for g in manifest["graphs"]}
        entries["decode_b4_s0"]["stage"], entries["decode_b4_s1"]["stage"] = 1, 0

    change_manifest(copy, change)
    assert "waits for 2.x, which stage 1 gives; stages would wait in a circle" in faults(copy)["stages"]


# ---- inspect ---------------------------------------------------------------------------------------------------------


def test_inspect_lists_the_nodes_of_all_stages(on_mesh):
    both, second = (inspect_graph(on_mesh("pp=2,tp=2"), name) for name in ("decode", "decode_b4_s1"))
    assert [nodes.name for nodes in both.stages] == ["decode_b4_s0", "decode_b4_s1"]
    assert both.text().endswith(f"decode_b4_s1\n{second.text()}")
    assert both.to_json()["decode_b4_s1"] == second.to_json()
    with pytest.raises(BundleError, match=r"its phases are prefill, decode, its graphs prefill_b4_t16_s0, "):
        inspect_graph(on_mesh("pp=2,tp=2"), "vision")


def test_inspect_prints_what_a_rank_holds(on_mesh):
    text = inspect_bundle(on_mesh("pp=2,tp=2")).text()
    assert "mesh      pp=2,tp=2: 4 ranks = pipe 2 x tensor 2; ep=2" in text
    assert "a rank of stage 1 holds" in text and "HcomAllReduce over tensor" in text
    assert "  reads    2.x of other stages" in text


def test_inspect_says_what_may_run_while_collectives_travel(on_mesh, tmp_path, monkeypatch):
    """Read off the graphs' edges, not off the manifest: with one more edge it is one less."""
    monkeypatch.setattr("kimi_graph.compile.order.LARGE", 1)  # products of small models count too
    folder = Path(shutil.copytree(on_mesh("tp=2", "kimi-k3.1-pro"), tmp_path / "bundle"))
    (decode,) = [g["name"] for g in open_bundle(folder).manifest["graphs"] if g["phase"] == "decode"]

    def gathers():
        contents = inspect_bundle(folder)
        found = json.loads(json.dumps(contents.to_json()))["overlaps"][decode]
        covered, count = (sum(kind[key] for kind in found) for key in ("covered", "count"))
        assert f"  overlap  {covered} of {count} collectives travel while something heavy runs" in contents.text()
        (kind,) = [k for k in found if (k["part"], k["type"]) == ("moe", "HcomAllGather")]
        return kind

    before = gathers()
    assert before["covered"] == before["count"] and before["beside"]["MatMul"] > before["count"]
    assert f"  {before['covered']:>6} HcomAllGather of moe: MatMul ({before['beside']['MatMul']})" in (
        inspect_bundle(folder).text()
    )

    def tie(graph) -> None:
        """The first gather waits for what is before it in the file, and what is after it waits for the gather."""
        gather = next(op for op in graph.op if op.type == "HcomAllGather")
        beside, before = set(overlaps_of(graph)[gather.name]), True
        for op in graph.op:
            before = before and op.name != gather.name
            if op.name in beside:
                first, second = (op, gather) if before else (gather, op)
                second.input.append(f"{first.name}:-1")

    change_graph(folder, decode, tie)
    assert gathers()["covered"] == before["covered"] - 1


def overlaps_of(graph):
    model = ModelDef()
    model.graph.add().CopyFrom(graph)
    return overlaps(model)


def test_a_bundle_of_one_rank_has_nothing_that_travels(bundle):
    contents = inspect_bundle(bundle)
    assert "overlap" not in contents.text() and "overlaps" not in contents.to_json()


def test_costs_are_those_of_a_rank(on_mesh):
    held = open_bundle(on_mesh("pp=2,dp=2,tp=2")).manifest["memory"]["stages"]
    for g, stage in zip(inspect_cost(on_mesh("pp=2,dp=2,tp=2")).graphs, [0, 1, 0, 1], strict=True):
        assert g.ratio >= 1, g.name  # a node touches what it needs
        assert 0 < g.needed.weights <= g.weights <= held[stage]["weights"]
        assert 0 < g.needed.states_read <= held[stage]["states"]


def test_every_stage_of_a_plan_has_its_ranks(on_mesh):
    bundle = open_bundle(on_mesh("pp=2,dp=2,tp=2"))
    plan = Plan.read(bundle, bundle_config(bundle))
    assert [list(plan.ranks(s)) for s in plan.stages("decode")] == [[0, 1, 2, 3], [4, 5, 6, 7]]
