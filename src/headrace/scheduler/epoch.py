"""One epoch on its way: from the samples that a source puts, over the workers, to batches in plan order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Protocol

import anyio
from anyio.abc import TaskGroup

from headrace.errors import LoaderClosedError
from headrace.memory import Arena, Lease
from headrace.scheduler.budget import Budget
from headrace.scheduler.engine import is_exiting
from headrace.tasks import Delivery, Failure, Finish, ListPart, PackedPart, Part, Reply, Source, Task
from headrace.types import EpochMeters, Rows, Sender


class Works(Protocol):
    """The work stage as the scheduler sees it."""

    def learn_spec(self, number: int, spec: bytes) -> None: ...

    async def run(self, task: Task) -> Reply: ...

    async def place(self, task: Task, place: Lease) -> Reply: ...

    def abandon(self, task: Task) -> None: ...


class Slabs(Protocol):
    """Places for whole batches."""

    async def acquire(self, size: int, rank: int, is_urgent: Callable[[], bool]) -> Lease: ...

    def hand_out(self, lease: Lease) -> None: ...

    def returned(self, number: int) -> None: ...

    def changed(self) -> None: ...


@dataclass(frozen=True, slots=True)
class WorkStage:
    """Steps that workers do; the chain with this number."""

    chain: int


@dataclass(frozen=True, slots=True)
class LoopStage:
    """Steps that the event loop does: all samples of a part, with their positions, at once."""

    run: Callable[[Part, Sequence[int]], Awaitable[tuple[Part, Sequence[int]]]]


@dataclass(slots=True)
class Recipe:
    """How a loader's samples become batches; the same for all of its epochs.

    Attributes:
        inner: the stages before the last one.
        chain: the last stage's chain: it collates.
        batch_size: samples in a batch.
        chunk: samples in one task, at most.
        workers: who share a batch's samples.
        drop_last: leave a short last batch out.
        keeps_count: whether each sample put by the source becomes one sample of a batch.
        limit: how many samples an epoch has at most, counted where batches are cut.
        look_ahead: how many samples may lie ready beyond the batches that may be sent.
        in_order: whether batches come in plan order.
        spec: the form of a sample, once a worker has told it.
        use_slots: whether samples are written into slots; False once it has shown that they cannot.
    """

    inner: tuple[WorkStage | LoopStage, ...]
    chain: int
    batch_size: int
    chunk: int
    workers: int
    drop_last: bool
    keeps_count: bool
    limit: int | None
    look_ahead: int
    in_order: bool
    use_slots: bool
    spec: bytes | None = None
    spec_size: int = 0


class BatchState(Enum):
    """open → filling → collating → ready → delivered; its lease ends with the trainer's last view of it."""

    OPEN = "open"
    FILLING = "filling"
    COLLATING = "collating"
    READY = "ready"
    DELIVERED = "delivered"


class _Batch:
    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.expected = size  # samples; less once the end of the epoch is known to be in it
        self.state = BatchState.OPEN
        self.admitted = asyncio.Event()
        self.parts: dict[int, Part] = {}  # by slot; held until the batch is made, to make it again if need be
        self.seen = 0
        self.written = 0
        self.under_way = 0
        self.use_slots = True
        self.is_left_out = False  # as a last one that is short: only errors in it are told
        self.slab: Lease | None = None
        self.slab_lock = asyncio.Lock()
        self.columns: dict[int, list[list[Any]]] = {}
        self.errors: dict[int, bytes] = {}
        self.delivery: Delivery | None = None


class Epoch:
    """One run through a plan, for one iterator.

    Args:
        source: gives the samples.
        recipe: how they become batches.
        key: from which, with their positions, the samples' random numbers are made.
        works, slabs, arena, budget: the loader's workers and memory.
        sender: where batches go; its credits say how many may be begun.
        meters: where waiting and queues are counted.
        wrap: makes a part of Python objects.
        pack_error: an exception as bytes.
    """

    def __init__(
        self,
        source: Source,
        recipe: Recipe,
        key: int,
        works: Works,
        slabs: Slabs,
        arena: Arena,
        budget: Budget,
        sender: Sender,
        meters: EpochMeters,
        wrap: Callable[[list[Any]], Part],
        pack_error: Callable[[BaseException], bytes],
    ) -> None:
        self._source, self._recipe, self._key = source, recipe, key
        self._works, self._slabs, self._arena, self._budget = works, slabs, arena, budget
        self._sender, self._meters = sender, meters
        self._wrap, self._pack_error = wrap, pack_error
        self._batches: dict[int, _Batch] = {}
        self._next_delivery = 0
        self._frontier = 0  # positions below are past the inner stages (where those may change the count)
        self._put = 0  # the positions that the source has put end here
        self._count = 0  # how many samples that were; less where some before the end are missing
        self._cut = 0  # how many of them were cut into batches
        self._is_fed = False  # the source has put its last sample
        self._is_cut = False  # and all of them are in batches
        self._loading: set[Lease] = set()
        self._under_way = 0  # tasks that workers have
        self._inner_done: dict[int, tuple[int, Part]] = {}
        self._inner_under_way = 0
        self._inside = 0  # samples in the inner stages
        self._reserved = 0
        self._is_done = False  # every batch was delivered
        self._finished = anyio.Event()
        self._group: TaskGroup | None = None

    async def run(self) -> None:
        """Deliver every batch, then close the channel; whatever goes wrong goes through the channel too."""
        self._sender.on_credit(self._on_credit)
        try:
            async with anyio.create_task_group() as self._group:
                self._group.start_soon(self._feed)
                await self._finished.wait()
                self._group.cancel_scope.cancel()
        except Exception as error:
            self._sender.fail(self._pack_error(_first(error)))
        finally:
            if not self._is_done and not is_exiting():
                closed = LoaderClosedError("the loader was closed while this epoch was running")
                self._sender.fail(self._pack_error(closed))
            for batch in self._batches.values():
                self._drop_batch(batch)
            for _, part in self._inner_done.values():
                part.release()
            if not is_exiting():
                self._sender.close()
            for delivery in self._sender.take_back():
                self._slabs.returned(delivery.segment)

    def stop(self) -> None:
        """End it early, on the engine's loop."""
        self._finished.set()

    # What the source sees (Flow).

    async def lease(self, size: int, rank: tuple[int, ...]) -> Lease:
        granted: list[Lease] = []

        def grant() -> Lease:
            granted.append(self._arena.lease(size))
            self._loading.add(granted[0])
            self._meters.set_reading(True)
            return granted[0]

        try:
            return await self._budget.admit(
                size, rank, grant, is_urgent=lambda: self._is_urgent(None), is_early=lambda: self._is_early(None)
            )
        except BaseException:
            for lease in granted:
                self.drop(lease)
            raise

    def drop(self, lease: Lease) -> None:
        lease.release()
        self._end_loading(lease)

    async def turn(self, size: int, position: int) -> None:
        def grant() -> None:
            self._reserved += size
            self._meters.set_reading(True)

        await self._budget.admit(
            size + self._reserved,
            (position,),
            grant,
            is_urgent=lambda: self._is_urgent(position),
            is_early=lambda: self._is_early(position),
        )

    def trim(self, lease: Lease, size: int) -> None:
        self._arena.trim(lease, size)

    def part_of(self, samples: list[Any], expected: int) -> Part:
        self._reserved -= expected
        self._meters.set_reading(bool(self._loading or self._reserved))
        return self._wrap(samples)

    def put(self, start: int, part: Part) -> None:
        self._put = max(self._put, start + part.count)
        self._count += part.count
        if self._recipe.keeps_count and not self._recipe.inner:
            self._arrive(start, part)
            return
        assert self._group is not None
        for a in range(0, part.count, self._recipe.chunk):
            b = min(a + self._recipe.chunk, part.count)
            self._inner_under_way += 1
            self._inside += b - a
            self._group.start_soon(self._through_inner, start + a, part.cut(a, b))
        part.release()

    async def scan(self, scanner: Any, lease: Lease, offset: int, last: bool, order: int) -> tuple[Rows, Any]:
        task = Task(0, 0, order, Finish.SCAN, [], place=lease.retain(), scan=(scanner, offset, last))
        try:
            reply = await self._work(task, _no_place)
        finally:
            self._end_loading(lease)
        if reply.kind == "failed":
            return Rows.empty(), Failure(reply.errors[0][1])
        rows, scanner = reply.value
        return rows, scanner

    def _end_loading(self, lease: Lease) -> None:
        self._loading.discard(lease)
        self._meters.set_reading(bool(self._loading or self._reserved))
        self._budget.changed()  # who waits may be urgent now: nothing is on its way any more

    # Between source and batches.

    async def _feed(self) -> None:
        try:
            await self._source.run(self)
        except Exception as error:
            if self._count < self._put:
                raise  # samples before it are missing, and nobody gets them any more
            # What came before is delivered first; the error has the next position.
            self.put(self._put, ListPart([Failure(self._pack_error(_first(error)))]))
        self._is_fed = True
        self._check_end()

    async def _through_inner(self, start: int, part: Part) -> None:
        count = part.count
        positions: Sequence[int] = range(start, start + count)
        for stage in self._recipe.inner:
            if isinstance(stage, LoopStage):
                part, positions = await stage.run(part, positions)
            else:
                part, positions = await self._through_workers(stage.chain, start, part, positions)
        self._inner_under_way -= 1
        self._inside -= count
        self._budget.changed()
        if self._recipe.keeps_count:
            self._arrive(start, part)
            self._check_end()
            return
        self._inner_done[start] = count, part
        while self._frontier in self._inner_done:
            count, part = self._inner_done.pop(self._frontier)
            self._frontier += count
            self._arrive(self._cut, part)
        self._check_end()

    async def _through_workers(
        self, chain: int, start: int, part: Part, positions: Sequence[int]
    ) -> tuple[Part, Sequence[int]]:
        task = Task(chain, self._key, start // self._recipe.batch_size, Finish.SAMPLES, [part], start, positions)
        room: list[Lease] = []

        async def find_room(reply: Reply) -> Lease:
            for lease in room:
                lease.release()
            room[:] = [self._arena.lease(reply.size)]
            return room[0].retain()

        try:
            reply = await self._work(task, find_room)
        except BaseException:
            for lease in room:
                lease.release()
            raise
        if reply.kind == "written":
            kept = [positions[k] for k in reply.kept]
            return PackedPart(room[0], reply.lengths, 0, len(kept)), kept
        for lease in room:
            lease.release()
        return ListPart([Failure(reply.errors[0][1])] * len(positions)), positions

    def _arrive(self, start: int, part: Part) -> None:
        """Samples that count: cut them into batches, and those into tasks."""
        limit = self._recipe.limit
        if limit is not None and start + part.count > limit:
            kept = part.cut(0, max(0, limit - start))
            part.release()
            part = kept
        size, done = self._recipe.batch_size, 0
        while done < part.count:
            number, slot = divmod(start + done, size)
            count = min(part.count - done, size - slot)
            self._add(self._batch(number), slot, part.cut(done, done + count))
            done += count
        self._cut += part.count
        part.release()

    def _batch(self, number: int) -> _Batch:
        if number not in self._batches:
            batch = self._batches[number] = _Batch(number, self._recipe.batch_size)
            batch.use_slots = self._recipe.use_slots
            if number < self._sender.granted:
                batch.admitted.set()
        return self._batches[number]

    def _add(self, batch: _Batch, slot: int, part: Part) -> None:
        assert self._group is not None
        batch.parts[slot] = part
        batch.seen += part.count
        batch.state = BatchState.FILLING
        if batch.use_slots:
            chunk = self._recipe.chunk
            if self._recipe.spec is None:  # the first samples are made by all workers at once
                chunk = min(chunk, -(-part.count // self._recipe.workers))
            for a in range(0, part.count, chunk):
                piece = part.cut(a, min(a + chunk, part.count))
                batch.under_way += 1
                self._group.start_soon(self._fill, batch, slot + a, piece)
        self._collate_if_due(batch)

    # Batches.

    async def _fill(self, batch: _Batch, slot: int, part: Part) -> None:
        """Have workers write a part of a batch into its slots."""
        recipe = self._recipe
        count = part.count
        task = Task(recipe.chain, self._key, batch.number, Finish.SLOTS, [part])
        task.position, task.slot, task.capacity = batch.number * recipe.batch_size + slot, slot, recipe.batch_size
        try:
            await batch.admitted.wait()
            if batch.use_slots and recipe.spec is not None:
                task.place = (await self._slab(batch, recipe.spec_size)).retain()
        except BaseException:
            part.release()
            raise
        if batch.use_slots:
            reply = await self._work(task, partial(self._find_slots, batch))
        else:  # it was found out meanwhile
            part.release()
            reply = Reply("mismatch")
        batch.under_way -= 1
        if reply.kind == "mismatch":
            batch.use_slots = False
        else:
            batch.errors.update(reply.errors)
            batch.columns[slot] = reply.columns
            batch.written += count
        self._collate_if_due(batch)

    async def _find_slots(self, batch: _Batch, reply: Reply) -> Lease | None:
        """A place for samples whose form a worker has just told; None where slots cannot be made for them."""
        recipe = self._recipe
        if reply.spec is None:
            recipe.use_slots = False
            return None
        if recipe.spec is None:
            recipe.spec, recipe.spec_size = reply.spec, reply.size
            self._works.learn_spec(recipe.chain, reply.spec)
        return (await self._slab(batch, recipe.spec_size)).retain()

    async def _work(self, task: Task, find_place: Callable[[Reply], Awaitable[Lease | None]]) -> Reply:
        """Have a task worked on to its end, with a place found for what is made before it has one."""
        self._under_way += 1
        try:
            reply = await self._works.run(task)
            while reply.kind == "held":
                place = await find_place(reply)
                if place is None:
                    self._works.abandon(task)
                    return Reply("mismatch")
                reply = await self._works.place(task, place)
        except BaseException:
            self._works.abandon(task)
            raise
        finally:
            self._under_way -= 1
            if not self._under_way and self._next_delivery:
                self._budget.starved()
            self._budget.changed()
        return reply

    async def _slab(self, batch: _Batch, size: int) -> Lease:
        async with batch.slab_lock:
            if batch.slab is None or batch.slab.size < size:
                old, batch.slab = batch.slab, None
                if old is not None:
                    old.release()
                is_urgent = lambda: batch.number <= self._next_delivery
                batch.slab = await self._slabs.acquire(size, batch.number, is_urgent)
        return batch.slab

    def _collate_if_due(self, batch: _Batch) -> None:
        """The next step of a batch of which something has changed."""
        if batch.under_way or batch.seen < batch.expected or batch.state is not BatchState.FILLING:
            return
        if batch.use_slots and batch.is_left_out and not batch.errors:
            self._leave_out(batch)
        elif batch.use_slots:
            self._finish(batch, self._slots_delivery(batch))
        else:
            assert self._group is not None
            batch.state = BatchState.COLLATING
            self._group.start_soon(self._collate, batch)

    async def _collate(self, batch: _Batch) -> None:
        """Have one worker make the whole batch."""
        await batch.admitted.wait()
        recipe = self._recipe
        parts = [part for _, part in sorted(batch.parts.items(), key=lambda item: item[0])]
        batch.parts = {}
        position = batch.number * recipe.batch_size
        finish = Finish.CHECK if batch.is_left_out else Finish.BATCH
        task = Task(recipe.chain, self._key, batch.number, finish, parts, position)
        if batch.slab is not None:
            task.place = batch.slab.retain()

        async def find_slab(reply: Reply) -> Lease:
            return (await self._slab(batch, reply.size)).retain()

        reply = await self._work(task, find_slab)
        if reply.errors:
            batch.errors.update(reply.errors)
            self._finish(batch, self._error_delivery(batch))
            return
        if batch.is_left_out:
            self._leave_out(batch)
            return
        assert batch.slab is not None
        self._finish(
            batch,
            Delivery(
                batch.number, batch.expected, position, "packed", batch.slab.segment.number, lengths=reply.lengths
            ),
        )

    def _slots_delivery(self, batch: _Batch) -> Delivery:
        if batch.errors:
            return self._error_delivery(batch)
        assert batch.slab is not None
        assert self._recipe.spec is not None
        chunks = [columns for _, columns in sorted(batch.columns.items(), key=lambda item: item[0])]
        columns = tuple([value for chunk in column for value in chunk] for column in zip(*chunks, strict=True))
        size = self._recipe.batch_size
        return Delivery(
            batch.number,
            batch.expected,
            batch.number * size,
            "slots",
            batch.slab.segment.number,
            columns=columns,
            capacity=size,
            blob=self._recipe.spec,
        )

    def _error_delivery(self, batch: _Batch) -> Delivery:
        first = min(batch.errors)
        position = batch.number * self._recipe.batch_size
        return Delivery(batch.number, batch.expected, position, "error", blob=batch.errors[first])

    def _finish(self, batch: _Batch, delivery: Delivery) -> None:
        batch.delivery = delivery
        batch.state = BatchState.READY
        for part in batch.parts.values():
            part.release()
        batch.parts = {}
        if delivery.kind == "error" and batch.slab is not None:
            batch.slab.release()
            batch.slab = None
        self._deliver()

    def _deliver(self) -> None:
        """Send what is ready and due; a batch's slab goes with it."""
        while True:
            if self._recipe.in_order:
                batch = self._batches.get(self._next_delivery)
            else:
                batch = next((b for b in self._batches.values() if b.state is BatchState.READY), None)
            if batch is None or batch.state is not BatchState.READY or self._next_delivery >= self._sender.granted:
                break
            assert batch.delivery is not None
            del self._batches[batch.number]
            self._next_delivery += 1
            batch.state = BatchState.DELIVERED
            if batch.slab is not None:
                self._slabs.hand_out(batch.slab)
            self._sender.send(batch.delivery)
            self._meters.count_batch(batch.expected)
        self._meters.set_depths(
            ready=sum(b.state is BatchState.READY for b in self._batches.values()), open_batches=len(self._batches)
        )
        self._budget.changed()
        self._slabs.changed()
        self._end_if_done()

    def _check_end(self) -> None:
        """Whether every sample of the epoch has been cut into batches: then the last batch may be short."""
        is_full = self._recipe.limit is not None and self._cut >= self._recipe.limit
        if not is_full and (not self._is_fed or self._inner_under_way):
            return
        self._is_cut = True
        number, rest = divmod(self._cut, self._recipe.batch_size)
        last = self._batches.get(number)
        if rest and last is not None and last.expected != rest:
            last.expected = rest
            last.is_left_out = self._recipe.drop_last
            self._collate_if_due(last)
        self._end_if_done()

    def _end_if_done(self) -> None:
        if self._is_cut and not self._batches:
            self._is_done = True
            self._finished.set()

    def _leave_out(self, batch: _Batch) -> None:
        self._drop_batch(self._batches.pop(batch.number))
        self._end_if_done()

    def _drop_batch(self, batch: _Batch) -> None:
        for part in batch.parts.values():
            part.release()
        batch.parts = {}
        if batch.slab is not None:
            batch.slab.release()
            batch.slab = None

    # Credits and admission.

    def _on_credit(self) -> None:
        for number, batch in self._batches.items():
            if number < self._sender.granted:
                batch.admitted.set()
        self._deliver()

    def _is_urgent(self, position: int | None) -> bool:
        """Whether nothing would move without the bytes that are asked for: the oldest batch waits for just them."""
        oldest = self._next_delivery
        if oldest >= self._sender.granted:
            return False
        if position is not None and self._recipe.keeps_count:
            return position < (oldest + 1) * self._recipe.batch_size
        if self._loading or self._inner_under_way or self._reserved:
            return False
        batch = self._batches.get(oldest)
        return batch is None or batch.seen < batch.expected

    def _is_early(self, position: int | None) -> bool:
        """Whether enough is there already; or nobody has asked yet, where nothing is made before it is asked for."""
        recipe = self._recipe
        if self._sender.depth:
            ahead = self._cut + self._inside - self._sender.granted * recipe.batch_size
            return position is not None and ahead >= recipe.look_ahead
        return position is None or position >= self._sender.granted * recipe.batch_size


def _first(error: Exception) -> Exception:
    """The trainer sees one exception, never a group."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


async def _no_place(_: Reply) -> Lease | None:
    return None
