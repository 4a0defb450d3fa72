"""Commands that run a bundle, or write what hosts run."""

import os
import shlex
import time
from pathlib import Path
from typing import Annotated

import typer

from .frame import command
from .options import KERNELS, MODES, Cache, one_of, some_of, split, words_of
from .output import announce, fail, judge, manner, note, progress_shown, show, without_collecting


@command
def verify(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="A folder that compile made.")],
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Weights. Default: the checkpoint it was compiled from.")
    ] = None,
    steps: Annotated[int, typer.Option(metavar="N", min=0, help="Decode steps after the prefill.")] = 4,
    mode: Annotated[
        str,
        typer.Option(
            metavar="M,M",
            callback=some_of(MODES, "mode"),
            autocompletion=words_of(MODES),
            help="exact: every float in float64. native: the graphs' own dtypes.",
        ),
    ] = ",".join(MODES),
    seed: Annotated[int, typer.Option(metavar="S", min=0, help="Of the tokens that are read.")] = 0,
    bisect: Annotated[
        bool, typer.Option("--bisect", help="Name the first node that differs, with its source line.")
    ] = False,
    processes: Annotated[
        bool, typer.Option("--processes", help="Of a mesh: every rank in a process of its own, over gloo.")
    ] = False,
    kernels: Annotated[
        str,
        typer.Option(
            metavar="|".join(KERNELS),
            callback=one_of(KERNELS, "way to run our operators"),
            autocompletion=words_of(KERNELS),
            help="Our operators in native mode: by what is said of them, or their Ascend C kernels on a CPU twin.",
        ),
    ] = "semantics",
    cache_dir: Cache = None,
) -> None:
    """Run a bundle's graphs and compare with the model. On the CPU, from the bundle's files: a prefill in chunks, then
    decode steps; every output and every state is compared. Exit code 1 if one differs.

    \b
    kimi-graph verify build/tiny-a3 --steps 8
    kimi-graph verify build/tiny-a3 --bisect
    """
    with progress_shown() as progress:
        from kimi_graph.compile.torchair_host import default_cache
        from kimi_graph.compile.verify import verify_bundle

        report = verify_bundle(
            bundle,
            checkpoint=checkpoint,
            steps=steps,
            modes=split(mode),
            seed=seed,
            bisect=bisect,
            processes=processes,
            kernels=(cache_dir or default_cache(os.environ)) / "twin" if kernels == "twin" else None,
            progress=progress,
        )
    judge(report)


@command
def deploy(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="A folder that compile made.")],
    hosts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Hosts and devices, in the order of ranks; JSON. One rank: this machine."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="DIR", help="Where to. Default: beside the bundle, as BUNDLE.deploy."),
    ] = None,
    cann: Annotated[
        str | None, typer.Option(metavar="V", help="CANN release of the hosts, 8.0 or later. Default: the bundle's.")
    ] = None,
    example: Annotated[
        bool, typer.Option("--example", help="Print a hosts file of the right size, to be filled in, and do nothing.")
    ] = False,
) -> None:
    """Write what each host and rank of a bundle runs. Rank table, groups, environment, start scripts, commands for
    offline models, a loader in C++, and a runbook with this bundle's numbers. Nothing of it has run on a device. Hosts
    that cannot be are refused and nothing is written.

    \b
    kimi-graph deploy build/k31-4 --example
    kimi-graph deploy build/k31-4 --hosts build/hosts.json -o build/k31-4.deploy
    """
    with without_collecting():
        from kimi_graph.compile.deploy import deploy_bundle, hosts_example

        if example:
            print(hosts_example(bundle))
            return
        made = deploy_bundle(bundle, hosts, out, cann)
    show(made, made.folder)


@command
def bringup(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="A folder that compile made.")],
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Weights. Default: the checkpoint it was compiled from.")
    ] = None,
    deployment: Annotated[
        Path | None,
        typer.Option("--deploy", metavar="DIR", help="Run on NPUs, by its loader. Default: a rehearsal on the CPU."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="DIR", help="Report and journal. Default: BUNDLE.bringup, beside it."),
    ] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Try again what passed before.")] = False,
) -> None:
    """Try a bundle on a machine, step by step. Environment, groups of ranks, operators against golden cases, a layer of
    each kind, every stage, all ranks. Stops at the first tensor that differs, and says whose it is and what would
    explain it. What passed is not tried again. Exit code 1 if something differs. Without --deploy it is a rehearsal: a
    CPU in place of the devices.

    \b
    kimi-graph bringup build/tiny-a3
    kimi-graph bringup build/k31-4 --deploy build/k31-4.deploy -o build/report
    """
    with progress_shown() as progress:
        from kimi_graph.compile.bringup import bring_up

        device = None
        if deployment is not None:
            from kimi_graph.compile.npu_device import open_device

            device = open_device(bundle, deployment, os.environ)
        where = out or bundle.with_name(f"{bundle.resolve().name}.bringup")
        report = bring_up(bundle, device, checkpoint=checkpoint, out=where, restart=restart, progress=progress)
    judge(report)


@command
def serve(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A checkpoint folder, or a bundle.")],
    flags: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- FLAGS", help="More flags of the engine, as they are: -- --max-num-seqs 64."),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Of a bundle: its weights. Default: the checkpoint it was compiled from."),
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            metavar="pp=A,tp=B", help="The engine's ranks, stages and ranks of each. Default: one; a bundle's."
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of the model in requests. Default: the folder's.")
    ] = None,
    max_len: Annotated[
        int | None,
        typer.Option("--max-len", metavar="N", help="Longest sequence in tokens. Default: as the cache has room."),
    ] = None,
    host: Annotated[
        str, typer.Option(metavar="HOST", help="Where it listens; 0.0.0.0 is everywhere, and it has no password.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="P", help="TCP port.")] = 8000,
    cache: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Of each rank's pages and memories. Default: 4GiB on a CPU, else the engine's choice."
        ),
    ] = None,
    tiers: Annotated[
        str | None,
        typer.Option(metavar="host=SIZE,..", help="Keep cached pages in shared memory, and in files: file=DIR:SIZE."),
    ] = None,
    tool_parser: Annotated[
        str | None,
        typer.Option("--tool-parser", metavar="NAME", help="vLLM's, of the model's tool calls: kimi_k3, kimi_k2, .."),
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let Python in the checkpoint's folder run, for its tokenizer.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the server's command and do nothing.")] = False,
) -> None:
    """Serve a checkpoint, or a bundle's graphs, on vLLM. Prints and starts the engine's own OpenAI server with the
    flags that the model needs, waits until it is healthy, and ends it on Ctrl-C. Needs vLLM in the same environment
    (docs/serving.md).

    \b
    kimi-graph serve build/k31 --name k31 --max-len 4096
    kimi-graph serve build/k31 --mesh pp=2 --dry-run
    kimi-graph serve build/k31 --tiers host=4GB,file=build/pages:100GB
    kimi-graph serve build/k31-a3 --checkpoint build/k31
    kimi-graph serve build/k31 --dry-run -- --max-num-seqs 64
    """
    from kimi_graph.parallel import Mesh
    from kimi_graph.serving.launch import Launch, ending_with_signals, what_to_serve
    from kimi_graph.serving.tiers.plan import Tiers, size_of
    from kimi_graph.serving.warden import SHARED, remove_leftovers

    folder, graphs = what_to_serve(model, checkpoint)
    launch = Launch(
        folder=folder,
        graphs=graphs,
        name=model.resolve().name if name is None else name,
        host=host,
        port=port,
        max_len=max_len,
        mesh=Mesh.parse(mesh) if mesh is not None else Mesh() if graphs is None else graphs.mesh,
        cache=None if cache is None else size_of(cache, "--cache"),
        tiers=None if tiers is None else Tiers.parse(tiers),
        tool_parser=tool_parser,
        trusted=trust_remote_code,
        flags=tuple(flags or ()),
        quiet=manner.get().quiet,
    )
    if not dry_run:
        launch.check_here()
    given = launch.variables(os.environ)
    words = shlex.join(["env", *(f"{variable}={value}" for variable, value in given.items()), *launch.command])
    if dry_run or not launch.quiet:
        announce(words, {"command": launch.command, "environment": given})
    if launch.note is not None:
        note(launch.note)
    if dry_run:
        return
    for name in remove_leftovers():
        note(f"removed {SHARED / name}, which a server that was killed had left.")
    begun = time.monotonic()
    with ending_with_signals(), launch.started(os.environ) as process:
        launch.wait_until_healthy(process)
        took = time.monotonic() - begun
        answers = {"name": launch.name, "address": f"{launch.address}/v1", "seconds": round(took, 1)}
        announce(f"{launch.name} answers on {launch.address}/v1 after {took:.0f} s", answers)
        fail(
            f"the server ended though nobody had asked it to (its exit code: {process.wait()}); what it said is above."
        )
