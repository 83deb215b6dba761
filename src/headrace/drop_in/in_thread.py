"""A blocking iterator for `async for`."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn

import anyio.to_thread

from headrace.deliver.loops import TaskLock
from headrace.drop_in.resumable import ResumableIterator
from headrace.errors import LoaderClosedError, OptionError
from headrace.torch_compat.tracebacks import trimming


class InThread:
    """Batches of an iterator that makes them inside `next`, which is called in a thread.

    Independent of event loops: another loop can continue it. If waiting is cancelled, the batch is still made and
    returned next. States cover the batches returned.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make: Callable[[], Any] = make
        self._iterator: ResumableIterator | None = None
        self._made: deque[tuple[Any, BaseException | None]] = deque()  # at most one: a batch, or an exception
        self._lock = threading.Lock()  # held while a batch is made
        self._tasks_lock = TaskLock()

    def __aiter__(self) -> InThread:
        return self

    async def __anext__(self) -> Any:
        async with self._tasks_lock.here:
            while not self._made:
                await anyio.to_thread.run_sync(self._make_one)
            batch, error = self._taken()
        if error is None:
            return batch
        try:
            with trimming:
                raise StopAsyncIteration if isinstance(error, StopIteration) else error
        finally:
            del error  # break the cycle of error, traceback and this frame

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """Return the state after the batches returned so far.

        Raises:
            OptionError: no batch was requested so far.
        """
        if self._iterator is None:
            raise OptionError("no batch of this iterator has been asked for; ask its loader for a state")
        return self._iterator.state_dict(batches)

    async def aclose(self) -> None:
        self._make, self._iterator = _closed, None
        self._made.clear()

    def _make_one(self) -> None:
        """Make a batch, unless one is left from a cancelled wait."""
        with self._lock:
            if self._made:
                return
            if self._iterator is None:
                self._iterator = self._make()
            iterator = self._iterator
            with iterator.run.lock:
                before = iterator.run.given
                made: tuple[Any, BaseException | None]
                try:
                    made = next(iterator), None
                except BaseException as error:
                    made = None, error
                iterator.run.held = iterator.run.given - before
                self._made.append(made)

    def _taken(self) -> tuple[Any, BaseException | None]:
        assert self._iterator is not None
        with self._iterator.run.lock:
            self._iterator.run.held = None
            return self._made.popleft()


def _closed() -> NoReturn:
    raise LoaderClosedError("this iterator was closed; make a new one with aiter(loader)")
