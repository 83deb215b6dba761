"""Measures a fresh process: each run of a benchmark is one, so that no run profits or suffers from the one before.

The benchmark's own script is started again with `--child JSON`. There a generator function does what is not timed,
yields, and when it is told to go on it works and yields its results; the process tree is watched from here.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from server import COUNTERS, Server

Row = dict[str, Any]
LOCK = Path(os.environ.get("HEADRACE_BENCH_LOCK", Path(tempfile.gettempdir()) / "headrace-bench.lock"))
TICKS = os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def machine() -> Iterator[None]:
    """The machine for ourselves: one benchmark measures at a time, all checkouts together; the others wait."""
    lock = os.open(LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def answer(child: Callable[[Row], Iterator[Row]], job: str) -> None:
    """The child's side: prepare, say so, wait, work, print the results, and stay until they have been read."""
    steps = child(json.loads(job))
    next(steps)
    # Else chance decides whether forked workers make a full collection, which copies 40 MB of heap into each of them.
    gc.collect()
    print("READY", flush=True)
    sys.stdin.readline()
    row = next(steps)
    print("RESULT " + json.dumps(row), flush=True)
    sys.stdin.readline()


def measure(script: str, job: Row, server: Server, limit_s: float = 120.0) -> Row:
    """What `script --child JOB` found, and what its process tree took.

    Adds `cpu_s` (the tree's, from READY to RESULT, also of processes that have ended), `foreign_cores` (used by all
    others meanwhile), `server_cpu_s`, `start_pss` and `peak_pss` (bytes; anonymous and shared memory),
    `peak_processes`, and the server's counters.
    A run that fails has `error` instead of results.
    """
    environment = os.environ | {"HEADRACE_BENCH_SERVER": server.url}
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, script, "--child", json.dumps(job)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        timer = threading.Timer(limit_s, _kill_group, [process.pid])
        timer.start()
        try:
            row = _watch(process, server)
            if row is None:
                errors.seek(0)
                row = {"error": errors.read()[-2000:].strip() or f"no result within {limit_s} s"}
            return job | row
        finally:
            timer.cancel()
            _kill_group(process.pid)  # what outlived its parent: only this run's own process group
            process.wait()


def _watch(process: subprocess.Popen[str], server: Server) -> Row | None:
    assert process.stdin
    assert process.stdout
    if _line(process, "READY") is None:
        return None
    server.reset()
    server_pid = server.stats()["pid"]
    for pid in (process.pid, server_pid, os.getpid()):
        _go_first(pid)
    watch = Watch(process.pid)
    before = (time.monotonic(), watch.cpu_s(), _cpu_s(server_pid), _machine_cpu_s(), _cpu_s(os.getpid()))
    watch.start()
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write("go\n")
        process.stdin.flush()
    result = _line(process, "RESULT ")
    after = (time.monotonic(), watch.cpu_s(), _cpu_s(server_pid), _machine_cpu_s(), _cpu_s(os.getpid()))
    watch.stop()
    if result is None:
        return None
    seconds, ours, served, everybody, watching = (b - a for a, b in zip(before, after, strict=True))
    with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
        process.stdin.write("end\n")
        process.stdin.close()
        process.wait(20)
    counters = server.stats()
    row: Row = json.loads(result)
    return {
        **{name: counters[name] for name in COUNTERS},
        "cpu_s": round(ours, 2),
        "server_cpu_s": round(served, 2),
        "foreign_cores": round(max(0.0, everybody - ours - served - watching) / seconds, 2),
        "start_pss": watch.start_pss,
        "peak_pss": watch.peak_pss,
        "peak_processes": watch.peak_processes,
        "when": time.strftime("%F %T"),
        **row,
    }


def _line(process: subprocess.Popen[str], start: str) -> str | None:
    assert process.stdout
    for line in process.stdout:
        if line.startswith(start):
            return line[len(start) :]
    return None


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _go_first(pid: int) -> None:
    """Most of the CPU for this measurement against whatever else is running, where we may."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text("-15")


def _cpu_s(pid: int) -> float:
    """User and system time of a process and of those of its children that it has waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / TICKS


def _machine_cpu_s() -> float:
    user, nice, system, _idle, _wait, interrupts, soft = Path("/proc/stat").read_text().split()[1:8]
    return sum(map(int, (user, nice, system, interrupts, soft))) / TICKS


class Watch(threading.Thread):
    """Watches the memory of a process and all below it, at a cost of at most 5% of a core: a short peak can be missed.

    Counted are the proportional shares of anonymous and shared-memory pages: no libraries, no page cache.
    """

    def __init__(self, pid: int) -> None:
        super().__init__(name="watch", daemon=True)
        self.start_pss = self.peak_pss = sum(map(pss_bytes, tree(pid)))
        self.peak_processes = 0
        self._root = pid
        self._done = threading.Event()

    def cpu_s(self) -> float:
        """CPU seconds of all processes of the tree, with those that have ended and were waited for."""
        return sum(map(_cpu_s, tree(self._root)))

    def run(self) -> None:
        """Sample until stopped."""
        pause_s = 0.0
        while not self._done.wait(pause_s):
            start = time.perf_counter()
            pids = list(tree(self._root))
            self.peak_pss = max(self.peak_pss, sum(map(pss_bytes, pids)))
            self.peak_processes = max(self.peak_processes, len(pids))
            pause_s = max(0.05, 20 * (time.perf_counter() - start))

    def stop(self) -> None:
        """No more samples."""
        self._done.set()
        self.join()


def tree(pid: int) -> Iterator[int]:
    """A process and all below it."""
    yield pid
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        children = [child for thread in threads for child in (thread / "children").read_text().split()]
    except OSError:
        return
    for child in children:
        yield from tree(int(child))


def pss_bytes(pid: int) -> int:
    """A process's proportional share of anonymous and shared-memory pages."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return 0
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


def versions(packages: Sequence[str]) -> dict[str, str]:
    """The installed versions of `packages`; "-" for what is not installed as a distribution."""
    found = dict.fromkeys(packages, "-")
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
