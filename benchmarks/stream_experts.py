"""A checkpoint of the full size of Kimi Linear 48B (98 GB) generates with its experts on disk: memory and time.

    python benchmarks/stream_experts.py

The files are sparse: they have the released sizes and read as zeros, so that they take no disk; every weight but the
experts is read whole. With such a router all tokens go through the same experts; a real one reads others at every
token, as many bytes of them. Exits with an error if generating needs more than 5 GB.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import kimi_graph as kg
from kimi_graph import tree
from kimi_graph.checkpoint import header_of, index_of, pieces_of, split
from kimi_graph.models import model_specs

PRESET, MOST, TOKENS, SHARD = "kimi-linear-48b", 5e9, 4, 5_000_000_000


def write_sparse(folder: Path) -> int:
    """A checkpoint of zeros without data; gives its bytes."""
    config = kg.load_config(PRESET)
    shards = split(pieces_of(model_specs(config), config.dtype), SHARD)
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        start, _ = header_of(shard)
        with (folder / name).open("wb") as f:
            f.write(start)
            f.truncate(len(start) + sum(piece.bytes for piece in shard))
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_of(names, shards)))
    (folder / "config.json").write_text(json.dumps(config.source))
    return sum(piece.bytes for shard in shards for piece in shard)


def peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def generate(folder: str) -> None:
    """In a process of its own: prints the peak of its memory and the seconds of a token."""
    config = kg.load_config(folder)
    started = time.perf_counter()
    params = kg.load_params(folder, config, stream_experts=True)
    print(f"opened in {time.perf_counter() - started:.1f} s", file=sys.stderr)
    started = time.perf_counter()
    kg.generate(config, params, [1, 2, 3, 4], 1, stream_experts=True)
    first = time.perf_counter() - started
    started = time.perf_counter()
    kg.generate(config, params, [1, 2, 3, 4], 1 + TOKENS, stream_experts=True)
    print(json.dumps([peak(), first, (time.perf_counter() - started) / (1 + TOKENS)]))


def main() -> int:
    parser = argparse.ArgumentParser(description="Kimi Linear 48B with its experts on disk: peak memory.")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    folder = parser.parse_args().folder
    if folder:
        generate(folder)
        return 0
    with TemporaryDirectory() as made:
        total = write_sparse(Path(made))
        routed = sum(2 * s.numel for s in tree.leaves(model_specs(kg.load_config(PRESET))) if s.axes[0] == "experts")
        run = subprocess.run([sys.executable, __file__, "--folder", made], check=True, capture_output=True, text=True)
    held, first, each = json.loads(run.stdout)
    print(f"{PRESET}: {total / 1e9:.1f} GB, of which routed experts {routed / 1e9:.1f} GB; {run.stderr.strip()}")
    print(f"peak memory {held / 1e9:.2f} GB (at most {MOST / 1e9:.1f}); first token {first:.1f} s, then {each:.1f} s")
    return 0 if held <= MOST else 1


if __name__ == "__main__":
    sys.exit(main())
