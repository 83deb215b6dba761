"""Where the samples of an epoch go: into batches, delivered in order, or one by one to another epoch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from anyio.abc import TaskGroup

from headrace._util.shared_memory import LARGE_BYTES
from headrace.delivery.channel import ChannelFailedError, ChunkDelivery, Delivery, RaisedError, Sender
from headrace.engine.scheduler.batch_work import BatchState, BatchWork, OpenBatch
from headrace.engine.scheduler.dispatch import Budget, Dispatch, Pace, Pile, TaskPool
from headrace.engine.scheduler.epoch_spec import EpochSpec, Resources
from headrace.engine.scheduler.position_map import GivenBoundaries, PositionMap
from headrace.state.state import ResumePoint, ResumePoints
from headrace.workers.failures import PackedError
from headrace.workers.sample_chunks import Part
from headrace.workers.tasks import Reply


class Assembly:
    """The batches of one epoch.

    Args:
        moved: Called when another batch becomes the oldest.
        finished: Called when the last batch of the epoch was delivered.
    """

    def __init__(
        self,
        spec: EpochSpec,
        resources: Resources,
        dispatch: Dispatch,
        sender: Sender,
        moved: Callable[[], None],
        finished: Callable[[], None],
    ) -> None:
        self._spec, self._learned, self._boundaries = spec.batches, spec.learned, spec.boundaries
        self._dispatch, self._slabs, self._budget = dispatch, resources.slabs, resources.budget
        self._sender, self._meters = sender, resources.meters
        self._moved, self._finished = moved, finished
        self._position_map, self._skips = spec.position_map, spec.skips
        self._batches: dict[int, OpenBatch] = {}
        self._pile = Pile()  # samples of batches that may not start yet
        self._empty: set[int] = set()  # batches without samples that may not start yet
        self._admitted = 0  # batches with lower numbers may start
        self._missing: dict[int, int] = {}  # samples to come of batches that ended early
        self._next_delivery = 0
        self._sent = 0  # messages
        is_one = spec.batches.publishes and not resources.works.shares_memory
        self._pace = Pace(1 if is_one else spec.batches.together, is_awaited=True)
        self._use_slots = not spec.batches.publishes  # in tasks of several batches
        self._alone_before = 0  # batches before this one are made alone
        # The channel grants messages. Batches that need no message: several open ones need one, empty ones none.
        self._without_message = 0
        self._count: int | None = None  # samples of the epoch, once all were added
        self._work = BatchWork(spec, resources, dispatch, self)
        sender.on_credit(self._on_credit)
        self._admit()

    @property
    def granted(self) -> int:
        """Samples of batches with lower numbers may be read, at the current number of batches per message."""
        messages = self._sender.granted - self._sent
        return max(self._sender.granted + self._without_message, self._next_delivery + messages * self._pace.size)

    def begin(self, number: int) -> None:
        if not self._boundaries.size(number):
            self._empty.add(number)
            self._admit()

    def add(self, position: int, part: Part) -> None:
        """Add samples at the batch positions from `position` on. Takes over their leases."""
        self._pile.add(position, part)
        self._admit()

    def end(self, count: int) -> None:
        """Report that all `count` samples of the epoch were added. The last batch may be short."""
        self._count = count
        number, rest = self._boundaries.find(count)
        last = self._batches.get(number)
        if last is not None and self._shorten(last, rest):
            self.worked(last)
        self._end_if_done()

    def lacks(self, position: int | None) -> bool:
        """True if the oldest batch may be made and lacks samples; with a position: this sample."""
        oldest = self._next_delivery
        if oldest >= self._admitted:
            return False
        if position is not None:
            return position < self._boundaries.start(oldest + 1)
        batch = self._batches.get(oldest if self._spec.in_order else min(self._batches, default=oldest))
        return batch is None or batch.seen < batch.wanted

    @property
    def has_waiting(self) -> bool:
        """True if samples wait for batches that may not start yet."""
        return bool(self._pile)

    def drop(self) -> None:
        self._pile.drop()
        for batch in self._batches.values():
            self._drop_batch(batch)

    def run_in(self, group: TaskGroup) -> None:
        self._work.pool = TaskPool(group)

    def _begin_admitted(self) -> None:
        while self._pile and self._pile.start < self._boundaries.start(self._admitted):
            number, slot = self._boundaries.find(self._pile.start)
            size = self._boundaries.size(number)
            if slot or number < self._alone_before or self._pace.size == 1:
                self._add(number, slot, self._pile.take(size - slot)[1])
            else:
                self._begin_several(number, size)

    def _begin_several(self, number: int, size: int) -> None:
        """Start as many batches as are worth a task and are complete, or the samples of the first one."""
        position, most, parts, count = self._boundaries.start(number), self._pace.size, dict[int, Part](), 0
        while count < most * size and self._pile and self._pile.start == position + count:
            _, parts[count] = self._pile.take(most * size - count)
            count += parts[count].count
        several = 1
        while (several + 1) * size <= count and self._boundaries.size(number + several) == size:
            several += 1
        self._put_back(position, parts, several * size)
        if several == 1:
            for slot, part in parts.items():
                self._add(number, slot, part)
            return
        batch = self._batches[number] = OpenBatch(number, position, several * size, several * size)
        batch.count, batch.state, batch.parts = several, BatchState.COLLATING, parts
        batch.arrived = batch.seen = batch.expected
        batch.use_slots = self._use_slots and self._learned.use_slots and self._learned.form is not None
        self._pace.begin()
        self._without_message += several - 1
        self._admitted = max(self._admitted, self._sender.granted + self._without_message)
        self._work.make_several(batch)

    def _put_back(self, position: int, parts: dict[int, Part], count: int) -> None:
        """Wait again with the samples after the first `count`."""
        for slot, part in list(parts.items()):
            kept = max(0, count - slot)
            if kept < part.count:
                self._pile.add(position + slot + kept, part.cut(kept, part.count))
                del parts[slot]
                if kept:
                    parts[slot] = part.cut(0, kept)
                part.release()

    def _begin_empty(self) -> None:
        for number in sorted(number for number in self._empty if number < self._admitted):
            self._empty.discard(number)
            batch = self._batch(number)
            batch.state, batch.use_slots = BatchState.FILLING, False
            self.worked(batch)

    def _batch(self, number: int) -> OpenBatch:
        if number not in self._batches:
            size = self._boundaries.size(number)
            capacity = max(size, self._learned.form_capacity)  # one slab size for all batches if possible
            batch = self._batches[number] = OpenBatch(number, self._boundaries.start(number), size, capacity)
            batch.use_slots = self._learned.use_slots
            self._pace.begin()
            if self._count is not None:
                self._shorten(batch, self._count - batch.position)
        return self._batches[number]

    def _shorten(self, batch: OpenBatch, rest: int) -> bool:
        """Shorten a batch that starts `rest` samples before the end. True if that was not known."""
        is_news = 0 < rest < batch.expected and batch.shorten(rest)
        if is_news:
            batch.is_left_out = self._spec.drop_last
        return is_news

    def _add(self, number: int, slot: int, part: Part) -> None:
        if number in self._missing:
            self._let_go(number, part)
            return
        batch = self._batch(number)
        if self._skips is None and (failed := part.failed):
            batch.end_with(slot + failed[0])
        wanted = batch.take_in(slot, part)
        if batch.is_over:
            return
        if batch.state is BatchState.OPEN:
            batch.state = BatchState.FILLING
        if batch.use_slots and wanted is not None:
            self._work.fill(batch, slot, wanted)
        self.worked(batch)

    def _let_go(self, number: int, part: Part) -> None:
        self._missing[number] -= part.count
        if self._missing[number] <= 0:
            del self._missing[number]
        part.release()

    # Called by `BatchWork`.

    def is_oldest(self, batch: OpenBatch) -> bool:
        """True if no other batch is delivered before this one, so that it must get memory."""
        return batch.number <= self._next_delivery

    def worked(self, batch: OpenBatch) -> None:
        """Continue a batch after a worker has finished some of its samples."""
        if not batch.is_whole or batch.state is not BatchState.FILLING:
            return
        if batch.use_slots and batch.is_left_out and not batch.errors:
            self._leave_out(batch)
        elif batch.use_slots:
            has_failed = self._skips is None and bool(batch.errors)
            self._finish(batch, None if has_failed else self._work.slots_delivery(batch))
        elif self._is_to_spread(batch):
            batch.is_spread = True
            batch.errors.clear()
            for slot, part in batch.parts.items():
                self._work.make(batch, slot, part)
            self.worked(batch)
        elif batch.is_spread and batch.errors and self._skips is None:
            self._finish(batch, None)
        else:
            batch.state = BatchState.COLLATING
            self._work.collate(batch)

    def collated(self, batch: OpenBatch, delivery: Delivery | None) -> None:
        """Finish a batch that a worker has made. The delivery is None without a result, or if it is dropped."""
        if batch.is_left_out and not batch.errors:
            self._leave_out(batch)
        else:
            self._finish(batch, delivery)

    def made_first(self, batch: OpenBatch, reply: Reply) -> None:
        """Deliver the first of several batches, with their slab."""
        made = self._split(batch, reply)
        made.slab, batch.slab = batch.slab, None
        self.stored(made)

    def made_early(self, batch: OpenBatch, reply: Reply, data: bytes) -> None:
        """Deliver the first of several batches while a worker makes the others. `data` is copied to another slab."""
        self._work.store(self._split(batch, reply), data)

    def _split(self, batch: OpenBatch, reply: Reply) -> OpenBatch:
        del self._batches[batch.number]
        made = batch.split(reply.batches)
        made.places, made.errors = reply.pieces, dict(reply.errors)
        self._batches[made.number], self._batches[batch.number] = made, batch
        self._without_message -= 1
        return made

    def stored(self, batch: OpenBatch) -> None:
        batch.state = BatchState.READY
        self._deliver()

    def made_several(self, batch: OpenBatch, reply: Reply) -> None:
        """Finish several batches. Those that the worker has not made wait again."""
        done = reply.batches
        if reply.kind == "mismatch":
            self._use_slots = False
        elif reply.kind == "failed":
            self._alone_before = max(self._alone_before, batch.number + batch.count)
        else:
            self._pace.learn(batch.made_count, batch.made_s, batch.nbytes)
        if done < batch.count:
            self._put_back(batch.position, batch.parts, done * batch.size)
            self._without_message -= batch.count - max(1, done)
            batch.expected, batch.count = done * batch.size, max(1, done)
        if done:
            batch.errors = dict(reply.errors)
            batch.places = self._places(batch, reply)
            batch.state = BatchState.READY
            if batch.use_slots:
                batch.columns = {0: reply.columns}
                batch.delivery = self._work.slots_delivery(batch)
            batch.release_parts()
        else:
            self._drop_batch(self._batches.pop(batch.number))
        self._admit()
        self._deliver()

    @staticmethod
    def _places(batch: OpenBatch, reply: Reply) -> Sequence[tuple[int, ...]]:
        """Return where the result of each batch is; empty for a batch without one."""
        if not batch.use_slots:
            return reply.pieces
        places, stop = list[tuple[int, ...]](), 0
        for first in range(0, batch.expected, batch.size):
            start, stop = stop, stop + batch.size - sum(first + k in batch.errors for k in range(batch.size))
            places.append((start, stop) if start < stop else ())
        return places

    def _is_to_spread(self, batch: OpenBatch) -> bool:
        """True if all workers should make the samples. A dropped batch is only checked for errors."""
        is_wanted = self._spec.is_spread and not batch.is_left_out
        return is_wanted and not batch.is_spread and not self._work.is_quick(batch)

    def _finish(self, batch: OpenBatch, delivery: Delivery | None) -> None:
        """Finish the batch, as its first error if failed samples are not skipped."""
        if self._skips is None:
            if batch.wanted < batch.expected and not batch.errors:  # made again, the sample did not fail
                assert batch.ended_by is not None
                batch.errors[batch.wanted - 1] = batch.ended_by
            if batch.errors:
                delivery = None
        assert delivery is not None or batch.errors  # nothing is dropped silently
        if batch.made_s and not batch.errors:
            self._pace.learn(1, batch.made_s, batch.nbytes)
        batch.delivery = delivery
        batch.state = BatchState.READY
        batch.release_parts()
        if delivery is None and not batch.under_way:
            batch.release_slab()
        self._deliver()

    def _ruled(self, position: int, count: int, errors: dict[int, PackedError]) -> RaisedError | None:
        """Return the error that replaces a batch that is due, if any."""
        if self._skips is None:
            return RaisedError(errors[min(errors)]) if errors else None
        positions = partial(self._position_map.in_batches, position, position + count)
        return self._skips.rule(positions, count, errors, self._position_map.left_out(position, position + count))

    @property
    def _skipped(self) -> tuple[int, int]:
        return (0, 0) if self._skips is None else self._skips.counts

    def _deliver(self) -> None:
        while self._sent < self._sender.granted:
            if self._spec.in_order:
                batch = self._batches.get(self._next_delivery)
            else:
                batch = next((b for b in self._batches.values() if b.state is BatchState.READY), None)
            if batch is None or batch.state is not BatchState.READY:
                break
            del self._batches[batch.number]
            if batch.arrived < batch.expected:
                self._missing[batch.number] = batch.expected - batch.arrived
            self._next_delivery += batch.count
            batch.state = BatchState.DELIVERED
            message = self._message(batch) if batch.count == 1 and not batch.places else self._messages(batch)
            if message is None:
                self._without_message += 1
                self._admit()
                continue
            self._sent += 1
            self._sender.send(message)
            self._dispatch.has_begun = True
        states = [state for batch in self._batches.values() for state in [batch.state] * batch.count]
        self._meters.set_depths(ready=states.count(BatchState.READY), open_batches=len(states))
        self._moved()
        self._budget.changed()
        self._slabs.changed()
        self._end_if_done()

    def _message(self, batch: OpenBatch) -> Delivery | None:
        """Return the message for a batch that is due. None if none of its samples is left."""
        delivery, raised = batch.delivery, self._ruled(batch.position, batch.expected, batch.errors)
        if raised is not None:
            if not batch.under_way:
                batch.release_slab()
            delivery = Delivery(
                batch.number, batch.expected, batch.position, "error", error=raised.error, note=raised.note
            )
        late = self._position_map.late(self._boundaries, self._skipped)
        self._position_map.cover(batch.number, batch.position, batch.position + batch.expected, self._boundaries)
        if delivery is None:
            return None
        if batch.slab is not None and raised is None:
            self._slabs.hand_out(batch.slab)
        delivery.after, delivery.late = self._position_map.after(self._boundaries, self._skipped), late
        return delivery

    def _messages(self, batch: OpenBatch) -> ChunkDelivery | None:
        """Return the message for several batches that are due. None if none of their samples is left."""
        late = self._position_map.late(self._boundaries, self._skipped)
        after: ResumePoints | None = None
        outcomes: Sequence[tuple[int, ...] | RaisedError] = batch.places
        counts: Sequence[int] = [batch.size] * batch.count
        if not batch.errors:
            skipped = self._skipped[0], 0
            after = self._position_map.after_each(batch.number, batch.count, batch.position, batch.size, skipped)
        if after is None:
            outcomes, counts, after = self._each(batch)
        elif self._skips is not None:
            self._skips.rule(tuple, batch.expected, {})
        slab, segment = batch.slab, 0
        if slab is not None and any(type(outcome) is tuple for outcome in outcomes):
            segment = slab.segment.number
            self._slabs.hand_out(slab)
            if slab.size > LARGE_BYTES:  # of one large sample: not kept for others
                self._slabs.retire(segment)
        else:
            batch.release_slab()
        if not outcomes:
            return None
        return ChunkDelivery(segment, outcomes, counts, after, late, batch.delivery)

    def _each(self, batch: OpenBatch) -> tuple[list[tuple[int, ...] | RaisedError], list[int], list[ResumePoint]]:
        """Return the results of batches that are not empty, their samples, and the resume point after each."""
        outcomes, counts = list[tuple[int, ...] | RaisedError](), list[int]()
        after, size = list[ResumePoint](), batch.size
        for index, place in enumerate(batch.places):
            number, start = batch.number + index, batch.position + index * size
            slots = range(index * size, (index + 1) * size)
            errors = {slot - slots.start: batch.errors[slot] for slot in slots if slot in batch.errors}
            raised = self._ruled(start, size, errors)
            self._position_map.cover(number, start, start + size, self._boundaries)
            if place or raised is not None:
                outcomes.append(place if raised is None else raised)
                counts.append(size if raised is not None else size - len(errors))
                after.append(self._position_map.after(self._boundaries, self._skipped))
        return outcomes, counts, after

    def _end_if_done(self) -> None:
        if self._count is not None and not self._batches and not self._pile and not self._empty:
            self._finished()

    def _leave_out(self, batch: OpenBatch) -> None:
        self._drop_batch(self._batches.pop(batch.number))
        self._end_if_done()

    def _drop_batch(self, batch: OpenBatch) -> None:
        batch.release_parts()
        batch.release_slab()

    def _on_credit(self) -> None:
        self._admit()
        self._deliver()

    def _admit(self) -> None:
        self._admitted = max(self._admitted, self._sender.granted + self._without_message)
        self._begin_empty()
        self._begin_admitted()


_AHEAD = 64  # samples of an outlet that are made before they are requested


class Outlet:
    """Samples of an epoch in order, for a consumer on the engine's loop.

    It takes the place of an `Assembly`, and of the channel's `Sender`.
    """

    depth = 1  # as of `Sender`

    def __init__(self, position_map: PositionMap, budget: Budget) -> None:
        self._position_map, self._budget = position_map, budget
        self._pile = Pile()
        self._taken = self._covered = 0  # samples
        self._stretches = GivenBoundaries()  # samples that were covered together
        self._count: int | None = None  # samples of the epoch, once all were added
        self._failure: PackedError | None = None
        self._is_closed = False
        self._waiting: asyncio.Future[None] | None = None
        self._moved: Callable[[], None] = lambda: None
        self._finished: Callable[[], None] = lambda: None

    def attach(self, *arguments: Any) -> Outlet:
        """Connect the outlet with its epoch. The arguments are those of `Assembly`."""
        *_, self._moved, self._finished = arguments
        return self

    # Called by the consumer.

    async def take(self) -> Part | None:
        """Return the next samples. None: the epoch is over.

        Raises:
            ChannelFailedError: the epoch has failed.
        """
        while not (self._pile and self._pile.start == self._taken):
            if self._failure is not None:
                failure, self._failure = self._failure, None
                raise ChannelFailedError(failure)
            if self._is_closed or self._taken == self._count:
                return None
            self._waiting = asyncio.get_running_loop().create_future()
            self._budget.changed()  # requests for samples that are waited for are urgent
            try:
                await self._waiting
            finally:
                self._waiting = None
        _, part = self._pile.take(self._pile.size)
        self._taken += part.count
        self._moved()
        self._budget.changed()
        self._end_if_done()
        return part

    def after(self, count: int, begin: ResumePoint) -> ResumePoint:
        """Return the resume point after the first `count` samples. Counts never decrease."""
        if count > self._covered:
            number = self._stretches.add(count - self._covered)
            self._position_map.cover(number, self._covered, count, self._stretches)
            self._covered = count
        point = self._position_map.after(self._stretches, begin.skipped)
        return replace(point, batches=begin.batches + count, samples=begin.samples + count)

    # Called by the epoch, as methods of `Assembly`.

    @property
    def granted(self) -> int:
        return self._taken + _AHEAD

    @property
    def has_waiting(self) -> bool:
        return bool(self._pile)

    def run_in(self, group: TaskGroup) -> None: ...

    def begin(self, number: int) -> None: ...

    def add(self, position: int, part: Part) -> None:
        self._pile.add(position, part)
        self._wake()

    def end(self, count: int) -> None:
        self._count = count
        self._wake()
        self._end_if_done()

    def lacks(self, position: int | None) -> bool:
        return self._waiting is not None and (position is None or position <= self._taken)

    def drop(self) -> None:
        self._pile.drop()

    # Called by the epoch, as methods of `Sender`.

    def fail(self, failure: PackedError) -> None:
        if not self._is_closed:
            self._failure = failure
            self.close()

    def close(self) -> None:
        self._is_closed = True
        self._wake()

    def take_back(self) -> Sequence[Any]:
        return ()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _end_if_done(self) -> None:
        if self._taken == self._count:
            self._finished()
