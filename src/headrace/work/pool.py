"""The trainer's side of the workers: hands out tasks, and gives those of a dead worker to another."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import logging
import os
import signal
from enum import Enum
from typing import Any, Protocol

from headrace.errors import WorkerDiedError
from headrace.memory import Lease, Segment
from headrace.tasks import Chain, Finish, Reply, Task
from headrace.torch_compat import packing
from headrace.types import Meters
from headrace.work.orders import DEATHS, address_of, died, order_of, told
from headrace.work.starter import Helper, HelperStarter, Starter
from headrace.work.wire import LoopWire

_TASKS_AT_ONCE = 2  # one is worked on, one waits in the worker's socket
_STARTS = 5  # attempts to start a worker while the helper lives: descriptors may be short for a moment
_START_AGAIN_S = 0.2
_STATUS_S = 1.0  # how long the exit status of a dead worker is waited for

log = logging.getLogger("headrace")


class Workers(Protocol):
    """Whoever works on tasks: processes or threads.

    `pack` may be called in any thread, and gives what `learn` takes; all else is called on the engine's loop.
    """

    async def open(self) -> None: ...

    def pack(self, chain: Chain) -> Any: ...

    def learn(self, number: int, packed: Any) -> None: ...

    def learn_spec(self, number: int, spec: bytes) -> None: ...

    async def run(self, task: Task) -> Reply: ...

    async def place(self, task: Task, place: Lease) -> Reply: ...

    def abandon(self, task: Task) -> None: ...

    def forget_segment(self, number: int) -> None: ...

    async def close(self) -> None: ...


class WorkerState(Enum):
    """starting → idle ⇄ busy → suspect → dead; a suspect has closed its socket or ended, and its status is awaited."""

    STARTING = "starting"
    IDLE = "idle"
    BUSY = "busy"
    SUSPECT = "suspect"
    DEAD = "dead"


class _Worker:
    def __init__(self, number: int, attempts: int) -> None:
        self.number = number
        self.attempts = attempts  # to start it
        self.state = WorkerState.STARTING
        self.pid = 0
        self.pidfd = -1
        self.wire: LoopWire | None = None
        self.tasks: dict[int, _Entry] = {}  # in the order in which they were given
        self.segments: set[int] = set()
        # What it has made and has no place for: batch and position, by the number of the task.
        self.held: dict[int, tuple[int, int]] = {}

    def may_take(self, task: Task) -> bool:
        """Whether it may be given this task now.

        What it holds, or will hold, is placed before it begins something else: nothing may come between the first
        samples and their batch. Only older batches may, for those are what a place may have to wait for.
        """
        if self.wire is None or self.state not in (WorkerState.IDLE, WorkerState.BUSY):
            return False
        if len(self.tasks) >= _TASKS_AT_ONCE:
            return False
        if task.finish is Finish.SCAN:
            return True
        will_hold = any(e.task.place is None for e in self.tasks.values())
        # Where the samples of a batch are not its own yet, the earlier of them may be what it waits for, too.
        at = (task.batch, task.position if task.finish is Finish.SAMPLES else -1)
        return not will_hold and all(at < held for held in self.held.values())


def _load(worker: _Worker) -> int:
    """How much a worker has to do before another task; finding samples takes much less time than making them."""
    return sum(1 if entry.task.finish is Finish.SCAN else 1 + 4 * entry.task.count for entry in worker.tasks.values())


class _Entry:
    """A task in the pool's books, with whoever waits for its reply."""

    def __init__(self, number: int, task: Task, reply: asyncio.Future[Reply]) -> None:
        self.number, self.task, self.reply = number, task, reply
        self.worker: _Worker | None = None
        self.is_abandoned = False

    def answer(self, reply: Reply) -> None:
        if not self.reply.done():
            self.reply.set_result(reply)


class ProcessWorkers:
    """Worker processes that are forked from the helper process.

    Args:
        count: how many.
        helper: the helper process.
        meters: where deaths and busy times are counted.
    """

    def __init__(self, count: int, helper: Helper, meters: Meters) -> None:
        self._count, self._helper, self._meters = count, helper, meters
        self._workers: list[_Worker] = []
        self._by_pid: dict[int, _Worker] = {}
        self._entries: dict[Task, _Entry] = {}
        self._numbers = itertools.count(1)
        self._ready: list[tuple[int, int, int, _Entry]] = []
        self._chains: dict[int, tuple[Segment, tuple[int, ...]]] = {}
        self._specs: dict[int, bytes] = {}
        self._modules: dict[str, int] = {}  # that the chains need, and when their files were written
        self._progress = Segment.create(16 * count)
        self._starter: Starter | None = None
        self._starting: set[asyncio.Task[None]] = set()
        self._failure: Exception | None = None
        self._is_closed = False

    async def open(self) -> None:
        """Start the workers; tasks may be given before they stand."""
        try:
            self._starter = HelperStarter(self._helper, self._on_exit, self._modules)
        except OSError as error:
            self._fail_all(error)
            return
        for number in range(self._count):
            self._start(number)

    def pack(self, chain: Chain) -> tuple[Segment, tuple[int, ...]]:
        """A chain in shared memory, once for all workers.

        Raises:
            Exception: whatever pickling the functions raises.
        """
        try:
            modules: set[str] = set()
            parts = packing.pack_for_workers(chain, None, modules)
        except Exception as error:
            error.add_note(f"stage: work; {_unpackable(chain)} cannot be sent to the workers")
            raise
        self._modules |= packing.files_of(modules)
        segment = Segment.create(packing.packed_size(parts))
        return segment, packing.write(parts, segment.view)

    def learn(self, number: int, packed: tuple[Segment, tuple[int, ...]]) -> None:
        """Make a packed chain known to all workers, also to those that are started later; an older one is forgotten."""
        if number in self._chains:
            self._chains[number][0].close()
        self._chains[number] = packed
        self._specs.pop(number, None)
        for worker in self._workers:
            self._tell_chain(worker, number)

    def learn_spec(self, number: int, spec: bytes) -> None:
        """Make known to all workers in which form a chain's samples are written into slots; none: forget it."""
        self._specs[number] = spec
        for worker in self._workers:
            if worker.wire is not None:
                worker.wire.send(("spec", number, spec))

    async def run(self, task: Task) -> Reply:
        """Have a task worked on; while its reply is "held", the same worker keeps what it made."""
        entry = _Entry(next(self._numbers), task, asyncio.get_running_loop().create_future())
        self._entries[task] = entry
        self._queue(entry)
        try:
            return await self._answer(entry)
        except BaseException:
            self.abandon(task)
            raise

    async def place(self, task: Task, place: Lease) -> Reply:
        """Say where what is held for a task goes; takes the lease over. If its worker died, another begins again."""
        if task.place is not None:
            task.place.release()
        task.place = place
        entry = self._entries[task]
        entry.reply = asyncio.get_running_loop().create_future()
        worker = entry.worker
        if worker is None or worker.wire is None or worker.state is WorkerState.DEAD:
            self._queue(entry)
        else:
            worker.tasks[entry.number] = entry
            worker.held.pop(entry.number, None)
            self._send_segments(worker, [place.segment])
            worker.wire.send(("place", entry.number, address_of(place)))
            self._hand_out()
        try:
            return await self._answer(entry)
        except BaseException:
            self.abandon(task)
            raise

    def abandon(self, task: Task) -> None:
        """Nobody waits for this task any more. What it names is released once no worker can be using it."""
        entry = self._entries.get(task)
        if entry is None or entry.is_abandoned:
            return
        entry.is_abandoned = True
        worker = entry.worker
        if worker is None:
            self._release(entry)
        elif entry.number not in worker.tasks:  # it was held
            worker.held.pop(entry.number, None)
            assert worker.wire is not None
            worker.wire.send(("let_go", entry.number))
            self._release(entry)
            self._hand_out()

    def forget_segment(self, number: int) -> None:
        """A segment is gone: workers unmap it."""
        for worker in self._workers:
            if number in worker.segments and worker.wire is not None:
                worker.segments.discard(number)
                worker.wire.send(("forget", number))

    async def close(self) -> None:
        """End all workers at once."""
        self._is_closed = True
        for starting in self._starting:
            starting.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        for worker in self._workers:
            self._bury(worker)
        if self._starter is not None:
            self._starter.close()
        for entry in list(self._entries.values()):
            self._release(entry)
        for segment, _ in self._chains.values():
            segment.close()
        self._progress.close()

    async def _answer(self, entry: _Entry) -> Reply:
        reply = await entry.reply
        for step, seconds in reply.busy_s.items():
            self._meters.count_work(step, seconds)
        if reply.kind != "held":
            self._release(entry)
        return reply

    def _release(self, entry: _Entry) -> None:
        """The task is over: end its leases, once."""
        if self._entries.pop(entry.task, None) is not None:
            for part in entry.task.parts:
                part.release()
            if entry.task.place is not None:
                entry.task.place.release()

    def _queue(self, entry: _Entry) -> None:
        entry.worker = None
        if self._failure is not None:
            if not entry.reply.done():
                entry.reply.set_exception(self._failure)
            return
        first = 0 if entry.task.finish is Finish.SCAN else 1
        heapq.heappush(self._ready, (first, entry.task.batch, entry.number, entry))
        self._hand_out()

    def _hand_out(self) -> None:
        while self._ready:
            entry = self._ready[0][3]
            if not entry.is_abandoned:
                able = [worker for worker in self._workers if worker.may_take(entry.task)]
                if not able:
                    return
                self._give(min(able, key=_load), entry)
            heapq.heappop(self._ready)

    def _give(self, worker: _Worker, entry: _Entry) -> None:
        assert worker.wire is not None
        task = entry.task
        entry.worker = worker
        worker.tasks[entry.number] = entry
        worker.state = WorkerState.BUSY
        segments = [] if task.place is None else [task.place.segment]
        parts = []
        for part in task.parts:
            description, needed = part.describe()
            parts.append(description)
            segments += needed
        self._send_segments(worker, segments)
        worker.wire.send(("task", order_of(entry.number, task, parts)))

    def _send_segments(self, worker: _Worker, segments: list[Segment]) -> None:
        assert worker.wire is not None
        for segment in segments:
            if segment.number not in worker.segments:
                worker.segments.add(segment.number)
                worker.wire.send(("segment", segment.number, segment.size), [segment.fd])

    def _tell_chain(self, worker: _Worker, number: int) -> None:
        segment, lengths = self._chains[number]
        if worker.wire is not None:
            worker.wire.send(("chain", number, segment.size, lengths), [segment.fd])

    def _start(self, number: int, attempts: int = 1) -> None:
        if self._is_closed:
            return
        worker = _Worker(number, attempts)
        self._workers = [w for w in self._workers if w.number != number] + [worker]
        starting = asyncio.get_running_loop().create_task(self._connect(worker))
        self._starting.add(starting)
        starting.add_done_callback(self._starting.discard)

    async def _connect(self, worker: _Worker) -> None:
        assert self._starter is not None
        try:
            worker.pid, sock = await self._starter.start(worker.number)
        except Exception as error:
            is_short = isinstance(error, OSError) and self._helper.process.poll() is None
            if is_short and worker.attempts < _STARTS:
                asyncio.get_running_loop().call_later(_START_AGAIN_S, self._start, worker.number, worker.attempts + 1)
            else:
                self._fail_all(error)
            return
        self._by_pid[worker.pid] = worker
        worker.wire = LoopWire(
            sock, received=lambda message: self._on_message(worker, message), lost=lambda: self._suspect(worker)
        )
        with contextlib.suppress(AttributeError, OSError):
            worker.pidfd = os.pidfd_open(worker.pid)
            asyncio.get_running_loop().add_reader(worker.pidfd, self._suspect, worker)
        worker.wire.send(("progress", self._progress.size, worker.number), [self._progress.fd])
        for number in self._chains:
            self._tell_chain(worker, number)
        for number, spec in self._specs.items():
            worker.wire.send(("spec", number, spec))
        worker.state = WorkerState.IDLE
        self._meters.count_started()
        self._hand_out()

    def _fail_all(self, error: Exception) -> None:
        """No worker can be started any more: whoever waits, or will, must not wait for ever."""
        self._failure = error
        if isinstance(error, OSError):
            pid, code = self._helper.process.pid, self._helper.process.poll()
            self._failure = WorkerDiedError(
                f"DataLoader worker (pid(s) {pid}) exited unexpectedly: it is the helper process that starts the "
                f"workers ({told(code)}; {error}); make a new loader",
                pid=pid,
                exitcode=code,
            )
        for entry in list(self._entries.values()):
            if not entry.reply.done():
                entry.reply.set_exception(self._failure)

    def _on_message(self, worker: _Worker, message: tuple[int, Reply]) -> None:
        number, reply = message
        entry = worker.tasks.pop(number, None)
        if not worker.tasks and worker.state is WorkerState.BUSY:
            worker.state = WorkerState.IDLE
        if entry is not None:
            if entry.is_abandoned:
                if reply.kind == "held" and worker.wire is not None:
                    worker.wire.send(("let_go", number))
                self._release(entry)
            else:
                if reply.kind == "held":
                    task = entry.task
                    worker.held[number] = task.batch, task.position if task.finish is Finish.SAMPLES else -1
                entry.answer(reply)
        self._hand_out()

    def _suspect(self, worker: _Worker) -> None:
        """Its socket or its process has ended. The helper says how, unless it is gone too."""
        loop = asyncio.get_running_loop()
        if worker.pidfd >= 0:
            loop.remove_reader(worker.pidfd)
        if worker.state not in (WorkerState.SUSPECT, WorkerState.DEAD):
            worker.state = WorkerState.SUSPECT
            with contextlib.suppress(OSError):  # it may have closed its socket only
                if worker.pidfd >= 0:
                    signal.pidfd_send_signal(worker.pidfd, signal.SIGKILL)
            loop.call_later(_STATUS_S, self._on_dead, worker, None)

    def _on_exit(self, pid: int, code: int) -> None:
        worker = self._by_pid.get(pid)
        if worker is not None:
            self._on_dead(worker, code)

    def _on_dead(self, worker: _Worker, code: int | None) -> None:
        if worker.state is WorkerState.DEAD or self._is_closed:
            return
        given = [entry for entry in self._entries.values() if entry.worker is worker]
        running, sample = self._progress_of(worker)
        self._bury(worker)
        self._meters.count_death()
        log.warning("worker %d (pid %d) ended (%s); its work is done again", worker.number, worker.pid, told(code))
        for entry in given:
            if entry.is_abandoned:
                self._release(entry)
                continue
            if running in (0, entry.number):
                self._count_death(entry, sample, worker, code)
            if entry.reply.done():
                entry.worker = None  # held, and lost: `place` begins again
            else:
                self._queue(entry)
        self._start(worker.number)

    def _count_death(self, entry: _Entry, sample: int, worker: _Worker, code: int | None) -> None:
        deaths = entry.task.deaths
        deaths[sample] = deaths.get(sample, 0) + 1
        if deaths[sample] < DEATHS:
            return
        error = died(entry.task, sample, worker.pid, code)
        if sample >= 0:
            entry.task.failures[sample] = packing.pack_error(error)
        else:
            entry.answer(Reply("failed", errors=[(entry.task.slot, packing.pack_error(error))]))

    def _progress_of(self, worker: _Worker) -> tuple[int, int]:
        """(number of the task that it was working on, index of the sample in it)."""
        words = self._progress.view.cast("q")
        return words[2 * worker.number], words[2 * worker.number + 1]

    def _bury(self, worker: _Worker) -> None:
        worker.state = WorkerState.DEAD
        worker.tasks.clear()
        worker.held.clear()
        if worker.wire is not None:
            worker.wire.close()
            worker.wire = None
        if worker.pidfd >= 0:
            asyncio.get_running_loop().remove_reader(worker.pidfd)
            os.close(worker.pidfd)
            worker.pidfd = -1
        self._by_pid.pop(worker.pid, None)
        words = self._progress.view.cast("q")
        words[2 * worker.number], words[2 * worker.number + 1] = 0, -1


def _unpackable(chain: Chain) -> str:
    """The name of what of a chain does not pickle."""
    functions = [(step.name, step.fn) for step in (*chain.steps, *chain.after)]
    for name, function in (*functions, ("collate_fn", chain.collate), ("worker_init_fn", chain.init)):
        try:
            packing.pack(function)
        except Exception:
            return name
    return "what is done in them"
