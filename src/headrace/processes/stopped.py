"""Which of the processes that something is waited for do nothing because they were stopped.

Nobody hears of a process that gets SIGSTOP, or whose control group is frozen: its socket stays open, and its work is
never done. Looks are counted, not seconds: while this process is stopped as well (Ctrl-Z, and `fg` later) there are
none. One that a debugger has stopped is waited for, as long as the debugger is there.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Patience:
    """How long a process is borne with that is stopped while it is waited for.

    Attributes:
        each_s: seconds between two looks.
        looks: at so many, one after the other, it was stopped.
    """

    each_s: float = 1.0
    looks: int = 5


PATIENCE = Patience()


class Watch:
    """Looks at processes now and then; one for each place where processes are waited for."""

    def __init__(self) -> None:
        self._stopped: dict[int, int] = {}  # at how many looks they were, by process
        self._last_s = time.monotonic()

    def look(self, pids: Iterable[int]) -> list[int]:
        """Those that are to be given up, of the processes that something is waited for now.

        It may be called as often as one likes: looks are `PATIENCE.each_s` apart.
        """
        now_s = time.monotonic()
        if now_s - self._last_s < 0.9 * PATIENCE.each_s:
            return []
        self._last_s = now_s
        self._stopped = {pid: self._stopped.get(pid, 0) + 1 for pid in pids if is_stopped(pid)}
        given_up = [pid for pid, looks in self._stopped.items() if looks >= PATIENCE.looks]
        for pid in given_up:
            del self._stopped[pid]
        return given_up


def is_stopped(pid: int, proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> bool:
    """Whether a process will do nothing until somebody has it go on; False where that cannot be known.

    Args:
        proc: where the kernel tells of processes.
        groups: where it tells of control groups (version 2).
    """
    try:
        state = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
        if state == "T":
            return "\nTracerPid:\t0\n" in (proc / str(pid) / "status").read_text()
        return state in ("S", "D") and _is_frozen(pid, proc, groups)
    except (OSError, IndexError):
        return False


def _is_frozen(pid: int, proc: Path, groups: Path) -> bool:
    """Whether its control group is frozen; one in which we are as well is not, for here we are."""
    group, ours = ((proc / name / "cgroup").read_text() for name in (str(pid), "self"))
    if group == ours:
        return False
    path = next((line[3:] for line in group.splitlines() if line.startswith("0::")), None)
    return path is not None and "frozen 1" in (groups / path.lstrip("/") / "cgroup.events").read_text()
