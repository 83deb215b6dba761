"""Workers that are threads of the trainer's process."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import threading
import time
import weakref

from headrace.drop_in.workers.messages import ObjectTable, WorkerConfig
from headrace.drop_in.workers.starter import WorkerHandle
from headrace.drop_in.workers.worker_main import main_of_thread
from headrace.processes.boot import GRACE_S


class ThreadWorkerHandle:
    sentinel = -1

    def __init__(self, thread: threading.Thread) -> None:
        self._thread = thread

    @property
    def pid(self) -> int | None:
        return os.getpid()

    @property
    def exitcode(self) -> int | None:
        return None if self.is_alive() else 0

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def join(self, timeout: float | None = None) -> None:
        self._thread.join(timeout)

    def terminate(self) -> None:
        """Do nothing: a thread ends after its task, once its socket is closed."""

    kill = terminate


class ThreadStarter:
    """Starts workers that are threads. Their data set is the trainer's own object."""

    greeting, awaits_writing = (), False

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._shelves: list[ObjectTable] = []  # kept until `close`: the table of an ended thread may have batches

    def start(self, number: int, start: int) -> tuple[WorkerHandle, socket.socket]:
        ours, theirs = socket.socketpair()
        table = ObjectTable()
        self._shelves.append(table)
        arguments = (theirs, number, start, self._config, table)
        thread = threading.Thread(target=main_of_thread, args=arguments, name=f"headrace-worker-{number}", daemon=True)
        thread.start()
        _ends_of_threads[thread] = ours
        return ThreadWorkerHandle(thread), ours

    def fileno(self) -> int:
        return -1

    def pump(self) -> None:
        pass

    def look(self) -> list[WorkerHandle]:
        return []

    def close(self) -> None:
        for table in self._shelves:
            table.close()


_ends_of_threads: weakref.WeakKeyDictionary[threading.Thread, socket.socket] = weakref.WeakKeyDictionary()


@atexit.register
def _end_threads() -> None:
    """End all threads: one that runs torch code during interpreter shutdown would abort it."""
    for end in list(_ends_of_threads.values()):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
    deadline = time.monotonic() + GRACE_S
    for thread in list(_ends_of_threads):
        thread.join(max(0.0, deadline - time.monotonic()))
