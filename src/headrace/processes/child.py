"""What makes a worker of the fork server a process of multiprocessing's whose parent is the trainer.

The kernel's settings (affinity, niceness, umask, limits) are those of the trainer when the fork server was started.
"""

from __future__ import annotations

import contextlib
import ctypes
import locale
import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing import process as processes
from multiprocessing import resource_tracker
from typing import Any, TypedDict

_PR_SET_NAME = 15
_NAME = b"pt_data_worker"  # as torch's; `ps` and `top` show it


class Surroundings(TypedDict):
    """What a child of the trainer would have that is started now, as JSON can carry it."""

    identity: list[int]
    parent: list[object]  # its name, and its number
    authkey: str
    config: dict[str, object]
    locale: str
    arguments: list[str]
    recursion_limit: int


def next_number() -> int:
    """Return the number of this process's next child; multiprocessing's own children have others."""
    counter: Any = processes
    number: int = next(counter._process_counter)
    return number


def described() -> Surroundings:
    """Describe what a child of this process would have that is started now."""
    parent: Any = multiprocessing.current_process()
    return {
        "identity": list(parent._identity),
        "parent": [parent.name, os.getpid()],
        "authkey": parent.authkey.hex(),
        "config": {name: value for name, value in parent._config.items() if type(value) in (str, int, bool)},
        "locale": locale.setlocale(locale.LC_ALL),
        "arguments": [str(argument) for argument in getattr(sys, "argv", ())],
        "recursion_limit": sys.getrecursionlimit(),
    }


def live(
    surroundings: Surroundings, number: int, run: Callable[[], None], trainer_fd: int | None, *tracker_fd: int
) -> int:
    """Call `run` as such a child, and its finalizers at the end. Return the exit status.

    Args:
        number: which one, as `next_number` has given it.
        trainer_fd: a descriptor that is readable once the trainer has ended; None where there is none.
        *tracker_fd: that of the trainer's resource tracker, if it has one: with one of its own, what the user shares
            would be removed when this worker ends.
    """
    ctypes.CDLL(None).prctl(_PR_SET_NAME, _NAME)
    with contextlib.suppress(locale.Error):
        locale.setlocale(locale.LC_ALL, surroundings["locale"])
    sys.argv = list(surroundings["arguments"])
    with contextlib.suppress(RecursionError):
        sys.setrecursionlimit(surroundings["recursion_limit"])
    tracker: Any = resource_tracker._resource_tracker
    for fd in tracker_fd:
        tracker._fd, tracker._pid = fd, None
    identity = (*surroundings["identity"], number)
    child: Any = multiprocessing.Process(target=run, name=f"Process-{':'.join(map(str, identity))}", daemon=True)
    child._identity = identity
    child._parent_name, child._parent_pid = surroundings["parent"]
    child._config = {**surroundings["config"], "daemon": True}
    child.authkey = bytes.fromhex(surroundings["authkey"])
    status: int = child._bootstrap(trainer_fd)  # which runs the finalizers of multiprocessing's, and ends threads
    return status
