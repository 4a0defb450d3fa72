"""`kimi-graph weights`: makes the weights of a bundle's ranks ahead, by their recipes, into `weights/` (`written.py`).

The checkpoint is read once, in the order of its files; what is made goes to its place in files `*.part`, and a line in
a journal (`journal.py`) says that a part is done, and its hash. At the end files get their names, which say what is in
them, and the index is replaced. A run that was interrupted goes on where the journal ends; one that finds all done does
nothing.
"""

import contextlib
import dataclasses
import errno
import hashlib
import json
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from kimi_graph.checkpoint import Checkpoint
from kimi_graph.errors import BundleError
from kimi_graph.files import check_writable, replace_file
from kimi_graph.parallel.mesh import MAX_RANKS, Mesh
from kimi_graph.progress import Notify, silent

from . import air
from .bundle import Bundle, as_written, dump, file_hash, open_bundle, read_json
from .expect import bundle_config
from .ge_proto import Dtype, ModelDef, TensorDescriptor, is_tiled, shape_of
from .in_place import Shares, shares_of
from .journal import Done, Flusher, Journal
from .loads import read_loads
from .making import Maker, Task, Wanted
from .manifest import check_claims, is_weight
from .parts import ALIGNMENT, PartFile, mesh_of, part_files
from .read_again import Reading, read_again
from .verify import find_checkpoint
from .written import INDEX, INDEX_FORMAT, JOURNAL, SOURCE, described, open_written, written_folder

STEM = r"(?:rank|shared_[a-z_.]+)_\d{4,}"
FINISHED, UNFINISHED = re.compile(STEM + r"-[0-9a-f]{12}\.bin"), re.compile(STEM + r"\.part")


@dataclass(frozen=True)
class Report:
    """What `kimi-graph weights` did.

    Attributes:
        ranks: asked for. files: that they read. bytes: of those. made: bytes that were made in this run.
        read: bytes read again and found as the index says. shares: how the bytes of all ranks come about; None: no
            checkpoint was needed. repaired: files that were found damaged, and made anew. dry: nothing was written.
        not_finite: of what was read again, by file and weight: how many numbers are NaN or infinite.
    """

    bundle: Bundle
    ranks: Sequence[int]
    files: int
    bytes: int
    made: int
    read: int
    shares: Shares | None
    dry: bool = False
    repaired: tuple[str, ...] = ()
    not_finite: Mapping[tuple[str, str], int] = field(default_factory=dict)

    passed = True

    @property
    def summary(self) -> str:
        name, count = self.bundle.manifest["model"]["name"], len(self.ranks)
        ranks = f"{count:,} rank{'s' if count > 1 else ''}"
        what = f"weights of {name} for {ranks}: {self.bytes:,} bytes in {self.files:,} files"
        if self.dry:
            return f"{what}; nothing was written"
        done = ["all were there" if not self.made else f"{self.made:,} written"]
        if self.repaired:
            done.append(f"{len(self.repaired):,} damaged and made anew")
        if self.read:
            done.append(f"{self.read:,} read again")
        if self.not_finite:
            done.append(f"NaN or infinity in {len(self.not_finite):,} weights")
        return ", ".join([what, *done])

    def text(self) -> str:
        lines = [] if self.shares is None else [self.shares.text()]
        lines += [f"damaged, and made anew: {file}" for file in self.repaired]
        lines += [
            f"warning: {name} in {file}: {count:,} numbers are NaN or infinite, as in the checkpoint; kimi-graph check "
            "--values names its tensors"
            for (file, name), count in self.not_finite.items()
        ]
        return "\n".join(lines)

    def to_json(self) -> Any:
        numbers = {name: getattr(self, name) for name in ("files", "bytes", "made", "read", "dry")}
        bad = [{"file": file, "weight": name, "numbers": count} for (file, name), count in self.not_finite.items()]
        return {
            "ranks": list(self.ranks),
            **numbers,
            "repaired": list(self.repaired),
            "not_finite": bad,
            "shares": None if self.shares is None else self.shares.to_json(),
        }


def write_weights(
    folder: Path,
    *,
    checkpoint: Path | None = None,
    ranks: Sequence[int] | None = None,
    jobs: int = 2,
    verify: bool = False,
    repair: bool = False,
    dry: bool = False,
    loads: Path | None = None,
    progress: Notify = silent,
) -> Report:
    """Write the weights of a bundle's ranks; what is there already stays.

    Args:
        checkpoint: a folder; None: that which the bundle was compiled from.
        ranks: all by default.
        jobs: parts that are made at a time.
        verify: read all of it again in the end. Where all is there, no checkpoint is needed for that.
        repair: read all of it again, and make files anew of which a weight is not what the index says.
        dry: say what it takes, no more.
        loads: counted tokens of experts, by which copies of some are chosen; None: as in weights that are there, else
            of the first experts. Weights with other copies are written anew.

    Raises:
        KimiGraphError: a bundle, checkpoint or folder that is not as it has to be; no room. What was whole before still
            is, and what was done is gone on with by the next run.
    """
    bundle = open_bundle(folder)
    with as_written(folder):
        config = bundle_config(bundle)
        models = {g["name"]: air.from_bytes(bundle.graph_bytes(g), g["file"]) for g in bundle.manifest["graphs"]}
        check_claims(bundle, config, models)
    if "constants" in bundle.manifest["weights"]:
        raise BundleError(f"{folder}: holds its weights as constants; there is nothing to write.")
    chosen = _chosen(mesh_of(bundle), ranks)
    everything = part_files(bundle)
    files = [f for f in everything if not chosen.isdisjoint(f.ranks)]
    report = Report(bundle, sorted(chosen), len(files), sum(f.bytes for f in files), 0, 0, None, dry)
    stems = {f.stem for f in files}
    try:
        source = find_checkpoint(bundle, checkpoint, mapped=False)
    except BundleError:
        if checkpoint is not None or not verify or not chosen <= _ranks_there(bundle):
            raise
        found = _read_again(bundle, stems, jobs, progress)
        found.check()
        return dataclasses.replace(report, read=found.bytes, not_finite=found.not_finite)
    maker = Maker.open(bundle, config, source, None if loads is None else read_loads(loads))
    if loads is None and (slots := _slots_there(bundle)).keys() == maker.slots.keys():
        maker = dataclasses.replace(maker, slots=slots)
    report = dataclasses.replace(report, shares=shares_of(maker, bundle))
    if dry:
        return report
    run = _Run(bundle, maker, _descriptors(models.values()), _identity(source), everything, files, progress)
    with _plainly(run.folder):
        made = run.write(jobs)
        if not verify and not repair:
            return dataclasses.replace(report, made=made)
        found, bad = _read_again(bundle, stems, jobs, progress), ()
        if repair and found.damaged:
            bad = tuple(sorted(found.damaged))
            for file in bad:
                (run.folder / file).unlink()  # from now on the next run makes it, whatever becomes of this one
            made += run.write(jobs)
            again = _read_again(bundle, set(map(stem_of, bad)), jobs, progress)
            found = Reading(found.bytes, again.damaged, found.not_finite | again.not_finite)
        found.check()
    return dataclasses.replace(report, made=made, read=found.bytes, repaired=bad, not_finite=found.not_finite)


def _read_again(bundle: Bundle, stems: set[str], jobs: int, progress: Notify) -> Reading:
    written = open_written(bundle)
    assert written is not None
    files = {name: entry for name, entry in written.files.items() if stem_of(name) in stems}
    return read_again(written.folder, files, jobs, progress)


def _ranks_there(bundle: Bundle) -> set[int]:
    """Ranks that have all their weights in the bundle."""
    written = open_written(bundle)
    return set() if written is None else set(written.ranks)


def _slots_there(bundle: Bundle) -> Mapping[str, Sequence[int]]:
    """Experts in slots, as in weights that were made before; nothing where there are none of this bundle."""
    try:
        written = open_written(bundle, partly=True)
    except BundleError:  # damaged, or another bundle's: it is written anew
        return {}
    return {} if written is None else written.slots


def parse_ranks(text: str) -> list[int]:
    """The ranks of `0-3,7`.

    Raises:
        BundleError: it is no list of ranks.
    """
    ranks: set[int] = set()
    words = text.split(",")
    if "" in (stripped := [word.strip() for word in words]):
        what = "is empty" if not any(stripped) else "has a comma too many"
        raise BundleError(f"--ranks {text!r}: {what}; expected ranks, and first and last ones, as in 0-3,7.")
    for word in words:
        found = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", word)
        if found is None:
            raise BundleError(f"--ranks {text!r}: {word!r} is neither a rank nor a first and a last one, as in 0-3,7.")
        first, last = int(found[1]), int(found[2] or found[1])
        if last < first:
            raise BundleError(f"--ranks {text!r}: {word!r} ends before it starts; write {last}-{first}.")
        if last >= MAX_RANKS:
            raise BundleError(f"--ranks {text!r}: rank {last:,} is beyond any mesh; the last is {MAX_RANKS - 1:,}.")
        ranks.update(range(first, last + 1))
    return sorted(ranks)


def _chosen(mesh: Mesh, ranks: Sequence[int] | None) -> set[int]:
    wanted = set(range(mesh.world)) if ranks is None else set(ranks)
    if beyond := sorted(r for r in wanted if not 0 <= r < mesh.world):
        there = f"the bundle's ranks are 0 to {mesh.world - 1:,}" if mesh.world > 1 else "the bundle has rank 0 alone"
        raise BundleError(f"--ranks: rank {beyond[-1]:,} is not there; {there}.")
    return wanted


def _descriptors(models: Iterable[ModelDef]) -> dict[str, TensorDescriptor]:
    """What graphs read each weight as, by name."""
    return {op.name: op.output_desc[0] for m in models for op in m.graph[0].op if is_weight(op)}


def _identity(checkpoint: Checkpoint) -> dict[str, list[int]]:
    """The files of a checkpoint with size and time of the last change: others are another source."""
    files = {stored.file for stored in checkpoint.tensors.values()}
    stats = {file.name: file.stat() for file in sorted(files)}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}


@contextlib.contextmanager
def _plainly(folder: Path) -> Iterator[None]:
    """Faults of the system in a line."""
    try:
        yield
    except OSError as e:
        where = e.filename or folder
        kept = "what was there is as it was; make room, and run it again to go on."
        full = e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        raise BundleError(f"{where}: {e.strerror or e}" + (f"; {kept}" if full else ".")) from None


# ---- a run -----------------------------------------------------------------------------------------------------------


@dataclass
class _Run:
    """One run of the command.

    Attributes:
        identity: of the checkpoint. everything: every file there may be. files: those that are asked for.
        paths: of files that are being written, by stem.
    """

    bundle: Bundle
    maker: Maker
    descriptors: Mapping[str, TensorDescriptor]
    identity: Mapping[str, list[int]]
    everything: Sequence[PartFile]
    files: Sequence[PartFile]
    notify: Notify
    stop: threading.Event = field(default_factory=threading.Event)
    paths: dict[str, Path] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return written_folder(self.bundle)

    def write(self, jobs: int) -> int:
        """Write what is not there; returns the bytes that were made."""
        present = self._present()
        if all(self._entry_of(f, present) for f in self.files) and not (self.folder / JOURNAL).exists():
            return 0
        check_writable(self.folder / INDEX)
        self.folder.mkdir(exist_ok=True)
        slots = hashlib.sha256(dump({path: list(experts) for path, experts in self.maker.slots.items()})).hexdigest()
        about = {"for": described(self.bundle), "source": self.identity, "slots": slots}
        with Journal.held(self.folder / JOURNAL) as journal:
            present = self._present()  # a run that came to its end meanwhile may have written some
            missing = [f for f in self.files if not self._entry_of(f, present)]
            done = self._resumed(journal, about, missing)
            made = self._make(journal, missing, done, jobs)
            entries = present | self._finished(missing, done)
            self._commit(entries, present)
            journal.end(about, {key: sha for key, sha in done.items() if key[0] not in map(stem_of, entries)})
        return made

    def _present(self) -> dict[str, Any]:
        """The files of the index that are there, where they are of this bundle and this checkpoint; else none."""
        known, index = self.folder / SOURCE, self.folder / INDEX
        if not known.is_file() or not index.is_file():
            return {}
        try:
            made_of = read_json(known)
            if made_of["source"] != self.identity or file_hash(index) not in made_of["indexes"]:
                return {}
            written = open_written(self.bundle, partly=True)
        except (BundleError, KeyError, TypeError):  # damaged, or another bundle's: it is written anew
            return {}
        if written is None or dict(written.slots) != {p: tuple(slots) for p, slots in self.maker.slots.items()}:
            return {}
        return dict(written.files)

    @staticmethod
    def _entry_of(file: PartFile, present: Mapping[str, Any]) -> str | None:
        """Name of a file that is there already."""
        return next((name for name in present if stem_of(name) == file.stem), None)

    def _resumed(self, journal: Journal, about: Mapping[str, Any], missing: Sequence[PartFile]) -> Done:
        """Parts that earlier runs have done, of other files too; there are files for all that is missing."""
        told = journal.start(about)
        done: Done = {}
        stems = {f.stem for f in missing}
        for file in self.everything:
            lines = {(file.stem, n): told[file.stem, n] for n in file.held if (file.stem, n) in told}
            if lines and (path := self._existing(file, lines)):
                self.paths[file.stem] = path
                done |= lines
            elif file.stem in stems:
                self.paths[file.stem] = self._laid_out(file)
        for old in self.folder.iterdir():
            if UNFINISHED.fullmatch(old.name) and old not in self.paths.values():
                old.unlink()
        if done != told:
            journal.restart(about, done)
        return done

    def _existing(self, file: PartFile, lines: Done) -> Path | None:
        """The file that parts were written to; it has got its name if the run before came so far."""
        for path in (self._final(file, lines), self._part(file)):
            if path is not None and not path.is_symlink() and path.is_file() and path.stat().st_size == file.bytes:
                return path
        return None

    def _laid_out(self, file: PartFile) -> Path:
        """A new file to write parts to."""
        part = self._part(file)
        part.unlink(missing_ok=True)  # also where it is a link
        with part.open("xb") as f:
            f.truncate(file.bytes)
        return part

    def _part(self, file: PartFile) -> Path:
        return self.folder / f"{file.stem}.part"

    def _final(self, file: PartFile, done: Done) -> Path | None:
        """The name of a file by what is in it; None where parts are missing."""
        hashes = [done.get((file.stem, name)) for name in file.held]
        if None in hashes:
            return None
        text = json.dumps([[name, held.offset, held.bytes] for name, held in file.held.items()] + hashes)
        return self.folder / f"{file.stem}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.bin"

    # ---- parts ---------------------------------------------------------------------------------------------------

    def _make(self, journal: Journal, missing: Sequence[PartFile], done: Done, jobs: int) -> int:
        where: dict[Wanted, list[PartFile]] = {}
        for file in missing:
            for name, held in file.held.items():
                if (file.stem, name) not in done:
                    where.setdefault(Wanted(name, held.index), []).append(file)
        tasks = self.maker.tasks(where)
        total = sum(task.bytes for task in tasks)
        self._check_room(missing)
        self.notify("write weights", 0, total)

        def run(task: Task) -> int:
            hashes = {part: hashlib.sha256() for part in task.parts}

            def write(part: Wanted, at: int, made: Tensor) -> None:
                if self.stop.is_set():
                    raise _Stopped
                data = made.numpy().data
                for file in where[part]:
                    _write_at(self.paths[file.stem], file.held[part.name].offset + at, data)
                hashes[part].update(data)
                moved(len(data))

            self.maker.make(task, write)
            made = {(f.stem, part.name): sha.hexdigest() for part, sha in hashes.items() for f in where[part]}
            done.update(made)
            flusher.add({self.paths[stem] for stem, _ in made}, made)
            return 0

        moved = self._counter("write weights", total)
        with Flusher(journal) as flusher:
            self._in_threads("write weights", 0, jobs, [lambda task=task: run(task) for task in tasks])
        return total

    def _check_room(self, missing: Sequence[PartFile]) -> None:
        """Files are sparse at first; what they will take must be there before hours are spent."""
        needed = sum(f.bytes for f in missing) - sum(_allocated(self.paths[f.stem]) for f in missing)
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise BundleError(f"{self.folder}: {needed:,} bytes are to be written, the disk has {free:,} left.")

    def _counter(self, what: str, total: int) -> Callable[[int], None]:
        lock, at = threading.Lock(), [0]

        def moved(size: int) -> None:
            with lock:
                at[0] += size
                self.notify(what, at[0], total)

        return moved

    def _in_threads(self, what: str, total: int, jobs: int, calls: Sequence[Callable[[], int]]) -> None:
        """Run calls, which return how many bytes they have dealt with; the first that fails stops the others."""
        moved = self._counter(what, total) if total else lambda size: None
        with ThreadPoolExecutor(max(1, jobs)) as pool:
            futures = [pool.submit(lambda call=call: moved(call())) for call in calls]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:  # after Ctrl-C too: a part that is being made is left
                failed = any(f.done() and not f.cancelled() and f.exception() for f in futures)
                if failed or not all(f.done() for f in futures):
                    self.stop.set()
                    pool.shutdown(cancel_futures=True)
        errors = [e for f in futures if not f.cancelled() and (e := f.exception())]
        for error in sorted(errors, key=lambda e: isinstance(e, _Stopped)):
            raise error

    # ---- the end -------------------------------------------------------------------------------------------------

    def _finished(self, missing: Sequence[PartFile], done: Done) -> dict[str, Any]:
        """Give files that have all parts their names; their entries of the index."""
        entries = {}
        for file in missing:
            path = self._final(file, done)
            assert path is not None, f"{file.stem}: parts were not made"
            self.paths[file.stem].replace(path)
            entries[path.name] = self._entry(file, done)
        return entries

    def _commit(self, entries: Mapping[str, Any], present: Mapping[str, Any]) -> None:
        """Name files in the index; what it does not name any more goes.

        Args:
            present: what of it is in the old one.
        """
        stems = set(map(stem_of, entries))
        lacking = {r for f in self.everything if f.stem not in stems for r in f.ranks}
        index = dump(
            {
                "format": INDEX_FORMAT,
                "bundle": described(self.bundle),
                "alignment": ALIGNMENT,
                "ranks": [r for r in range(mesh_of(self.bundle).world) if r not in lacking],
                "slots": {path: list(slots) for path, slots in self.maker.slots.items()},
                "files": entries,
            }
        )
        # At any moment local.json says what the index is made of, be it the old one or the new one.
        indexes = [file_hash(self.folder / INDEX)] if present else []
        indexes.append(hashlib.sha256(index).hexdigest())
        replace_file(self.folder / SOURCE, dump({"source": self.identity, "indexes": indexes}))
        replace_file(self.folder / INDEX, index)
        for old in self.folder.iterdir():
            if FINISHED.fullmatch(old.name) and old.name not in entries:
                old.unlink()

    def _entry(self, file: PartFile, done: Done) -> dict[str, Any]:
        weights = {}
        for name, held in file.held.items():
            desc = self.descriptors[name]
            weights[name] = {
                "offset": held.offset,
                "bytes": held.bytes,
                "dtype": Dtype.of_proto(desc.dtype).text,
                "shape": list(shape_of(desc)),
                "layout": "FRACTAL_NZ" if is_tiled(desc) else "ND",
                "sha256": done[file.stem, name],
            }
        return {"ranks": list(file.ranks), "bytes": file.bytes, "weights": weights}


def stem_of(name: str) -> str:
    """Of the name of a file, without the hash of what is in it."""
    return name.rpartition("-")[0]


class _Stopped(Exception):  # noqa: N818 (it is no error, and nobody sees it)
    """Something else has failed, or Ctrl-C."""


def _write_at(path: Path, offset: int, data: memoryview) -> None:
    with path.open("rb+", buffering=0) as f:
        f.seek(offset)
        while data:
            data = data[f.write(data) :]


def _allocated(path: Path) -> int:
    """Bytes of a file that have their place on the disk."""
    return getattr(path.stat(), "st_blocks", 0) * 512
