"""Errors of the command line, each really provoked: `docs/errors.md` is made of them.

python -m tests.errors > docs/errors.md
"""

import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from typer.testing import CliRunner

from kimi_graph import cli
from kimi_graph.cli.frame import EXIT_CODES
from kimi_graph.cli.output import in_columns

# By command; what a request finds in its folder is in `prepare`.
CASES = {
    "compile": """
        compile kimi-linear-48c --target a3 -o out
        compile gone.json --target a3 -o out
        compile notes --target a3 -o out
        compile broken.json --target a3 -o out
        compile llama.json --target a3 -o out
        compile tiny --target a4 -o out
        compile tiny --target a3 --cann 7.0 -o out
        compile tiny --target a3 --providers builtin,vlm -o out
        compile tiny --target a3 --providers builtin,own,own -o out
        compile tiny --target a3 --avoid MatMull -o out
        compile tiny --target a3 --mesh tp=3 -o out
        compile tiny --target a3 --mesh tq=2 -o out
        compile tiny --target a3 --mesh tp=x -o out
        compile tiny --target a3 --mesh tp=2 --weights constant -o out
        compile kimi-linear-48b --target a3 --weights constant -o out
        compile tiny --target a3 --kv-dtype int8 -o out
        compile tiny --target a3 --page 100 -o out
        compile tiny --target a3 --pages 1 -o out
        compile tiny --target a3 --max-len 100 --chunk 200 -o out
        compile tiny --target a3 --phase vision -o out
        compile tiny --target a3 -o notes
        compile tiny --target a3 --torch-npu-wheel wheel.whl -o out
        compile tiny --target a3 --devices 8 --mesh tp=8 -o out
        compile tiny --target a3
        compile tiny --target a3 --batch 0 -o out
    """,
    "targets": "targets a4",
    "plan": """
        plan kimi-linear-48b --target a3 --devices 1
        plan kimi-linear-48b --target a3 --factor memry=0.8
        plan kimi-linear-48b --target a3 --factor memory=2
        plan kimi-linear-48b
    """,
    "shard": """
        shard kimi-linear-48b --mesh tp=24
        shard kimi-linear-48b --mesh dp=2,dp=2
        shard kimi-linear-48b --mesh tp=8 --explain layers.0.kda.quer
        shard kimi-linear-48b --mesh tp=8 --phase vision
        shard kimi-linear-48b
    """,
    "ops": "ops tiny --target a3 --providers own",
    "fixture": """
        fixture kimi-linear-48b -o notes
        fixture kimi-linear-48b -o tiny
        fixture kimi-linear-48b --layers 1 -o out
        fixture kimi-linear-48b --quantised -o out
    """,
    "check": """
        check gone
        check notes
        check tiny --model kimi-linear-48b
        check tiny --weights-format int9
    """,
    "inspect": """
        inspect gone
        inspect tiny-a3 --graph vision
        inspect damaged
        inspect tiny-a3 --cost --html page.html
    """,
    "lint": """
        lint damaged
        lint tiny-a3 --target 950dt
    """,
    "diff": "diff tiny-a3 gone",
    "buckets": """
        buckets tiny-a3 --batch 2
        buckets tiny-a3 --length 1000
    """,
    "weights": """
        weights tiny-a3 --checkpoint notes
        weights tiny-a3 --ranks 5
        weights tiny-a3 --ranks x
    """,
    "verify": """
        verify notes
        verify tiny-a3 --checkpoint notes
        verify tiny-a3 --processes
        verify tiny-a3 --mode fast
    """,
    "deploy": """
        deploy tiny-2
        deploy tiny-2 --hosts gone.json
        deploy tiny-2 --hosts broken.json
        deploy tiny-2 --hosts hosts.json
        deploy tiny-a3 -o tiny-a3/out
        deploy tiny-a3 -o notes
        deploy tiny-a3 --cann 7.0
    """,
    "serve": """
        serve notes
        serve tiny --tiers file=pages
        serve tiny --tiers host=4XB
        serve tiny --tiers host=4GB,policy=oldest
        serve tiny-a3
        serve tiny --checkpoint tiny
    """,
    "bringup": """
        bringup notes
        bringup tiny-a3 --deploy notes
    """,
    "day0": """
        day0 gone --target a3
        day0 kimi-linear-48b --target a3,a3
    """,
    "doctor": "doctor --cach-dir here",
    "kernels": """
        kernels
        kernels export notes
    """,
    "(none)": "compil tiny",
}

INTRO = """\
# Errors

Made by `python -m tests.errors`, which provokes each of them; a test holds this page against what the commands say. An
error says where, what was found, what was expected, and the nearest that can be. It is one line on standard error,
broken between words on a terminal (here at 100 columns), and nothing is left half-written.

After each command line stands its exit code: {codes}.
With `--json` standard output has `{{"error": "..."}}` too, where the command could not do what it was asked; a report
that says no (of `check`, `lint`, `ops`, `verify`, `buckets`, `day0`) is printed as it is.

Where something is wrong with the machine, `kimi-graph doctor` says what.
"""


def prepare(folder: Path) -> None:
    """What the requests find: a checkpoint `tiny`, bundles of it for one rank and for two, and files that are wrong."""
    for words in (
        "fixture kimi-linear-48b -o tiny",
        "compile tiny --target a3 --batch 1 --chunk 32 --max-len 128 --no-cache -o tiny-a3",
        "compile tiny --target a3 --batch 1 --chunk 32 --max-len 128 --mesh tp=2 --phase decode --no-cache -o tiny-2",
    ):
        assert run(words).exit_code == 0, words
    shutil.copytree(folder / "tiny-a3", folder / "damaged")
    graph = folder / "damaged" / "graphs" / "decode_b1.air"
    graph.write_bytes(graph.read_bytes()[:-1])
    (folder / "notes").mkdir()
    texts = {
        "notes/a.txt": "x",
        "llama.json": '{"model_type": "llama"}',
        "broken.json": "{",
        "hosts.json": '{"hosts": []}',
    }
    for name, text in {**texts, "wheel.whl": "x"}.items():
        (folder / name).write_text(text)


def run(words: str):
    return CliRunner().invoke(cli.app, shlex.split(words), prog_name="kimi-graph")


def provoke(words: str) -> tuple[int, str]:
    """Exit code, and the error as it is on standard error."""
    result = run(words)
    assert isinstance(result.exception, SystemExit), (words, result.exception)
    at = [m.start() for m in re.finditer(r"^error: ", result.stderr, re.M)]
    assert len(at) == 1, (words, result.stderr)
    return result.exit_code, result.stderr[at[0] :].rstrip("\n")


def page(folder: Path) -> str:
    """The document; the requests run in `folder`, which is empty."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        prepare(folder)
        there = sorted(folder.iterdir())
        codes = "; ".join(f"{code} {words}" for code, words in EXIT_CODES.items())
        text = "\n".join([INTRO.format(codes=codes), *_sections(folder)])
        assert sorted(folder.iterdir()) == there, "something was left behind"
    finally:
        os.chdir(before)
    return text


def _sections(folder: Path) -> Iterator[str]:
    for command, requests in CASES.items():
        yield f"## {command}\n\n```console"
        for words in requests.strip().splitlines():
            code, error = provoke(words.strip())
            yield f"$ kimi-graph {words.strip()}    # {code}"
            yield in_columns(
                re.sub(r"[0-9a-f]{16}(?=\.\.\.)", "0123456789abcdef", error.replace(f"{folder}{os.sep}", ""))
            )
        yield "```\n"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        sys.stdout.write(page(Path(name).resolve()))
