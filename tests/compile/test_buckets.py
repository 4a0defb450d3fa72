"""buckets says which graph serves a batch and a length; every phase refuses what one of them could not go on with."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from kimi_graph.cli import app
from kimi_graph.compile.buckets import Gear, Room, buckets_of, check_request, gears_of, serve
from kimi_graph.compile.bundle import open_bundle
from kimi_graph.compile.expect import bundle_config
from kimi_graph.compile.verify import row_capacity
from kimi_graph.errors import BundleError
from kimi_graph.parallel import Mesh


def text(found):
    return [" ".join(line.split()) for line in found.text().splitlines()]


def test_without_a_request_all_gears_are_listed(bundle):
    found = buckets_of(bundle)
    assert text(found) == [
        "prefill batch up to 2, 16 tokens a step: prefill_b2_t16",
        "decode batch up to 2, 1 token a step: decode_b2",
        "length up to 64 tokens: a sequence has 4 pages of 16 tokens",
    ]
    assert (found.summary, found.passed) == ("2 gears; lengths up to 64", True)


def test_a_request_gets_a_graph_of_each_phase_and_its_steps(bundle):
    found = buckets_of(bundle, batch=1, length=40)
    assert text(found)[-2:] == [
        "prefill prefill_b2_t16: a prompt of 40 tokens takes 3 steps of 16",
        "decode decode_b2: one token a step, up to length 40, 1 row is nobody's",
    ]
    assert found.summary == "1 x 40 tokens: served"


def test_the_longest_length_is_served_and_one_more_is_refused_by_both_sides(bundle, compile_small, tmp_path):  # A12
    """A host of prefill and one of decode have bundles of their own, and may not find out one after the other."""
    sides = {phase: tmp_path / phase for phase in ("prefill", "decode")}
    for phase, folder in sides.items():
        compile_small(folder, phases=(phase,))
    why = r"length 65 is over 64: a sequence has 4 pages of 16 tokens; the largest is 64"
    for folder in (bundle, *sides.values()):
        assert buckets_of(folder, 2, 64).passed
        found = buckets_of(folder, 2, 65)
        assert [s.gear for s in found.served] == [None] * len(found.served) and not found.passed
        assert found.summary == f"2 x 65 tokens: refused: {why}"
        check_request(open_bundle(folder), 2, 64)
        with pytest.raises(BundleError, match=why):
            check_request(open_bundle(folder), 2, 65)


def test_a_model_that_ends_within_a_page_sets_the_length(bundle):
    opened = open_bundle(bundle)
    room = Room.of(opened.manifest["state"], replace(bundle_config(opened), max_len=50))
    assert (room.length, room.length_why) == (50, "small takes no longer ones")
    assert serve(gears_of(opened), room, "decode", 1, 51).gear is None


def test_too_many_rows_are_refused_with_what_helps(bundle):
    found = buckets_of(bundle, 3, 10)
    assert found.summary == ("3 x 10 tokens: refused: batch 3 is over 2 rows; take turns, or compile with --batch 3")


@pytest.mark.parametrize(
    "options",
    [
        {"pages": 6},
        {"pages": 12, "mesh": Mesh.parse("dp=2"), "batch": 4},
        {"mesh": Mesh.parse("tp=2"), "split_cache": True},
    ],
    ids=["few pages", "two shards", "two pools"],
)
def test_sequences_that_pages_are_too_few_for_are_refused(compile_small, tmp_path, options):
    """What verify fills rows up to is served; a page more of each is not."""
    compile_small(tmp_path / "b", **options)
    opened = open_bundle(tmp_path / "b")
    rows = opened.graph("decode")["rows"]
    most = row_capacity(opened.manifest["state"], rows)
    assert buckets_of(tmp_path / "b", rows, most).passed
    assert not buckets_of(tmp_path / "b", rows, most + 1).passed
    if most < opened.manifest["state"]["tokens_per_sequence"]:
        why = buckets_of(tmp_path / "b", rows, most + 1).summary
        assert f"{rows} sequences of {most + 1} tokens take more pages than there are; {rows // 2} do not" in why
        assert f"pages for {rows} up to {most} tokens" in buckets_of(tmp_path / "b").text()


def test_the_gear_with_the_fewest_rows_that_are_enough_serves():
    gears = [Gear("decode", rows, 1, (f"decode_b{rows}",)) for rows in (1, 4, 16)]
    room = Room(length=100, length_why="", page=10, pages=1000, pools=1, shards=1)
    chosen = {batch: serve(gears, room, "decode", batch, 5).gear for batch in (1, 2, 4, 5, 16, 17)}
    assert {batch: gear and gear.rows for batch, gear in chosen.items()} == {1: 1, 2: 4, 4: 4, 5: 16, 16: 16, 17: None}


def test_the_command_ends_with_a_verdict_and_an_exit_code(bundle):
    good = CliRunner().invoke(app, ["buckets", str(bundle), "--batch", "2", "--length", "64"])
    assert (good.exit_code, good.stderr) == (0, "")
    bad = CliRunner().invoke(app, ["buckets", str(bundle), "--length", "65"])
    assert bad.exit_code == 1
    assert bad.stderr.startswith("error: 1 x 65 tokens: refused: length 65 is over 64")
    found = json.loads(CliRunner().invoke(app, ["buckets", str(bundle), "--length", "65", "--json"]).stdout)
    assert (found["passed"], found["length"], [s["gear"] for s in found["served"]]) == (False, 64, [None, None])
