"""The home of torchair: where its graph converters come from, and how they are imported without CANN.

torchair is the part of torch-npu that turns ATen calls into GE nodes. It is pure Python around one native module, and
only its Python files are used. They are taken from, in this order:

1. torch_npu, if this process has imported it: then CANN is here and torchair is used for real, native module and all;
2. a wheel file the caller names;
3. the files of an installed torch-npu, read without importing it (without CANN its import fails);
4. a private cache, filled once by downloading the pinned wheel.

Only the half that lowers graphs is imported (no `__init__` that pulls in torch's inductor), with a
stand-in for the native module. Source: fact sheet of torchair, section 10.
"""

import atexit
import compileall
import contextlib
import functools
import gc
import hashlib
import importlib
import importlib.abc
import importlib.metadata
import importlib.util
import logging
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any

from kimi_graph.errors import CompileError

VERSION = "2.13.0"
# Over the Python files of torchair. The wheels for arm64 and other Pythons, and 2.14.0, hold the same files.
SHA256 = "7a3dd827c535546a43415c75b2264e827396be68167d98f3608265709af0116a"
PIP_DOWNLOAD = (
    "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--no-input",
    # Only Python files are read, so one wheel serves every machine and every Python.
    "--implementation", "cp", "--python-version", "3.11", "--abi", "cp311", "--platform", "manylinux_2_28_x86_64",
)  # fmt: skip

_FOLDER = "torch_npu/dynamo/torchair/"
_NATIVE = "torchair.core._torchair"
# Packages whose `__init__` imports what compiling on a device takes; their submodules are used without it.
_SHELLS = ("torchair", "torchair._utils", "torchair.inference")
_LARGEST = "_ge_concrete_graph/auto_generated_ge_raw_ops.py"


@dataclass(frozen=True)
class Host:
    """torchair, imported.

    Attributes:
        version: of the torch-npu it comes from. origin: where that was found, in words. root: its folder.
        pinned: whether its files are those this release was made with.
        real: whether CANN stands behind it.
        ge: GE operators by name (`ge.RmsNorm`), the raw helpers.
        graph: graphs, tensors and their dtypes. ir: nodes without a helper.
        converters: the table of converters of ATen operators.
    """

    version: str
    origin: str
    root: Path
    pinned: bool
    real: bool
    ge: ModuleType
    graph: ModuleType
    ir: ModuleType
    converters: ModuleType

    def __repr__(self) -> str:
        return f"<torchair of torch-npu {self.version}: {self.origin}>"

    def load(self) -> "Host":
        """Itself; see `Late.load`."""
        return self

    def shield(self) -> contextlib.AbstractContextManager[None]:
        """To be around calls of torchair: a torch_npu that is installed without CANN is not found."""
        return contextlib.nullcontext() if self.real else without_torch_npu()


@dataclass(frozen=True)
class Source:
    """Files to import from."""

    version: str
    origin: str
    root: Path
    digest: str


@dataclass
class Late:
    """torchair that is found and imported when it is needed: what was kept from an earlier compile may do.

    Attributes:
        version, digest: of the torch-npu that `load` will give, and SHA-256 of its torchair.
        root: its folder, fetched where it is not there; nothing is imported.
    """

    wheel: str | Path | None = None
    cache: str | Path | None = None

    def __post_init__(self) -> None:
        self.version, self.digest = identify(self.wheel, Path(self.cache or default_cache()))

    @functools.cached_property
    def root(self) -> Path:
        """Folder of torchair."""
        if _loaded is not None or "torch_npu" in sys.modules:
            return self.load().root
        return find(self.wheel, Path(self.cache or default_cache())).root

    def load(self) -> Host:
        """Import it, see `load`."""
        return load(self.wheel, cache=self.cache)


_loaded: Host | None = None
_loading = threading.Lock()


def tell(line: str) -> None:
    """Default announcement: a line on the error stream."""
    print(line, file=sys.stderr, flush=True)


def default_cache(environ: Mapping[str, str] | None = None) -> Path:
    """Folder for fetched files: XDG_CACHE_HOME or LOCALAPPDATA where set, else the platform's usual place.

    The environment is the caller's to give, so that it is read at the command line only.
    """
    environ = environ or {}
    if sys.platform == "win32":
        base = Path(environ.get("LOCALAPPDATA") or Path.home() / "AppData/Local")
    elif sys.platform == "darwin":
        base = Path(environ.get("XDG_CACHE_HOME") or Path.home() / "Library/Caches")
    else:
        base = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "kimi-graph"


def load(
    wheel: str | Path | None = None, *, cache: str | Path | None = None, announce: Callable[[str], None] = tell
) -> Host:
    """Import torchair, once per process.

    Args:
        wheel: a torch-npu wheel file to use instead of an installed or downloaded one.
        cache: folder of fetched and unpacked files, default `default_cache()`.
        announce: is given a line before anything slow, and a warning about files other than the pinned ones.

    Raises:
        CompileError: nothing usable was found, the download failed or was not what it should be, or another torchair
            is already imported.
    """
    global _loaded
    with _loading:
        if _loaded is None:
            _loaded = _load(wheel, Path(cache or default_cache()), announce)
        elif wheel is not None and not _loaded.real:
            _check_same(_loaded, Path(wheel))
        return _loaded


def _load(wheel: str | Path | None, cache: Path, announce: Callable[[str], None]) -> Host:
    if "torch_npu" in sys.modules:
        return _load_real(sys.modules["torch_npu"])
    _check_free()
    source = find(wheel, cache, announce)
    if source.digest != SHA256:
        announce(
            f"torchair of torch-npu {source.version} ({source.origin}) is not the one this release was made with "
            f"(torch-npu {VERSION}); graphs may differ."
        )
    _write_bytecode(source.root, announce)
    return _host(_import(source), source.version, source.origin, source.root, source.digest == SHA256, real=False)


def _check_same(loaded: Host, wheel: Path) -> None:
    _, files = _read_wheel(wheel)
    if _digest(files) != _digest(_python_files(loaded.root)):
        raise CompileError(
            f"{wheel}: {loaded!r} is already imported, and a process holds one torchair. Use it in a new process."
        )


def _check_free() -> None:
    if "torchair" in sys.modules:
        raise CompileError(
            f"a module named torchair is already imported from {getattr(sys.modules['torchair'], '__file__', '?')}, "
            "without torch_npu. Run this in a process that has not imported it."
        )


# ---- finding the files -----------------------------------------------------------------------------------------------


def find(wheel: str | Path | None, cache: Path, announce: Callable[[str], None] = tell) -> Source:
    """Where torchair's files are, fetching them if there is no other way. See `load`."""
    if wheel is not None:
        return _unpack(Path(wheel), cache, f"wheel {wheel}")
    if (here := installed()) is not None:
        return here
    root = kept_in(cache)
    if not root.is_dir():
        root = _fetch(cache, announce)
    return Source(VERSION, f"cache {cache}", root, SHA256)


def identify(wheel: str | Path | None, cache: Path) -> tuple[str, str]:
    """Version of torch-npu and SHA-256 of the torchair that `load` will import; nothing is imported or fetched.

    Raises:
        CompileError: the wheel cannot be read.
    """
    if _loaded is not None:
        return _loaded.version, _digest(_python_files(_loaded.root))
    if "torch_npu" in sys.modules:
        real = sys.modules["torch_npu"]
        return real.__version__, _digest(_python_files(Path(str(real.__file__)).parent / "dynamo/torchair"))
    if wheel is not None:
        version, files = _read_wheel(Path(wheel))
        return version, _digest(files)
    if (here := installed()) is not None:
        return here.version, here.digest
    root = kept_in(cache)
    return VERSION, digest_of(root) if root.is_dir() else SHA256


def installed() -> Source | None:
    """The files of an installed torch-npu, which is not imported; None where there is none."""
    try:
        distribution = importlib.metadata.distribution("torch-npu")
    except importlib.metadata.PackageNotFoundError:
        return None
    root = Path(str(distribution.locate_file(_FOLDER)))
    if not root.is_dir():
        return None
    return Source(distribution.version, "installed, not imported", root, _digest(_python_files(root)))


def _fetch(cache: Path, announce: Callable[[str], None]) -> Path:
    """Download the pinned wheel and unpack what is used of it."""
    announce(
        f"The graph converters come from the torch-npu {VERSION} wheel. It is downloaded once (44 MB), "
        f"and its torchair folder is kept in {cache}."
    )
    with _temporary(cache) as folder:
        wheel = download(VERSION, folder)
        digest = _digest(_read_wheel(wheel)[1])
        if digest != SHA256:
            raise CompileError(
                f"the downloaded torch-npu {VERSION} is not the expected one: SHA-256 of its torchair is {digest}, "
                f"expected {SHA256}. Check where pip downloads from, or pass a wheel as --torch-npu-wheel PATH."
            )
        return _unpack(wheel, cache, "download").root


def download(version: str, folder: Path) -> Path:
    """The torch-npu wheel of a version, fetched by pip into `folder`. pip's progress goes to the error stream.

    Raises:
        CompileError: pip could not.
    """
    command = [sys.executable, *PIP_DOWNLOAD, f"torch-npu=={version}", "--dest", str(folder)]
    done = subprocess.run(command, stdout=2, check=False)  # 2: the other stream is for results
    wheels = list(folder.glob(f"torch_npu-{version}*.whl"))
    if done.returncode or not wheels:
        raise CompileError(
            f"torch-npu {version} could not be downloaded (what pip said is above). Without a network, run\n"
            f"  python {' '.join(PIP_DOWNLOAD)} torch-npu=={version}\n"
            "on a machine that has one and pass the file as --torch-npu-wheel PATH."
        )
    return wheels[0]


def _unpack(wheel: Path, cache: Path, origin: str) -> Source:
    """Unpack torchair's Python files and the licence into the cache, unless they are there."""
    version, files = _read_wheel(wheel)
    digest = _digest(files)
    root = _place(cache, version, digest)
    if not root.is_dir():
        with _temporary(cache) as folder:
            for name, data in [*files.items(), *_licences(wheel).items()]:
                path = folder / "torchair" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
            root.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(OSError):  # another process was faster: the same files
                (folder / "torchair").rename(root)
    if not root.is_dir():
        raise CompileError(f"{root}: torchair could not be unpacked there. Choose another cache folder.")
    return Source(version, origin, root, digest)


def kept_in(cache: Path) -> Path:
    """Where the pinned torchair lies in a cache, if it has been fetched."""
    return _place(cache, VERSION, SHA256)


def digest_of(root: Path) -> str:
    """SHA-256 over torchair's Python files."""
    return _digest(_python_files(root))


def _place(cache: Path, version: str, digest: str) -> Path:
    return cache / "torchair" / f"torch-npu-{version}-{digest[:16]}"


@contextlib.contextmanager
def _temporary(cache: Path) -> Iterator[Path]:
    """A folder beside the final place, so that a rename moves what was made in it."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=cache, prefix=".partial-"))
    except OSError as error:
        raise CompileError(f"{cache}: no cache can be kept there: {error.strerror}") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _read_wheel(wheel: Path) -> tuple[str, dict[str, bytes]]:
    """Version, and torchair's Python files by path inside torchair."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            files = {n[len(_FOLDER) :]: archive.read(n) for n in names if _is_used(n)}
    except (OSError, zipfile.BadZipFile) as error:
        raise CompileError(
            f"{wheel}: not a wheel that can be read: {_why(error)}; expected a torch_npu-{VERSION}*.whl."
        ) from error
    found = [m for m in (re.match(r"torch_npu-(.+)\.dist-info/", n) for n in names) if m]
    if not found or not files:
        raise CompileError(f"{wheel}: not a torch-npu wheel with torchair in it ({_FOLDER} is missing).")
    return found[0].group(1), files


def _why(error: OSError | zipfile.BadZipFile) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else "it is no zip file"


def _is_used(name: str) -> bool:
    return name.startswith(_FOLDER) and name.endswith(".py") and ".." not in PurePosixPath(name).parts


def _licences(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if ".dist-info/" in n and "LICENSE" in n.upper() and not n.endswith("/")]
        return {PurePosixPath(n).name: archive.read(n) for n in names if "LICENSE" in PurePosixPath(n).name.upper()}


def _python_files(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*.py")}


def _digest(files: Mapping[str, bytes]) -> str:
    """SHA-256 over names and contents, in order of names."""
    lines = (f"{name}\0{hashlib.sha256(data).hexdigest()}\n" for name, data in sorted(files.items()))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


# ---- importing -------------------------------------------------------------------------------------------------------


def _write_bytecode(root: Path, announce: Callable[[str], None]) -> None:
    """Compile all files for this Python even under PYTHONDONTWRITEBYTECODE: else each import compiles 95,000 lines."""
    if not Path(importlib.util.cache_from_source(str(root / _LARGEST))).exists():
        announce(
            f"Compiling torchair's Python files for Python {sys.version_info.major}.{sys.version_info.minor}, once."
        )
        compileall.compile_dir(root, quiet=2)  # where the folder cannot be written, importing is slow


def _import(source: Source) -> dict[str, ModuleType]:
    """The modules, or none of them in sys.modules when one fails."""
    sys.modules.update((name, _shell(source.root, name)) for name in _SHELLS)
    sys.modules[_NATIVE] = _stand_in()
    try:
        with _undisturbed(), without_torch_npu(), _overloads_may_be_missing():
            modules = _import_modules()
            atexit.unregister(importlib.import_module("torchair.core._backend").finalize_graph_engine)
            return modules
    except Exception as error:
        import torch

        for name in [n for n in sys.modules if n.partition(".")[0] == "torchair"]:
            del sys.modules[name]
        raise CompileError(
            f"torchair of torch-npu {source.version} ({source.origin}) cannot be imported beside torch "
            f"{torch.__version__}: {type(error).__name__}: {error}. This release was made with torch-npu {VERSION}."
        ) from error


def _import_modules() -> dict[str, ModuleType]:
    names = {
        "graph": "torchair.ge._ge_graph",
        "ir": "torchair._ge_concrete_graph.compat_ir",
        "ge": "torchair._ge_concrete_graph.ge_apis",
        "converters": "torchair._ge_concrete_graph.fx2ge_converter",
    }
    modules = {field: importlib.import_module(name) for field, name in names.items()}
    importlib.import_module("torchair._ge_concrete_graph.ge_converter")  # fills the table of converters
    return modules


def _load_real(torch_npu: Any) -> Host:
    """torchair of the torch_npu that this process has imported, native module and all."""
    root = Path(torch_npu.__file__).parent / "dynamo/torchair"
    if "torchair" not in sys.modules:
        sys.modules["torchair"] = _shell(root, "torchair")
    with _undisturbed():
        modules = _import_modules()
    pinned = _digest(_python_files(root)) == SHA256
    return _host(modules, torch_npu.__version__, "imported, with CANN", root, pinned, real=True)


def _host(modules: dict[str, ModuleType], version: str, origin: str, root: Path, pinned: bool, *, real: bool) -> Host:
    return Host(version=version, origin=origin, root=root, pinned=pinned, real=real, **modules)


def _shell(root: Path, name: str) -> ModuleType:
    """A package of torchair whose submodules import as usual, but whose `__init__` has not run."""
    folder = root.joinpath(*name.split(".")[1:])
    shell = ModuleType(name, "the submodules of a package; its __init__ has not run")
    shell.__path__ = [str(folder)]
    shell.__file__ = str(folder / "__init__.py")
    return shell


def _stand_in() -> ModuleType:
    """What torchair's Python asks of its native module while it lowers graphs. Everything else is an AttributeError."""

    class TorchNpuGraphBase:
        def __init__(self, name: str) -> None:
            self.name = name

    members = """BOOL UINT8 INT8 UINT16 INT16 UINT32 INT32 UINT64 INT64 BF16 FLOAT16 FLOAT32 FLOAT64
        COMPLEX32 COMPLEX64 COMPLEX128"""
    module = ModuleType(_NATIVE, "stand-in for torchair's native module")
    module.__dict__.update(
        TorchNpuGraphBase=TorchNpuGraphBase,
        TorchDataType=Enum("TorchDataType", members),
        check_cann_compat=lambda op_type, inputs, attrs: "",  # "": the operator of this name takes these
    )
    return module


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Undo what importing torchair does to the process: signal handlers, the class of loggers, a handler on stdout."""
    main = threading.current_thread() is threading.main_thread()
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)} if main else {}
    logger_class, collecting = logging.getLoggerClass(), gc.isenabled()
    gc.disable()  # 1,500 modules make no garbage: collecting takes a fifth of the time
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if collecting:
            gc.enable()
        logging.setLoggerClass(logger_class)
        logging.getLogger("torchair").handlers.clear()
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _overloads_may_be_missing() -> Iterator[None]:
    """Inside, an overload torch does not have is None, and torchair registers nothing for it.

    Releases of torch drop overloads; a file of converters that names one would be skipped whole.
    """
    import torch  # late: `doctor` looks at files where torch is broken

    packet = torch._ops.OpOverloadPacket
    strict = packet.__getattr__

    def lenient(self: Any, name: str) -> Any:
        try:
            return strict(self, name)
        except AttributeError:
            if name.startswith("_"):
                raise
            return None

    packet.__getattr__ = lenient  # type: ignore[method-assign]
    try:
        yield
    finally:
        packet.__getattr__ = strict  # type: ignore[method-assign]


class _Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Iterable[str] | None = None, target: ModuleType | None = None) -> None:
        if fullname.partition(".")[0] == "torch_npu":
            raise ModuleNotFoundError(f"No module named {fullname!r} here: its import needs CANN", name=fullname)


@contextlib.contextmanager
def without_torch_npu() -> Iterator[None]:
    """Inside, `import torch_npu` finds nothing: torchair does without it, but not with an import that fails."""
    finder = _Blocked()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
