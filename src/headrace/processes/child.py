"""Makes a worker of the fork server a multiprocessing child of the trainer.

Kernel settings (affinity, niceness, umask, limits) are the trainer's when the fork server was started.
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
    """State that a child of the trainer would inherit now, for JSON."""

    identity: list[int]
    parent: list[object]  # name and pid
    authkey: str
    config: dict[str, object]
    locale: str
    arguments: list[str]
    recursion_limit: int


def next_number() -> int:
    """Return the number of this process's next child, in multiprocessing's count."""
    counter: Any = processes
    number: int = next(counter._process_counter)
    return number


def described() -> Surroundings:
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
    """Call `run` as such a child, then its finalizers. Return the exit status.

    Args:
        number: Result of `next_number`.
        trainer_fd: A descriptor that is readable once the trainer has ended, if any.
        *tracker_fd: The trainer's resource tracker, if any. A new tracker would remove the user's shared memory when
            this worker ends.
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
    status: int = child._bootstrap(trainer_fd)  # runs multiprocessing's finalizers, and ends threads
    return status
