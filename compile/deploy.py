"""`kimi-graph deploy`: what each host and rank of a bundle runs, as files beside the bundle.

```
README.md             the runbook, with this bundle's numbers
deploy.json           the same for programs: ranks with hosts and devices, stages, groups; which bundle it is for;
                      hash of every file, so that a later `deploy` loses nothing that somebody else wrote
rank_table.json       how ranks find each other (bundles of many ranks)
env.sh                environment of every rank
hosts/NAME/run.sh     starts the ranks of a host, and ends all when one fails
ranks/R.txt           what rank R is: device, groups, places, options of GE, graphs
graphs/NAME.txt       what a graph's inputs, weights, states and results are, by index
weights/R.txt         where each weight of rank R lies, if `kimi-graph weights` has made them
atc.sh                offline models of graphs without collectives
cluster/              CANN up to 8.3, where its atc builds models of many ranks
loader/               a C++ program that runs a rank through GE's session interface
```
`ranks` and `graphs` are lines of words, so that the loader needs no parser; names hold no spaces. Nothing of this was
run on a device. Sources: fact sheet of Ascend, D.1 to D.3; GE's documents of its session interface and its options.
"""

import functools
import hashlib
import json
import shlex
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kimi_graph.config import ModelConfig
from kimi_graph.errors import DeployError
from kimi_graph.files import Standing, check_writable, new_folder
from kimi_graph.parallel import Mesh
from kimi_graph.parallel.collectives import group_axes

from . import air
from .buckets import largest_inputs
from .bundle import MANIFEST, Bundle, as_written, dump, file_hash, open_bundle, read_json
from .executor.registry import SEMANTICS
from .fit import Held, buffer_mib, check_fit, held_by_stage
from .ge_proto import Dtype, ModelDef, TensorDescriptor, bytes_of, get_attr, is_tiled, results_of, set_attr, shape_of
from .hosts import LOCAL, Hosts, Place, example, read_hosts
from .manifest import is_weight, layout_in, target_of
from .mesh_manifest import own_axes
from .order import COLLECTIVE
from .places import bind_rank, group_of, placed_groups
from .rank_tables import Communicator, builds_clusters, cluster_files, communicators, rank_table, table_version
from .runbook import runbook
from .targets import CANN_VERSIONS, Target
from .verify import bundle_config
from .wrap import wrapped
from .written import Written, open_written

LOADER = Path(__file__).parent / "data" / "loader"
DEPLOY, RANK_TABLE = "deploy.json", "rank_table.json"
FORMATS = {False: 2, True: 29}  # GE's numbers of ND and of FRACTAL_NZ, by whether a tensor is tiled
OLD_CANN = ("8.0", "8.1", "8.2", "8.3")  # that graphs are not made for, and hosts may have


@dataclass(frozen=True)
class Deployment:
    """A bundle on hosts.

    Attributes:
        target: what the bundle is for. cann: release that the hosts have.
        models: graphs by name, as they are in the bundle's files.
    """

    bundle: Bundle
    hosts: Hosts
    target: Target
    cann: str
    models: Mapping[str, ModelDef]
    mesh: Mesh
    config: ModelConfig

    @functools.cached_property
    def written(self) -> Written | None:
        """Weights that were made ahead; None where those of a rank were not."""
        found = open_written(self.bundle)
        return found if found is not None and set(range(self.mesh.world)) <= set(found.ranks) else None

    @functools.cached_property
    def groups(self) -> list[Communicator]:
        """All groups of ranks that graphs name."""
        entry = self.bundle.manifest["mesh"]
        return [] if entry is None else communicators(entry["groups"])

    @property
    def places(self) -> list[Place]:
        return self.hosts.places()

    def stage_of(self, rank: int) -> int:
        return rank // self.mesh.stage.world

    def graphs_of(self, stage: int) -> list[dict[str, Any]]:
        """Entries of a stage's graphs, in the manifest's order."""
        return [g for g in self.bundle.manifest["graphs"] if g.get("stage", 0) == stage]

    def groups_of(self, rank: int) -> list[Communicator]:
        return [c for c in self.groups if rank in c.ranks]

    @functools.cached_property
    def placed(self) -> dict[str, set[str]]:
        """Of each graph the groups a rank's place in which it says."""
        return {name: placed_groups(model) for name, model in self.models.items()}

    def alone(self, entry: Mapping[str, Any]) -> bool:
        """Whether a graph meets no other rank."""
        return not any(op.type.startswith(COLLECTIVE) for op in self.models[entry["name"]].graph[0].op)

    @functools.cached_property
    def buffer_mib(self) -> int:
        """What HCCL_BUFFSIZE has to be for rows that go to their experts; 0: HCCL's default will do."""
        return buffer_mib(self.models)

    @functools.cached_property
    def held(self) -> list[Held]:
        """What a rank of each stage needs of its die."""
        return held_by_stage(self.bundle.manifest, self.models)

    def check_memory(self) -> None:
        """Raises DeployError where a rank does not fit its die: nothing is compiled on the hosts to find that out."""
        check_fit(str(self.bundle.folder), self.bundle.manifest, self.held, DeployError)

    def summary_json(self) -> dict[str, Any]:
        """For programs, and for `bringup`: who runs where."""
        manifest = self.bundle.manifest
        return {
            "bundle": {
                "manifest_sha256": hashlib.sha256((self.bundle.folder / MANIFEST).read_bytes()).hexdigest(),
                "model": manifest["model"]["name"],
            },
            "target": self.target.name,
            "soc_version": self.target.soc_version,
            "cann": self.cann,
            "mesh": str(self.mesh),
            "rank_table": table_version(self.hosts, self.target) if self.mesh.world > 1 else None,
            "ranks": [
                {
                    "rank": p.rank,
                    "host": p.host.name,
                    "ip": p.host.ip,
                    "device": p.device.id,
                    "stage": self.stage_of(p.rank),
                    "graphs": [g["name"] for g in self.graphs_of(self.stage_of(p.rank))],
                    "groups": {c.group: c.name for c in self.groups_of(p.rank)},
                }
                for p in self.places
            ],
            "groups": [{"name": c.name, "group": c.group, "ranks": list(c.ranks)} for c in self.groups],
        }


# ---- the command -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Deployed:
    """What `deploy` wrote; `files`: SHA-256 by name, of all but `deploy.json`, which has this."""

    folder: Path
    deployment: Deployment
    files: Mapping[str, str]

    @property
    def summary(self) -> str:
        hosts, ranks = len(self.deployment.hosts.hosts), self.deployment.mesh.world
        return f"{ranks:,} {'rank' if ranks == 1 else 'ranks'} on {hosts:,} {'host' if hosts == 1 else 'hosts'}: " + (
            f"{len(self.files) + 1:,} files"
        )

    def text(self) -> str:
        return "\n".join(_overview(self.deployment))

    def to_json(self) -> Any:
        return self.deployment.summary_json() | {"files": dict(self.files)}


def _overview(d: Deployment) -> Iterator[str]:
    places = d.places
    for host in d.hosts.hosts:
        mine = [p.rank for p in places if p.host is host]
        stages = sorted({d.stage_of(r) for r in mine})
        what = f"ranks {mine[0]:,} to {mine[-1]:,}" if len(mine) > 1 else f"rank {mine[0]:,}"
        yield f"{host.name:<10}{what}, stage {', '.join(map(str, stages))}"
    if d.mesh.world > 1:
        yield f"rank table {table_version(d.hosts, d.target)}, {len(d.groups)} groups"
    if "constants" not in d.bundle.manifest["weights"]:
        not_yet = "not made ahead for all ranks; run kimi-graph weights, and deploy again: the loader reads them"
        yield from wrapped("weights   ", not_yet if d.written is None else d.written.said)


def hosts_example(folder: Path) -> str:
    """A hosts file of the right size for a bundle, to be filled in."""
    bundle = open_bundle(folder)
    with as_written(folder):
        made = example(target_of(bundle.manifest), _mesh(bundle, bundle_config(bundle)).world)
    return json.dumps(made, indent=1)


def deploy_bundle(folder: Path, hosts: Path | None, out: Path | None = None, cann: str | None = None) -> Deployed:
    """Write what the hosts of a bundle run.

    Args:
        hosts: see `hosts`; None: one device of this machine, for a bundle of one rank.
        out: where to; None: beside the bundle, its name with `.deploy`.
        cann: of the hosts; None: the bundle's own.

    Raises:
        DeployError: hosts that it cannot run on; nothing is written.
        BundleError: a damaged bundle.
    """
    bundle = open_bundle(folder)
    out = folder.with_name(f"{folder.resolve().name}.deploy") if out is None else out
    _check_place(out, folder)
    standing = Standing.of(out, DEPLOY)
    with as_written(folder):
        target = target_of(bundle.manifest)
        models = {g["name"]: air.from_bytes(bundle.graph_bytes(g), g["file"]) for g in bundle.manifest["graphs"]}
        config = bundle_config(bundle)
        mesh = _mesh(bundle, config)
        cann = _release(cann, target)
        if hosts is None and mesh.world > 1:
            raise DeployError(f"{folder}: {mesh} has {mesh.world:,} ranks; say where they run with --hosts FILE.")
        found = LOCAL if hosts is None else read_hosts(hosts, target, mesh.world, str(mesh))
        d = Deployment(bundle, found, target, cann, models, mesh, config)
        d.check_memory()
        with new_folder(out, lambda: _check_place(out, folder), standing) as work:
            for name, data in _files(d, out):
                (work / name).parent.mkdir(parents=True, exist_ok=True)
                (work / name).write_bytes(data if isinstance(data, bytes) else data.encode())
                if name.endswith(".sh"):
                    (work / name).chmod((work / name).stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
            shutil.copytree(LOADER, work / "loader")
            made = Deployed(out, d, _hashes(work))
            (work / DEPLOY).write_bytes(dump(made.to_json()))
    return made


def _hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of a deployment's files by name: of all but `deploy.json`, which has these, and what is built there."""
    names = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if not p.is_dir())
    return {n: file_hash(folder / n) for n in names if n != DEPLOY and not n.startswith("loader/build/")}


def _mesh(bundle: Bundle, config: ModelConfig) -> Mesh:
    layout = layout_in(bundle.manifest, config, bundle.folder / MANIFEST)
    return Mesh() if layout is None else layout.mesh


def _release(cann: str | None, target: Target) -> str:
    known = (*OLD_CANN, *CANN_VERSIONS)
    if cann is not None and cann not in known:
        raise DeployError(f"--cann {cann}: hosts have one of {', '.join(known)}.")
    return target.cann if cann is None else cann


def _check_place(out: Path, bundle: Path) -> None:
    check_writable(out)
    if out.exists() and not (out / DEPLOY).is_file() and (not out.is_dir() or any(out.iterdir())):
        raise DeployError(f"{out}: exists and is no deployment; choose another folder.")
    if (out / DEPLOY).is_file():
        said = read_json(out / DEPLOY)
        written = said.get("files", {}) if isinstance(said, dict) else {}
        if lost := [name for name, digest in _hashes(out).items() if written.get(name) != digest]:
            what = "was changed" if lost[0] in written else "no deployment wrote"
            raise DeployError(
                f"{out}: holds {lost[0]}, which {what} and which would be lost; move it, or choose another folder."
            )
    if bundle.resolve() in (out.resolve(), *out.resolve().parents):
        raise DeployError(f"{out}: lies inside the bundle; choose another folder.")


# ---- files -----------------------------------------------------------------------------------------------------------


def _files(d: Deployment, out: Path) -> Iterator[tuple[str, str | bytes]]:
    many = d.mesh.world > 1
    if many:
        yield RANK_TABLE, dump(rank_table(d.hosts, replace(d.target, cann=d.cann)))
    yield "env.sh", _environment(d)
    yield "SHA256SUMS", "".join(f"{g['sha256']}  {g['file']}\n" for g in d.bundle.manifest["graphs"])
    for entry in d.bundle.manifest["graphs"]:
        yield f"graphs/{entry['name']}.txt", _lines(_graph_lines(d, entry))
    for p in d.places:
        yield f"ranks/{p.rank}.txt", _lines(_rank_lines(d, p))
        if d.written is not None:
            entries = sorted(d.written.of(p.rank).items())
            yield f"weights/{p.rank}.txt", _lines((name, e.file, e.offset, e.bytes, e.sha256) for name, e in entries)
    for host in d.hosts.hosts:
        yield f"hosts/{host.name}/run.sh", _run_script(d, [p for p in d.places if p.host is host])
    if alone := [g for g in d.bundle.manifest["graphs"] if d.alone(g)]:
        yield "atc.sh", _atc_script(d, alone)
    if many and builds_clusters(d.target, d.cann):
        yield from _cluster(d)
    yield "README.md", runbook(d, shlex.quote(d.bundle.folder.resolve().name))


def _lines(lines: Iterable[Iterable[object]]) -> str:
    return "".join(" ".join(map(str, words)) + "\n" for words in lines)


def _dims(shape: Iterable[int]) -> str:
    return ",".join(map(str, shape)) or "-"


def described(kind: str, index: int, name: str, desc: TensorDescriptor) -> tuple[object, ...]:
    """kind index name dtype format bytes dims origin-dims; numbers of dtype and format are GE's."""
    tiled = is_tiled(desc)
    dims = _dims(desc.shape.dim)
    dtype = Dtype.of_proto(desc.dtype)
    return kind, index, name, dtype.ge, FORMATS[tiled], bytes_of(desc), dims, _dims(shape_of(desc)) if tiled else dims


def _graph_lines(d: Deployment, entry: Mapping[str, Any]) -> Iterator[tuple[object, ...]]:
    """What the loader has to know of a graph."""
    model = d.models[entry["name"]]
    yield "graph", entry["name"]
    yield "phase", entry["phase"]
    yield "file", entry["file"]
    ops = model.graph[0].op
    for kind, attribute in sorted(
        {(op.type, SEMANTICS[op.type].group) for op in ops if op.type.startswith(COLLECTIVE)}
    ):
        yield "communicator", kind, attribute
    for kind, place in sorted(entry.get("places", {}).items()):
        yield "place", kind, place["attribute"], place["group"]
    for name, (most, key) in largest_inputs(d.bundle.manifest, d.config, entry).items():
        yield "most", name, most, key
    for name in entry.get("reads", ()):
        yield "read", name, entry["stage"] - _giver(d, entry, name)
    sources = sorted((op for op in ops if op.type in ("Data", "RefData")), key=lambda op: get_attr(op, "index"))
    for op in sources:
        kind = "state" if op.type == "RefData" else "weight" if is_weight(op) else "input"
        yield described(kind, get_attr(op, "index"), op.name, op.output_desc[0])
    results = results_of(ops).input_desc
    names = entry.get("gives") or [o["name"] for o in entry["outputs"]]
    for i, (name, desc) in enumerate(zip(names, results, strict=True)):
        yield described("output", i, name, desc)


def _giver(d: Deployment, entry: Mapping[str, Any], name: str) -> int:
    """The stage whose value of a name a graph reads: the last one before it that gives it."""
    graphs = [g for g in d.bundle.manifest["graphs"] if g["phase"] == entry["phase"] and name in g["gives"]]
    return max(g["stage"] for g in graphs if g["stage"] < entry["stage"])


def _rank_lines(d: Deployment, p: Place) -> Iterator[tuple[object, ...]]:
    """What the loader has to know of a rank. Groups come in the order in which every rank makes them."""
    stage = d.stage_of(p.rank)
    yield "rank", p.rank
    yield "ranks", d.mesh.world
    yield "stride", d.mesh.stage.world  # ranks of a stage
    yield "device", p.device.id
    yield "option", "ge.graphRunMode", 0  # inference
    yield "option", "ge.socVersion", d.target.soc_version
    yield "option", "ge.exec.precision_mode_v2", "origin"  # dtypes as the graph has them: GE's own default is fp16
    yield "option", "ge.exec.staticMemoryPolicy", 2  # graphs of a session share their work memory
    if d.mesh.world > 1:
        yield "option", "ge.exec.rankId", p.rank
    for c in d.groups_of(p.rank):
        yield "group", c.group, c.name, _dims(c.ranks)
    entries = d.graphs_of(stage)
    for group in sorted({g for e in entries for g in d.placed[e["name"]]}):
        yield "at", group, d.mesh.index(p.rank, group_axes(group))
    for name in sorted({i["name"] for e in entries for i in e["inputs"] if i["name"].startswith("own_index.")}):
        yield "own", name, d.mesh.index(p.rank, own_axes(name))
    for phase in dict.fromkeys(g["phase"] for g in d.bundle.manifest["graphs"]):
        yield "phase", phase
    for entry in entries:
        yield "run", entry["name"]


_ENV = """\
# Environment of every rank; `source` it. Made by kimi-graph deploy.
# shellcheck shell=bash
here=$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)
export DEPLOY="$here"
: "${{BUNDLE:?say where the bundle is: export BUNDLE=DIR}}"
: "${{WEIGHTS:=$BUNDLE/weights}}"
source "${{ASCEND_HOME_PATH:-/usr/local/Ascend/cann}}/set_env.sh"
{lines}"""


def _environment(d: Deployment) -> str:
    lines = [
        'export ASCEND_PROCESS_LOG_PATH="${LOGS:-$PWD/logs}/ascend"',
        "export ASCEND_GLOBAL_LOG_LEVEL=${ASCEND_GLOBAL_LOG_LEVEL:-3}  # errors alone; 1 says more",
    ]
    if d.bundle.manifest["packages"]:
        lines.append(
            '[ -z "${OPERATORS:-}" ] || source "$OPERATORS"/vendors/*/bin/set_env.bash  # --install-path of the package'
        )
    if d.mesh.world > 1:
        lines += [
            "export HCCL_CONNECT_TIMEOUT=${HCCL_CONNECT_TIMEOUT:-1800}  # s: slow ranks are waited for",
        ]
        if any(p.device.ip is not None and ":" in p.device.ip for p in d.places):
            lines.append("export HCCL_SOCKET_FAMILY=AF_INET6  # addresses of the devices are IPv6")
    if d.buffer_mib > 200:
        lines.append(f"export HCCL_BUFFSIZE={d.buffer_mib}  # MiB, for the rows that go to their experts")
    return _ENV.format(lines="\n".join(lines) + "\n")


_RUN = """\
#!/usr/bin/env bash
# Ranks {first} to {last} of {ranks}, on {host}. Made by kimi-graph deploy; nobody has run it on a device.
#   run.sh [--compile-only | --steps DIR --out DIR]
set -eo pipefail  # no -u: what CANN's set_env.sh reads may be unset
source "$(dirname "$0")/../../env.sh"
LOGS="${{LOGS:-$PWD/logs}}"
mkdir -p "$LOGS"
(cd "$BUNDLE" && sha256sum --quiet -c "$DEPLOY/SHA256SUMS")
pids=()
trap 'kill "${{pids[@]}}" 2>/dev/null || true' EXIT
for rank in {list}; do
  "${{LOADER:-$DEPLOY/loader/build/kimi_graph_loader}}" --bundle "$BUNDLE" --deploy "$DEPLOY" --rank "$rank" \\
    --weights "$WEIGHTS" "$@" >"$LOGS/rank$rank.log" 2>&1 &
  pids+=($!)
done
for _ in "${{pids[@]}}"; do
  wait -n || {{ echo "a rank of {host} failed; $LOGS/rank*.log say which and why" >&2; exit 1; }}
done
pids=()
"""


def _run_script(d: Deployment, places: list[Place]) -> str:
    ranks = [p.rank for p in places]
    return _RUN.format(
        first=ranks[0], last=ranks[-1], ranks=d.mesh.world, host=places[0].host.name, list=" ".join(map(str, ranks))
    )


_ATC = """\
#!/usr/bin/env bash
# Offline models of the graphs that meet no other rank. Made by kimi-graph deploy; nobody has run it with a toolkit.
# A machine without an NPU needs the toolkit, the operator package of the chip, and devlib in LD_LIBRARY_PATH.
#   atc.sh OUT
set -euo pipefail
OUT=$(mkdir -p "${{1:?say where the models go}}" && cd "$1" && pwd)
: "${{BUNDLE:?say where the bundle is}}"
cd "$BUNDLE"  # graphs name their constants from here
{lines}
"""


def _atc_script(d: Deployment, entries: list[dict[str, Any]]) -> str:
    external = " --external_weight=2" if "constants" in d.bundle.manifest["weights"] else ""
    lines = [
        f'atc --mode=0 --framework=1 --model={shlex.quote(g["file"])} --output="$OUT"/{shlex.quote(g["name"])} '
        f"--soc_version={d.target.soc_version} --precision_mode_v2=origin{external}"
        for g in entries
    ]
    return _ATC.format(lines="\n".join(lines))


# ---- CANN up to 8.3 --------------------------------------------------------------------------------------------------


def _cluster(d: Deployment) -> Iterator[tuple[str, str | bytes]]:
    """Of each phase that all ranks run: a graph for each rank, and the two files that `atc` reads."""
    commands = []
    for phase in dict.fromkeys(g["phase"] for g in d.bundle.manifest["graphs"]):
        entries = {g.get("stage", 0): g for g in d.bundle.manifest["graphs"] if g["phase"] == phase}
        if len(entries) < d.mesh.pipe:
            continue
        models = [f"{phase}_rank{p.rank}.air" for p in d.places]
        for p, name in zip(d.places, models, strict=True):
            model = d.models[entries[d.stage_of(p.rank)]["name"]]
            yield f"cluster/{phase}/{name}", air.to_bytes(rank_graph(model, d, p.rank))
        for name, value in cluster_files(d.hosts, d.target, d.groups, models).items():
            yield f"cluster/{phase}/{name}", dump(value)
        commands.append(
            f"atc --mode=0 --framework=1 --distributed_cluster_build=1 --shard_model_dir={phase} "
            f"--cluster_config={phase}/numa_config.json --model_relation_config={phase}/model_relation_config.json "
            f'--output="$OUT/{phase}" --soc_version={d.target.soc_version} --precision_mode_v2=origin'
        )
    head = "#!/usr/bin/env bash\n# CANN up to 8.3 alone; the models are loaded by a session of GE.\nset -euo pipefail\n"
    where = 'OUT=$(mkdir -p "${1:?say where the models go}" && cd "$1" && pwd)\ncd "$(dirname "$0")"\n'
    yield "cluster/atc.sh", head + where + "\n".join(commands) + "\n"


def rank_graph(model: ModelDef, d: Deployment, rank: int) -> ModelDef:
    """A graph as one rank runs it: its place in groups is set, and groups have the names of their communicators."""
    bound = bind_rank(model, lambda group: d.mesh.index(rank, group_axes(group)))
    names = {c.group: c.name for c in d.groups_of(rank)}
    for op in bound.graph[0].op:
        if op.type.startswith(COLLECTIVE):
            set_attr(op, SEMANTICS[op.type].group, names[group_of(op)])
    return bound
