"""Ends a server when whoever started it is gone, however it went, and removes what the server leaves in shared memory.

A process of its own, outside the server's group and its caller's: a signal to either leaves it alone. It is run by its
path and imports nothing of ours, for it lives as long as the server does.

`python warden.py GROUP`: standard input is a pipe whose other end the caller holds; its end is the caller's.
"""

import contextlib
import fcntl
import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

SHARED = Path("/dev/shm")  # Linux; nothing is looked for where there is none
ENGINES = re.compile(
    r"vllm_offload_.+\.mmap|psm_\w+|.+-cpushm_\d+"
)  # tiers, messages between processes, tensors of ranks
NOTE = "kimi_graph_server_{uid}_{group}"  # names what a server has in shared memory, while its warden lives
GRACE_S = 10  # from asking the server to end to ending it
LOOK_S = 3  # between two looks at what it has; what a process takes and dies with sooner stays unknown

Kept = dict[str, int]  # inode of each file by its name


def members(group: int) -> list[int]:
    """Processes of a group that have not ended."""
    if not Path("/proc/self/stat").exists():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, 0)
            return [group]
        return []
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            state, _, its_group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                found.append(int(stat.parent.name))
    return found


def held(processes: Iterable[int]) -> Kept:
    """What some processes have mapped of an engine's shared memory."""
    found: Kept = {}
    for process in processes:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{process}/maps").read_text().splitlines():
                _, _, _, _, inode, *path = line.split(maxsplit=5)
                name = "".join(path).removeprefix(f"{SHARED}/")
                if ENGINES.fullmatch(name):
                    found[name] = int(inode)
    return found


def remove(kept: Kept) -> list[str]:
    """Remove files of shared memory, where they still are those that were seen and nobody else's by the same name."""
    removed = []
    for name, inode in kept.items():
        path = SHARED / name
        with contextlib.suppress(OSError):
            found = path.lstat()
            if ENGINES.fullmatch(name) and found.st_ino == inode and found.st_uid == os.getuid():
                path.unlink()
                removed.append(name)
    return removed


def remove_leftovers() -> list[str]:
    """Remove what servers left whose wardens were killed too: of each there is a note that nobody has locked."""
    removed = []
    for path in SHARED.glob(NOTE.format(uid=os.getuid(), group="*")):
        with contextlib.suppress(OSError), path.open() as note:
            fcntl.flock(note, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: its warden lives
            if os.fstat(note.fileno()).st_uid == os.getuid() and not members(int(path.name.rpartition("_")[2])):
                lines = (line.split() for line in note if line.endswith("\n"))
                removed += remove({name: int(inode) for name, inode in lines})
                path.unlink()
    return removed


def end(group: int, look: Callable[[], None] = lambda: None) -> None:
    """Ask a group to end, and end it; `look` is called before the second."""
    for number in (signal.SIGTERM, signal.SIGCONT):  # one that was stopped hears of it too
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)
    until = time.monotonic() + GRACE_S
    while members(group) and time.monotonic() < until:
        time.sleep(0.05)
    look()
    while members(group):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
        time.sleep(0.05)


@contextlib.contextmanager
def noted(group: int) -> Iterator[tuple[Kept, Callable[[], None]]]:
    """What a group has had in shared memory, and a look that adds what it has now; written down meanwhile."""
    kept: Kept = {}
    if not SHARED.is_dir():
        yield kept, lambda: None
        return
    path = SHARED / NOTE.format(uid=os.getuid(), group=group)
    with os.fdopen(os.open(path, os.O_CREAT | os.O_TRUNC | os.O_RDWR | os.O_NOFOLLOW, 0o600), "w") as note:
        fcntl.flock(note, fcntl.LOCK_EX)

        def look() -> None:
            new = held(members(group)).items() - kept.items()
            kept.update(new)
            note.writelines(f"{name} {inode}\n" for name, inode in new)
            note.flush()

        yield kept, look
        path.unlink(missing_ok=True)


def main() -> None:
    """Watch until the pipe or the server ends; then end and remove what is left of the server."""
    group = int(sys.argv[1])
    with noted(group) as (kept, look):
        while members(group):
            look()
            if select.select([sys.stdin], [], [], LOOK_S)[0]:
                break
        end(group, look)
        remove(kept)


if __name__ == "__main__":
    main()
