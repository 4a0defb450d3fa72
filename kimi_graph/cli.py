"""The command line: reads arguments and the environment, calls one function, prints what came back.

Standard output holds the result (with `--json` nothing but JSON, of a refusal an object with `error`); progress and
errors go to standard error. Exit codes: 0 done; 1 the request cannot be met, or a bundle differs from its model; 2 the
command line was not understood; 130 interrupted; 141 whoever read the output went away.

torch takes a second to import, so everything but the frame is imported inside the commands.
"""

import atexit
import contextlib
import functools
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NoReturn, Protocol

import typer
from typer.core import TyperCommand, TyperGroup

from . import __version__
from .errors import KimiGraphError

Progress = Callable[[str, int, int], None]
"""`progress(what, done, total)`: `what` is being done and stands at `done` of `total` (0: nobody knows)."""

TARGETS = "a2, a3, a3-superpod, 950pr, 950dt, 950-superpod"  # for help; the compiler knows and checks them
CANN_VERSIONS, CANN_DEFAULT = "8.5, 9.1, 9.2", "9.2"
PROVIDERS, PROVIDERS_DEFAULT = "builtin, vllm-ascend, own, composed", "builtin,own,composed"
PHASES = ("vision", "prefill", "decode")
MODES = ("exact", "native")
WEIGHTS = ("input", "constant")
KV_DTYPES = ("bf16", "int8", "fp8")
KERNELS = ("semantics", "twin")
WEIGHTS_FORMATS = ("native", "bf16", "int8-g32", "int4")

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

kimi-graph COMMAND --help says more.
"""


class Result(Protocol):
    """What the function behind a command gives back."""

    @property
    def summary(self) -> str:
        """What was made or found, in half a line."""
        ...

    def text(self) -> str:
        """For a reader; may be empty."""
        ...

    def to_json(self) -> Any:
        """For a program."""
        ...


class _PurposeFirst:
    """Help that starts with what the command is for and an example; how to spell it comes after."""

    def format_help(self: Any, ctx: Any, formatter: Any) -> None:
        self.format_help_text(ctx, formatter)
        formatter.write_paragraph()
        self.format_usage(ctx, formatter)
        self.format_options(ctx, formatter)


class _Command(_PurposeFirst, TyperCommand):
    pass


class _Group(_PurposeFirst, TyperGroup):
    pass


app = typer.Typer(
    cls=_Group,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def main() -> None:
    """Entry point of `kimi-graph`."""
    # Where torch-npu is installed without CANN, `import torch` would fail while loading it.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    atexit.register(gc.freeze)  # else Python looks for garbage among a million objects of torch before it exits
    app(prog_name="kimi-graph")


def command(function: Callable[..., None], of: typer.Typer = app, name: str | None = None) -> Callable[..., None]:
    """Decorator: a command that ends in an exit code and one clean line, never in a traceback of ours."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
            sys.stdout.flush()
        except KimiGraphError as e:
            _fail(str(e), as_json=kwargs.get("as_json", False))
        except BrokenPipeError:
            # Python flushes standard output once more at exit; there is nobody to write to.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(141) from None
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            raise typer.Exit(130) from None
        except OSError as e:
            if e.strerror is None:
                raise
            words = f"{e.filename}: {e.strerror}" if e.filename else e.strerror
            _fail(words, as_json=kwargs.get("as_json", False))

    return of.command(name, cls=_Command)(run)


def _fail(message: str, *, as_json: bool = False) -> NoReturn:
    if as_json:
        print(json.dumps({"error": message}, indent=2))
    print(f"error: {message}", file=sys.stderr)
    raise typer.Exit(1) from None


def _one_of(legal: tuple[str, ...], what: str) -> Callable[[Any], Any]:
    def read(text: str | None) -> str | None:
        if text is not None and text not in legal:
            raise typer.BadParameter(f"unknown {what} {text!r}; one of {', '.join(legal)}.")
        return text

    return read


def _some_of(legal: tuple[str, ...], what: str) -> Callable[[str | None], str | None]:
    """Reader of a comma-separated list; the commands split it (`_split`)."""

    def read(text: str | None) -> str | None:
        for word in _split(text) if text else ():
            _one_of(legal, what)(word)
        if text and len(set(_split(text))) < len(_split(text)):
            raise typer.BadParameter(f"{text!r} names a {what} twice.")
        return text

    return read


def _split(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(","))


def _presets() -> list[str]:
    return sorted(path.stem for path in (Path(__file__).parent / "presets").glob("*.json"))


def _version(wanted: bool) -> None:
    if wanted:
        print(f"kimi-graph {__version__}")
        raise typer.Exit


@contextlib.contextmanager
def _progress(*, of_bytes: bool = False) -> Iterator[Progress]:
    """On standard error: a line per task, and on a terminal a bar for those whose end is known.

    Args:
        of_bytes: numbers are bytes; they and their speed are shown.

    The bar comes late and nothing else is redrawn, as programs that we start (pip) write to the terminal too.
    """
    with contextlib.ExitStack() as stack:
        begun: set[str] = set()
        bars: dict[str, Callable[[int, int], None]] = {}

        def tell(what: str, done: int, total: int) -> None:
            if total and sys.stderr.isatty():
                if what not in bars:
                    bars[what] = stack.enter_context(_bar(what, of_bytes))
                bars[what](done, total)
            elif what not in begun:
                begun.add(what)
                print(f"{what} ...", file=sys.stderr, flush=True)

        yield tell


@contextlib.contextmanager
def _bar(what: str, of_bytes: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar with the time that is left, gone when it is over."""
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn(what),
        progress.BarColumn(),
        *((progress.DownloadColumn(), progress.TransferSpeedColumn()) if of_bytes else ()),
        progress.TimeRemainingColumn(elapsed_when_finished=True),
    )
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(what)

        def move(done: int, total: int) -> None:
            bars.update(task, completed=done, total=total)
            if done >= total:
                bars.stop()

        yield move


def _show(result: Result, *, as_json: bool, started: float, where: Path | None = None) -> None:
    if as_json:
        print(json.dumps(result.to_json(), indent=2))
        return
    if text := result.text():
        print(text)
    _close(result.summary, started, where)


def _judge(report: Any, *, as_json: bool, started: float) -> None:
    """Show a result that may have failed: then the last line is an error, and the exit code 1."""
    if report.passed or as_json:
        _show(report, as_json=as_json, started=started)
    else:
        print(report.text())
        _fail(report.summary)
    if not report.passed:
        raise typer.Exit(1)


def _load_config(model: str) -> Any:
    """The model's config; what it assumes because no released file says so goes to standard error."""
    from kimi_graph.read_config import load_config

    config = load_config(model)
    for words in config.assumptions:
        print(f"assumed: {words}", file=sys.stderr)
    return config


def _close(what: str, started: float, where: Path | None = None) -> None:
    """The line a command ends with: what was made, where, how long it took."""
    place = f" -> {where}" if where else ""
    print(f"{what}{place} in {time.perf_counter() - started:.1f} s")


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


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help=f"A preset ({', '.join(_presets())}), a config.json, or a checkpoint folder.",
        autocompletion=_presets,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
Providers = Annotated[
    str,
    typer.Option(metavar="P,P", help=f"Whose operators to take, the first that can: {PROVIDERS}; builtin is CANN's."),
]
Avoid = Annotated[
    list[str] | None,
    typer.Option("--avoid", metavar="OP[=P]", help="Do without an operator, or take provider P's in its place."),
]
Wheel = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Wheel to take torchair from. Default: fetched once, announced."),
]
Cache = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", envvar="KIMI_GRAPH_CACHE", help="Where a fetched wheel is kept, and what compile has made."
    ),
]
Pad = Annotated[bool, typer.Option("--pad", help="Pad the vocabulary and the experts where they do not divide.")]
Exchange = Annotated[
    bool, typer.Option("--exchange", help="Send rows to their experts; else experts read all rows and sum.")
]
RedundantExperts = Annotated[
    int, typer.Option("--redundant-experts", metavar="N", min=0, help="Copies of busy experts, in each layer.")
]
MoeChunks = Annotated[
    int, typer.Option("--moe-chunks", metavar="N", min=1, help="Parts in which --exchange sends rows.")
]
SplitCache = Annotated[
    bool, typer.Option("--split-cache", help="Split caches by sequence over tp too (decode context parallel).")
]


WeightsFormat = Annotated[
    str,
    typer.Option(
        metavar="F",
        callback=_one_of(WEIGHTS_FORMATS, "weights format"),
        help=f"How graphs keep the routed experts: {', '.join(WEIGHTS_FORMATS)}; check says what a chip takes.",
    ),
]
KvDtype = Annotated[
    str,
    typer.Option(
        metavar="|".join(KV_DTYPES),
        callback=_one_of(KV_DTYPES, "dtype of caches"),
        help="Caches of sparse attention: as the model has them, or in 8 bits (fp8: 950 alone).",
    ),
]
Batch = Annotated[
    int | None,
    typer.Option(metavar="B", min=1, help="Sequences of a step, of all ranks. Default: chosen and printed."),
]


@contextlib.contextmanager
def _without_collecting() -> Iterator[None]:
    """Inside, nobody looks for garbage: a short command makes little, and looking through torch takes long."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@command
def compile(  # noqa: A001 (the command's name)
    model: Model,
    target: Annotated[
        str,
        typer.Option(metavar="NAME", help=f"What the graphs are for: {TARGETS}."),
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
        typer.Option(metavar="P,P", callback=_some_of(PHASES, "phase"), help="Which graphs to make. Default: all."),
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
    patches: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Patches of a picture, at most. Default: chosen and printed.")
    ] = None,
    cann: Annotated[
        str, typer.Option(metavar="V", help=f"CANN release that reads the graphs: {CANN_VERSIONS}.")
    ] = CANN_DEFAULT,
    providers: Providers = PROVIDERS_DEFAULT,
    avoid: Avoid = None,
    weights: Annotated[
        str,
        typer.Option(
            metavar="|".join(WEIGHTS),
            callback=_one_of(WEIGHTS, "kind of weights"),
            help="Bound when a bundle is loaded, or constants inside the graphs.",
        ),
    ] = "input",
    weights_format: Annotated[
        str | None,
        typer.Option(
            metavar="F",
            callback=_one_of(WEIGHTS_FORMATS, "weights format"),
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
        raise typer.BadParameter("say where the bundle goes, or --dry-run.", param_hint="'-o'")
    if devices is not None and mesh is not None:
        raise typer.BadParameter(
            "--mesh says how many dies there are; leave one of them out.", param_hint="'--devices'"
        )
    if devices is not None and (pad or exchange or split_cache or moe_chunks > 1):
        raise typer.BadParameter(
            "it chooses --exchange, --split-cache, --moe-chunks and --pad itself; give a --mesh for your own.",
            param_hint="'--devices'",
        )
    source = Path(model) if Path(model).is_dir() and model not in _presets() else None
    if golden and (dry_run or source is None):
        raise typer.BadParameter("is recorded from a run: give a checkpoint's folder and -o.", param_hint="'--golden'")
    started = time.perf_counter()
    with _without_collecting(), _progress() as progress:
        from kimi_graph.compile.targets import target as find_target

        # before torch is imported: a wrong name is answered at once
        profile = find_target(target, cann=cann, providers=_split(providers), avoid=avoid or ())
        from kimi_graph.compile.driver import compile_model
        from kimi_graph.compile.torchair_host import default_cache
        from kimi_graph.parallel.mesh import Mesh

        config = _load_config(model)
        if devices is not None:
            from kimi_graph.plan.search import Ask, dies, make_plan, several

            best = make_plan(
                Ask(
                    model=model, config=config, target=profile, devices=devices, batch=batch, max_len=max_len,
                    page=page or 128, chunk=chunk, weights_format=weights_format, kv_dtype=kv_dtype,
                    redundant_experts=redundant_experts,
                )
            ).best  # fmt: skip
            weights_format = best.request.weights_format
            print(
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
            phases=None if phase is None else _split(phase),
            batch=batch,
            chunk=chunk,
            max_len=max_len,
            page=page,
            pages=pages,
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

            progress("golden", 0, 0)
            print(f"golden    {write_golden(out, source, golden)} cases of single operators")
    _show(made, as_json=False, started=started, where=None if dry_run else out)


@command
def targets(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help=f"One of {TARGETS}, with the source of every number.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what graphs can be made for. Memory, rates, buffers and links of one die, the unit of a mesh; with a name,
    the source of every number and whether it is published, derived or assumed.

    \b
    kimi-graph targets
    kimi-graph targets a3-superpod
    """
    started = time.perf_counter()
    from kimi_graph.plan.profiles import profiles

    _show(profiles(name), as_json=as_json, started=started)


@command
def plan(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help=f"A preset ({', '.join(_presets())}), a config.json, or a checkpoint folder.",
            autocompletion=_presets,
        ),
    ] = None,
    target: Annotated[str | None, typer.Option(metavar="NAME", help=f"What it is to run on: {TARGETS}.")] = None,
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
            callback=_one_of(WEIGHTS_FORMATS, "weights format"),
            help=f"Of the experts: {', '.join(WEIGHTS_FORMATS)}. Default: the smallest exact one that a kernel takes.",
        ),
    ] = None,
    kv_dtype: Annotated[
        str,
        typer.Option(
            metavar="|".join(KV_DTYPES), callback=_one_of(KV_DTYPES, "dtype of caches"), help="Of the caches."
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
    as_json: Json = False,
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
        raise typer.BadParameter("say which MODEL and which --target, or --claims.", param_hint="'MODEL'")
    wanted = (model, target, devices, mesh, max_len, batch, ttft, tpot, html)
    if claims and any(x is not None for x in wanted):
        raise typer.BadParameter("it takes --factor and --json alone; leave the rest out.", param_hint="'--claims'")
    for flag, limit in (("--ttft", ttft), ("--tpot", tpot)):
        if limit is not None and not limit > 0:
            raise typer.BadParameter("expected more than 0.", param_hint=f"'{flag}'")
    if mesh is None and (pad or exchange or split_cache or moe_chunks > 1):
        raise typer.BadParameter(
            "the search tries --exchange, --split-cache, --moe-chunks and --pad itself; they go with a --mesh.",
            param_hint="'--mesh'",
        )
    started = time.perf_counter()
    with _without_collecting():
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
                    model=model, config=_load_config(model), target=profile, devices=devices, max_len=max_len,
                    batch=batch, ttft=ttft, tpot=None if tpot is None else tpot / 1e3,
                    mesh=None if mesh is None else Mesh.parse(mesh), weights_format=weights_format, kv_dtype=kv_dtype,
                    page=page, chunk=chunk, exchange=exchange, split_cache=split_cache, pad=pad,
                    redundant_experts=redundant_experts, moe_chunks=moe_chunks, factors=factors,
                )
            )  # fmt: skip
            if html is not None:
                from kimi_graph.plan.html import write_html

                write_html(found, html)
    _show(found, as_json=as_json, started=started, where=html)


@command
def shard(
    model: Model,
    mesh: Annotated[
        str | None,
        typer.Option(metavar="AXES", help="Ranks by axis: pp=4,dp=4,tp=32,ep=128 (cp too); an axis left out is 1."),
    ] = None,
    phase: Annotated[
        str, typer.Option(metavar="P", callback=_one_of(PHASES, "phase"), help="vision, prefill or decode.")
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
        str, typer.Option(metavar="NAME", help=f"Whose links and memory it is held against: {TARGETS}.")
    ] = "a3",
    batch: Annotated[
        int | None, typer.Option(metavar="B", min=1, help="Sequences of all ranks. Default: one for each of dp.")
    ] = None,
    max_len: Annotated[
        int | None, typer.Option(metavar="L", min=1, help="Longest sequence, tokens. Default: 4,096.")
    ] = None,
    as_json: Json = False,
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
        raise typer.BadParameter("say either which mesh, or --devices N for a list of them.", param_hint="'--mesh'")
    started = time.perf_counter()
    with _without_collecting():
        from kimi_graph.config import arranged
        from kimi_graph.parallel.mesh import Mesh
        from kimi_graph.shard import Request, explain_parameter, meshes_of, shard_model

        config = _load_config(model)
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
    _show(found, as_json=as_json, started=started)


@command
def ops(
    model: Model,
    target: Annotated[str, typer.Option(metavar="NAME", help=f"What they have to run on: {TARGETS}.")],
    cann: Annotated[str, typer.Option(metavar="V", help=f"CANN release: {CANN_VERSIONS}.")] = CANN_DEFAULT,
    mesh: Annotated[
        str | None,
        typer.Option(metavar="AXES", help="Ranks by axis, pp=4,tp=32: limits are those of a rank. Default: one rank."),
    ] = None,
    providers: Providers = PROVIDERS_DEFAULT,
    avoid: Avoid = None,
    phase: Annotated[
        str | None,
        typer.Option(metavar="P,P", callback=_some_of(PHASES, "phase"), help="Of which graphs. Default: all."),
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
    as_json: Json = False,
) -> None:
    """Say which operator serves what in each kind of layer. Whose it is and why that one, how it is known to work on a
    device, and its limits with the numbers of this model, mesh, chip and release. Exit code 1 if something cannot be
    served, or if two packages would be needed.

    \b
    kimi-graph ops kimi-k3.1-pro --target a3 --cann 9.1 --mesh pp=4,tp=32
    kimi-graph ops kimi-linear-48b --target a3 --providers builtin,vllm-ascend,composed --markdown
    """
    if as_json and markdown:
        raise typer.BadParameter("a report is either --markdown or --json.", param_hint="'--markdown'")
    started = time.perf_counter()
    with _without_collecting(), _progress() as progress:
        from kimi_graph.compile.targets import target as find_target

        profile = find_target(target, cann=cann, providers=_split(providers), avoid=avoid or ())
        progress("operators", 0, 0)
        from kimi_graph.compile.coverage import cover_model
        from kimi_graph.compile.torchair_host import default_cache
        from kimi_graph.parallel.mesh import Mesh

        report = cover_model(
            _load_config(model),
            target=profile,
            mesh=None if mesh is None else Mesh.parse(mesh),
            phases=None if phase is None else _split(phase),
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
    _judge(report, as_json=as_json, started=started)


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
    as_json: Json = False,
) -> None:
    """Show what is in a bundle. Phases, operators by type, weights, states, bytes, of a mesh what may run while
    collectives travel; or the nodes of a graph; or the bytes that a step moves, by operator and by what they are.

    \b
    kimi-graph inspect build/kl48b
    kimi-graph inspect build/kl48b --graph decode
    kimi-graph inspect build/kl48b --cost
    """
    started = time.perf_counter()
    if cost:
        from kimi_graph.compile.cost import inspect_cost

        found = inspect_cost(bundle, graph)
    else:
        from kimi_graph.compile.inspect import inspect_bundle, inspect_graph

        found = inspect_bundle(bundle) if graph is None else inspect_graph(bundle, graph)
    _show(found, as_json=as_json, started=started)


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
    started = time.perf_counter()
    from kimi_graph.fixture import make_fixture

    made = make_fixture(
        _load_config(model), out, layers=layers, seed=seed, overwrite=overwrite, quantised=quantised, ways=tp
    )
    shape = f"{len(made.config.layers)} layers, {made.tensors} tensors, {made.bytes / 1e6:.1f} MB"
    _close(f"fixture of {model}: {shape}", started, out)


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
            callback=_one_of(WEIGHTS_FORMATS, "weights format"),
            help=f"Only this form of the experts, with what it loses: {', '.join(WEIGHTS_FORMATS)}. Default: all.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Say whether a checkpoint holds a model. From the index and the headers of its files, or from the index alone:
    what is missing, unexpected or different, and how each part is stored. Exit code 1 if it could not be loaded.

    \b
    kimi-graph check build/tiny
    kimi-graph check model.safetensors.index.json --model kimi-k3
    """
    started = time.perf_counter()
    from kimi_graph.check import check_checkpoint, folder_of

    try:
        config = _load_config(model or str(folder_of(checkpoint)))
    except KimiGraphError:
        if not checkpoint.exists():  # the config beside it is not what is wrong
            _fail(f"{checkpoint}: does not exist; expected a checkpoint's folder, or its index.")
        raise
    report = check_checkpoint(checkpoint, config, weights_format)
    _judge(report, as_json=as_json, started=started)


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
    as_json: Json = False,
) -> None:
    """Prove what a bundle's files alone can show. Hashes; every node is what the target takes; all ranks issue the same
    collectives in the same order, with the same sizes; sums are taken once, before what is not linear; what a pipeline
    stage reads an earlier one gives. No weights. With --model, --target, --cann or --mesh also that it is for them.
    Exit code 1 if something does not hold.

    \b
    kimi-graph lint build/tiny-a3
    kimi-graph lint build/tiny-a3 --model build/tiny --target a3 --cann 9.2 --mesh none
    """
    started = time.perf_counter()
    with _without_collecting():
        from kimi_graph.compile.expect import Expected
        from kimi_graph.compile.lint import lint_bundle
        from kimi_graph.compile.torchair_host import default_cache, load

        host = load(torch_npu_wheel, cache=cache_dir or default_cache(os.environ))
        expected = Expected(model=model, target=target, cann=cann, mesh=mesh)
        report = lint_bundle(bundle, host.root, expected)
    _judge(report, as_json=as_json, started=started)


@command
def diff(
    old: Annotated[Path, typer.Argument(metavar="A", help="A folder that compile made.")],
    new: Annotated[Path, typer.Argument(metavar="B", help="Another one.")],
    as_json: Json = False,
) -> None:
    """Say what changed from bundle A to bundle B, and whether it matters. Model, target, mesh, states, nodes of graphs,
    recipes of weights, operator packages, versions. Exit code 0 if both hold the same bytes (local.json and
    weights made ahead aside), 1 if they differ in anything, whether or not it matters.

    \b
    kimi-graph diff build/tiny-a3 build/new
    kimi-graph diff build/tiny-a3 build/new --json
    """
    started = time.perf_counter()
    from kimi_graph.compile.diff import diff_bundles

    found = diff_bundles(old, new)
    _show(found, as_json=as_json, started=started)
    if not found.same:
        raise typer.Exit(1)


@command
def buckets(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="A folder that compile made.")],
    batch: Annotated[
        int | None, typer.Option(metavar="B", min=1, help="Sequences at once, of all ranks. Default: 1.")
    ] = None,
    length: Annotated[
        int | None, typer.Option(metavar="L", min=1, help="Tokens of each, prompt and new ones. Default: 1.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say which graph of a bundle serves a batch and a length, in how many steps, and what is refused and why. Without
    them, all sizes there are. Prefill and decode have one contract: what one refuses the other does too. Exit code 1
    if it is refused.

    \b
    kimi-graph buckets build/tiny-a3
    kimi-graph buckets build/tiny-a3 --batch 2 --length 200
    """
    started = time.perf_counter()
    from kimi_graph.compile.buckets import buckets_of

    _judge(buckets_of(bundle, batch, length), as_json=as_json, started=started)


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
    verify: Annotated[bool, typer.Option("--verify", help="Read again all that is there, and compare hashes.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what there is to write and how it comes about, write nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write the weights of a bundle's ranks, as their graphs read them, into the bundle. What ranks have in common is
    there once, and the checkpoint is read once. Interrupted, it goes on when it is run again; when all is there, it
    does nothing.

    \b
    kimi-graph weights build/tiny-a3
    kimi-graph weights build/k31-4 --checkpoint build/k31 --ranks 0-3 --verify
    """
    started = time.perf_counter()
    with _without_collecting(), _progress(of_bytes=True) as progress:
        from kimi_graph.compile.write_weights import parse_ranks, write_weights

        report = write_weights(
            bundle,
            checkpoint=checkpoint,
            ranks=None if ranks is None else parse_ranks(ranks),
            jobs=jobs,
            verify=verify,
            dry=dry_run,
            progress=progress,
        )
    _show(report, as_json=as_json, started=started)


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
            callback=_some_of(MODES, "mode"),
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
            callback=_one_of(KERNELS, "way to run our operators"),
            help="Our operators in native mode: by what is said of them, or their Ascend C kernels on a CPU twin.",
        ),
    ] = "semantics",
    cache_dir: Cache = None,
    as_json: Json = False,
) -> None:
    """Run a bundle's graphs and compare with the model. On the CPU, from the bundle's files: a prefill in chunks, then
    decode steps; every output and every state is compared. Exit code 1 if one differs.

    \b
    kimi-graph verify build/tiny-a3 --steps 8
    kimi-graph verify build/tiny-a3 --bisect
    """
    started = time.perf_counter()
    with _progress() as progress:
        from kimi_graph.compile.torchair_host import default_cache
        from kimi_graph.compile.verify import verify_bundle

        report = verify_bundle(
            bundle,
            checkpoint=checkpoint,
            steps=steps,
            modes=_split(mode),
            seed=seed,
            bisect=bisect,
            processes=processes,
            kernels=(cache_dir or default_cache(os.environ)) / "twin" if kernels == "twin" else None,
            progress=progress,
        )
    _judge(report, as_json=as_json, started=started)


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
    as_json: Json = False,
) -> None:
    """Write what each host and rank of a bundle runs. Rank table, groups, environment, start scripts, commands for
    offline models, a loader in C++, and a runbook with this bundle's numbers. Nothing of it has run on a device. Hosts
    that cannot be are refused and nothing is written.

    \b
    kimi-graph deploy build/k31-4 --example
    kimi-graph deploy build/k31-4 --hosts build/hosts.json -o build/k31-4.deploy
    """
    started = time.perf_counter()
    with _without_collecting():
        from kimi_graph.compile.deploy import deploy_bundle, hosts_example

        if example:
            print(hosts_example(bundle))
            return
        made = deploy_bundle(bundle, hosts, out, cann)
    _show(made, as_json=as_json, started=started, where=made.folder)


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
    as_json: Json = False,
) -> None:
    """Try a bundle on a machine, step by step. Environment, groups of ranks, operators against golden cases, a layer of
    each kind, every stage, all ranks. Stops at the first tensor that differs, and says whose it is and what would
    explain it. What passed is not tried again. Exit code 1 if something differs. Without --deploy it is a rehearsal: a
    CPU in place of the devices.

    \b
    kimi-graph bringup build/tiny-a3
    kimi-graph bringup build/k31-4 --deploy build/k31-4.deploy -o build/report
    """
    started = time.perf_counter()
    with _progress() as progress:
        from kimi_graph.compile.bringup import bring_up

        device = None
        if deployment is not None:
            from kimi_graph.compile.npu_device import open_device

            device = open_device(bundle, deployment, os.environ)
        where = out or bundle.with_name(f"{bundle.resolve().name}.bringup")
        report = bring_up(bundle, device, checkpoint=checkpoint, out=where, restart=restart, progress=progress)
    _judge(report, as_json=as_json, started=started)


kernels = typer.Typer(cls=_Group, rich_markup_mode=None, help="Ascend C kernels of this project's operators.")
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
    started = time.perf_counter()
    from kimi_graph.ops.kernel_project import SOCS, commands
    from kimi_graph.ops.kernel_project import export_kernels as export

    made = export(out, overwrite=overwrite)
    print(f"on a host with CANN, in {out} (for A3; A2 is {SOCS[0]}, 950 is {SOCS[2]}):")
    print("\n".join(f"  {line}" for line in commands(SOCS[1])))
    _close(f"operator project of {', '.join(made.operators)}: {made.files} files", started, out)
