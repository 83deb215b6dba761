"""What becomes of a process that a user's function has forked, and that returns from that function as its parent does.

It has a copy of all that its parent has: the socket, the shared memory, the task. Were it to go on, there would be two
answers to one task, and two that write into one place; or, of a thread, a process that waits for ever.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import NoReturn, TypeVar

T = TypeVar("T")


class _Process:
    """Of this process: how many forks lie between it and the one that has imported this module."""

    __slots__ = ("forks",)

    def __init__(self) -> None:
        self.forks = 0


PROCESS = _Process()


def _count() -> None:
    PROCESS.forks += 1


os.register_at_fork(after_in_child=_count)


class Original:
    """The process in which this was made; `check` returns in no other.

    Attributes:
        forks: what `PROCESS.forks` is in it, for those who look before each sample.
    """

    __slots__ = ("forks",)

    def __init__(self) -> None:
        self.forks = PROCESS.forks

    def check(self, function: str, error: BaseException | None = None) -> None:
        """End a process that was forked since, before it touches what is its parent's.

        Args:
            function: which function of the user's it has returned from.
            error: what was raised in it instead; of a SystemExit nothing is said.
        """
        if PROCESS.forks != self.forks:
            _end(function, error)


def called(function: Callable[..., T], *args: object) -> T:
    """What a function of the user's gives; it comes back in the process alone in which it was called."""
    original = Original()
    name = getattr(function, "__qualname__", repr(function))
    try:
        result = function(*args)
    except BaseException as error:
        original.check(name, error)
        raise
    original.check(name)
    return result


def exit_code(error: SystemExit) -> int:
    """Return the status with which Python exits."""
    return error.code if isinstance(error.code, int) else int(error.code is not None)


def _end(function: str, error: BaseException | None) -> NoReturn:
    status = 1
    if isinstance(error, SystemExit):
        status = exit_code(error)
    else:
        how = "returned from it" if error is None else f"left it with {error!r:.200}"
        with contextlib.suppress(Exception):
            sys.stderr.write(
                f"headrace: a process that was forked in {function} has {how}, as its parent does; it ends here, for "
                "a worker answers once. End such a process with os._exit() when it has done its work.\n"
            )
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)
