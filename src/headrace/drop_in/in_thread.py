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
    """Batches of an iterator that makes them inside `next`; here that is called in a thread.

    It belongs to no event loop: it may be gone on with in another one. Where waiting is cancelled the batch is made
    nevertheless, and is the next one that is given; states are of what was given.

    Args:
        make: makes the iterator, in the thread too, when the first batch is asked for.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make: Callable[[], Any] = make
        self._iterator: ResumableIterator | None = None
        self._made: deque[tuple[Any, BaseException | None]] = deque()  # at most one: a batch, or what was raised
        self._lock = threading.Lock()  # whoever has it may make one
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
            del error  # its traceback has this frame: what they hold would wait for a garbage collection

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """The state after what was given so far.

        Raises:
            OptionError: no batch has been asked for yet.
        """
        if self._iterator is None:
            raise OptionError("no batch of this iterator has been asked for; ask its loader for a state")
        return self._iterator.state_dict(batches)

    async def aclose(self) -> None:
        """Give no more batches."""
        self._make, self._iterator = _closed, None
        self._made.clear()

    def _make_one(self) -> None:
        """Have a batch made, unless there is one that nobody has waited for."""
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
