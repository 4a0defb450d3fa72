"""What earlier compiles made, found again by everything that can change it: whole bundles, and pieces of graphs.

A bundle is found where nothing at all has changed; then neither torchair is imported nor anything traced. Else the
pieces of a phase are found where nothing that they depend on has (another `--chunk` leaves decode's, other pipeline
stages leave all). Keys hold no place: neither where the cache, the checkpoint or kimi-graph lies, nor whose home it is.
Weights are never kept.
"""

import functools
import hashlib
import json
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import kimi_graph
from kimi_graph._links import LINKED
from kimi_graph.parallel import Rules

from . import recipe
from .cache_store import Fields, Store
from .ge_proto import ModelDef
from .lower import Choice
from .phases import Bucket
from .stamp import Piece
from .torchair_host import Late

if TYPE_CHECKING:
    from .driver import Request

FOLDER = "compiled"  # in the cache


@dataclass
class Kept:
    """The cache of one compile.

    Attributes:
        made_with: versions that everything depends on.
        missed: why the bundle was not found, in words; None: it was, or was not looked for.
        found: by bucket, whether its pieces were found, or why not.
    """

    store: Store
    made_with: Fields
    missed: str | None = None
    found: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def at(cache: Path, host: Late) -> "Kept":
        """What is kept in a cache folder, for a torchair."""
        made_with = {
            "kimi-graph": kimi_graph.__version__,
            "kimi-graph's source": source_digest(),
            "torch": torch.__version__,
            "torch-npu": host.version,
            "torchair": host.digest,
            "Python": platform.python_version(),
            "machine": platform.machine(),  # constants are computed here
        }
        return Kept(Store(cache / FOLDER), made_with)

    def lines(self) -> Iterator[str]:
        """For people: what was found, and why other things were not."""
        if self.missed is None and not self.found:
            yield "hit: nothing has changed"
        if self.missed is not None:
            yield f"miss: {self.missed}"
        if self.found:
            alike: dict[str, list[str]] = {}
            for name, what in self.found.items():
                alike.setdefault(what, []).append(name)
            yield "; ".join(f"{', '.join(names)}: {what}" for what, names in alike.items())
        yield from self.store.notes

    # ---- bundles ----

    def bundle(self, request: "Request") -> dict[str, bytes] | None:
        """The files of a bundle by name, but for what is of a checkpoint."""
        fields = self._bundle_fields(request)
        files = self.store.get("bundle", fields)
        self.missed = self.store.why_not("bundle", fields) if files is None else None
        return files

    def keep_bundle(self, request: "Request", files: Mapping[str, bytes]) -> None:
        """Keep all files of a bundle for the next request that is the same."""
        self.store.put("bundle", self._bundle_fields(request), files)

    def _bundle_fields(self, r: "Request") -> Fields:
        """All of a request."""
        c = r.config
        experts = {} if c.moe is None else {"--redundant-experts": c.moe.redundant, "--moe-chunks": c.moe.chunks}
        return {
            **self.made_with,
            **_target_fields(r),
            "model": c.name,
            "config": c.fingerprint,
            "config.json": _hash([c.source, c.assumptions]),
            "--phase": list(r.phases),
            "--batch": r.rows,
            "--chunk": r.chunk,
            "--max-len": r.max_len,
            "--page": r.page,
            "--pages": r.pages,
            "--slots": r.slots,
            "--patches": r.patches,
            "--mesh": None if r.mesh is None else str(r.mesh),
            "--exchange": r.exchange,
            "--split-cache": r.split_cache,
            "--pad": r.pad,
            **experts,
        }

    # ---- pieces ----

    def pieces(self, request: "Request", b: Bucket, rules: Rules | None) -> dict[str, Piece] | None:
        """The pieces of a bucket by part."""
        fields, kind = self._piece_fields(request, b, rules), f"pieces of {b.phase}"
        files = self.store.get(kind, fields)
        self.found[b.name] = "pieces found" if files is not None else f"traced ({self.store.why_not(kind, fields)})"
        return None if files is None else unpack_pieces(files)

    def keep_pieces(self, request: "Request", b: Bucket, rules: Rules | None, pieces: Mapping[str, Piece]) -> None:
        """Keep the pieces of one phase for requests that differ in other things."""
        self.store.put(f"pieces of {b.phase}", self._piece_fields(request, b, rules), pack_pieces(pieces))

    def _piece_fields(self, r: "Request", b: Bucket, rules: Rules | None) -> Fields:
        """What tracing, lowering and conversion of a bucket's parts depend on."""
        return {
            **self.made_with,
            **_target_fields(r),
            "config": r.config.fingerprint,
            **asdict(b),
            "mesh of a stage": None if rules is None else str(rules.mesh),
            "rules": None if rules is None else _hash([*map(sorted, (rules.mapping.items(), rules.padding.items()))]),
        }


def _target_fields(r: "Request") -> Fields:
    t = r.target
    return {
        "--target": t.name,
        "--cann": t.cann,
        "--providers": list(t.providers),
        "--avoid": list(t.avoid),
        "target's profile": _hash(repr(t)),
        "--kv-dtype": r.kv_dtype,
        "experts": r.form,
    }


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


@functools.cache
def source_digest() -> str:
    """`digest_of` kimi-graph as it runs."""
    return digest_of(Path(kimi_graph.__file__).parent)


def digest_of(package: Path) -> str:
    """SHA-256 over the files of a copy of kimi-graph (bundles hold the kernels' too), by their paths in the package."""
    digest = hashlib.sha256()
    for folder in (package, *(package / name for name in sorted(LINKED))):
        for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.parent.name != "__pycache__"):
            data = path.read_bytes()
            digest.update(f"{path.relative_to(package).as_posix()}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()


# ---- pieces as bytes -------------------------------------------------------------------------------------------------


def pack_pieces(pieces: Mapping[str, Piece]) -> dict[str, bytes]:
    """Pieces as byte strings: nodes as GE's messages, the rest as JSON."""
    files: dict[str, bytes] = {}
    for name, piece in pieces.items():
        model = ModelDef()
        model.graph.add(name=name).op.extend(piece.ops)
        rest = {
            "inputs": dict(piece.inputs),
            "outputs": dict(piece.outputs),
            "weights": {key: [parameter, recipe.to_json(steps)] for key, (parameter, steps) in piece.weights.items()},
            "origins": piece.origins,
            "choices": [asdict(choice) for choice in piece.choices],
        }
        files |= {f"{name}.graph": model.SerializeToString(deterministic=True), name: json.dumps(rest).encode()}
    return files


def unpack_pieces(files: Mapping[str, bytes]) -> dict[str, Piece]:
    """The inverse of `pack_pieces`."""
    pieces = {}
    for name in (name for name in files if not name.endswith(".graph")):
        rest = json.loads(files[name])
        pieces[name] = Piece(
            ops=tuple(ModelDef.FromString(files[f"{name}.graph"]).graph[0].op),
            inputs=rest["inputs"],
            outputs=rest["outputs"],
            weights={key: (parameter, recipe.from_json(steps)) for key, (parameter, steps) in rest["weights"].items()},
            origins=rest["origins"],
            choices=tuple(Choice(**choice) for choice in rest["choices"]),
        )
    return pieces
