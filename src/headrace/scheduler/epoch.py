"""One epoch on its way: from the samples that a source puts, over the workers, to batches in plan order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import anyio
from anyio.abc import TaskGroup

from headrace.errors import LoaderClosedError, OptionError
from headrace.memory import Arena, Claim, Lease
from headrace.scheduler.assembly import Assembly
from headrace.scheduler.budget import Budget
from headrace.scheduler.cuts import Cuts, ToldCuts
from headrace.scheduler.dispatch import Dispatch
from headrace.scheduler.engine import is_exiting
from headrace.scheduler.recipe import LoopStage, Recipe, Slabs, Works
from headrace.scheduler.skips import Skips
from headrace.scheduler.track import Track
from headrace.tasks import Failure, Finish, ListPart, Part, Source, Task, nobodys
from headrace.types import EpochMeters, Rows, Sender, running_charge

_LEFT_OUT_LEAST = 10_000  # samples before an epoch is given up


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
        copies: how many copies of those objects' bytes there are while it does.
        pack_error: an exception as bytes.
        cuts: where the samples are cut into batches.
        track: where in the epoch they are.
        limit: how many samples are cut into batches at most; None: all.
        skips: says which failed samples are left out; None: none is.
        pass_count: samples of one pass, where the source begins again without end; None: it ends, or tells them itself.
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
        copies: int,
        pack_error: Callable[[BaseException], bytes],
        cuts: Cuts,
        track: Track,
        limit: int | None = None,
        skips: Skips | None = None,
        pass_count: int | None = None,
    ) -> None:
        self._source, self._recipe, self.key = source, recipe, key
        self._slabs, self._arena, self._budget = slabs, arena, budget
        self._sender, self._meters = sender, meters
        self._wrap, self._copies, self._pack_error = wrap, copies, pack_error
        self._dispatch = Dispatch(works, budget, arena)
        self._cuts, self._track, self._limit, self._pass_count = cuts, track, limit, pass_count
        self._assembly = Assembly(
            recipe, cuts, key, self._dispatch, slabs, budget, sender, meters, self._on_last_delivery, track, skips
        )
        self._frontier = 0  # positions below are past the inner stages (where those may change the count)
        self._left_out = 0  # samples right below it of which none is left
        self._put = 0  # the positions that the source has put end here
        self._count = 0  # how many samples that were; less where some before the end are missing
        self._cut = 0  # how many of them were cut into batches
        self._is_fed = False  # the source has put its last sample
        self._loading: set[object] = set()  # what brings bytes without needing more memory: reads, and who unpacks
        self._inner_done: dict[int, tuple[int, Part, Sequence[int]]] = {}
        self._inner_under_way = 0
        self._inside = 0  # samples in the inner stages
        self._turns: dict[Claim, int] = {}  # claims of what the source reads, and the positions they are for
        self._is_done = False  # every batch was delivered
        self._finished = asyncio.Event()
        self._group: TaskGroup | None = None

    async def run(self) -> None:
        """Deliver every batch, then close the channel; whatever goes wrong goes through the channel too."""
        try:
            async with anyio.create_task_group() as self._group:
                self._assembly.group = self._group
                self._group.start_soon(self._feed)
                await self._finished.wait()
                self._group.cancel_scope.cancel()
        except Exception as error:
            self._sender.fail(self._pack_error(_first(error)))
        finally:
            for claim in list(self._turns):
                self._end_turn(claim)
            if not self._is_done and not is_exiting():
                closed = LoaderClosedError("the loader was closed while this epoch was running")
                self._sender.fail(self._pack_error(closed))
            self._assembly.drop()
            for _, part, _ in self._inner_done.values():
                part.release()
            if not is_exiting():
                self._sender.close()
            for delivery in self._sender.take_back():
                self._slabs.returned(delivery.segment)
            self._budget.changed()

    def stop(self) -> None:
        """End it early, on the engine's loop."""
        self._finished.set()

    # What the source sees (Flow).

    @property
    def is_starved(self) -> bool:
        return self._dispatch.under_way < self._recipe.workers

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

    def loaded(self, lease: Lease) -> None:
        self._end_loading(lease)

    def go_on(self, worker: object) -> None:
        self._loading.add(worker)

    def pause(self, worker: object) -> None:
        self._loading.discard(worker)
        # not now: it may be about to wait itself, and would come first
        asyncio.get_running_loop().call_soon(self._budget.changed)

    async def turn(self, size: int, position: int) -> Claim:
        size *= self._copies
        granted: list[Claim] = []

        def grant() -> Claim:
            granted.append(self._budget.claim(size))
            self._turns[granted[0]] = position
            self._meters.set_reading(True)
            return granted[0]

        try:
            return await self._budget.admit(
                size,
                (position,),
                grant,
                is_urgent=lambda: self._is_urgent(position),
                is_early=lambda: self._is_early(position),
                is_input=False,
            )
        except BaseException:
            for claim in granted:
                self._end_turn(claim)
            raise

    async def enlarge(self, claim: Claim, size: int, position: int) -> None:
        size *= self._copies
        await self._budget.admit(
            size,
            (position,),
            lambda: claim.grow(size),
            is_urgent=lambda: self._is_urgent(position),
            is_early=lambda: False,
            is_input=False,
        )

    def trim(self, lease: Lease, size: int) -> None:
        self._arena.trim(lease, size)

    def part_of(self, samples: list[Any], claim: Claim) -> Part:
        try:
            part = self._wrap(samples)
            if isinstance(part, ListPart):
                part.claim = claim.retain()
        finally:
            self._end_turn(claim)
        return part

    def cut(self, count: int) -> None:
        assert isinstance(self._cuts, ToldCuts)
        self._assembly.begin(self._cuts.add(count))

    def put(self, start: int, part: Part) -> None:
        self._put = max(self._put, start + part.count)
        self._count += part.count
        if self._recipe.keeps_count and not self._recipe.inner:
            self._arrive(start, part, range(start, start + part.count))
            return
        assert self._group is not None
        chunk = self._recipe.chunk(self._recipe.batch_size or part.count)
        for a in range(0, part.count, chunk):
            b = min(a + chunk, part.count)
            self._inner_under_way += 1
            self._inside += b - a
            self._group.start_soon(self._through_inner, start + a, part.cut(a, b))
        part.release()

    def come_again(self, count: int) -> None:
        self._pass_count = count

    async def scan(self, scanner: Any, lease: Lease, offset: int, last: bool, order: int) -> tuple[Rows, Any]:
        task = Task(0, 0, order, Finish.SCAN, [], place=lease.retain(), scan=(scanner, offset, last))
        try:
            reply = await self._dispatch.work(task)
        finally:
            self._end_loading(lease)
        if reply.kind == "failed":
            return Rows.empty(), Failure(reply.errors[0][1])
        rows, scanner = reply.value
        return rows, scanner

    def _end_loading(self, lease: Lease) -> None:
        self._loading.discard(lease)
        self._meters.set_reading(bool(self._loading or self._turns))
        self._budget.changed()  # who waits may be urgent now: nothing is on its way any more

    def _end_turn(self, claim: Claim) -> None:
        if self._turns.pop(claim, None) is not None:
            self._meters.set_reading(bool(self._loading or self._turns))
            claim.release()
            self._budget.changed()  # who waits may be the first of those under way now

    # Between source and batches.

    async def _feed(self) -> None:
        try:
            await self._source.run(self)
        except Exception as error:
            if self._count < self._put:
                raise  # samples before it are missing, and nobody gets them any more
            # What came before is delivered first; the error has the next position.
            if isinstance(self._cuts, ToldCuts):
                self.cut(1)
            self.put(self._put, ListPart([Failure(nobodys(self._pack_error(_first(error))))]))
        self._is_fed = True
        self._check_end()

    async def _through_inner(self, start: int, part: Part) -> None:
        running_charge.set(None)  # it was the source's, in whose task we were begun
        count = part.count
        numbers: Sequence[int] = range(start, start + count)
        positions = self._track.positions(start, start + count)
        for stage in self._recipe.inner:
            if isinstance(stage, LoopStage):
                part, kept = await stage.run(part, positions, self.key)
            else:
                part, kept = await self._through_workers(stage.chain, start, part, positions)
            if len(kept) < len(numbers):
                numbers, positions = [numbers[k] for k in kept], [positions[k] for k in kept]
        self._inner_under_way -= 1
        self._inside -= count
        self._budget.changed()
        if self._recipe.keeps_count:
            self._arrive(start, part, numbers)
            self._check_end()
            return
        self._inner_done[start] = count, part, numbers
        while self._frontier in self._inner_done:
            count, part, numbers = self._inner_done.pop(self._frontier)
            self._frontier += count
            self._left_out = 0 if part.count else self._left_out + count
            self._arrive(self._cut, part, numbers)
            self._check_some_are_left()
        self._budget.changed()  # the next one is urgent now
        self._check_end()

    async def _through_workers(
        self, chain: int, start: int, part: Part, positions: Sequence[int]
    ) -> tuple[Part, Sequence[int]]:
        """(what a chain makes of samples, which of them are left)."""
        task = Task(chain, self.key, self._cuts.find(start)[0], Finish.SAMPLES, [part], start, positions)
        is_urgent = lambda: start <= self._frontier or self._is_urgent(start)
        reply, made = await self._dispatch.samples(task, is_urgent)
        if made is not None:
            return made, reply.kept
        return ListPart([Failure(nobodys(reply.errors[0][1]))] * len(positions)), range(len(positions))

    def _arrive(self, start: int, part: Part, numbers: Sequence[int]) -> None:
        """Samples that count, as far as there is no limit to them; they have these numbers in the source."""
        limit = self._limit
        if limit is not None and start + part.count > limit:
            kept = part.cut(0, max(0, limit - start))
            part.release()
            part = kept
        self._track.arrived(start, numbers)
        self._cut += part.count
        self._assembly.add(start, part)

    def _check_some_are_left(self) -> None:
        """End an epoch that would not end: the same samples come again and again, and none is ever left."""
        # Twice: passes differ in order, so that one begun anywhere may lack some. And it may be chance that leaves
        # samples, of few ones then not in each pass.
        most = None if self._pass_count is None else max(2 * self._pass_count, _LEFT_OUT_LEAST)
        if most is None or self._left_out < most or self._is_full:
            return
        error = OptionError(
            f".repeat() and .epoch(): of {self._left_out} samples one after the other none was left by what leaves "
            f"samples out, and there are only {self._pass_count} to begin again with"
        )
        self._arrive(self._cut, ListPart([Failure(nobodys(self._pack_error(error)))]), [self._frontier - 1])
        self._limit = self._cut

    @property
    def _is_full(self) -> bool:
        return self._limit is not None and self._cut >= self._limit

    def _check_end(self) -> None:
        """Whether every sample of the epoch has been cut into batches."""
        if self._is_full or (self._is_fed and not self._inner_under_way):
            self._assembly.end(self._cut)

    def _on_last_delivery(self) -> None:
        self._is_done = True
        self._finished.set()

    # Credits and admission.

    def _is_urgent(self, position: int | None) -> bool:
        """Whether nothing would move without the bytes that are asked for: the oldest batch waits for just them."""
        if position is not None and self._recipe.keeps_count:
            return self._assembly.lacks(position)
        if position is not None and position <= self._frontier:
            return self._assembly.lacks(None)
        if self._loading or self._inner_under_way or not self._assembly.lacks(None):
            return False
        # What is on its way before it may be all that is missing.
        return not self._turns or position == min(self._turns.values())

    def _is_early(self, position: int | None) -> bool:
        """Whether enough is there already; or nobody has asked yet, where nothing is made before it is asked for."""
        recipe = self._recipe
        if self._sender.depth:
            done = sum(part.count for _, part, _ in self._inner_done.values())
            ahead = self._cut + self._inside + done - self._cuts.start(self._assembly.granted)
            return position is not None and ahead >= recipe.look_ahead
        return position is None or position >= self._cuts.start(self._assembly.granted)


def _first(error: Exception) -> Exception:
    """The trainer sees one exception, never a group."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
