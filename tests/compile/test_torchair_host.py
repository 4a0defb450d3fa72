import importlib.metadata
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from kimi_graph.compile import torchair_host
from kimi_graph.errors import CompileError

FOLDER = "torch_npu/dynamo/torchair/"


def make_wheel(path: Path, files: dict[str, str], version: str = "2.99.0") -> Path:
    with zipfile.ZipFile(path / f"torch_npu-{version}-cp311-cp311-manylinux_2_28_x86_64.whl", "w") as archive:
        archive.writestr(f"torch_npu-{version}.dist-info/METADATA", "Name: torch-npu")
        archive.writestr(f"torch_npu-{version}.dist-info/licenses/LICENSE", "BSD")
        archive.writestr("torch_npu/__init__.py", "raise ImportError('libhccl.so')")
        for name, text in files.items():
            archive.writestr(FOLDER + name, text)
    return Path(str(archive.filename))


@pytest.fixture
def wheel(tmp_path) -> Path:
    return make_wheel(tmp_path, {"__init__.py": "x = 1\n", "ge/attr.py": "y = 2\n", "core/_torchair.so": "native"})


@pytest.fixture
def nothing_installed(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)


def names(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}


# ---- finding the files ----


def test_only_python_files_and_the_licence_are_unpacked(tmp_path, wheel):
    source = torchair_host.find(wheel, tmp_path / "cache")
    assert names(source.root) == {"__init__.py", "ge/attr.py", "LICENSE"}
    assert source.version == "2.99.0"
    assert source.root.is_relative_to(tmp_path / "cache")


def test_a_wheel_is_unpacked_once_and_equal_contents_share_a_folder(tmp_path, wheel):
    first = torchair_host.find(wheel, tmp_path / "cache").root
    (first / "mark").touch()
    assert torchair_host.find(wheel, tmp_path / "cache").root == first
    assert (first / "mark").exists()


def test_a_changed_file_gives_another_folder(tmp_path, wheel):
    first = torchair_host.find(wheel, tmp_path / "cache")
    other = torchair_host.find(make_wheel(tmp_path, {"__init__.py": "x = 2\n"}), tmp_path / "cache")
    assert (first.root, first.digest) != (other.root, other.digest)


def test_processes_that_unpack_at_once_do_not_disturb_each_other(tmp_path, wheel):
    roots, errors = [], []

    def unpack():
        try:
            roots.append(torchair_host.find(wheel, tmp_path / "cache").root)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=unpack) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert errors == []
    assert len(set(roots)) == 1
    assert names(tmp_path / "cache") == {f"torchair/{roots[0].name}/{n}" for n in names(roots[0])}


def test_a_path_that_leaves_the_folder_is_not_unpacked(tmp_path):
    wheel = make_wheel(tmp_path, {"../../../../evil.py": "", "__init__.py": ""})
    torchair_host.find(wheel, tmp_path / "cache")
    assert not list(tmp_path.rglob("evil.py"))


@pytest.mark.parametrize("content", [b"", b"no zip"], ids=repr)
def test_a_file_that_is_no_wheel_is_refused(tmp_path, content):
    (tmp_path / "a.whl").write_bytes(content)
    with pytest.raises(CompileError, match=r"a\.whl: not a wheel that can be read"):
        torchair_host.find(tmp_path / "a.whl", tmp_path / "cache")
    with pytest.raises(CompileError, match="not a wheel that can be read"):
        torchair_host.find(tmp_path / "missing.whl", tmp_path / "cache")


def test_a_wheel_without_torchair_is_refused(tmp_path):
    with pytest.raises(CompileError, match="not a torch-npu wheel with torchair in it"):
        torchair_host.find(make_wheel(tmp_path, {}), tmp_path / "cache")


def test_a_cache_that_cannot_be_written_is_named(tmp_path, wheel):
    (tmp_path / "file").touch()
    with pytest.raises(CompileError, match="file/cache: no cache can be kept there"):
        torchair_host.find(wheel, tmp_path / "file/cache")


def test_the_files_of_an_installed_torch_npu_are_used_before_the_cache(tmp_path, monkeypatch):
    class Installed:
        version = "2.98.0"

        def locate_file(self, name):
            return tmp_path / name

    (tmp_path / FOLDER).mkdir(parents=True)
    (tmp_path / FOLDER / "__init__.py").write_text("x = 1\n")
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Installed())
    source = torchair_host.find(None, tmp_path / "cache")
    assert (source.version, source.root) == ("2.98.0", tmp_path / FOLDER)
    assert "torch_npu" not in sys.modules


@pytest.mark.usefixtures("nothing_installed")
def test_a_download_that_fails_says_how_to_do_without_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1))
    said = []
    with pytest.raises(CompileError, match="--torch-npu-wheel PATH"):
        torchair_host.find(None, tmp_path / "cache", said.append)
    assert "downloaded once" in said[0]
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.usefixtures("nothing_installed")
def test_a_download_that_is_not_the_pinned_one_is_refused(tmp_path, monkeypatch):
    def fake(command, **_):
        make_wheel(Path(command[-1]), {"__init__.py": "x = 1\n"}, torchair_host.VERSION)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", fake)
    with pytest.raises(CompileError, match=f"expected {torchair_host.SHA256}"):
        torchair_host.find(None, tmp_path / "cache", lambda line: None)
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.usefixtures("nothing_installed")
def test_what_was_downloaded_before_is_used_without_asking_pip(tmp_path, monkeypatch):
    def fake(command, **_):
        make_wheel(Path(command[-1]), {"__init__.py": "x = 1\n"}, torchair_host.VERSION)
        return subprocess.CompletedProcess(command, 0)

    digest = torchair_host.find(make_wheel(tmp_path, {"__init__.py": "x = 1\n"}), tmp_path / "other").digest
    monkeypatch.setattr(torchair_host, "SHA256", digest)
    monkeypatch.setattr(subprocess, "run", fake)
    first = torchair_host.find(None, tmp_path / "cache", lambda line: None)
    monkeypatch.setattr(subprocess, "run", None)
    assert torchair_host.find(None, tmp_path / "cache", pytest.fail) == first


def test_the_download_asks_for_the_same_file_on_every_machine():
    asked = " ".join(torchair_host.PIP_DOWNLOAD)
    assert "--platform manylinux_2_28_x86_64" in asked
    assert "--python-version 3.11" in asked
    assert "://" not in asked


def test_the_cache_is_where_the_platform_keeps_caches(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    assert torchair_host.default_cache({"XDG_CACHE_HOME": "/x"}) == Path("/x/kimi-graph")
    assert torchair_host.default_cache() == Path.home() / ".cache/kimi-graph"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert torchair_host.default_cache() == Path.home() / "Library/Caches/kimi-graph"
    monkeypatch.setattr(sys, "platform", "win32")
    assert torchair_host.default_cache({"LOCALAPPDATA": "/l"}) == Path("/l/kimi-graph")


# ---- importing ----


def test_a_process_holds_one_torchair(host, wheel):
    assert torchair_host.load() is host
    with pytest.raises(CompileError, match="a process holds one torchair"):
        torchair_host.load(wheel)


def test_importing_leaves_the_process_as_it_was(host):
    assert host.pinned
    assert logging.getLoggerClass() is logging.Logger
    assert logging.getLogger("torchair").handlers == []
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert "torchair" not in getattr(signal.getsignal(signal.SIGINT), "__module__", "")
    assert not [f for f in sys.meta_path if type(f).__module__ == torchair_host.__name__]


def run(code: str, *args: object, **environ: str) -> subprocess.CompletedProcess[str]:
    """A process of its own, with this test's kimi_graph and cache."""
    import kimi_graph

    path = os.pathsep.join([str(Path(kimi_graph.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environ}
    return subprocess.run([sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True, env=env)


def test_a_fresh_process_imports_no_torch_npu_no_library_of_it_and_no_inductor_lowerings(host):
    code = """if True:
        import json, sys
        from kimi_graph.compile import torchair_host
        torchair_host.load(cache=sys.argv[1])
        maps = open("/proc/self/maps").read() if sys.platform == "linux" else ""
        unwanted = ["torch_npu", "torch._inductor.lowering", "torchair.npu_fx_compiler"]
        print(json.dumps({
            "modules": [m for m in unwanted if m in sys.modules],
            "libraries": [l.split()[-1] for l in maps.splitlines() if "hccl" in l or "torch_npu" in l],
        }))
    """
    done = run(code, host.root.parents[1])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"modules": [], "libraries": []}
    assert "FinalizeGraphEngine" not in done.stderr  # the stand-in has none: at exit nobody must ask for it


def test_files_are_compiled_once_even_where_python_is_told_not_to(tmp_path):
    files = {f"m{i}.py": f"x = {i}\n" for i in range(3)} | {torchair_host._LARGEST: "y = 1\n"}
    root = torchair_host.find(make_wheel(tmp_path, files), tmp_path / "cache").root
    said = []
    torchair_host._write_bytecode(root, said.append)
    torchair_host._write_bytecode(root, said.append)
    assert len(said) == 1
    assert len(list(root.rglob("*.pyc"))) == 4


def test_a_torchair_that_does_not_import_is_an_error_and_leaves_no_modules(tmp_path, monkeypatch):
    wheel = make_wheel(tmp_path, {"ge/_ge_graph.py": "import surely_not_there\n", torchair_host._LARGEST: ""})
    code = """if True:
        import sys
        from kimi_graph.compile import torchair_host
        from kimi_graph.errors import CompileError
        try:
            torchair_host.load(sys.argv[1], cache=sys.argv[2])
        except CompileError as error:
            print(error)
        print([m for m in sys.modules if m.startswith("torchair")])
    """
    done = run(code, wheel, tmp_path / "cache")
    message, modules = done.stdout.splitlines()
    assert "torchair of torch-npu 2.99.0" in message
    assert "cannot be imported beside torch" in message
    assert "surely_not_there" in message
    assert modules == "[]"
    assert "is not the one this release was made with" in done.stderr


def test_an_imported_torch_npu_is_used_for_real(tmp_path, host):
    """With a stand-in for CANN's library where the real one would be."""
    (tmp_path / "torch_npu/dynamo").mkdir(parents=True)
    (tmp_path / "torch_npu/__init__.py").write_text("__version__ = '2.13.0'\n")
    (tmp_path / "torch_npu/dynamo/torchair").symlink_to(host.root)
    code = """if True:
        import sys
        import torch_npu
        from kimi_graph.compile import torchair_host
        sys.modules["torchair.core._torchair"] = torchair_host._stand_in()
        host = torchair_host.load("unused.whl")
        print(host.real, host.version, host.pinned, host.root)
    """
    done = run(code, PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]))
    assert done.stdout.split() == ["True", "2.13.0", "True", f"{tmp_path}/torch_npu/dynamo/torchair"], done.stderr


def test_a_foreign_torchair_is_not_touched(tmp_path):
    (tmp_path / "torchair").mkdir()
    (tmp_path / "torchair/__init__.py").touch()
    code = """if True:
        import torchair
        from kimi_graph.compile import torchair_host
        from kimi_graph.errors import CompileError
        try:
            torchair_host.load()
        except CompileError as error:
            print(error)
    """
    done = run(code, PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]))
    assert "already imported from" in done.stdout, done.stderr
