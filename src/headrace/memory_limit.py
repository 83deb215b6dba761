"""How much memory this process may use."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def memory_bytes(root: Path = Path("/")) -> int:
    """The machine's memory, or that of the narrowest of the control groups that this process is in.

    Args:
        root: where /proc and /sys are.
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in _limit_files(root):
        with contextlib.suppress(OSError, ValueError):  # "max", or no such file
            limits.append(int(file.read_text()))
    return min(limits)


def _limit_files(root: Path) -> Iterator[Path]:
    """Of each group that the process is in, and of all those around it, the file that may hold its limit.

    A container sees its own group as the root, or, where the namespace is the host's, by its whole path.
    """
    groups = [("", "/"), ("memory", "/")]
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or "memory" in controllers.split(","):
                groups.append(("memory" if controllers else "", path))
    for controller, path in groups:
        mounted = root / "sys/fs/cgroup" / controller
        name = "memory.limit_in_bytes" if controller else "memory.max"
        inside = PurePosixPath("/", path).relative_to("/")
        for group in (inside, *inside.parents):
            yield mounted / group / name
