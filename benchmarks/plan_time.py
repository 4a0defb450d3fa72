"""Time and memory of a plan: what it takes to search a SuperPoD for a model of 2.8 T parameters.

    python benchmarks/plan_time.py [--model kimi-k3.1-pro] [--target a3-superpod] [--devices 768]

In a fresh process, as the command line does it, JSON and all; torchair is not loaded. Goal: 5 s and 0.5 GB on an idle
machine. CPU seconds are printed beside, as others may use the machine too; the exit code is 1 beyond either goal, the
time being the smaller of both.
"""

import argparse
import resource
import subprocess
import sys
import time

SECONDS, GIGABYTES = 5.0, 0.5
UNITS = 1 if sys.platform == "darwin" else 1024  # bytes of ru_maxrss


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="kimi-k3.1-pro")
    parser.add_argument("--target", default="a3-superpod")
    parser.add_argument("--devices", type=int, default=768)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    request = ["plan", args.model, "--target", args.target, "--devices", str(args.devices), "--json"]
    command = [sys.executable, "-m", "kimi_graph", *request]
    walls, cpus, before = [], [], _cpu()
    for _ in range(args.runs):
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        walls.append(time.perf_counter() - start)
        cpus.append(_cpu() - before)
        before += cpus[-1]
    memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * UNITS / 1e9
    print(
        f"plan {args.model} on {args.devices:,} of {args.target}: best of {args.runs} {min(walls):.1f} s, "
        f"{min(cpus):.1f} s of CPU, at most {memory:.2f} GB (goal: {SECONDS:g} s, {GIGABYTES:g} GB)"
    )
    return int(min(*walls, *cpus) > SECONDS or memory > GIGABYTES)


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    raise SystemExit(main())
