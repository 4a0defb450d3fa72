"""Commands that answer questions about a model, before anything is made of it."""

import os
from pathlib import Path
from typing import Annotated

import typer

from .frame import command
from .options import (
    CANN_DEFAULT,
    CANN_VERSIONS,
    KV_DTYPES,
    PHASES,
    PROVIDERS_DEFAULT,
    TARGETS,
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
    WeightsFormat,
    Wheel,
    one_of,
    presets,
    some_of,
    split,
    words_of,
)
from .output import Result, check_file, judge, load_config_aloud, manner, progress_shown, show, without_collecting


@command
def targets(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            autocompletion=words_of(TARGETS),
            help=f"One of {TARGETS}, with the source of every number.",
        ),
    ] = None,
) -> None:
    """Show what graphs can be made for. Memory, rates, buffers and links of one die, the unit of a mesh; with a name,
    the source of every number and whether it is published, derived or assumed.

    \b
    kimi-graph targets
    kimi-graph targets a3-superpod
    """
    from kimi_graph.plan.profiles import profiles

    show(profiles(name))


@command
def plan(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help=f"A preset ({', '.join(presets())}), a config.json, or a checkpoint folder.",
            autocompletion=presets,
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(metavar="NAME", autocompletion=words_of(TARGETS), help=f"What it is to run on: {TARGETS}."),
    ] = None,
    devices: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Dies (A3: two in a card). Default: as few as will do.")
    ] = None,
    max_len: Annotated[
        int | None, typer.Option(metavar="L", min=1, help="Longest sequence, tokens. Default: 4,096.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(metavar="B", min=1, help="Sequences of all ranks. Default: one for each of N.")
    ] = None,
    ttft: Annotated[
        float | None, typer.Option(metavar="S", min=0, help="Seconds to the first token of L, at most.")
    ] = None,
    tpot: Annotated[float | None, typer.Option(metavar="MS", min=0, help="Milliseconds a token, at most.")] = None,
    mesh: Annotated[
        str | None, typer.Option(metavar="AXES", help="This mesh alone: pp=4,tp=32. Default: the best.")
    ] = None,
    pad: Pad = False,
    exchange: Exchange = False,
    redundant_experts: RedundantExperts = 0,
    moe_chunks: MoeChunks = 1,
    split_cache: SplitCache = False,
    chunk: Annotated[
        int | None, typer.Option(metavar="T", min=1, help="New tokens of a prefill step. Default: what suits.")
    ] = None,
    page: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens of a cache page.")] = 128,
    weights_format: Annotated[
        str | None,
        typer.Option(
            metavar="F",
            callback=one_of(WEIGHTS_FORMATS, "weights format"),
            autocompletion=words_of(WEIGHTS_FORMATS),
            help=f"Of the experts: {', '.join(WEIGHTS_FORMATS)}. Default: the smallest exact one that a kernel takes.",
        ),
    ] = None,
    kv_dtype: Annotated[
        str,
        typer.Option(
            metavar="|".join(KV_DTYPES),
            callback=one_of(KV_DTYPES, "dtype of caches"),
            autocompletion=words_of(KV_DTYPES),
            help="Of the caches.",
        ),
    ] = "bf16",
    factor: Annotated[
        list[str] | None,
        typer.Option("--factor", metavar="NAME=X", help="Another efficiency, memory=0.8 say; as often as needed."),
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a report with pictures too.")
    ] = None,
    claims: Annotated[
        bool, typer.Option("--claims", help="Check what is said of such models; no MODEL needed.")
    ] = False,
) -> None:
    """Say whether a model fits, on how many dies, on which mesh and how fast. What every rank holds, byte by byte;
    times of prefill and decode by a roofline, with what bounds them; the compile command. Nothing is measured: rates
    are those of `kimi-graph targets`, efficiencies are assumed and can be set. Exit code 1 if it cannot be, with the
    reason and the nearest that can.

    \b
    kimi-graph plan kimi-k3.1-pro --target a3 --max-len 1000000 --batch 1
    kimi-graph plan kimi-k3 --target 950dt --devices 32 --batch 32 --html build/plan.html
    kimi-graph plan kimi-k3.1-pro --target a3-superpod --mesh pp=4,tp=32
    kimi-graph plan --claims
    """
    if not claims and (model is None or target is None):
        raise typer.BadParameter("say which MODEL and which --target, or --claims.", param_hint="MODEL")
    wanted = (model, target, devices, mesh, max_len, batch, ttft, tpot, html)
    if claims and any(x is not None for x in wanted):
        raise typer.BadParameter("it takes --factor and --json alone; leave the rest out.", param_hint="--claims")
    for flag, limit in (("--ttft", ttft), ("--tpot", tpot)):
        if limit is not None and not limit > 0:
            raise typer.BadParameter("expected more than 0.", param_hint=f"{flag} {limit:g}")
    if mesh is None and (pad or exchange or split_cache or moe_chunks > 1):
        raise typer.BadParameter(
            "the search tries --exchange, --split-cache, --moe-chunks and --pad itself; they go with a --mesh.",
            param_hint="--mesh",
        )
    if html is not None:
        check_file(html)
    with without_collecting(), progress_shown(bars_alone=True) as progress:
        if target is not None:
            from kimi_graph.compile.targets import target as find_target

            profile = find_target(target)
        from kimi_graph.plan.factors import Factors

        factors = Factors.parse(factor or [])
        if claims:
            from kimi_graph.plan.claims import check_claims

            found: Result = check_claims(factors)
        else:
            from kimi_graph.parallel.mesh import Mesh
            from kimi_graph.plan.search import Ask, make_plan

            assert model is not None
            found = make_plan(
                Ask(
                    model=model, config=load_config_aloud(model), target=profile, devices=devices, max_len=max_len,
                    batch=batch, ttft=ttft, tpot=None if tpot is None else tpot / 1e3,
                    mesh=None if mesh is None else Mesh.parse(mesh), weights_format=weights_format, kv_dtype=kv_dtype,
                    page=page, chunk=chunk, exchange=exchange, split_cache=split_cache, pad=pad,
                    redundant_experts=redundant_experts, moe_chunks=moe_chunks, factors=factors,
                ),
                progress=progress,
            )  # fmt: skip
            if html is not None:
                from kimi_graph.plan.html import write_html

                write_html(found, html)
    show(found, html)


@command
def shard(
    model: Model,
    mesh: Annotated[
        str | None,
        typer.Option(metavar="AXES", help="Ranks by axis: pp=4,dp=4,tp=32,ep=128 (cp too); an axis left out is 1."),
    ] = None,
    phase: Annotated[
        str,
        typer.Option(
            metavar="P",
            callback=one_of(PHASES, "phase"),
            autocompletion=words_of(PHASES),
            help="vision, prefill or decode.",
        ),
    ] = "decode",
    explain: Annotated[
        str | None, typer.Option(metavar="NAME", help="Every step of one parameter: layers.8.kda.query.")
    ] = None,
    devices: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="List the meshes of N devices that are legal.")
    ] = None,
    pad: Pad = False,
    exchange: Exchange = False,
    redundant_experts: RedundantExperts = 0,
    moe_chunks: MoeChunks = 1,
    split_cache: SplitCache = False,
    target: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            autocompletion=words_of(TARGETS),
            help=f"Whose links and memory it is held against: {TARGETS}.",
        ),
    ] = "a3",
    batch: Annotated[
        int | None, typer.Option(metavar="B", min=1, help="Sequences of all ranks. Default: one for each of dp.")
    ] = None,
    max_len: Annotated[
        int | None, typer.Option(metavar="L", min=1, help="Longest sequence, tokens. Default: 4,096.")
    ] = None,
) -> None:
    """Say what every rank of a mesh holds, or why the mesh cannot be. Placement, local shape and bytes of each kind of
    parameter, what is the same on several ranks and why, stages and what they hand on, the collectives of each kind of
    layer. Exit code 1 if a size does not divide, with every such size and the nearest legal ones.

    \b
    kimi-graph shard kimi-k3.1-pro --mesh pp=4,tp=32
    kimi-graph shard kimi-k3.1-pro --mesh pp=4,tp=32 --explain layers.8.kda.query
    kimi-graph shard kimi-k3.1-pro --devices 128
    """
    if (mesh is None) == (devices is None):
        raise typer.BadParameter("say either which mesh, or --devices N for a list of them.", param_hint="--mesh")
    with without_collecting():
        from kimi_graph.config import arranged
        from kimi_graph.parallel.mesh import Mesh
        from kimi_graph.shard import Request, explain_parameter, meshes_of, shard_model

        config = load_config_aloud(model)
        if redundant_experts or moe_chunks > 1:
            config = arranged(config, redundant_experts, moe_chunks)
        request = Request(
            config=config,
            mesh=Mesh() if mesh is None else Mesh.parse(mesh),
            phase=phase,
            target=target,
            pad=pad,
            batch=batch,
            max_len=max_len,
            exchange=exchange,
            split_cache=split_cache,
        )
        if devices is not None:
            found: Result = meshes_of(request, devices)
        else:
            found = shard_model(request) if explain is None else explain_parameter(request, explain)
    show(found)


@command
def ops(
    model: Model,
    target: Annotated[
        str,
        typer.Option(metavar="NAME", autocompletion=words_of(TARGETS), help=f"What they have to run on: {TARGETS}."),
    ],
    cann: Annotated[
        str, typer.Option(metavar="V", autocompletion=words_of(CANN_VERSIONS), help=f"CANN release: {CANN_VERSIONS}.")
    ] = CANN_DEFAULT,
    mesh: Annotated[
        str | None,
        typer.Option(metavar="AXES", help="Ranks by axis, pp=4,tp=32: limits are those of a rank. Default: one rank."),
    ] = None,
    providers: Providers = PROVIDERS_DEFAULT,
    avoid: Avoid = None,
    phase: Annotated[
        str | None,
        typer.Option(
            metavar="P,P",
            callback=some_of(PHASES, "phase"),
            autocompletion=words_of(PHASES),
            help="Of which graphs. Default: all.",
        ),
    ] = None,
    batch: Batch = None,
    pad: Pad = False,
    exchange: Exchange = False,
    redundant_experts: RedundantExperts = 0,
    moe_chunks: MoeChunks = 1,
    split_cache: SplitCache = False,
    weights_format: WeightsFormat = "bf16",
    kv_dtype: KvDtype = "bf16",
    markdown: Annotated[bool, typer.Option("--markdown", help="Tables for a release note.")] = False,
    torch_npu_wheel: Wheel = None,
    cache_dir: Cache = None,
) -> None:
    """Say which operator serves what in each kind of layer. Whose it is and why that one, how it is known to work on a
    device, and its limits with the numbers of this model, mesh, chip and release. Exit code 1 if something cannot be
    served, or if two packages would be needed.

    \b
    kimi-graph ops kimi-k3.1-pro --target a3 --cann 9.1 --mesh pp=4,tp=32
    kimi-graph ops kimi-linear-48b --target a3 --providers builtin,vllm-ascend,composed --markdown
    """
    if manner.get().as_json and markdown:
        raise typer.BadParameter("a report is either --markdown or --json.", param_hint="--markdown")
    with without_collecting(), progress_shown() as progress:
        from kimi_graph.compile.targets import target as find_target

        profile = find_target(target, cann=cann, providers=split(providers), avoid=avoid or ())
        progress("operators", 0, 0)
        from kimi_graph.compile.coverage import cover_model
        from kimi_graph.compile.torchair_host import default_cache
        from kimi_graph.parallel.mesh import Mesh

        report = cover_model(
            load_config_aloud(model),
            target=profile,
            mesh=None if mesh is None else Mesh.parse(mesh),
            phases=None if phase is None else split(phase),
            batch=batch,
            pad=pad,
            exchange=exchange,
            redundant_experts=redundant_experts,
            moe_chunks=moe_chunks,
            split_cache=split_cache,
            weights_format=weights_format,
            kv_dtype=kv_dtype,
            markdown=markdown,
            torch_npu_wheel=torch_npu_wheel,
            cache_dir=cache_dir or default_cache(os.environ),
        )
    judge(report)
