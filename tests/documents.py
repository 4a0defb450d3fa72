"""Runs what the documents show: blocks of a page in order, in one folder, and compares what the page says they print.

```bash      run by bash in a folder that all pages share, as a reader would; has to end with 0
```python    run in one process for each page, so that later blocks know earlier ones' names; warnings are errors
```          what the block before printed: each line is there, in order; `...` stands for lines left out. Times and
             numbers like 2.2e-15, which another machine may round otherwise, are not compared
```text      neither: a tree of folders, a drawing. A name in braces is a directive of the documentation

A comment on the line before a block says otherwise; it is no part of the page for readers.

<!-- not run: REASON -->   needs an NPU, a download, or minutes
<!-- fails -->             ends with another exit code than 0, as the page says
<!-- file: NAME -->        is the content of this file in the folder; what has been there is replaced
<!-- followed by: TEST --> anywhere in a page: this test follows the page in a way of its own, the blocks are its
<!-- after: PAGE -->       anywhere in a page: PAGE has run before, and its files are there

`pip install ... &&` in front of a command is left out: installing is what `.ci/run` does.
"""

import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

_MARK = r"(?:^<!-- *(?P<mark>not run|fails|file)(?:: *(?P<said>[^\n]*?))? *-->\n)?"
_BLOCK = re.compile(_MARK + r"^```(?P<language>[^\n`]*)\n(?P<code>.*?)^```$", re.M | re.S)
_AFTER = re.compile(r"^<!-- *after: *(\S+) *-->$", re.M)
_MASKS = (
    (re.compile(r"\b\d[\d.,]*(?:e[+-]?\d+)? ?(s|ms|us|min)\b"), r"# \1"),
    (re.compile(r"\b\d+(?:\.\d+)?e[+-]\d+\b"), "#e"),
    (re.compile(r", step \d+ \(\w+\)"), ", step #"),  # where rounding was worst
)


@dataclass(frozen=True)
class Block:
    """A fenced block: its page and line, its language, what a comment before it says."""

    page: str
    line: int
    language: str
    code: str
    mark: str
    said: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    """README.md and the pages of docs/, by path from the root."""
    return ["README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("*.md"))]


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text = (ROOT / page).read_text()
    if followed_by(page):
        return []
    return [
        Block(
            page=page,
            line=text.count("\n", 0, found.start("language")) + 1,
            language=found["language"],
            code=found["code"],
            mark=found["mark"] or "",
            said=found["said"] or "",
        )
        for found in _BLOCK.finditer(text)
    ]


def followed_by(page: str) -> list[str]:
    """Tests that follow a page in place of what is here."""
    return re.findall(r"^<!-- *followed by: *(\S+) *-->$", (ROOT / page).read_text(), re.M)


def before(page: str) -> list[str]:
    """Pages that have to have run before this one."""
    return [os.path.normpath(Path(page).parent / name) for name in _AFTER.findall((ROOT / page).read_text())]


class Reader:
    """Follows pages in a folder, each of them once, two at a time: most of a command is waiting for one core."""

    def __init__(self, folder: Path) -> None:
        self.pool = ThreadPoolExecutor(2)
        self.folder = folder / "reader"
        self.folder.mkdir()
        commands = folder / "bin"
        commands.mkdir()
        (commands / "kimi-graph").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m kimi_graph "$@"\n')
        (commands / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        for command in commands.iterdir():
            command.chmod(0o755)
        self.environment = os.environ | {
            "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "COLUMNS": "100",
        }
        self.results: dict[str, Future[list[str]]] = {}

    def start(self, page: str) -> "Future[list[str]]":
        """Faults of a page once it has run, a line or more for each block; those of pages before it are theirs."""
        if page not in self.results:
            earlier = [self.start(name) for name in before(page)]
            self.results[page] = self.pool.submit(self._run, page, earlier)
        return self.results[page]

    def _run(self, page: str, earlier: "list[Future[list[str]]]") -> list[str]:
        wait(earlier)  # they were started before, so that they come to an end
        faults: list[str] = []
        printed: str | None = None
        python = _Python(self.folder, self.environment)
        with python:
            for block in blocks(page):
                if block.mark == "not run":
                    printed = None
                elif block.mark == "file":
                    file = self.folder / block.said
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_text(block.code)
                elif block.language in ("bash", "python"):
                    run = python.run if block.language == "python" else self._bash
                    start = time.perf_counter()
                    good, printed = run(block.code)
                    print(f"{block}: {time.perf_counter() - start:.1f} s")
                    if good == (block.mark == "fails"):
                        faults.append(f"{block}: {'ended with 0' if good else 'failed'}\n{block.code}{printed[-4000:]}")
                elif block.language == "" and printed is not None:
                    faults += [f"{block}: not printed: {line}" for line in missing(block.code, printed)]
        return faults

    def _bash(self, code: str) -> tuple[bool, str]:
        code = re.sub(r"^pip install [^&\n]*(&& *|$)", "", code, flags=re.M)
        run = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", code],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return run.returncode == 0, run.stdout


_DRIVER = """
import contextlib, io, json, sys, traceback
answers, names = sys.stdout, {"__name__": "__main__"}
for line in sys.stdin:
    said, good = io.StringIO(), True
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            exec(compile(json.loads(line), "<page>", "exec"), names)
        except BaseException:
            good = False
            traceback.print_exc()
    print(json.dumps([good, said.getvalue()]), file=answers, flush=True)
"""


class _Python:
    """One Python for the blocks of a page, started when the first one comes."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder, self.environment = folder, environment
        self.process: subprocess.Popen[str] | None = None

    def run(self, code: str) -> tuple[bool, str]:
        if self.process is None:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "error", "-c", _DRIVER],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(code) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        return tuple(json.loads(answer)) if answer else (False, "the process ended\n")

    def __enter__(self) -> "_Python":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.process.communicate()  # closes what it reads: it ends


def stable(line: str) -> str:
    """A line without what differs from machine to machine: times, last digits, spaces of columns."""
    for pattern, instead in _MASKS:
        line = pattern.sub(instead, line)
    return " ".join(line.split())


def missing(shown: str, printed: str) -> list[str]:
    """Lines of a page's block that were not printed, or not in its order."""
    lines, at, lost = [stable(line) for line in printed.splitlines()], 0, []
    for line in shown.splitlines():
        wanted = stable(line)
        if wanted and wanted != "...":
            try:
                at = lines.index(wanted, at) + 1
            except ValueError:
                lost.append(line)
    return lost
