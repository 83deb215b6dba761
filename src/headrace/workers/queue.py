"""The task queue of one loader. Assigns tasks and repeats those of lost workers."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from headrace._util.shared_memory import Lease, Segment
from headrace.observe import LoaderMeters
from headrace.torch_compat import serialize
from headrace.workers.chains import Chains
from headrace.workers.sample_chunks import Part, Place, address_of
from headrace.workers.tasks import (
    DEATHS,
    Finish,
    ForgetSegment,
    LetGo,
    PlaceMessage,
    Reply,
    Task,
    TaskMessage,
    died,
    exit_text,
)

if TYPE_CHECKING:
    from headrace.workers.executor import Executor, Loss, WorkerLink

_KNOWN_MOST = 1024  # tracked blocks of a worker, more than it caches
_LATE = 4  # limit of the wait, in decoding times
_SLOWER = 1.25  # limit of the growth of the estimate by slow decodings


class OpenBlocks:
    """The blocks that one worker has, or will have, samples of."""

    def __init__(self) -> None:
        self._numbers: dict[int, bool] = {}  # by block: True if samples were sent
        self._asked: dict[int, tuple[int, int]] = {}  # by task: (blocks to decode, samples)
        self._heard_s = 0.0

    def missing(self, blocks: Sequence[int]) -> int:
        """Return the number of these blocks that the worker would have to decode."""
        return sum(number not in self._numbers for number in blocks)

    @property
    def samples(self) -> int:
        return sum(samples for _, samples in self._asked.values())

    def given(self, task: int, blocks: Sequence[int], samples: int, now_s: float) -> None:
        if not self._asked:
            self._heard_s = now_s
        self._asked[task] = sum(not self._numbers.get(number) for number in blocks), samples
        self._numbers.update(dict.fromkeys(blocks, True))
        while len(self._numbers) > _KNOWN_MOST:
            del self._numbers[next(iter(self._numbers))]

    def expect(self, blocks: Sequence[int]) -> None:
        """Record that a task with samples of these blocks waits for this worker."""
        for number in blocks:
            self._numbers.setdefault(number, False)

    def answered(self, task: int, now_s: float) -> int:
        """Record a reply. Returns the number of blocks that the worker had to decode for the task."""
        self._heard_s = now_s
        opened, _ = self._asked.pop(task, (0, 0))
        return opened

    def late_s(self, patience_s: float) -> float:
        """Return the time after which the worker is late, at `patience_s` per block in work."""
        opens, _ = next(iter(self._asked.values()), (0, 0))
        return self._heard_s + patience_s * max(1, opens)


class Opening:
    """Estimates the time to decode a block, without its samples, from replies."""

    def __init__(self) -> None:
        self._sample_s: float | None = None
        self._open_s = 0.0  # 0: not known yet
        self._first: tuple[float, int, int] | None = None  # a reply from before the time per sample was known

    def learn(self, seconds: float, samples: int, opened: int) -> None:
        """Add a reply: seconds for some samples, and the number of blocks decoded for them."""
        if opened and self._sample_s is None:
            self._first = seconds, samples, opened
        elif opened:
            each = max(0.0, seconds - samples * (self._sample_s or 0.0)) / opened
            self._open_s = min(each, _SLOWER * self._open_s) if self._open_s else each
        else:
            each = seconds / max(1, samples)
            self._sample_s = each if self._sample_s is None else 0.9 * self._sample_s + 0.1 * each
            if self._first is not None:
                first, self._first = self._first, None
                self.learn(*first)

    def better_until_s(
        self, blocks: Sequence[int], best: OpenBlocks, workers: Iterable[OpenBlocks], before: int, now_s: float
    ) -> float | None:
        """Return until when samples wait for a worker that has more of their blocks. None: no wait.

        They wait if that worker reaches them before another one could decode the blocks. A worker that is silent much
        longer is assumed to be held up.

        Args:
            best: The worker with most of these blocks, among those that could start now.
            before: Number of waiting samples that come first.
        """
        if not self._open_s or not self._sample_s or not (missing := best.missing(blocks)):
            return None
        found = min(workers, key=lambda one: one.missing(blocks), default=best)
        saved_s = (missing - found.missing(blocks)) * self._open_s
        until_s = found.late_s(_LATE * self._open_s)
        if (found.samples + before) * self._sample_s >= saved_s or until_s <= now_s:
            return None
        found.expect(blocks)
        return until_s


class QueueEntry:
    """A queued task with the future of its reply."""

    def __init__(self, number: int, task: Task, reply: asyncio.Future[Reply]) -> None:
        self.number, self.task, self.reply = number, task, reply
        self.asked = number  # number of the awaited reply
        self.worker: QueueWorker | None = None
        self.is_abandoned = False
        self.blocks = list(dict.fromkeys(number for part in task.parts for number in part.blocks))

    @property
    def at(self) -> tuple[int, int]:
        """Priority. Within a batch, tasks of inner stages go in order of position."""
        return self.task.batch, self.task.position if self.task.finish.is_inner else -1

    def answer(self, reply: Reply) -> None:
        if not self.reply.done():
            self.reply.set_result(reply)


class QueueWorker:
    def __init__(self, number: int, at_once: int) -> None:
        self.number, self._at_once = number, at_once
        self.link: WorkerLink | None = None  # None: starting or lost
        self.is_lost = False
        self.is_answering = False  # the rest of published batches may become a task
        self.tasks: dict[int, QueueEntry] = {}  # in the order of sending
        self.segments: set[int] = set()
        self.held: dict[int, QueueEntry] = {}  # results without memory to write to
        self.blocks = OpenBlocks()

    def may_take(self, entry: QueueEntry) -> bool:
        """True if the worker may get this task now.

        A worker that holds unplaced results takes only tasks those results may wait for: older batches, or, if it holds
        no batch, a collate task. Batches that are published never wait for a later task, and none waits with them: if
        the worker stops before the last one, the rest is the next task.
        """
        if not self.is_open or len(self.tasks) >= self._at_once:
            return False
        if entry.task.finish is Finish.SCAN:
            return True
        works = [e for e in self.tasks.values() if e.task.finish is not Finish.SCAN]
        if self.is_answering or any(e.task.publishes or (entry.task.publishes and e.at > entry.at) for e in works):
            return False
        will_hold = any(e.task.place is None for e in self.tasks.values())
        held = (e for e in self.held.values() if e.task.finish.is_of_made or not entry.task.finish.is_of_made)
        return not will_hold and all(entry.at < e.at for e in held)

    @property
    def is_open(self) -> bool:
        """True if messages may be sent to the worker."""
        return self.link is not None and self.link.is_open

    @property
    def load(self) -> int:
        """Estimated work of its tasks. Scanning takes much less time than making samples."""
        return sum(1 if entry.task.finish is Finish.SCAN else 1 + 4 * entry.task.count for entry in self.tasks.values())


_PASSED_MOST = 32  # maximum number of tasks that wait for the worker that has their blocks
_TASKS_AT_ONCE = 2  # one in work, one waiting at the worker; threads need none waiting

log = logging.getLogger("headrace")


_First = tuple[int, tuple[int, int], int, QueueEntry]
_Ready = list[_First]
"""A heap of entries in the order of `may_take`: if no worker may take the first, none may take any other."""

_Passed = list[tuple[float, _Ready, _First]]
"""Entries that wait for one worker: (deadline, heap, item of the heap)."""


class TaskQueue:
    """Runs tasks on the workers of an executor. To be used on the engine's loop.

    `modules` is filled with the module files that chains need, and their modification times.
    """

    def __init__(
        self, count: int, executor: Executor, meters: LoaderMeters, modules: dict[str, int] | None = None
    ) -> None:
        self._count, self._executor, self._meters = count, executor, meters
        self._at_once = 1 if executor.shares_objects and count > 1 else _TASKS_AT_ONCE
        self._workers: dict[int, QueueWorker] = {}
        self._entries: dict[Task, QueueEntry] = {}
        self._numbers = itertools.count(1)
        self._ready: tuple[_Ready, _Ready] = [], []  # (tasks of batches whose samples are made, all others)
        self._opening = Opening()
        self._late: asyncio.TimerHandle | None = None  # timer for tasks that wait for one worker
        self._starting: set[asyncio.Task[None]] = set()
        self._failure: Exception | None = None
        self._is_closed = False
        self.chains = Chains(
            self._links,
            shares_memory=executor.shares_memory,
            shares_objects=executor.shares_objects,
            modules={} if modules is None else modules,
        )

    @property
    def shares_memory(self) -> bool:
        return self._executor.shares_memory

    @property
    def pids(self) -> list[int]:
        return [link.pid for link in self._links() if link.pid]

    @property
    def is_idle(self) -> bool:
        return not self._entries

    async def open(self) -> None:
        """Start the workers. Tasks may be given before they are ready."""
        for number in range(self._count):
            self._start(number)

    def learn_spec(self, number: int, spec: bytes) -> None:
        """Register the spec of a chain's samples with all workers. Empty: discard it."""
        self.chains.learn_spec(number, spec)

    async def run(self, task: Task) -> Reply:
        """Run a task. While its reply is "held", its worker keeps the result."""
        entry = self._entries[task] = QueueEntry(next(self._numbers), task, asyncio.get_running_loop().create_future())
        self._queue(entry)
        return await self._answer(entry)

    async def place(self, task: Task, place: Lease) -> Reply:
        """Set the memory for a held result, and take over the lease.

        If its worker is lost, another one repeats the task.
        """
        if task.place is not None:
            task.place.release()
        task.place = place
        entry = self._entries[task]
        entry.reply = asyncio.get_running_loop().create_future()
        worker = entry.worker
        if worker is None or worker.link is None:
            self._queue(entry)
        else:
            entry.asked = next(self._numbers)
            worker.tasks[entry.asked] = entry
            worker.held.pop(entry.number, None)
            message = PlaceMessage(entry.asked, entry.number, self._address(place), task.slot)
            worker.link.send(message, self._new(worker, [place.segment]))
            self._hand_out()
        return await self._answer(entry)

    def abandon(self, task: Task) -> None:
        """Give up a task. Its leases are released once no worker can be using them."""
        entry = self._entries.get(task)
        if entry is None or entry.is_abandoned:
            return
        entry.is_abandoned = True
        worker = entry.worker
        if worker is None:
            self._release(entry)
        elif entry.asked not in worker.tasks:  # the result is held
            self._let_go(worker, entry)
            self._hand_out()

    def forget_segment(self, number: int) -> None:
        for worker in self._workers.values():
            if number in worker.segments and worker.link is not None:
                worker.segments.discard(number)
                worker.link.send(ForgetSegment(number))

    async def close(self) -> None:
        self._is_closed = True
        if self._late is not None:
            self._late.cancel()
        for starting in self._starting:
            starting.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        await self._executor.aclose()
        self._workers.clear()
        for entry in list(self._entries.values()):
            self._release(entry)
        self.chains.close()

    def _links(self) -> list[WorkerLink]:
        return [worker.link for worker in self._workers.values() if worker.link is not None]

    async def _answer(self, entry: QueueEntry) -> Reply:
        try:
            reply = await entry.reply
        except BaseException:
            self.abandon(entry.task)
            raise
        for step, seconds in reply.busy_s.items():
            self._meters.count_work(step, seconds)
        if reply.kind != "held":
            self._release(entry)
        return reply

    def _release(self, entry: QueueEntry) -> None:
        if self._entries.pop(entry.task, None) is not None:
            for part in entry.task.parts:
                part.release()
            if entry.task.place is not None:
                entry.task.place.release()

    def _let_go(self, worker: QueueWorker, entry: QueueEntry) -> None:
        """Discard a held result."""
        worker.held.pop(entry.number, None)
        if worker.link is not None:
            worker.link.send(LetGo(entry.number))
        self._release(entry)

    def _queue(self, entry: QueueEntry) -> None:
        entry.worker = None
        if self._failure is not None:
            if not entry.reply.done():
                entry.reply.set_exception(self._failure)
            return
        first = 0 if entry.task.finish is Finish.SCAN else 1
        made, others = self._ready
        heapq.heappush(made if entry.task.finish.is_of_made else others, (first, entry.at, entry.number, entry))
        self._hand_out()

    def _hand_out(self) -> None:
        """Assign tasks in order. Passes over tasks that wait for the worker with their blocks."""
        if self._late is not None:
            self._late.cancel()
        if not any(self._ready):
            return
        passed: _Passed = []
        while any(
            self._hand_out_first(ready, passed)
            for ready in sorted(filter(None, self._ready), key=lambda ready: ready[0])
        ):
            pass
        for _, ready, first in passed:
            heapq.heappush(ready, first)
        if passed:
            until_s = min(until_s for until_s, _, _ in passed)
            self._late = asyncio.get_running_loop().call_at(until_s, self._hand_out)

    def _hand_out_first(self, ready: _Ready, passed: _Passed) -> bool:
        """Assign the first of some tasks, or pass it over. False if no further task may be tried."""
        entry = ready[0][3]
        if not entry.is_abandoned:
            able = [worker for worker in self._workers.values() if worker.may_take(entry)]
            if not able:
                return False
            best = min(able, key=lambda worker: (worker.blocks.missing(entry.blocks), worker.load))
            if (until_s := self._better_until_s(entry, best, passed)) is not None:
                passed.append((until_s, ready, heapq.heappop(ready)))
                return len(passed) < _PASSED_MOST
            self._give(best, entry)
        heapq.heappop(ready)
        return True

    def _better_until_s(self, entry: QueueEntry, best: QueueWorker, passed: _Passed) -> float | None:
        """Return until when a task waits for the worker with its blocks. None: no wait."""
        if not entry.blocks or self._executor.shares_objects:
            return None
        workers = (worker.blocks for worker in self._workers.values() if worker.is_open)
        before = sum(first[3].task.count for _, _, first in passed)
        return self._opening.better_until_s(entry.blocks, best.blocks, workers, before, _now_s())

    def _give(self, worker: QueueWorker, entry: QueueEntry) -> None:
        assert worker.link is not None
        task = entry.task
        task.attempts += 1
        entry.worker, entry.asked = worker, entry.number
        worker.blocks.given(entry.number, entry.blocks, task.count, _now_s())
        worker.tasks[entry.number] = entry
        parts, segments = self._sent(task)
        place = None if task.place is None else self._address(task.place, is_read=task.finish is Finish.SCAN)
        worker.link.send(TaskMessage.of(entry.number, task, parts, place), self._new(worker, segments))

    def _sent(self, task: Task) -> tuple[list[Part], list[Segment]]:
        """Return a task's parts as sent to a worker, and the segments that they refer to."""
        if not self._executor.shares_memory:
            return [part.carried() for part in task.parts], []
        segments = [] if task.place is None else [task.place.segment]
        parts = []
        for part in task.parts:
            sent, needed = part.sent()
            parts.append(sent)
            segments += needed
        return parts, segments

    def _address(self, place: Lease, *, is_read: bool = False) -> Place:
        if self._executor.shares_memory:
            return address_of(place)
        return bytes(place.view) if is_read else place.size

    def _new(self, worker: QueueWorker, segments: Sequence[Segment]) -> list[Segment]:
        if not self._executor.shares_memory:
            return []
        new = {segment.number: segment for segment in segments if segment.number not in worker.segments}
        worker.segments.update(new)
        return list(new.values())

    # Life cycle of workers.

    def _start(self, number: int) -> None:
        if self._is_closed:
            return
        worker = self._workers[number] = QueueWorker(number, self._at_once)
        starting = asyncio.get_running_loop().create_task(self._connect(worker))
        self._starting.add(starting)
        starting.add_done_callback(self._starting.discard)

    async def _connect(self, worker: QueueWorker) -> None:
        try:
            link = await self._executor.start(
                worker.number,
                lambda number, reply: self._on_reply(worker, number, reply),
                lambda loss: self._on_lost(worker, loss),
            )
        except Exception as error:
            self._fail_all(error)
            return
        if worker.is_lost:  # lost before its first message
            return
        worker.link = link
        self.chains.tell(link)
        self._meters.count_started()
        self._hand_out()

    def _fail_all(self, error: Exception) -> None:
        """Fail all current and future tasks, as no worker can be started any more."""
        self._failure = error
        for entry in list(self._entries.values()):
            if not entry.reply.done():
                entry.reply.set_exception(error)

    def _on_reply(self, worker: QueueWorker, number: int, reply: Reply) -> None:
        if worker.is_lost or self._is_closed:
            return  # too late: another worker repeats the task
        entry = worker.tasks.pop(number, None)
        if entry is None:
            return  # already answered
        opened = worker.blocks.answered(number, _now_s())
        if entry.blocks and number == entry.number and reply.kind != "failed":
            self._opening.learn(sum(reply.busy_s.values()), entry.task.count, opened)
        if entry.is_abandoned:
            if reply.kind == "held":
                self._let_go(worker, entry)
            else:
                self._release(entry)
        else:
            if reply.kind == "held":
                worker.held[entry.number] = entry
            if reply.copies and entry.task.place is not None:
                _write(entry.task.place, reply)
            entry.answer(reply)
        if entry.task.publishes:
            worker.is_answering = True
            asyncio.get_running_loop().call_soon(self._answered, worker)  # after who waits for the answer
        self._hand_out()

    def _answered(self, worker: QueueWorker) -> None:
        worker.is_answering = False
        self._hand_out()

    def _on_lost(self, worker: QueueWorker, loss: Loss) -> None:
        if worker.is_lost or self._is_closed:
            return
        given = [entry for entry in self._entries.values() if entry.worker is worker]
        worker.is_lost, worker.link = True, None
        worker.tasks.clear()
        worker.held.clear()
        self._meters.count_death()
        log.warning(
            "worker %d (pid %d) ended (%s); its work is done again", worker.number, loss.pid, exit_text(loss.code)
        )
        for entry in given:
            if entry.is_abandoned:
                self._release(entry)
                continue
            if loss.task in (0, entry.number):
                self._count_death(entry, loss)
            if entry.reply.done():
                entry.worker = None  # the held result is lost: `place` restarts the task
            else:
                self._queue(entry)
        self._start(worker.number)

    def _count_death(self, entry: QueueEntry, loss: Loss) -> None:
        deaths, sample = entry.task.deaths, loss.sample
        deaths[sample] = deaths.get(sample, 0) + 1
        if deaths[sample] < DEATHS:
            return
        error = serialize.pack_error(died(entry.task, sample, loss.pid, loss.code))
        if sample >= 0:
            entry.task.failures[sample] = error
        else:
            entry.answer(Reply("failed", errors=[(entry.task.slot, error)]))


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _write(place: Lease, reply: Reply) -> None:
    """Copy results that a worker has sent as bytes to their place."""
    view = place.view
    for offset, data in reply.copies:
        view[offset : offset + len(data)] = data
    reply.copies = []
