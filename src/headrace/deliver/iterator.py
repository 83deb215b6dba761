"""What a loop iterates over: the same object for `for` and `async for`, over the same channel."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import anyio
import torch

from headrace.deliver.channel import ChannelFailedError
from headrace.deliver.slabs import Views
from headrace.errors import LoaderClosedError, NotReady
from headrace.tasks import Delivery
from headrace.torch_compat import packing
from headrace.torch_compat.collate import Spec
from headrace.types import Receiver
from headrace.wakeup import is_readable

B = TypeVar("B")
_SMALL_BYTES = 65536  # a batch of fewer bytes is copied: that is cheaper than a lease


class WaitMeters(Protocol):
    """Where the trainer's waiting is counted."""

    def count_next(self, samples: int, waited_s: float, elsewhere_s: float | None) -> None: ...


class Opener:
    """Makes batches of deliveries, in the trainer's thread.

    Args:
        views: the slabs.
        finish: the last thing done to each batch (pinning).
    """

    def __init__(self, views: Views, finish: Callable[[Any], Any]) -> None:
        self._views, self._finish = views, finish
        self._specs: dict[bytes, Spec] = {}

    def open(self, delivery: Delivery) -> Any:
        """The batch, or the exception that is raised in its place."""
        if delivery.kind == "error":
            raise packing.unpack_error(delivery.blob)
        must_copy = self._views.must_copy
        slab = self._views.array(delivery.segment)
        if delivery.kind == "packed":
            copy = must_copy or sum(delivery.lengths) <= _SMALL_BYTES
            batch = packing.unpack(slab, delivery.lengths, copy=copy)
        else:
            spec = self._specs.get(delivery.blob)
            if spec is None:
                spec = self._specs[delivery.blob] = Spec.loads(delivery.blob)
            copy = must_copy or spec.nbytes(delivery.count) <= _SMALL_BYTES
            batch = spec.read(slab, delivery.count, delivery.capacity, delivery.columns, copy=copy)
        return self._finish(batch)


class BatchIterator(Generic[B]):
    """Batches of one epoch, in order.

    Sync and async at once: `next(it)` blocks this thread, `await anext(it)` only the task. Several threads may share
    one, and several tasks: each batch goes to one of them. `close` (or the end of the last reference) ends it.

    Args:
        owner: kept alive as long as this.
        receiver: the trainer's end of the epoch's channel.
        opener: makes the batches.
        end: called once, from any thread, when the iterator is done or gone.
        exhausted: called once after the last batch.
        meters: where waiting is counted.
        name: what a profiler calls `next`.
        timeout_s: how long `next` waits at most; 0: for ever.
    """

    def __init__(
        self,
        owner: Any,
        receiver: Receiver,
        opener: Opener,
        end: Callable[[], None],
        exhausted: Callable[[], None],
        meters: WaitMeters,
        name: str,
        timeout_s: float = 0,
    ) -> None:
        self._owner = owner
        self._timeout_s, self._pid = timeout_s, os.getpid()
        self._receiver, self._opener = receiver, opener
        self._exhausted, self._meters, self._name = exhausted, meters, name
        self._end = weakref.finalize(self, end)
        self._end.atexit = False
        self._lock = threading.Lock()
        self._tasks_lock: anyio.Lock | None = None
        self._peeked: list[B] = []
        self._is_exhausted = False
        self._left: float | None = None
        self.batches = 0

    def __iter__(self) -> BatchIterator[B]:
        return self

    def __next__(self) -> B:
        if torch._C._autograd._profiler_enabled():
            with torch.autograd.profiler.record_function(self._name):
                return self._next()
        return self._next()

    def __aiter__(self) -> BatchIterator[B]:
        return self

    async def __anext__(self) -> B:
        if self._tasks_lock is None:
            self._tasks_lock = anyio.Lock()
        async with self._tasks_lock:
            began = time.perf_counter()
            while True:
                try:
                    return self._take(began)
                except anyio.WouldBlock:
                    pass  # waiting in here would show it in the traceback of a cancellation
                except StopIteration:
                    raise StopAsyncIteration from None
                self._receiver.request()
                with anyio.move_on_after(self._timeout_s or None) as scope:
                    await anyio.wait_readable(self._receiver.fileno())
                if scope.cancelled_caught:
                    raise RuntimeError(f"DataLoader timed out after {self._timeout_s} seconds")

    def try_next(self) -> B:
        """The next batch if it is ready.

        Raises:
            NotReady: it is not; nothing was lost, ask again.
            StopIteration: the epoch is over.
        """
        with self._lock:
            began = time.perf_counter()
            try:
                return self._take(began)
            except anyio.WouldBlock:
                self._receiver.request()
                raise NotReady("no batch is ready yet") from None

    def peek(self) -> B:
        """The next batch, which the next `next` gives again."""
        if not self._peeked:
            batch = self._next()
            self.batches -= 1
            self._peeked.append(batch)
        return self._peeked[0]

    def close(self) -> None:
        """End the epoch here; reads and workers stop, its memory is free."""
        self._end()
        self._peeked.clear()

    async def aclose(self) -> None:
        """As `close`."""
        self.close()

    def _next(self) -> B:
        with self._lock:
            began = time.perf_counter()
            while True:
                with contextlib.suppress(anyio.WouldBlock):
                    return self._take(began)
                self._receiver.request()
                if not is_readable(self._receiver.fileno(), self._timeout_s or None):
                    raise RuntimeError(f"DataLoader timed out after {self._timeout_s} seconds")

    def _take(self, began: float) -> B:
        if self._peeked:
            self.batches += 1
            return self._peeked.pop()
        if self._is_exhausted:
            raise StopIteration
        if self._pid != os.getpid():
            raise LoaderClosedError("the iterator belongs to the process that this one was forked from")
        try:
            delivery = self._receiver.receive_nowait()
        except anyio.EndOfStream:
            self._is_exhausted = True
            self._end()
            self._exhausted()
            raise StopIteration from None
        except anyio.ClosedResourceError:
            raise LoaderClosedError("this iterator was closed; make a new one with iter(loader)") from None
        except anyio.BrokenResourceError as error:
            raise LoaderClosedError("the loader's engine has ended without a word") from error
        except ChannelFailedError as error:
            self._is_exhausted = True  # nothing more comes; but the epoch was not used up
            self._end()
            failure = packing.unpack_error(error.blob)
            raise failure from failure.__cause__
        now = time.perf_counter()
        self._meters.count_next(delivery.count, now - began, None if self._left is None else began - self._left)
        try:
            batch: B = self._opener.open(delivery)
        finally:
            self.batches += 1
            self._left = time.perf_counter()
        return batch


def pinned(batch: Any) -> Any:
    """The batch in page-locked memory, as torch's own loader would have it."""
    from torch.utils.data._utils.pin_memory import pin_memory

    return pin_memory(batch)  # type: ignore[no-untyped-call]


def unchanged(batch: Any) -> Any:
    """The batch."""
    return batch
