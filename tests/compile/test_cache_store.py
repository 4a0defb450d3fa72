"""A store finds what was kept for the same fields and nothing else, and notices damage; what fails is no error."""

import errno
import os
import random
import threading
import time
from pathlib import Path

import pytest

from kimi_graph.compile.cache_store import ABANDONED, Store

FIELDS = {"source": "a" * 64, "--chunk": 512, "--mesh": None, "phases": ["prefill", "decode"]}
FILES = {"one": b"1" * 5000, "two/three": b"", "four": bytes(range(256))}


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


def entry(store):
    (path,) = (p for p in store.folder.glob("*/*") if not p.name.startswith("."))
    return path


def test_what_was_kept_is_found_for_the_same_fields_in_their_order(store):
    assert store.get("kind", FIELDS) is None
    store.put("kind", FIELDS, FILES)
    found = store.get("kind", dict(reversed(FIELDS.items())))
    assert (found, list(found), store.notes) == (FILES, list(FILES), [])
    assert store.get("another kind", FIELDS) is None


@pytest.mark.parametrize("change", [{"--chunk": 256}, {"--mesh": "tp=2"}, {"phases": ["decode"]}, {"new": 1}], ids=str)
def test_other_fields_find_nothing(store, change):
    store.put("kind", FIELDS, FILES)
    assert store.get("kind", FIELDS | change) is None


def test_a_store_may_be_moved(store, tmp_path):
    store.put("kind", FIELDS, FILES)
    store.folder.rename(tmp_path / "elsewhere")
    assert Store(tmp_path / "elsewhere").get("kind", FIELDS) == FILES
    assert store.get("kind", FIELDS) is None


@pytest.mark.parametrize("seed", range(40))
def test_any_flipped_byte_is_noticed_and_the_entry_is_made_again(store, seed):
    store.put("kind", FIELDS, FILES)
    path, chance = entry(store), random.Random(seed)
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= chance.randrange(1, 256)
    path.write_bytes(data)
    assert store.get("kind", FIELDS) is None
    assert store.notes == [f"{path}: damaged; made again"]
    store.put("kind", FIELDS, FILES)
    assert store.get("kind", FIELDS) == FILES


@pytest.mark.parametrize("left", [0, 1, 100, -1])
def test_an_entry_that_is_cut_off_is_noticed(store, left):
    store.put("kind", FIELDS, FILES)
    path = entry(store)
    path.write_bytes(path.read_bytes()[:left])
    assert store.get("kind", FIELDS) is None and store.notes


@pytest.mark.parametrize("head", [b"[]", b"3", b'{"fields": 1}', b"[" * 100_000, b'{"files": [["x", 1e999]]}', b"\xff"])
def test_an_entry_of_anything_is_noticed(store, head):
    store.put("kind", FIELDS, FILES)
    entry(store).write_bytes(head + b"\n")
    assert store.get("kind", FIELDS) is None and store.notes
    assert store.why_not("kind", FIELDS) == "nothing is kept yet"


def test_an_entry_under_the_name_of_another_is_noticed(store):
    store.put("kind", FIELDS | {"--chunk": 1}, FILES)
    path = entry(store)
    store.put("kind", FIELDS, FILES)
    path.replace(next(p for p in store.folder.glob("*/*") if p != path))
    assert store.get("kind", FIELDS) is None and store.notes


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"--chunk": 256}, "--chunk is 256, was 512"),
        ({"--mesh": "tp=2"}, "--mesh is tp=2, was none"),
        ({"phases": ["decode"]}, "phases is decode, was prefill,decode"),
        ({"source": "b" * 64}, "source changed"),
        ({"source": "b" * 64, "--chunk": 1}, "source changed; --chunk is 1, was 512"),
    ],
    ids=str,
)
def test_the_reason_of_a_miss_is_how_the_nearest_entry_differs(store, change, reason):
    assert store.why_not("kind", FIELDS) == "nothing is kept yet"
    store.put("kind", {name: f"another {value}" for name, value in FIELDS.items()}, FILES)
    store.put("kind", FIELDS, FILES)
    store.put("kind", {"of": "an older version"}, FILES)
    assert store.why_not("kind", FIELDS | change) == reason


def test_the_first_differences_are_listed_and_the_others_counted(store):
    store.put("kind", dict.fromkeys("abcde", 0), FILES)
    reason = "a is 1, was 0; b is 1, was 0; c is 1, was 0 and 2 more"
    assert store.why_not("kind", dict.fromkeys("abcde", 1)) == reason


def test_what_was_used_longest_ago_goes_first(tmp_path):
    store = Store(tmp_path, limit=6000)
    noise = {"noise": random.Random(0).randbytes(2500)}
    for n in (1, 2):
        store.put("kind", {"n": n}, noise)
        os.utime(store._path("kind", {"n": n}), (n, n))
    assert store.get("kind", {"n": 1}) == noise  # used now
    store.put("kind", {"n": 3}, noise)
    assert [n for n in (1, 2, 3) if store.get("kind", {"n": n})] == [1, 3]


def test_files_that_a_killed_process_left_are_taken_away_when_they_are_old(store):
    store.put("kind", FIELDS, FILES)
    old, new = entry(store).with_name(".x.1"), entry(store).with_name(".x.2")
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - ABANDONED - 60,) * 2)
    store.put("kind", FIELDS | {"--chunk": 1}, FILES)
    assert (old.exists(), new.exists()) == (False, True)


@pytest.mark.parametrize("where", ["write_bytes", "replace", "mkdir"])
def test_a_full_disk_is_a_note_and_leaves_nothing(store, monkeypatch, where):
    def full(self, *args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, where, full)
    store.put("kind", FIELDS, FILES)
    monkeypatch.undo()
    assert store.notes == [f"{store.folder / 'kind'}: No space left on device; nothing was kept"]
    assert [p for p in store.folder.rglob("*") if p.is_file()] == []


def test_a_store_of_somebody_else_is_read_and_keeps_nothing(store, tmp_path, nobody):
    store.put("kind", FIELDS, FILES)
    for folder in (store.folder, store.folder / "kind"):
        folder.chmod(0o555)
    with nobody():
        assert store.get("kind", FIELDS) == FILES and not store.notes
        store.put("kind", FIELDS | {"more": 1}, FILES)
    assert store.notes == [f"{store.folder / 'kind'}: Permission denied; nothing was kept"]


def test_a_store_that_is_a_file_is_a_note(tmp_path):
    (tmp_path / "store").write_text("mine")
    store = Store(tmp_path / "store")
    store.put("kind", FIELDS, FILES)
    assert store.get("kind", FIELDS) is None
    assert len(store.notes) == 2 and (tmp_path / "store").read_text() == "mine"


def test_many_builders_at_once_do_not_disturb_each_other(store):
    wrong = []

    def work(seed):
        mine, chance = Store(store.folder, limit=20_000), random.Random(seed)
        for _ in range(60):
            n = chance.randrange(4)
            files = {"f": bytes([n]) * 3000, "noise": random.Random(n).randbytes(4000)}
            if chance.random() < 0.5:
                mine.put("kind", {"n": n}, files)
            elif (found := mine.get("kind", {"n": n})) is not None and found != files:
                wrong.append(n)
            mine.why_not("kind", {"n": -1})
        wrong.extend(mine.notes)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []
