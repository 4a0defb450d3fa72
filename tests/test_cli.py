"""The frame of the command line: exit codes, what goes to which stream. What commands do is tested elsewhere."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kimi_graph import cli
from kimi_graph.cli import frame, options, output
from kimi_graph.cli.output import progress_shown
from kimi_graph.compile import caches, targets
from kimi_graph.errors import BundleError

COMMANDS = [
    "targets", "plan", "shard", "ops", "compile", "inspect", "fixture", "check", "lint", "weights", "verify", "buckets",
    "diff", "deploy", "bringup", "day0", "doctor",
]  # fmt: skip


class Found:
    """A result with many lines."""

    passed = same = True
    config = types.SimpleNamespace(layers=[None] * 5)
    assumptions = ("the moon is round",)
    tensors, bytes = 7, 1_500_000
    root, folder = "torchair", "made"
    clock = types.SimpleNamespace(step=contextlib.nullcontext)
    summary = "2 graphs, 12 nodes"

    def text(self):
        return "phase    nodes\n" * 3000

    def to_json(self):
        return {"graphs": 2}


@pytest.fixture
def run(monkeypatch):
    """Run a command line whose functions are replaced: `run(["inspect", "x"], inspect_bundle=f)`."""

    def run(arguments, **functions):
        called = {}

        def stand_in(name, f):
            def call(*args, **kwargs):
                called[name] = (args, kwargs)
                return f(*args, **kwargs)

            return call

        for module, names in {
            "kimi_graph.check": ["check_checkpoint", "folder_of"],
            "kimi_graph.compile.buckets": ["buckets_of"],
            "kimi_graph.compile.cost": ["inspect_cost"],
            "kimi_graph.compile.coverage": ["cover_model"],
            "kimi_graph.compile.bringup": ["bring_up"],
            "kimi_graph.compile.deploy": ["deploy_bundle", "hosts_example"],
            "kimi_graph.compile.diff": ["diff_bundles"],
            "kimi_graph.compile.driver": ["compile_model"],
            "kimi_graph.compile.expect": ["Expected"],
            "kimi_graph.compile.golden": ["write_golden"],
            "kimi_graph.compile.inspect": ["inspect_bundle", "inspect_graph"],
            "kimi_graph.compile.lint": ["lint_bundle"],
            "kimi_graph.compile.npu_device": ["open_device"],
            "kimi_graph.compile.page": ["write_page"],
            "kimi_graph.compile.torchair_host": ["default_cache", "load"],
            "kimi_graph.compile.verify": ["verify_bundle"],
            "kimi_graph.compile.write_weights": ["parse_ranks", "write_weights"],
            "kimi_graph.day0.run": ["day0"],
            "kimi_graph.doctor": ["diagnose"],
            "kimi_graph.fixture": ["make_fixture"],
            "kimi_graph.plan.claims": ["check_claims"],
            "kimi_graph.plan.html": ["write_html"],
            "kimi_graph.plan.profiles": ["profiles"],
            "kimi_graph.plan.report": ["sequences"],
            "kimi_graph.plan.search": ["Ask", "make_plan"],
            "kimi_graph.read_config": ["load_config"],
            "kimi_graph.shard": ["Request", "explain_parameter", "meshes_of", "shard_model"],
        }.items():
            fake = types.ModuleType(module)
            for name in names:
                setattr(fake, name, stand_in(name, functions.get(name, lambda *a, **k: Found())))
            monkeypatch.setitem(sys.modules, module, fake)
        result = CliRunner().invoke(cli.app, arguments, prog_name="kimi-graph")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result, called

    return run


def shell(*arguments, **kwargs):
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "FORCE_COLOR")}
    return subprocess.Popen(
        [sys.executable, "-m", "kimi_graph", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=kwargs.pop("stdout", subprocess.PIPE),
        stderr=subprocess.PIPE,
        text=True,
        env=environment | kwargs.pop("env", {}),
        **kwargs,
    )


def fails(error):
    def f(*args, **kwargs):
        raise error

    return f


def test_alone_it_shows_the_commands_of_a_deployment_in_order(run):
    result, _ = run([])
    assert result.exit_code == 0
    shown = re.findall(r"^  kimi-graph (\w+) ", result.output, re.M)
    assert shown == ["plan", "compile", "verify", "weights", "deploy"]
    assert re.search("All commands +kimi-graph --help", result.output)
    assert max(map(len, result.output.splitlines())) <= 100


def test_help_lists_every_command_and_every_exit_code(run):
    result, _ = run(["--help"])
    listed = re.findall(r"^  (\w+)  +[A-Z]", result.output.partition("Commands:")[2], re.M)
    assert sorted(listed) == sorted({*COMMANDS, "kernels", "serve"})
    assert "..." not in result.output.partition("Commands:")[2], "a purpose is cut off"
    said = " ".join(result.output.partition("Exit codes: ")[2].split())
    assert [int(part.split()[0]) for part in said.split("; ")] == list(frame.EXIT_CODES)


def test_the_version_is_the_packages():
    out, _ = shell("--version").communicate()
    assert out == f"kimi-graph {cli.__version__}\n"


@pytest.mark.parametrize("command", [[], *([c] for c in COMMANDS)], ids=str)
def test_help_starts_with_the_purpose_then_an_example_in_100_columns(run, command):
    result, _ = run([*command, "--help"])
    purpose, example, usage = result.output.split("\n\n")[:3]
    assert result.exit_code == 0
    assert re.match(r"  [A-Z]", purpose) and not purpose.strip().startswith("Usage")
    assert example.startswith("  kimi-graph")
    assert usage.startswith("Usage: kimi-graph")
    assert max(map(len, result.output.splitlines())) <= 100


@pytest.mark.parametrize("command", COMMANDS)
def test_the_examples_of_a_help_text_parse(run, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"^  kimi-graph (.*)$", run([command, "--help"])[0].output, re.M)
    assert examples
    for example in examples:
        assert run(example.split())[0].exit_code == 0, example


def test_help_does_not_import_torch_and_answers_at_once():
    code = "import sys, kimi_graph.cli; print(sorted({'torch', 'numpy', 'rich', 'transformers'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"

    def seconds():
        before = os.times()
        shell("compile", "--help").communicate()
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    # 0.15 s; time of the processor, as others may be busy on the machine, and the best of three.
    assert min(seconds() for _ in range(3)) < 0.4


def test_a_command_ends_with_what_was_made_where_and_how_long(run):
    result, called = run(["compile", "kimi-linear-48b", "--target", "a3", "-o", "b"])
    assert result.exit_code == 0
    assert re.fullmatch(r"2 graphs, 12 nodes -> b in \d+\.\d s", result.stdout.splitlines()[-1])
    _, options = called["compile_model"]
    assert (options["target"].name, options["phases"], options["out"]) == ("a3", None, Path("b"))


def test_what_a_config_assumes_is_said_on_standard_error(run):
    for arguments in (["fixture", "m", "-o", "b"], ["compile", "m", "--target", "a3", "-o", "b"]):
        result, _ = run(arguments)
        assert "assumed: the moon is round\n" in result.stderr
        assert "assumed" not in result.stdout


def test_a_fixture_ends_with_its_size(run):
    result, called = run(["fixture", "kimi-linear-48b", "-o", "b"])
    assert called["make_fixture"][1]["quantised"] is False
    assert re.fullmatch(r"fixture of kimi-linear-48b: 5 layers, 7 tensors, 1\.5 MB -> b in \d+\.\d s\n", result.stdout)


def test_help_names_the_targets_and_releases_there_are():
    assert tuple(options.TARGETS.split(", ")) == ("a2", *(t for t in targets.TARGETS if t != "a2"))
    assert tuple(options.CANN_VERSIONS.split(", ")) == targets.CANN_VERSIONS
    assert options.KV_DTYPES == caches.KV_DTYPES
    assert tuple(options.PROVIDERS.split(", ")) == targets.PROVIDERS
    assert tuple(options.PROVIDERS_DEFAULT.split(",")) == targets.PROVIDERS_DEFAULT


def test_the_dtype_of_caches_is_passed_on_and_another_is_a_fault_of_the_command_line(run):
    arguments = ["compile", "kimi-k3.1-pro", "--target", "a3", "--dry-run"]
    result, called = run([*arguments, "--kv-dtype", "int8"])
    assert called["compile_model"][1]["kv_dtype"] == "int8"
    result, called = run([*arguments, "--kv-dtype", "int4"])
    assert (result.exit_code, called) == (2, {})
    assert "unknown dtype of caches 'int4'; expected one of bf16, int8, fp8." in " ".join(result.stderr.split())


@pytest.mark.parametrize("command", [["compile", "m", "--dry-run"], ["ops", "m"]], ids=str)
def test_providers_are_passed_on_in_their_order_and_others_are_answered_before_anything_is_imported(run, command):
    _, called = run([*command, "--target", "a3", "--providers", "own, builtin"])
    (options,) = (options for _, options in called.values() if "target" in options)
    assert options["target"].providers == ("own", "builtin")
    result, called = run([*command, "--target", "a3", "--providers", "builtin,vlm"])
    assert (result.exit_code, called) == (1, {})
    assert "provider 'vlm' is not known; the nearest is" in result.stderr


def test_operators_that_cannot_be_served_are_exit_code_1_after_the_report(run):
    report = Found()
    report.passed = False
    result, _ = run(["ops", "m", "--target", "a3"], cover_model=lambda *a, **k: report)
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (1, "error: 2 graphs, 12 nodes")
    assert result.stdout.startswith("phase")
    result, _ = run(["ops", "m", "--target", "a3", "--json"], cover_model=lambda *a, **k: report)
    assert (result.exit_code, json.loads(result.stdout)) == (1, {"graphs": 2})


def test_an_unknown_target_is_answered_before_anything_is_imported(run):
    result, called = run(["compile", "m", "--target", "a4", "-o", "b"])
    assert (result.exit_code, called) == (1, {})
    assert "the nearest is" in result.stderr


def test_a_dry_run_has_no_folder(run):
    result, called = run(["compile", "kimi-linear-48b", "--target", "a3", "--dry-run"])
    assert result.exit_code == 0
    assert called["compile_model"][1]["out"] is None


def test_a_folder_is_a_checkpoint_and_a_preset_is_not(run, tmp_path):
    _, called = run(["compile", str(tmp_path), "--target", "a3", "--dry-run"])
    assert called["compile_model"][1]["checkpoint"] == tmp_path
    _, called = run(["compile", "kimi-linear-48b", "--target", "a3", "--dry-run"])
    assert called["compile_model"][1]["checkpoint"] is None


@pytest.mark.parametrize(
    "arguments",
    [["inspect", "b"], ["inspect", "b", "--graph", "decode"], ["inspect", "b", "--cost"], ["verify", "b"]],
    ids=str,
)
def test_json_mode_prints_json_and_nothing_else(run, arguments):
    result, _ = run([*arguments, "--json"])
    assert json.loads(result.stdout) == {"graphs": 2}


@pytest.mark.parametrize(
    "arguments",
    [["inspect", "b"], ["compile", "m", "--target", "a3", "--dry-run"], ["fixture", "m", "-o", "b"], ["verify", "b"]],
    ids=str,
)
def test_quiet_leaves_the_last_line_alone(run, arguments):
    def tells(*args, progress=None, **kwargs):
        if progress is not None:
            progress("Tracing", 0, 0)
        return Found()

    functions = dict.fromkeys(("inspect_bundle", "compile_model", "make_fixture", "verify_bundle"), tells)
    result, _ = run([*arguments, "-q"], **functions)
    assert result.stderr == ""
    assert re.fullmatch(r".+ in \d+\.\d s\n", result.stdout)


@pytest.mark.parametrize(
    "line, offered",
    [
        ("comp", ["compile"]),
        ("compile kimi-k3", ["kimi-k3", "kimi-k3.1-pro"]),
        ("compile m --targ", ["--target"]),
        ("compile m --target a3", ["a3", "a3-superpod"]),
        ("compile m --cann 9", ["9.1", "9.2"]),
        ("verify b --mode n", ["native"]),
        ("kernels e", ["export"]),
    ],
)
def test_a_shell_completes_commands_options_presets_and_choices(monkeypatch, line, offered):
    monkeypatch.setenv("COMP_WORDS", f"kimi-graph {line}")
    monkeypatch.setenv("COMP_CWORD", str(len(line.split())))
    monkeypatch.setenv("_KIMI_GRAPH_COMPLETE", "complete_bash")
    result = CliRunner().invoke(cli.app, [], prog_name="kimi-graph")
    assert result.stdout.split() == offered


def test_every_command_takes_json_and_quiet(run):
    for command in (*([c] for c in COMMANDS), ["kernels", "export"]):
        text = run([*command, "--help"])[0].output
        assert "--json" in text and "-q, --quiet" in text, command


def test_what_a_making_command_made_is_json_too(run, tmp_path):
    result, _ = run(["fixture", "m", "-o", "b", "--json"])
    assert json.loads(result.stdout) == {"folder": "b", "layers": 5, "tensors": 7, "bytes": 1_500_000}
    result, _ = run(["kernels", "export", str(tmp_path / "k"), "--json"])
    assert "KdaStep" in json.loads(result.stdout)["operators"]


def test_a_long_result_is_broken_on_a_terminal_but_for_commands_and_whole_elsewhere(monkeypatch, capsys):
    words, command = "head      " + "nine-word " * 30, "compile   kimi-graph compile " + "-o build/x " * 12
    made = output.Made("done", {}, (words, command))
    output.show(made)
    assert capsys.readouterr().out.splitlines()[:2] == [words, command]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    output.show(made)
    *lines, last, _ = capsys.readouterr().out.splitlines()
    assert len(lines) > 1 and max(map(len, lines)) <= 100 and last == command


def test_a_long_error_is_broken_between_words_on_a_terminal_and_whole_elsewhere(monkeypatch, capsys):
    message = "b: " + "nine-word " * 30
    output.print_error(message)
    assert capsys.readouterr().err == f"error: {message}\n"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    for columns in ("200", "60"):
        monkeypatch.setenv("COLUMNS", columns)
        output.print_error(message)
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) > 1 and max(map(len, lines)) <= min(100, int(columns))
        assert " ".join(line.strip() for line in lines) == f"error: {message}".strip()


def test_in_json_mode_a_refusal_is_an_object_too_and_keeps_its_exit_code(run):
    result, _ = run(["inspect", "b", "--json"], inspect_bundle=fails(BundleError("b/manifest.json: not there.")))
    assert result.exit_code == 1
    assert json.loads(result.stdout) == {"error": "b/manifest.json: not there."}
    assert result.stderr == "error: b/manifest.json: not there.\n"


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["plan", "m", "--target", "a3", "--exchange"], "they go with a --mesh"),
        (["plan", "m", "--target", "a3", "--devices", "8", "--moe-chunks", "2"], "they go with a --mesh"),
        (["plan", "m", "--claims"], "leave the rest out"),
        (["plan", "--claims", "--devices", "4"], "leave the rest out"),
        (["plan", "m", "--target", "a3", "--ttft", "0"], "more than 0"),
        (["plan", "--target", "a3"], "say which MODEL"),
    ],
)
def test_choices_that_a_search_makes_itself_are_refused_beside_it(run, arguments, words):
    result, called = run(arguments)
    assert result.exit_code == 2 and words in " ".join(result.stderr.split()) and "make_plan" not in called


def test_an_error_a_caller_can_fix_is_one_message_and_exit_code_1(run):
    result, _ = run(["inspect", "b"], inspect_bundle=fails(BundleError("b/manifest.json: not there.")))
    assert result.exit_code == 1
    assert (result.stdout, result.stderr) == ("", "error: b/manifest.json: not there.\n")


def test_an_error_of_the_system_names_the_file(run):
    result, _ = run(["inspect", "b"], inspect_bundle=fails(OSError(28, "No space left on device", "b/x")))
    assert (result.exit_code, result.stderr) == (1, "error: b/x: No space left on device\n")


def test_our_own_faults_keep_their_traceback(run):
    with pytest.raises(AssertionError):
        run(["inspect", "b"], inspect_bundle=fails(AssertionError("never")))


def test_a_bundle_that_differs_is_exit_code_1(run):
    report = Found()
    report.passed = False
    result, _ = run(["verify", "b"], verify_bundle=lambda *a, **k: report)
    assert (result.exit_code, result.stderr) == (1, "error: 2 graphs, 12 nodes\n")
    assert result.stdout.startswith("phase")
    result, _ = run(["verify", "b", "--json"], verify_bundle=lambda *a, **k: report)
    assert result.exit_code == 1
    assert json.loads(result.stdout) == {"graphs": 2}


@pytest.mark.parametrize(
    "arguments, hint",
    [
        (["compil"], "compile"),
        (["compile", "m", "--target", "a3"], "-o"),
        (["compile", "m", "--target", "a3", "-o", "b", "--phase", "prefil"], "prefill, decode"),
        (["compile", "m", "--target", "a3", "-o", "b", "--phase", "decode,decode"], "twice"),
        (["compile", "m", "--target", "a3", "-o", "b", "--batch", "0"], "--batch 0"),
        (["compile", "m", "--target", "a3", "-o", "b", "--batch=x"], "--batch x"),
        (["verify", "b", "--mode", "fast"], "exact, native"),
        (["verify"], "BUNDLE"),
    ],
    ids=str,
)
def test_a_command_line_that_is_not_understood_is_exit_code_2_with_a_hint(run, arguments, hint):
    result, called = run(arguments)
    assert (result.exit_code, result.stdout, called) == (2, "", {})
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert hint in result.stderr
    result, called = run([*arguments, "--json"])
    assert (result.exit_code, called) == (2, {})
    assert f"error: {json.loads(result.stdout)['error']}\n" == result.stderr


# The rest needs a real process. The command is a stand-in that prints or sleeps.

PROGRAM = """
import signal, sys, time, types
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell started in the background
sys.modules["kimi_graph.compile.inspect"] = fake = types.ModuleType("fake")
class Found:
    summary = "done"
    def text(self): return "line\\n" * 100_000
    def to_json(self): return {}
def inspect_bundle(folder):
    if str(folder) == "sleep":
        print("ready", flush=True)
        time.sleep(60)
    return Found()
fake.inspect_bundle = fake.inspect_graph = inspect_bundle
sys.argv = ["kimi-graph", "inspect", *sys.argv[1:]]
from kimi_graph.cli import main
main()
"""


def process(*arguments):
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_ctrl_c_is_one_line_and_exit_code_130():
    child = process("sleep")
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=20)
    assert (child.returncode, out, err) == (130, "", "interrupted\n")


def test_ctrl_c_is_an_object_too_where_json_was_asked_for():
    child = process("sleep", "--json")
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=20)
    assert (child.returncode, json.loads(out), err) == (130, {"error": "interrupted"}, "interrupted\n")


@pytest.mark.parametrize("options", [[], ["--json"]], ids=["plain", "json"])
def test_ctrl_c_before_the_command_runs_is_no_traceback(monkeypatch, options):
    """While its words are read."""

    def press(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("typer.core.TyperCommand.parse_args", press)
    result = CliRunner().invoke(cli.app, ["targets", *options])
    assert (result.exit_code, result.stderr) == (130, "interrupted\n")
    assert result.stdout == "" or json.loads(result.stdout) == {"error": "interrupted"}
    assert bool(result.stdout) == bool(options)


def test_a_reader_that_goes_away_is_no_error_message():
    child = process("print")
    assert child.stdout.readline() == "line\n"
    child.stdout.close()
    assert (child.wait(timeout=20), child.stderr.read()) == (141, "")
    child.stderr.close()


def test_progress_is_a_line_per_task_where_there_is_no_terminal(capsys):
    with progress_shown() as progress:
        for done in range(3):
            progress("Downloading", done, 2)
        progress("Tracing", 0, 0)
    assert capsys.readouterr() == ("", "Downloading ...\nTracing ...\n")


def test_quiet_work_says_nothing_from_its_threads_either(capsys):
    token = output.manner.set(output.Manner(quiet=True))
    try:
        with progress_shown() as progress:
            thread = threading.Thread(target=progress, args=("write weights", 1, 2))
            thread.start()
            thread.join()
    finally:
        output.manner.reset(token)
    assert capsys.readouterr().err == ""


def test_what_takes_a_moment_has_neither_bar_nor_line(monkeypatch, capsys):
    with progress_shown(bars_alone=True) as progress:
        progress("lint", 0, 2)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    token = output.manner.set(output.Manner())  # a command that began now
    with progress_shown() as progress:
        progress("lint", 0, 2)
    output.manner.reset(token)
    assert capsys.readouterr() == ("", "")


def test_progress_is_a_bar_on_a_terminal_without_colour_where_that_is_not_wanted(monkeypatch, capsys):
    monkeypatch.setattr(output, "PATIENCE", 0)  # however soon after the start the test runs
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with progress_shown() as progress:
        progress("Downloading", 1, 2)
        progress("Tracing", 0, 0)
    out, err = capsys.readouterr()
    assert out == ""
    assert "Downloading" in err
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", err)  # no foreground colour


def test_the_way_to_run_our_operators_is_passed_on(run):
    _, called = run(["verify", "b", "--kernels", "twin", "--cache-dir", "kept"])
    assert called["verify_bundle"][1]["kernels"] == Path("kept") / "twin"
    assert run(["verify", "b"])[1]["verify_bundle"][1]["kernels"] is None
    result, called = run(["verify", "b", "--kernels", "npu"])
    assert (result.exit_code, called) == (2, {})


def test_the_operator_project_is_written_and_named(run, tmp_path):
    result, _ = run(["kernels", "export", str(tmp_path / "out")])
    assert result.exit_code == 0
    *commands, last = result.output.strip().splitlines()
    assert re.fullmatch(r"operator project of .*KdaStep.*: \d+ files -> \S+ in \d+\.\d s", last)
    assert "  cmake -S . -B build -DASCEND_COMPUTE_UNIT=ascend910_93" in commands
    result, _ = run(["kernels", "export", str(tmp_path / "out")])
    assert (result.exit_code, "replace it with --overwrite" in result.stderr) == (1, True)
    purpose, example, usage = run(["kernels", "export", "--help"])[0].output.split("\n\n")[:3]
    assert purpose.startswith("  Write") and example.startswith("  kimi-graph kernels export") and "Usage:" in usage


# ---- deploy ----------------------------------------------------------------------------------------------------------


def test_deploy_passes_on_what_was_given(run):
    result, called = run(["deploy", "b", "--hosts", "h.json", "-o", "out", "--cann", "8.3"])
    assert called == {"deploy_bundle": ((Path("b"), Path("h.json"), Path("out"), "8.3"), {})}
    assert re.search(r"2 graphs, 12 nodes -> made in \d+\.\d s\n$", result.output)
    assert run(["deploy", "b"])[1] == {"deploy_bundle": ((Path("b"), None, None, None), {})}
    result, called = run(["deploy", "b", "--example"], hosts_example=lambda folder: "{}")
    assert (called, result.output) == ({"hosts_example": ((Path("b"),), {})}, "{}\n")


# ---- bringup ---------------------------------------------------------------------------------------------------------


def test_bringup_passes_on_what_was_given(run):
    result, called = run(["bringup", "b", "--checkpoint", "c", "--restart"])
    assert result.exit_code == 0, result.output
    (folder, device), given = called["bring_up"]
    assert (folder, device, given["checkpoint"], given["restart"]) == (Path("b"), None, Path("c"), True)
    assert given["out"] == Path("b.bringup")
    result, called = run(["bringup", "b", "-o", "r"], bring_up=lambda *a, **k: types.SimpleNamespace(
        passed=False, summary="stopped", text=lambda: "steps", to_json=dict))  # fmt: skip
    assert (result.exit_code, called["bring_up"][1]["out"]) == (1, Path("r"))
    assert "error: stopped" in result.stderr


def test_golden_cases_need_weights_and_a_bundle(run, tmp_path):
    for arguments in (["m", "-o", "b"], [str(tmp_path), "--dry-run"]):
        result, called = run(["compile", *arguments, "--target", "a3", "--golden", "2"])
        assert (result.exit_code, called) == (2, {})
        assert "recorded from a run" in result.stderr
    result, called = run(
        ["compile", str(tmp_path), "--target", "a3", "-o", "b", "--golden", "2"], write_golden=lambda *a: 7
    )
    assert called["write_golden"][0] == (Path("b"), tmp_path, 2)
    assert "golden    7 cases of single operators" in result.output


# day0.


def test_day0_gets_every_target_with_its_release_providers_and_what_to_avoid(run):
    options = ["--cann", "9.1", "--providers", "own,builtin", "--avoid", "KdaChunk", "-o", "r", "--keep-work"]
    result, called = run(["day0", "m", "--target", "a3, 950dt", *options, "--no-cache"])
    assert result.exit_code == 0
    assert re.fullmatch(r"2 graphs, 12 nodes -> r in \d+\.\d s", result.stdout.splitlines()[-1])
    (source, targets), given = called["day0"]
    assert source == "m" and [(t.name, t.cann, t.providers, t.avoid) for t in targets] == [
        ("a3", "9.1", ("own", "builtin"), ("KdaChunk",)),
        ("950dt", "9.1", ("own", "builtin"), ("KdaChunk",)),
    ]
    assert (given["out"], given["keep_work"], given["keep"]) == (Path("r"), True, False)


def test_day0_with_a_failed_step_is_exit_code_1_after_the_report(run):
    report = Found()
    report.passed = False
    result, _ = run(["day0", "m", "--target", "a3"], day0=lambda *a, **k: report)
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (1, "error: 2 graphs, 12 nodes")
    result, _ = run(["day0", "m", "--target", "a3", "--json"], day0=lambda *a, **k: report)
    assert (result.exit_code, json.loads(result.stdout)) == (1, {"graphs": 2})


@pytest.mark.parametrize(
    "options, code, words",
    [
        (["--target", "a3,a4"], 1, "target 'a4' is not known"),
        (["--target", "a3,a3"], 2, "names a target twice"),
        (["--target", "a3", "--keep-work"], 2, "stays in the report's folder: give -o."),
    ],
)
def test_day0_answers_what_cannot_be_before_it_starts(run, options, code, words):
    result, called = run(["day0", "m", *options])
    assert (result.exit_code, called) == (code, {})
    assert words in " ".join(result.stderr.replace("│", " ").split())
