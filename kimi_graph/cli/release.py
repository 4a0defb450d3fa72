"""The command of a release day."""

import os
from pathlib import Path
from typing import Annotated

import typer

from .frame import command
from .options import (
    CANN_DEFAULT,
    CANN_VERSIONS,
    PROVIDERS_DEFAULT,
    TARGETS,
    Avoid,
    Cache,
    Providers,
    Wheel,
    presets,
    split,
)
from .output import judge, progress_shown


@command
def day0(
    model: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT_OR_CONFIG",
            help=f"A checkpoint's folder, its index, a config.json, or a preset ({', '.join(presets())}).",
            autocompletion=presets,
        ),
    ],
    target: Annotated[str, typer.Option(metavar="T,T", help=f"What it is to run on, one or several: {TARGETS}.")],
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="DIR", help="Report as Markdown, HTML and JSON. Default: none is written."),
    ] = None,
    cann: Annotated[str, typer.Option(metavar="V", help=f"CANN release: {CANN_VERSIONS}.")] = CANN_DEFAULT,
    providers: Providers = PROVIDERS_DEFAULT,
    avoid: Avoid = None,
    keep_work: Annotated[
        bool, typer.Option("--keep-work", help="Leave the fixture and its bundles in the report's folder.")
    ] = False,
    torch_npu_wheel: Wheel = None,
    cache_dir: Cache = None,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Make everything anew: use and keep nothing of earlier compiles.")
    ] = False,
) -> None:
    """Say on the day a model is released what of it is served by what, and what is not and why. Its config, its
    checkpoint where there is one, a plan, operators and graphs on each target, and a fixture of it that is compiled and
    run against the model, on one rank and on several. Each step passes, fails or is skipped, with the reason; one that
    fails stops those alone that need it. Exit code 1 if one failed.

    \b
    kimi-graph day0 kimi-k3.1-pro --target a3,950dt -o build/report
    kimi-graph day0 build/k31 --target a3 --json
    """
    names = split(target)
    if len(set(names)) < len(names):
        raise typer.BadParameter(f"{target!r} names a target twice.", param_hint="--target")
    if keep_work and out is None:
        raise typer.BadParameter("it stays in the report's folder: give -o.", param_hint="--keep-work")
    with progress_shown() as progress:
        from kimi_graph.compile.targets import target as find_target

        # before torch is imported: a wrong name is answered at once
        profiles = [find_target(name, cann=cann, providers=split(providers), avoid=avoid or ()) for name in names]
        from kimi_graph.compile.torchair_host import default_cache
        from kimi_graph.day0.run import day0 as try_all

        report = try_all(
            model,
            profiles,
            out=out,
            keep_work=keep_work,
            torch_npu_wheel=torch_npu_wheel,
            cache_dir=cache_dir or default_cache(os.environ),
            keep=not no_cache,
            progress=progress,
        )
    judge(report, out)
