"""Bring-up: its steps on devices that are sound, and what it says of devices that are not."""

import json
import math
import os
import random
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import torch

from kimi_graph.compile.bringup import JOURNAL, Known, bring_up, rehearsal
from kimi_graph.compile.bundle import GOLDEN, open_bundle
from kimi_graph.compile.cut import computing, cut, parsed, probed, probes
from kimi_graph.compile.deploy import LOADER, deploy_bundle
from kimi_graph.compile.device import CpuDevice, Job
from kimi_graph.compile.executor import Executor
from kimi_graph.compile.golden import INDEX, read_golden, write_golden
from kimi_graph.compile.localise import difference, differs, first_difference, locate
from kimi_graph.compile.npu_device import open_device
from kimi_graph.errors import BundleError, DeployError, VerifyError
from kimi_graph.ops.twin import compiler
from kimi_graph.parallel import Mesh
from tests.compile.faults import KINDS, Fault, FaultyDevice, draw

MESH = "pp=2,tp=2"


@pytest.fixture(scope="module")
def folder(family_bundle, tmp_path_factory):
    """A bundle of two stages of two ranks, with golden cases. Read only."""
    made = family_bundle("kimi-linear-48b", "a3", mesh=Mesh.parse(MESH), batch=4)
    copy = Path(shutil.copytree(made, tmp_path_factory.mktemp("bringup") / "bundle"))
    write_golden(copy, None, 1)
    return copy


@pytest.fixture(scope="module")
def known(folder):
    return Known.of(open_bundle(folder), None)


@pytest.fixture(scope="module")
def runs(known):
    """What ranks did in the last step of each phase, with all values."""
    return [r for _, _, stages in known.played for s in stages for r in s.values() if r.values]


@pytest.fixture(scope="module")
def said(folder):
    return rehearsal(open_bundle(folder)).facts()


def try_faults(folder, known, runs, said, count, seed, kinds=KINDS):
    """Bring up devices with faults of some kinds; those of which the wrong operator or rank was named."""
    draws, missed = random.Random(seed), []
    for i in range(count):
        fault = draw(draws, runs, known.sides.groups, kinds[i % len(kinds)])
        report = bring_up(folder, FaultyDevice(said, fault), known=known)
        if report.finding is None or not fault.found_by(report.finding):
            missed.append((fault, report.problem))
    return missed


# ---- steps -----------------------------------------------------------------------------------------------------------


def test_a_sound_machine_passes_every_step_in_order(folder, known):
    report = bring_up(folder, known=known)
    assert report.passed, report.summary
    assert {o.state for o in report.outcomes} == {"passed"}
    first = list(dict.fromkeys(o.title.split()[0] for o in report.outcomes))
    assert first == ["environment", "group", "operator", "layer", "stage", "all"]
    layers = [o.title for o in report.outcomes if o.title.startswith("layer")]
    assert layers[:3] == [
        "layer 0 (kda and dense), prefill",
        "layer 1 (kda and moe), prefill",
        "layer 2 (mla and moe), prefill",
    ]
    assert report.summary.endswith(f" on a CPU in place of devices: {len(report.outcomes)} steps passed")


def test_a_bundle_of_one_rank_is_brought_up_too(bundle):
    report = bring_up(bundle)
    assert report.passed, report.summary
    skipped = [o for o in report.outcomes if o.state == "skipped"]
    assert [(o.title, o.note) for o in skipped] == [("operators", "compile --golden N stores cases")]


def test_faults_are_found_where_they_are(folder, known, runs, said):
    assert try_faults(folder, known, runs, said, 6, seed=1) == []


@pytest.mark.heavy
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_of_40_faults_of_a_kind_95_in_100_are_found_where_they_are(folder, known, runs, said, kind):
    missed = try_faults(folder, known, runs, said, 40, seed=0, kinds=(kind,))
    print(f"\n{kind}: {40 - len(missed)} of 40 faults found at the right operator and rank", *missed, sep="\n")
    assert len(missed) <= 2


def broken(kind, **where):
    return Fault(kind=kind, rank=1, graph="decode", node="layers.1.kda/MatMul", type="MatMul", **where)


@pytest.mark.parametrize(
    "fault, words",
    [
        (broken("wrong scale", factor=2.0), "it is 2 times what it should be: a scale"),
        (broken("wrong dtype"), "its bytes were read as float16: a dtype"),
        (broken("dropped node"), "it is its input x1 as it came: the node was dropped"),
    ],
    ids=["scale", "dtype", "dropped"],
)
def test_a_finding_says_what_would_explain_it(folder, known, said, fault, words):
    report = bring_up(folder, FaultyDevice(said, fault), known=known)
    assert report.outcomes[-1].title == "layer 1 (kda and moe), decode"
    assert (report.finding.node, report.finding.type, report.finding.ranks) == ("layers.1.kda/MatMul", "MatMul", (1,))
    assert report.finding.why == words
    assert report.advice.startswith("MatMul was no choice, nobody else serves it")


def test_a_kernel_that_is_wrong_is_found_by_its_golden_case(folder, known, said):
    fault = Fault(kind="wrong scale", rank=1, type="GatedRmsNorm", factor=1.1, everywhere=True)
    report = bring_up(folder, FaultyDevice(said, fault), known=known)
    assert report.outcomes[-1].title == "operator GatedRmsNorm (GatedRmsNorm_0)"
    assert (report.finding.type, report.finding.ranks) == ("GatedRmsNorm", (1,))
    assert "--avoid GatedRmsNorm; the next provider serves" in report.advice


def test_a_wrong_value_that_stops_a_later_operator_is_found_where_it_is_made(folder, known, said):
    node = "layers.1.moe/MoeInitRoutingV3"
    fault = Fault(kind="wrong dtype", rank=1, graph="prefill", node=node, type="MoeInitRoutingV3")
    runs = [r for _, _, stages in known.played for s in stages for r in s.values() if r.values]
    jobs = {r.rank: r.job for r in runs if r.phase == "prefill" and r.stage == 0}
    device = FaultyDevice(said, fault)
    with pytest.raises(BundleError, match="MoeFinalizeRoutingV2"):
        first_difference(device, jobs, known.sides.groups)
    found = locate(device, jobs, known.sides.groups)
    assert (found.node, found.ranks) == (node, (1,))
    with pytest.raises(VerifyError, match=r"^embed/\w+: EZ9999: no kernel"):
        locate(Refusing(said), jobs, known.sides.groups)


def test_ranks_that_have_each_others_weights_are_told(folder, known, said):
    name = "p.layers.0.kda.query"
    report = bring_up(folder, FaultyDevice(said, Fault(kind="swapped shard", rank=0, other=1, name=name)), known=known)
    assert (report.finding.weight, report.finding.ranks) == (name, (0, 1))
    assert f"weight {name} is the part of rank 1" in report.problem and name in report.advice


def test_a_group_whose_ranks_stand_in_another_order_is_told(folder, known, said):
    report = bring_up(
        folder, FaultyDevice(said, Fault(kind="wrong group order", rank=2, name="tensor", order=(3, 2))), known=known
    )
    assert report.outcomes[-1].title == "group tensor"
    assert report.problem == "tensor (group) on ranks 2, 3 is off by 1: its ranks stand as [3, 2], expected [2, 3]"


class Deaf(CpuDevice):
    """States do not reach the next step: each begins with what the first one began with."""

    def __init__(self, said):
        super().__init__(said)
        self.first = {}

    def run(self, jobs, groups):
        ran = super().run(jobs, groups)
        if next(iter(jobs.values())).model.graph[0].name == "prefill_b4_t16_s0" and len(ran[0].outputs) < 5:
            for rank, made in ran.items():
                made.states.update(jobs[rank].states)
        return ran


def test_states_that_are_lost_between_steps_are_found(folder, known, said):
    report = bring_up(folder, Deaf(said), known=known)
    assert not report.passed
    assert report.outcomes[-1].title in ("all 4 ranks", "stage 0, prefill")
    assert ".kda." in report.problem


@pytest.mark.parametrize(
    "changed, words",
    [
        (
            {"soc_version": "Ascend910B2"},
            "the chip is Ascend910B2; the bundle is for a3, Ascend910_9391 or one like it",
        ),
        ({"cann": "8.5.RC1"}, "CANN is 8.5.RC1; the bundle needs 9.2 or later"),
        ({"devices": "2"}, "there are 2 devices; the bundle has 4 ranks"),
        ({"operators": "KdaChunk"}, "no package has GatedRmsNorm, ShortConv; the bundle's kernels/ or"),
    ],
    ids=str,
)
def test_a_machine_that_the_bundle_is_not_for_is_told_first(folder, known, said, changed, words):
    report = bring_up(folder, CpuDevice(said | changed), known=known)
    assert [o.title for o in report.outcomes] == ["environment"]
    assert words in report.problem and "runbook" in report.advice


class Refusing(CpuDevice):
    def run(self, jobs, groups):
        raise VerifyError("EZ9999: no kernel")


def test_a_device_that_refuses_is_a_failed_step_in_its_words(folder, known, said):
    report = bring_up(folder, Refusing(said), known=known)
    assert report.summary == "bring-up stopped at group tensor: the device refused: EZ9999: no kernel"


# ---- journal and report ----------------------------------------------------------------------------------------------


def states(report):
    return Counter(o.state for o in report.outcomes)


def test_what_passed_is_not_tried_again(folder, known, said, tmp_path):
    stopped = bring_up(folder, FaultyDevice(said, broken("wrong scale", factor=2.0)), known=known, out=tmp_path)
    passed = states(stopped)["passed"]
    assert passed > 30 and not stopped.passed
    with (tmp_path / JOURNAL).open("a") as journal:
        journal.write('{"mark": "')  # the run was ended while it wrote
    mended = bring_up(folder, CpuDevice(said), known=known, out=tmp_path)
    assert mended.passed and states(mended)["passed before"] == passed
    other = bring_up(folder, Refusing(said | {"cann": "9.3"}), known=known, out=tmp_path)
    assert states(other) == {"passed": 1, "failed": 1}
    again = bring_up(folder, Refusing(said), known=known, out=tmp_path, restart=True)
    assert states(again) == {"passed": 1, "failed": 1}


@pytest.mark.parametrize("name", [JOURNAL, "report.md", "report.json"])
def test_a_file_of_somebody_elses_is_not_replaced_by_a_report(folder, known, said, tmp_path, name):
    (tmp_path / name).write_text("precious\n")
    with pytest.raises(BundleError, match=f"{name}: exists and is of no bring-up, and would be lost"):
        bring_up(folder, Refusing(said), known=known, out=tmp_path, restart=True)
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {name: "precious\n"}


def test_the_report_can_be_shared(folder, known, said, tmp_path):
    report = bring_up(folder, FaultyDevice(said, broken("wrong scale", factor=2.0)), known=known, out=tmp_path)
    told = json.loads((tmp_path / "report.json").read_text())
    assert told == json.loads(json.dumps(report.to_json()))
    assert told["finding"]["node"] == "layers.1.kda/MatMul" and not told["passed"]
    text = (tmp_path / "report.md").read_text()
    assert report.problem in text and report.advice in text
    assert "| layer 1 (kda and moe), decode | failed |" in text
    assert str(folder) not in text


# ---- golden cases ----------------------------------------------------------------------------------------------------


def test_every_operator_type_but_collectives_has_a_case_that_the_cpu_repeats(folder):
    cases = read_golden(open_bundle(folder))
    types = {t for g in open_bundle(folder).manifest["graphs"] for t in g["ops"]}
    left = {t for t in types if t.startswith("Hcom") or t in ("Data", "RefData", "Const", "NetOutput")}
    assert {c.type for c in cases} == types - left
    for case in cases:
        ran = Executor(case.model).run(case.inputs, case.states, "native")
        for found, expected in zip(ran.outputs, case.outputs, strict=True):
            assert difference(found, expected) == 0, case.name
        assert ran.states.keys() == case.after.keys()
        assert case.outputs or case.after


def test_golden_cases_are_the_same_bytes_every_time_and_as_many_as_asked(folder, tmp_path):
    copy = Path(shutil.copytree(folder, tmp_path / "bundle"))
    before = {p.name: p.read_bytes() for p in (copy / GOLDEN).iterdir()}
    write_golden(copy, None, 1)
    assert {p.name: p.read_bytes() for p in (copy / GOLDEN).iterdir()} == before
    assert write_golden(copy, None, 2) > len(json.loads(before[INDEX])["cases"])


def test_a_golden_case_that_was_changed_or_lost_is_refused(folder, tmp_path):
    copy = Path(shutil.copytree(folder, tmp_path / "bundle"))
    file = copy / GOLDEN / "MatMul_0.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    with pytest.raises(BundleError, match=r"MatMul_0\.safetensors: SHA-256 is"):
        read_golden(open_bundle(copy))
    file.unlink()
    with pytest.raises(BundleError, match=r"MatMul_0\.safetensors: missing; the golden cases are incomplete"):
        read_golden(open_bundle(copy))


# ---- parts of graphs -------------------------------------------------------------------------------------------------


def test_a_layer_alone_gives_what_it_gives_in_its_graph(runs):
    run = next(r for r in runs if r.phase == "decode" and r.rank == 0)
    model = run.model
    keep = {n.name for n in computing(parsed(model)) if n.name.startswith("layers.0.kda/") and "Hcom" not in n.type}
    part = cut(model, keep, "part")
    alone = Executor(part.model)
    edges = {name: (edge.rpartition(":")[0], int(edge.rpartition(":")[2])) for name, edge in part.boundary.items()}
    given = {n: run.values[edges[n]] if n in edges else run.job.inputs[n] for n in alone.inputs}
    ran = alone.run(given, {n: run.job.states[n] for n in alone.states}, "native")
    for edge, value in zip(part.outputs, ran.outputs, strict=True):
        name, _, index = edge.rpartition(":")
        assert torch.equal(value, run.values[name, int(index)]), edge
    for name, value in ran.states.items():
        assert torch.equal(value, run.ran.states[name]), name


def test_a_probed_graph_gives_its_own_results_first(runs):
    run = next(r for r in runs if r.phase == "decode" and r.rank == 0)
    edges = probes(parsed(run.model))
    assert len(edges) > 50
    asked = probed(run.model, edges)
    (net,) = [op for op in asked.graph[0].op if op.type == "NetOutput"]
    own = next(op for op in run.model.graph[0].op if op.type == "NetOutput")
    data = [e for e in net.input if not e.endswith(":-1")]
    assert data[: len(run.ran.outputs)] == [e for e in own.input if not e.endswith(":-1")]
    assert len(data) == len(net.input_desc) == len(run.ran.outputs) + len(edges)


def test_rounding_is_no_difference_and_a_scale_is():
    x = torch.randn(64, 64).bfloat16()
    assert not differs((x.float() * (1 + 2**-9)).bfloat16(), x, "MatMul")
    assert differs((x.float() * 1.05).bfloat16(), x, "MatMul")
    assert differs(x.float(), x, "MatMul") and differs(x[:1], x, "MatMul")
    nan = torch.full_like(x, float("nan"))
    assert differs(nan, x, "MatMul") and not differs(x, nan, "MatMul")  # nobody says what is there
    mask = torch.tensor([0.0, -torch.inf])
    assert not differs(mask, mask.clone(), "Add") and differs(-mask, mask, "Add")
    chosen = torch.arange(100)
    assert differs(chosen.flip(0), chosen, "Cast")
    near = chosen.clone()
    near[3] = 7
    assert differs(near, chosen, "Cast") and not differs(near, chosen, "TopKV2")


# ---- NPUs, through the loader ----------------------------------------------------------------------------------------


STAND_IN = Path(__file__).parent / "ge_stand_in"


@pytest.fixture(scope="module")
def npus(folder, tmp_path_factory):
    """Devices of a deployment whose loader was built with stand-ins for CANN."""
    if (gxx := compiler()) is None:
        pytest.skip("needs a C++ compiler: g++ or clang++")
    where = tmp_path_factory.mktemp("npus")
    hosts = where / "hosts.json"
    hosts.write_text(json.dumps({"hosts": [{"name": "n", "ip": "10.0.0.1", "devices": "0-3"}]}))
    deploy_bundle(folder, hosts, where / "deployment")
    loader = where / "loader"
    flags = ["-std=c++17", "-O1", "-pthread", f"-I{STAND_IN}"]
    subprocess.run([str(gxx), *flags, str(LOADER / "loader.cpp"), "-o", str(loader)], check=True)
    return where / "deployment", {"LOADER": str(loader), "KIMI_GRAPH_RUNS": str(where / "runs")}


@pytest.fixture
def npu(npus, folder, monkeypatch, tmp_path):
    deployment, environment = npus
    (tmp_path / "nodes").mkdir()
    monkeypatch.setenv("STAND_IN_NODES", str(tmp_path / "nodes"))
    monkeypatch.setenv("STAND_IN_LOG", str(tmp_path / "log.txt"))
    return open_device(folder, deployment, environment)


def test_npus_are_given_every_tensor_and_give_back_every_tensor(npu, known, runs, tmp_path):
    run = next(r for r in runs if r.phase == "decode" and r.stage == 1)
    jobs = {r.rank: r.job for r in runs if r.graph == run.graph}
    states = [op for op in run.model.graph[0].op if op.type == "RefData"]
    index = {op.name: op.attr["index"].i for op in states}
    for rank in jobs:
        lines = "".join(f"RefData {index[op.name]}\n" for op in states)
        (tmp_path / "nodes" / f"rank{rank}.txt").write_text(lines)
    ran = npu.run(jobs, known.sides.groups)
    for rank, made in ran.items():
        assert [(x.shape, x.dtype) for x in made.outputs] == [(x.shape, x.dtype) for x in run.ran.outputs]
        assert all(bool((x.view(torch.uint8) == 1).all()) for x in made.outputs)  # what the stand-in gives
        for name, after in made.states.items():  # which adds one to every byte of a state
            before = jobs[rank].states[name].contiguous().view(-1).view(torch.uint8)
            assert torch.equal(after.view(-1).view(torch.uint8), before + 1)
    log = (tmp_path / "log.txt").read_text()
    assert 'ge.exec.hcomGrouplist [{"group_name":"tensor.1","group_rank_list":[2,3]}]' in log
    assert log.count("run rank") == 2


def test_a_bring_up_of_npus_that_compute_nothing_stops_at_the_first_step(npu, folder, known, tmp_path):
    report = bring_up(folder, npu, known=known, out=tmp_path / "report")
    assert [o.state for o in report.outcomes] == ["passed", "failed"]
    assert report.outcomes[-1].title == "group tensor" and "its ranks stand as" in report.problem


def test_what_a_loader_says_last_is_what_a_bring_up_says(npu, folder, known, monkeypatch):
    monkeypatch.setenv("STAND_IN_FAILS", "CompileGraph")
    report = bring_up(folder, npu, known=known)
    assert "the device refused: rank 0: error: CompileGraph rank0: GE's status is 8" in report.problem


def test_a_deployment_of_another_bundle_or_without_a_loader_is_refused(npus, folder, bundle, tmp_path):
    deployment, environment = npus
    with pytest.raises(DeployError, match="was made for another bundle"):
        open_device(bundle, deployment, environment)
    with pytest.raises(DeployError, match=r"no deploy\.json; make it with kimi-graph deploy"):
        open_device(folder, tmp_path, environment)
    with pytest.raises(DeployError, match=r"kimi_graph_loader: missing; build it as"):
        open_device(folder, deployment, {})


def test_ranks_of_other_hosts_are_started_by_the_command_that_was_given(npus, folder):
    deployment, environment = npus
    device = open_device(folder, deployment, environment | {"KIMI_GRAPH_LAUNCH": "ssh {host} {command}"})
    command = device._command(Path("/runs/run0"), 2)
    assert command[:2] == ["ssh", "10.0.0.1"] and "--rank 2" in command[2] and len(command) == 3


def test_a_device_takes_jobs_as_it_is_told(runs):
    run = next(r for r in runs if r.phase == "decode" and r.stage == 0)
    jobs = {r.rank: Job(r.model, r.job.inputs, r.job.states) for r in runs if r.graph == run.graph}
    ran = CpuDevice({}).run(jobs, {"tensor": [[0, 1], [2, 3]]})
    assert all(torch.equal(a, b) for a, b in zip(ran[run.rank].outputs, run.ran.outputs, strict=True))
    assert os.environ.get("KIMI_GRAPH_LAUNCH") is None


@pytest.mark.parametrize(
    "found, expected, error",
    [
        ([1.0, math.inf, -math.inf], [1.0, math.inf, -math.inf], 0.0),  # infinities of masks
        ([1.0, 5.0], [1.0, math.nan], 0.0),  # rows that no token fills
        ([3.0, 4.0, 9.0], [3.0, 4.5, math.nan], 0.5 / math.hypot(3, 4.5)),
        ([1.0, math.inf], [1.0, 1.0], math.inf),
        ([0.0, 5.0], [0.0, 0.0], math.inf),
        ([1.0, math.nan], [1.0, 1.0], math.nan),  # which no tolerance allows
        ([1.0], [1.0, 1.0], math.inf),
    ],
    ids=str,
)
def test_a_difference_is_of_what_is_known_and_relative(found, expected, error):
    got = difference(torch.tensor(found), torch.tensor(expected))
    assert got == pytest.approx(error, rel=1e-12, nan_ok=True)
    assert differs(torch.tensor(found), torch.tensor(expected), "Add") == (error != 0)
