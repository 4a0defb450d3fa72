"""A folder is the old one or the new one, whenever its writer is killed, whoever else writes, even on a full disk."""

import errno
import os
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kimi_graph import files
from kimi_graph.errors import KimiGraphError
from kimi_graph.files import Standing, check_writable, new_folder, write_file

ROOT = Path(__file__).parents[1]


def write(folder, text, count=3):
    with new_folder(folder) as work:
        (work / "deep").mkdir()
        for i in range(count):
            (work / "deep" / str(i)).write_text(text)


def texts(folder):
    return {p.read_text() for p in folder.rglob("*") if p.is_file()}


def names(folder):
    return sorted(p.name for p in folder.iterdir())


@pytest.fixture(params=["exchange", "two renames"])
def way(request, monkeypatch):
    """Both ways to replace a folder."""
    if request.param == "two renames":
        monkeypatch.setattr(files, "_exchange", lambda one, other: False)
    elif sys.platform != "linux":
        pytest.skip("renameat2 is Linux's")


def test_a_folder_is_replaced_whole_and_nothing_is_left_beside(tmp_path, way):
    write(tmp_path / "a", "old", count=5)
    write(tmp_path / "a", "new")
    assert (names(tmp_path), texts(tmp_path / "a"), len(names(tmp_path / "a" / "deep"))) == (["a"], {"new"}, 3)


def test_a_link_is_replaced_and_what_it_led_to_stays(tmp_path, way):
    write(tmp_path / "other", "mine")
    (tmp_path / "a").symlink_to("other")
    write(tmp_path / "a", "new")
    assert names(tmp_path) == ["a", "other"]
    assert not (tmp_path / "a").is_symlink() and texts(tmp_path / "other") == {"mine"}


def test_at_no_moment_is_the_place_empty_while_it_is_replaced(tmp_path):
    if sys.platform != "linux":
        pytest.skip("renameat2 is Linux's")
    write(tmp_path / "a", "0")
    done, missed = threading.Event(), []

    def watch():
        while not done.is_set():
            missed.extend([] if os.path.lexists(tmp_path / "a" / "deep" / "0") else ["gone"])

    watcher = threading.Thread(target=watch)
    watcher.start()
    for i in range(200):
        write(tmp_path / "a", str(i), count=1)
    done.set()
    watcher.join()
    assert not missed


def test_after_an_error_the_old_folder_is_there_and_nothing_else(tmp_path, way):
    write(tmp_path / "a", "old")
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "a") as work:
        (work / "x").write_text(f"half {1 / 0}")
    assert (names(tmp_path), texts(tmp_path / "a")) == (["a"], {"old"})


def test_what_may_not_be_replaced_is_asked_at_the_end_again(tmp_path):
    """Two at once, and each found the place empty."""

    class ThereError(Exception):
        pass

    def may_replace():
        if (tmp_path / "a").exists():
            raise ThereError

    with pytest.raises(ThereError), new_folder(tmp_path / "a", may_replace):
        write(tmp_path / "a", "first")
    assert (names(tmp_path), texts(tmp_path / "a")) == (["a"], {"first"})


def test_many_writers_at_once_leave_the_folder_of_one_of_them(tmp_path, way):
    wrong = []

    def work(n):
        try:
            for _ in range(15):
                write(tmp_path / "a", str(n))
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(5)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
    assert len(texts(tmp_path / "a")) == 1
    assert len(names(tmp_path / "a" / "deep")) == 3
    write(tmp_path / "a", "last")
    assert names(tmp_path) == ["a"]


def test_a_folder_inside_one_that_is_being_written_waits_for_nobody(tmp_path, way):
    with new_folder(tmp_path / "a") as work:
        write(work / "inner", "first")
        write(work / "inner", "second")
    assert texts(tmp_path / "a" / "inner") == {"second"}
    assert names(tmp_path / "a") == ["inner"]


def test_what_killed_processes_left_is_taken_away_and_what_others_write_is_not(tmp_path):
    ours = [".a.00000000.part", ".a.11111111.old"]
    others = [".a*.12345678.part", ".a.00000000.part.mine", ".ab.00000000.part"]
    for name in ours + others:
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_text("half")
    (tmp_path / "a").mkdir()
    with new_folder(tmp_path / "a") as first:
        write(tmp_path / "a", "second")
        assert first.is_dir()
    assert names(tmp_path) == [*others, "a"]
    write(tmp_path / "a*", "a pattern that only it matches")
    assert names(tmp_path) == [*others[1:], "a", "a*"]


def test_what_was_moved_away_when_its_writer_was_killed_is_put_back(tmp_path):
    """Where two folders cannot be exchanged in one step."""
    write(tmp_path / ".a.00000000.old", "old")
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "a"):
        raise ZeroDivisionError
    assert (names(tmp_path), texts(tmp_path / "a")) == (["a"], {"old"})


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT], ids=os.strerror)
@pytest.mark.parametrize("at", ["mkdir", "write", "close", "rename"])
def test_an_error_of_the_system_names_the_file_that_was_to_be(tmp_path, monkeypatch, way, code, at):
    write(tmp_path / "a", "old")

    def fail(path, *args):
        raise OSError(code, os.strerror(code), *([] if at == "close" else [str(path)]))

    def change(work):
        if at in ("write", "close"):
            fail(work / "model.safetensors")

    if at in ("mkdir", "rename"):
        monkeypatch.setattr(Path, at, lambda path, *_, parents=False, **__: None if parents else fail(path))
        monkeypatch.setattr(files, "_exchange", lambda one, other: False)
    with pytest.raises(OSError, match=os.strerror(code)) as raised, new_folder(tmp_path / "a") as work:
        change(work)
    monkeypatch.undo()
    name = str(tmp_path / "a" / "model.safetensors") if at == "write" else str(tmp_path / "a")
    assert (raised.value.errno, raised.value.filename) == (code, name)
    assert (names(tmp_path), texts(tmp_path / "a")) == (["a"], {"old"})


def test_an_error_about_another_file_keeps_its_name(tmp_path):
    with pytest.raises(FileNotFoundError) as raised, new_folder(tmp_path / "a"):
        (tmp_path / "b").read_bytes()
    assert raised.value.filename == str(tmp_path / "b")


PROGRAM = """
import sys
from pathlib import Path
from kimi_graph.files import new_folder
print("ready", flush=True)
for i in range(1000000):
    with new_folder(sys.argv[1]) as work:
        for n in range(20):
            (work / str(n)).write_text(str(i))
"""


def test_killed_at_any_moment_it_leaves_a_whole_folder(tmp_path):
    environ, chance = {**os.environ, "PYTHONPATH": str(ROOT)}, random.Random(0)
    write(tmp_path / "a", "old")
    for _ in range(12):
        child = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(tmp_path / "a")], env=environ, stdout=subprocess.PIPE
        )
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        time.sleep(chance.random() * 0.05)
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        if sys.platform == "linux":
            assert len(texts(tmp_path / "a")) == 1
            assert len([p for p in (tmp_path / "a").rglob("*") if p.is_file()]) in (3, 20)
    write(tmp_path / "a", "new")
    assert (names(tmp_path), texts(tmp_path / "a")) == (["a"], {"new"})


def test_a_fixture_on_a_full_disk_names_its_path_and_leaves_nothing(tmp_path):
    """A limit on the size of files stands for the disk."""

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    arguments = [sys.executable, "-m", "kimi_graph", "fixture", "kimi-linear-48b", "-o", "made"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(arguments, cwd=tmp_path, env=environ, capture_output=True, text=True, preexec_fn=limit)
    assert done.returncode == 1
    assert done.stderr == f"error: {tmp_path}/made: File too large\n"
    assert names(tmp_path) == []


def test_two_fixtures_into_one_folder_at_once_are_one_fixture_and_a_refusal(tmp_path):
    arguments = [sys.executable, "-m", "kimi_graph", "fixture", "kimi-linear-48b", "--layers", "2", "-o", "made"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    seeds = (["--seed", str(n)] for n in range(2))
    both = [
        subprocess.Popen(arguments + seed, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for seed in seeds
    ]
    said = [process.communicate(timeout=120) for process in both]
    assert sorted(process.returncode for process in both) == [0, 1]
    wrong = next(err for process, (_, err) in zip(both, said, strict=True) if process.returncode)
    assert wrong == b"error: made: is a fixture already; replace it with --overwrite, or choose another folder.\n"
    assert names(tmp_path) == ["made"]


@pytest.mark.parametrize(
    "where, words",
    [
        ("file", ""),  # is replaced, or not, by other rules
        ("new", ""),
        ("new/deep", ""),
        ("file/a", "is a file, not a folder; choose another place."),
        ("file/deep/a", "is a file, not a folder; choose another place."),
        ("loop/a", "Too many levels of symbolic links; choose another place."),
        ("n" * 250, "File name too long; choose another place."),
    ],
    ids=lambda text: text[:20],
)
def test_a_place_where_nothing_can_be_written_is_refused_before_work(tmp_path, where, words):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "loop").symlink_to("loop")
    if not words:
        check_writable(tmp_path / where)
    else:
        with pytest.raises(KimiGraphError, match=re.escape(words)) as caught:
            check_writable(tmp_path / where)
        assert str(caught.value).startswith(f"{tmp_path / where}: ")
        with pytest.raises(OSError, match=r"\[Errno"), new_folder(tmp_path / where):  # it is really so
            pass
    assert names(tmp_path) == ["file", "loop"]


def test_a_folder_of_somebody_else_is_refused_before_work(tmp_path, nobody):
    (tmp_path / "theirs").mkdir(mode=0o555)
    words = (
        f"{tmp_path}/theirs/deep/a: {tmp_path}/theirs cannot be written to (Permission denied); choose another place."
    )
    with nobody(), pytest.raises(KimiGraphError, match=re.escape(words)):
        check_writable(tmp_path / "theirs" / "deep" / "a")


def write_meanwhile(folder, mine, theirs):
    """One begins, another writes, and the one ends."""
    standing = Standing.of(folder, "mark")
    with new_folder(folder, standing=standing) as work:
        (work / "mark").write_text(mine)
        with new_folder(folder) as other:
            (other / "mark").write_text(theirs)


def test_what_somebody_else_wrote_meanwhile_is_kept_and_the_loser_is_told(tmp_path, way):
    for before in ("nothing", "old"):
        if before == "old":
            (tmp_path / "a" / "mark").write_text("old")
        with pytest.raises(KimiGraphError, match="another process has written something else there while this one"):
            write_meanwhile(tmp_path / "a", "mine", "theirs")
        assert (names(tmp_path), texts(tmp_path / "a")) == (["a"], {"theirs"})
    write_meanwhile(tmp_path / "a", "same", "same")
    write_meanwhile(tmp_path / "a", "new", "same")  # nobody has changed it
    assert (names(tmp_path), texts(tmp_path / "a")) == (["a"], {"new"})


def test_a_file_in_a_folder_of_others_touches_nothing_else(tmp_path):
    (tmp_path / "a.html.part").write_text("mine")
    for text in (b"old", b"new"):
        write_file(tmp_path / "a.html", text)
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"a.html.part": "mine", "a.html": "new"}


@pytest.mark.parametrize("where, error", [("folder", IsADirectoryError), ("file/a", NotADirectoryError)])
def test_a_file_that_cannot_be_is_named_and_leaves_nothing(tmp_path, where, error):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine")
    with pytest.raises((error, FileExistsError)) as caught:
        write_file(tmp_path / where, b"new")
    assert caught.value.filename in (str(tmp_path / where), str(tmp_path / "file"))
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["file", "folder"]


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system takes no advice")
def test_files_are_fetched_from_the_first_on_up_to_so_many_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "FETCHED", 4)
    for name, size in (("a", 10), ("b", 10), ("c", 10)):
        (tmp_path / name).write_bytes(bytes(size))
    asked, done = [], threading.Event()

    def advise(descriptor, at, size, advice):
        asked.append((Path(f"/proc/self/fd/{descriptor}").readlink().name, at, size))
        if asked[-1] == ("b", 4, 2):
            done.set()

    monkeypatch.setattr(os, "posix_fadvise", advise)
    files.fetch_ahead([tmp_path / name for name in ("gone", "a", "b", "c")], 16)
    assert done.wait(10)
    assert asked == [("a", 0, 4), ("a", 4, 4), ("a", 8, 2), ("b", 0, 4), ("b", 4, 2)]
