"""Arguments and options that several commands share, what is legal for them, and how their words are read."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

import kimi_graph

TARGETS = "a2, a3, a3-superpod, 950pr, 950dt, 950-superpod"  # for help; the compiler knows and checks them
CANN_VERSIONS, CANN_DEFAULT = "8.5, 9.1, 9.2", "9.2"
PROVIDERS, PROVIDERS_DEFAULT = "builtin, vllm-ascend, own, composed", "builtin,own,composed"
PHASES = ("vision", "prefill", "decode")
MODES = ("exact", "native")
WEIGHTS = ("input", "constant")
KV_DTYPES = ("bf16", "int8", "fp8")
KERNELS = ("semantics", "twin")
WEIGHTS_FORMATS = ("native", "bf16", "int8-g32", "int4")


def one_of(legal: tuple[str, ...], what: str) -> Callable[[Any], Any]:
    def read(text: str | None) -> str | None:
        if text is not None and text not in legal:
            raise typer.BadParameter(f"unknown {what} {text!r}; expected one of {', '.join(legal)}.")
        return text

    return read


def some_of(legal: tuple[str, ...], what: str) -> Callable[[str | None], str | None]:
    """Reader of a comma-separated list; the commands split it (`split`)."""

    def read(text: str | None) -> str | None:
        for word in split(text) if text else ():
            one_of(legal, what)(word)
        if text and len(set(split(text))) < len(split(text)):
            raise typer.BadParameter(f"{text!r} names a {what} twice.")
        return text

    return read


def split(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(","))


def words_of(legal: str | tuple[str, ...]) -> Callable[[], list[str]]:
    """For the completion of shells: a choice, or one that help shows as a list with commas."""
    return lambda: list(split(legal) if isinstance(legal, str) else legal)


def presets() -> list[str]:
    return sorted(path.stem for path in (Path(kimi_graph.__file__).parent / "presets").glob("*.json"))


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help=f"A preset ({', '.join(presets())}), a config.json, or a checkpoint folder.",
        autocompletion=presets,
    ),
]
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
        callback=one_of(WEIGHTS_FORMATS, "weights format"),
        autocompletion=words_of(WEIGHTS_FORMATS),
        help=f"How graphs keep the routed experts: {', '.join(WEIGHTS_FORMATS)}; check says what a chip takes.",
    ),
]
KvDtype = Annotated[
    str,
    typer.Option(
        metavar="|".join(KV_DTYPES),
        callback=one_of(KV_DTYPES, "dtype of caches"),
        autocompletion=words_of(KV_DTYPES),
        help="Caches of sparse attention: as the model has them, or in 8 bits (fp8: 950 alone).",
    ),
]
Batch = Annotated[
    int | None,
    typer.Option(metavar="B", min=1, help="Sequences of a step, of all ranks. Default: chosen and printed."),
]
