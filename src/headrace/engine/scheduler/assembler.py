"""Assembly of batches from samples, and their delivery in order."""

from __future__ import annotations

from functools import partial

from anyio.abc import TaskGroup

from headrace.delivery.messages import Delivery
from headrace.engine.scheduler.batch_work import BatchWork
from headrace.engine.scheduler.epoch_context import Outlet
from headrace.engine.scheduler.pending_batch import BatchState, OpenBatch
from headrace.engine.scheduler.reorder_buffer import Pile
from headrace.engine.scheduler.task_pool import TaskPool
from headrace.workers.failures import PackedError
from headrace.workers.sample_chunks import Part


class Assembly:
    """The batches of one epoch."""

    def __init__(self, outlet: Outlet) -> None:
        spec, resources = outlet.spec, outlet.resources
        self._spec, self._learned, self._boundaries = spec.batches, spec.learned, spec.boundaries
        self._dispatch, self._slabs, self._budget = outlet.dispatch, resources.slabs, resources.budget
        self._sender, self._meters = outlet.sender, resources.meters
        self._moved, self._finished = outlet.moved, outlet.finished
        self._position_map, self._skips = spec.position_map, spec.skips
        self._batches: dict[int, OpenBatch] = {}
        self._pile = Pile()  # samples of batches that may not start yet
        self._empty: set[int] = set()  # batches without samples that may not start yet
        self._admitted = 0  # batches with lower numbers may start
        self._missing: dict[int, int] = {}  # samples to come of batches that ended early
        self._next_delivery = 0
        self._not_sent = 0  # batches that were due and had no sample left
        self._count: int | None = None  # samples of the epoch, once all were added
        self._work = BatchWork(spec, resources, outlet.dispatch, self)
        outlet.sender.on_credit(self._on_credit)
        self._admit()

    @property
    def granted(self) -> int:
        """Batches with lower numbers may start.

        The channel grants messages, and an empty batch sends none. Each empty batch therefore grants one more batch, or
        the trainer would wait for a message that is never made. `_next_delivery == sent + _not_sent` always holds, so
        `_next_delivery` is below this number exactly if another message may be sent.
        """
        return self._sender.granted + self._not_sent

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
        for position, part in self._pile.below(self._boundaries.start(self._admitted)):
            done = 0
            while done < part.count:
                number, slot = self._boundaries.find(position + done)
                count = min(part.count - done, self._boundaries.size(number) - slot)
                self._add(number, slot, part.cut(done, done + count))
                done += count
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

    # BatchHost

    def is_oldest(self, batch: OpenBatch) -> bool:
        return batch.number <= self._next_delivery

    def worked(self, batch: OpenBatch) -> None:
        if not batch.is_whole or batch.state is not BatchState.FILLING:
            return
        if batch.use_slots and batch.is_left_out and not batch.errors:
            self._leave_out(batch)
        elif batch.use_slots:
            self._finish(batch, self._work.slots_delivery(batch))
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
        if batch.is_left_out and not batch.errors:
            self._leave_out(batch)
        else:
            self._finish(batch, delivery)

    def _is_to_spread(self, batch: OpenBatch) -> bool:
        """True if all workers should make the samples. A dropped batch is only checked for errors."""
        is_wanted = self._spec.is_spread and not batch.is_left_out
        return is_wanted and not batch.is_spread and not self._work.is_quick(batch)

    def _error_delivery(self, batch: OpenBatch, error: PackedError, note: str = "") -> Delivery:
        return Delivery(batch.number, batch.expected, batch.position, "error", error=error, note=note)

    def _finish(self, batch: OpenBatch, delivery: Delivery | None) -> None:
        """Finish the batch, as its first error if failed samples are not skipped."""
        if self._skips is None:
            if batch.wanted < batch.expected and not batch.errors:  # made again, the sample did not fail
                assert batch.ended_by is not None
                batch.errors[batch.wanted - 1] = batch.ended_by
            if batch.errors:
                delivery = self._error_delivery(batch, batch.errors[min(batch.errors)])
        assert delivery is not None or batch.errors  # nothing is dropped silently
        batch.delivery = delivery
        batch.state = BatchState.READY
        batch.release_parts()
        if (delivery is None or delivery.kind == "error") and not batch.under_way:
            batch.release_slab()
        self._deliver()

    def _ruled(self, batch: OpenBatch) -> Delivery | None:
        """Return the message for a batch that is due. None if none of its samples is left."""
        raised = None
        if self._skips is not None:
            positions = partial(self._position_map.in_batches, batch.position, batch.position + batch.expected)
            left_out = self._position_map.left_out(batch.position, batch.position + batch.expected)
            raised = self._skips.rule(positions, batch.expected, batch.errors, left_out)
        if raised is None:
            return batch.delivery
        batch.release_slab()
        return self._error_delivery(batch, raised.error, raised.note)

    def _deliver(self) -> None:
        while True:
            if self._spec.in_order:
                batch = self._batches.get(self._next_delivery)
            else:
                batch = next((b for b in self._batches.values() if b.state is BatchState.READY), None)
            if batch is None or batch.state is not BatchState.READY or self._next_delivery >= self.granted:
                break
            delivery = self._ruled(batch)
            del self._batches[batch.number]
            if batch.arrived < batch.expected:
                self._missing[batch.number] = batch.expected - batch.arrived
            self._next_delivery += 1
            batch.state = BatchState.DELIVERED
            skipped = (0, 0) if self._skips is None else self._skips.counts
            late = self._position_map.late(self._boundaries, skipped)
            self._position_map.cover(batch.number, batch.position, batch.position + batch.expected, self._boundaries)
            if delivery is None:
                self._not_sent += 1
                self._admit()
                continue
            if batch.slab is not None and delivery.kind != "error":
                self._slabs.hand_out(batch.slab)
            delivery.after, delivery.late = self._position_map.after(self._boundaries, skipped), late
            self._sender.send(delivery)
            self._dispatch.has_begun = True
        states = [batch.state for batch in self._batches.values()]
        self._meters.set_depths(ready=states.count(BatchState.READY), open_batches=len(states))
        self._moved()
        self._budget.changed()
        self._slabs.changed()
        self._end_if_done()

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
        self._admitted = max(self._admitted, self.granted)
        self._begin_empty()
        self._begin_admitted()
