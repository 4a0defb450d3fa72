# pyright: reportMissingImports=false
"""Whether a server endures: concurrent clients for hours, and every answer must be the one that was given first.

Starts the server of `kimi-graph serve` on a fixture of Kimi K3.1 Pro and asks it three kinds of things, greedily, over
and over: conversations of several turns, questions on long documents, chains of tool calls. Before one request in eight
its stream is begun and left. The cache is small, so that pages are evicted and requests preempted all the time. It is
float32 unless told otherwise: there another answer is a fault, and not bfloat16's rounding in another batch.

Promises, each printed with what was found; exit code 1 where one is broken:
* answers: each has the tokens that it had first. Where two tokens' logprobs were as near as sums in another order can
  be, an answer may go on with the other one: a tie, counted by itself.
* requests: none fails or is stuck. If nothing moves for `--stuck` seconds, the server's counters and its threads'
  stacks are written down, and the run ends.
* memory: the lower 95 % bound of the slope of the server's resident memory, after a first quarter to warm up in, is not
  above 32 MB an hour, which is what 10 kB a request would be at one request a second.
* pages: when the last answer is given, the engine uses none.
Throughput is told with its variance and promises nothing: it is that of the machine and of who else uses it.
"""

import argparse
import contextlib
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kimi_graph as kg
from kimi_graph.fixture import make_fixture
from kimi_graph.parallel import Mesh
from kimi_graph.serving.launch import Launch, ending_with_signals

MODEL, MAX_LEN = "soaked", 1536
MEMORY_BAR = 32e6  # bytes an hour
# Two logprobs that are nearer than this may change places: sums in another order. float32: 1e-4 of logits of size 8, as
# in the tests. bfloat16: two steps of its own, 2^-5 between 4 and 8.
TIE = {"float32": 8e-4, "bfloat16": 2**-4}
KINDS = ("conversation", "document", "tools")
COUNTERS = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "used": "vllm:kv_cache_usage_perc",
    "preemptions": "vllm:num_preemptions_total",
    "queried": "vllm:prefix_cache_queries_total",
    "hit": "vllm:prefix_cache_hits_total",
    "read": "vllm:prompt_tokens_total",
    "written": "vllm:generation_tokens_total",
}


# ---- the server ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Soaked(Launch):
    """A server with a small cache. blocks: of its cache. dtype: it computes in. log: file of what it says."""

    blocks: int
    dtype: str
    log: Path

    @property
    def command(self) -> list[str]:
        """The server's command line."""
        own = {"--num-gpu-blocks-override": self.blocks, "--max-num-seqs": 16, "--dtype": self.dtype}
        words = [*super().command, "--disable-uvicorn-access-log", *(str(x) for pair in own.items() for x in pair)]
        return ["sh", "-c", 'log=$1; shift; exec "$@" >"$log" 2>&1', "sh", str(self.log), *words]

    def counters(self) -> dict[str, float]:
        """Of the server's /metrics, by our names."""
        text = self.metrics()
        found: dict[str, float] = {}
        for line in text.splitlines():
            name, _, value = line.partition(" ")
            if not line.startswith("#"):
                plain = name.partition("{")[0]
                found[plain] = found.get(plain, 0.0) + float(value)
        return {own: found.get(name, 0.0) for own, name in COUNTERS.items()}

    def metrics(self) -> str:
        with urllib.request.urlopen(f"{self.address}/metrics", timeout=60) as answer:
            return answer.read().decode()


def processes(root: int) -> list[int]:
    """A process and all that it started, and they."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended meanwhile
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    found = [root]
    for process in found:
        found += children.get(process, [])
    return found


def resident(root: int) -> int:
    """Bytes of memory that a process and its children have, shared ones counted once in each."""
    total = 0
    for process in processes(root):
        try:
            total += int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, IndexError):
            continue
    return total


# ---- what is asked ---------------------------------------------------------------------------------------------------

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a place.",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
        },
    }
]


@dataclass(frozen=True)
class Talk:
    """A chain of requests: each turn's messages follow the answers before.

    Attributes:
        kind: one of `KINDS`.
        turns: messages that each turn adds.
        tokens: of each answer.
        tools: offered to the model.
    """

    kind: str
    turns: tuple[tuple[Mapping[str, Any], ...], ...]
    tokens: int
    tools: bool = False


def talks(seed: int) -> list[Talk]:
    """All that is asked: few enough that each comes again and again."""
    chance = random.Random(seed)
    words = ["page", "state", "latent", "river", "seven", "cold", "index", "bridge", "quiet", "stone"]

    def text(count: int) -> str:
        return " ".join(chance.choice(words) for _ in range(count))

    def said(content: str) -> dict[str, str]:
        return {"role": "user", "content": content}

    made = [Talk("conversation", tuple((said(text(12)),) for _ in range(4)), 10) for _ in range(4)]
    for _ in range(2):
        document = text(chance.randrange(120, 200))
        made += [Talk("document", ((said(f"{document}\n{text(8)}?"),),), 8) for _ in range(3)]
    for number in range(3):
        made.append(Talk("tools", tuple(_tool_turns(number, text)), 10, tools=True))
    return made


def _tool_turns(number: int, text: Callable[[int], str]) -> Iterator[tuple[Mapping[str, Any], ...]]:
    """A question, then calls of a tool with their results: a model of random weights does not call by itself."""
    yield ({"role": "system", "content": text(20)}, {"role": "user", "content": f"weather {number}? {text(6)}"})
    for step in range(3):
        name, arguments = f"call_{number}_{step}", json.dumps({"place": text(1)})
        call = {"id": name, "type": "function", "function": {"name": "weather", "arguments": arguments}}
        yield (
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": name, "content": json.dumps({"degrees": number * step, "sky": text(4)})},
        )


@dataclass(frozen=True)
class Answer:
    """Tokens, and the best two logprobs of each place."""

    tokens: tuple[str, ...]
    top: tuple[Mapping[str, float], ...]

    def same(self, other: "Answer", tie: float) -> str:
        """ "equal", "tie" or "another"."""
        for token, again, best in zip(self.tokens, other.tokens, self.top, strict=False):
            if token != again:
                return "tie" if again in best and best[token] - best[again] <= tie else "another"
        return "equal" if len(self.tokens) == len(other.tokens) else "another"


@dataclass
class Book:
    """What has been answered, by what was asked; shared by the clients.

    Attributes:
        first: answers that came first.
        counts: of requests by kind, and of answers that are equal, ties or others.
        faults: in words.
        pending: when each request that is not answered was sent.
    """

    tie: float
    first: dict[str, Answer] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    moved: float = field(default_factory=time.monotonic)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def keep(self, asked: str, kind: str, answer: Answer, seconds: float) -> Answer:
        """The answer that came first."""
        with self.lock:
            self.counts[kind] += 1
            self.seconds.append(seconds)
            if (first := self.first.setdefault(asked, answer)) is answer:
                self.counts["first"] += 1
                return first
            found = first.same(answer, self.tie)
            self.counts[found] += 1
            if found == "another":
                self.faults.append(f"{asked[:200]}: {answer.tokens} rather than {first.tokens}")
            return first

    def fault(self, words: str) -> None:
        with self.lock:
            self.faults.append(words)


def client(address: str, book: Book, number: int, ended: threading.Event, patience: float) -> None:
    """Ask until it is over."""
    import openai

    chance = random.Random(number)
    everything = talks(0)
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=patience) as api:
        while not ended.is_set():
            try:
                _talk(api, book, everything[chance.randrange(len(everything))], chance, ended)
            except openai.OpenAIError as error:
                if ended.is_set():
                    return
                book.fault(f"a request failed: {type(error).__name__}: {error}")
                time.sleep(1)


def _talk(api: Any, book: Book, talk: Talk, chance: random.Random, ended: threading.Event) -> None:
    messages: list[Mapping[str, Any]] = []
    for turn in talk.turns:
        if ended.is_set():
            return
        if messages and turn[0]["role"] == "assistant":
            messages.pop()  # the scripted call stands for the model's own
        messages += turn
        begun, options = time.monotonic(), {"tools": TOOLS, "tool_choice": "none"} if talk.tools else {}
        given = {"model": MODEL, "messages": messages, "max_tokens": talk.tokens, "temperature": 0, **options}
        given |= {"logprobs": True, "top_logprobs": 2, "extra_body": {"ignore_eos": True}}
        if chance.random() < 1 / 8:
            with api.chat.completions.create(stream=True, **given) as stream:
                next(iter(stream))
            book.counts["left"] += 1
        reply = api.chat.completions.create(**given).choices[0]
        places = reply.logprobs.content
        top = tuple({x.token: x.logprob for x in (place, *place.top_logprobs)} for place in places)
        answer = Answer(tuple(place.token for place in places), top)
        first = book.keep(json.dumps(messages), talk.kind, answer, time.monotonic() - begun)
        messages.append({"role": "assistant", "content": "".join(first.tokens)})


# ---- watching --------------------------------------------------------------------------------------------------------


@dataclass
class Watch:
    """Samples of the server while it is asked. rows: seconds since the start, bytes, counters."""

    server: Soaked
    process: subprocess.Popen[bytes]
    rows: list[dict[str, float]] = field(default_factory=list)
    begun: float = field(default_factory=time.monotonic)

    def sample(self) -> dict[str, float]:
        row = {"at": time.monotonic() - self.begun, "bytes": resident(self.process.pid), **self.server.counters()}
        self.rows.append(row)
        return row

    def until(self, seconds: float, every: float, stuck: float, out: Path) -> str | None:
        """Sample for so long; what is wrong with the server, if something is."""
        moved, last, told = time.monotonic(), (-1.0, -1.0), time.monotonic()
        while (now := time.monotonic()) - self.begun < seconds:
            if (code := self.process.poll()) is not None:
                return f"the server ended with exit code {code}"
            try:
                row = self.sample()
            except OSError:  # a server that does not answer does not move either
                row = {"read": last[0], "written": last[1]}
            if (row["read"], row["written"]) != last:
                moved, last = now, (row["read"], row["written"])
            if now - moved > stuck:
                return f"nothing moved for {stuck:.0f} s; {dump(self.server, self.process, out)}"
            if now - told > 30:
                told = now
                self.tell(seconds)
            time.sleep(every)
        return None

    def tell(self, seconds: float) -> None:
        row = self.rows[-1]
        print(
            f"{row['at'] / 60:6.1f} min, {max(0, seconds - row['at']) / 60:.1f} left: {row['written']:,.0f} tokens, "
            f"{row['bytes'] / 1e6:,.0f} MB, cache {row['used']:.0%}, {row['preemptions']:.0f} preemptions, "
            f"prefix hits {row['hit'] / max(1, row['queried']):.0%}",
            flush=True,
        )


def dump(server: Soaked, process: subprocess.Popen[bytes], out: Path) -> str:
    """Write down where a server that does not move is: counters, states of threads, and by SIGABRT their stacks."""
    words = []
    for child in processes(process.pid):
        for thread in Path(f"/proc/{child}/task").glob("*"):
            try:
                state = (thread / "stat").read_text().rpartition(")")[2].split()[0]
                words.append(f"{child} {thread.name} {(thread / 'comm').read_text().strip()} {state}")
            except OSError:
                continue
    try:
        words.append(server.metrics())
    except OSError as error:
        words.append(f"/metrics: {error}")
    (out / "stuck.txt").write_text("\n".join(words))
    for child in reversed(processes(process.pid)):  # PYTHONFAULTHANDLER: stacks go to the log; children before parents,
        for number in (signal.SIGABRT, signal.SIGCONT):  # which would end them; one that is stopped says it too
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, number)
        time.sleep(0.2)
    time.sleep(2)
    return f"see {out / 'stuck.txt'} and the stacks in {server.log}"


# ---- what it comes to ------------------------------------------------------------------------------------------------


def slope(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float, float]:
    """Least squares over the means of ten stretches, as neighbours are not independent: slope, and its 95 % bounds."""
    size = len(xs) // 10
    stretches = [slice(i * size, (i + 1) * size) for i in range(10)]
    points = [(statistics.fmean(xs[some]), statistics.fmean(ys[some])) for some in stretches]
    x, y = zip(*points, strict=True)
    mean_x, mean_y = statistics.fmean(x), statistics.fmean(y)
    square = sum((a - mean_x) ** 2 for a in x)
    found = sum((a - mean_x) * (b - mean_y) for a, b in points) / square
    rest = sum((b - mean_y - found * (a - mean_x)) ** 2 for a, b in points)
    bound = 2.306 * math.sqrt(rest / 8 / square)  # Student's t of 8 degrees of freedom, both sides
    return found, found - bound, found + bound


def throughput(rows: Sequence[Mapping[str, float]], windows: int = 10) -> list[float]:
    """Tokens a second, written and read, in stretches of equal numbers of samples."""
    at = [rows[round(i * (len(rows) - 1) / windows)] for i in range(windows + 1)]
    total = [r["read"] + r["written"] for r in at]
    return [(b - a) / (y["at"] - x["at"]) for a, b, x, y in zip(total, total[1:], at, at[1:], strict=False)]


def judged(book: Book, rows: Sequence[Mapping[str, float]], stopped: str | None, idle: float) -> dict[str, Any]:
    """Figures, and each promise with what was found of it."""
    warm = rows[len(rows) // 4 :]
    memory = [3600 * x for x in slope([r["at"] for r in warm], [r["bytes"] for r in warm])] if len(warm) >= 20 else None
    speed = throughput(rows) if len(rows) > 20 else []
    last, counts = rows[-1], book.counts
    others = [f for f in book.faults if " rather than " in f]
    failed = [f for f in book.faults if f not in others]
    kept = {
        "answers": (
            not others and counts["equal"] > 0,
            f"{counts['equal']} equal, {counts['tie']} ties, {len(others)} others",
        ),
        "requests": (not failed and not stopped, f"{len(failed)} failed; {stopped or 'none was stuck'}"),
        "pages": (idle == 0, f"{idle:.1%} of the cache in use at the end"),
    }
    words = (
        "too few samples to say"
        if memory is None
        else "{:+.1f} MB/h, 95 % {:+.1f} to {:+.1f}".format(*(x / 1e6 for x in memory))
    )
    kept["memory"] = (memory is not None and memory[1] <= MEMORY_BAR, f"{words}; bar {MEMORY_BAR / 1e6:.0f}")
    times = sorted(book.seconds) or [math.nan]
    return {
        "minutes": last["at"] / 60,
        "requests": {k: counts[k] for k in (*KINDS, "left")},
        "request_seconds": {"median": statistics.median(times), "p99": times[int(0.99 * (len(times) - 1))]},
        "tokens": {"read": last["read"], "written": last["written"]},
        "tokens_per_second": {
            "mean": statistics.fmean(speed) if speed else None,
            "variation": statistics.stdev(speed) / statistics.fmean(speed) if speed else None,
            "windows": speed,
        },
        "cache": {
            "most_used": max(r["used"] for r in rows),
            "preemptions": last["preemptions"],
            "prefix_hit_rate": last["hit"] / max(1, last["queried"]),
        },
        "memory_mb_per_hour": None if memory is None else [x / 1e6 for x in memory],
        "promises": {name: {"kept": bool(ok), "found": found} for name, (ok, found) in kept.items()},
        "faults": book.faults[:20],
        "load_average": os.getloadavg()[2],
    }


def in_words(report: Mapping[str, Any]) -> str:
    speed, cache, seconds = report["tokens_per_second"], report["cache"], report["request_seconds"]
    lines = [
        f"{report['minutes']:.1f} min; requests: " + ", ".join(f"{v} {k}" for k, v in report["requests"].items()),
        f"seconds of a request: median {seconds['median']:.2f}, 99th of 100 {seconds['p99']:.2f}",
        f"cache: at most {cache['most_used']:.0%} used, {cache['preemptions']:.0f} preemptions, "
        f"{cache['prefix_hit_rate']:.0%} of prompts' tokens found",
    ]
    if speed["mean"] is not None:
        lines.append(
            f"tokens a second, read and written: {speed['mean']:.0f}, variation {speed['variation']:.0%} between "
            f"tenths of the time (load of the machine {report['load_average']:.1f})"
        )
    for name, found in report["promises"].items():
        lines.append(f"{'kept' if found['kept'] else 'BROKEN'}: {name}: {found['found']}")
    return "\n".join([*lines, *(f"fault: {words}" for words in report["faults"])])


def picture(rows: Sequence[Mapping[str, float]]) -> str:
    """Memory, use of the cache and tokens over time: an SVG."""
    series = {
        "resident memory, MB": [r["bytes"] / 1e6 for r in rows],
        "cache in use, %": [100 * r["used"] for r in rows],
        "tokens, thousands": [(r["read"] + r["written"]) / 1e3 for r in rows],
    }
    width, height, last = 720, 130, max(rows[-1]["at"], 1)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width + 60}" height="{len(series) * (height + 40)}">']
    parts.append('<rect width="100%" height="100%" fill="white"/><g font-family="sans-serif" font-size="12">')
    for i, (name, values) in enumerate(series.items()):
        low, high, top = min(0, *values), max(values) or 1, i * (height + 40) + 24
        points = " ".join(
            f"{30 + r['at'] / last * width:.1f},{top + height * (1 - (v - low) / (high - low or 1)):.1f}"
            for r, v in zip(rows, values, strict=True)
        )
        parts.append(
            f'<text x="30" y="{top - 6}">{name}: {values[0]:,.0f} to {values[-1]:,.0f}, most {high:,.0f}</text>'
        )
        parts.append(f'<rect x="30" y="{top}" width="{width}" height="{height}" fill="none" stroke="#bbb"/>')
        parts.append(f'<polyline points="{points}" fill="none" stroke="#1f5fa8" stroke-width="1.5"/>')
    parts.append(f'<text x="30" y="{len(series) * (height + 40) - 4}">0 to {last / 60:.0f} min</text></g></svg>')
    return "\n".join(parts)


# ---- the command -----------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    time_of = parser.add_mutually_exclusive_group()
    time_of.add_argument("--hours", type=float, default=1.0)
    time_of.add_argument("--minutes", type=float)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=22, help="of the engine's cache: few, so that it is always full")
    parser.add_argument("--dtype", choices=sorted(TIE), default="float32")
    parser.add_argument("--stuck", type=float, default=180.0, help="seconds without progress that are too many")
    parser.add_argument("--port", type=int, default=8127)
    parser.add_argument("-o", "--out", type=Path, default=Path("build/soak"))
    given = parser.parse_args()
    seconds = 60 * given.minutes if given.minutes else 3600 * given.hours
    given.out.mkdir(parents=True, exist_ok=True)
    folder = given.out / "model"
    if not folder.exists():
        make_fixture(kg.load_config("kimi-k3.1-pro"), folder)
    server = Soaked(
        folder=folder,
        name=MODEL,
        host="127.0.0.1",
        port=given.port,
        max_len=MAX_LEN,
        mesh=Mesh(),
        blocks=given.blocks,
        dtype=given.dtype,
        log=(given.out / "server.log").absolute(),
    )
    quiet = {"VLLM_LOGGING_LEVEL": "WARNING", "PYTHONFAULTHANDLER": "1"}
    with ending_with_signals(), server.started({**quiet, **os.environ}) as process:
        server.wait_until_healthy(process)
        report, rows = soaked(server, process, given, seconds)
    (given.out / "soak.json").write_text(json.dumps({**report, "samples": rows}, indent=1))
    (given.out / "soak.svg").write_text(picture(rows))
    (given.out / "soak.txt").write_text(in_words(report) + "\n")
    print(in_words(report))
    broken = [name for name, found in report["promises"].items() if not found["kept"]]
    print(
        f"{len(report['promises']) - len(broken)} of {len(report['promises'])} promises kept -> {given.out}/soak.json"
    )
    sys.exit(1 if broken else 0)


def soaked(server: Soaked, process: subprocess.Popen[bytes], given: Any, seconds: float) -> tuple[dict[str, Any], Any]:
    """Ask and watch for so many seconds: report and samples."""
    book, watch, ended = Book(TIE[given.dtype]), Watch(server, process), threading.Event()
    with ThreadPoolExecutor(given.clients) as clients:
        asking = [clients.submit(client, server.address, book, i, ended, given.stuck) for i in range(given.clients)]
        try:
            stopped = watch.until(seconds, min(5.0, seconds / 120), given.stuck, given.out)
        finally:
            ended.set()
        for one in asking:
            one.result()
    idle = math.nan
    if stopped is None:
        time.sleep(2)
        idle = watch.sample()["used"]
    rows = watch.rows or [dict.fromkeys(("at", "bytes", *COUNTERS), 0.0)]  # a server that never said a number
    return judged(book, rows, stopped, idle), rows


if __name__ == "__main__":
    main()
