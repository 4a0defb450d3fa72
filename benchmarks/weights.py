"""Weights of ranks, written ahead: what the plan of a whole release takes, and how fast files are written.

    python benchmarks/weights.py [--folder DIR] [--gigabytes 10] [--rounds 3] [--skip plan|speed]

1. A sparse set of files with every name, dtype and shape of Kimi K3's release (a hole where the data would be), and
   bundles of it for 128 ranks: `kimi-graph weights --dry-run` in a process of its own. It says how the bytes of each
   target and format come about, after the layout that operators really take.
2. A real checkpoint of a few layers of K3's widths, plain, with as many experts as fill the gigabytes. `kimi-graph
   weights` for 4 ranks beside `cp` of the same files, by turns on the same disk. Both write every byte (no reflinks),
   and it is on the disk when time stops (fsync); the writer's time has its start and imports in it, and its SHA-256 of
   every byte. By turns both find the source on the disk alone ("cold"), as a release of more bytes than a machine has
   memory lies there, and both find it in memory ("warm"), where there is room for it. A copy before all is not counted:
   a disk that has rested takes the first bytes faster than those that follow. The two sides begin rounds by turns.
   Formats are byte-preserving: what is written are the checkpoint's bytes, in the ranks' order.

Goals: the plan in 30 s; at least 0.8 of cp's bytes a second, cold and warm; bytes written at most 1.01 of the ranks'
bytes with replicas once; 2 GB of memory. The exit code is 1 where one is missed.
"""

import argparse
import json
import math
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from audit import write_release

SECONDS, OF_CP, OF_BYTES, GIGABYTES = 30.0, 0.8, 1.01, 2.0
RELEASE, MESH = "kimi-k3", "pp=4,tp=32"
CHOICES = (("a3", "bf16"), ("a3", "int4"), ("950dt", "bf16"), ("950dt", "native"))
LAYERS, VOCAB = 2, 8192  # KDA and dense, MLA and MoE


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; a temporary folder by default")
    parser.add_argument("--gigabytes", type=float, default=10.0, help="of the real checkpoint; twice that is used")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--skip", choices=("plan", "speed"))
    args = parser.parse_args()
    good = True
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        if args.skip != "plan":
            good &= plan(Path(folder))
        if args.skip != "speed":
            good &= speed(Path(folder), args.gigabytes, args.rounds)
    return int(not good)


# ---- the plan of a release -------------------------------------------------------------------------------------------


def plan(folder: Path) -> bool:
    """Bundles of the whole release for 128 ranks, and what the command says of each."""
    release = folder / "release"
    release.mkdir()
    tensors, size, files = write_release(release, RELEASE, 96)
    print(f"{RELEASE}: {tensors:,} tensors, {size:,} bytes in {files} sparse files; {MESH}")
    good = True
    for target, form in CHOICES:
        bundle = folder / f"{target}-{form}"
        options = ["--target", target, "--mesh", MESH, "--weights-format", form, "--phase", "decode"]
        ran("compile", RELEASE, *options, "-o", str(bundle))
        took = ran("weights", str(bundle), "--checkpoint", str(release), "--dry-run", "--json")
        shares = took.json["shares"]
        total = sum(shares["bytes"].values())
        words = ", ".join(f"{how} {n / total:.2%}" for how, n in sorted(shares["bytes"].items()))
        print(f"  {target:<6} {form:<7} {total / 1e12:.3f} TB: {words}")
        for why, n in sorted(shares["why"].items(), key=lambda item: -item[1]):
            print(f"    {n / total:7.2%} made by {why}")
        good &= verdict("    the plan", took, took.seconds <= SECONDS, f"{SECONDS:.0f} s")
    return good


# ---- speed -----------------------------------------------------------------------------------------------------------


def speed(folder: Path, gigabytes: float, rounds: int) -> bool:
    """Both sides by turns, cold and warm; the best of each counts."""
    source, bundle, copy = folder / "real", folder / "bundle", folder / "copy"
    size = write_real(source, gigabytes)
    ran("compile", str(source), "--target", "a3", "--mesh", "tp=4", "--phase", "decode", "-o", str(bundle))
    print(f"{size:,} bytes of {LAYERS} layers as wide as {RELEASE}'s, for 4 ranks (tp=4) of a3, on {disk_of(folder)}")
    good, there = True, 0
    copied(source, copy)
    for kind, prepare in (("cold", forget), ("warm", remember)):
        copies, written = [], []
        for i in range(rounds):
            for side in ("cp", "weights") if i % 2 == 0 else ("weights", "cp"):
                shutil.rmtree(copy, ignore_errors=True)
                prepare(source)
                if side == "cp":
                    copies.append(copied(source, copy))
                else:
                    written.append(ran("weights", str(bundle), "--json"))
                    there = sum(f.stat().st_size for f in (bundle / "weights").iterdir())
                    shutil.rmtree(bundle / "weights")
        cp, writer = [size / took.seconds / 1e9 for took in copies], [t.json["made"] / t.seconds / 1e9 for t in written]
        of_cp = max(writer) / max(cp)
        print(f"  {kind}: cp      {' '.join(f'{x:.2f}' for x in cp)} GB/s; {cpu_of(copies)}")
        print(f"        weights {' '.join(f'{x:.2f}' for x in writer)} GB/s; {cpu_of(written)}")
        good &= verdict(f"        best of best {of_cp:.2f}", written[-1], of_cp >= OF_CP, f"{OF_CP} of cp")
    shares = written[-1].json["shares"]["bytes"]
    held = sum(shares.values())
    print(f"  as stored {1 - shares.get('made', 0) / held:.2%} of the bytes")
    within = there / held <= OF_BYTES
    return verdict(f"  written {there / held:.4f} of the ranks' bytes", written[-1], within, f"{OF_BYTES}") and good


def write_real(folder: Path, gigabytes: float) -> int:
    """A checkpoint of a few layers of full width. Numbers are random, from one block that is shifted."""
    import torch

    from kimi_graph.checkpoint import header_of, index_of, pieces_of, split
    from kimi_graph.headers import INDEX
    from kimi_graph.models import model_specs
    from kimi_graph.read_config import load_config, parse_config

    source = json.loads(json.dumps(load_config(RELEASE).source))
    text = source["text_config"]
    del text["quantization_config"]
    text |= {"num_hidden_layers": LAYERS, "vocab_size": VOCAB, "attn_res_block_size": 1, "intermediate_size": 3072}
    text["linear_attn_config"] |= {"full_attn_layers": [LAYERS], "kda_layers": list(range(1, LAYERS))}
    for where in (source, text):
        where |= {key: 1 for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in where}
    source["media_placeholder_token_id"] = 2

    def model(experts: int) -> Any:
        text["num_experts"] = experts
        config = parse_config(source, origin="benchmark", name="real")
        return config, pieces_of(model_specs(config), config.dtype)

    sizes = [sum(p.bytes for p in model(n)[1]) for n in (16, 32)]
    experts = max(16, 16 + int((gigabytes * 1e9 - sizes[0]) / (sizes[1] - sizes[0]) * 16) // 4 * 4)
    _, pieces = model(experts)
    block = (torch.randn(1 << 22, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16().view(torch.uint8)
    shards = split(pieces, 2_000_000_000)
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    folder.mkdir()
    for name, shard in zip(names, shards, strict=True):
        start, ordered = header_of(shard)
        with (folder / name).open("wb") as f:
            f.write(start)
            for p in ordered:
                kept = math.prod(p.shape) - p.spec.padding
                data = block.view(torch.bfloat16) if p.dtype == torch.bfloat16 else block.view(torch.bfloat16).float()
                data = data.to(p.dtype).view(torch.uint8)
                for at in range(0, p.bytes, len(data)):
                    part = data[: p.bytes - at].clone()
                    part[max(0, kept * p.dtype.itemsize - at) :] = 0  # padding is zero
                    f.write(part.numpy().data)
    (folder / INDEX).write_text(json.dumps(index_of(names, shards)))
    (folder / "config.json").write_text(json.dumps(source))
    return sum(p.bytes for p in pieces)


def copied(source: Path, copy: Path) -> "Took":
    """`cp`, until all of it is on the disk."""
    start = time.perf_counter()
    with subprocess.Popen(["cp", "-r", "--reflink=never", str(source), str(copy)]) as process:
        used = waited(process)
    for file in copy.iterdir():
        with file.open("rb") as f:
            os.fsync(f.fileno())
    return Took(None, time.perf_counter() - start, used.ru_utime + used.ru_stime, 0.0)


def forget(folder: Path) -> None:
    """Files are on the disk, and no page of theirs in memory; nothing of before is still on its way to the disk."""
    os.sync()
    for file in folder.iterdir():
        with file.open("rb") as f:
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def remember(folder: Path) -> None:
    """Pages of files are in memory, as far as they have room; nothing of before is still on its way to the disk."""
    os.sync()
    for file in folder.iterdir():
        with file.open("rb", buffering=0) as f:
            while f.read(1 << 24):
                pass


def disk_of(folder: Path) -> str:
    """The kind of file system, and what is free there."""
    kind = subprocess.run(["stat", "-f", "-c", "%T", str(folder)], capture_output=True, text=True, check=False).stdout
    return f"{kind.strip() or 'a disk'} with {shutil.disk_usage(folder).free / 1e9:.0f} GB free"


# ---- processes -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Took:
    """What a command printed, its seconds, those of CPU among them, and its largest memory."""

    json: Any
    seconds: float
    cpu: float
    gigabytes: float


def ran(*arguments: str) -> Took:
    """Run a command as a user would."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "kimi_graph", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        text = process.stdout.read()
        used = waited(process)
    if process.returncode:
        raise SystemExit(f"kimi-graph {' '.join(arguments)}: exit code {process.returncode}")
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, bytes
    seconds = time.perf_counter() - start
    found = json.loads(text) if "--json" in arguments else None
    return Took(found, seconds, used.ru_utime + used.ru_stime, used.ru_maxrss * unit / 1e9)


def waited(process: "subprocess.Popen[Any]") -> resource.struct_rusage:
    """What a process has used, once it has come to its end."""
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return used


def cpu_of(runs: Sequence[Took]) -> str:
    """Seconds of the best."""
    best = min(runs, key=lambda took: took.seconds)
    return f"best {best.seconds:.1f} s, {best.cpu:.1f} s of CPU"


def verdict(what: str, took: Took, good: bool, goal: str) -> bool:
    """Print what a run took, and whether it was within its goals."""
    good &= took.gigabytes <= GIGABYTES
    print(
        f"{what}: {took.seconds:.1f} s ({took.cpu:.1f} s of CPU), {took.gigabytes:.2f} GB: "
        f"{'within' if good else 'MISSED'} {goal} and {GIGABYTES:g} GB",
        flush=True,
    )
    return good


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    raise SystemExit(main())
