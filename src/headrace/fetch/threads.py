"""Blocking calls of an event loop in threads that never delay the interpreter's exit."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
_Call = tuple["asyncio.Future[Any]", Callable[..., Any], tuple[object, ...]]


class Threads:
    """At most `limit` threads of one event loop, started when calls wait and no thread is idle.

    They are daemon threads and never joined, as a call may hang forever in an unreachable file system. (Threads of
    `concurrent.futures` are joined at exit.) Calls that end at about the same time wake the loop once.
    """

    def __init__(self, name: str, limit: int) -> None:
        self._name, self._limit = name, limit
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._started = 0
        self._waiting = 0  # calls without a result yet
        self._results: deque[tuple[asyncio.Future[object], object, BaseException | None]] = deque()
        self._is_woken = False
        self._is_closed = False

    def call(self, function: Callable[..., T], *args: object) -> asyncio.Future[T]:
        """Call `function` in a thread. Cancelling the future works only before the call starts."""
        if self._is_closed:
            raise RuntimeError(f"the threads {self._name} were ended")
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        if self._started < min(self._waiting + 1, self._limit):
            threading.Thread(target=self._serve, name=self._name, daemon=True).start()
            self._started += 1
        self._waiting += 1
        self._calls.put((future, function, args))
        return future

    def close(self) -> None:
        self._is_closed = True
        for _ in range(self._started):
            self._calls.put(None)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function, args = call
            result: object = None
            error: BaseException | None = None
            if not future.cancelled():
                try:
                    if self._is_closed:
                        raise RuntimeError(f"the threads {self._name} were ended")
                    result = function(*args)
                except (StopIteration, GeneratorExit) as failure:  # futures and tasks do not accept these
                    error = RuntimeError(f"{function!r} raised {failure!r}")
                except BaseException as failure:
                    error = failure
            self._results.append((future, result, error))
            if not self._is_woken:
                self._is_woken = True
                with contextlib.suppress(RuntimeError):  # the loop was closed
                    future.get_loop().call_soon_threadsafe(self._settle)
            del call, future, function, args, result, error  # an idle thread holds no references

    def _settle(self) -> None:
        self._is_woken = False  # first, so that later results wake the loop again
        while self._results:
            future, result, error = self._results.popleft()
            self._waiting -= 1
            if future.done():
                continue
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)


def retrieved(future: asyncio.Future[Any]) -> None:
    """Done callback that marks an error as retrieved, for calls whose callers may be gone."""
    if not future.cancelled():
        future.exception()
