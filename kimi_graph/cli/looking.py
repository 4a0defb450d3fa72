"""Commands that look at a checkpoint or a bundle and run nothing."""

import os
from pathlib import Path
from typing import Annotated

import typer

from kimi_graph.errors import KimiGraphError

from .frame import ENVIRONMENT, command
from .options import WEIGHTS_FORMATS, Cache, Wheel, one_of, words_of
from .output import check_file, fail, judge, load_config_aloud, progress_shown, show, without_collecting


@command
def doctor(cache_dir: Cache = None) -> None:
    """Say what is installed here and what works with it. Versions, torchair, CANN, disk and memory; of what does not
    work the remedy. It runs where torch is broken too. Exit code 1 if something is broken that the basic commands or
    the library need.

    \b
    kimi-graph doctor
    """
    from kimi_graph.compile.torchair_host import default_cache
    from kimi_graph.doctor import diagnose

    judge(diagnose(cache_dir or default_cache(os.environ), ENVIRONMENT))


@command
def check(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT_OR_INDEX", help="A checkpoint's folder, or its index alone.")
    ],
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="A preset or a config.json. Default: the config.json beside the weights."),
    ] = None,
    weights_format: Annotated[
        str | None,
        typer.Option(
            metavar="F",
            callback=one_of(WEIGHTS_FORMATS, "weights format"),
            autocompletion=words_of(WEIGHTS_FORMATS),
            help=f"Only this form of the experts, with what it loses: {', '.join(WEIGHTS_FORMATS)}. Default: all.",
        ),
    ] = None,
    values: Annotated[bool, typer.Option("--values", help="Read the weights too: NaN and infinity are named.")] = False,
) -> None:
    """Say whether a checkpoint holds a model. From the index and the headers of its files, or from the index alone:
    what is missing, unexpected or different, and how each part is stored. Exit code 1 if it could not be loaded.

    \b
    kimi-graph check build/tiny --values
    kimi-graph check model.safetensors.index.json --model kimi-k3
    """
    from kimi_graph.check import check_checkpoint, folder_of

    try:
        config = load_config_aloud(model or str(folder_of(checkpoint)))
    except KimiGraphError:
        if not checkpoint.exists():  # the config beside it is not what is wrong
            fail(f"{checkpoint}: does not exist; expected a checkpoint's folder, or its index.")
        raise
    with progress_shown(of_bytes=True, bars_alone=True) as progress:
        report = check_checkpoint(checkpoint, config, weights_format, values, progress)
    judge(report)


@command
def inspect(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="A folder that compile made.")],
    graph: Annotated[
        str | None, typer.Option(metavar="PHASE", help="List the nodes of this phase's graphs instead.")
    ] = None,
    cost: Annotated[
        bool,
        typer.Option("--cost", help="Bytes read and written, against those of weights used and states."),
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Draw it too: layers, their graphs, memory over time, operators."),
    ] = None,
) -> None:
    """Show what is in a bundle. Phases, operators by type, weights, states, bytes, of a mesh what may run while
    collectives travel; or the nodes of a graph; or the bytes that a step moves, by operator and by what they are.

    \b
    kimi-graph inspect build/kl48b
    kimi-graph inspect build/kl48b --graph decode
    kimi-graph inspect build/kl48b --cost
    kimi-graph inspect build/kl48b --html build/kl48b.html
    """
    if html is not None and (cost or graph is not None):
        raise typer.BadParameter("the page is of the whole bundle; leave --graph and --cost out.", param_hint="--html")
    if html is not None:
        check_file(html)
    with progress_shown(bars_alone=True) as progress:
        if cost:
            from kimi_graph.compile.cost import inspect_cost

            found = inspect_cost(bundle, graph, progress)
        else:
            from kimi_graph.compile.inspect import inspect_bundle, inspect_graph

            found = inspect_bundle(bundle) if graph is None else inspect_graph(bundle, graph)
        if html is not None:
            from kimi_graph.compile.page import write_page

            write_page(bundle, html, progress)
    show(found, html)


@command
def lint(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="A folder that compile made.")],
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="It has to be of this preset, config.json or checkpoint.")
    ] = None,
    target: Annotated[str | None, typer.Option(metavar="NAME", help="It has to be for this target.")] = None,
    cann: Annotated[str | None, typer.Option(metavar="V", help="... and this CANN release.")] = None,
    mesh: Annotated[
        str | None, typer.Option(metavar="AXES", help="... and these ranks, pp=2,tp=2; none: one rank.")
    ] = None,
    torch_npu_wheel: Wheel = None,
    cache_dir: Cache = None,
) -> None:
    """Prove what a bundle's files alone can show. Hashes; every node is what the target takes; all ranks issue the same
    collectives in the same order, with the same sizes; sums are taken once, before what is not linear; what a pipeline
    stage reads an earlier one gives. No weights. With --model, --target, --cann or --mesh also that it is for them.
    Exit code 1 if something does not hold.

    \b
    kimi-graph lint build/tiny-a3
    kimi-graph lint build/tiny-a3 --model build/tiny --target a3 --cann 9.2 --mesh none
    """
    with without_collecting(), progress_shown(bars_alone=True) as progress:
        from kimi_graph.compile.expect import Expected
        from kimi_graph.compile.lint import lint_bundle
        from kimi_graph.compile.torchair_host import default_cache, load

        host = load(torch_npu_wheel, cache=cache_dir or default_cache(os.environ))
        expected = Expected(model=model, target=target, cann=cann, mesh=mesh)
        report = lint_bundle(bundle, host.root, expected, progress)
    judge(report)


@command
def buckets(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="A folder that compile made.")],
    batch: Annotated[
        int | None, typer.Option(metavar="B", min=1, help="Sequences at once, of all ranks. Default: 1.")
    ] = None,
    length: Annotated[
        int | None, typer.Option(metavar="L", min=1, help="Tokens of each, prompt and new ones. Default: 1.")
    ] = None,
) -> None:
    """Say which graph of a bundle serves a batch and a length, in how many steps, and what is refused and why. Without
    them, all sizes there are. Prefill and decode have one contract: what one refuses the other does too. Exit code 1
    if it is refused.

    \b
    kimi-graph buckets build/tiny-a3
    kimi-graph buckets build/tiny-a3 --batch 2 --length 200
    """
    from kimi_graph.compile.buckets import buckets_of

    judge(buckets_of(bundle, batch, length))


@command
def diff(
    old: Annotated[Path, typer.Argument(metavar="A", help="A folder that compile made.")],
    new: Annotated[Path, typer.Argument(metavar="B", help="Another one.")],
) -> None:
    """Say what changed from bundle A to bundle B, and whether it matters. Model, target, mesh, states, nodes of graphs,
    recipes of weights, operator packages, versions. Exit code 0 if both hold the same bytes (local.json and
    weights made ahead aside), 1 if they differ in anything, whether or not it matters.

    \b
    kimi-graph diff build/tiny-a3 build/new
    kimi-graph diff build/tiny-a3 build/new --json
    """
    from kimi_graph.compile.diff import diff_bundles

    found = diff_bundles(old, new)
    show(found)
    if not found.same:
        raise typer.Exit(1)
