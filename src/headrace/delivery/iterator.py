"""The iterator of an epoch, for both `for` and `async for`."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NoReturn, TypeVar

import anyio
import anyio.to_thread
import torch

from headrace._util.wakeup import is_readable
from headrace.delivery.channel import ChannelFailedError, Receiver
from headrace.delivery.loop_lookahead import TaskLock
from headrace.delivery.progress import Progress
from headrace.delivery.slabs import Arrived, BatchOpener
from headrace.delivery.staging import Ahead
from headrace.errors import LoaderClosedError, NotReady, OptionError
from headrace.observe import LoaderMeters
from headrace.torch_compat.tracebacks import trimming
from headrace.workers.failures import PackedError

B = TypeVar("B")


async def readable(descriptor: int, timeout_s: float) -> None:
    """Wait, under any event loop that anyio supports, until a descriptor is readable.

    Raises:
        RuntimeError: `timeout_s` seconds have passed. 0 waits without limit.
    """
    with anyio.move_on_after(timeout_s or None) as scope:
        await anyio.wait_readable(descriptor)
    if scope.cancelled_caught:
        raise RuntimeError(f"DataLoader timed out after {timeout_s} seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Watcher:
    """Settings and callbacks of the caller that follows an iterator.

    Attributes:
        name: Label of `next` in profiles.
        count: Number of batches in the epoch, if known. A caller that counts them may never ask for one more.
        exhausted: Called once, after the last batch was returned. An exception of it replaces the end of the iteration.
    """

    name: str
    count: int | None = None
    exhausted: Callable[[], None] | None = None
    progress: Progress | None = None


class BatchIterator(Generic[B]):
    """Batches of one epoch, in order, for synchronous and asynchronous loops.

    `next(it)` blocks this thread, `await anext(it)` only the task. Threads and tasks may share an iterator: each batch
    goes to one of them. `close`, or the loss of the last reference, ends the epoch.

    Args:
        owner: Kept alive as long as the iterator.
        end: Called once, from any thread, when the iterator is done or collected.
        timeout_s: Longest wait of `next`, in seconds. 0: no limit.

    Attributes:
        before: Called before the first batch. May block.
        batches: Number of batches returned.
        leave_out: Number of next batches to receive and drop.
    """

    def __init__(
        self,
        owner: object,
        receiver: Receiver,
        opener: BatchOpener,
        ahead: Ahead,
        end: Callable[[], None],
        meters: LoaderMeters,
        watch: Watcher,
        timeout_s: float = 0,
    ) -> None:
        self._owner, self._count, self._progress = owner, watch.count, watch.progress
        self._timeout_s, self._pid = timeout_s, os.getpid()
        self._receiver, self._opener, self._ahead = receiver, opener, ahead
        self._arrived: deque[Arrived] = deque()  # received, not yet staged
        self._staged: deque[Arrived] = deque()  # staged, waiting for `next`
        self._over: Callable[[BatchIterator[B]], NoReturn] | None = None  # called after the last of them
        self._exhausted = watch.exhausted
        self._meters, self._name = meters, watch.name
        self._end = weakref.finalize(self, end)
        self._end.atexit = False
        self._lock, self._beginning = threading.Lock(), threading.Lock()
        self._tasks_lock = TaskLock()
        self._peeked: list[tuple[Any, Exception | None, Arrived]] = []
        self._is_exhausted = self._is_peeking = False
        self._left: float | None = None
        self.before: Callable[[], None] | None = None
        self.batches = 0
        self.leave_out = 0

    def __iter__(self) -> BatchIterator[B]:
        return self

    def __next__(self) -> B:
        with trimming:
            if torch._C._autograd._profiler_enabled():
                with torch.autograd.profiler.record_function(self._name):
                    return self._next()
            return self._next()

    def __aiter__(self) -> BatchIterator[B]:
        return self

    async def __anext__(self) -> B:
        with trimming:
            return await self._anext()

    async def _anext(self) -> B:
        async with self._tasks_lock.here:
            if self.before is not None:
                await anyio.to_thread.run_sync(self._begin)
            began = time.perf_counter()
            while True:
                try:
                    with self._lock:
                        return self._take(began)
                except anyio.WouldBlock:
                    pass  # waiting in here would show it in the traceback of a cancellation
                except StopIteration:
                    raise StopAsyncIteration from None
                self._receiver.request()
                await readable(self._awaited(), self._timeout_s)

    def try_next(self) -> B:
        """Return the next batch if it is ready.

        Raises:
            NotReady: it is not ready. Nothing is lost; call again.
            StopIteration: the epoch is over.
        """
        with trimming, self._lock:
            self._begin()
            began = time.perf_counter()
            try:
                return self._take(began)
            except anyio.WouldBlock:
                self._receiver.request()
                raise NotReady("no batch is ready yet") from None

    def peek(self) -> B:
        """Return the next batch without consuming it: the next `next` returns it again."""
        if not self._peeked:
            self._is_peeking = True
            try:
                self._next()
            finally:
                self._is_peeking = False
        made, failure, _ = self._peeked[0]
        with trimming:
            batch: B = _opened(made, failure)
        return batch

    def state_dict(self) -> dict[str, object]:
        """Return the loader's state after the batches that this iterator has returned.

        Raises:
            OptionError: this iterator has no state.
        """
        if self._progress is None:
            raise OptionError("this iterator has no state of its own; ask its loader")
        return self._progress.state()

    def close(self) -> None:
        """End the epoch: stop its reads and workers, and free its memory."""
        self._ahead.drain()
        self._end()
        self._peeked.clear()
        self._arrived.clear()
        self._staged.clear()

    @property
    def looks_ahead(self) -> bool:
        return self._ahead.depth > 1

    @property
    def is_over(self) -> bool:
        """True if no more batches follow: the iterator was closed, or the epoch has ended."""
        return not self._end.alive

    async def aclose(self) -> None:
        self.close()

    def _begin(self) -> None:
        if self.before is not None:
            with self._beginning:  # a task that waited may have been cancelled: the next caller waits too
                self._begin_once()

    def _begin_once(self) -> None:
        if self.before is None:
            return
        try:
            self.before()
        except BaseException as error:
            self.before = partial(_raise, error)
            self.close()
            raise
        self.before = None

    def _next(self) -> B:
        with self._lock:
            if self.before is not None:
                self._begin()
            began = time.perf_counter()
            while True:
                try:
                    return self._take(began)
                except anyio.WouldBlock:
                    self._receiver.request()
                if not is_readable(self._awaited(), self._timeout_s or None):
                    raise RuntimeError(f"DataLoader timed out after {self._timeout_s} seconds")

    def _take(self, began: float) -> B:
        if self._peeked and not self._is_peeking:
            return self._taken(*self._peeked.pop())
        if self._progress is not None:
            self._progress.ask()
        if self._is_exhausted:
            raise StopIteration
        if self._pid != os.getpid():
            raise LoaderClosedError("the iterator belongs to the process that this one was forked from")
        self._stage()
        if self._staged:
            batch = self._ahead.take(0)
            arrived = self._staged.popleft()
        elif self._over is None:
            raise anyio.WouldBlock
        else:
            self._over(self)
        now = time.perf_counter()
        self._meters.count_next(arrived.samples, now - began, None if self._left is None else began - self._left)
        made: Any = None
        failure: Exception | None = None
        try:
            made = batch()
        except Exception as error:
            failure = error
        except BaseException:  # such as an interrupt: the batch is lost
            self._failed(arrived)
            raise
        finally:
            self._left = time.perf_counter()
        if self.leave_out:
            self.leave_out -= 1
            self._given(arrived)
            raise anyio.WouldBlock
        if self._is_peeking:
            self._peeked.append((made, failure, arrived))  # an error is raised again by `next`
        elif failure is None:
            self._given(arrived)
            given: B = made
            return given
        return self._taken(made, failure, arrived)

    def _taken(self, made: Any, failure: Exception | None, arrived: Arrived) -> B:
        """Count a batch as received or failed. Return it, or raise its error."""
        if not self._is_peeking:
            (self._given if failure is None else self._failed)(arrived)
        batch: B = _opened(made, failure)
        return batch

    def _failed(self, arrived: Arrived) -> None:
        if self._progress is not None:
            self._progress.fail(arrived)
        self._count_one()

    def _given(self, arrived: Arrived) -> None:
        if self._progress is not None:
            self._progress.receive(arrived)
        self._count_one()

    def _count_one(self) -> None:
        self.batches += 1
        if self.batches == self._count:
            self._use_up()

    def _use_up(self) -> None:
        exhausted, self._exhausted = self._exhausted, None
        if exhausted is not None:
            exhausted()

    def _stage(self) -> None:
        while len(self._staged) < self._ahead.depth:
            if not self._arrived and not self._receive():
                return
            arrived = self._arrived.popleft()
            self._staged.append(arrived)
            self._ahead.put(arrived.open)

    def _receive(self) -> bool:
        if self._over is not None:
            return False
        try:
            message = self._receiver.receive_nowait()
        except anyio.WouldBlock:
            return False
        except anyio.EndOfStream:
            self._over = BatchIterator._finish
        except anyio.ClosedResourceError:
            self._over = _refuse
        except ChannelFailedError as error:
            self._over = partial(_fail, error.failure)
        else:
            self._arrived.extend(self._opener.arrived(message))
        return self._over is None

    def _awaited(self) -> int:
        return self._ahead.fileno() if self._staged else self._receiver.fileno()

    def _finish(self) -> NoReturn:
        if self._is_peeking:  # the caller of `peek` must not use up the end
            raise StopIteration
        self._is_exhausted = True
        self._ahead.drain()
        self._end()
        self._use_up()
        if self._progress is not None:
            self._progress.end()
        raise StopIteration


def _fail(packed: PackedError, iterator: BatchIterator[B]) -> NoReturn:
    """Raise the engine's error. The epoch is not used up."""
    from headrace.torch_compat.serialize import unpack_error

    iterator._is_exhausted = True
    iterator._end()
    raise unpack_error(packed)


def _refuse(iterator: BatchIterator[B]) -> NoReturn:
    del iterator
    raise LoaderClosedError("this iterator was closed; make a new one with iter(loader)")


def _opened(made: B, failure: Exception | None) -> B:
    if failure is None:
        return made
    try:
        raise failure
    finally:
        del failure  # break the cycle of error, traceback and this frame


def _raise(error: BaseException) -> NoReturn:
    raise error
