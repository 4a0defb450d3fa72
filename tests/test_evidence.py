"""docs/evidence.md is what the rows of the code say, and every row says where it is from, and of when."""

import importlib.util
from pathlib import Path

import pytest

import kimi_graph
from kimi_graph.compile.executor.registry import SEMANTICS
from kimi_graph.compile.limits import LIMITS
from kimi_graph.compile.prototype_rows import ROWS
from kimi_graph.compile.targets import TARGETS, target
from kimi_graph.plan.profiles import numbers

ROOT = Path(kimi_graph.__file__).resolve().parent.parent
SCRIPT = ROOT / "docs" / "make_evidence.py"
if not SCRIPT.exists():
    pytest.skip("needs the repository, not a wheel", allow_module_level=True)
_spec = importlib.util.spec_from_file_location("make_evidence", SCRIPT)
assert _spec and _spec.loader
evidence = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(evidence)


def test_the_page_is_what_the_rows_say():
    wanted, found = evidence.page().splitlines(), evidence.PAGE.read_text().splitlines()
    changed = [f"- {line[:200]}" for line in found if line not in wanted]
    changed += [f"+ {line[:200]}" for line in wanted if line not in found]
    assert found == wanted, "python docs/make_evidence.py makes it anew:\n" + "\n".join(changed)


def test_every_prototype_is_dated_or_ours():
    undated = {t: r.source for t, r in ROWS.items() if not evidence.date(r.source) and not evidence.is_own(r.source)}
    assert not undated
    assert {r.provider for r in ROWS.values() if evidence.is_own(r.source)} == {"own"}


def test_what_has_run_on_a_device_is_dated():
    assert not [t for t, r in ROWS.items() if r.ran and not evidence.date(r.ran)]


def test_every_number_of_hardware_is_dated_or_assumed():
    undated = [
        f"{name}: {what}: {n}"
        for name in TARGETS
        for what, n in numbers(target(name)).items()
        if n.how != "assumed" and not evidence.date(n.source)
    ]
    assert not undated, "\n".join(undated)


def test_numbers_that_stand_alone_are_dated_or_ours_and_held_by_a_test():
    for c in evidence.CONSTANTS:
        assert evidence.date(c.source) or c.source == evidence.OWN, c
        assert (ROOT / "tests" / c.test).exists(), c


def test_every_operator_with_a_prototype_limits_or_semantics_is_listed_once():
    listed = [row[0].strip("`") for row in evidence.operators()]
    assert sorted(listed) == sorted({*ROWS, *LIMITS, *SEMANTICS})


def test_the_limits_of_an_operator_are_read_off_its_checks():
    lines = dict(evidence.limit_lines())
    assert "the number of taps: one of 2, 3, 4" in lines["`CausalConv1d`"]
    assert "a multiple of 16 from 16 to 256" in lines["`KdaChunk`"], "of a helper"


def test_sources_are_named_by_one_row_each():
    words = [w for s in evidence.SOURCES for w in s.words.split("|")]
    assert len(words) == len(set(words))
