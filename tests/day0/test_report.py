"""The report of a release day: its forms, what differs between two runs, and when its folder is replaced."""

import dataclasses
import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from kimi_graph.compile.targets import target
from kimi_graph.compile.verify import verify_bundle
from kimi_graph.day0 import run as module
from kimi_graph.day0.document import Code, Heading, Points, Table, Text, as_html, as_markdown
from kimi_graph.day0.report import HTML, JSON, MARKDOWN, WORK, Report, Run, check_place, document
from kimi_graph.day0.run import day0
from kimi_graph.day0.steps import Found, Outcome, Step
from kimi_graph.errors import ConfigError
from tests.day0.conftest import WHERE

FILES = {JSON, MARKDOWN, HTML}


def report_of(*outcomes):
    run = Run(date="2026-11-30 12:00 UTC", seconds=1.0, machine="2 cores")
    made = tuple(Outcome(name=name, found=Found(**found), seconds=0.5) for name, found in outcomes)
    return Report(source="m", targets=(target("a3"),), outcomes=made, run=run)


@pytest.fixture
def instead(monkeypatch):
    """`instead(run, ...)`: these are the steps of a release day."""

    def put(*runs):
        steps = [Step(name=("", f"step {i}"), run=run, seconds=1) for i, run in enumerate(runs)]
        monkeypatch.setattr(module.Trial, "steps", lambda trial: iter(steps))
        monkeypatch.setattr("kimi_graph.day0.report.WORDS", {step.name[1]: "tries" for step in steps})

    return put


def passes():
    return Found(words="fine")


# ---- forms -----------------------------------------------------------------------------------------------------------


def test_the_folder_has_three_files_and_what_was_asked_to_be_kept(full):
    _, out = full
    assert {p.name for p in out.iterdir()} == {*FILES, WORK}
    assert {p.name for p in (out / WORK).iterdir()} == {"fixture", "a3", "a3-sharded"}
    assert [p for p in out.parent.iterdir() if p != out] == []  # nothing is left beside it


def test_bundles_that_were_kept_can_be_verified_where_they_are(full):
    _, out = full
    found = verify_bundle(out / WORK / "a3", checkpoint=out / WORK / "fixture", steps=0, modes=("exact",))
    assert found.passed


def test_the_markdown_has_every_step_with_what_it_found(full):
    report, out = full
    text = (out / MARKDOWN).read_text()
    for o in report.outcomes:
        assert f"| {o.name[1]} | {o.found.state} | {o.found.words} |" in text
    for heading in ("Steps", "Checkpoint", "Plan", "Operators", "Graphs of the fixture against the model", "Next"):
        assert f"\n## {heading}\n" in text
    assert "| kda | KDA in chunks | KdaChunk (own) |" in text
    assert "kimi-graph compile " in text


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.opened, self.open, self.loads = [], [], []

    def handle_starttag(self, tag, attrs):
        self.opened.append(tag)
        self.loads += [value for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_html_is_one_file_that_loads_nothing(full):
    _, out = full
    text = (out / HTML).read_text()
    tags = Tags()
    tags.feed(text)
    assert tags.open == [] and tags.loads == []
    assert not {"script", "link", "img", "iframe"} & set(tags.opened)
    assert "url(" not in text and "@import" not in text
    assert text.count('class="passed"') > 10


def test_the_json_has_steps_and_results(full):
    report, out = full
    data = json.loads((out / JSON).read_text())
    assert data == json.loads(json.dumps(report.to_json()))
    assert (data["passed"], data["model"], data["without_keys"]) == (True, "tiny", [])
    assert [s["step"] for s in data["steps"]] == [o.name[1] for o in report.outcomes]
    a3 = data["targets"]["a3"]
    assert set(a3) == {"plan", "operators", "graphs", "bundle", "verify", "sharded bundle", "sharded verify"}
    assert a3["verify"]["passed"] and a3["bundle"]["lint"]["passed"] and a3["plan"]["target"] == "a3"
    assert data["audit"]["passed"]


def test_no_form_names_the_folder_where_it_was_made(full):
    _, out = full
    for name in FILES:
        assert not re.search(r"\.part\b|/work/", (out / name).read_text())


def test_a_failed_step_is_said_first_with_all_it_found():
    lines = tuple(f"fault {i}" for i in range(60))
    report = report_of(
        (("", "config"), {"words": "fine"}),
        (("a3", "plan"), {"words": "bad | worse", "state": "failed", "lines": lines}),
    )
    assert report.summary == "m for a3: 1 of 2 steps passed, 1 failed (a3: plan)"
    text = as_markdown(document(report))
    assert "**m for a3: 1 of 2 steps passed, 1 failed (a3: plan).**" in text
    assert text.index("## Failed: a3: plan") < text.index("## Steps")
    assert "fault 39" in text and "fault 40" not in text and "... and 20 more" in text
    assert "bad \\| worse" in text
    assert report.to_json()["steps"][1]["lines"] == lines
    assert "fault 39" in report.text() and max(map(len, report.text().splitlines())) <= 100


BLOCKS = [
    Heading("T & t", 1), Text("all <b>", "failed"), Points(["one"]), Code(["x < y"]),
    Table([("a", "b"), ("passed", "2|3")]),
]  # fmt: skip


def test_blocks_are_escaped_in_html():
    text = as_html(BLOCKS)
    assert "<title>T &amp; t</title>" in text and '<p class="failed">all &lt;b&gt;</p>' in text
    assert '<td class="passed">passed</td>' in text and "<pre>x &lt; y</pre>" in text


def test_blocks_are_markdown():
    assert as_markdown(BLOCKS) == (
        "# T & t\n\n**all <b>**\n\n- one\n\n```bash\nx < y\n```\n\n| a | b |\n| --- | --- |\n| passed | 2\\|3 |\n"
    )


# ---- again -----------------------------------------------------------------------------------------------------------


def without_run(out):
    """The files without the one place where two runs differ."""
    data = json.loads((out / JSON).read_text())
    del data["run"]
    markdown = (out / MARKDOWN).read_text().partition("\n## This run\n")
    html = (out / HTML).read_text().partition("<h2>This run</h2>")
    assert markdown[1] and html[1]
    assert "## " not in markdown[2]
    return data, markdown[0], html[0]


def test_the_same_input_is_the_same_bytes_but_for_the_last_section(full, tiny, tmp_path):
    _, out = full
    day0(tiny, [target("a3")], out=tmp_path / "again", **WHERE)
    assert without_run(tmp_path / "again") == without_run(out)


def test_a_report_is_replaced_and_the_work_of_an_earlier_one_is_gone(instead, tmp_path):
    out = tmp_path / "r"
    instead(passes)
    day0("m", [target("a3")], out=out, keep_work=True)
    assert (out / WORK).is_dir()
    day0("m", [target("a3")], out=out)
    assert {p.name for p in out.iterdir()} == FILES


@pytest.mark.parametrize(
    "other", ["a folder of something else", "a report with a file more", "a file", "another report"]
)
def test_what_is_no_report_is_not_replaced(instead, tmp_path, other):
    out = tmp_path / "r"
    if other == "a file":
        out.write_text("mine")
    else:
        out.mkdir()
        (out / "mine").write_text("mine")
    if other == "a report with a file more":
        (out / JSON).write_text(json.dumps({"kind": "kimi-graph day0"}))
    if other == "another report":
        (out / JSON).write_text(json.dumps({"passed": True, "model": "of bringup"}))
    instead(lambda: pytest.fail("something was tried"))
    with pytest.raises(ConfigError, match="choose another folder"):
        day0("m", [target("a3")], out=out)
    assert "mine" in (out.read_text() if out.is_file() else (out / "mine").read_text())


def test_an_empty_folder_may_be_filled(tmp_path):
    check_place(tmp_path)


# ---- interrupted -----------------------------------------------------------------------------------------------------


def interrupt():
    raise KeyboardInterrupt


@pytest.mark.parametrize("before", ["nothing", "a report"])
def test_ctrl_c_leaves_what_was_there(instead, tmp_path, before):
    out = tmp_path / "r"
    if before == "a report":
        instead(passes)
        day0("m", [target("a3")], out=out)
    old = {p.name: p.read_bytes() for p in out.iterdir()} if out.exists() else None
    instead(passes, interrupt)
    with pytest.raises(KeyboardInterrupt):
        day0("m", [target("a3")], out=out)
    assert [p.name for p in tmp_path.iterdir()] == (["r"] if old else [])
    assert old is None or {p.name: p.read_bytes() for p in out.iterdir()} == old


def test_killed_it_leaves_nothing_that_looks_like_a_report_and_the_next_run_clears_up(instead, tmp_path):
    code = (
        "import os, sys; from pathlib import Path; from kimi_graph.day0 import run; "
        "from kimi_graph.day0.steps import Step; from kimi_graph.compile.targets import target\n"
        "run.Trial.steps = lambda t: iter([Step(name=('', 'x'), run=lambda: os._exit(9), seconds=1)])\n"
        "run.day0('m', [target('a3')], out=Path(sys.argv[1]))"
    )
    out = tmp_path / "r"
    done = subprocess.run([sys.executable, "-c", code, str(out)], check=False)
    assert done.returncode == 9 and not out.exists()
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".r.") and left.name.endswith(".part")
    instead(passes)
    day0("m", [target("a3")], out=out)
    assert [p.name for p in tmp_path.iterdir()] == ["r"]


def test_without_a_folder_nothing_is_left(instead, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    instead(passes)
    assert day0("m", [target("a3")]).passed
    assert list(tmp_path.iterdir()) == []


def test_times_are_no_part_of_what_two_outcomes_compare():
    one = Outcome(name=("", "x"), found=Found(words="w"), seconds=1.0)
    assert one == dataclasses.replace(one, seconds=2.0)
