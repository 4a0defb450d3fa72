"""Operator packages beside CANN, and what they do to each other.

Sources: fact sheet of Ascend, A.3 and B.2; the build script and the operator definitions of vllm-ascend (main, August
2026). A package is found by its vendor's name, and one that is installed over another replaces all of it, its
single-operator interface (op_api) even where the vendors differ: all operators of a deployment belong into one package.
A type that a package registers is taken from there rather than from CANN, whatever its prototype is.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kimi_graph.errors import CompileError

from .prototype_rows import ROWS


@dataclass(frozen=True)
class Package:
    """What has to be installed for the operators of a provider.

    Attributes:
        build: how it is made, of some operators alone where `{ops}` is for their names.
        replaces: types of CANN that it has too when it is built as its own script does: how their prototypes differ.
    """

    build: str
    replaces: Mapping[str, str]


PACKAGES = {
    "vllm-ascend": Package(
        build="csrc/build.sh --pkg --ops={ops}",
        replaces={
            "CausalConv1d": "its states are an input alone",
            "KvQuantSparseFlashAttention": "three results",
            "MoeGatingTopK": "without input_ids and tid2eid",
            "SparseFlashAttention": "without sinks",
        },
    ),
    "own": Package(build="the bundle's kernels/, or kimi-graph kernels export DIR", replaces={}),
}


@dataclass(frozen=True)
class Needed:
    """A package that graphs need.

    Attributes:
        types: that they take from it. replaced: that they take from CANN and all of the package would replace.
    """

    provider: str
    types: tuple[str, ...]
    replaced: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {"provider": self.provider, "operators": list(self.types), "must_not_replace": list(self.replaced)}

    def text(self) -> str:
        """What of it, how it is built, and what must not be in it, in a line."""
        package = PACKAGES[self.provider]
        line = f"{self.provider}, with {', '.join(self.types)}"
        line += f" ({package.build.format(ops=';'.join(map(folder_of, self.types)))})"
        why = ", ".join(f"{type_} ({package.replaces[type_]})" for type_ in self.replaced)
        return line + (f", and with nothing else: all of it would replace CANN's {why}" if why else "")


def package_lines(manifest: Mapping[str, Any]) -> list[str]:
    """For a reader: what a bundle needs beside CANN."""
    return [
        Needed(n["provider"], tuple(n["operators"]), tuple(n["must_not_replace"])).text() for n in manifest["packages"]
    ]


def folder_of(type_: str) -> str:
    """`RecurrentKda` is built of the folder `recurrent_kda`."""
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in type_).lstrip("_")


def own_types(types: Iterable[str]) -> list[str]:
    """Those of this project among operator types."""
    return sorted(t for t in set(types) if t in ROWS and ROWS[t].provider == "own")


def packages_of(types: Iterable[str]) -> list[Needed]:
    """The packages that operators of these types need.

    Raises:
        CompileError: more than one.
    """
    found = sorted(set(types))
    by_provider: dict[str, list[str]] = {}
    for type_ in found:
        if type_ in ROWS and ROWS[type_].provider in PACKAGES:
            by_provider.setdefault(ROWS[type_].provider, []).append(type_)
    if len(by_provider) > 1:
        whose = "; ".join(f"{', '.join(theirs)} of {provider}" for provider, theirs in by_provider.items())
        raise CompileError(
            f"operators of two packages: {whose}. One that is installed replaces the other's; leave one of them out of "
            f"--providers, and name 'composed' where only it can stand in."
        )
    return [
        Needed(provider, tuple(theirs), tuple(t for t in found if t in PACKAGES[provider].replaces))
        for provider, theirs in by_provider.items()
    ]
