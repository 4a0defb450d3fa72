"""Graphs on NPUs, through the loader of a deployment: bring-up's device on the hosts themselves.

NOT RUN ON A DEVICE. Each run is a small deployment in a folder: graphs, what their inputs are, files of the inputs; the
loader is started once for each rank, and its files are read back. Its tests run the loader with stand-ins for CANN.

All ranks are started from here. Those of other hosts by KIMI_GRAPH_LAUNCH, `ssh {host} {command}` say, with the folder
of runs (KIMI_GRAPH_RUNS, else a temporary one) where all hosts see it. GE starts anew for each run, which takes a
while: a bring-up is made of a hundred of them.
"""

import hashlib
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kimi_graph.errors import DeployError, VerifyError

from . import air
from .bundle import MANIFEST, Bundle, open_bundle, read_json
from .deploy import DEPLOY, RANK_TABLE, described
from .device import Groups, Job
from .executor import Ran
from .executor.registry import SEMANTICS
from .ge_proto import ModelDef, dtype_of, get_attr, shape_of
from .order import COLLECTIVE
from .rank_tables import communicators

SECONDS = 3600  # that a run may take


@dataclass
class NpuDevice:
    """NPUs of a deployment.

    Attributes:
        said: what its deployment says of each rank. folder: of the deployment. runs: where files of runs go.
        launch: how a command is run on a host; {host} and {command} are put in. loader: the program.
    """

    said: Mapping[str, Any]
    folder: Path
    runs: Path
    loader: Path
    launch: str = ""
    count: int = field(default=0)

    def facts(self) -> dict[str, str]:
        """What the deployment was made for."""
        found = {"name": self.said["soc_version"], "soc_version": self.said["soc_version"], "cann": self.said["cann"]}
        found["devices"] = str(len(self.said["ranks"]))
        return found

    def run(self, jobs: Mapping[int, Job], groups: Groups) -> dict[int, Ran]:
        """See `Device.run`."""
        where = self.runs / f"run{self.count}"
        self.count += 1
        for rank, job in jobs.items():
            _write(where, self.folder, rank, job, groups, self.said)
        if len(self.said["ranks"]) > 1:
            shutil.copyfile(self.folder / RANK_TABLE, where / "deploy" / RANK_TABLE)
        self._start(where, sorted(jobs))
        ran = {rank: _read(where / "out" / "0" / f"rank{rank}", job) for rank, job in jobs.items()}
        shutil.rmtree(where)
        return ran

    def _start(self, where: Path, ranks: list[int]) -> None:
        """The loader of every rank at once; all end when one fails."""
        running = {}
        for rank in ranks:
            log = (where / f"rank{rank}.log").open("w")
            command = self._command(where, rank)
            running[rank] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT), log
        failed = None
        try:
            for rank, (process, _) in running.items():
                if process.wait(timeout=SECONDS) != 0:
                    failed = rank
                    break
        except subprocess.TimeoutExpired:
            failed = rank
        finally:
            for process, log in running.values():
                process.kill()
                process.wait()
                log.close()
        if failed is not None:
            last = (where / f"rank{failed}.log").read_text().strip().splitlines()[-1:]
            raise VerifyError(f"rank {failed}: {last[0] if last else 'the loader ended without a word'}")

    def _command(self, where: Path, rank: int) -> list[str]:
        places = {"--bundle": "bundle", "--deploy": "deploy", "--weights": "bundle", "--steps": "steps", "--out": "out"}
        command = [str(self.loader), "--rank", str(rank), "--states", "--deterministic"]
        command += [word for flag, name in places.items() for word in (flag, str(where / name))]
        if not self.launch:
            return command
        host = next(r["ip"] for r in self.said["ranks"] if r["rank"] == rank)
        return shlex.split(self.launch.format(host=host, command=shlex.quote(shlex.join(command))))


def open_device(bundle: Path, deployment: Path, environment: Mapping[str, str]) -> NpuDevice:
    """The devices of a deployment of a bundle.

    Raises:
        DeployError: none, or of another bundle; several hosts and no way to start a program on them.
    """
    if not (deployment / DEPLOY).is_file():
        raise DeployError(
            f"{deployment}: no {DEPLOY}; make it with kimi-graph deploy {bundle} --hosts FILE -o {deployment}."
        )
    said = read_json(deployment / DEPLOY)
    check_bundle(open_bundle(bundle), said, deployment)
    loader = Path(environment.get("LOADER", deployment / "loader" / "build" / "kimi_graph_loader"))
    if not loader.is_file():
        raise DeployError(f"{loader}: missing; build it as {deployment / 'README.md'} says.")
    launch = environment.get("KIMI_GRAPH_LAUNCH", "")
    if len({r["host"] for r in said["ranks"]}) > 1 and not launch:
        raise DeployError("several hosts: say how to start a program, KIMI_GRAPH_LAUNCH='ssh {host} {command}'.")
    runs = Path(environment.get("KIMI_GRAPH_RUNS") or tempfile.mkdtemp(prefix="kimi-graph-"))
    return NpuDevice(said, deployment, runs, loader, launch)


def check_bundle(bundle: Bundle, said: Mapping[str, Any], where: Path) -> None:
    """Raises DeployError where a deployment is of another bundle."""
    found = hashlib.sha256((bundle.folder / MANIFEST).read_bytes()).hexdigest()
    if said["bundle"]["manifest_sha256"] != found:
        raise DeployError(f"{where}: was made for another bundle than {bundle.folder}; run kimi-graph deploy again.")


# ---- files of a run --------------------------------------------------------------------------------------------------


def _write(where: Path, deployment: Path, rank: int, job: Job, groups: Groups, said: Mapping[str, Any]) -> None:
    """A rank's part of a run: its graph, its plan, and what it reads."""
    name = f"rank{rank}"
    for folder in ("bundle", "deploy/ranks", "deploy/graphs", f"steps/0/{name}"):
        (where / folder).mkdir(parents=True, exist_ok=True)
    (where / "bundle" / f"{name}.air").write_bytes(air.to_bytes(job.model))
    (where / "steps" / "0" / "phase").write_text("run\n")
    kept = [x for x in (deployment / "ranks" / f"{rank}.txt").read_text().splitlines() if x.split()[0] in _KEPT]
    own = [c for c in communicators(groups) if rank in c.ranks and c.group in _used(job.model)]
    mine = [f"group {c.group} {c.name} {','.join(map(str, c.ranks))}" for c in own]
    lines = [*kept, *mine, "phase run", f"run {name}"]
    (where / "deploy" / "ranks" / f"{rank}.txt").write_text("\n".join(lines) + "\n")
    (where / "deploy" / "graphs" / f"{name}.txt").write_text("\n".join(_plan(job.model, name)) + "\n")
    for tensors in (job.inputs, job.states):
        for tensor_name, x in tensors.items():
            (where / "steps" / "0" / name / f"{tensor_name}.bin").write_bytes(_bytes(x))


_KEPT = ("rank", "ranks", "stride", "device", "option")


def _used(model: ModelDef) -> set[str]:
    ops = [op for op in model.graph[0].op if op.type.startswith(COLLECTIVE)]
    return {str(get_attr(op, SEMANTICS[op.type].group)) for op in ops}


def _plan(model: ModelDef, name: str) -> list[str]:
    """Lines of a graph whose inputs all come from files, a rank's place being in it already."""
    ops = model.graph[0].op
    lines = [f"graph {name}", "phase run", f"file {name}.air"]
    kinds = sorted({op.type for op in ops if op.type.startswith(COLLECTIVE)})
    lines += [f"communicator {kind} {SEMANTICS[kind].group}" for kind in kinds]
    sources = sorted((op for op in ops if op.type in ("Data", "RefData")), key=lambda op: get_attr(op, "index"))
    for op in sources:
        kind = "state" if op.type == "RefData" else "input"
        lines.append(" ".join(map(str, described(kind, get_attr(op, "index"), op.name, op.output_desc[0]))))
    (net,) = [op for op in ops if op.type == "NetOutput"]
    lines += [" ".join(map(str, described("output", i, f"out.{i}", desc))) for i, desc in enumerate(net.input_desc)]
    return lines


def _bytes(x: Tensor) -> bytes:
    return x.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b""


def _read(folder: Path, job: Job) -> Ran:
    """What the loader wrote."""
    ops = {op.name: op for op in job.model.graph[0].op}
    (net,) = [op for op in ops.values() if op.type == "NetOutput"]
    outputs = [_tensor(folder / f"out.{i}.bin", desc) for i, desc in enumerate(net.input_desc)]
    states = {name: _tensor(folder / f"{name}.bin", ops[name].output_desc[0]) for name in job.states}
    return Ran(tuple(outputs), states)


def _tensor(file: Path, desc: Any) -> Tensor:
    data, dtype, shape = bytearray(file.read_bytes()), dtype_of(desc), shape_of(desc)
    return (torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)).view(shape)
