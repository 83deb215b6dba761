"""Waking a loop or a waiting thread from anywhere, also from inside a garbage collection or a finalizer."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Callable

_PIPE_BYTES = 4096  # more are there only if it is set again and again before it is cleared


class Wakeup:
    """A descriptor that becomes readable when it is set, and stays so until it is cleared.

    `set` takes no lock and never blocks. It is a pipe: where all processors are busy Linux has who waits for one run
    where it was written to, for that thread is about to wait itself. Who waits for an eventfd is run by any other, and
    two threads of one interpreter then stop one another at each of their calls. Both ends are closed when the object
    goes, and not before: a `set` in some finalizer must never write to a descriptor that is another's by now.
    """

    def __init__(self) -> None:
        self._fd, self._end = os.pipe()
        os.set_blocking(self._fd, False)
        os.set_blocking(self._end, False)

    def fileno(self) -> int:
        """What to wait on for readability."""
        return self._fd

    def set(self) -> None:
        """Make the descriptor readable."""
        with contextlib.suppress(OSError):  # it is full
            os.write(self._end, b"\0")

    def clear(self) -> None:
        """Make it wait again."""
        with contextlib.suppress(OSError):
            while len(os.read(self._fd, _PIPE_BYTES)) == _PIPE_BYTES:
                pass

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block this thread until it is set; False when `timeout_s` seconds have passed before. Ctrl-C gets through."""
        return is_readable(self._fd, timeout_s)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # when this process ends, `os` goes first
        for end in (getattr(self, "_fd", -1), getattr(self, "_end", -1)):
            if end >= 0:
                close(end)


def is_readable(fd: int, timeout_s: float | None) -> bool:
    """Wait up to `timeout_s` seconds (for ever: None) until `fd` is readable."""
    return is_ready(fd, timeout_s)


def is_ready(fd: int, timeout_s: float | None, *, to_write: bool = False) -> bool:
    """The same, until it is readable or, where that is asked for, can be written to."""
    poll = select.poll()
    poll.register(fd, select.POLLIN | select.POLLOUT if to_write else select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else max(0, timeout_s * 1000)))
