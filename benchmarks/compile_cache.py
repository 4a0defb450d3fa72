"""What the cache of `kimi-graph compile` saves: the command with an empty cache against the same command again.

Both sides are the whole command, in processes of their own, in turns: an empty cache (torchair alone is there), then
the same line once more, then with one number changed. Bundles of both sides and of `--no-cache` have to be the same
bytes. A busy machine makes both sides slower: ratios are of CPU time, the time promised is the best round's.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SECONDS, RATIO = 5.0, 2.0  # promised: of a second compile, and by how much less CPU time it takes


def command(cache: Path, out: Path, arguments: list[str]) -> dict[str, Any]:
    """One compile: wall and CPU seconds, and what it said of the cache."""
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environ = {**os.environ, "PYTHONPATH": paths, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    words = [sys.executable, "-m", "kimi_graph", "compile", *arguments, "-o", str(out), "--cache-dir", str(cache)]
    start = time.perf_counter()
    process = subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    said, wrong = process.stdout.read(), process.stderr.read()
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"failed: {' '.join(words)}\n{wrong}")
    found = re.search(r"^cache +(.*)$", said, re.M)
    return {
        "wall": time.perf_counter() - start,
        "cpu": used.ru_utime + used.ru_stime,
        "cache": found[1] if found else "off",
        "bundle": digest(out),
    }


def digest(folder: Path) -> str:
    """Of names and bytes of all files."""
    whole = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        whole.update(f"{path.relative_to(folder)}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return whole.hexdigest()


@contextmanager
def empty_cache() -> Iterator[Path]:
    """A cache with torchair alone, taken from the usual one."""
    sys.path.insert(0, str(ROOT))
    from kimi_graph.compile import torchair_host

    host = torchair_host.load(cache=os.environ.get("KIMI_GRAPH_CACHE") or torchair_host.default_cache(os.environ))
    with TemporaryDirectory() as folder:
        shutil.copytree(host.root, Path(folder, host.root.relative_to(host.root.parents[1])))
        yield Path(folder)


def measure(arguments: list[str], rounds: int) -> dict[str, Any]:
    runs: dict[str, list[dict[str, Any]]] = {"cold": [], "warm": [], "changed": [], "off": []}
    with empty_cache() as cache, TemporaryDirectory() as folder:
        command(cache, Path(folder, "b"), [*arguments, "--no-cache"])  # bytecode of torchair
        for _ in range(rounds):
            shutil.rmtree(cache / "compiled", ignore_errors=True)
            sides = (("cold", []), ("warm", []), ("changed", ["--chunk", "256"]), ("off", ["--no-cache"]))
            for side, more in sides:
                runs[side].append(command(cache, Path(folder, "b"), [*arguments, *more]))
        size = sum(p.stat().st_size for p in (cache / "compiled").rglob("*") if p.is_file())
    return {"runs": runs, "bytes": size, "load": os.getloadavg()[0]}


def show(found: dict[str, Any], arguments: list[str], rounds: int) -> list[str]:
    """Print, and give what was missed."""
    runs = found["runs"]
    cpu = {side: statistics.median(r["cpu"] for r in runs[side]) for side in runs}
    wall = {side: min(r["wall"] for r in runs[side]) for side in runs}
    print(f"compile {' '.join(arguments)}; {rounds} rounds, load {found['load']:.1f}")
    print(f"{'':12}{'CPU s':>8}{'wall s':>8}  said of the cache")
    for side in runs:
        print(f"{side:12}{cpu[side]:8.2f}{wall[side]:8.2f}  {runs[side][-1]['cache']}")
    ratio, clock = cpu["cold"] / cpu["warm"], wall["cold"] / wall["warm"]
    print(f"cold / warm {ratio:8.1f}{clock:8.1f}  times less (promised: {RATIO} in CPU time; at most {SECONDS} s warm)")
    print(f"the cache has {found['bytes'] / 1e6:.1f} MB")
    same = len({r["bundle"] for side in ("cold", "warm", "off") for r in runs[side]}) == 1
    hits = all(r["cache"].startswith("hit") for r in runs["warm"])
    promises = {"ratio": ratio >= RATIO, "seconds": wall["warm"] <= SECONDS, "the same bytes": same, "hits": hits}
    missed = [name for name, held in promises.items() if not held]
    print("missed: " + ", ".join(missed) if missed else "all promises held, bundles are the same bytes")
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description="A second compile against the first.")
    parser.add_argument("model", nargs="?", default="kimi-k3.1-pro", help="preset, config.json or checkpoint folder")
    parser.add_argument("--target", default="950dt")
    parser.add_argument("--mesh", default="pp=4,tp=32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
    args = parser.parse_args()
    arguments = [args.model, "--target", args.target, "--mesh", args.mesh]
    found = measure(arguments, args.rounds)
    if args.json:
        print(json.dumps(found, indent=2))
        return 0
    return 1 if show(found, arguments, args.rounds) else 0


if __name__ == "__main__":
    sys.exit(main())
