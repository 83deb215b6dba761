"""Workers that are processes of their own, which are told over pipes what to do: nothing is shared with them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

from headrace.work.executor import Loss, OnLost, OnReply, Worker

_CODE = "import sys; sys.path[:] = {path!r}; from contributed.pipe_workers import serve; serve({number})"


class PipeExecutor:
    """See `headrace.work.executor.Executor`."""

    shares_memory = False
    shares_objects = False

    def __init__(self) -> None:
        self.workers: list[PipeLink] = []

    async def start(self, number: int, on_reply: OnReply, on_lost: OnLost) -> PipeLink:
        link = PipeLink(number, on_reply, on_lost)
        self.workers.append(link)
        return link

    async def aclose(self) -> None:
        links, self.workers = self.workers, []
        for link in links:
            link.kill()
        await asyncio.gather(*(asyncio.to_thread(link.join) for link in links))


class PipeLink:
    """One worker; see `headrace.work.executor.WorkerLink`."""

    def __init__(self, number: int, on_reply: OnReply, on_lost: OnLost) -> None:
        self._on_reply, self._on_lost, self._loop = on_reply, on_lost, asyncio.get_running_loop()
        code = _CODE.format(path=sys.path, number=number)
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        self.pid, self.is_open, self._is_killed = self._process.pid, True, False
        self._unsent: SimpleQueue[Any] = SimpleQueue()
        self._threads = [threading.Thread(target=do, daemon=True) for do in (self._write, self._read)]
        for thread in self._threads:
            thread.start()

    def send(self, message: Any, segments: Sequence[Any] = ()) -> None:
        self._unsent.put(pickle.dumps(message))

    def learn(self, number: int, chain: Any) -> None:
        self.send(chain.message(number))

    def kill(self) -> None:
        self._is_killed = True
        self.die()

    def die(self) -> None:
        self._process.kill()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _write(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError), self._process.stdin as pipe:
            while (data := self._unsent.get()) is not None:
                pipe.write(data)
                pipe.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(EOFError, pickle.UnpicklingError), self._process.stdout as pipe:
            while True:
                self._tell(self._on_reply, *pickle.load(pipe))
        self._unsent.put(None)
        self._tell(self._end, self._process.wait())

    def _tell(self, call: Any, *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is gone, and the loader with it
            self._loop.call_soon_threadsafe(lambda: None if self._is_killed else call(*args))

    def _end(self, code: int) -> None:
        self.is_open = False
        self._on_lost(Loss(self.pid, code))


def serve(number: int) -> None:
    """Be a worker, until the trainer ends."""
    messages, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what functions print is no answer
    worker = Worker(number)
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            answer = worker.answer(pickle.load(messages))
            if answer is not None:
                pickle.dump(answer, answers)
                answers.flush()
