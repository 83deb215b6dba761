"""Which of several processes does a thing that one of them is enough for."""

from __future__ import annotations

import fcntl
import os
import stat
import struct
import threading
from contextlib import suppress
from pathlib import Path

_FLOCK = struct.Struct("hhqqi4x")  # the kernel's: kind, whence, start, length, process; of 64 bits
_DIGITS = 15  # of a name that say which byte is meant: two names may mean the same, and one waits for the other


def open_own(path: Path, flags: int, *, is_regular: bool = True) -> int:
    """Open a file of this user alone; a file that is made is for nobody else.

    Args:
        is_regular: refuse pipes and devices, and wait for none.

    Raises:
        PermissionError: it is another user's, who is not root, or others may write to it.
        OSError: it is a link, or cannot be opened.
    """
    flags |= os.O_NONBLOCK if is_regular else 0
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    status = os.fstat(descriptor)
    is_own = status.st_uid in (os.geteuid(), 0) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if is_own and (stat.S_ISREG(status.st_mode) or not is_regular):
        return descriptor
    os.close(descriptor)
    raise PermissionError(f"{path} may have been written by others: give a folder that this user alone can write to")


class Claims:
    """Locks by names, each of which one process of a machine has at most; they end with it. Any thread may call.

    They are locks of single bytes of a file (Linux's, of open files). Where there are none, as on some file systems of
    networks or in a folder that is only read, everybody has every claim: what one process would do, each does.

    Args:
        path: of the file, which is made when it is first needed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._descriptor: int | None = None
        self._is_closed = not hasattr(fcntl, "F_OFD_SETLK")

    def take(self, name: str) -> bool:
        """Whether this process has it, now or already.

        Args:
            name: a hash, in hexadecimal digits.
        """
        with self._lock, suppress(OSError):
            if self._descriptor is None and not self._is_closed:
                self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._descriptor = open_own(self._path, os.O_RDWR | os.O_CREAT)
        try:
            self._set(fcntl.F_WRLCK, name)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def give_back(self, name: str) -> None:
        """Let another process have it."""
        with suppress(OSError):
            self._set(fcntl.F_UNLCK, name)

    def close(self) -> None:
        """Give all back."""
        with self._lock:
            self._is_closed = True
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None

    def _set(self, kind: int, name: str) -> None:
        with self._lock:
            if self._descriptor is not None:
                order = _FLOCK.pack(kind, os.SEEK_SET, int(name[:_DIGITS], 16), 1, 0)
                fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, order)
