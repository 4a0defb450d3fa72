"""The command line: reads arguments and the environment, calls one function, prints what came back.

`frame` has exit codes and help, `output` what is printed and where, `options` what commands share; the commands are in
`planning` (of a model), `making`, `looking` (at a bundle), `running` (it) and `release` (all of it for a new model).

torch takes a second to import, so everything but the frame is imported inside the commands.
"""

import atexit
import gc
import os
from typing import Annotated

import typer

from kimi_graph import __version__

from . import looking, making, planning, release, running  # noqa: F401 (each declares its commands)
from .frame import app

OVERVIEW = f"""\
kimi-graph {__version__}: static Ascend graphs from a released config.json, proved without an NPU.

A deployment, in order:
  kimi-graph targets                                              what there is to run on, with sources
  kimi-graph plan kimi-linear-48b --target a3                     does it fit, on how many dies, how fast
  kimi-graph shard kimi-linear-48b --mesh dp=2,tp=8               what each rank of a mesh holds
  kimi-graph ops kimi-linear-48b --target a3                      whose operators serve it, and their limits
  kimi-graph compile kimi-linear-48b --target a3 -o build/kl48b   config -> bundle of graphs
  kimi-graph inspect build/kl48b                                  what is in it
  kimi-graph fixture kimi-linear-48b -o build/tiny                a small checkpoint of the same kind
  kimi-graph check build/tiny                                     does it hold the model, and how
  kimi-graph compile build/tiny --target a3 -o build/tiny-a3
  kimi-graph lint build/tiny-a3                                   what the files alone prove
  kimi-graph weights build/tiny-a3                                every rank's weights, ahead, in files
  kimi-graph verify build/tiny-a3                                 run the graphs, compare with the model
  kimi-graph buckets build/tiny-a3 --batch 1 --length 4096        which graph serves it, or why none does
  kimi-graph diff build/tiny-a3 build/new                         what changed, and whether it matters
  kimi-graph deploy build/tiny-a3                                 what the hosts run, and a runbook
  kimi-graph bringup build/tiny-a3                                step by step on a machine, to the first difference
  kimi-graph day0 kimi-linear-48b --target a3                     all of it for a new model, and a report

kimi-graph COMMAND --help says more.
"""


def _version(wanted: bool) -> None:
    if wanted:
        print(f"kimi-graph {__version__}")
        raise typer.Exit


def main() -> None:
    """Entry point of `kimi-graph`."""
    # Where torch-npu is installed without CANN, `import torch` would fail while loading it.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    atexit.register(gc.freeze)  # else Python looks for garbage among a million objects of torch before it exits
    app(prog_name="kimi-graph")


@app.callback(invoke_without_command=True)
def overview(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Static Ascend graphs from a released config.json, proved without an NPU.

    \b
    kimi-graph compile kimi-linear-48b --target a3 -o build/kl48b
    """
    if ctx.invoked_subcommand is None:
        print(OVERVIEW, end="")
