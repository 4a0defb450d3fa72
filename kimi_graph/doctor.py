"""`kimi-graph doctor`: what is installed here, what works with it and what does not, each with its remedy.

Nothing that may be broken is imported: releases are read from metadata, and torch is tried in a process of its own.
"""

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import kimi_graph

from ._links import LINKED
from .compile import torchair_host
from .compile.wrap import wrapped

OK, NOTE, FAULT = "ok", "-", "FAULT"
NEEDED = ("torch", "numpy", "protobuf", "safetensors", "einops", "packaging", "rich", "typer", "typing-extensions")
CANN_HOMES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
CANN_PLACES = ("/usr/local/Ascend/cann", "/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/latest")
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
COMPILE_MEMORY = 10**9  # bytes: the 48B preset peaks at 0.40 GB, and torch and the system want some too
BUNDLE_BYTES = 10**9  # bytes of a disk: bundles of presets are some 10 MB, a fixture's with weights 100 MB
SECONDS = 120  # that importing torch may take


@dataclass(frozen=True)
class Finding:
    """What was looked at. `state`: OK, NOTE (missing, and only some things need it) or FAULT (the basics need it)."""

    name: str
    state: str
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Ability:
    """Something that may be done here. `lacks`: what is missing for it, and the remedy; empty: it works."""

    what: str
    commands: str
    lacks: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """Findings, and what follows from them."""

    findings: tuple[Finding, ...]
    abilities: tuple[Ability, ...]

    @property
    def faults(self) -> tuple[Finding, ...]:
        """What keeps something from working here."""
        return tuple(f for f in self.findings if f.state == FAULT)

    @property
    def passed(self) -> bool:
        return not self.faults

    @property
    def summary(self) -> str:
        if self.faults:
            return "; ".join(f"{f.name}: {f.found}" for f in self.faults) + ". " + self.faults[0].remedy
        works = sum(not a.lacks for a in self.abilities)
        return f"what the basic commands need is here; of {len(self.abilities)} uses {works} work, as tried"

    def text(self) -> str:
        lines = []
        for f in self.findings:
            lines += wrapped(f"{f.state:<6}{f.name:<14}", f.found)
            lines += wrapped(" " * 20, f"-> {f.remedy}", " " * 23) if f.remedy else []
        lines += ["", "what works here"]
        for a in self.abilities:
            lines += wrapped(f"{'no' if a.lacks else 'yes':<6}{a.what:<14}", a.commands)
            lines += wrapped(" " * 20, f"-> {a.lacks}", " " * 23) if a.lacks else []
        return "\n".join(lines)

    def to_json(self) -> Any:
        return {
            "passed": self.passed,
            "findings": [asdict(f) for f in self.findings],
            "abilities": [{**asdict(a), "works": not a.lacks} for a in self.abilities],
        }


@dataclass(frozen=True)
class Torch:
    """What a process says that imports torch. `error`: why it cannot; `autoload`: why not as other programs do it."""

    error: str = ""
    autoload: str = ""
    gpu: str = ""


def diagnose(cache: Path, environ: Mapping[str, str]) -> Diagnosis:
    """Look at this machine.

    Args:
        cache: folder of fetched files.
        environ: of the command line; processes that try torch get it too.
    """
    torch, cann = try_torch(environ), find_cann(environ)
    findings = (
        _python(),
        _package(),
        *_requirements(torch),
        torch_npu(torch, cann),
        torchair(cache),
        _cann(cann),
        _devices(torch),
        *(_disk(what, folder) for what, folder in (("cache", cache), ("here", Path.cwd()))),
        _memory(),
    )
    return Diagnosis(findings, tuple(_abilities({f.name: f for f in findings}, torch)))


# ---- what is here ----------------------------------------------------------------------------------------------------


def _python() -> Finding:
    venv = "in an environment of its own" if sys.prefix != sys.base_prefix else "the system's"
    found = (
        f"{platform.python_version()}, {venv}: {sys.executable}; {platform.platform(terse=True)} {platform.machine()}"
    )
    return Finding("python", OK, found)


def _package() -> Finding:
    folder = Path(kimi_graph.__file__).parent
    links = [name for name in LINKED if (folder / name).is_symlink()]
    kind = f"a clone, whose links {', '.join(links)} lead to folders" if links else "an installed copy, without links"
    return Finding("kimi-graph", OK, f"{kimi_graph.__version__}, {kind}: {folder.parent}")


def _requirements(torch: Torch) -> Iterator[Finding]:
    """Releases of what kimi-graph depends on, and whether torch can be imported."""
    wanted, others = _wanted(), []
    for name in NEEDED:
        have, want = version_of(name), wanted.get(name, "")
        if have is None:
            yield Finding(name, FAULT, "not installed", f"pip install '{name}{want}'")
        elif want and not _within(have, want):
            yield Finding(name, FAULT, f"{have}, expected {want}", f"pip install '{name}{want}'")
        elif name == "torch":
            yield _torch(have, torch)
        else:
            others.append(f"{name} {have}")
    yield Finding("libraries", OK, ", ".join(others))


def _torch(have: str, torch: Torch) -> Finding:
    if torch.error:
        remedy = "it is installed and cannot be imported: install it again, `pip install --force-reinstall torch`"
        return Finding("torch", FAULT, f"{have}, cannot be imported: {torch.error}", remedy)
    return Finding("torch", OK, f"{have}, imports" + (f", sees {torch.gpu}" if torch.gpu else ", no GPU"))


def _wanted() -> dict[str, str]:
    """Ranges of releases by distribution, as the installed metadata has them; none in a bare source tree."""
    try:
        lines = importlib.metadata.requires("kimi-graph") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    found = (re.match(r"([\w-]+)\s*(.*)", line) for line in lines if "extra ==" not in line)
    return {m[1]: m[2] for m in found if m}


def _within(have: str, wanted: str) -> bool:
    try:
        from packaging.specifiers import SpecifierSet
    except ImportError:
        return True  # said of packaging itself
    return SpecifierSet(wanted).contains(have, prereleases=True)


def version_of(name: str) -> str | None:
    """Of an installed distribution, from its metadata; None where there is none."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def try_torch(environ: Mapping[str, str]) -> Torch:
    """Import torch in a process: as kimi-graph does, and where torch-npu is installed also as everybody else does."""
    say = "import torch; print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else '')"
    error, gpu = _run(say, {**environ, AUTOLOAD: "0"})
    autoload = ""
    if not error and version_of("torch-npu") is not None:
        autoload, _ = _run("import torch", {k: v for k, v in environ.items() if k != AUTOLOAD})
    return Torch(error, autoload, gpu)


def _run(code: str, environ: Mapping[str, str]) -> tuple[str, str]:
    """The last line of a Python program's error, empty where it ran; and its output."""
    try:
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=dict(environ), capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"nothing after {SECONDS} s", ""
    if done.returncode == 0:
        return "", done.stdout.strip()
    lines = done.stderr.strip().splitlines()
    return (lines[-1] if lines else f"the process ended with {done.returncode}"), ""


def torch_npu(torch: Torch, cann: Path | None) -> Finding:
    """torch-npu makes every `import torch` load CANN, and fail where there is none."""
    have = version_of("torch-npu")
    if have is None:
        return Finding("torch-npu", OK, "not installed; kimi-graph does not need it")
    if torch.autoload:
        where = "and CANN is not here" if cann is None else f"with CANN at {cann} not set up in this shell"
        remedy = (
            "pip uninstall torch-npu" if cann is None else f"source {cann}/set_env.sh"
        ) + f"; or export {AUTOLOAD}=0, as kimi-graph does for itself"
        return Finding("torch-npu", FAULT, f"{have} {where}: `import torch` fails: {torch.autoload}", remedy)
    return Finding("torch-npu", OK, f"{have}, and `import torch` works with it")


def torchair(cache: Path) -> Finding:
    """The graph converters: of an installed torch-npu, or in the cache."""
    source = torchair_host.installed()
    if source is None:
        root = torchair_host.kept_in(cache)
        if not root.is_dir():
            found = f"not here yet: the first compile fetches torch-npu {torchair_host.VERSION} (44 MB) into {cache}"
            return Finding("torchair", NOTE, found, "without a network, give its wheel as --torch-npu-wheel FILE")
        source = torchair_host.Source(torchair_host.VERSION, f"cache {cache}", root, torchair_host.digest_of(root))
    size = sum(p.stat().st_size for p in source.root.rglob("*") if p.is_file())
    found = f"of torch-npu {source.version}, {source.origin}, {size / 1e6:.0f} MB"
    if source.digest == torchair_host.SHA256:
        return Finding("torchair", OK, f"{found}, its files are those this release was made with")
    if source.origin.startswith("cache"):
        words = f"{found}; its files have SHA-256 {source.digest[:16]}..., expected {torchair_host.SHA256[:16]}..."
        return Finding("torchair", FAULT, words, f"delete {source.root}; the next compile fetches it again")
    words = f"{found}; this release was made with {torchair_host.VERSION}, graphs may differ"
    return Finding("torchair", NOTE, words, f"pass the wheel of {torchair_host.VERSION} as --torch-npu-wheel FILE")


def find_cann(environ: Mapping[str, str]) -> Path | None:
    """Where CANN is: what its set_env.sh says, else a usual place."""
    places = [*(environ[name] for name in CANN_HOMES if environ.get(name)), *CANN_PLACES]
    return next((Path(place) for place in places if Path(place).is_dir()), None)


def _cann(home: Path | None) -> Finding:
    if home is None:
        words = "not here; compile, lint and verify do not need it, hosts with NPUs do"
        return Finding("CANN", NOTE, words, "on a host: install CANN's toolkit and source its set_env.sh")
    return Finding("CANN", OK, f"{_cann_release(home)} at {home}")


def _cann_release(home: Path) -> str:
    for name in ("version.cfg", "version.info", "toolkit/version.info", "compiler/version.info"):
        path = home / name
        if path.is_file() and (m := re.search(r"[Vv]ersion[^\d\n]*(\d[\w.]*)", path.read_text(errors="replace"))):
            return m[1]
    return "a release that does not say which"


def _devices(torch: Torch) -> Finding:
    found = sorted(Path("/dev").glob("davinci[0-9]*")) if Path("/dev").is_dir() else []
    if found:
        return Finding("devices", OK, f"{len(found)} NPUs: {found[0]} to {found[-1].name}")
    return Finding("devices", NOTE, "no NPU; graphs are made and proved without, and run on a host that has them")


def _disk(what: str, folder: Path) -> Finding:
    place = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    free = shutil.disk_usage(place).free
    found = f"{folder}: {free / 1e9:.1f} GB free"
    if not os.access(place, os.W_OK):
        other = "--cache-dir DIR, or KIMI_GRAPH_CACHE" if what == "cache" else "-o DIR"
        state = FAULT if what == "cache" else NOTE
        return Finding(f"disk, {what}", state, f"{found}, not writable", f"choose another place with {other}")
    if free < BUNDLE_BYTES:
        return Finding(f"disk, {what}", NOTE, found, "a compile may not fit: make room")
    return Finding(f"disk, {what}", OK, found)


def _memory() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    have = _available()
    if have is None:
        return Finding("memory", NOTE, f"this system does not say how much is free; {cores} cores")
    found = f"{have / 1e9:.1f} GB available, {cores} cores"
    if have < COMPILE_MEMORY:
        return Finding("memory", NOTE, found, "a compile of the 48B preset takes 0.4 GB, of larger models more")
    return Finding("memory", OK, found)


def _available() -> int | None:
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    found = re.search(r"MemAvailable:\s+(\d+) kB", text)
    return None if found is None else int(found[1]) * 1024


# ---- what works ------------------------------------------------------------------------------------------------------


def _abilities(found: Mapping[str, Finding], torch: Torch) -> Iterator[Ability]:
    faults = [f for f in found.values() if f.state == FAULT]
    basics = "; ".join(f"{f.name}: {f.remedy}" for f in faults if f.name != "torch-npu")
    yield Ability("graphs", "plan, shard, ops, compile, inspect, lint, diff, deploy", basics)
    yield Ability("proof", "fixture, check, weights, verify, bringup as a rehearsal", basics)
    trap = found["torch-npu"]
    yield Ability("library", "import kimi_graph as kg, notebooks, pytest", basics or trap.remedy)
    compiler = shutil.which("g++") or shutil.which("clang++")
    yield Ability("kernels", "verify --kernels twin, tests of kernels", "" if compiler else "install g++ or clang++")
    yield Ability("pictures", "kg.encode_image", _needs("pillow"))
    yield Ability("notebooks", "jupyter lab notebooks", _needs("jupyterlab", "matplotlib", extra="notebooks"))
    yield Ability("tests", "pytest, against transformers", _needs("pytest", "transformers", extra="test"))
    on_host = [found[name].name for name in ("CANN", "devices") if found[name].state != OK]
    lacks = f"{' and '.join(on_host)} not here: on a host with NPUs" if on_host else ""
    yield Ability("NPUs", "bringup --deploy, building the kernels' project", lacks)


def _needs(*names: str, extra: str = "") -> str:
    missing = [name for name in names if version_of(name) is None]
    wanted = f"-e '.[{extra}]'" if extra else " ".join(missing)
    return f"pip install {wanted}" if missing else ""
