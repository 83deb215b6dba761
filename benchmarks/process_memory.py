"""The memory of a process and all below it, and shared memory that none of them has mapped just now.

A batch on its way from one process to another is often held by a descriptor alone: no process's share counts it, and it
takes memory all the same. So shared memory is counted file by file, each once, whoever holds it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import fresh

SHARED = ("/dev/shm/", "/memfd:", "/dev/zero")
"""How the names begin that the kernel shows for memory that processes share."""

Memory = dict[str, int]


def memory(pid: int) -> Memory:
    """Bytes of the tree below `pid`, itself included.

    `pss` is the sum of the processes' proportional shares of all they have mapped, `private` the part of it that is
    anonymous memory, `shared` all shared memory that any of them has mapped or holds a descriptor of (a mapping whose
    descriptor is closed is seen by root only), `all` the sum of these two.
    """
    found = {"pss": 0, "private": 0, "shared": 0, "all": 0}
    files: dict[tuple[int, int], int] = {}
    for process in fresh.tree(pid):
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()[1:]
            _add_shared_files(process, files)
        except OSError:  # it has ended
            continue
        sizes = {line.partition(":")[0]: 1024 * int(line.split()[1]) for line in lines}
        found["pss"] += sizes["Pss"]
        found["private"] += sizes["Pss_Anon"]
    found["shared"] = sum(files.values())
    found["all"] = found["private"] + found["shared"]
    return found


def _add_shared_files(pid: int, files: dict[tuple[int, int], int]) -> None:
    """What `pid` holds of shared memory: device and inode of each file to the bytes it takes."""
    process = Path(f"/proc/{pid}")
    places = [place for place in (process / "fd").iterdir() if _target(place).startswith(SHARED)]
    for line in (process / "maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) > 5 and fields[5].startswith(SHARED):
            places.append(process / "map_files" / fields[0])
    for place in places:
        with contextlib.suppress(OSError):  # closed since; or a mapping, and we are not root
            status = place.stat()
            files[status.st_dev, status.st_ino] = 512 * status.st_blocks


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""


class Peak(threading.Thread):
    """The most that this process and all below it took while the context was open, sampled in a thread, and at the end.

    It takes a fifth of one core at most; a short peak can be missed. `look` gives what is sampled.
    """

    def __init__(self, look: Callable[[], Memory] = lambda: memory(os.getpid())) -> None:
        super().__init__(name="peak", daemon=True)
        self.most = look()
        self._memory = look
        self._done = threading.Event()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self.join()
        self._look()

    def run(self) -> None:
        """Sample until the context is left."""
        pause_s = 0.0
        while not self._done.wait(pause_s):
            start = time.perf_counter()
            self._look()
            pause_s = max(0.02, 4 * (time.perf_counter() - start))

    def _look(self) -> None:
        now = self._memory()
        self.most = {name: max(size, now[name]) for name, size in self.most.items()}
