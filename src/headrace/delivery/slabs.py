"""Slabs: shared memory of batches, reused once the trainer's last view is gone."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from headrace._util.shared_memory import LARGE_BYTES, Lease, Segment, end_of
from headrace.delivery.channel import ChunkDelivery, Delivery, RaisedError
from headrace.errors import LoaderClosedError
from headrace.state.state import ResumePoint, ResumePoints
from headrace.torch_compat import serialize
from headrace.torch_compat.serialize import unpack_each
from headrace.torch_compat.spec import Spec

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

    def acquire_now(self, size: int) -> Lease:
        """Return a slab without waiting, even beyond the budget. Raises MemoryError as `acquire` does."""
        segment = self._find(size, lambda: True)
        assert segment is not None
        return self._lease(segment)

    def hand_out(self, lease: Lease) -> None:
        self._out[lease.segment.number] = lease

    def retire(self, number: int) -> None:
        """Never reuse a slab: a forked process has views of it, whose end cannot be observed; or it is too large."""
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


_SMALL_BYTES = 65536  # smaller batches are copied, which is cheaper than a lease


class Arrived(NamedTuple):
    """A received batch.

    Attributes:
        open: Returns the batch, or raises the error that replaces it.
        after: Resume points after each batch of the message. None if no state is kept.
        number: Index of this batch in `after`.
        late: See `headrace.delivery.channel.Delivery`.
        batch: Number of the batch in the epoch, or of the first batch of its message.
    """

    open: Callable[[], object]
    samples: int
    after: ResumePoints | None
    number: int = 0
    late: ResumePoint | None = None
    batch: int = 0


_COPIED_BYTES = 2**20


class BatchOpener:
    def __init__(self, views: Views) -> None:
        self._views = views

    def arrived(self, message: Delivery | ChunkDelivery) -> Iterable[Arrived]:
        if isinstance(message, Delivery):
            after = None if message.after is None else (message.after,)
            return (Arrived(partial(self.open, message), message.count, after, 0, message.late, message.batch),)
        batches: Iterator[Callable[[], object]]
        try:  # copy now, so that no batch keeps the whole slab leased
            batches = self._each(message)
        except LoaderClosedError as error:
            batches = itertools.repeat(partial(_raise_again, error))
        assert len(message.after) == len(message.outcomes) == len(message.counts)
        late, arrived = message.late, list[Arrived]()
        for number, (outcome, count) in enumerate(zip(message.outcomes, message.counts, strict=True)):
            open_one = partial(_raise, outcome) if type(outcome) is RaisedError else next(batches)
            arrived.append(Arrived(open_one, count, message.after, number, late))
            late = None
        return arrived

    def _each(self, message: ChunkDelivery) -> Iterator[Callable[[], object]]:
        """Copy the batches of a message, or open them if they are large. Returns functions that give them."""
        places = [outcome for outcome in message.outcomes if not isinstance(outcome, RaisedError)]
        if not places:
            return iter(())
        whole = message.slots
        if whole is None:
            if end_of(places) <= _COPIED_BYTES:
                return unpack_each(self._views.copied(message.segment, end_of(places)), places)
            with self._views.read(message.segment, is_small=False) as view:
                return iter([_opened_now(open_one) for open_one in unpack_each(view.data, places)])
        spec = Spec.loads(whole.blob)
        slab = np.frombuffer(self._views.copied(message.segment, spec.nbytes(whole.capacity)), np.uint8)
        return (
            partial(
                spec.read,
                slab,
                stop - start,
                whole.capacity,
                [column[start:stop] for column in whole.columns],
                copy=True,
                first=start,
            )
            for start, stop in places
        )

    def open(self, delivery: Delivery) -> object:
        if delivery.kind == "error":
            assert delivery.error is not None
            _raise(RaisedError(delivery.error, delivery.note))
        if delivery.kind == "packed":
            nbytes, read = sum(delivery.lengths), partial(serialize.unpack, lengths=delivery.lengths)
        else:
            spec, holes = Spec.loads(delivery.blob), delivery.holes
            slots = delivery.count + len(holes)
            nbytes = spec.nbytes(slots)
            read = partial(spec.read, count=slots, capacity=delivery.capacity, columns=delivery.columns, holes=holes)
        is_small = nbytes <= _SMALL_BYTES
        if not is_small and not self._views.must_copy:
            return read(self._views.array(delivery.segment), copy=False)
        with self._views.read(delivery.segment, is_small=is_small) as slab:
            return read(slab, copy=True)


def _raise(raised: RaisedError) -> NoReturn:
    error = serialize.unpack_error(raised.error)
    if raised.note:
        error.add_note(raised.note)
    raise error


def _opened_now(open_one: Callable[[], object]) -> Callable[[], object]:
    try:
        return [open_one()].pop  # gives up its reference
    except Exception as error:
        return partial(_raise_again, error)


def _raise_again(error: Exception) -> NoReturn:
    raise error
