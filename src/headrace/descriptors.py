"""How many file descriptors this process may open still, and who may plan with how many of them."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import threading
from collections.abc import Iterator, Sequence

from headrace.errors import OptionError

SHORT = (errno.EMFILE, errno.ENFILE)
ADVICE = "raise the limit (`ulimit -n 4096` in the shell that starts this process)"
OF_A_LOADER = 20  # its loop, its memory for functions, its connection to the fork server
OF_A_WORKER = 3  # its socket, and its process
_FEWEST_READS, _FEWEST_SEGMENTS = 4, 4


def limit() -> int:
    """How many this process may have open at once."""
    try:
        import resource
    except ImportError:  # Windows
        return 512
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if most == resource.RLIM_INFINITY else most


def free() -> int:
    """How many it may open still."""
    try:
        is_open = sum(1 for _ in os.scandir("/proc/self/fd"))
    except OSError:
        is_open = 64
    return limit() - is_open


def require(workers: int, *, reads: bool) -> None:
    """Refuse now what would fail later, in some place.

    Args:
        workers: how many processes there are to be.
        reads: whether the loader reads, and needs memory for what it reads.

    Raises:
        OptionError: there are not as many descriptors.
    """
    needed = OF_A_WORKER * workers + OF_A_LOADER + (_FEWEST_READS + _FEWEST_SEGMENTS if reads else 0)
    if needed > (room := free()):
        raise OptionError(
            f"num_workers={workers} needs some {needed} file descriptors, and this process can open {max(room, 0)} "
            f"more of the {limit()} that it may have: {ADVICE}, or have fewer workers"
        )


def reads_at_most(workers: int) -> int:
    """How many reads may be under way at once: half of what workers leave."""
    return max(_FEWEST_READS, _left_by(workers) // 2)


def segments_at_most(workers: int) -> int:
    """How many pieces of shared memory a loader may hold: a quarter of what workers leave."""
    return max(_FEWEST_SEGMENTS, _left_by(workers) // 4)


def _left_by(workers: int) -> int:
    return free() - OF_A_WORKER * workers - OF_A_LOADER


# Descriptors that go to workers beside a pickle, which has their numbers.


class _Now(threading.local):
    sent: list[int] | None = None
    received: Sequence[int] = ()


_now = _Now()


@contextlib.contextmanager
def sending(descriptors: list[int]) -> Iterator[None]:
    """Within, what is pickled in this thread goes to workers: copies of its descriptors are put here."""
    before, _now.sent = _now.sent, descriptors
    try:
        yield
    finally:
        _now.sent = before


def are_sent() -> bool:
    """Whether what is pickled now goes to workers."""
    return _now.sent is not None


def send(fd: int) -> int:
    """The number by which a worker receives a descriptor.

    Raises:
        TypeError: nothing is being sent to workers.
    """
    if _now.sent is None:
        raise TypeError("an open file can be sent to workers alone")
    _now.sent.append(os.dup(fd))
    return len(_now.sent) - 1


@contextlib.contextmanager
def receiving(descriptors: Sequence[int]) -> Iterator[None]:
    """Within, what is unpickled in this thread finds these; they stay the caller's."""
    before, _now.received = _now.received, descriptors
    try:
        yield
    finally:
        _now.received = before


def receive(number: int) -> int:
    """A descriptor of one's own."""
    return os.dup(_now.received[number])
