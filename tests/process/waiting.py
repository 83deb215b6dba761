"""Waiting for something to become true, with a bound; and looking at processes."""

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

DEADLINE_S = 20.0


def wait_until(condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    deadline = time.monotonic() + deadline_s
    pause_s = 0.001
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"not so within {deadline_s} s: {what}"
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.05)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def children_of(pid: int) -> list[int]:
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with suppress(OSError):
                fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == pid and fields[0] not in "ZX":
                    found.append(int(entry.name))
    return found


def descendants_of(pid: int) -> list[int]:
    found = children_of(pid)
    return found + [deeper for child in found for deeper in descendants_of(child)]


def workers_of(loader: Any) -> list[int]:
    return list(loader._behind._runtime._workers.pids)


PREAMBLE = """
import os, signal, sys, threading, time
import numpy as np
import torch
import headrace as hr

class Numbers(hr.AsyncDataset):
    def __init__(self, count):
        self.count = count
    def __len__(self):
        return self.count
    async def aget(self, index):
        return index

"""


class Trainer:
    """A script that runs as a process of its own, in a process group of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process, self.pid = process, process.pid

    def line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the script ended early:\n{self.finish()}"
        return line.strip()

    def finish(self, timeout_s: float = DEADLINE_S) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, out, err


@contextmanager
def trainer(
    code: str, *, options: Sequence[str] = (), preamble: str = PREAMBLE, command: Sequence[str] = ()
) -> Iterator[Trainer]:
    """Run a script by its file, as users do; it is gone, with all of its group, afterwards.

    `command` begins a command line that runs another one.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "script.py")
        path.write_text(preamble + textwrap.dedent(code))
        process = subprocess.Popen(
            [*command, sys.executable, *options, str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )
        try:
            yield Trainer(process)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            for pipe in (process.stdout, process.stderr):
                assert pipe is not None
                pipe.close()
            process.wait()


def run_script(code: str, *, timeout_s: float = 100.0, **options: Any) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a script that ends by itself."""
    with trainer(code, **options) as running:
        return running.finish(timeout_s)


def output_of(code: str, **options: Any) -> str:
    """The output of a script that ends well and prints no traceback. Logs of repeated reads are allowed."""
    returncode, out, err = run_script(code, **options)
    assert (returncode, "Traceback" in err) == (0, False), err
    return out
