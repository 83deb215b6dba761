"""Runs tasks: the samples that wait for them, their sizes and their memory."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from anyio.abc import TaskGroup

from headrace._util.shared_memory import Arena, Claim, Lease
from headrace.workers.queue import TaskQueue
from headrace.workers.sample_chunks import ApartPart, PackedPart, Part, TablePart
from headrace.workers.tasks import Finish, Reply, Task

T = TypeVar("T")

RAMP_BYTES = 16 * 2**20
AHEAD_BYTES = 256 * 2**20


@dataclass(slots=True, order=True)
class _BytesRequest:
    rank: tuple[int, ...]
    number: int
    size: int = field(compare=False)
    is_input: bool = field(compare=False)
    grant: Callable[[], object] = field(compare=False)
    is_urgent: Callable[[], bool] = field(compare=False)
    is_early: Callable[[], bool] = field(compare=False)
    future: asyncio.Future[Any] = field(compare=False)
    is_let_in: bool = field(default=False, compare=False)


class Budget:
    """Admission by bytes, lowest rank first, without deadlocks.

    Args:
        held: Returns the bytes of inputs and slabs.
        inputs: Returns the bytes of inputs.
    """

    def __init__(self, limit: int, held: Callable[[], int], inputs: Callable[[], int]) -> None:
        self.limit = limit
        self.claimed = 0
        self._held, self._inputs = held, inputs
        self._waiting: list[_BytesRequest] = []
        self._numbers = itertools.count()
        self._ahead = RAMP_BYTES

    @property
    def in_use(self) -> int:
        return self._held() + self.claimed

    @property
    def is_full(self) -> bool:
        return self.in_use >= self.limit

    def claim(self, nbytes: int) -> Claim:
        return Claim(nbytes, self._count)

    def widen(self, ahead: int) -> None:
        """Raise the read-ahead limit to at least `ahead` bytes."""
        self._ahead = max(self._ahead, ahead)

    def starved(self) -> None:
        """Report that workers are idle. If only the read-ahead limit holds reads back, double it.

        The limit starts small, so that the first batch does not wait for bytes of the tenth, and memory is reused.
        """
        if self._waiting and not self._waiting[0].is_early():
            self._ahead = max(self._ahead, min(2 * self._ahead, AHEAD_BYTES))

    def has_room(self, size: int) -> bool:
        """True if `size` bytes may be held now, ahead of waiting requests and without a read."""
        return self._fits(size, is_input=False)

    async def admit(
        self,
        size: int,
        rank: tuple[int, ...],
        grant: Callable[[], T],
        *,
        is_urgent: Callable[[], bool],
        is_early: Callable[[], bool],
        is_input: bool = True,
    ) -> T:
        """Wait until `size` bytes are admitted, then return the result of `grant`.

        Args:
            rank: Waiting requests are admitted in ascending order of rank.
            is_urgent: True if nothing would move without the bytes. Admitted even over the limit.
            is_early: True to delay the request, even if there is room.
            is_input: True for bytes of the arena, which the read-ahead limit bounds too.
        """
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        entry = _BytesRequest(rank, next(self._numbers), size, is_input, grant, is_urgent, is_early, future)
        heapq.heappush(self._waiting, entry)
        self.changed()
        try:
            return await future
        finally:
            if not entry.is_let_in:  # cancelled: the entry would keep its epoch alive
                self._waiting.remove(entry)
                heapq.heapify(self._waiting)

    def changed(self) -> None:
        """Recheck waiting requests after a release, a delivery or a new request."""
        while self._waiting:
            entry = self._next()
            if entry is None:
                return
            entry.is_let_in = True
            if entry is self._waiting[0]:
                heapq.heappop(self._waiting)
            else:
                self._waiting.remove(entry)
                heapq.heapify(self._waiting)
            if not entry.future.done():
                try:
                    entry.future.set_result(entry.grant())
                except MemoryError as error:
                    entry.future.set_exception(error)

    def _count(self, nbytes: int) -> None:
        self.claimed += nbytes
        if nbytes < 0:
            self.changed()

    def _next(self) -> _BytesRequest | None:
        first = self._waiting[0]
        if first.future.done() or first.is_urgent():
            return first
        is_early = first.is_early()
        if not is_early and self._fits(first.size, is_input=first.is_input):
            return first
        # The first may belong to an abandoned epoch and must not block the others.
        able = (
            entry
            for entry in self._waiting[1:]
            if entry.is_urgent()
            or (is_early and not entry.is_early() and self._fits(entry.size, is_input=entry.is_input))
        )
        return min(able, default=None)

    def _fits(self, size: int, *, is_input: bool) -> bool:
        if is_input and self._inputs() + size > self._ahead:
            return False
        return self.in_use + size <= self.limit


_MORE = 1.1  # factor of memory reserved over the recent sizes
_ALIKE = 0.02  # share: sizes closer than this differ by their pickles only


class Dispatch:
    """The tasks of one epoch that workers have."""

    def __init__(self, works: TaskQueue, budget: Budget, arena: Arena) -> None:
        self._works, self._budget, self._arena = works, budget, arena
        self._sizes: dict[int, float] = {}  # by chain: bytes of the result per sample or group
        self.under_way = 0
        self.has_begun = False  # after the first delivery idle workers mean that reading is too slow
        self.has_waiting: Callable[[], bool] = lambda: False  # except if samples wait that are not requested yet

    def learn_spec(self, chain: int, spec: bytes) -> None:
        self._works.learn_spec(chain, spec)

    async def work(self, task: Task, find_place: Callable[[Reply], Awaitable[Lease | None]] | None = None) -> Reply:
        """Run a task to its end.

        `find_place` returns memory for a result that was made without, or None to discard it (the reply is then
        "mismatch").
        """
        self.under_way += 1
        try:
            reply = await self._works.run(task)
            made_s = _made_s(reply)
            while reply.kind == "held":
                place = None if find_place is None else await find_place(reply)
                if place is None:
                    self._works.abandon(task)
                    return Reply("mismatch")
                reply = await self._works.place(task, place)
                made_s += _made_s(reply)
        except BaseException:
            self._works.abandon(task)
            raise
        finally:
            self.under_way -= 1
            if not self.under_way and self.has_begun and not self.has_waiting():
                self._budget.starved()
            self._budget.changed()
        reply.made_s = made_s
        return reply

    async def samples(
        self, task: Task, is_urgent: Callable[[], bool]
    ) -> tuple[Reply, PackedPart | ApartPart | TablePart | None]:
        """Make samples and store them for the next stage. The part is None if the whole task failed."""
        room: list[Lease] = []
        count = 1 if task.finish is Finish.GROUP else task.count
        expected = int(count * self._sizes.get(task.chain, 0.0))
        if expected and self._budget.has_room(expected):  # else requested when the size is known
            with suppress(MemoryError):
                room.append(self._arena.lease(expected))
                task.place = room[0].retain()

        async def find_room(reply: Reply) -> Lease:
            while room:
                room.pop().release()

            def grant() -> None:
                room.append(self._arena.lease(reply.size))

            # The worker holds them in the meantime and starts no later task, so this is bounded too.
            rank = (-1, task.position)
            await self._budget.admit(reply.size, rank, grant, is_urgent=is_urgent, is_early=lambda: False)
            return room[0].retain()

        try:
            reply = await self.work(task, find_room)
        except BaseException:
            for lease in room:
                lease.release()
            raise
        if reply.kind == "written":
            self._sizes[task.chain] = _expected(self._sizes.get(task.chain, 0.0), reply.size / max(1, count))
            if reply.size < room[0].size:
                self._arena.trim(room[0], reply.size)
            if reply.pieces:
                return reply, ApartPart(room[0], reply.pieces, reply.failed)
            if reply.is_table:
                return reply, TablePart(room[0], reply.lengths, range(len(reply.kept)))
            return reply, PackedPart(room[0], reply.lengths, 0, len(reply.kept), reply.failed)
        for lease in room:
            lease.release()
        return reply, None


def _expected(known: float, size: float) -> float:
    """Estimate the next size, with a margin if sizes vary."""
    if not known or abs(size - known) <= _ALIKE * known:
        return max(known, size)
    return max(_MORE * size, (known + _MORE * size) / 2)


def _made_s(reply: Reply) -> float:
    """Seconds spent on samples, without collation and writing."""
    return sum(seconds for step, seconds in reply.busy_s.items() if step not in ("collate", "write"))


_Work = tuple[Callable[..., Awaitable[None]], tuple[object, ...]]


class TaskPool:
    """A pool of tasks of a group, which grows as needed. Tasks end when the group is cancelled.

    A task runs all its work in the context of the caller that it was started for.
    """

    def __init__(self, group: TaskGroup) -> None:
        self._group = group
        self._idle: deque[asyncio.Future[_Work]] = deque()

    def start_soon(self, work: Callable[..., Awaitable[None]], *args: object) -> None:
        """Await `work(*args)` in an idle task or a new one. An exception ends the group."""
        while self._idle:
            idle = self._idle.pop()
            if not idle.done():  # a cancelled task's future is done
                idle.set_result((work, args))
                return
        self._group.start_soon(self._serve, work, args)

    async def _serve(self, work: Callable[..., Awaitable[None]] | None, args: tuple[object, ...]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            assert work is not None
            await work(*args)
            work, args = None, ()  # drop references to finished work
            if self._group.cancel_scope.cancel_called:
                return  # the cancellation may have come while `work` ended
            idle: asyncio.Future[_Work] = loop.create_future()
            self._idle.append(idle)
            work, args = await idle


_WORTH_S = 20e-3  # work per task: large against the overhead of a task
_WORTH_AT_ONCE_S = 5e-3  # if the trainer waits for the first result
_WORTH_BYTES = 2**21
_WORTH_AT_ONCE_BYTES = 2**18
_LARGE_BYTES = 2**16  # larger samples have a slab alone, from which they are not copied


class Pace:
    """Grows the task size from one sample, for a fast start, to what is worth a task or gives `most_bytes`.

    Args:
        is_awaited: True if results go directly to the trainer and not to further tasks.
    """

    def __init__(self, most: int, *, is_awaited: bool = False, most_bytes: int = _WORTH_BYTES) -> None:
        self._most, self._grown, self._begun = most, 1, 0
        self._is_awaited = is_awaited
        self._worth_s = _WORTH_AT_ONCE_S if is_awaited else _WORTH_S
        self._worth_bytes = min(most_bytes, _WORTH_AT_ONCE_BYTES if is_awaited else _WORTH_BYTES)
        self._sample_s = self._sample_bytes = 0.0

    @property
    def size(self) -> int:
        if not self._sample_s or (self._is_awaited and self._sample_bytes > _LARGE_BYTES):
            return 1
        most = min(self._worth_s / self._sample_s, self._worth_bytes / max(1.0, self._sample_bytes))
        return max(1, min(self._grown, int(most)))

    def begin(self) -> None:
        """Count a task: sizes grow as 1, 1, 2, 4, ..."""
        self._begun += 1
        if self._begun > 1:
            self._grown = min(self._most, 2 * self._grown)

    def learn(self, count: int, seconds: float, nbytes: int) -> None:
        """Update the averages by a finished task. Increases count at once, decreases gradually."""
        self._sample_s = max(seconds / count, (self._sample_s + seconds / count) / 2)
        self._sample_bytes = max(nbytes / count, (self._sample_bytes + nbytes / count) / 2)


class _PiledPart:
    """A part whose first `taken` samples are taken."""

    def __init__(self, start: int, part: Part) -> None:
        self.start, self.part, self.taken = start, part, 0  # `start`: position of the first sample not taken


class Pile:
    """Parts ordered by the positions of their samples. Takes over their leases.

    The cost of taking does not depend on the size of the buffer. A part is cut when samples are taken. Its remainder is
    cut each time half of it is gone, which frees leases early.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, _PiledPart]] = []
        self._numbers = itertools.count()

    def __bool__(self) -> bool:
        return bool(self._entries)

    @property
    def start(self) -> int:
        return self._entries[0][0]

    @property
    def size(self) -> int:
        """Number of samples not taken of the part at the lowest position."""
        entry = self._entries[0][2]
        return entry.part.count - entry.taken

    def add(self, start: int, part: Part) -> None:
        if part.count:
            heapq.heappush(self._entries, (start, next(self._numbers), _PiledPart(start, part)))
        else:
            part.release()

    def take(self, count: int) -> tuple[int, Part]:
        """Take (position, samples) from the lowest position on: at most `count`, of one part."""
        entry = self._entries[0][2]
        start, part, begin = entry.start, entry.part, entry.taken
        end = min(begin + count, part.count)
        if begin == 0 and end == part.count:
            heapq.heappop(self._entries)
            return start, part
        some = part.cut(begin, end)
        if end == part.count:
            heapq.heappop(self._entries)
            part.release()
            return start, some
        entry.start, entry.taken = start + end - begin, end
        if 2 * end >= part.count:
            entry.part, entry.taken = part.cut(end, part.count), 0
            part.release()
        heapq.heapreplace(self._entries, (entry.start, next(self._numbers), entry))
        return start, some

    def below(self, stop: int) -> Iterator[tuple[int, Part]]:
        while self._entries and self.start < stop:
            yield self.take(stop - self.start)

    def drop(self) -> None:
        for _, _, entry in self._entries:
            entry.part.release()
        self._entries.clear()
