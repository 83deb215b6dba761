"""What makes a worker a child of the trainer, though the fork server has forked it, which was started earlier.

It is a process of multiprocessing's, with a name, a parent and an end, and has from the kernel and from the
interpreter's settings what a fork of the trainer would have now.
"""

from __future__ import annotations

import contextlib
import ctypes
import locale
import multiprocessing
import os
import resource
import sys
from collections import namedtuple
from collections.abc import Callable
from multiprocessing import process as processes
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, TypedDict

_PR_SET_NAME = 15
_FLAGS = ("ignore_environment", "isolated")  # the fork server has an environment that is free of what they ignore
_NAME = b"pt_data_worker"  # as torch's; `ps` and `top` show it
_LIMITS = sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")})


class Surroundings(TypedDict):
    """What a child of the trainer would have that is started now, as JSON can carry it."""

    identity: list[int]
    parent: list[object]  # its name, and its number
    authkey: str
    config: dict[str, object]
    affinity: list[int]
    niceness: int
    umask: int | None
    limits: list[list[int]]  # which, soft, hard
    locale: str
    executable: str
    flags: dict[str, int]
    arguments: list[str]
    script: str | None
    warnoptions: list[str]
    recursion_limit: int
    switch_interval_s: float


def next_number() -> int:
    """The number of this process's next child; multiprocessing's own children have others."""
    counter: Any = processes
    number: int = next(counter._process_counter)
    return number


def described(thread: int = 0) -> Surroundings:
    """What a child of this process would have that is started now.

    Args:
        thread: whose affinity and niceness they are, as the kernel keeps both for each thread; 0: the caller's.
    """
    parent: Any = multiprocessing.current_process()
    return {
        "identity": list(parent._identity),
        "parent": [parent.name, os.getpid()],
        "authkey": parent.authkey.hex(),
        "config": {name: value for name, value in parent._config.items() if type(value) in (str, int, bool)},
        "affinity": sorted(os.sched_getaffinity(thread)),
        "niceness": os.getpriority(os.PRIO_PROCESS, thread),
        "umask": _umask(),
        "limits": [[which, *resource.getrlimit(which)] for which in _LIMITS],
        "locale": locale.setlocale(locale.LC_ALL),
        "executable": sys.executable,
        "flags": {name: getattr(sys.flags, name) for name in _FLAGS},
        "arguments": [str(argument) for argument in getattr(sys, "argv", ())],
        "script": getattr(sys.modules.get("__main__"), "__file__", None),
        "warnoptions": [str(option) for option in sys.warnoptions],
        "recursion_limit": sys.getrecursionlimit(),
        "switch_interval_s": sys.getswitchinterval(),
    }


def live(
    surroundings: Surroundings, number: int, run: Callable[[], None], trainer_fd: int | None, *tracker_fd: int
) -> int:
    """Be such a child, from `run` to the end, at which what was registered for it is done; gives the exit status.

    Args:
        number: which one, as `next_number` has given it.
        trainer_fd: a descriptor that is readable once the trainer has ended; None where there is none.
        *tracker_fd: that of the trainer's resource tracker, if it has one: with one of its own, what the user shares
            would be removed when this worker ends.
    """
    _apply(surroundings)
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


def _umask() -> int | None:
    """This process's mask, without changing it for a moment, in which another thread may make a file."""
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("Umask:")).split()[1], 8)
    return None


def _apply(surroundings: Surroundings) -> None:
    """Take over what a fork inherits, as far as that is permitted."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, _NAME)
    with contextlib.suppress(OSError, ValueError):
        os.sched_setaffinity(0, surroundings["affinity"])
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, surroundings["niceness"])
    if surroundings["umask"] is not None:
        os.umask(surroundings["umask"])
    for which, soft, hard in surroundings["limits"]:
        _limit(which, soft, hard)
    with contextlib.suppress(locale.Error):
        locale.setlocale(locale.LC_ALL, surroundings["locale"])
    sys.executable = surroundings["executable"]
    _have_flags(surroundings["flags"])
    sys.argv = list(surroundings["arguments"])
    if surroundings["script"] is not None:
        sys.modules["__main__"].__file__ = surroundings["script"]
    sys.warnoptions[:] = surroundings["warnoptions"]
    with contextlib.suppress(RecursionError):
        sys.setrecursionlimit(surroundings["recursion_limit"])
    sys.setswitchinterval(surroundings["switch_interval_s"])


def _have_flags(told: dict[str, int]) -> None:
    """Have `sys.flags` say what the trainer's does. Python makes no other ones, so this is a tuple with their names."""
    system: Any = sys
    own = {name: getattr(sys.flags, name) for name in system.flags.__match_args__}
    if own | told != own:
        system.flags = namedtuple("flags", own)(**own | told)  # noqa: PYI024 (its names are found here)


def _limit(which: int, soft: int, hard: int) -> None:
    now = resource.getrlimit(which)
    if now == (soft, hard):
        return
    try:
        resource.setrlimit(which, (soft, hard))
    except (OSError, ValueError):  # a limit that was lowered cannot be raised again: as far as there is room
        endless = resource.RLIM_INFINITY
        room = soft if now[1] == endless else now[1] if soft == endless else min(soft, now[1])
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(which, (room, now[1]))
