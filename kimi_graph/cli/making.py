"""Commands that make something: a bundle, its weights, a fixture, the kernels' project."""

import functools
import os
from pathlib import Path
from typing import Annotated

import typer

from .frame import Group, app, command
from .options import (
    CANN_DEFAULT,
    CANN_VERSIONS,
    PHASES,
    PROVIDERS_DEFAULT,
    TARGETS,
    WEIGHTS,
    WEIGHTS_FORMATS,
    Avoid,
    Batch,
    Cache,
    Exchange,
    KvDtype,
    Model,
    MoeChunks,
    Pad,
    Providers,
    RedundantExperts,
    SplitCache,
    Wheel,
    one_of,
    presets,
    some_of,
    split,
    words_of,
)
from .output import Made, load_config_aloud, progress_shown, show, tell, without_collecting


@command
def compile(  # noqa: A001 (the command's name)
    model: Model,
    target: Annotated[
        str,
        typer.Option(metavar="NAME", autocompletion=words_of(TARGETS), help=f"What the graphs are for: {TARGETS}."),
    ],
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="DIR", help="The bundle's folder; an older bundle there is replaced."),
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(metavar="AXES", help="Ranks that run it together, by axis: pp=2,dp=2,tp=8. Default: one rank."),
    ] = None,
    devices: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="The best mesh of N dies, as plan finds it; without --mesh.")
    ] = None,
    pad: Pad = False,
    exchange: Exchange = False,
    redundant_experts: RedundantExperts = 0,
    moe_chunks: MoeChunks = 1,
    split_cache: SplitCache = False,
    phase: Annotated[
        str | None,
        typer.Option(
            metavar="P,P",
            callback=some_of(PHASES, "phase"),
            autocompletion=words_of(PHASES),
            help="Which graphs to make. Default: all.",
        ),
    ] = None,
    batch: Batch = None,
    chunk: Annotated[
        int | None, typer.Option(metavar="T", min=1, help="New tokens of a prefill step. Default: chosen and printed.")
    ] = None,
    max_len: Annotated[
        int | None, typer.Option(metavar="L", min=1, help="Longest sequence, tokens. Default: chosen and printed.")
    ] = None,
    page: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Tokens of a cache page. Default: chosen and printed.")
    ] = None,
    pages: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Pages of the cache. Default: enough for B sequences of L.")
    ] = None,
    slots: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Slots of KDA states; an engine wants N pages. Default: one for each row."
        ),
    ] = None,
    patches: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Patches of a picture, at most. Default: chosen and printed.")
    ] = None,
    cann: Annotated[
        str,
        typer.Option(
            metavar="V",
            autocompletion=words_of(CANN_VERSIONS),
            help=f"CANN release that reads the graphs: {CANN_VERSIONS}.",
        ),
    ] = CANN_DEFAULT,
    providers: Providers = PROVIDERS_DEFAULT,
    avoid: Avoid = None,
    weights: Annotated[
        str,
        typer.Option(
            metavar="|".join(WEIGHTS),
            callback=one_of(WEIGHTS, "kind of weights"),
            autocompletion=words_of(WEIGHTS),
            help="Bound when a bundle is loaded, or constants inside the graphs.",
        ),
    ] = "input",
    weights_format: Annotated[
        str | None,
        typer.Option(
            metavar="F",
            callback=one_of(WEIGHTS_FORMATS, "weights format"),
            autocompletion=words_of(WEIGHTS_FORMATS),
            help=f"How graphs keep the routed experts: {', '.join(WEIGHTS_FORMATS)}; check says what a chip takes. "
            "Default: bf16, with --devices what plan takes.",
        ),
    ] = None,
    kv_dtype: KvDtype = "bf16",
    torch_npu_wheel: Wheel = None,
    cache_dir: Cache = None,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Make everything anew: use and keep nothing of earlier compiles.")
    ] = False,
    golden: Annotated[
        int, typer.Option(metavar="N", min=0, help="Store N cases of each operator, for bringup; needs a checkpoint.")
    ] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Make and check the graphs, write nothing.")] = False,
) -> None:
    """Make a bundle of static graphs for a target. Needs no NPU, no CANN and no weights.

    \b
    kimi-graph compile kimi-linear-48b --target a3 -o build/kl48b
    kimi-graph compile build/tiny --target 950dt --batch 2 --chunk 32 --max-len 256 -o build/tiny-950
    """
    if out is None and not dry_run:
        raise typer.BadParameter("say where the bundle goes, or --dry-run.", param_hint="-o")
    if devices is not None and mesh is not None:
        raise typer.BadParameter("--mesh says how many dies there are; leave one of them out.", param_hint="--devices")
    if devices is not None and (pad or exchange or split_cache or moe_chunks > 1):
        raise typer.BadParameter(
            "it chooses --exchange, --split-cache, --moe-chunks and --pad itself; give a --mesh for your own.",
            param_hint="--devices",
        )
    source = Path(model) if Path(model).is_dir() and model not in presets() else None
    if golden and (dry_run or source is None):
        raise typer.BadParameter("it is recorded from a run: give a checkpoint's folder and -o.", param_hint="--golden")
    with without_collecting(), progress_shown() as progress:
        from kimi_graph.compile.targets import target as find_target

        # before torch is imported: a wrong name is answered at once
        profile = find_target(target, cann=cann, providers=split(providers), avoid=avoid or ())
        from kimi_graph.compile.driver import compile_model
        from kimi_graph.compile.torchair_host import default_cache
        from kimi_graph.parallel.mesh import Mesh

        config = load_config_aloud(model)
        if devices is not None:
            from kimi_graph.display import several
            from kimi_graph.plan.search import Ask, dies, make_plan

            best = make_plan(
                Ask(
                    model=model, config=config, target=profile, devices=devices, batch=batch, max_len=max_len,
                    page=page or 128, chunk=chunk, weights_format=weights_format, kv_dtype=kv_dtype,
                    redundant_experts=redundant_experts,
                ),
                progress=progress,
            ).best  # fmt: skip
            weights_format = best.request.weights_format
            tell(
                f"mesh      {best.choice}: the best of {dies(devices, profile)} for "
                f"{several(best.request.rows, 'sequence')}, --weights-format {weights_format}"
            )
            mesh, batch, chunk = str(best.choice.mesh), best.request.rows, best.request.chunk
            exchange, split_cache, moe_chunks = best.choice.exchange, best.choice.split_cache, best.choice.chunks
            pad, redundant_experts = best.choice.pad, best.choice.copies or redundant_experts
        made = compile_model(
            config,
            target=profile,
            out=None if dry_run else out,
            checkpoint=source,
            phases=None if phase is None else split(phase),
            batch=batch,
            chunk=chunk,
            max_len=max_len,
            page=page,
            pages=pages,
            slots=slots,
            patches=patches,
            weights=weights,
            weights_format=weights_format or "bf16",
            kv_dtype=kv_dtype,
            mesh=None if mesh is None else Mesh.parse(mesh),
            pad=pad,
            exchange=exchange,
            redundant_experts=redundant_experts,
            moe_chunks=moe_chunks,
            split_cache=split_cache,
            torch_npu_wheel=torch_npu_wheel,
            cache_dir=cache_dir or default_cache(os.environ),
            keep=not no_cache,
            progress=progress,
        )
        if golden and out is not None:
            from kimi_graph.compile.golden import write_golden

            with made.clock.step("golden"):
                cases = write_golden(out, source, golden)
            tell(f"golden    {cases} cases of single operators")
    show(made, None if dry_run else out)


@command
def fixture(
    model: Model,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="DIR", help="The checkpoint's folder.")],
    layers: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Decoder layers. Default: every kind of layer occurs.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="S", min=0, help="The same seed gives the same weights.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a fixture that is there.")] = False,
    quantised: Annotated[
        bool, typer.Option("--quantised", help="Quantise what is released quantised. Default: all weights are plain.")
    ] = False,
    tp: Annotated[int, typer.Option(metavar="N", min=1, help="Heads and channels divide over N ranks.")] = 1,
) -> None:
    """Make a small checkpoint of a model's kind. It has the released tensor names, dtypes and head sizes, few layers
    and random weights: real input for every other command.

    \b
    kimi-graph fixture kimi-linear-48b -o build/tiny
    """
    from kimi_graph.fixture import make_fixture

    made = make_fixture(
        load_config_aloud(model), out, layers=layers, seed=seed, overwrite=overwrite, quantised=quantised, ways=tp
    )
    shape = f"{len(made.config.layers)} layers, {made.tensors} tensors, {made.bytes / 1e6:.1f} MB"
    facts = {"folder": str(out), "layers": len(made.config.layers), "tensors": made.tensors, "bytes": made.bytes}
    show(Made(f"fixture of {model}: {shape}", facts), out)


@command
def weights(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="A folder that compile made.")],
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Weights. Default: the checkpoint it was compiled from.")
    ] = None,
    ranks: Annotated[
        str | None, typer.Option(metavar="R-R,R", help="Of which ranks, 0-7,12: those of a host. Default: all.")
    ] = None,
    jobs: Annotated[int, typer.Option(metavar="N", min=1, help="Parts that are made at a time.")] = 2,
    loads: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help='Tokens of each expert, {"1": [..]} by layer: of which experts are copies.'),
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Read again all that is there, and compare hashes.")] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="The same, and make files anew that are damaged; others stay.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what there is to write and how it comes about, write nothing.")
    ] = False,
) -> None:
    """Write the weights of a bundle's ranks, as their graphs read them, into the bundle. What ranks have in common is
    there once, and the checkpoint is read once. Interrupted, it goes on when it is run again; when all is there, it
    does nothing.

    \b
    kimi-graph weights build/tiny-a3
    kimi-graph weights build/k31-4 --checkpoint build/k31 --ranks 0-3 --verify
    """
    from kimi_graph.compile.bundle import fetch_checkpoint

    if ranks is None and not dry_run:
        fetch_checkpoint(bundle, checkpoint)
    with without_collecting(), progress_shown(of_bytes=True) as progress:
        from kimi_graph.compile.write_weights import parse_ranks, write_weights

        report = write_weights(
            bundle,
            checkpoint=checkpoint,
            ranks=None if ranks is None else parse_ranks(ranks),
            jobs=jobs,
            verify=verify,
            repair=repair,
            dry=dry_run,
            loads=loads,
            progress=progress,
        )
    show(report)


kernels = typer.Typer(cls=Group, rich_markup_mode=None, help="Ascend C kernels of this project's operators.")
app.add_typer(kernels, name="kernels")


@functools.partial(command, of=kernels, name="export")
def export_kernels(
    out: Annotated[Path, typer.Argument(metavar="DIR", help="The project's folder.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an export that is there.")] = False,
) -> None:
    """Write the project that a machine with CANN builds our operators from. Sources, CMake lists, and a README with the
    exact commands. Nothing of it has run on a device.

    \b
    kimi-graph kernels export build/kernels
    """
    from kimi_graph.ops.kernel_project import SOCS, commands
    from kimi_graph.ops.kernel_project import export_kernels as export

    made = export(out, overwrite=overwrite)
    lines = [f"on a host with CANN, in {out} (for A3; A2 is {SOCS[0]}, 950 is {SOCS[2]}):"]
    lines += [f"  {line}" for line in commands(SOCS[1])]
    facts = {"folder": str(out), "operators": made.operators, "files": made.files, "commands": commands(SOCS[1])}
    show(Made(f"operator project of {', '.join(made.operators)}: {made.files} files", facts, tuple(lines)), out)
