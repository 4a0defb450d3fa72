"""Deployments: the files that a bundle's hosts get, and the loader, run with stand-ins for CANN."""

import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from kimi_graph.compile import air
from kimi_graph.compile.bundle import dump, open_bundle
from kimi_graph.compile.deploy import deploy_bundle, hosts_example
from kimi_graph.compile.driver import compile_model
from kimi_graph.compile.executor import SEMANTICS
from kimi_graph.compile.ge_proto import bytes_of, get_attr
from kimi_graph.compile.rank_tables import communicators
from kimi_graph.compile.scratch import scratch_bytes
from kimi_graph.compile.targets import target
from kimi_graph.compile.write_weights import write_weights
from kimi_graph.compile.written import open_written
from kimi_graph.errors import BundleError, DeployError
from kimi_graph.fixture import small_config
from kimi_graph.ops.twin import compiler
from kimi_graph.parallel import Mesh
from kimi_graph.read_config import load_config, parse_config

MESH = "pp=2,tp=2"


@pytest.fixture(scope="module")
def meshed(family_bundle):
    """A bundle of two stages of two ranks. Read only."""
    return family_bundle("kimi-linear-48b", "a3", mesh=Mesh.parse(MESH), batch=4)


@pytest.fixture(scope="module")
def paired(host, tmp_path_factory):
    """A bundle whose graphs send rows to their experts, so that a rank's place is an attribute. Read only."""
    source = json.loads(json.dumps(small_config(load_config("kimi-k3.1-pro"), 2)))
    source["text_config"]["routed_expert_hidden_size"] = 1024
    config = parse_config(source, origin="wide", name="wide")
    out = tmp_path_factory.mktemp("paired") / "bundle"
    sizes = {"batch": 4, "max_len": 96, "page": 16, "phases": ("decode",)}
    compile_model(config, target=target("a3"), out=out, mesh=Mesh.parse("tp=2"), exchange=True, **sizes)
    return out


def hosts_file(folder, count=2, devices=2, **more):
    hosts = [
        {
            "name": f"node-{i}",
            "ip": f"10.0.0.{i + 1}",
            "devices": [{"id": d, "ip": f"192.168.{i}.{d}"} for d in range(devices)],
        }
        for i in range(count)
    ]
    file = folder / "hosts.json"
    file.write_text(json.dumps({"hosts": hosts} | more))
    return file


def deployed(bundle, folder, **options) -> Path:
    out = folder / "out"
    deploy_bundle(bundle, hosts_file(folder), out, **options)
    return out


def words(file: Path, key: str) -> list[list[str]]:
    return [line.split()[1:] for line in file.read_text().splitlines() if line.split()[0] == key]


# ---- rank tables and groups ------------------------------------------------------------------------------------------


def test_a_rank_table_of_hosts_lists_devices_and_addresses_by_rank(meshed, tmp_path):
    table = json.loads((deployed(meshed, tmp_path) / "rank_table.json").read_text())
    assert (table["status"], table["version"], table["server_count"]) == ("completed", "1.0", "2")
    assert table["server_list"][1] == {
        "server_id": "node-1",
        "host_ip": "10.0.0.2",
        "device": [
            {"device_id": "0", "device_ip": "192.168.1.0", "rank_id": "2"},
            {"device_id": "1", "device_ip": "192.168.1.1", "rank_id": "3"},
        ],
    }


def test_a_rank_table_of_a_superpod_numbers_its_devices(family_bundle, tmp_path):
    bundle = family_bundle("kimi-linear-48b", "a3-superpod", mesh=Mesh.parse(MESH), batch=4)
    file = tmp_path / "hosts.json"
    devices = [{"id": d, "super_id": 40 + d} for d in range(4)]
    file.write_text(json.dumps({"hosts": [{"name": "n", "ip": "10.0.0.1", "superpod": "3", "devices": devices}]}))
    deploy_bundle(bundle, file, tmp_path / "out")
    table = json.loads((tmp_path / "out" / "rank_table.json").read_text())
    assert table["version"] == "1.2"
    assert table["server_list"][0]["device"][2] == {"device_id": "2", "super_device_id": "42", "rank_id": "2"}
    assert table["super_pod_list"] == [{"super_pod_id": "3", "server_list": [{"server_id": "n"}]}]


def test_a_rank_table_of_950_has_the_addresses_that_its_hosts_know(family_bundle, tmp_path):
    bundle = family_bundle("kimi-linear-48b", "950dt", mesh=Mesh.parse(MESH), batch=4)
    levels = [[{"net_layer": 0, "rank_addr_list": [{"addr": f"{d:032x}"}]}] for d in range(4)]
    known = [{"device_id": d, "local_id": d, "level_list": levels[d]} for d in range(4)]
    (tmp_path / "n.json").write_text(json.dumps({"version": "2.0", "rank_list": known}))
    hosts = {"hosts": [{"name": "n", "ip": "10.0.0.1", "devices": "0-3", "rootinfo": "n.json"}]}
    file = tmp_path / "hosts.json"
    file.write_text(json.dumps(hosts))
    deploy_bundle(bundle, file, tmp_path / "out")
    table = json.loads((tmp_path / "out" / "rank_table.json").read_text())
    assert (table["version"], table["rank_count"]) == ("2.0", 4)
    assert table["rank_list"][3] == {"rank_id": 3, "device_id": 3, "local_id": 3, "level_list": levels[3]}
    with pytest.raises(DeployError, match=r"CANN 8\.5 has no rank table for 950dt; the nearest that has is 9\.1"):
        deploy_bundle(bundle, file, tmp_path / "out", cann="8.5")


def test_a_rank_is_told_its_groups_in_one_order_and_under_names_of_their_own(meshed, tmp_path):
    out = deployed(meshed, tmp_path)
    known = open_bundle(meshed).manifest["mesh"]["groups"]
    assert known == {"tensor": [[0, 1], [2, 3]]}
    assert [words(out / "ranks" / f"{r}.txt", "group") for r in range(4)] == [
        [["tensor", "tensor.0", "0,1"]],
        [["tensor", "tensor.0", "0,1"]],
        [["tensor", "tensor.1", "2,3"]],
        [["tensor", "tensor.1", "2,3"]],
    ]


def test_a_group_whose_ranks_hccl_would_put_in_another_order_is_refused():
    with pytest.raises(BundleError, match=r"group 'a': its ranks are \[1, 0\]; HCCL takes them in ascending order"):
        communicators({"a": [[1, 0]]})
    with pytest.raises(BundleError, match="HCCL takes names of up to 127 characters"):
        communicators({"x" * 120: [[0, 1]]})
    with pytest.raises(BundleError, match="but hccl_world_group"):
        communicators({"hccl_world_group": [[0, 1]]})


# ---- ranks and graphs ------------------------------------------------------------------------------------------------


def test_every_input_of_every_graph_is_listed_by_index_with_its_bytes(meshed, tmp_path):
    out, bundle = deployed(meshed, tmp_path), open_bundle(meshed)
    for entry in bundle.manifest["graphs"]:
        file = out / "graphs" / f"{entry['name']}.txt"
        listed = [line.split() for line in file.read_text().splitlines()]
        ports = [x for x in listed if x[0] in ("input", "weight", "state")]
        assert [int(x[1]) for x in ports] == list(range(len(ports)))
        names = [[x[2] for x in ports if x[0] == kind] for kind in ("input", "weight", "state")]
        assert names == [[i["name"] for i in entry["inputs"]], entry["weights"], entry["states"]]
        sizes = {x[2]: int(x[5]) for x in ports}
        plan = bundle.weights["weights"]
        assert all(sizes[w] == plan[w]["bytes"] for w in entry["weights"])
        assert [x[2] for x in listed if x[0] == "output"] == entry["gives"]


def test_a_stage_reads_what_the_last_stage_before_it_gives(meshed, tmp_path):
    out = deployed(meshed, tmp_path)
    (first, second) = [g for g in open_bundle(meshed).manifest["graphs"] if g["phase"] == "decode"]
    assert second["reads"] and set(second["reads"]) <= set(first["gives"])
    assert words(out / "graphs" / f"{second['name']}.txt", "read") == [[name, "1"] for name in second["reads"]]
    assert words(out / "graphs" / f"{first['name']}.txt", "read") == []


def test_a_rank_stands_where_the_mesh_puts_it(meshed, paired, tmp_path):
    out = deployed(meshed, tmp_path)
    own = [words(out / "ranks" / f"{r}.txt", "own") for r in range(4)]
    assert own == [[["own_index.tensor", str(r % 2)]] for r in range(4)]
    (tmp_path / "pair").mkdir()
    deploy_bundle(paired, hosts_file(tmp_path / "pair", 1), tmp_path / "pair" / "out")
    places = [words(tmp_path / "pair" / "out" / "ranks" / f"{r}.txt", "at") for r in range(2)]
    assert [p[0][1] for p in places] == ["0", "1"]
    graph = open_bundle(paired).manifest["graphs"][0]
    listed = words(tmp_path / "pair" / "out" / "graphs" / f"{graph['name']}.txt", "place")
    assert [x[:2] for x in listed] == [
        ["MoeDistributeCombineV2", "ep_rank_id"],
        ["MoeDistributeDispatchV2", "ep_rank_id"],
    ]


def test_the_buffer_that_rows_to_experts_need_is_in_the_environment(paired, tmp_path):
    deploy_bundle(paired, hosts_file(tmp_path, 1), tmp_path / "out")
    reason = next(c["reason"] for c in open_bundle(paired).manifest["choices"] if "HCCL_BUFFSIZE" in c["reason"])
    need = int(re.search(r"HCCL_BUFFSIZE of ([\d,]+)", reason)[1].replace(",", ""))
    found = re.search(r"HCCL_BUFFSIZE=(\d+)", (tmp_path / "out" / "env.sh").read_text())
    assert (found is None) == (need <= 200)
    assert found is None or int(found[1]) == need


def test_each_host_starts_its_own_ranks(meshed, tmp_path):
    out = deployed(meshed, tmp_path)
    assert "for rank in 0 1; do" in (out / "hosts" / "node-0" / "run.sh").read_text()
    run = out / "hosts" / "node-1" / "run.sh"
    assert "for rank in 2 3; do" in run.read_text()
    assert run.stat().st_mode & stat.S_IXUSR
    for script in [run, out / "env.sh"]:
        subprocess.run(["bash", "-n", str(script)], check=True)


def test_the_runbook_has_the_numbers_of_the_bundle(meshed, tmp_path):
    text = (deployed(meshed, tmp_path) / "README.md").read_text()
    manifest = open_bundle(meshed).manifest
    assert "Nobody has run these files on a device" in text
    assert "| node-1 | 10.0.0.2 | 2 to 3 | 0 to 1 | 1 |" in text
    assert f"{manifest['memory']['stages'][1]['weights'] / 2**20:,.1f} MiB" in text
    assert "| 400.0 MiB |" in text  # of HCCL: one group, two buffers
    prose = [line for line in text.splitlines() if line[:1].isupper()]
    assert [line for line in prose if not line.endswith((".", ":"))] == []  # no sentence ends in the middle
    assert "| `tensor` | 2 | 2 | inside a host |" in text
    assert "have no offline model on CANN 9.2" in text
    assert 'cmake -S "$BUNDLE/kernels"' in text
    for line in manifest["unproved"]:
        assert line in text


def test_a_deployment_says_which_bundle_it_is_for_and_who_runs_where(meshed, tmp_path):
    made = deploy_bundle(meshed, hosts_file(tmp_path), tmp_path / "out")
    said = json.loads((tmp_path / "out" / "deploy.json").read_text())
    assert said == made.to_json()
    assert said["ranks"][3] == {
        "rank": 3, "host": "node-1", "ip": "10.0.0.2", "device": 1, "stage": 1,
        "graphs": ["prefill_b4_t16_s1", "decode_b4_s1"], "groups": {"tensor": "tensor.1"},
    }  # fmt: skip
    assert made.summary.startswith("4 ranks on 2 hosts: ")


def test_the_same_bundle_and_hosts_give_the_same_bytes(meshed, tmp_path):
    def made(name):
        (tmp_path / name).mkdir()
        out = deployed(meshed, tmp_path / name)
        return {p.relative_to(out).as_posix(): p.read_bytes() for p in out.rglob("*") if p.is_file()}

    first = made("a")
    assert first == made("b")
    assert not [name for name, data in first.items() if str(tmp_path).encode() in data]


def test_weights_made_ahead_are_found_by_rank(meshed, tmp_path):
    bundle = Path(shutil.copytree(meshed, tmp_path / "bundle"))
    write_weights(bundle, ranks=[0, 1, 2])
    assert not (deployed(bundle, tmp_path) / "weights").exists()
    write_weights(bundle)
    out = deployed(bundle, tmp_path)
    for rank in range(4):
        sizes = {x[1]: x[4] for g in words(out / "ranks" / f"{rank}.txt", "run") for x in
                 words(out / "graphs" / f"{g[0]}.txt", "weight")}  # fmt: skip
        listed = [line.split() for line in (out / "weights" / f"{rank}.txt").read_text().splitlines()]
        assert {name: size for name, _, _, size, _ in listed} == sizes
        for name, file, offset, size, sha256 in listed:
            data = (bundle / "weights" / file).read_bytes()[int(offset) :][: int(size)]
            assert hashlib.sha256(data).hexdigest() == sha256
            assert data == open_written(open_bundle(bundle)).read(rank, name).numpy().tobytes()
    assert "`weights/*.txt` say where they are" in (out / "README.md").read_text()


# ---- one rank, and CANN up to 8.3 ------------------------------------------------------------------------------------


def test_a_bundle_of_one_rank_needs_no_hosts_file_and_gets_atc_commands(bundle, tmp_path):
    made = deploy_bundle(bundle, None, tmp_path / "out")
    text = (tmp_path / "out" / "atc.sh").read_text()
    subprocess.run(["bash", "-n", str(tmp_path / "out" / "atc.sh")], check=True)
    for g in open_bundle(bundle).manifest["graphs"]:
        assert (
            f'atc --mode=0 --framework=1 --model={g["file"]} --output="$OUT"/{g["name"]} '
            "--soc_version=Ascend910_9391 --precision_mode_v2=origin\n"
        ) in text
    assert made.summary.startswith("1 rank on 1 host: ")
    assert not (tmp_path / "out" / "rank_table.json").exists()
    assert words(tmp_path / "out" / "ranks" / "0.txt", "group") == []


def test_a_bundle_of_many_ranks_needs_hosts(meshed, tmp_path):
    with pytest.raises(DeployError, match="pp=2,tp=2 has 4 ranks; say where they run with --hosts FILE"):
        deploy_bundle(meshed, None, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_files_of_clusters_are_written_for_the_chips_and_releases_that_read_them(family_bundle, meshed, tmp_path):
    a2 = family_bundle("kimi-linear-48b", "a2", mesh=Mesh.parse(MESH), batch=4)
    out = deployed(a2, tmp_path, cann="8.3")
    folder = out / "cluster" / "decode"
    relation = json.loads((folder / "model_relation_config.json").read_text())
    assert relation["deploy_config"][3] == {"submodel_name": "decode_rank3.air", "deploy_device_id_list": "0:1:1"}
    assert relation["comm_group"] == [
        {"group_name": "tensor.0", "group_rank_list": "[0, 1]"},
        {"group_name": "tensor.1", "group_rank_list": "[2, 3]"},
    ]
    nodes = json.loads((folder / "numa_config.json").read_text())["cluster"][0]["cluster_nodes"]
    assert [(n["node_id"], n["ipaddr"], len(n["item_list"])) for n in nodes] == [(0, "10.0.0.1", 2), (1, "10.0.0.2", 2)]
    model = air.from_bytes((folder / "decode_rank3.air").read_bytes(), "decode_rank3.air")
    assert {get_attr(op, "group") for op in model.graph[0].op if op.type.startswith("Hcom")} == {"tensor.1"}
    assert "--distributed_cluster_build=1" in (out / "cluster" / "atc.sh").read_text()
    for name, bundle, cann in [("a3", meshed, "8.3"), ("new", a2, "9.1")]:
        (tmp_path / name).mkdir()
        assert not (deployed(bundle, tmp_path / name, cann=cann) / "cluster").exists()


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_before_a_host_compiles_it_and_scratch_is_named(meshed, tmp_path):
    """Case A10: weights and states fit, the work memory of the largest graph does not."""
    made = deploy_bundle(meshed, hosts_file(tmp_path), tmp_path / "fits").deployment
    held = made.held[1].bytes
    names = ("prefill_b4_t16_s1", "decode_b4_s1")
    assert held["scratch"] == max(scratch_bytes(made.models[n]) for n in names)
    manifest = open_bundle(meshed).manifest
    assert (held["weights"], held["states"]) == tuple(manifest["memory"]["stages"][1][k] for k in ("weights", "states"))
    bundle = Path(shutil.copytree(meshed, tmp_path / "bundle"))
    manifest["memory"]["die"] = max(sum(h.bytes.values()) for h in made.held) - 1
    (bundle / "manifest.json").write_bytes(dump(manifest))
    with pytest.raises(
        DeployError, match=r"a rank of stage \d needs .* scratch \d.*; scratch is that of prefill_b4_t16_s"
    ):
        deploy_bundle(bundle, hosts_file(tmp_path), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_scratch_is_the_peak_of_what_is_live(bundle):
    """Between the largest value and all of them together; views and states that are written in place take nothing."""
    for entry in open_bundle(bundle).manifest["graphs"]:
        model = air.from_bytes((bundle / entry["file"]).read_bytes(), entry["file"])
        sizes = []
        for op in model.graph[0].op:
            known = SEMANTICS.get(op.type)
            if known is not None and not known.view and op.type != "Const":
                sizes += [bytes_of(d) for d in op.output_desc if d.name not in known.in_place]
        assert max(sizes) <= scratch_bytes(model) < sum(sizes) / 4


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_what_is_there_and_no_deployment_stays(bundle, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    with pytest.raises(DeployError, match="exists and is no deployment"):
        deploy_bundle(bundle, None, out)
    assert [p.name for p in out.iterdir()] == ["mine.txt"]
    with pytest.raises(DeployError, match="lies inside the bundle"):
        deploy_bundle(bundle, None, bundle / "deploy")
    with pytest.raises(DeployError, match=r"--cann 7: hosts have one of 8\.0, "):
        deploy_bundle(bundle, None, tmp_path / "new", cann="7")


def test_a_deployment_is_replaced_by_a_later_one(bundle, tmp_path):
    out = tmp_path / "out"
    deploy_bundle(bundle, None, out)
    (out / "logs").mkdir()
    (out / "loader" / "build").mkdir()
    (out / "loader" / "build" / "a.o").write_text("made again by a build")
    deploy_bundle(bundle, None, out)
    assert not (out / "logs").exists() and not (out / "loader" / "build").exists()


@pytest.mark.parametrize("name, what", [("notes.md", "no deployment wrote"), ("env.sh", "was changed")])
def test_what_somebody_wrote_into_a_deployment_is_not_lost(bundle, tmp_path, name, what):
    out = tmp_path / "out"
    deploy_bundle(bundle, None, out)
    with (out / name).open("a") as file:
        file.write("# mine\n")
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    with pytest.raises(DeployError, match=f"out: holds {name}, which {what} and which would be lost; move it"):
        deploy_bundle(bundle, None, out)
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before


def test_the_example_has_as_many_devices_as_the_bundle_has_ranks(meshed, bundle):
    assert json.loads(hosts_example(meshed))["hosts"] == [{"name": "node-0", "ip": "10.0.0.1", "devices": "0-3"}]
    assert json.loads(hosts_example(bundle))["hosts"][0]["devices"] == "0-0"


# ---- folders with spaces ---------------------------------------------------------------------------------------------


def scripts_of(out: Path) -> Iterator[tuple[str, str]]:
    """What a shell reads of a deployment: its scripts, and the blocks of its runbook."""
    for file in sorted(out.rglob("*.sh")):
        yield str(file.relative_to(out)), file.read_text()
    for i, block in enumerate(re.findall(r"```bash\n(.*?)```", (out / "README.md").read_text(), re.DOTALL)):
        yield f"README.md, block {i}", block


def test_bash_reads_every_script_and_no_path_is_left_to_be_split(meshed, bundle, tmp_path):
    odd = tmp_path / "the bundle's $HOME (1)"
    shutil.copytree(bundle, odd)
    for made in (deployed(meshed, tmp_path), deploy_bundle(odd, None, tmp_path / "one of one").folder):
        for name, text in scripts_of(made):
            read = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
            assert not read.returncode and not read.stderr, f"{name}: {read.stderr}"
            bare = re.sub(r'"[^"]*"|#.*', "", text)  # what is not between quotes
            assert not re.search(r"\$\{?(BUNDLE|DEPLOY|WEIGHTS|LOGS|OUT|OPERATORS)\b(?!:[?=])", bare), name


def test_a_deployment_runs_from_folders_with_spaces(bundle, tmp_path):
    """Scripts and the runbook's commands, with stand-ins for what is not here, called from somewhere else."""
    odd = tmp_path / "the bundle's $HOME (1)"
    shutil.copytree(bundle, odd)
    out = deploy_bundle(odd, None, tmp_path / "one of one").folder
    (out / "weights").mkdir(exist_ok=True)
    (tmp_path / "cann toolkit").mkdir()
    (tmp_path / "cann toolkit" / "set_env.sh").write_text("")
    for name in ("loader", "atc", "cmake"):
        script = tmp_path / "b i n" / name
        script.parent.mkdir(exist_ok=True)
        script.write_text(f'#!/bin/sh\nprintf "%s\\n" "$0 {name}" "$@" >>"{tmp_path}/said"\n')
        script.chmod(0o755)
    known = {"BUNDLE": str(odd), "LOADER": str(tmp_path / "b i n" / "loader"), "LOGS": str(tmp_path / "l o g s")}
    known |= {"ASCEND_HOME_PATH": str(tmp_path / "cann toolkit")}
    env = os.environ | known | {"PATH": f"{tmp_path / 'b i n'}:{os.environ['PATH']}"}

    def said(*command: str) -> list[str]:
        (tmp_path / "said").unlink(missing_ok=True)
        done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=tmp_path, check=False)
        assert done.returncode == 0, done.stderr
        return (tmp_path / "said").read_text().splitlines()[1:]

    ran = said(str(out / "hosts" / "localhost" / "run.sh"), "--compile-only")
    assert ran == [
        "--bundle", str(odd), "--deploy", str(out), "--rank", "0", "--weights", f"{odd}/weights", "--compile-only"
    ]  # fmt: skip
    made = said(str(out / "atc.sh"), str(tmp_path / "the models"))
    names = [g["name"] for g in open_bundle(bundle).manifest["graphs"]]
    assert [x for x in made if x.startswith("--output=")] == [f"--output={tmp_path}/the models/{n}" for n in names]
    (start,) = [text for _, text in scripts_of(out) if text.startswith("export BUNDLE=")]
    told = subprocess.run(
        ["bash", "-c", start.splitlines()[0] + '; printf %s "$BUNDLE"'], capture_output=True, text=True, check=True
    )
    assert told.stdout == f"/path/to/{odd.name}"
    (build,) = [text for _, text in scripts_of(out) if "ASCEND_COMPUTE_UNIT" in text]
    first = next(line for line in build.splitlines() if line.startswith("cmake -S"))
    assert said("bash", "-c", first)[:2] == ["-S", f"{odd}/kernels"]


# ---- the loader ------------------------------------------------------------------------------------------------------


NUMBERED = bytes(range(251))
STAND_IN = Path(__file__).parent / "ge_stand_in"


@pytest.fixture(scope="module")
def loader(tmp_path_factory):
    """The loader, built with stand-ins for CANN's headers."""
    if (gxx := compiler()) is None:
        pytest.skip("needs a C++ compiler: g++ or clang++")
    from kimi_graph.compile.deploy import LOADER

    made = tmp_path_factory.mktemp("loader") / "loader"
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread", f"-I{STAND_IN}"]
    subprocess.run([str(gxx), *flags, str(LOADER / "loader.cpp"), "-o", str(made)], check=True)
    return made


def nodes_of(bundle: Path, folder: Path) -> None:
    """What the stand-in takes for the nodes of each graph."""
    folder.mkdir(exist_ok=True)
    for entry in open_bundle(bundle).manifest["graphs"]:
        model = air.from_bytes((bundle / entry["file"]).read_bytes(), entry["file"])
        lines = []
        for op in model.graph[0].op:
            line = [op.type, str(get_attr(op, "index")) if op.type in ("Data", "RefData") else "-1"]
            for name in ("ep_rank_id", "group", "group_ep"):
                if name in op.attr:
                    value = get_attr(op, name)
                    line += [name, "i" if isinstance(value, int) else "s", str(value)]
            lines.append(" ".join(line))
        (folder / f"{entry['name']}.txt").write_text("\n".join(lines) + "\n")


class Loaded:
    """A deployment whose ranks are run by the loader with stand-ins; weights are numbered bytes in one file."""

    def __init__(self, bundle: Path, deployment: Path, folder: Path) -> None:
        self.bundle, self.deployment, self.folder = bundle, deployment, folder
        nodes_of(bundle, folder / "nodes")
        (folder / "weights").mkdir()
        (deployment / "weights").mkdir(exist_ok=True)
        for file in (deployment / "ranks").iterdir():
            sizes = {x[1]: int(x[4]) for g in words(file, "run") for x in self.ports(g[0], "weight")}
            data, lines = b"", []
            for name, size in sorted(sizes.items()):
                own = (NUMBERED * (size // 251 + 2))[len(data) % 251 :][:size]
                lines.append(f"{name} {file.stem}.bin {len(data)} {size} {hashlib.sha256(own).hexdigest()}")
                data += own
            (folder / "weights" / f"{file.stem}.bin").write_bytes(data)
            (deployment / "weights" / file.name).write_text("\n".join(lines) + "\n")

    def ports(self, graph: str, kind: str) -> list[list[str]]:
        return words(self.deployment / "graphs" / f"{graph}.txt", kind)

    def step(self, number: int, phase: str, rank: int) -> None:
        """Inputs of a step, of as many bytes as they have."""
        where = self.folder / "steps" / str(number) / f"rank{rank}"
        where.mkdir(parents=True)
        (where.parent / "phase").write_text(f"{phase}\n")
        (graph,) = [g[0] for g in words(self.deployment / "ranks" / f"{rank}.txt", "run") if g[0].startswith(phase)]
        reads = {x[0] for x in self.ports(graph, "read")}
        for _, name, _, _, size, *_ in self.ports(graph, "input"):
            if name not in reads and name != "causal_mask" and not name.startswith("own_index."):
                filled = (
                    0 if name.startswith("batch.") or name == "tokens" else number + 1
                )  # numbers the contract allows
                (where / f"{name}.bin").write_bytes(bytes([filled]) * int(size))

    def run(
        self, loader: Path, rank: int, *more: str, fails: str = ""
    ) -> tuple[subprocess.CompletedProcess, list[str]]:
        log = self.folder / f"log{rank}.txt"
        log.unlink(missing_ok=True)
        known = {"STAND_IN_LOG": str(log), "STAND_IN_NODES": str(self.folder / "nodes"), "STAND_IN_FAILS": fails}
        command = [str(loader), "--bundle", str(self.bundle), "--deploy", str(self.deployment), "--rank", str(rank)]
        command += ["--weights", str(self.folder / "weights"), *more]
        done = subprocess.run(command, env=os.environ | known, capture_output=True, text=True, timeout=60)
        return done, log.read_text().splitlines() if log.exists() else []

    def steps(self, loader: Path, rank: int, **options):
        return self.run(
            loader, rank, "--steps", str(self.folder / "steps"), "--out", str(self.folder / "out"), **options
        )


@pytest.fixture
def loaded(meshed, tmp_path):
    return Loaded(meshed, deployed(meshed, tmp_path), tmp_path)


def test_the_loader_starts_ge_as_the_rank_it_is(loader, loaded):
    done, log = loaded.run(loader, 3, "--compile-only", "--deterministic")
    assert done.returncode == 0, done.stderr
    options = dict(line.split(" ", 2)[1:] for line in log if line.startswith("option "))
    assert options == {
        "ge.deterministic": "1",
        "ge.exec.deviceId": "1",
        "ge.exec.hcomGrouplist": '[{"group_name":"tensor.1","group_rank_list":[2,3]}]',
        "ge.exec.precision_mode_v2": "origin",
        "ge.exec.rankId": "3",
        "ge.exec.rankTableFile": str(loaded.deployment / "rank_table.json"),
        "ge.exec.staticMemoryPolicy": "2",
        "ge.graphRunMode": "0",
        "ge.socVersion": "Ascend910_9391",
    }
    assert "device 1" in log
    assert [x for x in log if x.startswith("compile ")] == ["compile prefill_b4_t16_s1", "compile decode_b4_s1"]
    assert re.search(r"rank 3: compiled 2 graphs, [1-9]\d+ bytes of weights, [1-9]\d+ bytes of states", done.stdout)
    assert log[-2:] == ["GEFinalize", "aclFinalize"]
    groups = {line.split()[3] for line in log if line.startswith("node Hcom")}
    assert groups == {"tensor.1"}


def test_the_loader_sets_a_ranks_place_in_its_graph(loader, paired, tmp_path):
    deploy_bundle(paired, hosts_file(tmp_path, 1), tmp_path / "out")
    ran = Loaded(paired, tmp_path / "out", tmp_path)
    for rank in range(2):
        done, log = ran.run(loader, rank, "--compile-only")
        assert done.returncode == 0, done.stderr
        assert {line for line in log if " ep_rank_id " in line} == {
            f"node MoeDistribute{way}V2 ep_rank_id {rank}" for way in ("Dispatch", "Combine")
        }


def test_the_loader_binds_every_input_by_index_and_keeps_states_between_phases(loader, loaded):
    loaded.step(0, "prefill", 0)
    loaded.step(1, "decode", 0)
    done, log = loaded.steps(loader, 0)
    assert done.returncode == 0, done.stderr
    runs = [i for i, line in enumerate(log) if line.startswith("run ")]
    assert [log[i] for i in runs] == ["run prefill_b4_t16_s0", "run decode_b4_s0"]
    weights = (loaded.folder / "weights" / "0.bin").read_bytes()
    table = {x.split()[0]: list(map(int, x.split()[2:4])) for x in
             (loaded.deployment / "weights" / "0.txt").read_text().splitlines()}  # fmt: skip
    for number, (start, name) in enumerate(zip(runs, ("prefill_b4_t16_s0", "decode_b4_s0"), strict=True)):
        bound = [list(map(int, x.split()[1:])) for x in log[start + 1 :] if x.startswith("in ")]
        ports = [(kind, *x) for kind in ("input", "weight", "state") for x in loaded.ports(name, kind)]
        for kind, index, port, dtype, layout, size, dims, _ in ports:
            got = bound[int(index)]
            assert got[:4] == [int(index), int(dtype), int(layout), int(size)]
            assert got[5:] == ([] if dims == "-" else list(map(int, dims.split(","))))
            if kind == "state":  # zero before the first step; a step adds one to each byte
                expected = bytes([number]) * int(size)
            elif kind == "weight":
                offset, length = table[port]
                expected = weights[offset : offset + length]
            elif port == "own_index.tensor":
                expected = (0).to_bytes(8, "little")
            elif port == "causal_mask":
                rows = int(dims.split(",")[0])
                expected = b"".join(bytes(i + 1) + b"\1" * (rows - i - 1) for i in range(rows))
            else:
                filled = 0 if port.startswith("batch.") or port == "tokens" else number + 1
                expected = bytes([filled]) * int(size)
            assert got[4] == zlib.adler32(expected), port
    given = [x[1] for x in loaded.ports("decode_b4_s0", "output")]
    for name in given:
        assert set((loaded.folder / "out" / "1" / "rank0" / f"{name}.bin").read_bytes()) == {2}


def test_the_loader_gives_a_stage_what_the_one_before_it_gave(loader, loaded):
    loaded.step(0, "decode", 0)
    done, _ = loaded.steps(loader, 0)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(loaded.folder / "steps")
    loaded.step(0, "decode", 2)
    done, log = loaded.steps(loader, 2)
    assert done.returncode == 0, done.stderr
    bound = {int(x.split()[1]): int(x.split()[5]) for x in log if x.startswith("in ")}
    for name, _ in loaded.ports("decode_b4_s1", "read"):
        (port,) = [x for x in loaded.ports("decode_b4_s1", "input") if x[1] == name]
        assert bound[int(port[0])] == zlib.adler32(b"\1" * int(port[4])), "what rank 0 gave in step 0"


@pytest.mark.parametrize(
    "call, words",
    [
        ("GEInitialize", "GEInitialize: GE's status is 7: E00000: the stand-in was told to fail"),
        ("CompileGraph", "CompileGraph prefill_b4_t16_s0: GE's status is 8"),
        ("aclInit", "aclInit: the runtime's status is 1"),
    ],
)
def test_the_loader_says_what_failed(loader, loaded, call, words):
    done, _ = loaded.run(loader, 0, "--compile-only", fails=call)
    assert done.returncode == 1 and words in done.stderr


def test_the_loader_refuses_weights_that_are_not_the_graphs(loader, loaded):
    table = loaded.deployment / "weights" / "0.txt"
    lines = table.read_text().splitlines()
    first = lines[0].split()
    for changed, said in [
        (lines[1:], f"weight {first[0]}: .* does not list it"),
        (
            [" ".join([*first[:3], "2", first[4]]), *lines[1:]],
            f"weight {first[0]}: 2 bytes are listed, the graph reads {first[3]}",
        ),
        ([" ".join([first[0], "none.bin", *first[2:]]), *lines[1:]], f"{first[0]}: .*none.bin cannot be read"),
        (
            [" ".join([*first[:2], str(10**9), *first[3:]]), *lines[1:]],
            f"{first[0]}: .* ends after 0 of {first[3]} bytes",
        ),
        (
            [" ".join([*first[:4], "0" * 64]), *lines[1:]],
            f"{first[0]}: .* was changed or damaged: kimi-graph weights --repair makes it anew",
        ),
        ([" ".join(first[:3]), *lines[1:]], "has too few words"),
        ([" ".join(first[:4]), *lines[1:]], "has too few words"),
    ]:
        table.write_text("\n".join(changed) + "\n")
        done, _ = loaded.run(loader, 0, "--compile-only")
        assert done.returncode == 1 and re.search(said, done.stderr), done.stderr


def test_the_loader_refuses_what_the_manifest_does_not_allow_and_names_its_key(loader, loaded):
    """Cases A12 and A8 for who runs graphs on a device: what a graph would do with such inputs nobody knows."""
    state = open_bundle(loaded.bundle).manifest["state"]
    held, slots, pages = state["tokens_per_sequence"], state["slots"], state["pages"]
    loaded.step(0, "decode", 0)
    where = loaded.folder / "steps" / "0" / "rank0"
    whole = {name: (where / f"{name}.bin").read_bytes() for name in ("tokens", "batch.lengths", "batch.slots")}

    def refused(name: str, data: bytes) -> str:
        kept = (where / f"{name}.bin").read_bytes()
        (where / f"{name}.bin").write_bytes(data)
        done, log = loaded.steps(loader, 0)
        (where / f"{name}.bin").write_bytes(kept)
        assert done.returncode == 1 and not [x for x in log if x.startswith("run ")]
        return done.stderr

    def last(name: str, value: int, width: int) -> bytes:
        data = (where / f"{name}.bin").read_bytes()
        return data[:-width] + value.to_bytes(width, "little", signed=True)

    (where / "batch.lengths.bin").write_bytes(last("batch.lengths", held, 8))  # the longest is served
    assert loaded.steps(loader, 0)[0].returncode == 0
    text = refused("batch.lengths", last("batch.lengths", held + 1, 8))
    assert f"number 3 is {held + 1}; state.tokens_per_sequence of the manifest allows 0 to {held}" in text
    text = refused("batch.slots", last("batch.slots", slots, 4))
    assert f"batch.slots: {where}/batch.slots.bin: number 3 is {slots}; state.slots" in text
    assert "number 3 is -1; state.slots" in refused("batch.slots", last("batch.slots", -1, 4))
    assert f"state.pages of the manifest allows 0 to {pages - 1}" in refused(
        "batch.block_table", last("batch.block_table", pages, 4)
    )
    assert "counts.bin: number 3 is 2; graphs.decode_b4_s0.tokens" in refused(
        "batch.counts", last("batch.counts", 2, 8)
    )
    text = refused("tokens", whole["tokens"] + bytes(8))
    assert "tokens.bin has 40 bytes; graphs.decode_b4_s0.inputs of the manifest has shape [4, 1], 32 bytes" in text
    assert "has 24 bytes" in refused("tokens", whole["tokens"][:-8])
    (where / "tokens.bin").unlink()
    done, _ = loaded.steps(loader, 0)
    assert "tokens: " in done.stderr and "tokens.bin cannot be read" in done.stderr
    (where.parent / "phase").write_text("decod\n")
    done, _ = loaded.steps(loader, 0)
    assert "phase: the manifest's graphs have no phase 'decod'" in done.stderr


def test_the_loader_refuses_a_command_line_and_files_it_does_not_know(loader, loaded):
    for more, said in [(["--fast"], "--fast: is not known"), ([], "--steps and --out are needed, or --compile-only")]:
        done, _ = loaded.run(loader, 0, *more)
        assert done.returncode == 1 and said in done.stderr
    (loaded.deployment / "ranks" / "0.txt").write_text("rank 1\n")
    done, _ = loaded.run(loader, 0, "--compile-only")
    assert "the plan is of rank 1" in done.stderr
    (loaded.deployment / "ranks" / "0.txt").write_text("rang 0\n")
    done, _ = loaded.run(loader, 0, "--compile-only")
    assert "line 'rang' is not known" in done.stderr
