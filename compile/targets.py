"""Target profiles: what a graph is compiled for, and whose operators are there.

Numbers are those of one die, the unit of a mesh and of a process. Sources: fact sheet of Ascend, C.1 (the platform
files atc itself reads), C.2 (published totals) and C.3 (names).
"""

import contextlib
import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kimi_graph.errors import CompileError
from kimi_graph.hardware import LINKS, Link, Number

from .prototype_rows import ROWS

GIB = 2**30
CANN_VERSIONS = ("8.5", "9.1", "9.2")
CANN_DEFAULT = "9.2"  # the first whose recurrent delta rule takes a float32 memory: before it KDA's step is composed

# Whose operators a graph may take: fused ones that CANN brings, those of vllm-ascend's package, this project's, and
# the same out of CANN's basic operators.
PROVIDERS = ("builtin", "vllm-ascend", "own", "composed")
# By default offers are asked as an operator's file lists them. CANN's first: nothing is to be installed. Ours before
# compositions, as one kernel reads and writes everything once, but where the composition was there before it.
# What is left out needs somebody else's package, which has to be built and installed: only who deploys can say so.
PROVIDERS_DEFAULT = ("builtin", "own", "composed")


@dataclass(frozen=True, kw_only=True)
class Target:
    """Hardware and CANN release of a bundle.

    Attributes:
        name: as on the command line.
        product: what Huawei calls it.
        soc: family an operator's kernels are built for, "a2", "a3" or "950"; `op_soc` is its name in CANN's builds.
        soc_version: for `atc --soc_version`, and `soc_versions` the other legal ones.
        memory_bytes: of one die, and `memory_source` where the number is from.
        cann: release the graph must compile with.
        die: what it can do.
        links: its network, innermost level first.
        providers: of `PROVIDERS`, whose operators it has: where several can serve, the first of these does.
        avoid: types that no lowering may choose; "Type=provider" says who is asked first where one could have been.
    """

    name: str
    product: str
    soc: str
    op_soc: str
    soc_version: str
    soc_versions: tuple[str, ...]
    memory_bytes: int
    memory_source: str
    cann: str
    die: "Die"
    links: tuple[Link, ...]
    providers: tuple[str, ...] = PROVIDERS_DEFAULT
    avoid: tuple[str, ...] = ()

    @property
    def avoided(self) -> dict[str, str]:
        """Each type to be avoided, with who is asked in its place first; "" for nobody in particular."""
        return {type_: provider for type_, _, provider in (entry.partition("=") for entry in self.avoid)}


_PLATFORM = "platform files of CANN's runtime"

# By the end of a soc_version, the usual variant first: GiB of memory, AI cores, GHz, MiB of L2, TB/s of memory.
_A2 = (
    "B2 64 24 1.80 192 1.6, B1 64 24 1.85 192 1.6, B2C 64 24 1.80 192 1.6, B3 64 20 1.80 192 1.6, "
    "B4 32 20 1.50 96 0.8, B4-1 32 20 1.50 168 0.8"
)
_A3 = (
    "9391 64 24 1.85 192 1.6, 9392 64 24 1.85 192 1.6, 9381 64 24 1.80 192 1.6, 9382 64 24 1.80 192 1.6, "
    "9372 64 20 1.80 192 1.6, 9362 64 20 1.50 168 1.6, 9363 32 20 1.50 168 1.6"
)
_950PR = (
    "9589 128 32 1.65 128 1.6, 9599 128 36 1.80 128 1.6, 958b 112 32 1.65 112 1.4, 9579 128 28 1.65 128 1.6, "
    "957b 112 28 1.65 112 1.4, 957c 84 28 1.65 112 1.4, 957d 96 28 1.65 96 1.2"
)
# 36 cores at 1.65 GHz: platform files say 1.80, which published totals do not fit.
_950DT = """95A1 144 36 1.65 128 4.0, 95A2 96 36 1.65 128 4.0, 9591 144 36 1.65 128 4.0, 9592 96 36 1.65 128 4.0,
    9595 96 36 1.65 128 3.2, 9596 64 36 1.65 128 3.2, 9581x 144 32 1.65 128 4.0, 9582x 96 32 1.65 128 4.0,
    9581 144 32 1.65 128 4.0, 9582 96 32 1.65 128 4.0, 9583 126 32 1.65 112 3.7, 9584 84 32 1.65 112 3.7,
    9585 96 32 1.65 128 3.2, 9586 64 32 1.65 128 3.2, 9587 84 32 1.65 112 2.9, 9588 56 32 1.65 112 2.9,
    9571 144 28 1.65 128 4.0, 9572 96 28 1.65 128 4.0, 9573 126 28 1.65 112 3.7, 9574 84 28 1.65 112 3.7,
    9575 96 28 1.65 128 3.2, 9576 64 28 1.65 128 3.2, 9577 84 28 1.65 112 2.9, 9578 56 28 1.65 112 2.9"""


class _Variant(NamedTuple):
    gib: int
    cores: int
    ghz: float
    l2: int
    terabytes: float


def _named(prefix: str, table: str) -> dict[str, _Variant]:
    rows = (entry.split() for entry in table.split(","))
    return {prefix + name: _Variant(int(g), int(n), float(f), int(l2), float(t)) for name, g, n, f, l2, t in rows}


# ---- one die ---------------------------------------------------------------------------------------------------------

_KIB, _MIB = 2**10, 2**20
# Products of a core in a cycle, in 16 x 16.
_CUBE = {"fp32": 8, "bf16": 16, "int8": 32, "fp8": 32, "fp4": 64, "int4": 64}
_HAS = {"a2": ("fp32", "bf16", "int8", "int4"), "a3": ("fp32", "bf16", "int8", "int4")}
_PUBLISHED = {
    "a2": "published: 353 at 1.80 GHz, 376 with the vector units",
    "a3": "published: 752 of a package of two dies with the vector units, at 1.80 GHz",
    "950": "published: 432 of 32 cores, 378 of 28, 547 of 36 with the vector units",
}


@dataclass(frozen=True, kw_only=True)
class Die:
    """What one die can do.

    Attributes:
        memory, bandwidth: of its HBM. l2: cache, and `l2_bandwidth`. cube: matrix products by dtype, FLOP/s.
        vector: element-wise work in fp16, op/s. buffers: of a core, by name.
    """

    memory: Number
    bandwidth: Number
    l2: Number
    l2_bandwidth: Number
    cube: dict[str, Number]
    vector: Number
    buffers: dict[str, Number]


def _die(soc: str, v: _Variant, memory_source: str) -> Die:
    new, how = soc == "950", f"{v.cores} cores at {v.ghz} GHz"
    files = f"{_PLATFORM}, {how}"
    if v.cores == 36 and v.ghz == 1.65:
        files += " (they say 1.80, which published totals do not fit)"

    def cube(dtype: str) -> Number:
        rate = v.cores * 16 * _CUBE[dtype] * 16 * 2 * v.ghz * 1e9
        source = f"{files} x 16 x {_CUBE[dtype]} x 16 products" + (f"; {_PUBLISHED[soc]}" if dtype == "bf16" else "")
        return Number(rate, "FLOP/s", "derived", source)

    lanes = 256 if new else 128
    sizes = {"UB": 248 if new else 192, "L1": 512, "L0A": 64, "L0B": 64, "L0C": 256 if new else 128}
    usual = v.terabytes in (1.6, 4.0)
    rates = "memory rate of the platform files, held against the published one of the usual die"
    if usual:
        rates = "of a die, white paper" if new else "of a die, CANN's migration guide from A2 to 950"
    return Die(
        memory=Number(v.gib * GIB, "B", "published", memory_source),
        bandwidth=Number(v.terabytes * 1e12, "B/s", "published" if usual else "derived", rates),
        l2=Number(v.l2 * _MIB, "B", "published", _PLATFORM),
        l2_bandwidth=Number(
            5.3e12 if new else 4.8e12, "B/s", "derived", "100 to 110 bytes a cycle and core, platform files"
        ),
        cube={dtype: cube(dtype) for dtype in _HAS.get(soc, ("fp32", "bf16", "int8", "fp8", "fp4"))},
        vector=Number(
            2 * v.cores * lanes * 2 * v.ghz * 1e9, "op/s", "derived", f"{files}, {lanes} lanes of fp16 each, twice"
        ),
        buffers={name: Number(kib * _KIB, "B", "published", _PLATFORM) for name, kib in sizes.items()},
    )


@dataclass(frozen=True, kw_only=True)
class _Profile:
    """A target before its variant is chosen: variants by soc_version, the usual one first."""

    product: str
    soc: str
    op_soc: str
    variants: dict[str, _Variant]
    memory_source: str


_PROFILES = {
    "a2": _Profile(
        product="Atlas 800I/800T A2",
        soc="a2",
        op_soc="ascend910b",
        variants=_named("Ascend910", _A2),
        memory_source=_PLATFORM + ", memory size of the soc_version",
    ),
    "a3": _Profile(
        product="Atlas 800 A3",
        soc="a3",
        op_soc="ascend910_93",
        variants=_named("Ascend910_", _A3),
        memory_source=_PLATFORM + ", memory size of the soc_version; a package of two dies is sold as 128 GB",
    ),
    "a3-superpod": _Profile(
        product="Atlas 900 A3 SuperPoD",
        soc="a3",
        op_soc="ascend910_93",
        variants=_named("Ascend910_", _A3),
        memory_source=_PLATFORM + ", memory size of the soc_version; 768 dies are published as 48 TB",
    ),
    "950pr": _Profile(
        product="Ascend 950PR",
        soc="950",
        op_soc="ascend950",
        variants=_named("Ascend950PR_", _950PR),
        memory_source=_PLATFORM + ", memory size of the soc_version; published as 128 GB",
    ),
    "950dt": _Profile(
        product="Ascend 950DT",
        soc="950",
        op_soc="ascend950",
        variants=_named("Ascend950DT_", _950DT),
        memory_source=_PLATFORM + ", memory size of the soc_version; published as 144 GB",
    ),
    "950-superpod": _Profile(
        product="Atlas 950 SuperPoD",
        soc="950",
        op_soc="ascend950",
        variants=_named("Ascend950DT_", _950DT),
        memory_source=_PLATFORM + ", memory size of the soc_version; 8,192 cards are published as 1,152 TB",
    ),
}

TARGETS = tuple(_PROFILES)
MOST_NAMED = 12  # names that a refusal lists: more hide what it says


def target(
    name: str,
    *,
    cann: str = CANN_DEFAULT,
    soc_version: str | None = None,
    providers: Sequence[str] = PROVIDERS_DEFAULT,
    avoid: Sequence[str] = (),
) -> Target:
    """The profile of a target.

    Args:
        name: one of `TARGETS`.
        cann: one of `CANN_VERSIONS`.
        soc_version: a variant of the chip; by default the usual one.
        providers: some of `PROVIDERS`, in the order they are to be asked.
        avoid: see `Target`.
    Raises:
        CompileError: a name, release, variant or provider that is not known, with the nearest one; a list of providers
            that cannot be.
    """
    if name not in TARGETS and (found := _sold_as(name)):
        raise CompileError(
            f"target {name!r} is not known; it may be {' or '.join(found)}, all are {', '.join(TARGETS)}."
        )
    profile = _PROFILES[_known("target", name, TARGETS)]
    variants = tuple(profile.variants)
    variant = _known(f"soc_version of target {name!r}", variants[0] if soc_version is None else soc_version, variants)
    return Target(
        name=name,
        product=profile.product,
        soc=profile.soc,
        op_soc=profile.op_soc,
        soc_version=variant,
        soc_versions=variants,
        memory_bytes=profile.variants[variant].gib * GIB,
        memory_source=profile.memory_source,
        cann=_known("CANN release", cann, CANN_VERSIONS),
        die=_die(profile.soc, profile.variants[variant], profile.memory_source),
        links=LINKS[name],
        providers=_providers(tuple(providers)),
        avoid=_avoided(tuple(avoid), tuple(providers)),
    )


_SOLD = {"910c": "ascend91093"}  # a chip's name where its soc_versions do not have it


def _sold_as(name: str) -> list[str]:
    """Targets by what a chip or a machine is sold as: 910B, 950, Atlas 800 A3."""

    def folded(text: str) -> str:
        return "".join(x for x in text.lower() if x.isalnum())

    given = folded(name).removeprefix("ascend").removeprefix("huawei")
    wanted = _SOLD.get(given, given)
    known = {n: [folded(x) for x in (n, p.product, *p.variants)] for n, p in _PROFILES.items()}
    return [n for n, words in known.items() if len(wanted) > 1 and any(wanted in word for word in words)]


def _providers(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        _known("provider", name, PROVIDERS)
    if len(set(names)) < len(names):
        twice = next(n for n in names if names.count(n) > 1)
        raise CompileError(f"providers {','.join(names)}: {twice} is named twice; name each once.")
    if "builtin" not in names:
        given = ",".join(names)
        raise CompileError(f"providers {given}: most operators come with CANN alone; name it too: {given},builtin.")
    return names


def _avoided(entries: tuple[str, ...], providers: tuple[str, ...]) -> tuple[str, ...]:
    chosen = tuple(name for name, row in ROWS.items() if row.provider != "ge")
    for entry in entries:
        type_, equals, provider = entry.partition("=")
        _known("--avoid: operator", type_, chosen)
        if equals:
            _known(f"--avoid {type_}: provider", provider, providers)
    if len({entry.partition("=")[0] for entry in entries}) < len(entries):
        raise CompileError(f"--avoid {', '.join(entries)}: an operator is named twice; name each once.")
    return entries


def _known(what: str, given: str, known: tuple[str, ...]) -> str:
    if given not in known:
        rest = f"all are {', '.join(known)}" if len(known) <= MOST_NAMED else f"there are {len(known)}"
        if not given:
            raise CompileError(f"{what} is not named; {rest}.")
        raise CompileError(f"{what} {given!r} is not known; the nearest is {_nearest(given, known)!r}, {rest}.")
    return given


def _nearest(given: str, known: tuple[str, ...]) -> str:
    """By number where all are numbers, as releases are; else by spelling."""
    with contextlib.suppress(ValueError):
        return min(known, key=lambda k: abs(float(k) - float(given)))
    folded = {k.lower().replace("-", ""): k for k in known}
    close = difflib.get_close_matches(given.lower().replace("-", "").replace("_", ""), folded, n=1, cutoff=0.0)
    return folded[close[0]]
