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
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from headrace.drop_in.workers.batch_memory import BatchMemory
from headrace.drop_in.workers.messages import (
    COLLATE_NS,
    MADE_NS,
    START_NS,
    UNTOLD,
    Result,
    Start,
    StateAfter,
    WorkerConfig,
    WorkerProgress,
    packed_index,
    segment_of,
)
from headrace.drop_in.workers.records import (
    Answers,
    BatchTask,
    Death,
    MadeBatch,
    PoolLink,
    StateQuestion,
    WorkerRecord,
    answer_for_lost,
    judge,
)
from headrace.drop_in.workers.starter import WorkerHandle, WorkerStarter
from headrace.memory import Segment
from headrace.processes.stopped import PATIENCE, Watch
from headrace.torch_compat.stateful import PackedStates
from headrace.wakeup import Wakeup
from headrace.work.messages import exit_text

_STOPPED = "; it was stopped while it was waited for, and so it was killed"
_END_S = 1.0  # longest wait for the end of a worker that has closed its socket
log = logging.getLogger("headrace")


class PoolEvents:
    """Events of workers' sockets, of their starter, and of closing. An event is a function."""

    def __init__(self, starter: WorkerStarter) -> None:
        self._starter = starter
        self.selector = selectors.DefaultSelector()
        self._wakeup = Wakeup()
        self.selector.register(self._wakeup, selectors.EVENT_READ, self._wakeup.clear)
        self._listened_to = -1, 0  # the starter's descriptor, and the events
        self._is_waited_for = self._is_closed = False

    def fileno(self) -> int:
        descriptor: int = self.selector.fileno()
        return descriptor

    def listen_to_starter(self, on_news: Callable[[], None]) -> None:
        fd = self._starter.fileno()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._starter.awaits_writing else 0)
        if (fd, events) != self._listened_to:
            if self._listened_to[0] >= 0:
                self.selector.unregister(self._listened_to[0])
            if fd >= 0:
                self.selector.register(fd, events, on_news)
            self._listened_to = fd, events

    def __enter__(self) -> None:
        """Keep the selector open while a thread waits."""
        self._is_waited_for = True

    def __exit__(self, *_: object) -> None:
        self._is_waited_for = False
        self._close_unless_waited_for()

    def wait(self, timeout_s: float | None) -> list[Callable[[], None]]:
        """Return the events after at most `timeout_s` and at most `PATIENCE.each_s` seconds."""
        each_s = PATIENCE.each_s
        events = self.selector.select(each_s if timeout_s is None else min(timeout_s, each_s))
        return [key.data for key, _ in events]

    def close(self) -> None:
        self._is_closed = True
        self._wakeup.set()
        self._close_unless_waited_for()

    def _close_unless_waited_for(self) -> None:
        if self._is_closed and not self._is_waited_for:
            self.selector.close()


class TorchWorkerPool:
    """The workers of one iterator. One thread may send while another receives.

    Args:
        limit: Maximum number of batches under way.

    Attributes:
        every: Workers send states after this number of batches. 0: never.
        begun: Initial state in this epoch of each worker's copy of the data set, once known.
    """

    def __init__(self, config: WorkerConfig, starter: WorkerStarter, limit: int) -> None:
        self._config, self._starter = config, starter
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._events = PoolEvents(starter)
        self._inbox: deque[MadeBatch] = deque()
        self._epoch = self.every = 0
        self._is_closed = False
        self._watcher = Watch()
        self._serials = itertools.count(1)
        self._workers = [WorkerRecord(number) for number in range(config.num_workers)]
        self.begun: Answers = [None] * config.num_workers
        self.closing: Callable[[], None] | None = None
        self._deaths = 0
        self._states: Answers = []  # answers of `ask_now`
        self._question: StateQuestion | None = None  # the open question
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
        return self._events.fileno()

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
            with self._events:
                self._wait(timeout_s)
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

    def ask_begun(self) -> None:
        """Wait until `begun` is complete for all workers that can still answer."""
        self._ask("begin", self.begun)

    def ask_now(self) -> Answers:
        """Return the states of all workers once they have made all batches sent."""
        self._states = [None] * len(self._workers)
        self._ask("tell", self._states)
        return self._states

    def _ask(self, name: str, answers: Answers) -> None:
        """Ask workers without an answer, and wait while they can answer. Lost states become errors."""
        with self._lock:
            self._question = question = StateQuestion(name, answers)
            asked = question.unanswered(self._workers)
            for worker in asked:
                self._put_question(worker)
        try:
            with self._events:
                while not self._is_closed and any(worker.link for worker in question.unanswered(asked)):
                    self._wait(None)
        finally:
            self._question = None
        answer_for_lost(self._workers, answers)

    def _put_question(self, worker: WorkerRecord) -> None:
        if self._question is not None and self._question.unanswered([worker]):
            worker.tell((self._question.name,))

    def reset(self, shared_seed: int | None) -> None:
        """Start another epoch.

        Workers still make all batches under way, as torch's do, so that their random numbers are equal.
        """
        self._mourn_idle()
        with self._lock:
            self._epoch += 1
            self.begun = [None] * len(self._workers)
            while self._inbox:
                self.drop(self._inbox.popleft())
            for worker in self._workers:
                worker.idle_deaths = 0
                if worker.link is None:
                    worker.failure, worker.is_mourned, worker.start = None, False, None
                    self._start(worker)
                worker.tell(("reset", shared_seed, self._epoch))

    def _mourn_idle(self) -> None:
        """Handle deaths that happened while no thread waited."""
        while not self._is_closed and self._events.wait(0):
            self._wait(0)

    def counted(self) -> dict[str, int]:
        """Return the total nanoseconds of all workers by step, and the number of deaths."""
        with self._lock:
            made, collate, start = map(self._progress.spent_ns, (MADE_NS, COLLATE_NS, START_NS))
        return {"samples": max(0, made - collate), "collate": collate, "start": start, "deaths": self._deaths}

    def close(self) -> None:
        """Make all workers end after their current tasks, without waiting for them."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            answer_for_lost(self._workers, self.begun)
        if self._pid == os.getpid():
            self._progress.have_all_end()
        if self.closing is not None:
            self.closing()
        for worker in self._workers:
            if worker.link is not None:
                worker.link.close()
        self._starter.close()
        self.places.close()
        self._progress.close()
        self._events.close()

    def _wait(self, timeout_s: float | None) -> None:
        events = self._events.wait(timeout_s)
        if not events:
            self._look()
        for handle in events:
            with self._lock:
                if self._is_closed:
                    return
                handle()

    def _look(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            is_asked = self._question is not None
            owing = {worker.handle.pid: worker for worker in self._workers if worker.handle and worker.owes(is_asked)}
            for pid in self._watcher.look(pid for pid in owing if pid is not None):
                owing[pid].how = _STOPPED
                self._on_death(owing[pid])
            for handle in self._starter.look():
                for worker in self._workers:
                    if worker.handle is handle and worker.link is not None:
                        worker.part()
                        self._begin_again(worker)

    # Starting.

    def _start(self, worker: WorkerRecord) -> None:
        worker.handle, sock = self._starter.start(worker.number, worker.starts)
        self._events.listen_to_starter(self._on_news)
        worker.starts += 1
        worker.known, worker.spec, worker.made = set(), b"", None
        readable, ended = partial(self._on_readable, worker), partial(self._on_death, worker)
        worker.link = PoolLink(sock, self._events.selector, readable, ended)
        worker.tell(*self._progress.place_of(worker.number))
        for message, descriptors in self._starter.greeting:
            worker.tell(message, descriptors, are_kept=True)
        if self.every:
            worker.tell(("every", self.every))
        if self._epoch or worker.start is not None:
            worker.tell(("start", self._epoch, worker.start))
        worker.watch()

    def _on_news(self) -> None:
        self._starter.pump()
        self._events.listen_to_starter(self._on_news)
        for worker in self._workers:
            worker.watch()

    # Sending.

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
        assert worker.link is not None
        try:
            self._take_in(worker, worker.link.receive())
        except EOFError:
            self._on_death(worker)

    def _take_in(self, worker: WorkerRecord, messages: list[Any]) -> None:
        assert worker.link is not None
        for kind, *rest in messages:
            if kind == "made":
                self._on_made(worker, *rest)
            elif kind == "spec":
                (worker.spec,) = rest
            elif kind == "begun":
                self._on_begun(worker, *rest)
            elif kind == "states":
                self._on_states(worker, *rest)
            else:
                number, size = rest
                worker.made = Segment(number, worker.link.take_descriptor(), size)
                self.places.add(worker.made)
                worker.known.add(number)

    def _on_begun(self, worker: WorkerRecord, epoch: int, blob: PackedStates | None) -> None:
        if epoch == self._epoch:
            self.begun[worker.number] = self.begun[worker.number] or (blob,)
        worker.goes_on_from(blob)

    def _on_states(self, worker: WorkerRecord, blob: PackedStates | None) -> None:
        self._states[worker.number] = (blob,)
        worker.goes_on_from(blob)

    def _on_made(self, worker: WorkerRecord, serial: int, result: Result, state: StateAfter = UNTOLD) -> None:
        task = worker.tasks.pop(serial, None)
        if task is None:
            self._on_second_answer(worker, serial)
            return
        worker.goes_on_from(*state)
        worker.idle_deaths = 0
        used = segment_of(result)
        made, worker.made = worker.made, None
        if made is not None and made.number != used:  # the batch failed after the segment was created
            self.places.unused(made, worker.number, is_too_small=False)
        if task.place is None or task.place.number != used:
            self._leave_place(worker, task, is_too_small=used is not None)
        if used is not None:
            self.places.filled(used, worker.number)
        self._answer(worker, task, result, state)

    def _on_second_answer(self, worker: WorkerRecord, serial: int) -> None:
        made, worker.made = worker.made, None
        if made is not None:
            self.places.unused(made, worker.number, is_too_small=False)
        log.warning("worker %d has answered a second time (%d); that is left out", worker.number, serial)

    def _leave_place(self, worker: WorkerRecord, task: BatchTask, *, is_too_small: bool = False) -> None:
        place, task.place = task.place, None
        self.places.left(place, worker.number, is_too_small=is_too_small)

    def _answer(self, worker: WorkerRecord, task: BatchTask, result: Result, state: StateAfter = UNTOLD) -> None:
        made = MadeBatch(task.batch, worker.number, result, worker.spec, *state)
        if task.epoch == self._epoch:
            self._inbox.append(made)
        else:
            self.drop(made)

    def drop(self, made: MadeBatch) -> None:
        if (segment := segment_of(made.result)) is not None:
            self.places.give_back(segment)

    # Deaths.

    def _on_death(self, worker: WorkerRecord) -> None:
        assert worker.link is not None
        assert worker.handle is not None
        self._deaths += 1
        with contextlib.suppress(EOFError):  # messages sent before its death count
            while messages := worker.link.receive():
                self._take_in(worker, messages)
        worker.handle.kill()  # it may only have closed its socket
        worker.handle.join(_END_S)
        pid, code = worker.handle.pid, worker.handle.exitcode
        how, worker.how = worker.how, ""
        worker.part()
        given_up = judge(worker, Death(pid, code, how), self._config, *self._progress.taken(worker.number))
        if given_up is not None:
            serial, error = given_up
            task = worker.tasks.pop(serial)
            self._leave_place(worker, task)
            self._answer(worker, task, ("died", error))
        if worker.failure is not None:
            lost, worker.tasks = worker.tasks, {}
            for task in lost.values():
                self._leave_place(worker, task)
                self._answer(worker, task, self._death_of(worker))
            return
        self._begin_again(worker)
        warnings.warn(
            f"DataLoader worker {worker.number} (pid {pid}) exited unexpectedly ({exit_text(code)}{how}); "
            "another one makes its batches again",
            RuntimeWarning,
            stacklevel=2,
        )

    def _begin_again(self, worker: WorkerRecord) -> None:
        self._start(worker)
        for serial, task in worker.tasks.items():
            self._leave_place(worker, task)
            self._give(worker, serial, task)
        self._put_question(worker)

    def _death_of(self, worker: WorkerRecord) -> Result:
        """Return a failed worker's result: its error, then for iterable data the end."""
        if self._config.is_iterable and worker.is_mourned:
            return ("end",)
        worker.is_mourned = True
        assert worker.failure is not None
        return "died", worker.failure
