"""Wakeup of a loop or thread from anywhere, also from garbage collection or a finalizer."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Callable

_PIPE_BYTES = 4096  # more only after many calls of set before clear


class Wakeup:
    """A descriptor that becomes readable when set and stays readable until cleared.

    `set` takes no lock and never blocks. It uses a pipe: when all processors are busy, Linux runs the reader on the
    writer's processor, as the writer is about to wait. The reader of an eventfd may run on any processor, and two
    threads of one interpreter then block each other at each call. Both ends are closed only with the object, so that a
    `set` in a finalizer never writes to a reused descriptor.
    """

    def __init__(self) -> None:
        self._fd, self._end = os.pipe()
        os.set_blocking(self._fd, False)
        os.set_blocking(self._end, False)

    def fileno(self) -> int:
        return self._fd

    def set(self) -> None:
        with contextlib.suppress(OSError):  # the pipe is full
            os.write(self._end, b"\0")

    def clear(self) -> None:
        with contextlib.suppress(OSError):
            while len(os.read(self._fd, _PIPE_BYTES)) == _PIPE_BYTES:
                pass

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block this thread until set. False after `timeout_s` seconds. Ctrl-C interrupts the wait."""
        return is_readable(self._fd, timeout_s)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # at exit `os` is cleared first
        for end in (getattr(self, "_fd", -1), getattr(self, "_end", -1)):
            if end >= 0:
                close(end)


def is_readable(fd: int, timeout_s: float | None) -> bool:
    return is_ready(fd, timeout_s)


def is_ready(fd: int, timeout_s: float | None, *, to_write: bool = False) -> bool:
    """Wait up to `timeout_s` seconds until `fd` is readable or, with `to_write`, writable."""
    poll = select.poll()
    poll.register(fd, select.POLLIN | select.POLLOUT if to_write else select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else max(0, timeout_s * 1000)))
