"""Nothing of a server is left when whoever started it is gone, whatever ended them. Servers here are made up."""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kimi_graph.serving import warden
from tests.serving.served import SETTINGS

pytestmark = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="Linux")

SERVER = """
import mmap, os, signal, sys, time
kept = []
for name in sys.argv[3:]:
    file = open("/dev/shm/" + name, "w+b")
    file.truncate(4096)
    kept.append(mmap.mmap(file.fileno(), 4096))
if sys.argv[2] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.fork()  # an engine that hears nothing of the server's end
with open(sys.argv[1], "a") as file:
    print(os.getpid(), file=file)
time.sleep(600)
"""
CALLER = """
import importlib.util, os, sys, time
from pathlib import Path
from kimi_graph.parallel import Mesh
from kimi_graph.serving.launch import Launch, ending_with_signals

class Made(Launch):
    command = sys.argv[2:]

importlib.util.find_spec = lambda name: name
folder = Path(sys.argv[1])
made = Made(folder=folder, name="x", host="127.0.0.1", port=8123, max_len=512, mesh=Mesh())
with ending_with_signals(), made.started(os.environ) as process:
    print(process.pid, flush=True)
    time.sleep(600)
"""


def soon(found, seconds=30.0):
    """Whether something comes true; others may be using the machine."""
    until = time.monotonic() + seconds
    while not (done := found()) and time.monotonic() < until:
        time.sleep(0.02)
    return done


def shared(name):
    return Path("/dev/shm") / name


@pytest.fixture
def names():
    """Of two files as engines have them."""
    token = secrets.token_hex(6)
    made = [f"vllm_offload_{token}.mmap", f"psm_{token}"]
    yield made
    for name in made:
        shared(name).unlink(missing_ok=True)


@pytest.fixture
def server(tmp_path, names):
    """A server of two processes that holds them, deaf to requests to end or not; and its processes."""
    started = []

    def start(hearing="hears", *more):
        pids = tmp_path / "pids"
        words = [sys.executable, "-c", SERVER, str(pids), hearing, *names, *more]
        started.append(subprocess.Popen(words, start_new_session=True))
        assert soon(lambda: pids.exists() and len(pids.read_text().split()) == 2)
        return started[-1]

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def guarding(group):
    words = [sys.executable, "-I", warden.__file__, str(group)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True) as process:
        yield process
        process.kill()


def note(group):
    return shared(warden.NOTE.format(uid=os.getuid(), group=group))


def noted(group):
    """How many files its warden has written down."""
    return note(group).exists() and len(note(group).read_text().splitlines())


def test_a_server_whose_caller_is_gone_ends_and_leaves_nothing(server, names):
    process = server()
    with guarding(process.pid) as guard:
        assert soon(lambda: noted(process.pid) == 2)
        guard.stdin.close()
        assert guard.wait(60) == 0
    assert warden.members(process.pid) == []
    assert not any(shared(name).exists() for name in names)
    assert not note(process.pid).exists()


def test_what_an_engine_that_was_killed_had_is_removed_too(server, names, tmp_path):
    """Nobody has it mapped any more when the server ends."""
    process = server()
    with guarding(process.pid) as guard:
        assert soon(lambda: noted(process.pid) == 2)
        for pid in map(int, (tmp_path / "pids").read_text().split()):
            os.kill(pid, signal.SIGKILL)
        assert guard.wait(60) == 0  # though its pipe is open
    assert not any(shared(name).exists() for name in names)


def test_a_server_that_is_deaf_is_killed(server, monkeypatch):
    monkeypatch.setattr(warden, "GRACE_S", 0.2)
    process = server("deaf")
    begun = time.monotonic()
    warden.end(process.pid)
    assert time.monotonic() - begun > 0.2
    assert warden.members(process.pid) == []
    assert process.wait() == -signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_whatever_ends_serve_ends_the_server(tiny, names, tmp_path, number):
    """The group of the caller is killed, as a shell's jobs are; the warden is in none of theirs."""
    words = [
        sys.executable,
        "-c",
        CALLER,
        str(tiny),
        sys.executable,
        "-c",
        SERVER,
        str(tmp_path / "pids"),
        "hears",
        *names,
    ]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True) as caller:
        group = int(caller.stdout.readline())
        try:
            assert soon(lambda: noted(group) == 2)
            os.killpg(caller.pid, number)
            assert soon(lambda: not note(group).exists())
            assert warden.members(group) == []
            assert not any(shared(name).exists() for name in names)
            assert caller.wait() != 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)


def test_what_is_left_where_the_warden_was_killed_too_is_removed_by_the_next_start(server, names):
    process = server()
    with guarding(process.pid) as guard:
        assert soon(lambda: noted(process.pid) == 2)
        assert not set(warden.remove_leftovers()) & set(names)  # they live
        guard.kill()
        guard.wait()
        assert not set(warden.remove_leftovers()) & set(names)  # the server does
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert soon(lambda: not warden.members(process.pid))
        assert sorted(warden.remove_leftovers()) == sorted(names)
    assert not note(process.pid).exists()


def test_what_is_not_an_engines_or_has_only_its_name_is_left_alone(server, names):
    """A file of another kind that the server has, one that it has not, and one that came in the place of its own."""
    mine, other = f"kg_test_{secrets.token_hex(6)}", f"psm_{secrets.token_hex(6)}"
    shared(other).write_bytes(b"x")
    try:
        process = server("hears", mine)
        assert warden.held(warden.members(process.pid)).keys() == set(names)
        kept = warden.held([process.pid])
        shared(names[0]).rename(shared(names[0]).with_suffix(".old"))
        shared(names[0]).write_bytes(b"another")
        assert warden.remove(kept | {mine: shared(mine).stat().st_ino}) == names[1:]
        assert all(shared(name).exists() for name in (mine, other, names[0]))
    finally:
        for path in (shared(mine), shared(other), shared(names[0]).with_suffix(".old")):
            path.unlink(missing_ok=True)


@pytest.mark.serving
@pytest.mark.filterwarnings("default")
def test_vllm_with_tiers_leaves_nothing_where_serve_is_killed(folder, tmp_path):
    import psutil

    own = {name: value for name, value in os.environ.items() if name not in SETTINGS and name != "OMP_NUM_THREADS"}
    words = [sys.executable, "-m", "kimi_graph", "serve", str(folder("kimi-linear-48b")), "--port", "18128"]
    words += ["--max-len", "256", "--tiers", f"host=64MB,file={tmp_path}"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=own) as process:
        assert process.stdout is not None
        assert any("answers on" in line for line in process.stdout), "the server ended"
        (group,) = (x.pid for x in psutil.Process(process.pid).children() if "--served-model-name" in x.cmdline())
        assert soon(lambda: noted(group))
        kept = [line.split()[0] for line in note(group).read_text().splitlines()]
        assert any(name.startswith("vllm_offload_") for name in kept)
        assert len(warden.members(group)) > 1
        process.kill()
        assert soon(lambda: not note(group).exists(), 60)
    assert warden.members(group) == []
    assert not [name for name in kept if shared(name).exists()]
