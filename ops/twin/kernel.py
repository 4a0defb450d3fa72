"""An operator of `ops/kernels`: definition, inference and tiling by its own host code, its kernel on the twin."""

import ctypes
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kimi_graph.errors import KernelError

from .build import PIPES, TWIN, CoreCounters, library, run_library

FOLDER = TWIN.parent / "kernels"


@dataclass(frozen=True)
class Arch:
    """What tiling code sees of a die. Source: SoC files of the platform; 910_93 and 950 with all their cores.

    Attributes:
        cores: vector cores. ub: usable bytes of a core's unified buffer.
    """

    cores: int
    ub: int


MOST_DIMS = 8  # of a tensor
LIBRARY_WORKSPACE = 1024  # bytes that the twin's framework keeps of a workspace, as in its headers

ARCHES = {2201: Arch(48, 192 << 10), 3510: Arch(72, 248 << 10)}

_CODES = {
    torch.float32: 0,
    torch.float16: 1,
    torch.int8: 2,
    torch.int32: 3,
    torch.int64: 9,
    torch.bool: 12,
    torch.bfloat16: 27,
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_C_NAMES = {
    torch.float32: "float",
    torch.float16: "half",
    torch.bfloat16: "bfloat16_t",
    torch.int8: "int8_t",
    torch.int32: "int32_t",
    torch.int64: "int64_t",
}


@dataclass(frozen=True)
class Parameter:
    """An input or output: `kind` is required, optional or dynamic; `types` are columns, one per combination."""

    name: str
    kind: str
    types: tuple[str, ...]


@dataclass(frozen=True)
class Attribute:
    """An attribute: Float, Int or Bool; None: it has to be given."""

    name: str
    type: str
    default: float | None


@dataclass(frozen=True)
class Definition:
    """An operator as its op_host (or, without SoCs, its op_graph) declares it."""

    type: str
    inputs: tuple[Parameter, ...]
    outputs: tuple[Parameter, ...]
    attrs: tuple[Attribute, ...]
    socs: tuple[str, ...]

    @staticmethod
    def of(made: dict[str, Any]) -> "Definition":
        def parameters(listed: list[dict[str, Any]]) -> tuple[Parameter, ...]:
            return tuple(Parameter(p["name"], p["kind"], tuple(p["types"])) for p in listed)

        attrs = tuple(Attribute(a["name"], a["type"], a["default"]) for a in made["attrs"])
        return Definition(
            made["type"], parameters(made["inputs"]), parameters(made["outputs"]), attrs, tuple(made["socs"])
        )


@dataclass(frozen=True)
class Counters:
    """What a run moved and issued, on every core.

    Attributes:
        cube: whether it is a Cube core. read, written: bytes of tensors. workspace: bytes of it read and written.
        instructions: by pipe. repeats: vector work in units of 256 bytes. products: the Cube's work, in fractals of
            16 x 16 x 32 bytes. cost: what orders cores.
        touched: bytes of global memory that any core reads plus those that any core writes, each counted once: what is
            left of `bytes` where the second reader finds them in the L2 cache.
    """

    cube: tuple[bool, ...]
    read: tuple[int, ...]
    written: tuple[int, ...]
    instructions: dict[str, tuple[int, ...]]
    repeats: tuple[int, ...]
    products: tuple[int, ...]
    workspace: tuple[int, ...]
    cost: tuple[int, ...]
    touched: int

    @staticmethod
    def of(cores: Sequence[CoreCounters], touched: int) -> "Counters":
        by_pipe = {pipe: tuple(c.instructions[i] for c in cores) for i, pipe in enumerate(PIPES)}
        return Counters(
            tuple(bool(c.cube) for c in cores),
            tuple(c.gm_read for c in cores),
            tuple(c.gm_written for c in cores),
            {pipe: counts for pipe, counts in by_pipe.items() if any(counts)},
            tuple(c.repeats for c in cores),
            tuple(c.products for c in cores),
            tuple(c.scratch_read + c.scratch_written for c in cores),
            tuple(c.cost for c in cores),
            touched,
        )

    @property
    def bytes(self) -> int:
        """Bytes of tensors read and written, all cores."""
        return sum(self.read) + sum(self.written)


@dataclass(frozen=True)
class Run:
    """Outputs by name; a state that is written in place is the output of its name. cores: how many the tiling took."""

    outputs: dict[str, Tensor]
    counters: Counters
    cores: int


class _Given(ctypes.Structure):
    _fields_ = (
        ("input", ctypes.c_int32),
        ("type", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("dims", ctypes.c_int64 * MOST_DIMS),
    )


class _Made(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("rank", ctypes.c_int32), ("dims", ctypes.c_int64 * MOST_DIMS))


class _Tiling(ctypes.Structure):
    _fields_ = (
        ("cores", ctypes.c_uint32),
        ("bytes", ctypes.c_uint32),
        ("workspace", ctypes.c_uint64),
        ("key", ctypes.c_uint64),
        ("data", ctypes.c_uint8 * 4096),
    )


def kernels() -> list[str]:
    """Names of the operators in `ops/kernels`."""
    return sorted(p.name for p in FOLDER.iterdir() if (p / "op_host").is_dir() and p.name != "common")


class Kernel:
    """One operator, by the name of its folder.

    Args:
        cache: folder for built libraries; they are found again by content.
        defines: macros, of sources that have forms to be compared.
    """

    def __init__(self, name: str, cache: str | Path, defines: Mapping[str, str] | None = None) -> None:
        if name not in kernels():
            raise KernelError(f"no kernel {name!r}; there are {', '.join(kernels())}")
        self.name, self.cache, self.folder = name, Path(cache), FOLDER / name
        self.defines = dict(defines or {})
        self._built: dict[Any, ctypes.CDLL] = {}

    @cached_property
    def _host(self) -> ctypes.CDLL:
        host, shared = self.folder / "op_host", FOLDER / "common"
        sources = [f"{self.name}_{part}.cpp" for part in ("def", "infershape", "tiling")]
        text = "".join(f'#include "{source}"\n' for source in [*sources, "twin_ops.h", f"{self.name}_proto.h"])
        include = [host, self.folder / "op_kernel", self.folder / "op_graph", shared / "op_host", TWIN / "host"]
        built = library(text, self.defines, include, [self.folder, shared], self.cache)
        built.twin_definition.restype = ctypes.c_char_p
        return built

    @cached_property
    def _declared(self) -> dict[str, Any]:
        return json.loads(self._host.twin_definition())

    @cached_property
    def definition(self) -> Definition:
        """What op_host declares."""
        return Definition.of(self._declared["definition"])

    @cached_property
    def prototype(self) -> Definition:
        """What op_graph declares."""
        return Definition.of(self._declared["prototype"])

    def run(
        self,
        inputs: Mapping[str, Tensor | list[Tensor] | None],
        attrs: Mapping[str, float | int | bool] | None = None,
        *,
        arch: int = 2201,
        cores: int | None = None,
        nobody: Mapping[str, int] | None = None,
    ) -> Run:
        """Infer, tile and run.

        Args:
            inputs: contiguous CPU tensors by name; None or left out: an optional input that is not there; a list is a
                dynamic input. None of them is changed.
            arch: 2201 (A2, A3) or 3510 (950). cores: vector cores of the device; by default all of the largest die.
            nobody: leading rows of a state that are nobody's: cores may write them at once.

        Raises:
            KernelError: op_host refuses the node, or the kernel does what the device would not.
        """
        if arch not in ARCHES:
            raise KernelError(f"{self.definition.type}: no arch {arch}; there are 2201 (A2, A3) and 3510 (950)")
        if cores is not None and not 1 <= cores <= ARCHES[arch].cores:
            raise KernelError(f"{self.definition.type}: {cores} vector cores; {arch} has 1 to {ARCHES[arch].cores}")
        listed = self._listed(inputs)
        numbers = self._numbers(attrs or {})
        given = self._given(listed)
        values = (ctypes.c_double * max(1, len(numbers)))(*numbers)
        made = (_Made * len(self.definition.outputs))()
        if self._host.twin_infer(given, len(given), values, len(numbers), made):
            raise KernelError(f"{self.definition.type}: shape inference refuses {_shapes(inputs)}")
        tiling = _Tiling()
        cores = ARCHES[arch].cores if cores is None else cores
        ub = ctypes.c_uint64(ARCHES[arch].ub)
        if self._host.twin_tile(given, len(given), values, len(numbers), cores, ub, ctypes.byref(tiling)):
            raise KernelError(f"{self.definition.type}: tiling refuses {_shapes(inputs)}")
        outputs = self._outputs(listed, made)
        counters = Counters.of(*self._launch(listed, outputs, tiling, arch, nobody or {}))
        return Run(outputs, counters, tiling.cores)

    def _listed(self, inputs: Mapping[str, Any]) -> dict[str, list[Tensor]]:
        """The tensors of every input of the prototype, in its order."""
        names = [p.name for p in self.definition.inputs]
        if unknown := set(inputs) - set(names):
            raise KernelError(f"{self.definition.type} has no input {min(unknown)!r}; it takes {', '.join(names)}")
        listed = {}
        for parameter in self.definition.inputs:
            value = inputs.get(parameter.name)
            tensors = [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]
            if not tensors and parameter.kind != "optional":
                raise KernelError(f"{self.definition.type}: input {parameter.name!r} is missing")
            for t in tensors:
                self._check(parameter, t)
            listed[parameter.name] = tensors
        self._check_combination(listed)
        return listed

    def _check(self, parameter: Parameter, t: Any) -> None:
        """Raises KernelError where a tensor can be no input of this name."""
        where = f"{self.definition.type}: {parameter.name} is"
        if not isinstance(t, Tensor) or t.device.type != "cpu":
            found = f"on {t.device}" if isinstance(t, Tensor) else type(t).__name__
            raise KernelError(f"{where} {found}; expected a CPU tensor")
        if _name(t.dtype) not in parameter.types:
            wanted = ", ".join(dict.fromkeys(parameter.types))
            raise KernelError(f"{where} {_name(t.dtype)}; expected one of {wanted}")
        if t.ndim > MOST_DIMS:
            raise KernelError(f"{where} {list(t.shape)}; expected at most {MOST_DIMS} dimensions")
        if not t.is_contiguous():
            raise KernelError(f"{where} strided {list(t.stride())}; expected contiguous elements: call contiguous()")

    def _check_combination(self, listed: Mapping[str, list[Tensor]]) -> None:
        """Raises KernelError where no column of the definition has these dtypes: no kernel is built for them."""
        declared = {p.name: p.types for p in self.definition.inputs if listed[p.name]}
        given = {name: {_name(t.dtype) for t in listed[name]} for name in declared}
        columns = list(zip(*declared.values(), strict=True))
        if list(given.values()) not in [[{kind} for kind in column] for column in columns]:
            said = ", ".join(f"{name} {' and '.join(sorted(kinds))}" for name, kinds in given.items())
            wanted = "; ".join(dict.fromkeys(", ".join(column) for column in columns))
            raise KernelError(f"{self.definition.type}: no combination has {said}; there are {wanted}")

    def _numbers(self, attrs: Mapping[str, float | int | bool]) -> list[float]:
        names = [a.name for a in self.definition.attrs]
        if unknown := set(attrs) - set(names):
            raise KernelError(f"{self.definition.type} has no attribute {min(unknown)!r}; it has {', '.join(names)}")
        numbers = []
        for a in self.definition.attrs:
            value = attrs.get(a.name, a.default)
            if value is None:
                raise KernelError(f"{self.definition.type}: attribute {a.name!r} is missing")
            numbers.append(float(value))
        return numbers

    def _given(self, listed: dict[str, list[Tensor]]) -> Any:
        rows = [
            _Given(i, _CODES[t.dtype], t.ndim, (ctypes.c_int64 * MOST_DIMS)(*t.shape))
            for i, tensors in enumerate(listed.values())
            for t in tensors
        ]
        return (_Given * len(rows))(*rows)

    def _outputs(self, listed: dict[str, list[Tensor]], made: Any) -> dict[str, Tensor]:
        outputs = {}
        for parameter, m in zip(self.definition.outputs, made, strict=True):
            shape, dtype = list(m.dims[: m.rank]), _DTYPES[m.type]
            if parameter.name in listed:
                outputs[parameter.name] = listed[parameter.name][0].clone()
            else:
                outputs[parameter.name] = torch.empty(shape, dtype=dtype)
        return outputs

    def _launch(
        self,
        listed: dict[str, list[Tensor]],
        outputs: dict[str, Tensor],
        tiling: _Tiling,
        arch: int,
        nobody: Mapping[str, int],
    ) -> tuple[list[CoreCounters], int]:
        tensors, arguments, lists = [], [], []
        for parameter in self.definition.inputs:
            here = [outputs[parameter.name]] if parameter.name in outputs else listed[parameter.name]
            for i, t in enumerate(here):
                name = f"{parameter.name}{i}" if parameter.kind == "dynamic" else parameter.name
                free = nobody.get(parameter.name, 0) * (t.nbytes // len(t) if t.ndim else 0)
                tensors.append((name, t.data_ptr(), t.nbytes, True, free, False))
            if parameter.kind == "dynamic":
                lists.append((ctypes.c_uint64 * (len(here) + 1))(len(here), *(t.data_ptr() for t in here)))
                arguments.append(ctypes.addressof(lists[-1]))
            else:
                arguments.append(here[0].data_ptr() if here else 0)
        for name, t in outputs.items():
            if name not in listed:
                tensors.append((name, t.data_ptr(), t.nbytes, False, 0, False))
            arguments.append(t.data_ptr())
        workspace = torch.empty(tiling.workspace, dtype=torch.uint8)
        if len(workspace):  # its first bytes are the framework's: a kernel that touches them is refused
            own = max(0, len(workspace) - LIBRARY_WORKSPACE)
            tensors.append(("workspace", workspace.data_ptr() + LIBRARY_WORKSPACE, own, False, 0, True))
        arguments += [workspace.data_ptr(), ctypes.addressof(tiling) + _Tiling.data.offset]
        try:
            return run_library(self._library(listed, outputs, arch), tensors, arguments, tiling.cores)
        except KernelError as error:
            raise KernelError(f"{self.definition.type} on {arch}: {error}") from None

    def _library(self, listed: dict[str, list[Tensor]], outputs: dict[str, Tensor], arch: int) -> ctypes.CDLL:
        types = {f"DTYPE_{name.upper()}": _C_NAMES[t[0].dtype] for name, t in listed.items() if t}
        types |= {f"DTYPE_{name.upper()}": _C_NAMES[t.dtype] for name, t in outputs.items()}
        types |= self.defines
        key = (arch, *sorted(types.items()))
        if key not in self._built:
            kernel, common = self.folder / "op_kernel", FOLDER / "common"
            text = f'#include "{self.name}.cpp"\n#define TWIN_KERNEL {self.name}\n#include "twin/launch.h"\n'
            include = [
                kernel,
                kernel / ("arch22" if arch == 2201 else "arch35"),
                common / "op_kernel",
                TWIN / "include",
            ]
            defines = {"__NPU_ARCH__": str(arch), **types}
            self._built[key] = library(text, defines, include, [kernel, common], self.cache)
        return self._built[key]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shapes(inputs: Mapping[str, Any]) -> str:
    def one(value: Any) -> str:
        return f"{len(value)} x {list(value[0].shape)}" if isinstance(value, (list, tuple)) else f"{list(value.shape)}"

    return ", ".join(f"{name} {one(value)}" for name, value in inputs.items() if value is not None)
