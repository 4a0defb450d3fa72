"""What the documents show is run as a reader would, and prints what they say (see `documents.py`)."""

import json
import re
from collections.abc import Iterator

import pytest

from tests.documents import ROOT, Block, Reader, before, blocks, followed_by, missing, pages, stable

pytestmark = [
    pytest.mark.docs,
    pytest.mark.skipif(not (ROOT / "README.md").exists(), reason="needs the repository, not a wheel"),
]

LANGUAGES = {"", "bash", "python", "json", "text", "console"}  # console: errors.md, which its own test makes
MOST_NOT_RUN = 12  # blocks


@pytest.fixture(scope="module")
def reader(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """Follows the pages that were asked for."""
    reader = Reader(tmp_path_factory.mktemp("documents"))
    for item in request.session.items:
        if item.path == request.path and "page" in getattr(getattr(item, "callspec", None), "params", {}):
            reader.start(item.callspec.params["page"])  # type: ignore[attr-defined]
    yield reader
    reader.pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("page", pages())
def test_what_a_page_shows_runs_and_prints_what_it_says(page, reader):
    faults = reader.start(page).result()
    assert not faults, "\n".join(faults)


def test_few_blocks_are_not_run_and_each_says_why():
    left = [b for page in pages() for b in blocks(page) if b.mark == "not run"]
    for block in left:
        print(f"not run: {block}: {block.said}")
        assert len(block.said) > 10, f"{block}: the comment says why"
    assert len(left) <= MOST_NOT_RUN


def test_every_comment_of_the_documents_that_means_something_stands_before_a_block():
    for page in pages():
        marks = re.findall(r"^<!-- *(?:not run|fails|file)\b.*$", (ROOT / page).read_text(), re.M)
        assert len(marks) == sum(b.mark != "" for b in blocks(page)), page


def test_blocks_have_a_language_that_is_run_compared_or_neither():
    languages = {b.language for page in pages() for b in blocks(page)}
    assert {x for x in languages if not re.fullmatch(r"\{[\w-]+\}", x)} <= LANGUAGES


def test_what_is_printed_follows_what_prints_it():
    """A block without a language is compared with the one before it; anything else is `text`."""
    for page in pages():
        source: Block | None = None
        for block in blocks(page):
            assert block.language != "" or source is not None, f"{block}: printed by what? Or is it text?"
            source = block if block.language in ("bash", "python") else source if block.language == "" else None


def test_json_of_the_documents_is_json():
    for page in pages():
        for block in blocks(page):
            if block.language == "json":
                json.loads(block.code)


def test_tests_that_follow_pages_in_their_own_way_read_them():
    for page in pages():
        for test in followed_by(page):
            assert page.removeprefix("docs/") in (ROOT / test).read_text()


def test_pages_that_come_before_others_exist():
    assert {name for page in pages() for name in before(page)} <= set(pages())


# The comparison itself.

PRINTED = "a  12 rows\nmade b in 3.1 s\nerror 2.2e-15 of 7\n"


def test_times_roundings_and_columns_do_not_count():
    assert missing("a 12 rows\n...\nmade b in 47.25 s\nerror 1.9e-16 of 7\n", PRINTED) == []


@pytest.mark.parametrize("shown", ["a 13 rows", "made c in 3.1 s", "error 2.2e-15 of 8", "a 12"])
def test_all_else_counts(shown):
    assert missing(shown, PRINTED) == [shown]


def test_the_order_of_lines_counts():
    assert missing("made b in 3 s\na  12 rows\n", PRINTED) == ["a  12 rows"]


def test_a_number_of_bytes_is_no_time():
    assert stable("14,336 bytes in 5 stages of 12") == "14,336 bytes in 5 stages of 12"
