"""Detection of awaited processes that make no progress because they were stopped.

A process that gets SIGSTOP, or whose control group is frozen, causes no event: its socket stays open. Checks are
counted instead of seconds, as there are none while this process is stopped too (Ctrl-Z, later `fg`). A process stopped
by a debugger is awaited as long as the debugger is attached.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Patience:
    """Tolerance for an awaited process that is stopped.

    Attributes:
        each_s: Seconds between two checks.
        looks: Number of consecutive checks after which a stopped process is given up.
    """

    each_s: float = 1.0
    looks: int = 5


PATIENCE = Patience()


class Watch:
    """Periodic checks of processes, one for each place where processes are awaited."""

    def __init__(self) -> None:
        self._stopped: dict[int, int] = {}  # number of checks that found a process stopped
        self._last_s = time.monotonic()

    def look(self, pids: Iterable[int]) -> list[int]:
        """Return awaited processes to give up. Checks at most once per `PATIENCE.each_s`."""
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
    """True if a process will do nothing until it is continued. False if unknown."""
    try:
        state = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
        if state == "T":
            return "\nTracerPid:\t0\n" in (proc / str(pid) / "status").read_text()
        return state in ("S", "D") and _is_frozen(pid, proc, groups)
    except (OSError, IndexError):
        return False


def _is_frozen(pid: int, proc: Path, groups: Path) -> bool:
    """True if the process's control group is frozen. False for this process's group, which runs."""
    group, ours = ((proc / name / "cgroup").read_text() for name in (str(pid), "self"))
    if group == ours:
        return False
    path = next((line[3:] for line in group.splitlines() if line.startswith("0::")), None)
    return path is not None and "frozen 1" in (groups / path.lstrip("/") / "cgroup.events").read_text()
