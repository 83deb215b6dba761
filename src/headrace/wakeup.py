"""Waking a loop or a waiting thread from anywhere, also from inside a garbage collection or a finalizer."""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections.abc import Callable


class Wakeup:
    """A descriptor that becomes readable when it is set, and stays so until it is cleared.

    `set` takes no lock and never blocks. Linux's eventfd; elsewhere a socket pair. The descriptor is closed when the
    object goes, and not before: a `set` in some finalizer must never write to a descriptor that is another's by now.
    """

    def __init__(self) -> None:
        self._pair: tuple[socket.socket, socket.socket] | None = None
        if hasattr(os, "eventfd"):
            self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        else:
            self._pair = socket.socketpair()
            for end in self._pair:
                end.setblocking(False)
            self._fd = self._pair[0].fileno()

    def fileno(self) -> int:
        """What to wait on for readability."""
        return self._fd

    def set(self) -> None:
        """Make the descriptor readable."""
        with contextlib.suppress(OSError, OverflowError):
            if self._pair is not None:
                self._pair[1].send(b"\0")
            else:
                os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Make it wait again."""
        with contextlib.suppress(OSError):
            if self._pair is not None:
                self._pair[0].recv(4096)
            else:
                os.eventfd_read(self._fd)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block this thread until it is set; False when `timeout_s` seconds have passed before. Ctrl-C gets through."""
        return is_readable(self._fd, timeout_s)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # when this process ends, `os` goes first
        if self._pair is not None:
            for end in self._pair:
                end.close()
        else:
            close(self._fd)


def is_readable(fd: int, timeout_s: float | None) -> bool:
    """Wait up to `timeout_s` seconds (for ever: None) until `fd` is readable."""
    return is_ready(fd, timeout_s)


def is_ready(fd: int, timeout_s: float | None, *, to_write: bool = False) -> bool:
    """The same, until it is readable or, where that is asked for, can be written to."""
    poll = select.poll()
    poll.register(fd, select.POLLIN | select.POLLOUT if to_write else select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else max(0, timeout_s * 1000)))
