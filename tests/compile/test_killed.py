"""Killed at any moment, compile leaves the old bundle or the new one, and run again gives the bytes it always gives."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kimi_graph.compile.bundle import open_bundle
from tests.compile.test_driver import content

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="imports take longer, so processes are forked")

ROOT = Path(__file__).parents[2]
# Imports once, then compiles in a forked child for each line it reads: the folder, and tokens of a chunk.
PROGRAM = """
import os, sys
from pathlib import Path
from kimi_graph.compile.driver import compile_model
from kimi_graph.compile.targets import target
from kimi_graph.compile.torchair_host import Late, load
from kimi_graph.read_config import load_config
checkpoint, torchair, cache = map(Path, sys.argv[1:])
config, profile = load_config(checkpoint), target("a3")
load(cache=torchair)
sizes = dict(checkpoint=checkpoint, batch=2, max_len=64, page=16, phases=("prefill",), cache_dir=cache, keep=True)
print("ready", flush=True)
for line in sys.stdin:
    out, chunk = line.split()
    child = os.fork()
    if child == 0:
        compile_model(config, target=profile, out=Path(out), chunk=int(chunk), **sizes)
        os._exit(0)
    print(child, flush=True)
    sys.stdin.readline()  # until then its number is no other process's
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


class Compiler:
    """The program."""

    def __init__(self, small, host, folder):
        self.out, self.cache = folder / "b", folder / "cache"
        arguments = [str(small), str(host.root.parents[1]), str(self.cache)]
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *arguments],
            env=environ, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert self.said() == "ready"

    def said(self):
        return self.process.stdout.readline().strip()

    def compile(self, chunk, kill_after=None):
        """Seconds it took; `kill_after` seconds it is killed. Returns whether it was."""
        self.process.stdin.write(f"{self.out} {chunk}\n")
        self.process.stdin.flush()
        child, start = int(self.said()), time.perf_counter()
        if kill_after is not None:
            time.sleep(kill_after)
            os.kill(child, signal.SIGKILL)
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        code = int(self.said())
        assert code in (0, -signal.SIGKILL)
        self.seconds = time.perf_counter() - start
        return code != 0


@pytest.fixture
def compiler(small, host, tmp_path):
    made = Compiler(small, host, tmp_path)
    yield made
    made.process.stdin.close()
    made.process.wait()
    made.process.stdout.close()


def kill_and_compile_again(compiler, kills):
    chance, chunks, wanted = random.Random(kills), (16, 32), {}
    for chunk in chunks:
        shutil.rmtree(compiler.cache, ignore_errors=True)
        assert not compiler.compile(chunk)
        wanted[chunk] = content(compiler.out)
    whole, killed = compiler.seconds, 0
    found = {"old": 0, "new": 0, "nothing": 0}
    for i in range(kills):
        if i % 2:
            shutil.rmtree(compiler.cache)  # else the bundle comes from there, and writing is most of the time
        if i % 5 == 4:
            shutil.rmtree(compiler.out)
        before = content(compiler.out) if compiler.out.exists() else None
        chunk = chunks[before == wanted[chunks[0]]]
        killed += compiler.compile(chunk, kill_after=chance.random() * (whole if i % 2 else whole / 8))
        if not compiler.out.exists():
            assert before is None
            found["nothing"] += 1
        else:
            after = content(compiler.out)
            assert after in (before, wanted[chunk])
            found["new" if after == wanted[chunk] else "old"] += 1
            open_bundle(compiler.out)
        assert not compiler.compile(chunk)
        assert content(compiler.out) == wanted[chunk]
        assert sorted(p.name for p in compiler.out.parent.iterdir()) == ["b", "cache"]
    return killed, found


def test_killed_a_few_times(compiler):
    killed, _ = kill_and_compile_again(compiler, 6)
    assert killed


@pytest.mark.heavy
def test_killed_fifty_times(compiler):
    killed, found = kill_and_compile_again(compiler, 80)
    print(killed, found)
    assert killed >= 50 and found["old"] and found["nothing"]
