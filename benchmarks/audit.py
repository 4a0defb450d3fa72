"""How long `kimi-graph check` takes for the whole of a released checkpoint, and how much memory.

Writes a checkpoint with every name, dtype and shape of the release and a hole where the data would be, and its index;
then audits both in processes of their own: headers of every file, and the index alone. Targets are those of the
project: 10 seconds and 1 GB for the 497,220 tensors of Kimi K3.

    python benchmarks/audit.py [MODEL] [--files N]
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SECONDS, GIGABYTES = 10.0, 1.0


def main() -> None:
    """Write, audit, print; exit code 1 if a target was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="kimi-k3", help="a preset")
    parser.add_argument("--files", type=int, default=96, help="about how many safetensors files (K3 has 96)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tensors, size, files = write_release(Path(folder), args.model, args.files)
        print(f"{args.model}: {tensors:,} tensors, {size:,} bytes in {files} files")
        headers = audit("headers", folder, args.model)
        names = audit("index alone", str(next(Path(folder).glob("*.index.json"))), args.model)
    sys.exit(not (headers and names))


def write_release(folder: Path, model: str, files: int) -> tuple[int, int, int]:
    """A checkpoint as released in about `files` files, but for its data, which is a hole.

    Returns:
        the number of tensors, their bytes, and the number of files.
    """
    from kimi_graph.checkpoint import header_of, index_of, pieces_of, released_formats, split
    from kimi_graph.headers import INDEX
    from kimi_graph.models import model_specs
    from kimi_graph.read_config import load_config

    config = load_config(model)
    specs = model_specs(config)
    pieces = pieces_of(specs, config.dtype, released_formats(config, specs))
    total = sum(p.bytes for p in pieces)
    shards = split(pieces, -(-total // files))
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        start, _ = header_of(shard)
        with (folder / name).open("wb") as f:
            f.write(start)
            f.truncate(len(start) + sum(p.bytes for p in shard))
    (folder / INDEX).write_text(json.dumps(index_of(names, shards), indent=2))
    (folder / "config.json").write_text(json.dumps(config.source))
    return len(pieces), total, len(shards)


def audit(what: str, source: str, model: str) -> bool:
    """Run the command as a user would, and print its last line, its time and its largest memory."""
    command = [sys.executable, "-m", "kimi_graph", "check", source, "--model", model]
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = process.stdout.read().splitlines()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - started
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, bytes
    gigabytes = usage.ru_maxrss * unit / 1e9
    cpu = usage.ru_utime + usage.ru_stime
    good = process.returncode == 0 and seconds <= SECONDS and gigabytes <= GIGABYTES
    verdict = f"{'within' if good else 'MISSED'} {SECONDS:.0f} s and {GIGABYTES:.0f} GB"
    last = re.sub(r" in [\d.]+ s$", "", lines[-1] if lines else "no output")
    print(f"{what}: {last}")
    print(f"    {seconds:.1f} s ({cpu:.1f} s of CPU), {gigabytes:.2f} GB: {verdict}")
    return good


if __name__ == "__main__":
    main()
