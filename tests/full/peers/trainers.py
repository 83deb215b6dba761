"""Processes of trainers, each in a session of its own, so that nothing of a library outlives them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

LIMIT_S = 180.0


class Failure(Exception):
    """A library did not do what it was asked for; the text is for the table, the message is the library's."""

    def __init__(self, text: str, message: str = "") -> None:
        super().__init__(text)
        self.message = message


def start(command: list[str], folder: Path, rank: int = 0, world: int = 1, port: int = 0) -> subprocess.Popen[bytes]:
    """A process with the environment that torchrun gives, in a session of its own."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    if world > 1:
        values = (rank, rank, world, world, 0, "127.0.0.1", port)
        environment |= {name: str(value) for name, value in zip(names, values, strict=True)}
    # Nothing is fetched from the hub, and threads of arithmetic are of no use.
    environment |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "OMP_NUM_THREADS": "1"}
    path = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    with (folder / "errors").open("ab") as errors:
        return subprocess.Popen(
            command,
            cwd=folder,
            env=environment | {"PYTHONPATH": os.pathsep.join(path)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )


def finish(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Return when all have ended.

    Raises:
        Failure: they have not ended in LIMIT_S seconds.
    """
    deadline = time.monotonic() + LIMIT_S
    try:
        for process in processes:
            process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise Failure(f"hangs for {LIMIT_S:.0f} s") from None
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):  # what outlived it, workers of a library
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
