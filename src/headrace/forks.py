"""A worker that a user's function has forked: the child must not do the worker's work a second time."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import NoReturn


class Original:
    """The process in which this was made."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    def check(self) -> None:
        """Return in this process, and end a child of it that has left the user's function as its parent does.

        It is asked before what the function gave is written where the parent writes, and before it is sent.
        """
        if os.getpid() != self._pid:
            _end()


def exit_code(error: SystemExit) -> int:
    """Return the status with which Python exits."""
    return error.code if isinstance(error.code, int) else int(error.code is not None)


def _end() -> NoReturn:
    with contextlib.suppress(Exception):
        sys.stderr.write(
            "headrace: a process that was forked in a function of the data set's has left it as its parent does; it "
            "ends here, for a worker answers once. End such a process with os._exit() when it has done its work.\n"
        )
        sys.stderr.flush()
        sys.stdout.flush()
    os._exit(1)
