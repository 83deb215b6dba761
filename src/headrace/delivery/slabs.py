"""Slabs: shared memory for whole batches, reused once the trainer's last view is gone."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import os
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headrace._util.shared_memory import LARGE_BYTES, Lease, Segment
from headrace.errors import LoaderClosedError

HELD_SLABS = 2  # the loop variable refers to batch k while next() makes k + 1
_PAGE = 4096
_ROOMY = 8  # a large slab of more than this many times the request was made for a rare large sample
_views: weakref.WeakSet[Views] = weakref.WeakSet()


@dataclass(slots=True, order=True)
class _SlabRequest:
    rank: int
    number: int
    size: int = field(compare=False)
    is_urgent: Callable[[], bool] = field(compare=False)
    future: asyncio.Future[Lease] = field(compare=False)


class Slabs:
    """The engine's side: allocates slabs, on the engine's loop only.

    Args:
        forget: Called with the number of a deleted slab, so that workers unmap it.
        may_grow: True if the loader's budget admits this many more bytes.

    Attributes:
        limit: Maximum number of slabs: the sum over the running epochs.
        kept: Number of slabs kept for reuse. Without a running epoch, as many as the last one needed.
    """

    def __init__(self, forget: Callable[[int], None], may_grow: Callable[[int], bool]) -> None:
        self.limit = self.kept = 0
        self.nbytes = 0
        self.segments: dict[int, Segment] = {}
        self.unlock_pages: Callable[[int], None] = lambda _: None  # called before a segment is closed
        self._forget, self._may_grow = forget, may_grow
        self._free: list[Segment] = []
        self._numbers = itertools.count()
        self._waiting: list[_SlabRequest] = []
        self._out: dict[int, Lease] = {}
        self._retired: set[int] = set()

    @contextlib.contextmanager
    def serve(self, count: int) -> Iterator[None]:
        """Raise the limit by `count` slabs while an epoch runs."""
        self.limit += count
        self.kept = self.limit
        try:
            yield
        finally:
            self.limit -= count
            # Keep the last epoch's slabs for the next epoch.
            self.kept = self.limit or count
            while self._free and len(self.segments) > self.kept:
                self._discard(self._free.pop())

    async def acquire(self, size: int, rank: int, is_urgent: Callable[[], bool]) -> Lease:
        """Wait for a slab of at least `size` bytes. Waiting calls are served by rank, lowest first.

        Args:
            is_urgent: True if nothing can progress without this slab. It is then created even beyond the budget.

        Raises:
            MemoryError: the machine does not have the memory.
        """
        if not self._waiting and (segment := self._find(size, is_urgent)) is not None:
            return self._lease(segment)
        future: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        entry = _SlabRequest(rank, next(self._numbers), size, is_urgent, future)
        heapq.heappush(self._waiting, entry)
        self.changed()
        try:
            return await future
        except BaseException:
            if future.done() and not future.cancelled() and future.exception() is None:
                future.result().release()
            raise
        finally:
            if entry in self._waiting:  # cancelled: the request would keep its epoch alive
                self._waiting.remove(entry)
                heapq.heapify(self._waiting)

    def hand_out(self, lease: Lease) -> None:
        self._out[lease.segment.number] = lease

    def retire(self, number: int) -> None:
        """Never reuse a slab: a forked process has views of it, whose end cannot be observed."""
        if number in self._out:
            self._retired.add(number)

    def returned(self, number: int) -> None:
        lease = self._out.pop(number, None)
        if lease is not None:
            lease.release()

    def changed(self) -> None:
        """Serve waiting requests, after a slab was freed or a request's urgency has changed."""
        while self._waiting:
            entry = self._waiting[0]
            if not entry.future.done():
                try:
                    segment = self._find(entry.size, entry.is_urgent)
                    if segment is None:
                        # The first request may be of an epoch that nobody reads. It must not block urgent ones.
                        urgent = (other for other in self._waiting if not other.future.done() and other.is_urgent())
                        entry = min(urgent, default=entry)
                        segment = self._find(entry.size, entry.is_urgent)
                except MemoryError as error:
                    entry.future.set_exception(error)
                else:
                    if segment is None:
                        return
                    entry.future.set_result(self._lease(segment))
            self._waiting.remove(entry)
            heapq.heapify(self._waiting)

    def close(self) -> None:
        for segment in self.segments.values():
            segment.close()
        self.segments.clear()
        self._free.clear()
        self.nbytes = 0

    def _find(self, size: int, is_urgent: Callable[[], bool]) -> Segment | None:
        for roomy in [s for s in self._free if s.size > max(LARGE_BYTES, _ROOMY * size)]:
            self._free.remove(roomy)
            self._discard(roomy)
        fitting = [s for s in self._free if s.size >= size]
        if fitting:
            best = min(fitting, key=lambda s: s.size)
            self._free.remove(best)
            return best
        rounded = max(_PAGE, -(-size // _PAGE) * _PAGE)
        while self._free and not (len(self.segments) < self.limit and self._may_grow(rounded)):
            self._discard(self._free.pop())  # too small for what is needed now
        if not (len(self.segments) < self.limit and self._may_grow(rounded)) and not is_urgent():
            return None
        segment = Segment.create(rounded)
        self.segments[segment.number] = segment
        self.nbytes += segment.size
        return segment

    def _lease(self, segment: Segment) -> Lease:
        return Lease(segment, 0, segment.size, self._take_back)

    def _take_back(self, lease: Lease) -> None:
        segment = lease.segment
        if segment.number not in self.segments:
            return  # closed before
        if len(self.segments) > self.kept or segment.number in self._retired:
            self._discard(segment)
        else:
            self._free.append(segment)
        self.changed()

    def _discard(self, segment: Segment) -> None:
        self.unlock_pages(segment.number)
        del self.segments[segment.number]
        self._retired.discard(segment.number)
        self.nbytes -= segment.size
        segment.close()
        self._forget(segment.number)


class Views:
    """The trainer's side: views of slabs, which return a slab when its last view is gone.

    Args:
        give_back: Called with the number of a slab, from any thread and inside garbage collection.
        retire: Called with the number of a slab that a forked process has views of.
        ahead: Number of batches read before the trainer gets them.
        put_back: Called instead of `give_back` for a small slab that was only read. It need not take effect before the
            next batch is received.
    """

    def __init__(
        self,
        segments: dict[int, Segment],
        give_back: Callable[[int], None],
        retire: Callable[[int], None],
        lock_pages: Callable[[int, memoryview], None] = lambda *_: None,
        ahead: int = 1,
        put_back: Callable[[int], None] | None = None,
    ) -> None:
        self._segments, self._give_back, self._retire = segments, give_back, retire
        self._put_back = put_back or give_back
        self._lock_pages, self._most = lock_pages, HELD_SLABS + ahead - 1
        self._out: set[int] = set()
        _views.add(self)

    def at_fork(self) -> None:
        """Retire all slabs that have views. The forked process shares their memory."""
        for number in tuple(self._out):
            self._retire(number)

    @property
    def must_copy(self) -> bool:
        """True if the trainer has views of so many slabs that one more would stall the epoch."""
        return len(self._out) >= self._most

    def copied(self, number: int, nbytes: int) -> bytearray:
        """Return the first bytes of a slab, and give it back."""
        view = self._view(number)
        try:
            return bytearray(view[:nbytes])
        finally:
            self._give_back(number)

    @contextlib.contextmanager
    def read(self, number: int, *, is_small: bool) -> Iterator[NDArray[np.uint8]]:
        """Return a context with the slab as bytes. No view may outlive the context."""
        view = self._view(number)
        try:
            yield np.frombuffer(view, np.uint8)
        finally:
            (self._put_back if is_small else self._give_back)(number)

    def array(self, number: int) -> NDArray[np.uint8]:
        """Return the slab as bytes. It is given back when this array and all views of it are gone."""
        # A new array for each lease. numpy makes the outermost array the base of every view, so a finalizer on a slice
        # of a shared array would run while views of the slice are alive.
        view = self._view(number)
        self._lock_pages(number, view)
        root: NDArray[np.uint8] = np.frombuffer(view, np.uint8)
        self._out.add(number)
        weakref.finalize(root, _end, self._out, number, self._give_back).atexit = False
        return root

    def _view(self, number: int) -> memoryview:
        segment = self._segments.get(number)
        view = memoryview(b"") if segment is None else segment.view
        if not view:
            raise LoaderClosedError("the loader was closed before this batch was taken")
        return view


def _end(out: set[int], number: int, give_back: Callable[[int], object]) -> None:
    out.discard(number)
    give_back(number)


def _at_fork() -> None:
    for views in list(_views):
        views.at_fork()


# Also before the fork: until the parent runs the second hook, another thread may drop a batch and its slab be reused.
os.register_at_fork(before=_at_fork, after_in_parent=_at_fork)
