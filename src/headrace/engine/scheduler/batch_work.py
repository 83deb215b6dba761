"""Tasks for batches: write samples into slots, or make them all and collate them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, nullcontext
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any

from headrace._util.shared_memory import Lease, PublishedPlaces, end_of
from headrace.delivery.channel import Delivery
from headrace.engine.scheduler.dispatch import Dispatch, TaskPool
from headrace.engine.scheduler.epoch_spec import EpochSpec, Resources
from headrace.workers.failures import Failure, PackedError
from headrace.workers.sample_chunks import ListPart, Part
from headrace.workers.tasks import Finish, Reply, Task

if TYPE_CHECKING:
    from headrace.engine.scheduler.assembler import Assembly


class BatchState(Enum):
    """open → filling → collating → ready → delivered."""

    OPEN = "open"
    FILLING = "filling"
    COLLATING = "collating"
    READY = "ready"
    DELIVERED = "delivered"


class OpenBatch:
    """One batch, from its first sample to its delivery; or several whole ones, made by one task."""

    def __init__(self, number: int, position: int, size: int, capacity: int) -> None:
        self.number = number
        self.position = position  # of its first sample
        self.expected = size  # samples; lower once the epoch's end is known to be in the batch
        self.wanted = size  # samples needed: those up to the first known failure
        self.capacity = capacity
        self.count = 1  # batches
        self.early_of_task = 0  # of several batches: those that were split off since their task began
        self.made_count = 0  # and those that were made, all together
        self.state = BatchState.OPEN
        self.parts: dict[int, Part] = {}  # by slot; kept until the batch is made, for a retry
        self.made: dict[int, Part] = {}  # by slot; results for parts that another worker collates
        self.arrived = 0  # samples, including those no longer needed
        self.seen = 0  # needed samples
        self.under_way: set[int] = set()  # the first slots of tasks
        self.use_slots = True
        self.is_spread = False  # all workers make its samples, one collates them
        self.is_left_out = False  # dropped as a short last batch: only its errors are reported
        self.slab: Lease | None = None
        self.made_s = 0.0
        self.nbytes = 0  # of the result
        self.slab_lock = asyncio.Lock()
        self.columns: dict[int, list[list[object]]] = {}
        self.holes: list[int] = []  # empty slots: the last ones of tasks with errors
        self.errors: dict[int, PackedError] = {}
        self.ended_by: PackedError | None = None
        self.delivery: Delivery | None = None  # of the samples that have not failed; None without such
        self.places: Sequence[tuple[int, ...]] = ()  # of each of several batches: see `ChunkDelivery.outcomes`

    @property
    def size(self) -> int:
        """Number of samples per batch."""
        return self.expected // self.count

    @property
    def is_over(self) -> bool:
        """True if the result of the batch is settled."""
        return self.state in (BatchState.READY, BatchState.DELIVERED)

    @property
    def is_whole(self) -> bool:
        """True if all needed samples have arrived, and no worker has any of them."""
        if self.seen < self.wanted:
            return False
        if self.wanted == self.expected:
            return not self.under_way
        return all(slot >= self.wanted for slot in self.under_way)

    def take_in(self, slot: int, part: Part) -> Part | None:
        """Store samples that arrived at `slot`. Returns the needed ones, which the batch holds."""
        self.arrived += part.count
        count = min(part.count, self.wanted - slot)
        if count <= 0:
            part.release()
            return None
        if count < part.count:
            part = _shortened(part, count)
        self.parts[slot] = part
        self.seen += count
        return part

    def end_with(self, slot: int, error: PackedError | None = None) -> None:
        """End the batch at a failed sample. Only an earlier failure would be reported instead.

        `error` is given if the samples may be made again and may not fail then.
        """
        if slot >= self.wanted:
            return
        self.wanted, self.ended_by = slot + 1, error
        for start, part in list(self.parts.items()):
            if start >= self.wanted:
                self.parts.pop(start).release()
            elif start + part.count > self.wanted:
                self.parts[start] = _shortened(part, self.wanted - start)
        self.seen = sum(part.count for part in self.parts.values())

    def shorten(self, size: int) -> bool:
        """Reduce the batch to `size` samples, as the epoch ends in it. False if known before."""
        if self.expected == size:
            return False
        self.expected, self.wanted = size, min(self.wanted, size)
        return True

    def split(self, count: int) -> OpenBatch:
        """Cut off the first `count` of several batches."""
        made = OpenBatch(self.number, self.position, count * self.size, count * self.size)
        made.count, made.state, made.use_slots = count, BatchState.COLLATING, False
        made.arrived = made.seen = made.expected
        self.early_of_task, self.count = self.early_of_task + count, self.count - count
        self.number, self.position = self.number + count, self.position + made.expected
        self.expected -= made.expected
        self.wanted = self.capacity = self.arrived = self.seen = self.expected
        parts, self.parts = self.parts, {}
        for slot, part in parts.items():
            gone = max(0, made.expected - slot)
            if gone < part.count:
                self.parts[slot + gone - made.expected] = part.cut(gone, part.count)
            part.release()
        return made

    def release_parts(self) -> None:
        self.release(self.parts)
        self.release(self.made)

    @staticmethod
    def release(parts: dict[int, Part]) -> None:
        for part in parts.values():
            part.release()
        parts.clear()

    def release_slab(self) -> None:
        if self.slab is not None:
            self.slab.release()
            self.slab = None


def _shortened(part: Part, count: int) -> Part:
    kept = part.cut(0, count)
    part.release()
    return kept


class BatchWork:
    """The tasks of the batches of one epoch."""

    def __init__(self, spec: EpochSpec, resources: Resources, dispatch: Dispatch, host: Assembly) -> None:
        self._spec, self._learned, self._boundaries, self._key = spec.batches, spec.learned, spec.boundaries, spec.key
        self._dispatch, self._slabs, self._host = dispatch, resources.slabs, host
        self._position_map, self._raises = spec.position_map, spec.skips is None
        most = spec.batches.collations
        self._turns = nullcontext() if most is None else asyncio.Semaphore(most)
        self._publishes = spec.batches.publishes and resources.works.shares_memory
        self.pool: TaskPool | None = None

    def is_quick(self, batch: OpenBatch) -> bool:
        return self._spec.is_quick(batch.expected, self._learned.sample_s)

    def fill(self, batch: OpenBatch, slot: int, part: Part) -> None:
        self._hand_out(batch, slot, part, self._fill)

    def make(self, batch: OpenBatch, slot: int, part: Part) -> None:
        """Let all workers make samples, to be collated later."""
        self._hand_out(batch, slot, part, self._make)

    def collate(self, batch: OpenBatch) -> None:
        assert self.pool is not None
        self.pool.start_soon(self._collate, batch)

    def make_several(self, batch: OpenBatch) -> None:
        """Make several batches by one task."""
        assert self.pool is not None
        self.pool.start_soon(self._make_several, batch)

    def store(self, batch: OpenBatch, data: bytes) -> None:
        """Store batches made elsewhere."""
        assert self.pool is not None
        self.pool.start_soon(self._store, batch, data)

    def slots_delivery(self, batch: OpenBatch) -> Delivery | None:
        """Return the message for a batch in slots. None if it is empty or dropped."""
        if batch.is_left_out or not batch.columns:
            return None
        learned = self._learned
        assert batch.slab is not None
        assert learned.form is not None
        batch.nbytes = learned.form_size * batch.expected // learned.form_capacity
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
            blob=learned.form,
        )

    def _hand_out(
        self, batch: OpenBatch, slot: int, part: Part, work: Callable[[OpenBatch, int, Part], Coroutine[Any, Any, None]]
    ) -> None:
        assert self.pool is not None
        chunk = self._spec.chunk(self._boundaries.size(batch.number), self._learned.sample_s)
        if self._learned.form is None:  # the first samples are made by all workers at once
            chunk = min(chunk, -(-part.count // self._spec.workers))
        for a in range(0, part.count, chunk):
            batch.under_way.add(slot + a)
            self.pool.start_soon(work, batch, slot + a, part.cut(a, min(a + chunk, part.count)))

    async def _fill(self, batch: OpenBatch, slot: int, part: Part) -> None:
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
            else:  # slots or samples turned out to be unusable in the meantime
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
                learned.use_slots = False  # samples without slots are made twice: avoid that from now on
        else:
            self._add_errors(batch, reply)
            whole = 0 if reply.kind == "failed" else count - len(reply.errors)
            if whole:
                batch.columns[slot] = reply.columns
            batch.holes += range(slot + whole, slot + count)
            learned.learn_time(reply.made_s, count)
            batch.made_s += reply.took_s
        self._host.worked(batch)

    def _end_task(self, batch: OpenBatch, slot: int) -> None:
        """Mark a part as no longer in work. The last one of a settled batch frees its slab."""
        batch.under_way.discard(slot)
        if batch.is_over and not batch.under_way:
            batch.release_slab()

    async def _find_slots(self, batch: OpenBatch, reply: Reply) -> Lease | None:
        """Return memory for samples whose spec a worker reports. None if slots are impossible."""
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
                return None  # the reported size belongs to another spec
            learned.form_size, learned.form_capacity = max(reply.size, learned.form_size), batch.capacity
        return (await self._slab(batch)).retain()

    async def _slab(self, batch: OpenBatch, size: int | None = None) -> Lease:
        """Return the batch's slab, by default for its slots. A slab with written slots is kept."""
        async with batch.slab_lock:
            if batch.slab is None or (size is not None and batch.slab.size < size):
                old, batch.slab = batch.slab, None
                if old is not None:
                    old.release()
                is_urgent = lambda: self._host.is_oldest(batch)
                wanted = self._learned.form_size if size is None else size
                batch.slab = await self._slabs.acquire(wanted, batch.number, is_urgent)
        return batch.slab

    async def _make(self, batch: OpenBatch, slot: int, part: Part) -> None:
        count = part.count
        task = Task(self._spec.chain, self._key, batch.number, Finish.SAMPLES, [part])
        self._position_map.place(task, batch.position + slot, count)
        task.slot = slot
        try:
            reply, made = await self._dispatch.samples(task, lambda: self._host.is_oldest(batch))
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
        else:
            batch.made[slot] = ListPart([Failure(reply.errors[0][1].widened())] * count)
        self._host.worked(batch)

    async def _collate(self, batch: OpenBatch) -> None:
        spec, learned = self._spec, self._learned
        if batch.slab is None and learned.batch_bytes and not batch.is_left_out:
            await self._slab(batch, learned.batch_bytes)
        turn = AsyncExitStack()
        await turn.enter_async_context(self._turns)
        parts = [part for _, part in sorted((batch.made or batch.parts).items(), key=lambda item: item[0])]
        if batch.is_spread:
            batch.release(batch.parts)
        batch.parts, batch.made = {}, {}
        batch.errors.clear()  # from the attempt to write into slots: the samples are made again
        finish = Finish.CHECK if batch.is_left_out else Finish.COLLATE if batch.is_spread else Finish.BATCH
        task = Task(spec.chain, self._key, batch.number, finish, parts)
        self._position_map.place(task, batch.position, batch.wanted)
        if batch.slab is not None:
            task.place = batch.slab.retain()

        async def find_slab(reply: Reply) -> Lease:
            await turn.aclose()  # it is collated; the wait for memory may depend on batches that wait for a turn
            if spec.wants_place(reply.size, batch.expected):
                learned.batch_bytes = max(learned.batch_bytes, reply.size)
            return (await self._slab(batch, reply.size)).retain()

        try:
            reply = await self._dispatch.work(task, find_slab)
        finally:
            await turn.aclose()
        if finish is Finish.BATCH:
            learned.learn_time(reply.made_s, batch.wanted)
        batch.made_s, batch.nbytes = reply.took_s, sum(reply.lengths)
        self._add_errors(batch, reply)
        delivery = None
        if reply.lengths:
            assert batch.slab is not None
            place, count = batch.slab.segment.number, batch.expected - len(batch.errors)
            delivery = Delivery(batch.number, count, batch.position, "packed", place, lengths=reply.lengths)
        self._host.collated(batch, delivery)

    async def _make_several(self, batch: OpenBatch) -> None:
        learned = self._learned
        if batch.use_slots:
            batch.nbytes = learned.form_size * -(-batch.capacity // learned.form_capacity)  # or a little less
            learned.batch_bytes = max(learned.batch_bytes, batch.nbytes)
        publishes = self._publishes and not batch.use_slots
        room = max(learned.batch_bytes, _ROOM_BYTES if publishes else 0)
        if room:
            await self._slab(batch, room)
        while True:
            reply = await self._make_some(batch, publishes=publishes)
            if not publishes or reply.kind != "written" or reply.batches >= batch.count:
                break
            # The others are the next task, at once: if they waited with later ones, these might wait for them.
            if reply.batches:
                self._host.made_first(batch, reply)
                batch.slab = self._slabs.acquire_now(room)
        self._host.made_several(batch, reply)

    async def _make_some(self, batch: OpenBatch, *, publishes: bool) -> Reply:
        """Let a worker make several batches, or the first of them. The reply is about those that were not split off."""
        spec, learned = self._spec, self._learned
        parts = [part.cut(0, part.count) for part in batch.parts.values()]
        finish = Finish.SLOTS if batch.use_slots else Finish.EACH
        task = Task(spec.chain, self._key, batch.number, finish, parts, each=batch.size, capacity=batch.capacity)
        task.publishes = publishes
        self._position_map.place(task, batch.position, batch.expected)
        if batch.slab is not None:
            task.place = batch.slab.retain()
        watch = _Watch(batch, task, self._deliver_early) if publishes else None
        batch.early_of_task = 0

        async def find_slab(reply: Reply) -> Lease | None:
            if watch is not None:
                watch.end()
            if batch.use_slots:  # the worker does not know the spec yet
                return None
            if spec.wants_place(reply.size, batch.size):
                learned.batch_bytes = max(learned.batch_bytes, reply.size)
            return (await self._slab(batch, reply.size)).retain()

        try:
            reply = await self._dispatch.work(task, find_slab)
        finally:
            if watch is not None:
                watch.end()
        batch.made_s += reply.took_s
        batch.made_count += reply.batches
        batch.nbytes += reply.size
        early = batch.early_of_task
        skipped = early * batch.size
        reply.batches, reply.pieces = max(0, reply.batches - early), reply.pieces[early:]
        reply.errors = [(slot - skipped, error) for slot, error in reply.errors if slot >= skipped]
        return reply

    def _deliver_early(self, batch: OpenBatch, reply: Reply) -> None:
        """Deliver copies of the first of several batches, as the worker writes the others to the same slab."""
        assert batch.slab is not None
        self._host.made_early(batch, reply, bytes(batch.slab.view[: end_of(reply.pieces)]))

    async def _store(self, batch: OpenBatch, data: bytes) -> None:
        slab = await self._slab(batch, len(data))
        slab.view[: len(data)] = data
        self._host.stored(batch)

    def _add_errors(self, batch: OpenBatch, reply: Reply) -> None:
        """Add the errors of a reply. If the task failed as a whole, they count for no single sample."""
        is_whole = reply.kind == "failed"
        batch.errors.update((slot, error.widened() if is_whole else error) for slot, error in reply.errors)
        if reply.errors and self._raises:
            first = min(batch.errors)
            batch.end_with(first, batch.errors[first])


_ROOM_BYTES = 2**17  # at least, for batches that are published
_LOOK_S = 0.05


class _Watch:
    """Looks from time to time for batches that the worker of a task has published, and delivers them early."""

    def __init__(self, batch: OpenBatch, task: Task, deliver: Callable[[OpenBatch, Reply], None]) -> None:
        assert batch.slab is not None
        self._batch, self._task, self._deliver = batch, task, deliver
        self._places, self._seen = PublishedPlaces(batch.slab.view), (0, 0)  # (attempt, batches) at the last look
        self._places.begin(0)
        self._look_later()

    def end(self) -> None:
        self._timer.cancel()

    def _look_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_LOOK_S, self._look)

    def _look(self) -> None:
        batch, attempt = self._batch, self._task.attempts
        count = self._places.count(attempt)
        if self._seen[0] == attempt:  # what came since then may not be visible here as a whole
            early = batch.early_of_task
            ready = min(self._seen[1], early + batch.count - 1)  # the worker's reply delivers the last one
            if ready > early:
                places = self._places.read(ready)[early:]
                self._deliver(batch, Reply("written", batches=len(places), pieces=places))
        self._seen = attempt, count
        self._look_later()
