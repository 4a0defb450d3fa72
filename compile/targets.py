"""Target profiles: what a graph is compiled for, and whose operators are there.

Numbers are those of one die, the unit of a mesh and of a process. Sources: fact sheet of Ascend, C.1 (the platform
files atc itself reads), C.2 (published totals) and C.3 (names).
"""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from kimi_graph.errors import CompileError

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
        name: as on the command line. product: what Huawei calls it.
        soc: family an operator's kernels are built for, "a2", "a3" or "950"; `op_soc` is its name in CANN's builds.
        soc_version: for `atc --soc_version`, and `soc_versions` the other legal ones.
        memory_bytes: of one die, and `memory_source` where the number is from.
        cann: release the graph must compile with.
        providers: of `PROVIDERS`, whose operators it has: where several can serve, the first of these does.
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
    providers: tuple[str, ...] = PROVIDERS_DEFAULT


@dataclass(frozen=True, kw_only=True)
class _Profile:
    """A target before its variant is chosen: GiB of a die by soc_version, the usual variant first."""

    product: str
    soc: str
    op_soc: str
    memory: dict[str, int]
    memory_source: str


_PLATFORM = "platform files of CANN's runtime, memory size of the soc_version"

# GiB of a die by the end of its soc_version, the usual variant first.
_A2_MEMORY = "B2 64, B1 64, B2C 64, B3 64, B4 32, B4-1 32"
_A3_MEMORY = "9391 64, 9392 64, 9381 64, 9382 64, 9372 64, 9362 64, 9363 32"
_950PR_MEMORY = "9589 128, 9599 128, 958b 112, 9579 128, 957b 112, 957c 84, 957d 96"
_950DT_MEMORY = """95A1 144, 95A2 96, 9591 144, 9592 96, 9595 96, 9596 64, 9581x 144, 9582x 96,
    9581 144, 9582 96, 9583 126, 9584 84, 9585 96, 9586 64, 9587 84, 9588 56,
    9571 144, 9572 96, 9573 126, 9574 84, 9575 96, 9576 64, 9577 84, 9578 56"""


def _named(prefix: str, memory: str) -> dict[str, int]:
    pairs = (entry.split() for entry in memory.split(","))
    return {prefix + suffix: int(gib) for suffix, gib in pairs}


_PROFILES = {
    "a2": _Profile(
        product="Atlas 800I/800T A2",
        soc="a2",
        op_soc="ascend910b",
        memory=_named("Ascend910", _A2_MEMORY),
        memory_source=_PLATFORM,
    ),
    "a3": _Profile(
        product="Atlas 800 A3",
        soc="a3",
        op_soc="ascend910_93",
        memory=_named("Ascend910_", _A3_MEMORY),
        memory_source=_PLATFORM + "; a package of two dies is sold as 128 GB",
    ),
    "a3-superpod": _Profile(
        product="Atlas 900 A3 SuperPoD",
        soc="a3",
        op_soc="ascend910_93",
        memory=_named("Ascend910_", _A3_MEMORY),
        memory_source=_PLATFORM + "; 768 dies are published as 48 TB",
    ),
    "950pr": _Profile(
        product="Ascend 950PR",
        soc="950",
        op_soc="ascend950",
        memory=_named("Ascend950PR_", _950PR_MEMORY),
        memory_source=_PLATFORM + "; published as 128 GB",
    ),
    "950dt": _Profile(
        product="Ascend 950DT",
        soc="950",
        op_soc="ascend950",
        memory=_named("Ascend950DT_", _950DT_MEMORY),
        memory_source=_PLATFORM + "; published as 144 GB",
    ),
    "950-superpod": _Profile(
        product="Atlas 950 SuperPoD",
        soc="950",
        op_soc="ascend950",
        memory=_named("Ascend950DT_", _950DT_MEMORY),
        memory_source=_PLATFORM + "; 8,192 cards are published as 1,152 TB",
    ),
}

TARGETS = tuple(_PROFILES)


def target(
    name: str,
    *,
    cann: str = CANN_DEFAULT,
    soc_version: str | None = None,
    providers: Sequence[str] = PROVIDERS_DEFAULT,
) -> Target:
    """The profile of a target.

    Args:
        name: one of `TARGETS`. cann: one of `CANN_VERSIONS`.
        soc_version: a variant of the chip; by default the usual one.
        providers: some of `PROVIDERS`, in the order they are to be asked.
    Raises:
        CompileError: a name, release, variant or provider that is not known, with the nearest one; a list of providers
            that cannot be.
    """
    profile = _PROFILES[_known("target", name, TARGETS)]
    variants = tuple(profile.memory)
    variant = _known(f"soc_version of target {name!r}", variants[0] if soc_version is None else soc_version, variants)
    return Target(
        name=name,
        product=profile.product,
        soc=profile.soc,
        op_soc=profile.op_soc,
        soc_version=variant,
        soc_versions=variants,
        memory_bytes=profile.memory[variant] * GIB,
        memory_source=profile.memory_source,
        cann=_known("CANN release", cann, CANN_VERSIONS),
        providers=_providers(tuple(providers)),
    )


def _providers(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        _known("provider", name, PROVIDERS)
    if len(set(names)) < len(names):
        raise CompileError(f"providers {','.join(names)}: each once.")
    if "builtin" not in names:
        given = ",".join(names)
        raise CompileError(f"providers {given}: most operators come with CANN alone; name it too: {given},builtin.")
    return names


def _known(what: str, given: str, known: tuple[str, ...]) -> str:
    if given not in known:
        nearest = _nearest(given, known)
        raise CompileError(f"{what} {given!r} is not known; the nearest is {nearest!r}, all are {', '.join(known)}.")
    return given


def _nearest(given: str, known: tuple[str, ...]) -> str:
    folded = {k.lower().replace("-", ""): k for k in known}
    close = difflib.get_close_matches(given.lower().replace("-", "").replace("_", ""), folded, n=1, cutoff=0.0)
    return folded[close[0]]
