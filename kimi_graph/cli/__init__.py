"""The command line: reads arguments and the environment, calls one function, prints what came back.

`frame` has exit codes and help, `output` what is printed and where, `options` what commands share; the commands are in
`planning` (of a model), `making`, `looking` (at a bundle), `running` (it) and `release` (all of that for a new model).

torch takes a second to import, so everything but the frame is imported inside the commands.
"""

import atexit
import gc
import os
from typing import Annotated

import typer

from kimi_graph import __version__

# in this order help lists their commands
from . import planning, making, looking, running, release  # noqa: F401 isort: skip
from .frame import app

OVERVIEW = f"""\
kimi-graph {__version__}: static Ascend graphs from a released config.json, proved without an NPU.

A deployment, in order:
  kimi-graph plan build/tiny --target a3                      does it fit, on which mesh, how fast
  kimi-graph compile build/tiny --target a3 -o build/tiny-a3  a checkpoint or config into graphs
  kimi-graph verify build/tiny-a3                             run the graphs, compare with the model
  kimi-graph weights build/tiny-a3                            every rank's weights, ahead, in files
  kimi-graph deploy build/tiny-a3                             what the hosts run, and a runbook

No checkpoint here?   kimi-graph fixture kimi-linear-48b -o build/tiny makes a small one.
A new model?          kimi-graph day0 MODEL --target a3 -o build/report says what serves it.
Something is wrong?   kimi-graph doctor
All commands          kimi-graph --help; one of them: kimi-graph COMMAND --help
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
