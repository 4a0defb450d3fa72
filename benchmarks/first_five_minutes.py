"""From a clone to the first verified bundle, by the README alone: five minutes on two cores, installing included.

A clone of this checkout's last commit, a new virtual environment, then the commands of the README as they stand there:
its first line (install, then the first compile), and those of "Five minutes" (fixture, compile, verify). Nothing of
this machine's user takes part: caches of kimi-graph and of pip are empty, so that the torch-npu wheel is fetched. What
of the time is pip finding and fetching packages is told beside, from the times in its log; it depends on the network.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from tempfile import mkdtemp

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 300.0  # promised


@dataclass(frozen=True)
class Step:
    """A command and its seconds, those of them in which pip looked for packages and fetched them, and its last line."""

    command: str
    seconds: float
    fetching: float
    end: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", action="store_true", help="leave the clone and its environment where they are")
    keep = parser.parse_args().keep
    folder = Path(mkdtemp(prefix="first-five-minutes-"))
    try:
        total = report(follow(folder))
    finally:
        if keep:
            print(f"kept {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    sys.exit(total > SECONDS)


def follow(folder: Path) -> Iterator[Step]:
    """All steps, one after another."""
    clone, environment = folder / "kimi-graph", folder / "venv"
    log = folder / "pip.log"
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("KIMI_GRAPH_", "PYTHON", "VIRTUAL_ENV"))}
    environ |= {
        "PATH": f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "KIMI_GRAPH_CACHE": str(folder / "cache"),
        "PIP_NO_CACHE_DIR": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_PROGRESS_BAR": "off",
        "PIP_LOG": str(log),
    }
    yield run(f"git clone {ROOT} kimi-graph", folder, environ, log)
    start = time.perf_counter()
    venv.create(environment, with_pip=True)
    yield Step("python -m venv", time.perf_counter() - start, 0.0, "")
    for command in commands((clone / "README.md").read_text()):
        yield run(command, clone, environ, log)


def commands(readme: str) -> list[str]:
    """Of the first block and of the first one under "Five minutes"."""
    blocks = re.findall(r"^```bash\n(.*?)^```$", readme, re.M | re.S)
    five = re.findall(r"^## Five minutes$.*?^```bash\n(.*?)^```$", readme, re.M | re.S)
    return [part.strip() for line in (blocks[0] + five[0]).splitlines() for part in line.split("&&")]


def run(command: str, folder: Path, environ: dict[str, str], log: Path) -> Step:
    """One command, which has to end with 0."""
    log.unlink(missing_ok=True)
    start = time.perf_counter()
    done = subprocess.run(["bash", "-c", command], cwd=folder, env=environ, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(f"failed: {command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    said = done.stdout.split("\n") if done.stdout.strip() else [""]
    return Step(command, seconds, fetching(log), next((line for line in reversed(said) if line.strip()), ""))


def fetching(log: Path) -> float:
    """Seconds from pip's first line to where it begins to install what it has, or to its last line."""
    if not log.exists():
        return 0.0
    times = re.findall(r"^(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d,\d{3})(.*)$", log.read_text(errors="replace"), re.M)
    installs = [t for t, line in times if "Installing collected packages" in line]  # the first ones: to build us
    until = installs[-1] if installs else times[-1][0]
    first, last = (datetime.strptime(t, "%Y-%m-%dT%H:%M:%S,%f") for t in (times[0][0], until))
    return (last - first).total_seconds()


def report(steps: Iterator[Step]) -> float:
    """Prints a line for each step as it ends, and the total, which it gives."""
    total = fetched = 0.0
    for step in steps:
        beside = f", of it {step.fetching:.1f} s finding and fetching packages" if step.fetching else ""
        print(f"{step.seconds:7.1f} s  {step.command}{beside}")
        if step.end and not step.command.startswith(("pip", "git")):
            print(f"           {step.end}")
        total, fetched = total + step.seconds, fetched + step.fetching
        sys.stdout.flush()
    verdict = "within" if total <= SECONDS else "ABOVE"
    rest = f"{total - fetched:.1f} s without finding and fetching packages"
    print(f"{total:7.1f} s  in all, {verdict} {SECONDS:.0f} s; {rest}")
    return total


if __name__ == "__main__":
    main()
