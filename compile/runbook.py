"""The README.md of a deployment: what to do on the hosts, in order, with the numbers of this bundle."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from kimi_graph.ops.kernel_project import commands

from .packages import PACKAGES, Needed
from .rank_tables import builds_clusters, table_version

if TYPE_CHECKING:
    from .deploy import Deployment


def runbook(d: "Deployment", bundle: str) -> str:
    """The text; `bundle`: its folder's name, as a shell reads it."""
    parts = [_head(d), _where(d), _before(d), _operators(d), _weights(d, bundle), _loader(d), _start(d, bundle)]
    parts += [_groups(d), _offline(d), _trouble(d), _unproved(d)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _size(size: int) -> str:
    return f"{size / 2**30:,.2f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"


def _table(head: list[str], rows: list[list[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in lines)


def _head(d: "Deployment") -> str:
    m = d.bundle.manifest
    ranks = d.mesh.world
    phases = ", ".join(dict.fromkeys(g["phase"] for g in m["graphs"]))
    return (
        f"# {m['model']['name']} on {d.target.product}: {ranks:,} {'rank' if ranks == 1 else 'ranks'}\n\n"
        f"Made by `kimi-graph deploy` for {d.target.soc_version}, CANN {d.cann}. Phases: {phases}; "
        f"{m['state']['tokens_per_sequence']:,} tokens a sequence, {m['graphs'][0]['rows']} at a time.\n\n"
        "**Nobody has run these files on a device.** They follow public documents of CANN; what is not proved is at "
        "the "
        "end. The first start is best a bring-up, step by step: `kimi-graph bringup`."
    )


def _where(d: "Deployment") -> str:
    rows: list[list[object]] = []
    memory = d.bundle.manifest["memory"]
    for host in d.hosts.hosts:
        mine = [p for p in d.places if p.host is host]
        for stage in sorted({d.stage_of(p.rank) for p in mine}):
            own = [p for p in mine if d.stage_of(p.rank) == stage]
            held = d.held[stage].bytes
            rows.append(
                [host.name, host.ip, f"{own[0].rank} to {own[-1].rank}", f"{own[0].device.id} to {own[-1].device.id}",
                 stage, _size(held["weights"]), _size(held["states"]), _size(held["scratch"]), _size(held["HCCL"])]
            )  # fmt: skip
    head = ["host", "address", "ranks", "devices", "stage", "weights of a rank", "states", "scratch", "HCCL"]
    die = memory["die"]
    said = "Scratch is the peak of a graph's values, HCCL two buffers of each group; the runtime takes memory besides."
    return f"## Who runs where\n\n{_table(head, rows)}\n\nA die has {_size(die)}. {said}"


def _before(d: "Deployment") -> str:
    lines = [
        f"- driver and firmware of the chip, `npu-smi info` shows {d.hosts.each} devices on each host",
        f"- CANN {d.cann}: toolkit and the operator package of {d.target.op_soc}; the same release everywhere",
        "- the bundle and this folder on every host, and `BUNDLE`, `WEIGHTS` set to where they are",
    ]
    if d.mesh.world > 1:
        lines.append(
            f"- devices reach each other: `rank_table.json` has form {table_version(d.hosts, d.target)}"
            + (", with addresses copied from each host's /etc/hccl_rootinfo.json" if d.target.soc == "950" else "")
        )
        if any(p.device.ip for p in d.places):
            lines.append("- `hccn_tool -i N -ping -g address A` answers from device N to a device of another host")
    return "## 1. Before\n\nOn every host:\n\n" + "\n".join(lines)


def _operators(d: "Deployment") -> str:
    needed = [
        Needed(n["provider"], tuple(n["operators"]), tuple(n["must_not_replace"]))
        for n in d.bundle.manifest["packages"]
    ]
    if not needed:
        return "## 2. Operators\n\nThe graphs have CANN's operators alone; nothing is installed."
    (n,) = needed
    build = [PACKAGES[n.provider].build.format(ops=";".join(n.types)), "./custom_opp_*.run"]
    if n.provider == "own":
        build = list(commands(d.target.op_soc, '"$BUNDLE/kernels"'))
    lines = "\n".join(build)
    return (
        "## 2. Operators\n\n"
        f"The graphs need {n.text()}. Build it once for {d.target.op_soc}, install it on every host, and have no other "
        "operator package there:\n\n"
        f"```bash\n{lines}   # on every host; with --install-path=/opt/operators:\n"
        "export OPERATORS=/opt/operators   # env.sh sources what the package sets\n```"
    )


def _weights(d: "Deployment", bundle: str) -> str:
    if "constants" in d.bundle.manifest["weights"]:
        return "## 3. Weights\n\nThe bundle holds them (`constants.bin`)."
    memory = d.bundle.manifest["memory"]
    stages = memory.get("stages", [memory])
    total = sum(s["weights"] for s in stages) * d.mesh.stage.world
    there = "`weights/*.txt` say where they are" if d.written else (
        "**They were not there when this was written**: make them, then run `kimi-graph deploy` again; it writes "
        "`weights/*.txt`, which say where they are"
    )  # fmt: skip
    return (
        "## 3. Weights\n\n"
        f"The ranks read {_size(total)} in all. {there}: a line `name file offset bytes sha256` for each weight of a "
        "rank, of files in `$WEIGHTS`, by default the bundle's `weights/`. A host needs the files that its ranks name, "
        "no others. The loader holds each weight against its hash; `kimi-graph weights --verify` does so without a "
        "device, and `--repair` makes damaged files anew.\n\n"
        f"```bash\nkimi-graph weights {bundle} --checkpoint CHECKPOINT\n```"
    )


def _loader(d: "Deployment") -> str:
    return (
        "## 4. The loader\n\n"
        "`loader/` is a C++ program of one file: it starts GE for one rank, reads the rank's graphs, sets the rank's "
        "place "
        "in them, compiles them, binds weights and states, and runs steps from files. It is made for bring-up, not for "
        "serving.\n\n"
        "```bash\ncmake -S loader -B loader/build && cmake --build loader/build\n```"
    )


def _start(d: "Deployment", bundle: str) -> str:
    hosts = "\n".join(f"./hosts/{h.name}/run.sh --compile-only   # on {h.name}" for h in d.hosts.hosts[:4])
    more = f"\n# ... and so on, {len(d.hosts.hosts):,} hosts" if len(d.hosts.hosts) > 4 else ""
    together = (
        " Start all hosts within `HCCL_CONNECT_TIMEOUT` seconds: ranks wait for each other before they compile, as an "
        "operator that crosses ranks asks for the size of a living group." if d.mesh.world > 1 else ""
    )  # fmt: skip
    between = (
        " A stage reads what the one before it gives from the same folder, so `OUT` has to be one that all hosts see."
        if d.mesh.pipe > 1
        else ""
    )
    return (
        f"## 5. Start\n\nFirst compile and load, without a step.{together}\n\n"
        f"```bash\nexport BUNDLE=/path/to/{bundle} "
        f"LOGS=/var/log/kimi-graph\n{hosts}{more}\n```"
        "\n\nEach rank ends with `rank R: compiled G graphs, W bytes of weights, S bytes of states`. Then steps: a "
        "folder for "
        "each, `steps/0`, `steps/1`, ..., with a file `phase` and `rank<R>/<input>.bin` for each input of a rank's "
        "graph "
        f"(`graphs/*.txt` has their shapes); results come to `OUT/<step>/rank<R>/<name>.bin`.{between}\n\n"
        "```bash\n./hosts/HOST/run.sh --steps steps --out OUT\n```\n\n"
        "A step's graph updates the states in place; phases share them. The contract is `state.rules` of the bundle's "
        "manifest."
    )


def _groups(d: "Deployment") -> str:
    if not d.groups:
        return ""
    host = {p.rank: p.host.name for p in d.places}
    rows: list[list[object]] = []
    for group in dict.fromkeys(c.group for c in d.groups):
        own = [c for c in d.groups if c.group == group]
        spread = max(len({host[r] for r in c.ranks}) for c in own)
        where = "inside a host" if spread == 1 else f"over {spread} hosts"
        rows.append([f"`{group}`", len(own), len(own[0].ranks), where, _traffic(d.bundle.manifest["graphs"], group)])
    head = ["group", "how many", "ranks of each", "where", "bytes of a rank in a step"]
    stages = ""
    if d.mesh.pipe > 1:
        to = f"Rank r of a stage gives to rank r + {d.mesh.stage.world:,}."
        stages = f"\n\nStages hand on: {'; '.join(_handed_on(d))}. {to}"
    return (
        f"## Groups\n\n{_table(head, rows)}\n\n"
        "`ranks/*.txt` lists each rank's groups; all ranks make them in one order. Of a name that several groups have "
        "each has its own communicator (`tensor.0`, `tensor.1`), which the loader writes into the graph." + stages
    )


def _traffic(graphs: list[dict[str, Any]], group: str) -> str:
    found: dict[str, int] = {}
    for g in graphs:
        size = sum(c["bytes"] for c in g["collectives"] if c["group"] == group)
        found[g["phase"]] = max(found.get(g["phase"], 0), size)
    return ", ".join(f"{phase} {size:,}" for phase, size in found.items() if size)


def _handed_on(d: "Deployment") -> Iterator[str]:
    for g in d.bundle.manifest["graphs"]:
        if g["reads"]:
            yield f"{g['phase']} to stage {g['stage']}: {', '.join(g['reads'])}"


def _offline(d: "Deployment") -> str:
    alone = [g["name"] for g in d.bundle.manifest["graphs"] if d.alone(g)]
    lines = []
    if alone:
        lines.append(f"`atc.sh OUT` makes offline models of {', '.join(alone)}, which meet no other rank.")
    if len(alone) < len(d.bundle.manifest["graphs"]):
        if builds_clusters(d.target, d.cann):
            lines.append(
                "`cluster/atc.sh OUT` makes models of many ranks, as CANN up to 8.3 can; a session of GE loads them. "
                "The "
                "numbers of links and memory in numa_config.json are those of the documents' example: set your own. "
                "The "
                f"graphs were checked against CANN {d.target.cann}, not against {d.cann}."
            )
        else:
            lines.append(
                f"Graphs with collectives have no offline model on CANN {d.cann}: `atc` would ask HCCL for a group "
                "that "
                "does not live there. They are compiled where the communicator is, by the loader."
            )
    return "## Offline models\n\n" + "\n\n".join(lines)


TROUBLE: Mapping[str, str] = {
    "no line but `rank R: starting`": "ranks wait for each other: is one missing, or an address of the rank table "
    "wrong? "
    "`npu-smi info` on every host, `hccn_tool -i N -link -g`; the log in ASCEND_PROCESS_LOG_PATH names the peer",
    "`GEInitialize` fails": "the rank table: physical device ids, addresses, one entry for each rank; another process "
    "on "
    "the device",
    "an operator is not supported": "the operator package: `ls $ASCEND_OPP_PATH/vendors`; `kimi-graph compile --avoid "
    "OPERATOR` makes the bundle without one",
    "out of memory while compiling": "the host's: graphs are small, kernels are compiled by as many processes as there "
    "are "
    "ranks; start fewer at once",
    "out of memory while loading": "the device's: the table above, HCCL's buffers (HCCL_BUFFSIZE x 2 of each group), "
    "work "
    "memory of the largest graph; a shorter --chunk or more ranks",
    "results are wrong": "`kimi-graph bringup` compares operator by operator and names the first that differs",
}


def _trouble(d: "Deployment") -> str:
    rows: list[list[object]] = [[seen, why] for seen, why in TROUBLE.items()]
    return f"## When it does not start\n\n{_table(['seen', 'look at'], rows)}"


def _unproved(d: "Deployment") -> str:
    own = [
        "These files: the loader is compiled against declarations written for its tests, never against CANN's.",
        "That GE lets tensors of a session, bound by address, be the states of several graphs.",
    ]
    return "## Not proved\n\n" + "\n".join(f"- {line}" for line in (*own, *d.bundle.manifest["unproved"]))
