"""The bundle: a folder with graphs, a weight plan and a manifest, written whole or not at all.

```
manifest.json     what it is: model, target, phases, state contract, hashes, what is not proved
weights.json      the weight plan: of which checkpoint tensors and by which steps each graph weight is made
graphs/*.air      one static graph per phase and bucket
constants.bin     with `--weights constant`: the weights themselves, which the graphs' FileConstant nodes point into
kernels/          where a graph has an operator of this project: what builds them, as `kernels export` writes it
golden/           with `--golden N`: cases of single operators for bring-up, with an index and hashes of its own
sources.json      for people: the source line behind each node
local.json        for this machine: where the checkpoint lay; not part of the bundle's content, and may be deleted
weights/          where `kimi-graph weights` was run: the weights themselves, and an index of them
```
Paths inside are relative, but for local.json.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimi_graph.errors import BundleError
from kimi_graph.files import Standing, check_writable, fetch_ahead, file_hash, from_json, memory_bytes, new_folder

from .schema import check

FORMAT = 4
MANIFEST, WEIGHTS, GRAPHS = "manifest.json", "weights.json", "graphs"
CONSTANTS, SOURCES, LOCAL, KERNELS = "constants.bin", "sources.json", "local.json", "kernels"
GOLDEN, WRITTEN = "golden", "weights"  # folders
OWN = frozenset({MANIFEST, WEIGHTS, GRAPHS, CONSTANTS, SOURCES, LOCAL, KERNELS, GOLDEN})


def fetch_checkpoint(folder: Path, given: Path | None) -> None:
    """Start to bring a checkpoint from the disk for a bundle whose weights are to be written, while the program starts:
    as much as an eighth of the memory holds. Whether it is one, and which, is judged later; here nothing is an error.
    """
    with suppress(OSError, ValueError, TypeError, KeyError):
        if not (folder / WRITTEN).exists():  # else little or nothing is left to read
            source = given or Path(json.loads((folder / LOCAL).read_text())["checkpoint"])
            fetch_ahead(sorted(source.glob("*.safetensors")), memory_bytes() // 8)


@contextmanager
def as_written(folder: Path) -> Iterator[None]:
    """What is read inside is what compile wrote: a file that someone changed may hold anything.

    Raises:
        BundleError: it is not.
    """
    try:
        yield
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        what = f"{type(error).__name__}: {error}"
        files = "manifest, weight plan or sources"
        raise BundleError(f"{folder}: its {files} are not as compile writes them ({what}).") from error


@dataclass(frozen=True)
class Bundle:
    """An opened bundle."""

    folder: Path
    manifest: dict[str, Any]
    weights: dict[str, Any]

    def graph(self, phase: str) -> dict[str, Any]:
        """The manifest's entry of the graph of a phase, its first stage's on a mesh; see `graphs`."""
        return self.graphs(phase)[0]

    def graphs(self, phase: str) -> list[dict[str, Any]]:
        """The manifest's entries of the graphs of a phase, one for each stage; or of the graph of that name.

        Raises:
            BundleError: no such phase.
        """
        found = [entry for entry in self.manifest["graphs"] if phase in (entry["phase"], entry["name"])]
        if not found:
            phases = ", ".join(dict.fromkeys(g["phase"] for g in self.manifest["graphs"]))
            names = ", ".join(g["name"] for g in self.manifest["graphs"])
            raise BundleError(
                f"{self.folder}: no graph of phase {phase!r}; its phases are {phases}, its graphs {names}."
            )
        return found

    def graph_bytes(self, entry: dict[str, Any]) -> bytes:
        """The bytes of a graph's file, checked against the manifest's hash.

        Raises:
            BundleError: it is missing, changed, or outside the bundle.
        """
        path = inside(self.folder, entry["file"])
        try:
            data = path.read_bytes()
        except OSError as e:
            raise BundleError(f"{path}: {e.strerror or e}; the bundle is incomplete.") from None
        check_hash(data, entry["sha256"], path)
        return data

    def check_constants(self) -> None:
        """Whether the file of constants, if the bundle has one, is what the manifest says.

        Raises:
            BundleError: it is not.
        """
        entry = self.manifest["weights"].get("constants")
        if entry is not None:
            path = inside(self.folder, entry["file"])
            _compare_hash(file_hash(path) if path.is_file() else "none", entry["sha256"], path)

    def check_files(self) -> None:
        """Raises BundleError where a file that the manifest lists is missing, changed or damaged."""
        for entry in self.manifest["graphs"]:
            self.graph_bytes(entry)
        self.check_constants()
        self.kernels_state()

    def kernels_state(self) -> str:
        """What there is of the operator project, in words; "none" where no graph needs one.

        Raises:
            BundleError: a file of it is missing, changed, or not in the manifest.
        """
        entry, where = self.manifest["kernels"], self.folder / KERNELS
        listed = {} if entry is None else entry["files"]
        if outside := [n for n in listed if not n.startswith(f"{KERNELS}/") or ".." in Path(n).parts]:
            raise BundleError(f"{self.folder / MANIFEST}: {outside[0]!r} is no file of {KERNELS}/.")
        found = {p.relative_to(self.folder).as_posix() for p in where.rglob("*") if not p.is_dir()}
        if foreign := sorted(found - set(listed)):
            raise BundleError(f"{self.folder / foreign[0]}: not in the manifest; a build of kernels/ goes elsewhere.")
        for name, digest in listed.items():
            path = inside(self.folder, name)
            _compare_hash(file_hash(path) if path.is_file() else "none", digest, path)
        return "none" if entry is None else f"{len(listed)} files build {', '.join(entry['operators'])}"


def inside(folder: Path, name: str) -> Path:
    """The path of a bundle's file by its name there: a relative one, and really in the folder.

    Raises:
        BundleError: it leads out of the folder, by its name or by a link.
    """
    try:
        outside = Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name
        real, home = (folder / name).resolve(), folder.resolve()
    except (OSError, RuntimeError, ValueError, TypeError):  # a loop of links, a name that is too long or none
        outside, real, home = True, folder, folder
    if outside:
        raise BundleError(f"{folder / MANIFEST}: file {str(name)[:200]!r} leaves the bundle.")
    if not real.is_relative_to(home):
        raise BundleError(f"{folder / name}: a link to {real}, outside the bundle; put the file itself there.")
    if real.exists() and not (real.is_file() or real.is_dir()):
        raise BundleError(f"{folder / name}: is neither a file nor a folder; to read it might never end.")
    return folder / name


def kernels_entry(files: Mapping[str, bytes], operators: Sequence[str]) -> dict[str, Any]:
    """The manifest's entry of the operator project whose files lie in the bundle under these names."""
    return {"operators": list(operators), "files": {n: hashlib.sha256(data).hexdigest() for n, data in files.items()}}


def check_hash(data: bytes, expected: str, path: Path) -> None:
    """Raises BundleError where `data` is not what the manifest says."""
    _compare_hash(hashlib.sha256(data).hexdigest(), expected, path)


def _compare_hash(found: str, expected: str, path: Path) -> None:
    if found != expected:
        raise BundleError(
            f"{path}: SHA-256 is {found[:16]}..., the manifest says {expected[:16]}...; it was changed or damaged."
        )


def dump(value: Any) -> bytes:
    """JSON with sorted keys and a final newline: the same value is the same bytes."""
    return (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


def read_json(path: Path) -> Any:
    try:
        return from_json(path.read_bytes())
    except OSError as e:
        raise BundleError(f"{path}: {e.strerror or e}; this is not a whole bundle.") from None
    except ValueError as e:
        raise BundleError(f"{path}: not JSON ({e}). Is the file complete?") from None


def open_bundle(folder: str | Path) -> Bundle:
    """Open a bundle and check its manifest and weight plan.

    Raises:
        BundleError: not a bundle, made by another format version, or damaged.
    """
    folder = Path(folder)
    if not (folder / MANIFEST).is_file():
        raise BundleError(f"{folder}: no {MANIFEST}; a bundle is a folder written by `kimi-graph compile`.")
    for path in folder.iterdir():
        inside(folder, path.name)
    manifest = read_json(folder / MANIFEST)
    where = folder / MANIFEST
    if isinstance(manifest, dict) and manifest.get("format", FORMAT) != FORMAT:
        found = json.dumps(manifest["format"])[:40]
        raise BundleError(f"{where}: bundle format {found}; this version reads format {FORMAT}.")
    check(manifest, "manifest", where)
    weights = folder / WEIGHTS
    if not weights.is_file():
        raise BundleError(f"{weights}: missing; the bundle is incomplete.")
    with as_written(folder):
        check_hash(weights.read_bytes(), manifest["weights"]["sha256"], weights)
        for entry in manifest["graphs"]:
            _check_size(inside(folder, entry["file"]), entry["bytes"])
        if "constants" in manifest["weights"]:
            _check_size(inside(folder, manifest["weights"]["constants"]["file"]))
    return Bundle(folder, manifest, read_json(weights))


def _check_size(path: Path, size: int | None = None) -> None:
    """Raises BundleError where no file is there, or one that has not `size` bytes: to read it all may take long."""
    try:
        found = path.stat().st_size
    except OSError as e:
        raise BundleError(f"{path}: {e.strerror or e}; the bundle is incomplete.") from None
    if size is not None and found != size:
        raise BundleError(f"{path}: has {found:,} bytes, the manifest says {size:,}; it was changed or damaged.")


def check_place(folder: Path) -> None:
    """Whether a bundle may be written to `folder`.

    Raises:
        KimiGraphError: something else is there, or nothing can be.
    """
    check_writable(folder)
    if folder.exists() and not (folder / MANIFEST).is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise BundleError(f"{folder}: exists and is not a bundle; choose another folder.")
    if (folder / WRITTEN).exists():
        raise BundleError(
            f"{folder}: holds weights that were written for the bundle there, and that would be lost; delete "
            f"{folder / WRITTEN}, or choose another folder."
        )
    if folder.is_dir() and (foreign := sorted(p.name for p in folder.iterdir() if p.name not in OWN)):
        raise BundleError(
            f"{folder}: holds {foreign[0]}, which no bundle has and which would be lost; "
            "move it, or choose another folder."
        )
    if inside := next(
        (p for p in folder.absolute().parents if (p / MANIFEST).is_file() and (p / WEIGHTS).is_file()), None
    ):
        raise BundleError(f"{folder}: lies inside the bundle {inside}; choose another folder.")


@contextmanager
def writing(folder: Path, standing: Standing | None = None) -> Iterator[Path]:
    """A folder to write to that becomes `folder` at the end; nothing is left behind on failure.

    An older bundle there is replaced; anything else is refused, and with `standing` every other bundle too.

    Raises:
        KimiGraphError: `folder` exists and is not a bundle, or cannot be written, or is not `standing` any more.
    """
    try:
        with new_folder(folder, lambda: check_place(folder), standing) as work:
            yield work
    except OSError as e:
        raise BundleError(f"{e.filename or folder}: {e.strerror or e}; nothing was written.") from None


def caches_text(state: dict[str, Any]) -> str:
    """What a line about a bundle's state contract ends with; "" where caches have the model's dtype."""
    kv_dtype = state.get("kv_dtype", "bf16")
    return "" if kv_dtype == "bf16" else f"; caches of sparse attention in {kv_dtype}"
