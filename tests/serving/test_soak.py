"""What the soak does about a server that hangs. The server here is made up: it is healthy, and answers nothing."""

import importlib.util
import socket
import sys
from pathlib import Path

import pytest

import kimi_graph
from kimi_graph.serving import warden
from kimi_graph.serving.launch import Launch

pytestmark = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="Linux")

SCRIPT = Path(kimi_graph.__file__).resolve().parents[1] / "benchmarks/soak.py"
SERVER = """
import os, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Answers(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path in ("/health", COUNTERS) else 500)
        self.end_headers()
        self.wfile.write(b"vllm:num_requests_running{} 3")

    def log_message(self, *words):
        pass

def stands_still():
    time.sleep(600)

if os.fork():
    ThreadingHTTPServer(("127.0.0.1", PORT), Answers).serve_forever()
stands_still()
"""


@pytest.fixture
def soak(monkeypatch):
    spec = importlib.util.spec_from_file_location("soak", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "soak", module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.mark.parametrize("counters, told", [("/metrics", "vllm:num_requests_running{} 3"), ("/none", "/metrics: ")])
def test_a_server_that_hangs_is_written_down_and_ended_and_the_run_fails(
    soak, tiny, tmp_path, monkeypatch, capsys, counters, told
):
    """Its counters, if it says them; its threads, and the stacks of all its processes, the engine's among them."""
    port, groups = free_port(), []
    code = SERVER.replace("PORT", str(port)).replace("COUNTERS", repr(counters))
    dump = soak.dump

    def dumped(server, process, out):
        groups.append(process.pid)
        return dump(server, process, out)

    monkeypatch.setattr(soak, "dump", dumped)
    monkeypatch.setattr(soak, "client", lambda address, book, number, ended, patience: ended.wait())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr(Launch, "command", property(lambda server: [sys.executable, "-c", code]))
    words = ["--minutes", "1", "--stuck", "1", "--port", port, "-o", tmp_path]
    monkeypatch.setattr(sys, "argv", ["soak.py", *map(str, words)])
    (tmp_path / "model").symlink_to(tiny)
    with pytest.raises(SystemExit) as left:
        soak.main()
    assert left.value.code == 1
    assert "BROKEN: requests: 0 failed; nothing moved for 1 s" in capsys.readouterr().out
    written, log = (tmp_path / "stuck.txt").read_text(), (tmp_path / "server.log").read_text()
    assert told in written
    assert written.count("python") >= 2  # processes' threads
    assert log.count("most recent call first") >= 2
    assert "in stands_still" in log
    assert warden.members(groups[0]) == []
