"""Limits of open file descriptors, and descriptors sent to workers."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from headrace.errors import OptionError

SHORT = (errno.EMFILE, errno.ENFILE)
ADVICE = "raise the limit (`ulimit -n 4096` in the shell that starts this process)"
OF_A_LOADER = 20  # its loop, its memory for functions, its connection to the fork server
OF_A_WORKER = 3  # its socket, and its process
_FEWEST_READS, _FEWEST_SEGMENTS = 4, 4


def limit() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return 512
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if most == resource.RLIM_INFINITY else most


def free() -> int:
    try:
        is_open = sum(1 for _ in os.scandir("/proc/self/fd"))
    except OSError:
        is_open = 64
    return limit() - is_open


def require(workers: int, *, reads: bool) -> None:
    """Raise early if descriptors will not suffice.

    Args:
        reads: True if the loader fetches data, which takes connections and memory segments.

    Raises:
        OptionError: too few descriptors are free.
    """
    needed = OF_A_WORKER * workers + OF_A_LOADER + (_FEWEST_READS + _FEWEST_SEGMENTS if reads else 0)
    if needed > (room := free()):
        raise OptionError(
            f"num_workers={workers} needs some {needed} file descriptors, and this process can open {max(room, 0)} "
            f"more of the {limit()} that it may have: {ADVICE}, or have fewer workers"
        )


def reads_at_most(workers: int) -> int:
    """Return the maximum number of concurrent reads: half of what workers leave."""
    return max(_FEWEST_READS, _left_by(workers) // 2)


def segments_at_most(workers: int) -> int:
    """Return the maximum number of shared-memory segments: a quarter of what workers leave."""
    return max(_FEWEST_SEGMENTS, _left_by(workers) // 4)


def _left_by(workers: int) -> int:
    return free() - OF_A_WORKER * workers - OF_A_LOADER


# Descriptors sent to workers along with a pickle, which refers to them by index.


class _Now(threading.local):
    sent: list[int] | None = None
    received: Sequence[int] = ()


_now = _Now()


@contextlib.contextmanager
def sending(descriptors: list[int]) -> Iterator[None]:
    """Return a context of pickling for workers, which collects copies of pickled descriptors."""
    before, _now.sent = _now.sent, descriptors
    try:
        yield
    finally:
        _now.sent = before


def are_sent() -> bool:
    return _now.sent is not None


def send(fd: int) -> int:
    """Return the index by which a worker receives a descriptor. TypeError outside `sending`."""
    if _now.sent is None:
        raise TypeError("an open file can be sent to workers alone")
    _now.sent.append(os.dup(fd))
    return len(_now.sent) - 1


@contextlib.contextmanager
def receiving(descriptors: Sequence[int]) -> Iterator[None]:
    """Return a context of unpickling with these descriptors, which stay the caller's."""
    before, _now.received = _now.received, descriptors
    try:
        yield
    finally:
        _now.received = before


def receive(number: int) -> int:
    return os.dup(_now.received[number])


def memory_bytes(root: Path = Path("/")) -> int:
    """Return the machine's memory, or the lowest limit of the control groups of this process."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in _limit_files(root):
        with contextlib.suppress(OSError, ValueError):  # "max", or no such file
            limits.append(int(file.read_text()))
    return min(limits)


def _limit_files(root: Path) -> Iterator[Path]:
    """Yield the possible limit files of each control group of the process and of its parents.

    A container sees its own group as the root or, in the namespace of the host, by its full path.
    """
    groups = [("", "/"), ("memory", "/")]
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or "memory" in controllers.split(","):
                groups.append(("memory" if controllers else "", path))
    for controller, path in groups:
        mounted = root / "sys/fs/cgroup" / controller
        name = "memory.limit_in_bytes" if controller else "memory.max"
        inside = PurePosixPath("/", path).relative_to("/")
        for group in (inside, *inside.parents):
            yield mounted / group / name
