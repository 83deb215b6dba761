"""Delivery of single samples, each a batch of its own, that workers make in chunks."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

from anyio.abc import TaskGroup

from headrace._util.shared_memory import Lease
from headrace.delivery.messages import Afters, AfterThese, ChunkDelivery, Delivery, ProgressDelta, RaisedError
from headrace.engine.scheduler.chunk_sizer import Pace
from headrace.engine.scheduler.epoch_context import Outlet
from headrace.engine.scheduler.reorder_buffer import Pile
from headrace.workers.failures import PackedError
from headrace.workers.sample_chunks import Part
from headrace.workers.tasks import Finish, Reply, Task


class OneByOne:
    """The samples of one epoch, in plan order.

    A chunk is one task and one message. It contains the next samples that are available when it may start, and never
    waits for more: a source may emit a sample only after the previous one has been received. The result of each sample
    and the state after it are the same as if it had been delivered alone.
    """

    def __init__(self, outlet: Outlet) -> None:
        spec, resources = outlet.spec, outlet.resources
        self._spec, self._learned, self._key, self._boundaries = spec.batches, spec.learned, spec.key, spec.boundaries
        self._dispatch, self._slabs, self._budget = outlet.dispatch, resources.slabs, resources.budget
        self._sender, self._meters = outlet.sender, resources.meters
        self._moved, self._finished = outlet.moved, outlet.finished
        self._position_map, self._skips = spec.position_map, spec.skips
        self._pace = Pace(spec.batches.together, is_awaited=True)
        self._pile = Pile()  # samples without a chunk
        self._chunks: deque[_Chunk] = deque()  # chunks that were not sent, in order
        self._chunked = 0  # samples before this one are in chunks or were sent
        self._sent = 0  # messages
        self._count: int | None = None  # samples of the epoch, once all were added
        self._group: TaskGroup | None = None
        outlet.sender.on_credit(self._advance)

    @property
    def granted(self) -> int:
        """Samples before this one may be made, at the current chunk size."""
        return self._next + self._credits * self._pace.size

    def add(self, position: int, part: Part) -> None:
        """Add samples at the batch positions from `position` on. Takes over their leases."""
        self._pile.add(position, part)
        self._go_on()

    def end(self, count: int) -> None:
        self._count = count
        self._end_if_done()

    def lacks(self, position: int | None) -> bool:
        """True if the oldest sample may be made and is missing; with a position: if this is it."""
        if not self._credits:
            return False
        if position is not None:
            return position <= self._next
        return not self._chunks and not self._is_next_there

    @property
    def has_waiting(self) -> bool:
        """True if samples wait that may not be made yet."""
        return bool(self._pile)

    def drop(self) -> None:
        self._pile.drop()
        for chunk in self._chunks:
            chunk.release_parts()
            chunk.release_slab()
        self._chunks.clear()

    def run_in(self, group: TaskGroup) -> None:
        self._group = group

    @property
    def _next(self) -> int:
        return self._chunks[0].start if self._chunks else self._chunked

    @property
    def _credits(self) -> int:
        return self._sender.granted - self._sent

    @property
    def _is_next_there(self) -> bool:
        return bool(self._pile) and self._pile.start == self._chunked

    def _advance(self) -> None:
        self._go_on()
        ready = sum(chunk.state is _State.READY for chunk in self._chunks)
        self._meters.set_depths(ready=ready, open_batches=len(self._chunks))
        self._moved()
        self._budget.changed()
        self._slabs.changed()
        self._end_if_done()

    def _go_on(self) -> None:
        """Send finished chunks that are due, and start as many chunks as may be sent."""
        while self._chunks and self._chunks[0].state is _State.READY and self._credits:
            self._send(self._chunks.popleft())
        while len(self._chunks) < self._credits and self._is_next_there:
            self._cut()
        for chunk in list(itertools.islice(self._chunks, self._credits)):
            if chunk.state is _State.OPEN:
                self._begin(chunk)

    def _end_if_done(self) -> None:
        if self._count is not None and not self._chunks and not self._pile:
            self._finished()

    def _cut(self) -> None:
        size, chunk = self._pace.size, _Chunk(self._chunked)
        while chunk.count < size and self._is_next_there:
            _, part = self._pile.take(size - chunk.count)
            chunk.parts.append(part)
            self._chunked += part.count
        self._chunks.append(chunk)

    def _begin(self, chunk: _Chunk) -> None:
        """Start a chunk. One that turned out to be too large is cut to its first samples."""
        assert self._group is not None
        self._cut_off(chunk, 1 if chunk.is_divided else self._pace.size)
        self._pace.begin()
        chunk.state = _State.WORKING
        self._group.start_soon(self._make, chunk)

    def _cut_off(self, chunk: _Chunk, count: int) -> None:
        """Move the samples after the first `count` to a new chunk."""
        if chunk.count > count:
            self._chunks.insert(self._chunks.index(chunk) + 1, chunk.cut_off(count))

    async def _make(self, chunk: _Chunk) -> None:
        learned, is_urgent = self._learned, lambda: self._chunks[0] is chunk
        if learned.batch_bytes:
            chunk.slab = await self._slabs.acquire(learned.batch_bytes, chunk.start, is_urgent)
        finish = Finish.BATCH if chunk.count == 1 else Finish.EACH
        parts = [part.cut(0, part.count) for part in chunk.parts]
        task = Task(self._spec.chain, self._key, chunk.start, finish, parts)
        self._position_map.place(task, chunk.start, chunk.count)
        if chunk.slab is not None:
            task.place = chunk.slab.retain()

        async def find_slab(reply: Reply) -> Lease:
            if self._spec.wants_place(reply.size, chunk.count):
                learned.batch_bytes = max(learned.batch_bytes, reply.size)
            if chunk.slab is None or chunk.slab.size < reply.size:
                chunk.release_slab()
                chunk.slab = await self._slabs.acquire(reply.size, chunk.start, is_urgent)
            return chunk.slab.retain()

        reply = await self._dispatch.work(task, find_slab)
        if reply.kind == "failed" and chunk.count > 1:  # the whole task failed: make each sample alone
            chunk.state, chunk.is_divided = _State.OPEN, True
            chunk.release_slab()
        else:
            self._take_in(chunk, reply)
        self._advance()

    def _take_in(self, chunk: _Chunk, reply: Reply) -> None:
        is_whole = reply.kind == "failed"
        chunk.sizes = reply.sizes or [reply.lengths]
        chunk.errors = {slot: error.widened() if is_whole else error for slot, error in reply.errors}
        self._cut_off(chunk, len(chunk.sizes))
        self._pace.learn(chunk.count, reply.took_s, sum(reply.lengths))
        chunk.release_parts()
        chunk.state = _State.READY

    def _send(self, chunk: _Chunk) -> None:
        skips, position_map = self._skips, self._position_map
        late = position_map.late(self._boundaries, self._skipped)
        outcomes: Sequence[tuple[int, ...] | RaisedError] = chunk.sizes
        after: Afters | None = None
        if not chunk.errors:
            if skips is not None:
                skips.rule(tuple, chunk.count, {})
            after = position_map.after_each(chunk.start, chunk.count, self._skipped)
        if after is None:
            outcomes, after = self._each(chunk)
        slab, chunk.slab = chunk.slab, None
        segment = 0
        if slab is not None and any(type(outcome) is tuple for outcome in outcomes):
            segment = slab.segment.number
            self._slabs.hand_out(slab)
        elif slab is not None:
            slab.release()
        if not outcomes:
            return
        self._sent += 1
        self._sender.send(_message(chunk, segment, outcomes, after, late))
        self._dispatch.has_begun = True

    def _each(self, chunk: _Chunk) -> tuple[list[tuple[int, ...] | RaisedError], AfterThese]:
        """Return the result of each sample that is not skipped, and the state change after it."""
        outcomes, after = list[tuple[int, ...] | RaisedError](), list[ProgressDelta]()
        for slot, sizes in enumerate(chunk.sizes):
            number, error, raised = chunk.start + slot, chunk.errors.get(slot), None
            if self._skips is not None:
                positions = partial(self._position_map.in_batches, number, number + 1)
                left_out = self._position_map.left_out(number, number + 1)
                raised = self._skips.rule(positions, 1, {} if error is None else {0: error}, left_out)
            elif error is not None:
                raised = RaisedError(error)
            self._position_map.cover(number, number, number + 1, self._boundaries)
            if error is None or raised is not None:
                outcomes.append(sizes if raised is None else raised)
                after.append(self._position_map.after(self._boundaries, self._skipped))
        return outcomes, AfterThese(after)

    @property
    def _skipped(self) -> tuple[int, int]:
        return (0, 0) if self._skips is None else self._skips.counts


class _State(Enum):
    """open → working → ready. A chunk whose whole task fails is open again."""

    OPEN = "open"
    WORKING = "working"
    READY = "ready"


@dataclass(slots=True, eq=False)
class _Chunk:
    """Consecutive samples.

    Attributes:
        start: Number of the first sample.
        parts: Inputs, until the samples are made.
        is_divided: True if each sample is to be made alone.
        errors: Errors by index in the chunk.
    """

    start: int
    parts: list[Part] = field(default_factory=list)
    is_divided: bool = False
    state: _State = _State.OPEN
    slab: Lease | None = None
    sizes: Sequence[tuple[int, ...]] = ()
    errors: dict[int, PackedError] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return sum(part.count for part in self.parts) if self.parts else len(self.sizes)

    def cut_off(self, count: int) -> _Chunk:
        kept, rest = list[Part](), _Chunk(self.start + count, is_divided=self.is_divided)
        for part in self.parts:
            here = min(part.count, count)
            kept += [part.cut(0, here)] if here else []
            rest.parts += [part.cut(here, part.count)] if here < part.count else []
            count -= here
            part.release()
        self.parts = kept
        return rest

    def release_parts(self) -> None:
        for part in self.parts:
            part.release()
        self.parts = []

    def release_slab(self) -> None:
        if self.slab is not None:
            self.slab.release()
            self.slab = None


def _message(
    chunk: _Chunk,
    segment: int,
    outcomes: Sequence[tuple[int, ...] | RaisedError],
    after: Afters,
    late: ProgressDelta | None,
) -> Delivery | ChunkDelivery:
    (first, *others), start = outcomes, chunk.start
    if others or chunk.count > 1:
        return ChunkDelivery(segment, outcomes, after, late)
    (said,) = after.said(0, 1)
    if isinstance(first, RaisedError):
        return Delivery(start, 1, start, "error", error=first.error, note=first.note, after=said, late=late)
    return Delivery(start, 1, start, "packed", segment, lengths=first, after=said, late=late)
