"""Workers that are processes and get messages over pipes, without shared memory."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import pickle
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from typing import Any

from headrace.workers.executor import Loss, OnLost, OnReply, Worker

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["headrace.loader", "headrace.testing"])  # what takes long to import, once for all
_LOCK = threading.Lock()  # to start a process asks whether others have ended: two that ask read half an answer each


class PipeExecutor:
    """See `headrace.workers.executor.Executor`."""

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
    """One worker; see `headrace.workers.executor.WorkerLink`."""

    def __init__(self, number: int, on_reply: OnReply, on_lost: OnLost) -> None:
        self._on_reply, self._on_lost, self._loop = on_reply, on_lost, asyncio.get_running_loop()
        self._pipe, theirs = _PROCESSES.Pipe()
        with theirs, _LOCK:
            self._process = _PROCESSES.Process(target=serve, args=(number, theirs), daemon=True)
            self._process.start()
        assert self._process.pid is not None
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
        with contextlib.suppress(OSError):
            while (data := self._unsent.get()) is not None:
                self._pipe.send_bytes(data)

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._tell(self._on_reply, *self._pipe.recv())
        self._unsent.put(None)
        self._threads[0].join()
        self._pipe.close()
        wait([self._process.sentinel])
        with _LOCK:
            self._process.join()
        self._tell(self._end, self._process.exitcode)

    def _tell(self, call: Any, *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is gone, and the loader with it
            self._loop.call_soon_threadsafe(lambda: None if self._is_killed else call(*args))

    def _end(self, code: int) -> None:
        self.is_open = False
        self._on_lost(Loss(self.pid, code))


def serve(number: int, pipe: Connection) -> None:
    os.setsid()  # Ctrl-C is the trainer's
    worker = Worker(number)
    with contextlib.suppress(EOFError, OSError):
        while True:
            answer = worker.answer(pipe.recv())
            if answer is not None:
                pipe.send(answer)
