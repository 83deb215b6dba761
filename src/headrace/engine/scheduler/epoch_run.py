"""One epoch in progress, from the source's samples to batches in plan order."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import anyio
from anyio.abc import TaskGroup

from headrace._util.sample_ranges import Rows
from headrace._util.shared_memory import Claim, Lease, bytes_in
from headrace.delivery.channel import Sender
from headrace.engine.scheduler.assembler import Assembly, Outlet
from headrace.engine.scheduler.dispatch import Budget, Dispatch
from headrace.engine.scheduler.epoch_spec import EpochSpec, GroupStage, InnerStage, LimitStage, Resources
from headrace.engine.scheduler.event_loop import is_exiting
from headrace.engine.scheduler.inner_stages import SKIPPED_LEAST, Level, Outcome
from headrace.engine.scheduler.position_map import GivenBoundaries
from headrace.errors import LoaderClosedError, OptionError
from headrace.workers.failures import Failure, first_of
from headrace.workers.sample_chunks import ListPart, Part
from headrace.workers.tasks import Finish, Task


class Epoch:
    """One run through a plan, for one iterator.

    Args:
        sender: End of the channel that gets the batches; or an outlet, which gets the samples.
        assemble: Makes what takes the samples.
    """

    def __init__(
        self,
        spec: EpochSpec,
        resources: Resources,
        sender: Sender | Outlet,
        assemble: Callable[..., Assembly | Outlet] = Assembly,
    ) -> None:
        self._source, self._batches, self._learned, self.key = spec.source, spec.batches, spec.learned, spec.key
        self._slabs, self._arena, self._budget = resources.slabs, resources.arena, resources.budget
        self._sender, self._meters = sender, resources.meters
        self._wrap, self._copies, self._pack_error = resources.wrap, resources.copies, resources.pack_error
        self._dispatch = Dispatch(resources.works, resources.budget, resources.arena)
        self._boundaries, self._position_map = spec.boundaries, spec.position_map
        self._pass_count = spec.pass_count
        self._raises = spec.skips is None
        ends = self._begin_inner, self._on_last_delivery
        self._assembly = assemble(spec, resources, self._dispatch, sender, *ends)
        self._dispatch.has_waiting = lambda: self._assembly.has_waiting
        self._levels = levels_of(spec, self._dispatch, resources.budget, self)
        self._of_use = [0] * len(self._levels)  # per level: source samples before this one gave something
        self._put = 0  # end of the positions that the source has pushed
        self._count = 0  # number of samples pushed; lower than `_put` if some are missing
        self._cut = 0  # samples divided into batches
        self._is_fed = False  # the source has pushed its last sample
        self._last: Failure | None = None  # the source's error, while earlier samples are delivered
        self._filled = 0  # number of first levels that have reached their limit and ended
        self._feeding: anyio.CancelScope | None = None
        self._reads = object()  # identity of this reader in the meters
        self._loading: set[object] = set()  # reads and unpackers that proceed without more memory
        # Claims of the source by position. It requests them in that order.
        self._turns: OrderedDict[Claim, int] = OrderedDict()
        self._is_done = False  # every batch was delivered
        self._finished = asyncio.Event()
        self._group: TaskGroup | None = None

    async def run(self) -> None:
        """Deliver every batch, then close the channel. Errors go through the channel too."""
        try:
            async with anyio.create_task_group() as self._group:
                self._assembly.run_in(self._group)
                for level in self._levels:
                    level.group = self._group
                    if level.left == 0:
                        self.filled(level.number)
                self._group.start_soon(self._feed)
                await self._finished.wait()
                self._group.cancel_scope.cancel()
        except (Exception, BaseExceptionGroup) as error:
            self._sender.fail(self._pack_error(first_of(error)))
        finally:
            self._end_reads()
            if not self._is_done and not is_exiting():
                closed = LoaderClosedError("the loader was closed while this epoch was running")
                self._sender.fail(self._pack_error(closed))
            self._assembly.drop()
            for level in self._levels:
                level.drop()
            if not is_exiting():
                self._sender.close()
            for delivery in self._sender.take_back():
                self._slabs.returned(delivery.segment)
            self._budget.changed()

    @property
    def is_stopped(self) -> bool:
        return self._finished.is_set()

    def stop(self) -> None:
        self._finished.set()

    # Flow

    @property
    def is_starved(self) -> bool:
        return self._dispatch.under_way < self._batches.workers

    async def lease(self, size: int, rank: tuple[int, ...]) -> Lease:
        await self._while_wanted()
        granted: list[Lease] = []

        def grant() -> Lease:
            granted.append(self._arena.lease(size))
            self._loading.add(granted[0])
            self._meters.set_reading(self._reads, True)
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
        # later: the caller may be about to wait, and would be the first
        asyncio.get_running_loop().call_soon(self._budget.changed)

    async def turn(self, size: int, position: int) -> Claim:
        await self._while_wanted()
        size *= self._copies
        granted: list[Claim] = []

        def grant() -> Claim:
            granted.append(self._budget.claim(size))
            self._turns[granted[0]] = position
            self._meters.set_reading(self._reads, True)
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

    async def _while_wanted(self) -> None:
        """Block for ever once a level has ended, so that a source that never waits can be cancelled."""
        if self._filled:
            await anyio.sleep_forever()

    def trim(self, lease: Lease, size: int) -> None:
        self._arena.trim(lease, size)

    def part_of(self, samples: list[Any], claim: Claim | None) -> Part:
        try:
            part = self._wrap(samples)
            if isinstance(part, ListPart) and claim is not None:
                part.claim = claim.retain()
                part.nbytes = bytes_in(samples)
                claim.grow(max(0, part.nbytes - claim.nbytes))
        finally:
            if claim is not None:
                self._end_turn(claim)
        return part

    def cut(self, count: int) -> None:
        assert isinstance(self._boundaries, GivenBoundaries)
        self._assembly.begin(self._boundaries.add(count))

    def put(self, start: int, part: Part) -> None:
        self._put = max(self._put, start + part.count)
        self._position_map.put(self._put)
        self._count += part.count
        if self._batches.keeps_count and not self._batches.inner:
            self._arrive(start, part)
        else:
            self._levels[0].add(start, part)

    def batch_end(self, position: int) -> int | None:
        if not self._raises:
            return None
        if not self._batches.keeps_count:
            return position + 1
        number, _ = self._boundaries.find(position)
        return self._boundaries.start(number) + self._boundaries.size(number)

    def come_again(self, count: int) -> None:
        self._pass_count = count

    def begin_again(self) -> None:
        self._position_map.begin_again(self._put)

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
        self._meters.set_reading(self._reads, bool(self._loading or self._turns))
        self._budget.changed()  # a waiting request may be urgent now, as no read is under way

    def _end_turn(self, claim: Claim) -> None:
        if self._turns.pop(claim, None) is not None:
            self._meters.set_reading(self._reads, bool(self._loading or self._turns))
            claim.release()
            self._budget.changed()  # a waiting request may be the oldest under way now

    def _end_reads(self) -> None:
        self._loading.clear()
        for claim in list(self._turns):
            self._end_turn(claim)
        self._meters.set_reading(self._reads, False)

    # Between source and batches.

    async def _feed(self) -> None:
        try:
            with anyio.CancelScope() as self._feeding:
                if not self._filled:
                    await self._source.run(self)
        except Exception as error:
            if self._count < self._put and not self._filled:
                raise  # earlier samples are missing and will never come
            # Earlier samples are delivered first; the error has the next position.
            if isinstance(self._boundaries, GivenBoundaries):
                self.cut(1)
            why = self.failure(first_of(error))
            if self._batches.keeps_count or self._position_map.has_rows:
                self.put(self._put, ListPart([why]))
            else:  # groups of earlier samples may wait for the end
                self._last = why
        if self._filled:
            self._end_reads()
        self._is_fed = True
        self._check_end()

    def _begin_inner(self) -> None:
        for level in self._levels:
            level.begin()

    # Called by levels.

    def positions(self, start: int, stop: int) -> Sequence[int]:
        return self._position_map.positions(start, stop)

    def batch_of(self, level: Level, start: int) -> int:
        """Estimate the batch that a unit is for, which is the priority of tasks. Never decreases."""
        if self._batches.keeps_count:
            return self._boundaries.find(start)[0]
        # Full batches go first, then complete groups, then single samples.
        filling = self._boundaries.find(self._cut)[0]
        return filling if level is not self._levels[0] else max(filling + 1, self._boundaries.find(start)[0])

    def is_awaited(self, level: Level, start: int) -> bool:
        """True if the oldest batch waits for units that have not started."""
        return self._assembly.lacks(start) if self._batches.keeps_count else start <= level.frontier

    def is_urgent(self, level: Level, start: int) -> bool:
        """True if the results of these units must get memory, as nothing would move otherwise."""
        return self._is_urgent(start if level is self._levels[0] else None)

    @property
    def lacks(self) -> bool:
        """True if a batch may be sent and none is ready."""
        return self._assembly.lacks(None)

    def came_through(self, start: int, part: Part) -> None:
        """Take results of the source samples from `start` on, one each, in any order."""
        self._arrive(start, part)

    def left(self, level: Level, outcome: Outcome) -> None:
        """Take the next samples of a level, the last ones of their units included."""
        self._position_map.arrived(level.number, outcome.units)
        if level is self._levels[-1]:
            self._arrive(self._cut, outcome.part)
            return
        self._levels[level.number + 1].put(outcome, level.frontier)

    def filled(self, number: int) -> None:
        """Stop reading and all work before the end of this level."""
        self._filled = number + 1
        for filled in self._levels[: self._filled]:
            filled.end()
        if self._feeding is not None:
            self._feeding.cancel()

    def passed(self, level: Level, unit: int, *, is_of_use: bool) -> None:
        """Fail an epoch that would never end: samples repeat and all are skipped."""
        first = self._position_map.levels[level.number].first(unit)
        at = self._position_map.source_number(level.number - 1, first)
        if is_of_use:
            self._of_use[level.number] = at + 1
            return
        # Two passes: as their order differs, a pass from any point may lack some samples. Filters may also be random,
        # and then keep none of few samples in some passes.
        most = None if self._pass_count is None else max(2 * self._pass_count, SKIPPED_LEAST)
        left_out = at + 1 - self._of_use[level.number]
        is_bounded = any(before.left is not None for before in self._levels[: level.number])
        if most is None or left_out < most or is_bounded:
            return
        error = OptionError(
            f".repeat() and .epoch(): of {left_out} samples one after the other none was left by what leaves "
            f"samples out, and there are only {self._pass_count} to begin again with"
        )
        self._position_map.arrived(len(self._levels) - 1, [self._levels[-1].frontier - 1])  # -1: before the first
        self._arrive(self._cut, ListPart([self.failure(error)]))
        self.filled(len(self._levels) - 1)

    def moved(self) -> None:
        """Report progress: more units may start, or all are finished."""
        self._budget.changed()  # the next request is urgent now
        self._check_end()

    def failure(self, error: BaseException) -> Failure:
        return Failure(self._pack_error(error).widened())

    def _arrive(self, start: int, part: Part) -> None:
        self._cut += part.count
        self._assembly.add(start, part)

    def _check_end(self) -> None:
        """End the assembly once every sample of the epoch is divided into batches."""
        if not (self._is_fed or self._filled):
            return
        for level in self._levels[self._filled :]:
            level.flush()
            if level.is_busy:
                return
        if self._last is not None and not self._filled:
            why, self._last = self._last, None
            self._arrive(self._cut, ListPart([why]))  # belongs to no sample, so states do not count it
        self._assembly.end(self._cut)

    def _on_last_delivery(self) -> None:
        self._is_done = True
        self._finished.set()

    # Credits and admission.

    def _is_urgent(self, position: int | None) -> bool:
        """True if the oldest batch waits for these bytes only."""
        if position is not None and self._batches.keeps_count:
            return self._assembly.lacks(position)
        if position is not None and position <= self._levels[0].frontier:
            return self._assembly.lacks(None)
        if not self._assembly.lacks(None) or self._loading or any(level.is_busy for level in self._levels):
            return False
        # Earlier reads under way may be all that is missing.
        return not self._turns or position == next(iter(self._turns.values()))

    def _is_early(self, position: int | None) -> bool:
        """True if enough samples are ready, or none is requested and none may be made ahead."""
        if self._sender.depth:
            inside = sum(level.inside for level in self._levels)
            ahead = self._cut + inside - self._boundaries.start(self._assembly.granted)
            return position is not None and ahead >= self._batches.look_ahead
        lacking = self._boundaries.start(self._assembly.granted)
        if self._batches.gives_many:  # positions do not count outputs: assume one per further sample
            lacking += self._put - self._cut - sum(level.inside for level in self._levels)
        return position is None or position >= lacking


def levels_of(spec: EpochSpec, dispatch: Dispatch, budget: Budget, host: Epoch) -> list[Level]:
    """Split the inner stages into levels. A new level starts at each group stage and each limit."""
    levels: list[list[InnerStage]] = [[]]
    for stage in spec.batches.inner:
        if isinstance(stage, GroupStage | LimitStage):
            levels.append([])
        levels[-1].append(stage)
    return [
        (_grouping(spec) if any(isinstance(stage, GroupStage) for stage in stages) else Level)(
            number, stages, spec, dispatch, budget, host
        )
        for number, stages in enumerate(levels)
    ]


def _grouping(spec: EpochSpec) -> type[Level]:
    if spec.position_map.has_rows:
        from headrace.engine.scheduler.group_level import RowLevel

        return RowLevel

    from headrace.engine.scheduler.group_level import GroupLevel

    return GroupLevel
