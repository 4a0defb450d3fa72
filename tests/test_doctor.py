"""`kimi-graph doctor`: it looks at machines that are broken in the ways that happen, each made in a folder here."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kimi_graph import doctor
from kimi_graph.compile import torchair_host
from kimi_graph.doctor import FAULT, NOTE, OK, Torch

ROOT = Path(doctor.__file__).resolve().parent.parent


def run(folder, *arguments):
    """doctor in a process of its own, before whose packages those of `folder` are found."""
    environment = {k: v for k, v in os.environ.items() if k != doctor.AUTOLOAD and not k.startswith("ASCEND")}
    done = subprocess.run(
        [sys.executable, "-m", "kimi_graph", "doctor", *arguments],
        env=environment | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done


def distribution(folder, name, release, entry_points=""):
    info = folder / f"{name.replace('-', '_')}-{release}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}\n")
    (info / "entry_points.txt").write_text(entry_points)


def test_a_torch_npu_without_cann_is_found_though_every_import_of_torch_fails(tmp_path):
    distribution(tmp_path, "torch-npu", "2.13.0", "[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    (tmp_path / "torch_npu").mkdir()
    (tmp_path / "torch_npu" / "__init__.py").write_text(
        "raise ImportError('libhccl.so: cannot open shared object file')\n"
    )
    done = run(tmp_path, "--json")
    found = json.loads(done.stdout)
    trap = next(f for f in found["findings"] if f["name"] == "torch-npu")
    assert (done.returncode, found["passed"], trap["state"]) == (1, False, FAULT)
    assert "2.13.0 and CANN is not here: `import torch` fails: " in trap["found"]
    assert trap["remedy"].startswith("pip uninstall torch-npu; or export TORCH_DEVICE_BACKEND_AUTOLOAD=0")
    works = {a["what"]: a["works"] for a in found["abilities"]}
    assert works["graphs"] and works["proof"] and not works["library"]


def test_a_torch_that_cannot_be_imported_is_a_fault_and_the_report_is_whole(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('libgomp.so.1: cannot open shared object file')\n")
    done = run(tmp_path)
    assert done.returncode == 1
    assert "cannot be imported: OSError: libgomp.so.1" in " ".join(done.stdout.split())
    assert done.stderr.startswith("error: torch: ")
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert "no    graphs" in done.stdout


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A cache that holds a torchair of two files, which is the pinned one."""
    monkeypatch.setattr(torchair_host, "installed", lambda: None)
    root = tmp_path / "torchair" / "files"
    root.mkdir(parents=True)
    for name in ("a.py", "b.py"):
        (root / name).write_text("x = 1\n")
    monkeypatch.setattr(torchair_host, "SHA256", torchair_host.digest_of(root))
    root.rename(torchair_host.kept_in(tmp_path))
    return tmp_path


def test_torchair_in_the_cache_is_held_against_its_hash(kept):
    assert doctor.torchair(kept).state == OK
    (torchair_host.kept_in(kept) / "b.py").write_text("x = 2\n")
    bad = doctor.torchair(kept)
    assert bad.state == FAULT and "expected" in bad.found and "delete" in bad.remedy
    shutil.rmtree(torchair_host.kept_in(kept))
    gone = doctor.torchair(kept)
    assert gone.state == NOTE and "44 MB" in gone.found and "--torch-npu-wheel" in gone.remedy


def test_cann_is_where_its_environment_says(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "CANN_PLACES", ())
    assert doctor.find_cann({}) is None
    home = tmp_path / "cann"
    home.mkdir()
    (home / "version.cfg").write_text("# x\nruntime_running_version=[9.2.0.1:CANN-9.2]\n")
    found = doctor._cann(doctor.find_cann({"ASCEND_HOME_PATH": str(home)}))
    assert found.state == OK and found.found == f"9.2.0.1 at {home}"


def test_a_library_that_is_missing_or_too_old_is_a_fault_with_the_command_that_mends_it(monkeypatch):
    have = {**dict.fromkeys(doctor.NEEDED, "9.0"), "torch": "2.9.1", "numpy": None}
    monkeypatch.setattr(doctor, "version_of", have.get)
    monkeypatch.setattr(doctor, "_wanted", lambda: {"torch": "<2.15,>=2.10", "numpy": ">=1.26"})
    faults = {f.name: (f.found, f.remedy) for f in doctor._requirements(Torch()) if f.state == FAULT}
    assert faults == {
        "torch": ("2.9.1, expected <2.15,>=2.10", "pip install 'torch<2.15,>=2.10'"),
        "numpy": ("not installed", "pip install 'numpy>=1.26'"),
    }


def test_a_place_that_cannot_be_written_is_named_with_the_option_that_chooses_another(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *a: False)
    cache, here = doctor._disk("cache", tmp_path / "not" / "there"), doctor._disk("here", tmp_path)
    assert (cache.state, here.state) == (FAULT, NOTE)
    assert "KIMI_GRAPH_CACHE" in cache.remedy and "-o DIR" in here.remedy
