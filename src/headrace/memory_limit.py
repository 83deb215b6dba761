"""The memory limit of this process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def memory_bytes(root: Path = Path("/")) -> int:
    """Return the machine's memory, or the lowest limit of the control groups of this process."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in _limit_files(root):
        with contextlib.suppress(OSError, ValueError):  # "max", or no such file
            limits.append(int(file.read_text()))
    return min(limits)


def _limit_files(root: Path) -> Iterator[Path]:
    """Yield the possible limit files of each control group of the process and of its parents.

    A container sees its own group as the root or, in the namespace of the host, by its full path.
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
