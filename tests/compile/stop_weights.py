"""Runs of `kimi-graph weights` that are stopped: by a limit of the system, or killed again and again.

    python stop_weights.py limited BUNDLE BYTES            files may not be written to after so many bytes (0: all may)
    python stop_weights.py nobody BUNDLE 0                 as somebody who may not write everywhere, as root may
    python stop_weights.py killed BUNDLE KILLS CHECKPOINT...

Of one checkpoint, weights are written where there are none; of several, over those of another.
"""

import hashlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
from pathlib import Path

import torch

from kimi_graph.compile import making, write_weights
from kimi_graph.compile.bundle import open_bundle
from kimi_graph.compile.written import JOURNAL, SOURCE, open_written
from kimi_graph.errors import KimiGraphError


def limited(bundle, size):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    laid_out, hard = write_weights._Run._laid_out, resource.getrlimit(resource.RLIMIT_FSIZE)[1]

    def then_limited(self, file):
        made = laid_out(self, file)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        return made

    if size:
        write_weights._Run._laid_out = then_limited
    run(bundle)


def nobody(bundle):
    write = write_weights._Run.write

    def as_nobody(self, jobs):  # by now everything is imported
        if os.geteuid() == 0:
            os.seteuid(65534)
        return write(self, jobs)

    write_weights._Run.write = as_nobody
    run(bundle)


def run(bundle):
    try:
        print(write_weights.write_weights(bundle, jobs=1).summary)
    except KimiGraphError as error:
        print("error:", error)


def killed(bundle, kills, checkpoints):
    """After each kill what is there is the old weights, the new ones, or none where none were; at the end of a series
    it is byte by byte what an undisturbed run gives."""
    making.BLOCK = 100_000
    rng, folder = random.Random(kills), bundle / "weights"
    wholes, seconds = {}, []
    for checkpoint in checkpoints:
        start = time.monotonic()
        assert ended(started(bundle, checkpoint)) == 0
        seconds.append(time.monotonic() - start)
        wholes[checkpoint] = content(folder)
    have, done, resumed = checkpoints[-1], 0, 0
    while done < kills:
        target = rng.choice([c for c in checkpoints if c != have] or checkpoints)
        if len(checkpoints) == 1:
            shutil.rmtree(folder)
            have = None
        while True:
            child = started(bundle, target)
            if done == kills:
                assert ended(child) == 0
                break
            time.sleep(rng.random() * min(seconds))
            os.kill(child, signal.SIGKILL)
            if (status := ended(child)) is not None:
                assert status == 0
                break
            done += 1
            resumed += (folder / JOURNAL).is_file() and (folder / JOURNAL).read_bytes().count(b"\n") > 1
            assert readable(bundle) in [files(wholes[c]) if c else set() for c in (have, target)]
        assert content(folder) == wholes[target]
        have = target
    print(json.dumps({"killed": done, "resumed": resumed}))


def started(bundle, checkpoint):
    """A process that writes; this one has no threads, so it may be copied."""
    child = os.fork()
    if child == 0:
        try:
            write_weights.write_weights(bundle, checkpoint=Path(checkpoint))
            os._exit(0)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
    return child


def ended(child):
    """The exit code, None of one that was killed."""
    status = os.waitpid(child, 0)[1]
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else None


def content(folder):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir() if p.name != SOURCE}


def files(whole):
    return {name for name in whole if name.endswith(".bin")}


def readable(bundle):
    """The files that a loader finds, each read and compared with its hash."""
    found = open_written(open_bundle(bundle))
    if found is None:
        return set()
    for rank in found.ranks:
        for name in found.of(rank):
            found.read(rank, name)
    return set(found.files)


if __name__ == "__main__":
    torch.set_num_threads(1)
    what, folder, number, *rest = sys.argv[1:]
    if what == "limited":
        limited(Path(folder), int(number))
    elif what == "nobody":
        nobody(Path(folder))
    else:
        killed(Path(folder), int(number), rest)
