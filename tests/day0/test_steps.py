"""Steps: what one that fails stops, and what becomes of faults."""

from pathlib import Path

import pytest

from kimi_graph.day0.steps import Found, Step, run_steps
from kimi_graph.errors import ConfigError


def raising(error):
    def run():
        raise error

    return run


def step(name, run, *needs):
    return Step(name=("", name), run=run, seconds=1, needs=tuple(("", need) for need in needs))


def outcomes(*steps, work=Path("nowhere"), notify=lambda *what: None):
    return {o.name[1]: o for o in run_steps(steps, notify, work)}


def passes():
    return Found(words="fine")


def test_a_failed_step_stops_those_alone_that_need_it():
    found = outcomes(
        step("a", raising(ConfigError("no"))), step("b", passes), step("c", passes, "b", "a"), step("d", passes, "c")
    )
    assert [(o.found.state, o.found.words) for o in found.values()] == [
        ("failed", "no"),
        ("passed", "fine"),
        ("skipped", "needs a, which failed"),
        ("skipped", "needs a, which failed"),  # what began it
    ]


@pytest.mark.parametrize(
    "error, words",
    [
        (ConfigError("x.json: one\nx.json: two"), "x.json: one"),
        (OSError(28, "No space left on device", "w.bin"), "w.bin: No space left on device"),
        (AssertionError("seven"), "a fault of kimi-graph, not of the model: AssertionError: seven"),
    ],
    ids=lambda x: type(x).__name__,
)
def test_an_error_is_what_its_step_found_and_the_next_is_tried(error, words):
    found = outcomes(step("a", raising(error)), step("b", passes))
    assert (found["a"].found.state, found["a"].found.words, found["b"].found.state) == ("failed", words, "passed")


def test_what_needs_a_failed_step_that_goes_on_is_tried():
    half = Found(words="half", state="failed", value=7, goes_on=True)
    found = outcomes(step("a", lambda: half), step("b", passes, "a"))
    assert [o.found.state for o in found.values()] == ["failed", "passed"]


def test_further_lines_of_an_error_are_kept():
    found = outcomes(step("a", raising(ConfigError("one\ntwo\nthree"))))
    assert found["a"].found.lines == ("two", "three")


def test_a_fault_of_ours_is_told_with_its_place():
    from kimi_graph.read_config import parse_json

    found = outcomes(step("a", lambda: parse_json(7, "x", ConfigError)))  # no bytes
    assert found["a"].found.lines[0].startswith("at read_config.py:")


def test_ctrl_c_is_no_finding():
    with pytest.raises(KeyboardInterrupt):
        outcomes(step("a", raising(KeyboardInterrupt())))


def test_a_folder_that_is_gone_afterwards_is_not_named():
    found = outcomes(step("a", raising(ConfigError("/x/.r.part/work/b: bad"))), work=Path("/x/.r.part/work"))
    assert found["a"].found.words == "work/b: bad"


def test_the_time_left_goes_from_what_was_written_down_to_what_was_measured(monkeypatch):
    clock, said = iter([0, 100, 100, 200, 200, 300]), []
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    steps = [Step(name=("t", name), run=passes, seconds=10) for name in "abc"]
    outcomes(*steps, notify=lambda what, done, total: said.append(what))
    assert said == [
        "t: a (1 of 3, about 30 s left)",
        "t: b (2 of 3, about 110 s left)",  # (100 + 10) / (10 + 10) times slower than written down
        "t: c (3 of 3, about 70 s left)",
    ]
