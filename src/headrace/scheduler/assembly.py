"""Batches in the making: samples are added at their slots, workers fill or collate, what is ready goes out in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import Any

from anyio.abc import TaskGroup

from headrace.memory import Lease
from headrace.scheduler.budget import Budget
from headrace.scheduler.cuts import Cuts
from headrace.scheduler.dispatch import Dispatch
from headrace.scheduler.recipe import Recipe, Slabs
from headrace.scheduler.skips import Skips
from headrace.scheduler.track import Track
from headrace.scheduler.turns import Turns
from headrace.tasks import Delivery, Finish, Part, Reply, Task, nobodys, owned
from headrace.types import EpochMeters, Sender


class BatchState(Enum):
    """open → filling → collating → ready → delivered; its lease ends with the trainer's last view of it."""

    OPEN = "open"
    FILLING = "filling"
    COLLATING = "collating"
    READY = "ready"
    DELIVERED = "delivered"


class Batch:
    """One batch, from its first sample to its delivery."""

    def __init__(self, number: int, position: int, size: int, capacity: int) -> None:
        self.number = number
        self.position = position  # of its first sample
        self.expected = size  # samples; less once the end of the epoch is known to be in it
        self.capacity = capacity  # slots, if it has any
        self.state = BatchState.OPEN
        self.admitted = asyncio.Event()
        self.parts: dict[int, Part] = {}  # by slot; held until the batch is made, to make it again if need be
        self.made: dict[int, Part] = {}  # by slot; what became of the parts, where that is collated by another
        self.seen = 0
        self.written = 0
        self.under_way = 0
        self.use_slots = True
        self.is_spread = False  # its samples are made, or being made, by all workers, to be collated by one
        self.is_left_out = False  # as a last one that is short: only errors in it are told
        self.slab: Lease | None = None
        self.slab_lock = asyncio.Lock()
        self.columns: dict[int, list[list[Any]]] = {}
        self.holes: list[int] = []  # slots that hold no sample: those of a task that has errors are its last ones
        self.errors: dict[int, bytes] = {}
        self.delivery: Delivery | None = None  # of the samples that have not failed; None: there are none


class Assembly:
    """The batches of one epoch.

    Args:
        recipe: how samples become batches.
        cuts: which samples make which batch.
        key: from which, with their positions, the samples' random numbers are made.
        dispatch: has tasks worked on.
        slabs, budget: places for batches, and who is told when one was delivered.
        sender: where batches go; its credits say how many may be begun.
        meters: where batches are counted.
        finished: called when the last batch of the epoch was delivered.
        track: where in the epoch samples are, and what a state says after a batch.
        skips: says which failed samples are left out; None: none is.
    """

    def __init__(
        self,
        recipe: Recipe,
        cuts: Cuts,
        key: int,
        dispatch: Dispatch,
        slabs: Slabs,
        budget: Budget,
        sender: Sender,
        meters: EpochMeters,
        finished: Callable[[], None],
        track: Track,
        skips: Skips | None = None,
    ) -> None:
        self._recipe, self._cuts, self._key, self._dispatch = recipe, cuts, key, dispatch
        self._slabs, self._budget, self._sender, self._meters = slabs, budget, sender, meters
        self._finished, self._track, self._skips = finished, track, skips
        self._batches: dict[int, Batch] = {}
        self._next_delivery = 0
        self._not_sent = 0  # batches that were due, and of which no sample was left
        self._is_cut = False  # every sample of the epoch has been added
        self._turns = Turns(recipe.collations)
        self.group: TaskGroup | None = None
        sender.on_credit(self._on_credit)

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
        batch = self._batch(number)
        if not batch.expected:
            batch.state, batch.use_slots = BatchState.FILLING, False
            self._collate_if_due(batch)

    def add(self, position: int, part: Part) -> None:
        """Samples at the positions from `position` on, counted where batches are cut; takes their leases over."""
        done = 0
        while done < part.count:
            number, slot = self._cuts.find(position + done)
            count = min(part.count - done, self._cuts.size(number) - slot)
            self._add(self._batch(number), slot, part.cut(done, done + count))
            done += count
        part.release()

    def end(self, count: int) -> None:
        """All `count` samples of the epoch have been added: the last batch may be short."""
        self._is_cut = True
        number, rest = self._cuts.find(count)
        last = self._batches.get(number)
        if rest and last is not None and last.expected != rest:
            last.expected = rest
            last.is_left_out = self._recipe.drop_last
            self._collate_if_due(last)
        self._end_if_done()

    def lacks(self, position: int | None) -> bool:
        """Whether the oldest batch may be made and lacks samples; with a position: whether this one is among them."""
        oldest = self._next_delivery
        if oldest >= self.granted:
            return False
        if position is not None:
            return position < self._cuts.start(oldest + 1)
        batch = self._batches.get(oldest if self._recipe.in_order else min(self._batches, default=oldest))
        return batch is None or batch.seen < batch.expected

    def drop(self) -> None:
        """Let go of every batch that was not delivered."""
        for batch in self._batches.values():
            self._drop_batch(batch)

    def _batch(self, number: int) -> Batch:
        if number not in self._batches:
            size = self._cuts.size(number)
            capacity = max(size, self._recipe.spec_capacity)  # one size of slab for all batches, as far as can be
            batch = self._batches[number] = Batch(number, self._cuts.start(number), size, capacity)
            batch.use_slots = self._recipe.use_slots
            if number < self.granted:
                batch.admitted.set()
        return self._batches[number]

    def _add(self, batch: Batch, slot: int, part: Part) -> None:
        batch.parts[slot] = part
        batch.seen += part.count
        batch.state = BatchState.FILLING
        if batch.use_slots:
            self._hand_out(batch, slot, part, self._fill)
        self._collate_if_due(batch)

    def _hand_out(
        self, batch: Batch, slot: int, part: Part, work: Callable[[Batch, int, Part], Coroutine[Any, Any, None]]
    ) -> None:
        """Have a part of a batch worked on in pieces, by all workers."""
        assert self.group is not None
        chunk = self._recipe.chunk(self._cuts.size(batch.number))
        if self._recipe.spec is None:  # the first samples are made by all workers at once
            chunk = min(chunk, -(-part.count // self._recipe.workers))
        for a in range(0, part.count, chunk):
            batch.under_way += 1
            self.group.start_soon(work, batch, slot + a, part.cut(a, min(a + chunk, part.count)))

    async def _fill(self, batch: Batch, slot: int, part: Part) -> None:
        """Have workers write a part of a batch into its slots."""
        recipe = self._recipe
        count = part.count
        task = Task(recipe.chain, self._key, batch.number, Finish.SLOTS, [part])
        self._track.place(task, batch.position + slot, count)
        task.slot, task.capacity = slot, batch.capacity
        try:
            await batch.admitted.wait()
            batch.use_slots = batch.use_slots and (recipe.use_slots or batch.slab is not None)
            if batch.use_slots and recipe.spec is not None and batch.capacity <= recipe.spec_capacity:
                task.place = (await self._slab(batch)).retain()
        except BaseException:
            part.release()
            raise
        if batch.use_slots:
            reply = await self._dispatch.work(task, partial(self._find_slots, batch))
        else:  # it was found out meanwhile
            part.release()
            reply = Reply("mismatch")
        batch.under_way -= 1
        if reply.kind == "mismatch":
            batch.use_slots = False
            if recipe.is_spread:
                recipe.use_slots = False  # what is not in slots is made a second time: once is enough
        else:
            self._add_errors(batch, reply)
            whole = 0 if reply.kind == "failed" else count - len(reply.errors)
            if whole:
                batch.columns[slot] = reply.columns
            batch.holes += range(slot + whole, slot + count)
            batch.written += count
            recipe.learn_time(reply.made_s, count)
        self._collate_if_due(batch)

    async def _find_slots(self, batch: Batch, reply: Reply) -> Lease | None:
        """A place for samples whose form a worker has just told; None where slots cannot be made for them."""
        recipe = self._recipe
        if reply.spec is None:
            recipe.use_slots = False
            return None
        if recipe.spec is None:
            recipe.spec, recipe.spec_size, recipe.spec_capacity = reply.spec, reply.size, batch.capacity
            self._dispatch.learn_spec(recipe.chain, reply.spec)
        elif batch.capacity > recipe.spec_capacity:
            if reply.spec != recipe.spec:
                return None  # the size that the worker tells is that of another form
            recipe.spec_size, recipe.spec_capacity = max(reply.size, recipe.spec_size), batch.capacity
        return (await self._slab(batch)).retain()

    async def _slab(self, batch: Batch, size: int | None = None) -> Lease:
        """The batch's place; by default the one that its slots are in, which stays once some of them are written."""
        async with batch.slab_lock:
            if batch.slab is None or (size is not None and batch.slab.size < size):
                old, batch.slab = batch.slab, None
                if old is not None:
                    old.release()
                is_urgent = lambda: batch.number <= self._next_delivery
                wanted = self._recipe.spec_size if size is None else size
                batch.slab = await self._slabs.acquire(wanted, batch.number, is_urgent)
        return batch.slab

    def _collate_if_due(self, batch: Batch) -> None:
        """The next step of a batch of which something has changed."""
        if batch.under_way or batch.seen < batch.expected or batch.state is not BatchState.FILLING:
            return
        if batch.use_slots and batch.is_left_out and not batch.errors:
            self._leave_out(batch)
        elif batch.use_slots:
            self._finish(batch, self._slots_delivery(batch))
        elif self._recipe.is_spread and not batch.is_spread and not self._recipe.is_quick(batch.expected):
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

    async def _make(self, batch: Batch, slot: int, part: Part) -> None:
        """Have workers make a part of a batch, to be collated afterwards."""
        task = Task(self._recipe.chain, self._key, batch.number, Finish.SAMPLES, [part])
        self._track.place(task, batch.position + slot, part.count)
        task.slot = slot
        try:
            await batch.admitted.wait()
        except BaseException:
            part.release()
            raise
        reply, made = await self._dispatch.samples(task, lambda: batch.number <= self._next_delivery)
        batch.under_way -= 1
        self._add_errors(batch, reply)
        if made is not None:
            batch.made[slot] = made
            self._recipe.learn_time(reply.made_s, made.count)
        self._collate_if_due(batch)

    async def _collate(self, batch: Batch) -> None:
        """Have one worker make the whole batch, of samples or of what became of them."""
        recipe = self._recipe
        await batch.admitted.wait()
        if batch.slab is None and recipe.batch_bytes and not batch.is_left_out:
            await self._slab(batch, recipe.batch_bytes)
        end_turn = await self._turns.take(batch.number)
        parts = [part for _, part in sorted((batch.made or batch.parts).items(), key=lambda item: item[0])]
        if batch.is_spread:
            self._release(batch.parts)
        batch.parts, batch.made = {}, {}
        batch.errors.clear()  # of the attempt to write them into slots: they are made anew
        finish = Finish.CHECK if batch.is_left_out else Finish.COLLATE if batch.is_spread else Finish.BATCH
        task = Task(recipe.chain, self._key, batch.number, finish, parts)
        self._track.place(task, batch.position, batch.expected)
        if batch.slab is not None:
            task.place = batch.slab.retain()

        async def find_slab(reply: Reply) -> Lease:
            end_turn()  # it is collated: what it waits for now may depend on who waits for a turn
            recipe.batch_bytes = max(recipe.batch_bytes, reply.size)
            return (await self._slab(batch, reply.size)).retain()

        try:
            reply = await self._dispatch.work(task, find_slab)
        finally:
            end_turn()
        if finish is Finish.BATCH:
            recipe.learn_time(reply.made_s, batch.expected)
        self._add_errors(batch, reply)
        if batch.is_left_out and not batch.errors:
            self._leave_out(batch)
        elif not reply.lengths:
            self._finish(batch, None)
        else:
            assert batch.slab is not None
            place, count = batch.slab.segment.number, batch.expected - len(batch.errors)
            self._finish(batch, Delivery(batch.number, count, batch.position, "packed", place, lengths=reply.lengths))

    def _add_errors(self, batch: Batch, reply: Reply) -> None:
        """A task that failed as a whole is no single sample's failure."""
        is_whole = reply.kind == "failed"
        batch.errors.update((slot, nobodys(blob) if is_whole else blob) for slot, blob in reply.errors)

    def _slots_delivery(self, batch: Batch) -> Delivery | None:
        if batch.is_left_out or not batch.columns or (batch.errors and self._skips is None):
            return None
        assert batch.slab is not None
        assert self._recipe.spec is not None
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
            blob=self._recipe.spec,
        )

    def _error_delivery(self, batch: Batch, blob: bytes, note: str = "") -> Delivery:
        return Delivery(batch.number, batch.expected, batch.position, "error", blob=blob, note=note)

    def _finish(self, batch: Batch, delivery: Delivery | None) -> None:
        """A batch is made of the samples that have not failed; where none are left out, it is its first error."""
        if batch.errors and self._skips is None:
            delivery = self._error_delivery(batch, owned(batch.errors[min(batch.errors)])[0])
        assert delivery is not None or batch.errors  # nothing is left out in silence
        batch.delivery = delivery
        batch.state = BatchState.READY
        self._release(batch.parts, batch.made)
        if delivery is None or delivery.kind == "error":
            self._release_slab(batch)
        self._deliver()

    def _ruled(self, batch: Batch) -> Delivery | None:
        """What is sent of a batch that is due; None: nothing, for none of its samples is left."""
        raised = None
        if self._skips is not None:
            positions = partial(self._track.in_batches, batch.position, batch.position + batch.expected)
            raised = self._skips.rule(positions, batch.expected, batch.errors)
        if raised is None:
            return batch.delivery
        self._release_slab(batch)
        return self._error_delivery(batch, raised.blob, raised.note)

    def _deliver(self) -> None:
        """Send what is ready and due; a batch's slab goes with it."""
        while True:
            if self._recipe.in_order:
                batch = self._batches.get(self._next_delivery)
            else:
                batch = next((b for b in self._batches.values() if b.state is BatchState.READY), None)
            if batch is None or batch.state is not BatchState.READY or self._next_delivery >= self.granted:
                break
            delivery = self._ruled(batch)
            del self._batches[batch.number]
            self._next_delivery += 1
            batch.state = BatchState.DELIVERED
            self._track.cover(batch.number, batch.position, batch.position + batch.expected, self._cuts)
            if delivery is None:
                self._not_sent += 1
                self._admit()
                continue
            if batch.slab is not None:
                self._slabs.hand_out(batch.slab)
            skipped = (0, 0) if self._skips is None else self._skips.counts
            self._sender.send(replace(delivery, after=self._track.after(self._cuts, skipped)))
            self._dispatch.has_begun = True
        self._meters.set_depths(
            ready=sum(b.state is BatchState.READY for b in self._batches.values()), open_batches=len(self._batches)
        )
        self._budget.changed()
        self._slabs.changed()
        self._end_if_done()

    def _end_if_done(self) -> None:
        if self._is_cut and not self._batches:
            self._finished()

    def _leave_out(self, batch: Batch) -> None:
        self._drop_batch(self._batches.pop(batch.number))
        self._end_if_done()

    def _drop_batch(self, batch: Batch) -> None:
        self._release(batch.parts, batch.made)
        self._release_slab(batch)

    def _release_slab(self, batch: Batch) -> None:
        if batch.slab is not None:
            batch.slab.release()
            batch.slab = None

    def _release(self, *parts_by_slot: dict[int, Part]) -> None:
        for parts in parts_by_slot:
            for part in parts.values():
                part.release()
            parts.clear()

    def _on_credit(self) -> None:
        self._admit()
        self._deliver()

    def _admit(self) -> None:
        for number, batch in self._batches.items():
            if number < self.granted:
                batch.admitted.set()
