"""Batches in the making: samples are added at their slots, workers fill or collate, what is ready goes out in order."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

from anyio.abc import TaskGroup

from headrace.delivery import Delivery
from headrace.failures import PackedError
from headrace.memory import Lease
from headrace.parts import Part
from headrace.protocols import Sender
from headrace.scheduler.batch import BatchState, OpenBatch
from headrace.scheduler.dispatch import Dispatch
from headrace.scheduler.pile import Pile
from headrace.scheduler.semaphore import PrioritySemaphore
from headrace.scheduler.wiring import EpochSpec, Resources
from headrace.tasks import Finish, Reply, Task


class Assembly:
    """The batches of one epoch.

    Args:
        spec: the epoch.
        resources: what it runs on.
        dispatch: has tasks worked on.
        sender: where batches go; its credits say how many may be begun.
        moved: called when the oldest batch is another one.
        finished: called when the last batch of the epoch was delivered.
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
        self._spec, self._learned, self._boundaries, self._key = spec.batches, spec.learned, spec.boundaries, spec.key
        self._dispatch, self._slabs, self._budget = dispatch, resources.slabs, resources.budget
        self._sender, self._meters = sender, resources.meters
        self._moved, self._finished, self._position_map, self._skips = moved, finished, spec.position_map, spec.skips
        self._batches: dict[int, OpenBatch] = {}
        self._pile = Pile()  # samples of batches that may not be begun yet
        self._empty: set[int] = set()  # such batches that have none
        self._admitted = 0  # the batches with lower numbers may be begun
        self._missing: dict[int, int] = {}  # samples that are still to come of batches that have ended without them
        self._next_delivery = 0
        self._not_sent = 0  # batches that were due, and of which no sample was left
        self._count: int | None = None  # samples of the epoch, once all of them have been added
        self._turns = PrioritySemaphore(spec.batches.collations)
        self.group: TaskGroup | None = None
        sender.on_credit(self._on_credit)
        self._admit()

    @property
    def granted(self) -> int:
        """The batches with lower numbers may be begun.

        The channel grants messages, and a batch that is left out is none: for each of them one more batch may be begun,
        and be due, or the trainer would wait for a message that nothing is made for. At any time
        `_next_delivery == sent + _not_sent`, so that it is below this exactly if another message may be sent.
        """
        return self._sender.granted + self._not_sent

    def begin(self, number: int) -> None:
        """The source has told of a batch; it may be an empty one."""
        if not self._boundaries.size(number):
            self._empty.add(number)
            self._admit()

    def add(self, position: int, part: Part) -> None:
        """Samples at the positions from `position` on, counted where batches are cut; takes their leases over."""
        self._pile.add(position, part)
        self._admit()

    def end(self, count: int) -> None:
        """All `count` samples of the epoch have been added: the last batch may be short."""
        self._count = count
        number, rest = self._boundaries.find(count)
        last = self._batches.get(number)
        if last is not None and self._shorten(last, rest):
            self._collate_if_due(last)
        self._end_if_done()

    def lacks(self, position: int | None) -> bool:
        """Whether the oldest batch may be made and lacks samples; with a position: whether this one is among them."""
        oldest = self._next_delivery
        if oldest >= self._admitted:
            return False
        if position is not None:
            return position < self._boundaries.start(oldest + 1)
        batch = self._batches.get(oldest if self._spec.in_order else min(self._batches, default=oldest))
        return batch is None or batch.seen < batch.wanted

    def drop(self) -> None:
        """Let go of every batch that was not delivered."""
        self._pile.drop()
        for batch in self._batches.values():
            self._drop_batch(batch)

    def _begin_admitted(self) -> None:
        """Begin the batches that may be, as far as their samples are there."""
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
            self._collate_if_due(batch)

    def _batch(self, number: int) -> OpenBatch:
        if number not in self._batches:
            size = self._boundaries.size(number)
            capacity = max(size, self._learned.form_capacity)  # one size of slab for all batches, as far as can be
            batch = self._batches[number] = OpenBatch(number, self._boundaries.start(number), size, capacity)
            batch.use_slots = self._learned.use_slots
            if self._count is not None:
                self._shorten(batch, self._count - batch.position)
        return self._batches[number]

    def _shorten(self, batch: OpenBatch, rest: int) -> bool:
        """The epoch ends so many samples behind a batch's begin; whether it is a short one, which was not known."""
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
            self._hand_out(batch, slot, wanted, self._fill)
        self._collate_if_due(batch)

    def _let_go(self, number: int, part: Part) -> None:
        """Samples of a batch that has ended without them."""
        self._missing[number] -= part.count
        if self._missing[number] <= 0:
            del self._missing[number]
        part.release()

    def _hand_out(
        self, batch: OpenBatch, slot: int, part: Part, work: Callable[[OpenBatch, int, Part], Coroutine[Any, Any, None]]
    ) -> None:
        """Have a part of a batch worked on in pieces, by all workers."""
        assert self.group is not None
        chunk = self._spec.chunk(self._boundaries.size(batch.number), self._learned.sample_s)
        if self._learned.form is None:  # the first samples are made by all workers at once
            chunk = min(chunk, -(-part.count // self._spec.workers))
        for a in range(0, part.count, chunk):
            batch.under_way.add(slot + a)
            self.group.start_soon(work, batch, slot + a, part.cut(a, min(a + chunk, part.count)))

    def _is_quick(self, batch: OpenBatch) -> bool:
        return self._spec.is_quick(batch.expected, self._learned.sample_s)

    async def _fill(self, batch: OpenBatch, slot: int, part: Part) -> None:
        """Have workers write a part of a batch into its slots."""
        spec, learned = self._spec, self._learned
        count = part.count
        task = Task(spec.chain, self._key, batch.number, Finish.SLOTS, [part])
        self._position_map.place(task, batch.position + slot, count)
        task.slot, task.capacity = slot, batch.capacity
        reply = Reply("mismatch")
        try:
            try:
                batch.use_slots = batch.use_slots and (learned.use_slots or batch.slab is not None)
                is_known = learned.form is not None and batch.capacity <= learned.form_capacity
                if batch.use_slots and is_known and spec.wants_place(learned.form_size, batch.capacity):
                    task.place = (await self._slab(batch)).retain()
                is_of_use = batch.use_slots and slot < batch.wanted and not batch.is_over
            except BaseException:
                part.release()
                raise
            if is_of_use:
                reply = await self._dispatch.work(task, partial(self._find_slots, batch))
            else:  # it was found out meanwhile
                part.release()
                if task.place is not None:
                    task.place.release()
        finally:
            self._end_task(batch, slot)
        if batch.is_over:
            return
        if reply.kind == "mismatch":
            batch.use_slots = batch.use_slots and slot >= batch.wanted
            if spec.is_spread and not batch.use_slots:
                learned.use_slots = False  # what is not in slots is made a second time: once is enough
        else:
            self._add_errors(batch, reply)
            whole = 0 if reply.kind == "failed" else count - len(reply.errors)
            if whole:
                batch.columns[slot] = reply.columns
            batch.holes += range(slot + whole, slot + count)
            learned.learn_time(reply.made_s, count)
        self._collate_if_due(batch)

    def _end_task(self, batch: OpenBatch, slot: int) -> None:
        """A worker has a part of a batch no more; of one that is settled it was the last that used its slab."""
        batch.under_way.discard(slot)
        if batch.is_over and not batch.under_way:
            batch.release_slab()

    async def _find_slots(self, batch: OpenBatch, reply: Reply) -> Lease | None:
        """A place for samples whose form a worker has just told; None where slots cannot be made for them."""
        spec, learned = self._spec, self._learned
        if batch.is_over:
            return None
        if reply.spec is None:
            learned.use_slots = False
            return None
        if learned.form is None:
            learned.form, learned.form_size, learned.form_capacity = reply.spec, reply.size, batch.capacity
            self._dispatch.learn_spec(spec.chain, reply.spec)
        elif batch.capacity > learned.form_capacity:
            if reply.spec != learned.form:
                return None  # the size that the worker tells is that of another form
            learned.form_size, learned.form_capacity = max(reply.size, learned.form_size), batch.capacity
        return (await self._slab(batch)).retain()

    async def _slab(self, batch: OpenBatch, size: int | None = None) -> Lease:
        """The batch's place; by default the one that its slots are in, which stays once some of them are written."""
        async with batch.slab_lock:
            if batch.slab is None or (size is not None and batch.slab.size < size):
                old, batch.slab = batch.slab, None
                if old is not None:
                    old.release()
                is_urgent = lambda: batch.number <= self._next_delivery
                wanted = self._learned.form_size if size is None else size
                batch.slab = await self._slabs.acquire(wanted, batch.number, is_urgent)
        return batch.slab

    def _collate_if_due(self, batch: OpenBatch) -> None:
        """The next step of a batch of which something has changed."""
        if not batch.is_whole or batch.state is not BatchState.FILLING:
            return
        if batch.use_slots and batch.is_left_out and not batch.errors:
            self._leave_out(batch)
        elif batch.use_slots:
            self._finish(batch, self._slots_delivery(batch))
        elif self._spec.is_spread and not batch.is_spread and not self._is_quick(batch):
            batch.is_spread = True
            batch.errors.clear()
            for slot, part in batch.parts.items():
                self._hand_out(batch, slot, part, self._make)
            self._collate_if_due(batch)
        elif batch.is_spread and batch.errors:
            self._finish(batch, None)
        else:
            assert self.group is not None
            batch.state = BatchState.COLLATING
            self.group.start_soon(self._collate, batch)

    async def _make(self, batch: OpenBatch, slot: int, part: Part) -> None:
        """Have workers make a part of a batch, to be collated afterwards."""
        task = Task(self._spec.chain, self._key, batch.number, Finish.SAMPLES, [part])
        self._position_map.place(task, batch.position + slot, part.count)
        task.slot = slot
        try:
            reply, made = await self._dispatch.samples(task, lambda: batch.number <= self._next_delivery)
        finally:
            self._end_task(batch, slot)
        if batch.is_over:
            if made is not None:
                made.release()
            return
        self._add_errors(batch, reply)
        if made is not None:
            batch.made[slot] = made
            self._learned.learn_time(reply.made_s, made.count)
        self._collate_if_due(batch)

    async def _collate(self, batch: OpenBatch) -> None:
        """Have one worker make the whole batch, of samples or of what became of them."""
        spec, learned = self._spec, self._learned
        if batch.slab is None and learned.batch_bytes and not batch.is_left_out:
            await self._slab(batch, learned.batch_bytes)
        end_turn = await self._turns.take(batch.number)
        parts = [part for _, part in sorted((batch.made or batch.parts).items(), key=lambda item: item[0])]
        if batch.is_spread:
            batch.release(batch.parts)
        batch.parts, batch.made = {}, {}
        batch.errors.clear()  # of the attempt to write them into slots: they are made anew
        finish = Finish.CHECK if batch.is_left_out else Finish.COLLATE if batch.is_spread else Finish.BATCH
        task = Task(spec.chain, self._key, batch.number, finish, parts)
        self._position_map.place(task, batch.position, batch.wanted)
        if batch.slab is not None:
            task.place = batch.slab.retain()

        async def find_slab(reply: Reply) -> Lease:
            end_turn()  # it is collated: what it waits for now may depend on who waits for a turn
            if spec.wants_place(reply.size, batch.expected):
                learned.batch_bytes = max(learned.batch_bytes, reply.size)
            return (await self._slab(batch, reply.size)).retain()

        try:
            reply = await self._dispatch.work(task, find_slab)
        finally:
            end_turn()
        if finish is Finish.BATCH:
            learned.learn_time(reply.made_s, batch.wanted)
        self._add_errors(batch, reply)
        if batch.is_left_out and not batch.errors:
            self._leave_out(batch)
        elif not reply.lengths:
            self._finish(batch, None)
        else:
            assert batch.slab is not None
            place, count = batch.slab.segment.number, batch.expected - len(batch.errors)
            self._finish(batch, Delivery(batch.number, count, batch.position, "packed", place, lengths=reply.lengths))

    def _add_errors(self, batch: OpenBatch, reply: Reply) -> None:
        """A task that failed as a whole is no single sample's failure."""
        is_whole = reply.kind == "failed"
        batch.errors.update((slot, error.widened() if is_whole else error) for slot, error in reply.errors)
        if reply.errors and self._skips is None:
            first = min(batch.errors)
            batch.end_with(first, batch.errors[first])

    def _slots_delivery(self, batch: OpenBatch) -> Delivery | None:
        if batch.is_left_out or not batch.columns or (batch.errors and self._skips is None):
            return None
        assert batch.slab is not None
        assert self._learned.form is not None
        chunks = [columns for _, columns in sorted(batch.columns.items(), key=lambda item: item[0])]
        columns = tuple([value for chunk in column for value in chunk] for column in zip(*chunks, strict=True))
        return Delivery(
            batch.number,
            batch.expected - len(batch.holes),
            batch.position,
            "slots",
            batch.slab.segment.number,
            columns=columns,
            capacity=batch.capacity,
            holes=tuple(sorted(batch.holes)),
            blob=self._learned.form,
        )

    def _error_delivery(self, batch: OpenBatch, error: PackedError, note: str = "") -> Delivery:
        return Delivery(batch.number, batch.expected, batch.position, "error", error=error, note=note)

    def _finish(self, batch: OpenBatch, delivery: Delivery | None) -> None:
        """A batch is made of the samples that have not failed; where none are left out, it is its first error."""
        if self._skips is None:
            if batch.wanted < batch.expected and not batch.errors:  # made anew, it did not fail again
                assert batch.ended_by is not None
                batch.errors[batch.wanted - 1] = batch.ended_by
            if batch.errors:
                delivery = self._error_delivery(batch, batch.errors[min(batch.errors)])
        assert delivery is not None or batch.errors  # nothing is left out in silence
        batch.delivery = delivery
        batch.state = BatchState.READY
        batch.release_parts()
        if (delivery is None or delivery.kind == "error") and not batch.under_way:
            batch.release_slab()
        self._deliver()

    def _ruled(self, batch: OpenBatch) -> Delivery | None:
        """What is sent of a batch that is due; None: nothing, for none of its samples is left."""
        raised = None
        if self._skips is not None:
            positions = partial(self._position_map.in_batches, batch.position, batch.position + batch.expected)
            raised = self._skips.rule(positions, batch.expected, batch.errors)
        if raised is None:
            return batch.delivery
        batch.release_slab()
        return self._error_delivery(batch, raised.error, raised.note)

    def _deliver(self) -> None:
        """Send what is ready and due; a batch's slab goes with it."""
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
            self._sender.send(replace(delivery, after=self._position_map.after(self._boundaries, skipped), late=late))
            self._dispatch.has_begun = True
        self._meters.set_depths(
            ready=sum(b.state is BatchState.READY for b in self._batches.values()), open_batches=len(self._batches)
        )
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
        """Begin as many batches as may be sent."""
        self._admitted = max(self._admitted, self.granted)
        self._begin_empty()
        self._begin_admitted()
