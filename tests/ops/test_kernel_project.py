"""The exported operator project is whole: what it includes is in it or CANN's, and it is what the tests ran."""

import re
import shutil
import subprocess

import pytest

from kimi_graph.errors import KernelError
from kimi_graph.ops.kernel_project import SOCS, export_kernels, type_of
from kimi_graph.ops.twin import FOLDER, compiler, kernels
from kimi_graph.ops.twin.build import TWIN

CANN = ("register/", "tiling/", "graph/", "kernel_operator")  # headers of the development kit


@pytest.fixture
def project(tmp_path):
    return export_kernels(tmp_path / "out").folder


def test_every_operator_is_in_it_with_host_kernel_and_prototype(project):
    for name in kernels():
        assert (project / "op_kernel" / name / f"{name}.cpp").is_file()
        assert (project / "op_graph" / name / f"{name}_proto.h").is_file()
        for part in ("def", "infershape", "tiling"):
            assert f"{name}/{name}_{part}.cpp" in (project / "op_host" / "CMakeLists.txt").read_text()
        assert f"OP_TYPE {type_of(name)} KERNEL_DIR {name}" in (project / "op_kernel" / "CMakeLists.txt").read_text()
    readme = (project / "README.md").read_text()
    assert all(word in readme for word in (*SOCS, *map(type_of, kernels())))


def test_quoted_includes_lead_to_files_of_the_project_or_of_cann(project):
    for path in [*project.rglob("*.h"), *project.rglob("*.cpp")]:
        for target in re.findall(r'#include "([^"]+)"', path.read_text()):
            assert target.startswith(CANN) or (path.parent / target).is_file(), f"{path.name}: {target}"


def test_sources_are_those_of_the_repository_but_for_where_they_include_from(project):
    for path in (FOLDER / "kda_step").rglob("*.cpp"):
        part = path.parent.relative_to(FOLDER / "kda_step")
        assert (project / part / "kda_step" / path.name).read_text() == path.read_text()


@pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler: g++ or clang++")
def test_its_sources_compile_where_they_are(project):
    """Against the twin's headers, without any other folder of the repository, and without a warning."""
    command = [compiler(), "-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Wno-unused-parameter", "-Werror"]
    host = [f"-I{TWIN / 'host'}", *map(str, sorted((project / "op_host" / "kda_step").glob("*.cpp")))]
    subprocess.run([*command, *host], check=True)
    kernel = project / "op_kernel" / "kda_step" / "kda_step.cpp"
    defines = ["-D__NPU_ARCH__=3510", "-DDTYPE_Q=half", "-DDTYPE_DECAY=half", f"-I{TWIN / 'include'}"]
    subprocess.run([*command, *defines, str(kernel)], check=True)


def test_an_export_replaces_an_export_and_nothing_else(project, tmp_path):
    with pytest.raises(KernelError, match="is an export already; replace it with --overwrite"):
        export_kernels(project)
    assert export_kernels(project, overwrite=True).operators == tuple(map(type_of, kernels()))
    shutil.rmtree(project / "op_host")
    (project / "CMakeLists.txt").write_text("project(other)\n")
    (tmp_path / "file").write_text("")
    with pytest.raises(KernelError, match="file: is a file; expected a folder"):
        export_kernels(tmp_path / "file", overwrite=True)
    with pytest.raises(KernelError, match="holds something else; choose another folder"):
        export_kernels(project, overwrite=True)


@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake")
def test_cmake_reads_the_lists_up_to_what_cann_brings(project, tmp_path):
    """With stand-ins that note how the functions of CANN's build are called."""
    (tmp_path / "ASCConfig.cmake").write_text(
        "".join(
            f"function({name})\n  message(STATUS \"called {name} ${{ARGN}}\")\nendfunction()\n"
            for name in (
                "npu_op_package", "npu_op_code_gen", "npu_op_library", "npu_op_package_add", "npu_op_kernel_sources",
                "npu_op_kernel_library",
            )
        )
    )  # fmt: skip
    command = ["cmake", "-S", str(project), "-B", str(tmp_path / "build"), f"-DASC_DIR={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    called = re.findall(r"called (npu_op_kernel_sources .*)", done.stdout)
    assert len(called) == len(kernels())
    for line in called:
        _, _, _, _, folder, _, file = line.split(";")
        assert (project / "op_kernel" / folder / file).is_file()
    hosts = {str(path) for path in (project / "op_host").rglob("*.cpp")}
    for function in ("npu_op_code_gen SRC;", "npu_op_library cust_optiling;TILING;"):
        listed = re.search(f"called {function}(.*)", done.stdout)[1].split(";")
        # make compiles definitions, from another folder: a path has to be whole
        assert {path for path in listed if path.endswith(".cpp")} == hosts
    assert "COMPILE_OPTIONS;-std=c++17" in done.stdout  # CANN's own default is C++11
