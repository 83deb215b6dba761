"""Guard against user functions that fork a worker: the child must not do its work too."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import NoReturn


class Original:
    """The process that created this object."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    def check(self) -> None:
        """Return in this process. End a forked child that returned from the user's function.

        To be called before the function's result is written to shared memory or sent.
        """
        if os.getpid() != self._pid:
            _end()


def _end() -> NoReturn:
    with contextlib.suppress(Exception):
        sys.stderr.write(
            "headrace: a process that was forked in a function of the data set's has left it as its parent does; it "
            "ends here, for a worker answers once. End such a process with os._exit() when it has done its work.\n"
        )
        sys.stderr.flush()
        sys.stdout.flush()
    os._exit(1)
