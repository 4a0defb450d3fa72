"""Start the engine's own OpenAI server with the flags that a model needs, watch its health, and end it with its caller.

The server is a process of its own, `python -m vllm.entrypoints.openai.api_server`: the command `vllm` does not run
where the package is the CPU build, which has another name.
"""

import contextlib
import errno
import functools
import importlib.metadata
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from kimi_graph.checkpoint import Checkpoint, audit
from kimi_graph.config import ModelConfig
from kimi_graph.errors import ConfigError, KimiGraphError
from kimi_graph.models import decoder
from kimi_graph.parallel import Mesh
from kimi_graph.read_config import load_config, presets

from . import warden
from .ranks import check_mesh
from .tiers.plan import Tiers
from .tokens import chat_note, check_generation, check_tokenizer, tokenizer_flags

if TYPE_CHECKING:
    from .bundles import Graphs  # which brings torch and what executes graphs

SERVER = "vllm.entrypoints.openai.api_server"
MISSING = (
    "vLLM is not installed beside kimi-graph: python3 -m venv build/serve && "
    "build/serve/bin/pip install -e '.[serve]', and run build/serve/bin/kimi-graph; its CPU build: docs/serving.md."
)
# What the server reads besides flags, where the caller has not said otherwise.
DEFAULTS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_MEDIA_CONNECTOR": "kimi_graph",  # `media`
}
OWN_NAMES = {  # flags of the engine that have another name here
    "--model": "MODEL",
    "--served-model-name": "--name",
    "--host": "--host",
    "--port": "--port",
    "--max-model-len": "--max-len",
    "--tensor-parallel-size": "--mesh",
    "--pipeline-parallel-size": "--mesh",
    "--kv-cache-memory-bytes": "--cache",
    "--kv-transfer-config": "--tiers",
    "--tool-call-parser": "--tool-parser",
    "--trust-remote-code": "--trust-remote-code",
}
CPU_CACHE = 4 * 2**30  # bytes; without a size, vLLM's CPU build takes nine tenths of the machine's memory
STANDARD_ERROR = 2  # as the system counts; what stands for it in Python may be no file
MOST_WAIT_S = 1800  # until it is healthy


def what_to_serve(model: Path, checkpoint: Path | None) -> "tuple[Path, Graphs | None]":
    """The checkpoint folder that MODEL is, or that it is a bundle of, and the bundle's graphs.

    Raises:
        KimiGraphError: --checkpoint without a bundle; a bundle that no engine calls, or without its checkpoint.
    """
    if not (model / "manifest.json").is_file():
        if checkpoint is not None:
            raise ConfigError(
                f"--checkpoint {checkpoint}: goes with a bundle, and {model} has no manifest.json; leave it out."
            )
        return model, None
    from .bundles import Choice, graphs_for

    graphs, folder = graphs_for(Choice(bundle=model.resolve()), checkpoint)
    return folder, graphs


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A server that can be started.

    Attributes:
        folder: checkpoint.
        name: of the model in requests.
        host, port: where it listens.
        max_len: longest sequence in tokens; None: the model's own, or as long as the cache has room for.
        mesh: of the engine's ranks.
        cache: bytes of each rank for pages and memories; None: `CPU_CACHE` on a CPU, else the engine's choice.
        tiers: below the engine's own cache.
        tool_parser: of vLLM's, reads the model's tool calls; None: it is not let call.
        trusted: whether Python in the checkpoint's folder may run.
        graphs: of a bundle that the engine is to call; the folder is its checkpoint.
        flags: more of the engine's own, as they are.
        quiet: whether the engine says nothing but errors.

    Raises:
        ConfigError: a folder, length, port or mesh that cannot be served; the message says which can.
    """

    folder: Path
    name: str
    host: str
    port: int
    max_len: int | None
    mesh: Mesh
    cache: int | None = None
    tiers: Tiers | None = None
    tool_parser: str | None = None
    trusted: bool = False
    graphs: "Graphs | None" = None
    flags: tuple[str, ...] = ()
    quiet: bool = False

    def __post_init__(self) -> None:
        for flag, word in (("--name", self.name), ("--host", self.host), ("--tool-parser", self.tool_parser)):
            if word is not None and not word.strip():
                raise ConfigError(f"{flag} {word!r}: expected a word, or leave it out.")
        if (self.folder / "manifest.json").is_file():
            raise ConfigError(f"{self.folder}: a bundle; expected the checkpoint folder that it was compiled from.")
        if not self.folder.is_dir():
            raise ConfigError(f"{self.folder}: {_what_instead(self.folder)}; the engine serves checkpoint folders.")
        longest = self.config.max_len if self.graphs is None else self.graphs.settings.length
        if self.max_len is not None and not 1 <= self.max_len <= longest:
            nearest = 1 if self.max_len < 1 else longest
            raise ConfigError(f"--max-len {self.max_len:,}: expected 1 to {longest:,}; nearest {nearest:,}.")
        if not 1 <= self.port <= 65535:
            raise ConfigError(f"--port {self.port}: expected 1 to 65535; nearest {min(max(self.port, 1), 65535)}.")
        nearest = Mesh(pipe=self.mesh.pipe, tensor=self.mesh.tensor)
        if self.mesh != nearest:
            words = "the engine's ranks are stages and tensor ranks, which share out experts"
            raise ConfigError(f"--mesh {self.mesh}: {words}; nearest {nearest}.")
        if self.graphs is None:
            check_mesh(self.config, self.mesh)
        elif self.mesh != self.graphs.mesh:
            raise ConfigError(
                f"--mesh {self.mesh}: {self.graphs.bundle.folder} is of {self.graphs.mesh}; leave it out, or compile "
                f"one with --mesh {self.mesh}."
            )
        if self.graphs is not None and self.tiers is not None:
            raise ConfigError("--tiers: a bundle's caches are laid out in another way than tiers know; leave it out.")
        if self.tiers is not None and self.tiers.low is not None and self.mesh.pipe > 1:
            raise ConfigError(f"--tiers low={self.tiers.low}: with one pipeline stage alone; leave one of them out.")
        if self.flags and not self.flags[0].startswith("-"):
            raise ConfigError(
                f"found {self.flags[0]} behind MODEL; expected one MODEL, and flags of the engine behind --."
            )
        said = {word for word in self._own_command if word.startswith("--")}
        for word in (word.partition("=")[0] for word in self.flags):
            if word in said:
                here = OWN_NAMES.get(word)
                words = f"say {here}, before --" if here else "serve gives it to the engine itself; leave it out"
                raise ConfigError(f"-- {word}: {words}.")

    @functools.cached_property
    def config(self) -> ModelConfig:
        """Of the model in the folder."""
        return load_config(self.folder)

    @property
    def command(self) -> list[str]:
        """The server's command line."""
        return [*self._own_command, *self.flags]

    @property
    def _own_command(self) -> list[str]:
        words = [sys.executable, "-m", SERVER, "--model", str(self.folder.resolve()), "--served-model-name", self.name]
        words += ["--host", self.host, "--port", str(self.port), "--enable-prefix-caching"]
        # Said, it stays: left out, vLLM 0.32's CPU platform puts its default back into the scheduler's config after
        # pages have got the size of a memory, prompts are read in parts whose ends no page has, and no memory is kept.
        words += ["--block-size", "128"] if self.graphs is None else []  # graphs say their own
        # vLLM 0.32 makes what later stages receive in a warm-up that an eager CPU skips; nothing of ours is compiled.
        # With pictures, the warm-up would embed the largest one there is: it serves to measure a device's memory.
        words += ["--enforce-eager"] if self.mesh.pipe == 1 else ["--skip-mm-profiling"] if is_cpu_build() else []
        words += tokenizer_flags(self.folder, self.config.model_type, trusted=self.trusted)
        longest = None if self.graphs is None else self.graphs.settings.length
        words += ["--max-model-len", str(self.max_len or longest or "auto")]
        cache = CPU_CACHE if self.cache is None and is_cpu_build() else self.cache
        words += [] if cache is None else ["--kv-cache-memory-bytes", str(cache)]
        words += ["--uvicorn-log-level", "error"] if self.quiet else []
        if self.tool_parser is not None:
            words += ["--enable-auto-tool-choice", "--tool-call-parser", self.tool_parser]
        if self.tiers is not None:
            words += ["--kv-transfer-config", json.dumps(self.tiers.engine_config(self.folder))]
        words += [] if self.graphs is None else self.graphs.flags
        for flag, size in (("tensor", self.mesh.tensor), ("pipeline", self.mesh.pipe)):
            words += [f"--{flag}-parallel-size", str(size)] if size > 1 else []
        return words

    def variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        """What the server is given beside an environment; what that says already is left as it is."""
        ranks = self.mesh.world
        own = dict(DEFAULTS)
        if ranks > 1:
            own["VLLM_CPU_OMP_THREADS_BIND"] = cores_of_ranks(_cores(), ranks)
        if self.quiet:
            own |= {"VLLM_LOGGING_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}
        return {name: value for name, value in own.items() if name not in environment}

    @property
    def note(self) -> str | None:
        """What a user has to know before asking the server, if there is anything."""
        return chat_note(self.folder, self.config.model_type, trusted=self.trusted)

    def check_here(self) -> None:
        """Refuse what the server would end of on this machine, minutes later and in other words.

        Raises:
            CheckpointError: weights or tokenizer are missing or are not the model's. Weights are not read.
            KimiGraphError: vLLM is not installed, the port is in use, or a tier has no room or may not be written.
        """
        check_engine()
        self._check_port()
        if self.tiers is not None:
            self.tiers.check_room()
        checkpoint = Checkpoint.open(self.folder)
        audit(decoder.model_specs(self.config), checkpoint, self.config.dtype, self.config).check()
        check_tokenizer(self.folder, trusted=self.trusted)
        check_generation(self.folder)

    def _check_port(self) -> None:
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            socket.create_server((self.host, self.port), family=family).close()
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise ConfigError(f"--host {self.host} --port {self.port}: {error.strerror or error}.") from None
            with socket.create_server((self.host, 0), family=family) as other:
                nearest = other.getsockname()[1]
            words = f"something listens there already on {self.host}; {nearest} is free"
            raise ConfigError(f"--port {self.port}: {words}.") from None

    @property
    def address(self) -> str:
        """Where it answers, as a URL."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @contextlib.contextmanager
    def started(self, environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
        """The server's process; it ends, with all that it started, when the context does, or this process by whatever.

        Raises:
            KimiGraphError: vLLM is not installed.
        """
        check_engine()
        given = {**environment, **self.variables(environment)}
        # What it says goes to standard error: results are ours.
        process = subprocess.Popen(self.command, env=given, stdout=STANDARD_ERROR, start_new_session=True)
        guard = _guarded(process)
        try:
            yield process
        finally:
            _end(process, guard)

    def wait_until_healthy(self, process: subprocess.Popen[bytes]) -> None:
        """Ask for the server's health until it has some.

        Raises:
            KimiGraphError: it ended before, or takes too long.
        """
        until = time.monotonic() + MOST_WAIT_S
        while time.monotonic() < until:
            if (code := process.poll()) is not None:
                raise KimiGraphError(
                    f"the server ended with exit code {code} before it was healthy; it said why above."
                )
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.address}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
            time.sleep(0.5)
        raise KimiGraphError(f"the server was not healthy within {MOST_WAIT_S:,} s.")


def _what_instead(path: Path) -> str:
    """What a path is that is no folder."""
    if path.exists():
        return "a file"
    return (
        f"a preset, kimi-graph fixture {path} -o DIR makes a small checkpoint"
        if str(path) in presets()
        else "no folder"
    )


def check_engine() -> None:
    """Whether there is an engine.

    Raises:
        KimiGraphError: vLLM is not installed.
    """
    if importlib.util.find_spec("vllm") is None:
        raise KimiGraphError(MISSING)


def is_cpu_build() -> bool:
    """Whether the engine that is installed is the CPU build, a package of another name."""
    try:
        return bool(importlib.metadata.version("vllm-cpu"))
    except importlib.metadata.PackageNotFoundError:
        return False


def cores_of_ranks(cores: Sequence[int], ranks: int) -> str:
    """Cores of each rank, as vLLM's CPU build takes them. By itself it gives each rank the cores of a NUMA node, and
    refuses more ranks than nodes.
    """
    each = max(1, len(cores) // ranks)
    own = ([cores[(rank * each + i) % len(cores)] for i in range(each)] for rank in range(ranks))
    return "|".join(",".join(map(str, some)) for some in own)


def _cores() -> list[int]:
    """That this process may use."""
    return sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else [*range(os.cpu_count() or 1)]


@contextlib.contextmanager
def ending_with_signals() -> Iterator[None]:
    """Inside, a request to end this process is an exit, so that contexts are left; else the server would stay."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _guarded(process: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
    """A process that ends the leader of a group, and the group, when its pipe is closed: by us, or with us."""
    words = [sys.executable, "-I", warden.__file__, str(process.pid)]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)


def _end(process: subprocess.Popen[bytes], guard: subprocess.Popen[bytes]) -> None:
    """Have a server ended by its warden; interrupted here, it goes on there."""
    assert guard.stdin is not None
    guard.stdin.close()
    while guard.poll() is None:
        process.poll()  # one that has ended is there until its parent has asked
        time.sleep(0.02)
    if process.poll() is None:  # the warden was killed
        warden.end(process.pid)
        process.wait()
