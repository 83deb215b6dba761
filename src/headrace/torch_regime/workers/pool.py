"""The trainer's side of workers for torch's data sets: sends tasks and receives batches.

It has no thread and no event loop. The thread that wants a batch waits in `receive`, as with torch's loader.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import selectors
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace._util.shared_memory import Segment
from headrace._util.wakeup import Wakeup
from headrace.errors import OptionError, WorkerDiedError
from headrace.observe import LoaderMeters
from headrace.torch_compat import serialize
from headrace.torch_compat.stateful import PackedStates, failed, is_known
from headrace.torch_regime.workers.starting import WorkerHandle, WorkerStarter
from headrace.torch_regime.workers.worker_main import (
    UNTOLD,
    Result,
    Start,
    StateAfter,
    WorkerConfig,
    WorkerProgress,
    packed_index,
    segment_of,
    unpacked_index,
)
from headrace.workers.failures import PackedError
from headrace.workers.forkserver.fd_socket import PATIENCE, PolledWire, Watch
from headrace.workers.tasks import DEATHS, exit_text

_FREE_MOST = 2  # in addition to batches under way: the trainer usually holds as many


class BatchMemory:
    """The segments of one pool, by number in `segments`.

    Workers create segments on demand. A segment stays with the worker that filled it, so that few workers map it. It
    goes to another worker only if there are enough segments.

    Args:
        limit: Maximum number of batches under way.
        forget: Called with the number of a deleted segment, so that workers unmap it.
    """

    def __init__(self, workers: int, limit: int, forget: Callable[[int], None]) -> None:
        self.segments: dict[int, Segment] = {}
        self.unlock_pages: Callable[[int], None] = lambda _: None  # called before a segment is closed
        self._free: list[list[Segment]] = [[] for _ in range(workers)]
        self._limit, self._forget = limit, forget
        self._out: dict[int, int] = {}  # worker by number of a segment that the trainer holds
        self._promised = 0
        self._returned: deque[int] = deque()
        self._retired: set[int] = set()

    @property
    def nbytes(self) -> int:
        return sum(segment.size for segment in self.segments.values())

    def add(self, segment: Segment) -> None:
        self.segments[segment.number] = segment

    def free_for(self, worker: int) -> Segment | None:
        """Return a free segment. None: the worker may create one, reserved until `settled`."""
        self._take_back()
        if self._free[worker]:
            return self._free[worker].pop()
        found = None
        if len(self.segments) + self._promised >= self._limit + _FREE_MOST:
            found = next((free.pop() for free in self._free if free), None)
        self._promised += found is None
        return found

    def settled(self) -> None:
        """Record that a worker without a free segment has created one, or needs none."""
        self._promised -= 1

    def filled(self, number: int, worker: int) -> None:
        self._out[number] = worker

    def unused(self, segment: Segment, worker: int, *, is_too_small: bool) -> None:
        if is_too_small:
            self._discard(segment)
        else:
            self._free[worker].append(segment)

    def left(self, place: Segment | None, worker: int, *, is_too_small: bool) -> None:
        """Record that a batch did not use the result of `free_for`."""
        if place is None:
            self.settled()
        else:
            self.unused(place, worker, is_too_small=is_too_small)

    def give_back(self, number: int) -> None:
        """Return a segment without views. Safe in any thread and inside garbage collection."""
        self._returned.append(number)

    def retire(self, number: int) -> None:
        """Never reuse a segment: a forked process has views of it, whose end cannot be observed."""
        self._retired.add(number)

    def close(self) -> None:
        """Close all segments. Views that the trainer still has keep their memory."""
        for segment in self.segments.values():
            segment.close()
        self.segments.clear()
        self._forget = self.unlock_pages = lambda _: None  # their owners refer to this object

    def _take_back(self) -> None:
        while self._returned:
            number = self._returned.popleft()
            worker = self._out.pop(number, None)
            if worker is None or number not in self.segments:
                continue
            if number in self._retired:
                self._discard(self.segments[number])
            else:
                self._free[worker].append(self.segments[number])

    def _discard(self, segment: Segment) -> None:
        self.unlock_pages(segment.number)
        del self.segments[segment.number]
        self._retired.discard(segment.number)
        segment.close()
        self._forget(segment.number)


LOST = (
    "the workers have ended, and with them what their copies of the data set carry from one epoch into the next: "
    "ask for a state before close()"
)
_STOPPED = "; it was stopped while it was waited for, and so it was killed"
_END_S = 1.0  # longest wait for the end of a worker that has closed its socket
log = logging.getLogger("headrace")

Answers = list[tuple[PackedStates | None] | None]
"""States of each worker's copy of the data set, or None while unknown."""


@dataclass(slots=True)
class BatchTask:
    batch: int
    epoch: int
    index: Any
    place: Segment | None = None
    deaths: dict[int, int] = field(default_factory=dict)  # number of workers that died at it, by the sample's index

    def describe(self, sample: int, *, is_batch: bool) -> str:
        index = unpacked_index(self.index)
        if sample < 0:
            return f"batch {self.batch}, before or after its samples {index!r:.100}"
        return f"sample {(list(index)[sample] if is_batch else index)!r:.100} of batch {self.batch}"


class WorkerRecord:
    """A worker, and the one that replaces it when it dies."""

    def __init__(self, number: int, selector: selectors.BaseSelector) -> None:
        self.number, self._selector = number, selector
        self.starts = 0
        self.idle_deaths = 0  # consecutive deaths without a task
        self.handle: WorkerHandle | None = None
        self.wire: PolledWire | None = None
        self.sentinel = -1  # duplicate of the handle's
        self.known: set[int] = set()  # segments it has mapped
        self.tasks: dict[int, BatchTask] = {}  # in order of execution
        self.start: Start | None = None  # resume point of a replacement
        self.made: Segment | None = None  # a segment it has created for its next result
        self.failure: PackedError | None = None  # reason for not restarting it
        self.is_mourned = False  # the failure was returned once
        self.how = ""  # cause of its end, in addition to the exit code

    def connect(self, handle: WorkerHandle, wire: PolledWire) -> None:
        """Watch a new worker: its messages, and its end, even if another process holds its socket open."""
        self.handle, self.wire = handle, wire
        self.starts += 1
        self.known, self.made = set(), None
        self._selector.register(wire, selectors.EVENT_READ, (self, self.starts))
        if handle.sentinel >= 0:
            self.sentinel = os.dup(handle.sentinel)
            self._selector.register(self.sentinel, selectors.EVENT_READ, (self, self.starts))

    def part(self) -> None:
        """Close the connection, which is not watched any more."""
        if self.wire is not None:
            self._selector.unregister(self.wire)
        if self.sentinel >= 0:
            self._selector.unregister(self.sentinel)
        self.close()

    def close(self) -> None:
        if self.wire is not None:
            self.wire.close()
            self.wire = None
        if self.sentinel >= 0:
            os.close(self.sentinel)
            self.sentinel = -1

    def tell(self, message: object, descriptors: Sequence[int] = (), *, are_kept: bool = False) -> None:
        if self.wire is not None and not self.wire.send(message, descriptors, are_kept=are_kept):
            self._selector.modify(self.wire, selectors.EVENT_READ | selectors.EVENT_WRITE, (self, self.starts))

    def flush(self) -> None:
        if self.wire is not None and self.wire.flush():
            self._selector.modify(self.wire, selectors.EVENT_READ, (self, self.starts))

    def show(self, segment: Segment) -> None:
        if segment.number not in self.known:
            self.known.add(segment.number)
            self.tell(("segment", segment.number, segment.size), [segment.fd])

    def forget(self, number: int) -> None:
        if number in self.known:
            self.known.discard(number)
            self.tell(("forget", number))

    def resume_from(self, blob: PackedStates | None, is_over: bool = False) -> None:
        if is_known(blob):
            self.start = Start(blob, is_over)


@dataclass(frozen=True, slots=True)
class MadeBatch:
    """A worker's result for a batch, with the state of its data set after the batch."""

    batch: int
    worker: int
    result: Result
    blob: PackedStates | None = None
    is_over: bool = False


class TorchWorkerPool:
    """The workers of one iterator. One thread may send while another receives.

    Args:
        limit: Maximum number of batches under way.

    Attributes:
        every: Workers send states after this number of batches. 0: never.
        initial: State of each worker's copy of the data set at the start of this epoch, once known.
    """

    def __init__(self, config: WorkerConfig, starter: WorkerStarter, limit: int, meters: LoaderMeters) -> None:
        self._config, self._starter, self._meters = config, starter, meters
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._selector = selectors.DefaultSelector()
        self._wakeup = Wakeup()
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        self._is_waited_for = False  # a thread waits, or will wait again: the selector stays open
        self._inbox: deque[MadeBatch] = deque()
        self._epoch = self.every = 0
        self._is_closed = False
        self._watcher = Watch()
        self._serials = itertools.count(1)
        self._workers = [WorkerRecord(number, self._selector) for number in range(config.num_workers)]
        self.initial: Answers = [None] * config.num_workers
        self._states: Answers = []  # answers of `ask_now`
        self._question: tuple[str, Answers] | None = None  # the open question to all workers, with the answers so far
        self.places = BatchMemory(config.num_workers, limit, self._forget)
        self._progress = WorkerProgress(config.num_workers)
        try:
            for worker in self._workers:
                self._start(worker)
        except BaseException:
            self.close()
            raise

    @property
    def handles(self) -> list[WorkerHandle | None]:
        return [worker.handle for worker in self._workers]

    def fileno(self) -> int:
        """Return the descriptor to wait on, at most `PATIENCE.each_s` long, before `receive`."""
        descriptor: int = self._selector.fileno()
        return descriptor

    def send(self, batch: int, number: int, index: object) -> None:
        with self._lock:
            if self._is_closed:
                return
            worker = self._workers[number]
            task = BatchTask(batch, self._epoch, packed_index(index))
            if worker.failure is not None:
                self._answer(worker, task, self._death_of(worker))
                return
            serial = next(self._serials)
            worker.tasks[serial] = task
            self._give(worker, serial, task)

    def receive(self, timeout_s: float | None) -> MadeBatch | None:
        """Return a result, or None after `timeout_s` seconds. A `timeout_s` of None: no limit.

        Raises:
            EOFError: the pool was closed.
        """
        if not self._inbox:
            if self._is_closed:
                raise EOFError
            self._wait_while(timeout_s, lambda: False)
        return self._inbox.popleft() if self._inbox else None

    def keep_states(self, every: int) -> None:
        """Make each worker send states after this number of its following batches."""
        with self._lock:
            self.every = every
            for worker in self._workers:
                worker.tell(("every", every))

    def go_on(self, starts: Sequence[Start]) -> None:
        with self._lock:
            for worker, start in zip(self._workers, starts, strict=True):
                worker.start = start
                worker.tell(("start", self._epoch, start))

    def ask_initial(self) -> None:
        """Wait until `initial` is complete for all workers that can still answer."""
        self._ask("begin", self.initial)

    def ask_now(self) -> Answers:
        """Return the states of all workers once they have made all batches sent."""
        self._states = [None] * len(self._workers)
        self._ask("tell", self._states)
        return self._states

    def _ask(self, name: str, answers: Answers) -> None:
        """Ask workers without an answer, and wait while they can answer. Lost states become errors."""
        with self._lock:
            self._question = name, answers
            asked = [worker for worker in self._workers if answers[worker.number] is None]
            for worker in asked:
                worker.tell((name,))
        try:
            self._wait_while(None, lambda: any(answers[worker.number] is None and worker.wire for worker in asked))
        finally:
            self._question = None
        _answer_for_lost(self._workers, answers)

    def reset(self, shared_seed: int | None) -> None:
        """Start another epoch.

        Workers still make all batches under way, as torch's do, so that their random numbers are equal.
        """
        while not self._is_closed and self._wait(0):  # deaths that happened while no thread waited
            pass
        with self._lock:
            self._epoch += 1
            self.initial = [None] * len(self._workers)
            while self._inbox:
                self.drop(self._inbox.popleft())
            for worker in self._workers:
                worker.idle_deaths = 0
                if worker.wire is None:
                    worker.failure, worker.is_mourned, worker.start = None, False, None
                    self._start(worker)
                worker.tell(("reset", shared_seed, self._epoch))

    def close(self) -> None:
        """Make all workers end after their current tasks, without waiting for them."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            _answer_for_lost(self._workers, self.initial)
        if self._pid == os.getpid():
            self._progress.have_all_end()
        for worker in self._workers:
            worker.close()
        self._starter.close()
        self.places.close()
        self._progress.close()
        self._wakeup.set()
        self._close_selector()

    def _close_selector(self) -> None:
        if self._is_closed and not self._is_waited_for:
            self._selector.close()

    def _wait_while(self, timeout_s: float | None, is_needed: Callable[[], bool]) -> None:
        """Handle events once, and again while `is_needed`, unless the pool is closed."""
        self._is_waited_for = True
        try:
            while not self._is_closed:
                self._wait(timeout_s)
                if not is_needed():
                    break
        finally:
            self._is_waited_for = False
            self._close_selector()

    def _wait(self, timeout_s: float | None) -> bool:
        """Handle the events of at most `timeout_s` and at most `PATIENCE.each_s` seconds. False: there were none."""
        each_s = PATIENCE.each_s
        events = self._selector.select(each_s if timeout_s is None else min(timeout_s, each_s))
        if not events:
            self._look()
        for key, ready in events:
            with self._lock:
                if self._is_closed:
                    return True
                worker, starts = key.data or (None, 0)
                if worker is None:
                    self._wakeup.clear()
                elif worker.wire is None or worker.starts != starts:
                    pass  # handled: a death may cause two events
                elif key.fileobj is not worker.wire:
                    self._on_death(worker)
                else:
                    if ready & selectors.EVENT_WRITE:
                        worker.flush()
                    self._on_readable(worker)
        return bool(events)

    def _look(self) -> None:
        """Kill stopped workers from which an answer is awaited."""
        with self._lock:
            if self._is_closed:
                return
            owing = {
                worker.handle.pid: worker
                for worker in self._workers
                if worker.handle is not None and worker.sentinel >= 0 and worker.wire is not None
                if worker.tasks or self._question is not None
            }
            for pid in self._watcher.look(pid for pid in owing if pid is not None):
                owing[pid].how = _STOPPED
                self._on_death(owing[pid])

    # Sending.

    def _start(self, worker: WorkerRecord) -> None:
        worker.connect(*self._starter.start(worker.number, worker.starts))
        worker.tell(*self._progress.place_of(worker.number))
        for message, descriptors in self._starter.greeting:
            worker.tell(message, descriptors, are_kept=True)
        if self.every:
            worker.tell(("every", self.every))
        if self._epoch or worker.start is not None:
            worker.tell(("start", self._epoch, worker.start))

    def _give(self, worker: WorkerRecord, serial: int, task: BatchTask) -> None:
        if task.place is None:
            task.place = self.places.free_for(worker.number)
        place = None
        if task.place is not None:
            place = task.place.number, task.place.size
            worker.show(task.place)
        worker.tell(("make", serial, task.index, place))

    def _forget(self, number: int) -> None:
        for worker in self._workers:
            worker.forget(number)

    # Receiving.

    def _on_readable(self, worker: WorkerRecord) -> None:
        assert worker.wire is not None
        try:
            self._take_in(worker, worker.wire.receive())
        except EOFError:
            self._on_death(worker)

    def _take_in(self, worker: WorkerRecord, messages: list[Any]) -> None:
        assert worker.wire is not None
        for kind, *rest in messages:
            if kind == "made":
                self._on_made(worker, *rest)
            elif kind == "started":
                self._on_started(worker, *rest)
            elif kind == "states":
                (blob,) = rest
                self._states[worker.number] = (blob,)
                worker.resume_from(blob)
            else:
                number, size = rest
                worker.made = Segment(number, worker.wire.take_descriptor(), size)
                self.places.add(worker.made)
                worker.known.add(number)

    def _on_started(self, worker: WorkerRecord, epoch: int, blob: PackedStates | None) -> None:
        if epoch == self._epoch:
            self.initial[worker.number] = self.initial[worker.number] or (blob,)
        worker.resume_from(blob)

    def _on_made(
        self, worker: WorkerRecord, serial: int, result: Result, spent_ns: dict[str, int], state: StateAfter = UNTOLD
    ) -> None:
        for step, ns in spent_ns.items():
            self._meters.count_work(step, ns / 1e9)
        task = worker.tasks.pop(serial, None)
        used = None if task is None else segment_of(result)
        made, worker.made = worker.made, None
        if made is not None and made.number != used:  # the batch failed after the segment was created
            self.places.unused(made, worker.number, is_too_small=False)
        if task is None:
            log.warning("worker %d has answered task %d a second time, which is ignored", worker.number, serial)
            return
        worker.resume_from(*state)
        worker.idle_deaths = 0
        if task.place is None or task.place.number != used:
            self._leave_place(worker, task, is_too_small=used is not None)
        if used is not None:
            self.places.filled(used, worker.number)
        self._answer(worker, task, result, state)

    def _leave_place(self, worker: WorkerRecord, task: BatchTask, *, is_too_small: bool = False) -> None:
        place, task.place = task.place, None
        self.places.left(place, worker.number, is_too_small=is_too_small)

    def _answer(self, worker: WorkerRecord, task: BatchTask, result: Result, state: StateAfter = UNTOLD) -> None:
        made = MadeBatch(task.batch, worker.number, result, *state)
        if task.epoch == self._epoch:
            self._inbox.append(made)
        else:
            self.drop(made)

    def drop(self, made: MadeBatch) -> None:
        if (segment := segment_of(made.result)) is not None:
            self.places.give_back(segment)

    # Deaths.

    def _on_death(self, worker: WorkerRecord) -> None:
        assert worker.wire is not None
        assert worker.handle is not None
        self._meters.count_death()
        with contextlib.suppress(EOFError):  # messages sent before its death count
            while messages := worker.wire.receive():
                self._take_in(worker, messages)
        worker.handle.kill()  # it may only have closed its socket
        worker.handle.join(_END_S)
        pid, code = worker.handle.pid, worker.handle.exitcode
        how, worker.how = worker.how, ""
        worker.part()
        self._judge(worker, pid, code, how)
        if worker.failure is not None:
            lost, worker.tasks = worker.tasks, {}
            for task in lost.values():
                self._leave_place(worker, task)
                self._answer(worker, task, self._death_of(worker))
            return
        self._start(worker)
        for serial, task in worker.tasks.items():
            self._leave_place(worker, task)
            self._give(worker, serial, task)
        if self._question is not None and self._question[1][worker.number] is None:
            worker.tell((self._question[0],))
        warnings.warn(
            f"DataLoader worker {worker.number} (pid {pid}) exited unexpectedly ({exit_text(code)}{how}); "
            "another one makes its batches again",
            RuntimeWarning,
            stacklevel=2,
        )

    def _judge(self, worker: WorkerRecord, pid: int | None, code: int | None, how: str) -> None:
        """Count a death. Give up the task that has ended too many workers, or a worker that must not be restarted."""
        config, (serial, sample) = self._config, self._progress.taken(worker.number)
        task = worker.tasks.get(serial)
        if config.is_iterable:
            worker.failure = _death(pid, code, f"{how}; its place in the data set is lost with it")
        elif task is None:
            worker.idle_deaths += 1
            if worker.idle_deaths >= DEATHS:
                worker.failure = _death(pid, code, f"{how}; {DEATHS} did so before they made a batch")
        else:
            task.deaths[sample] = task.deaths.get(sample, 0) + 1
            if task.deaths[sample] >= DEATHS:
                which = task.describe(sample, is_batch=config.auto_collation)
                del worker.tasks[serial]
                self._leave_place(worker, task)
                error = _death(pid, code, f"; {DEATHS} did so, all on {which}", task.batch)
                self._answer(worker, task, ("died", error))

    def _death_of(self, worker: WorkerRecord) -> Result:
        """Return a failed worker's result: its error, then for iterable data the end."""
        if self._config.is_iterable and worker.is_mourned:
            return ("end",)
        worker.is_mourned = True
        assert worker.failure is not None
        return "died", worker.failure


def _answer_for_lost(workers: Iterable[WorkerRecord], answers: Answers) -> None:
    """Answer for workers that cannot and had a state: with an error that the state is lost."""
    for worker in workers:
        if answers[worker.number] is None and worker.start is not None:
            answers[worker.number] = (failed(OptionError(LOST), "raised where the state was asked for"),)


def _death(pid: int | None, code: int | None, text: str, batch: int | None = None) -> PackedError:
    return serialize.pack_error(
        WorkerDiedError(
            f"DataLoader worker (pid(s) {pid}) exited unexpectedly ({exit_text(code)}){text}",
            pid=pid or 0,
            exitcode=code,
            batch=batch,
        )
    )
