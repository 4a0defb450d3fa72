"""Shared libraries of kernels, built once for their content."""

import ctypes
import hashlib
import secrets
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

from kimi_graph.errors import KernelError

TWIN = Path(__file__).parent
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-shared", "-w", "-ffp-contract=off")  # a product is rounded before a sum
ERROR_BYTES = 1024


@lru_cache(maxsize=1)
def compiler() -> str | None:
    """Path of a C++17 compiler (g++, else clang++), or None."""
    return shutil.which("g++") or shutil.which("clang++")


def library(
    source: str, defines: dict[str, str], include: Sequence[Path], depends: Iterable[Path], cache: Path
) -> ctypes.CDLL:
    """The shared library of one translation unit.

    Args:
        source: its text. defines: macros. include: folders of headers.
        depends: folders whose files are part of what the library is made of; the twin's own always are.
        cache: where libraries are kept, by the content of all of these.

    Raises:
        KernelError: no compiler, or the source does not compile.
    """
    cxx = compiler()
    if cxx is None:
        raise KernelError("kernels on the CPU need a C++17 compiler: install g++ or clang++")
    options = [f"-D{k}={v}" for k, v in sorted(defines.items())]
    made = cache / f"{_digest(cxx, source, options, [TWIN, *depends])}.so"
    if not made.exists():
        cache.mkdir(parents=True, exist_ok=True)
        part = made.with_suffix(f".{secrets.token_hex(4)}.part")
        command = [cxx, *FLAGS, *options, *(f"-I{i}" for i in include), "-x", "c++", "-", "-o", str(part)]
        done = subprocess.run(command, input=source, capture_output=True, text=True)
        if done.returncode:
            raise KernelError(f"the kernel does not compile:\n{done.stderr.strip()}")
        part.replace(made)
    return ctypes.CDLL(str(made))


def _digest(cxx: str, source: str, options: list[str], folders: Iterable[Path]) -> str:
    seen = hashlib.sha256(repr((cxx, FLAGS, source, options)).encode())
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.suffix in (".h", ".cpp"):
                seen.update(f"{path.relative_to(folder)}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return seen.hexdigest()[:32]


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("filled", ctypes.c_uint64),
        ("shared", ctypes.c_uint64),
        ("scratch", ctypes.c_uint64),
    )


PIPES = ("S", "V", "MTE2", "MTE3", "MTE1", "M", "FIX")


class CoreCounters(ctypes.Structure):
    """Of one core.

    Attributes:
        instructions: by pipe. repeats: of vector instructions. products: of the Cube, fractals of 16 x 16 x 32 bytes.
        gm_read, gm_written: bytes of tensors. scratch_read, scratch_written: bytes of the workspace.
        cube: 1: a Cube core. cost: what orders cores (`together.h`).
    """

    _fields_ = (
        ("instructions", ctypes.c_uint64 * len(PIPES)),
        ("repeats", ctypes.c_uint64),
        ("products", ctypes.c_uint64),
        ("gm_read", ctypes.c_uint64),
        ("gm_written", ctypes.c_uint64),
        ("scratch_read", ctypes.c_uint64),
        ("scratch_written", ctypes.c_uint64),
        ("cube", ctypes.c_uint64),
        ("cost", ctypes.c_uint64),
    )


def run_library(
    built: ctypes.CDLL, tensors: Sequence[tuple[str, int, int, bool, int, bool]], arguments: Sequence[int], cores: int
) -> tuple[list[CoreCounters], int]:
    """Run a kernel's library: counters of each core, and how many bytes any core read or wrote, each counted once.

    Args:
        tensors: name, address, bytes, whether it holds values, leading bytes that are nobody's, whether it is a
            workspace.
        arguments: the addresses the kernel takes, in order; 0 for an optional input that is not there.

    Raises:
        KernelError: what the device would not do; the core and the reason.
    """
    listed = (_Tensor * max(1, len(tensors)))(*((name.encode(), *rest) for name, *rest in tensors))
    given = (ctypes.c_void_p * max(1, len(arguments)))(*arguments)
    counters, error = (CoreCounters * max(1, 3 * cores))(), ctypes.create_string_buffer(ERROR_BYTES)
    made, touched = ctypes.c_uint32(), ctypes.c_uint64()
    arrays = (listed, len(tensors), given, len(arguments))
    if built.twin_run(*arrays, cores, counters, ctypes.byref(made), ctypes.byref(touched), error, ERROR_BYTES):
        raise KernelError(error.value.decode())
    return list(counters)[: made.value], touched.value


def run_source(
    source: str,
    kernel: str,
    arch: int,
    tensors: Sequence[tuple[str, int, int, bool]],
    cache: Path,
    cores: int = 1,
    workspace: Sequence[str] = (),
) -> list[CoreCounters]:
    """Build and run a kernel that is given as text; its parameters are the addresses of `tensors`, in order.

    Args:
        tensors: name, address, bytes, whether it holds values. workspace: names of those that are one.
    """
    text = f'{source}\n#define TWIN_KERNEL {kernel}\n#include "twin/launch.h"\n'
    built = library(text, {"__NPU_ARCH__": str(arch)}, [TWIN / "include"], [], cache)
    listed = [(*t, 0, t[0] in workspace) for t in tensors]
    return run_library(built, listed, [t[1] for t in tensors], cores)[0]
