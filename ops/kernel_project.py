"""The operator project that a machine with CANN builds our kernels from: their sources, CMake lists, the commands.

The same sources give the same bytes: `kimi-graph kernels export` writes them, and so does a bundle that needs them.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kimi_graph.errors import KernelError
from kimi_graph.files import check_writable, new_folder

from .twin.kernel import FOLDER, kernels

MARK = "kimi_graph_kernels"  # name of the CMake project: an export may replace an export, nothing else
VENDOR = "kimi_graph"
SOCS = ("ascend910b", "ascend910_93", "ascend950")

_TOP = f"""\
cmake_minimum_required(VERSION 3.16)
project({MARK})
find_package(ASC REQUIRED HINTS $ENV{{ASCEND_HOME_PATH}}/compiler/tikcpp/ascendc_kernel_cmake)

set(CMAKE_CXX_STANDARD 17)
if(NOT DEFINED ASCEND_COMPUTE_UNIT)
  set(ASCEND_COMPUTE_UNIT {" ".join(SOCS)})
endif()
set(package_name {VENDOR})  # the vendor: no other package's operators are replaced

npu_op_package(${{package_name}} TYPE RUN CONFIG INSTALL_PATH ${{CMAKE_BINARY_DIR}})
add_subdirectory(op_host)
add_subdirectory(op_kernel)
"""

_HOST = """\
set(sources  # whole paths: definitions are compiled by make, from another folder
{sources}
)
npu_op_code_gen(SRC ${{sources}} PACKAGE ${{package_name}} OUT_DIR ${{ASCEND_AUTOGEN_PATH}} COMPILE_OPTIONS -std=c++17)
file(GLOB aclnn ${{ASCEND_AUTOGEN_PATH}}/aclnn_*.cpp)
file(GLOB proto ${{ASCEND_AUTOGEN_PATH}}/op_proto.cc)
set_source_files_properties(${{aclnn}} ${{proto}} PROPERTIES GENERATED TRUE)

npu_op_library(cust_optiling TILING ${{sources}})
npu_op_library(cust_opapi ACLNN ${{aclnn}})
npu_op_library(cust_op_proto GRAPH ${{sources}} ${{proto}})
npu_op_package_add(${{package_name}} LIBRARY cust_optiling cust_opapi cust_op_proto)
"""

_KERNEL = """\
{sources}
npu_op_kernel_library(ascendc_kernels SRC_BASE ${{CMAKE_CURRENT_SOURCE_DIR}} TILING_LIBRARY cust_optiling)
npu_op_package_add(${{package_name}} LIBRARY ascendc_kernels)
"""

_README = """\
# Operators of kimi-graph: {names}

Ascend C sources and the project that builds them into one package, vendor `{vendor}`. They were written without a
device: a CPU twin runs them, and nobody has run them on an NPU. A deployment should have one operator package: two that
bring an operator of one name, or one vendor, replace each other.

On a machine with CANN (its development kit, CMake 3.16 or newer), in this folder:

```bash
{commands}
```

`{soc}` is A3, `{a2}` A2, `{a5}` 950. The last line installs into $ASCEND_OPP_PATH/vendors, or with
`--install-path=DIR` into another folder: then `source DIR/vendors/{vendor}/bin/set_env.bash` before `atc` and the
program that runs a graph, as both look operators up. `op_graph/` says what the graph's nodes look like; the build makes
its own prototype of the definition.
"""


def commands(soc: str, folder: str = ".") -> tuple[str, ...]:
    """What a machine with CANN runs to build the project in `folder` for a chip, and to install the package."""
    build = "build" if folder == "." else "kernels-build"  # never inside a bundle
    return (
        "source ${ASCEND_HOME_PATH:-/usr/local/Ascend/cann}/set_env.sh",
        f"cmake -S {folder} -B {build} -DASCEND_COMPUTE_UNIT={soc}",
        f"cmake --build {build} --target binary package -j",
        f"./{build}/custom_opp_*.run",
    )


@dataclass(frozen=True)
class Exported:
    """A project: its folder, the operators in it, how many files."""

    folder: Path
    operators: tuple[str, ...]
    files: int


def export_kernels(folder: str | Path, *, overwrite: bool = False) -> Exported:
    """Write the project.

    Args:
        folder: must not exist or be empty.
        overwrite: it may be a project of an earlier export, which is replaced.

    Raises:
        KernelError: something else is there.
    """
    folder = Path(folder)
    _check_place(folder, overwrite)
    files = project_files()
    with new_folder(folder, lambda: _check_place(folder, overwrite)) as work:
        for name, data in files.items():
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            (work / name).write_bytes(data)
    return Exported(folder, operators(), len(files))


def operators() -> tuple[str, ...]:
    """Operator types of the project."""
    return tuple(map(type_of, kernels()))


def project_files() -> dict[str, bytes]:
    """The project: its files' bytes by their paths in it, in the order of the paths."""
    names = kernels()
    texts = {path: text for name in names for path, text in _sources(name)}
    hosts = [
        path.replace("op_host/", "  ${CMAKE_CURRENT_SOURCE_DIR}/", 1)
        for path in sorted(texts)
        if path.startswith("op_host/") and path.endswith(".cpp")
    ]
    kernel_sources = "".join(
        f"npu_op_kernel_sources(ascendc_kernels OP_TYPE {type_of(name)} KERNEL_DIR {name} KERNEL_FILE {name}.cpp)\n"
        for name in names
    )
    words = {"names": ", ".join(operators()), "vendor": VENDOR, "a2": SOCS[0], "soc": SOCS[1], "a5": SOCS[2]}
    texts |= {
        "CMakeLists.txt": _TOP,
        "README.md": _README.format(**words, commands="\n".join(commands(SOCS[1]))),
        "op_host/CMakeLists.txt": _HOST.format(sources="\n".join(hosts)),
        "op_kernel/CMakeLists.txt": _KERNEL.format(sources=kernel_sources),
    }
    return {path: texts[path].encode() for path in sorted(texts)}


def type_of(name: str) -> str:
    """The operator type of a kernel's folder: `kda_step` -> `KdaStep`."""
    return "".join(word.capitalize() for word in name.split("_"))


def _check_place(folder: Path, overwrite: bool) -> None:
    check_writable(folder)
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not folder.is_dir():
        raise KernelError(f"{folder}: is a file; expected a folder, or nothing yet.")
    lists = folder / "CMakeLists.txt"
    if not lists.is_file() or f"project({MARK})" not in lists.read_text():
        raise KernelError(f"{folder}: holds something else; choose another folder.")
    if not overwrite:
        raise KernelError(f"{folder}: is an export already; replace it with --overwrite, or choose another folder.")


def _sources(name: str) -> Iterator[tuple[str, str]]:
    """One operator's files: the build wants parts first, then operators, and every kernel's headers beside it."""
    for part in ("op_host", "op_kernel", "op_graph"):
        own = FOLDER / name / part
        for source in sorted([*own.rglob("*"), *(FOLDER / "common" / part).glob("*")]):
            if source.suffix in (".h", ".cpp"):
                inside = source.relative_to(own).as_posix() if source.is_relative_to(own) else source.name
                text = re.sub(r'#include "\.\./op_kernel/', f'#include "../../op_kernel/{name}/', source.read_text())
                yield f"{part}/{name}/{inside}", text
