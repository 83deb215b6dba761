"""Processes and shared memory of this test run.

Other programs run beside, and other runs of these tests.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

MARK = "HEADRACE_TEST_RUN"
BESIDE = "HEADRACE_BESIDE_TESTS"  # other checks of this tree carry it: they make no names in /dev/shm
_NAMED_BY_PROCESS = re.compile(r"(?:torch_|pym-)(\d+)\D")  # torch's, and those of multiprocessing's heap
_PROBE = re.compile(r"[a-z0-9_]{8}")  # see tempfile._get_default_tempdir

_of_others: set[int] = set()  # processes that were there before the first test, and still are: they need no look
_seen: set[int] = {os.getpid()}  # ours, also those that have ended since


def processes() -> dict[tuple[int, str], str]:
    """Our descendants, and those that carry the mark of this run though their parents are gone; zombies too."""
    pids = _pids()
    _of_others.intersection_update(pids)  # numbers of ended processes are reused
    parents, started = _family([pid for pid in pids if pid not in _of_others])
    if not _of_others:
        _of_others.update(pid for pid in parents if os.getpid() not in _ancestors(pid, parents))
    mark = f"{MARK}={os.environ.get(MARK, '')}"
    ours: dict[tuple[int, str], str] = {}
    for pid in parents:
        process = pid, started[pid]
        if os.getpid() in _ancestors(pid, parents) or (pid not in _of_others and _carries(pid, mark)):
            command = text(f"/proc/{pid}/cmdline").replace("\0", " ").strip()[:200]
            state = text(f"/proc/{pid}/stat").rpartition(")")[2].split()[:1]
            ours[process] = f"{pid} {command or '(no command line)'} state {''.join(state) or 'gone'}"
    _seen.update(pid for pid, _ in ours)
    return ours


def shared_names(among: Iterable[str] | None = None) -> set[str]:
    """Entries of /dev/shm that our processes have made, or hold: `among` these, or of all.

    A name without a holder and a process number has no known owner. It is taken for ours, unless a Python that
    has nothing to do with this run is there: alone, nothing is overlooked.
    """
    files: dict[str, os.stat_result] = {}
    for name in names_in("/dev/shm") if among is None else among:
        with contextlib.suppress(OSError):  # gone meanwhile
            files[name] = Path("/dev/shm", name).stat()
    if not files:
        return set()
    processes()
    holders = _holders()
    return {
        name
        for name, file in files.items()
        if file.st_uid == os.getuid() and _is_ours(name, holders.get(file.st_ino, set()))
    }


def is_probe(path: Path) -> bool:
    if not _PROBE.fullmatch(path.name):
        return False
    try:
        return path.stat().st_size in (0, 4) and path.read_bytes() in (b"", b"blat")
    except OSError:  # a folder, or gone meanwhile
        return not path.exists()


def _is_ours(name: str, holders: set[int]) -> bool:
    known = set(holders)
    if (told := _NAMED_BY_PROCESS.match(name)) and (int(told[1]) in _seen or Path("/proc", told[1]).exists()):
        known.add(int(told[1]))
    return bool(known & _seen) if known else not _is_another_python_there()


def _holders() -> dict[int, set[int]]:
    found: dict[int, set[int]] = {}
    for pid in _pids():
        mapped = [line.split(maxsplit=5) for line in text(f"/proc/{pid}/maps").splitlines() if "/dev/shm/" in line]
        inodes = [int(fields[4]) for fields in mapped]
        for fd in names_in(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                path = Path(f"/proc/{pid}/fd/{fd}")
                if str(path.readlink()).startswith("/dev/shm/"):
                    inodes.append(path.stat().st_ino)
        for inode in inodes:
            found.setdefault(inode, set()).add(pid)
    return found


def _is_another_python_there() -> bool:
    """True when a Python runs that is no part of this run of the tests: neither below it, nor what started it."""
    parents, _ = _family(_pids())
    run = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()  # all that run tests side by side
    started_by = {run, *_ancestors(run, parents)}
    return any(
        _program(pid).startswith("python")
        for pid in parents
        if pid not in started_by
        and pid not in _seen
        and run not in _ancestors(pid, parents)
        and not _carries(pid, f"{BESIDE}=1")
    )


def _family(pids: Iterable[int]) -> tuple[dict[int, int], dict[int, str]]:
    parents: dict[int, int] = {}
    started: dict[int, str] = {}
    for pid in pids:
        # The name in parentheses may hold spaces and parentheses itself.
        fields = text(f"/proc/{pid}/stat").rpartition(")")[2].split()
        if len(fields) > 19:
            parents[pid], started[pid] = int(fields[1]), fields[19]
    return parents, started


def _ancestors(pid: int, parents: dict[int, int]) -> Iterator[int]:
    while pid := parents.get(pid, 0):
        yield pid


def _carries(pid: int, mark: str) -> bool:
    return mark in text(f"/proc/{pid}/environ").split("\0")


def _program(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/exe").readlink().name
    except OSError:
        return ""  # gone, or another user's


def _pids() -> list[int]:
    return [int(name) for name in names_in("/proc") if name.isdigit()]


def names_in(folder: str) -> list[str]:
    try:
        return [entry.name for entry in os.scandir(folder)]
    except OSError:
        return []


def text(path: str) -> str:
    return data(path).decode(errors="replace")


def data(path: str) -> bytes:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    with open(file, "rb", buffering=0) as opened:  # noqa: PTH123 -- all of this is done twice a test
        with contextlib.suppress(OSError):  # the process has ended meanwhile
            return opened.readall()
        return b""
