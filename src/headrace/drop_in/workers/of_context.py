"""Workers started by a multiprocessing context that the user has chosen."""

from __future__ import annotations

import os
import socket
import time
import warnings
import weakref
from multiprocessing.process import BaseProcess
from pickle import PicklingError
from typing import Any

from headrace.drop_in.workers.messages import WorkerConfig
from headrace.drop_in.workers.starter import WorkerHandle
from headrace.drop_in.workers.worker_main import main_of_context
from headrace.processes.boot import GRACE_S
from headrace.torch_compat.by_value import begin_forked_worker, share_classes

_our_ends: weakref.WeakSet[socket.socket] = weakref.WeakSet()


class ContextStarter:
    """Starts workers with a multiprocessing context from the trainer, as torch's loader does."""

    greeting, awaits_writing = (), False

    def __init__(self, context: Any, config: WorkerConfig) -> None:
        self._context, self._config = context, config
        self._started: list[BaseProcess] = []
        self._owner = os.getpid()
        # Forked workers have the script's own classes, not copies: both sides refer to them.
        self._classes = share_classes() if context.get_start_method() == "fork" else []

    def start(self, number: int, start: int) -> tuple[WorkerHandle, socket.socket]:
        ours, theirs = socket.socketpair()
        _our_ends.add(ours)
        with theirs:
            process = self._context.Process(target=_run, args=(theirs, number, start, self._config), daemon=True)
            try:
                process.start()
            except (TypeError, AttributeError, PicklingError):
                ours.close()
                warnings.warn(
                    "Got pickle error when attempting to start a worker Process. What it is given cannot be pickled; "
                    "multiprocessing_context='fork' gives it without.",
                    stacklevel=2,
                )
                raise
            except BaseException:
                ours.close()
                raise
        self._started.append(process)
        return process, ours

    def fileno(self) -> int:
        return -1

    def pump(self) -> None:
        pass

    def look(self) -> list[WorkerHandle]:
        return []

    def close(self) -> None:
        started, self._started = self._started, []
        if self._owner != os.getpid():
            return
        deadline = time.monotonic() + GRACE_S
        for process in started:  # this process must reap its children
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()


def _run(sock: socket.socket, number: int, start: int, config: WorkerConfig) -> None:
    for end in list(_our_ends):  # forked copies would hide the trainer's close
        end.close()
    begin_forked_worker()
    main_of_context(sock, number, start, config)
