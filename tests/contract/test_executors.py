"""Every executor of ours keeps the contract of executors."""

import contextlib
import os
import signal

from headrace.testing import ExecutorContract
from headrace.workers.executor import Executor
from headrace.workers.forkserver.client import ForkServer
from headrace.workers.process_workers import ProcessExecutor
from headrace.workers.thread_workers import ThreadExecutor


class TestThreads(ExecutorContract):
    can_die = False

    def open_executor(self, count: int) -> Executor:
        return ThreadExecutor()


class _WithServer(ProcessExecutor):
    """Lets the fork server go as a loader does."""

    def __init__(self, count: int) -> None:
        self._server = ForkServer.acquire()
        super().__init__(count, self._server, {})

    async def aclose(self) -> None:
        if not self._is_closed:
            pids = list(self.by_pid)
            await super().aclose()
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)  # one that hangs is borne with for some seconds
            self._server.release()


class TestProcesses(ExecutorContract):
    def open_executor(self, count: int) -> Executor:
        return _WithServer(count)
