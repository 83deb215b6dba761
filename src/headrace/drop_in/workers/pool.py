"""The trainer's side of the torch regime's workers: sends them whole batches to make, and takes in what they made.

There is no thread and no loop behind it. Whoever wants a batch waits in `receive`, as with torch's own loader.
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
from typing import Any

from headrace.drop_in.workers.batch_memory import BatchMemory
from headrace.drop_in.workers.messages import Result, Start, WorkerConfig, packed_index, segment_of, unpacked_index
from headrace.drop_in.workers.records import BatchTask, MadeBatch, WorkerRecord, death
from headrace.drop_in.workers.starter import WorkerHandle, WorkerStarter
from headrace.drop_in.workers.worker_main import WORDS
from headrace.errors import OptionError
from headrace.memory import Segment
from headrace.processes.stopped import PATIENCE, Watch
from headrace.processes.wire import PolledWire
from headrace.torch_compat.stateful import PackedStates, failed, is_known
from headrace.wakeup import Wakeup
from headrace.work.messages import DEATHS, exit_text

LOST = (
    "the workers have ended, and with them what their copies of the data set carry from one epoch into the next: "
    "ask for a state before close()"
)
_STOPPED = "; it was stopped while it was waited for, and so it was killed"
_END_S = 1.0  # how long the end of a worker is waited for that has closed its socket
log = logging.getLogger("headrace")

_States = list[tuple[PackedStates | None] | None]  # of each worker, where it is known


class TorchWorkerPool:
    """The workers of one iterator. One thread may send while another receives.

    Args:
        config: what they work on.
        starter: starts them.
        limit: how many batches are under way at most.

    Attributes:
        places: where batches lie in shared memory.
        every: after so many of its batches a worker tells its state; 0: never.
        closing: called once, when this is closed.
        begun: of each worker, once it is known: the state in which its copy of the data set began this epoch.
    """

    def __init__(self, config: WorkerConfig, starter: WorkerStarter, limit: int) -> None:
        self._config, self._starter = config, starter
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._selector = selectors.DefaultSelector()
        self._wakeup = Wakeup()
        self._selector.register(self._wakeup, selectors.EVENT_READ, self._wakeup.clear)
        self._inbox: deque[MadeBatch] = deque()
        self._epoch = self.every = 0
        self._is_receiving = self._is_closed = False
        self._watcher = Watch()
        self._listened_to = -1, 0  # the starter's descriptor, and what for
        self._serials = itertools.count(1)
        self._workers = [WorkerRecord(number) for number in range(config.num_workers)]
        self.begun: _States = [None] * config.num_workers
        self.closing: Callable[[], None] | None = None
        self._deaths = 0
        self._states: _States = []  # in what state they are when they were asked
        self._question: tuple[str, _States] | None = None  # that is open, and the answers so far
        self.places = BatchMemory(config.num_workers, limit, self._forget)
        self._words = Segment.create(8 * (1 + WORDS * config.num_workers))
        self._numbers = self._words.view.cast("q")
        try:
            for worker in self._workers:
                self._start(worker)
        except BaseException:
            self.close()
            raise

    @property
    def handles(self) -> list[WorkerHandle | None]:
        """The workers, with the face of multiprocessing's processes."""
        return [worker.handle for worker in self._workers]

    def fileno(self) -> int:
        """What to wait on until there may be something to receive; `PATIENCE.each_s` long, for `receive` to look."""
        descriptor: int = self._selector.fileno()
        return descriptor

    def send(self, batch: int, number: int, index: object) -> None:
        """Have worker `number` make a batch."""
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
        """What came of a batch; None where nothing has after `timeout_s` seconds (None: wait as long as it takes).

        Raises:
            EOFError: the pool was closed.
        """
        if not self._inbox:
            if self._is_closed:
                raise EOFError
            self._is_receiving = True
            try:
                self._wait(timeout_s)
            finally:
                self._is_receiving = False
                self._close_selector()
        return self._inbox.popleft() if self._inbox else None

    def keep_states(self, every: int) -> None:
        """Have each worker tell its state after so many of the batches that are sent from now on."""
        with self._lock:
            self.every = every
            for worker in self._workers:
                self._tell(worker, ("every", every))

    def go_on(self, starts: Sequence[Start]) -> None:
        """Have each worker go on somewhere; before the first batch is sent."""
        with self._lock:
            for worker, start in zip(self._workers, starts, strict=True):
                worker.start = start
                self._tell(worker, ("start", self._epoch, start))

    def ask_begun(self) -> None:
        """Wait until `begun` is known of all workers that can still tell."""
        self._ask("begin", self.begun)

    def ask_now(self) -> _States:
        """The states of all workers' copies of the data set, when they have made all that was sent."""
        self._states = [None] * len(self._workers)
        self._ask("tell", self._states)
        return self._states

    def _ask(self, question: str, answers: _States) -> None:
        """Ask workers what is not known of them, and wait as long as they can still answer.

        Who cannot, and had a state to lose, is answered for by the error that it is lost.
        """
        with self._lock:
            self._question = question, answers
            asked = [worker for worker in self._workers if answers[worker.number] is None]
            for worker in asked:
                self._put_question(worker)
        self._is_receiving = True
        try:
            while not self._is_closed and any(answers[worker.number] is None and worker.wire for worker in asked):
                self._wait(None)
        finally:
            self._question = None
            self._is_receiving = False
            self._close_selector()
        self._answer_for_lost(answers)

    def _answer_for_lost(self, answers: _States) -> None:
        for worker in self._workers:
            if answers[worker.number] is None and worker.start is not None:
                answers[worker.number] = (failed(OptionError(LOST), "raised where the state was asked for"),)

    def _put_question(self, worker: WorkerRecord) -> None:
        """Ask a worker what everybody is asked at the time; also one that has taken the place of another."""
        if self._question is not None:
            question, answers = self._question
            if answers[worker.number] is None:
                self._tell(worker, (question,))

    def reset(self, shared_seed: int | None) -> None:
        """Have the workers begin another epoch.

        They make all batches that are under way nonetheless, as torch's do: so their random numbers are the same.
        """
        self._mourn_idle()
        with self._lock:
            self._epoch += 1
            self.begun = [None] * len(self._workers)
            while self._inbox:
                self.drop(self._inbox.popleft())
            for worker in self._workers:
                if worker.wire is None:
                    worker.failure, worker.is_mourned, worker.start, worker.idle_deaths = None, False, None, 0
                    self._start(worker)
                self._tell(worker, ("reset", shared_seed, self._epoch))

    def _mourn_idle(self) -> None:
        """Hear of workers that have ended since somebody waited for them: what they had is of no use any more."""
        while not self._is_closed and self._selector.select(0):
            self._wait(0)

    def counted(self) -> dict[str, int]:
        """Nanoseconds that all workers together have spent so far in each step, and how many of them have died."""
        made = collate = start = 0
        with self._lock:
            for number in range(len(self._workers)):
                first = 1 + WORDS * number
                made += self._numbers[first + 2]
                collate += self._numbers[first + 3]
                start += self._numbers[first + 4]
        return {"samples": max(0, made - collate), "collate": collate, "start": start, "deaths": self._deaths}

    def close(self) -> None:
        """Have all workers end after what they are in the middle of; that is not waited for."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._answer_for_lost(self.begun)
        if self._pid == os.getpid():
            self._numbers[0] = True
        if self.closing is not None:
            self.closing()
        for worker in self._workers:
            if worker.wire is not None:
                worker.wire.close()
            if worker.sentinel >= 0:
                os.close(worker.sentinel)
                worker.sentinel = -1
        self._starter.close()
        self.places.close()
        self._words.close()
        self._wakeup.set()
        self._close_selector()

    def _wait(self, timeout_s: float | None) -> None:
        """Take in what comes, or has come after that time; it may be over before."""
        each_s = PATIENCE.each_s
        events = self._selector.select(each_s if timeout_s is None else min(timeout_s, each_s))
        if not events:
            self._look()
        for key, _ in events:
            with self._lock:
                if self._is_closed:
                    return
                key.data()

    def _look(self) -> None:
        """Nothing has come for a while: put others in the place of those that were stopped."""
        with self._lock:
            if self._is_closed:
                return
            is_asked = self._question is not None
            owing = {
                worker.handle.pid: worker
                for worker in self._workers
                if worker.handle and worker.handle.sentinel >= 0 and worker.wire and (worker.tasks or is_asked)
            }
            for pid in self._watcher.look(pid for pid in owing if pid is not None):
                owing[pid].how = _STOPPED
                self._on_death(owing[pid])
            for handle in self._starter.look():
                for worker in self._workers:
                    if worker.handle is handle and worker.wire is not None:
                        self._part_with(worker)
                        self._begin_again(worker)

    def _close_selector(self) -> None:
        """Of a pool that was closed, as soon as nobody waits there any more."""
        if self._is_closed and not self._is_receiving:
            self._selector.close()

    # Starting.

    def _start(self, worker: WorkerRecord) -> None:
        worker.handle, sock = self._starter.start(worker.number, worker.starts)
        self._listen()
        worker.starts += 1
        worker.known, worker.spec, worker.made = set(), b"", None
        worker.wire = PolledWire(sock)
        worker.awaits_writing = False
        self._selector.register(sock, selectors.EVENT_READ, self._on_event_of(worker, self._on_readable))
        self._tell(worker, ("words", self._words.size, 1 + WORDS * worker.number), [self._words.fd])
        for message, descriptors in self._starter.greeting:
            self._tell(worker, message, descriptors, are_kept=True)
        if self.every:
            self._tell(worker, ("every", self.every))
        if self._epoch or worker.start is not None:
            self._tell(worker, ("start", self._epoch, worker.start))
        self._watch(worker)

    def _on_event_of(self, worker: WorkerRecord, do: Callable[[WorkerRecord], None]) -> Callable[[], None]:
        """What to call at an event: of one death two may tell at once, and by the second the worker is another."""
        wire = worker.wire
        return lambda: do(worker) if worker.wire is wire else None

    def _watch(self, worker: WorkerRecord) -> None:
        """Hear of its end also where somebody else holds its socket open."""
        if (
            worker.sentinel < 0
            and worker.wire is not None
            and worker.handle is not None
            and worker.handle.sentinel >= 0
        ):
            worker.sentinel = os.dup(worker.handle.sentinel)
            ended = self._on_event_of(worker, self._on_death)
            self._selector.register(worker.sentinel, selectors.EVENT_READ, ended)

    def _listen(self) -> None:
        """Hear of news from whoever starts workers, and of room for what it could not be told yet."""
        fd = self._starter.fileno()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._starter.awaits_writing else 0)
        if (fd, events) != self._listened_to:
            if self._listened_to[0] >= 0:
                self._selector.unregister(self._listened_to[0])
            if fd >= 0:
                self._selector.register(fd, events, self._on_news)
            self._listened_to = fd, events

    def _on_news(self) -> None:
        self._starter.pump()
        self._listen()
        for worker in self._workers:
            self._watch(worker)

    # Sending.

    def _give(self, worker: WorkerRecord, serial: int, task: BatchTask) -> None:
        if task.place is None:
            task.place = self.places.free_for(worker.number)
        place = None
        if task.place is not None:
            place = task.place.number, task.place.size
            if task.place.number not in worker.known:
                worker.known.add(task.place.number)
                self._tell(worker, ("segment", *place), [task.place.fd])
        self._tell(worker, ("make", serial, task.index, place))

    def _tell(
        self, worker: WorkerRecord, message: object, descriptors: Sequence[int] = (), *, are_kept: bool = False
    ) -> None:
        if worker.wire is None or worker.wire.send(message, descriptors, are_kept=are_kept):
            return
        if not worker.awaits_writing:
            worker.awaits_writing = True
            both = selectors.EVENT_READ | selectors.EVENT_WRITE
            self._selector.modify(worker.wire, both, self._on_event_of(worker, self._on_writable))

    def _on_writable(self, worker: WorkerRecord) -> None:
        assert worker.wire is not None
        if worker.wire.flush():
            worker.awaits_writing = False
            readable = self._on_event_of(worker, self._on_readable)
            self._selector.modify(worker.wire, selectors.EVENT_READ, readable)
        self._on_readable(worker)

    def _forget(self, number: int) -> None:
        for worker in self._workers:
            if number in worker.known:
                worker.known.discard(number)
                self._tell(worker, ("forget", number))

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
            elif kind == "spec":
                (worker.spec,) = rest
            elif kind == "begun":
                self._on_begun(worker, *rest)
            elif kind == "states":
                self._on_states(worker, *rest)
            else:
                number, size = rest
                worker.made = Segment(number, worker.wire.take_descriptor(), size)
                self.places.add(worker.made)
                worker.known.add(number)

    def _on_begun(self, worker: WorkerRecord, epoch: int, blob: PackedStates | None) -> None:
        if epoch == self._epoch:
            self.begun[worker.number] = self.begun[worker.number] or (blob,)
        if is_known(blob):
            worker.start = Start(blob)

    def _on_states(self, worker: WorkerRecord, blob: PackedStates | None) -> None:
        self._states[worker.number] = (blob,)
        if is_known(blob):
            worker.start = Start(blob)

    def _on_made(
        self, worker: WorkerRecord, serial: int, result: Result, state: tuple[PackedStates | None, bool] = (None, False)
    ) -> None:
        task = worker.tasks.pop(serial, None)
        if task is None:
            self._on_second_answer(worker, serial)
            return
        if is_known(state[0]):
            worker.start = Start(*state)
        worker.idle_deaths = 0
        used = segment_of(result)
        made, worker.made = worker.made, None
        if made is not None and made.number != used:  # an error came after it
            self.places.unused(made, worker.number, is_too_small=False)
        if task.place is None or task.place.number != used:
            self._leave_place(worker, task, is_too_small=used is not None)
        if used is not None:
            self.places.filled(used, worker.number)
        self._answer(worker, task, result, state)

    def _on_second_answer(self, worker: WorkerRecord, serial: int) -> None:
        """To what nobody waits for any more; the first one counts."""
        made, worker.made = worker.made, None
        if made is not None:
            self.places.unused(made, worker.number, is_too_small=False)
        log.warning("worker %d has answered a second time (%d); that is left out", worker.number, serial)

    def _leave_place(self, worker: WorkerRecord, task: BatchTask, *, is_too_small: bool = False) -> None:
        """The task has no use for the place that it was given, or for the right to make one."""
        if task.place is None:
            self.places.settled()
        else:
            self.places.unused(task.place, worker.number, is_too_small=is_too_small)
        task.place = None

    def _answer(
        self,
        worker: WorkerRecord,
        task: BatchTask,
        result: Result,
        state: tuple[PackedStates | None, bool] = (None, False),
    ) -> None:
        made = MadeBatch(task.batch, worker.number, result, worker.spec, *state)
        if task.epoch == self._epoch:
            self._inbox.append(made)
        else:
            self.drop(made)

    def drop(self, made: MadeBatch) -> None:
        """Let go of a batch that nobody wants any more."""
        if (segment := segment_of(made.result)) is not None:
            self.places.give_back(segment)

    # Deaths.

    def _on_death(self, worker: WorkerRecord) -> None:
        assert worker.wire is not None
        assert worker.handle is not None
        self._deaths += 1
        with contextlib.suppress(EOFError):  # what it has sent before counts
            while messages := worker.wire.receive():
                self._take_in(worker, messages)
        worker.handle.kill()  # it may have closed its socket only
        worker.handle.join(_END_S)
        pid, code = worker.handle.pid, worker.handle.exitcode
        how, worker.how = worker.how, ""
        self._part_with(worker)
        first = 1 + WORDS * worker.number
        running, sample = self._numbers[first], self._numbers[first + 1]
        self._numbers[first], self._numbers[first + 1] = 0, -1
        lost = worker.tasks
        if self._config.is_iterable:
            worker.failure = death(pid, code, f"{how}; its place in the data set is lost with it")
        elif running in lost:
            self._count_death(worker, lost, running, sample, pid, code)
        else:
            worker.idle_deaths += 1
            if worker.idle_deaths >= DEATHS:
                worker.failure = death(pid, code, f"{how}; {DEATHS} did so before they made a batch")
        if worker.failure is not None:
            worker.tasks = {}
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
        """Another process does all that one was to do that has not."""
        self._start(worker)
        for serial, task in worker.tasks.items():
            self._leave_place(worker, task)
            self._give(worker, serial, task)
        self._put_question(worker)

    def _death_of(self, worker: WorkerRecord) -> Result:
        """What is answered for a worker that is not started again; of a data set that is iterated over, once."""
        if self._config.is_iterable and worker.is_mourned:
            return ("end",)
        worker.is_mourned = True
        assert worker.failure is not None
        return "died", worker.failure

    def _part_with(self, worker: WorkerRecord) -> None:
        assert worker.wire is not None
        self._selector.unregister(worker.wire)
        worker.wire.close()
        worker.wire = None
        if worker.sentinel >= 0:
            self._selector.unregister(worker.sentinel)
            os.close(worker.sentinel)
            worker.sentinel = -1

    def _count_death(
        self,
        worker: WorkerRecord,
        lost: dict[int, BatchTask],
        serial: int,
        sample: int,
        pid: int | None,
        code: int | None,
    ) -> None:
        task = lost[serial]
        task.deaths[sample] = task.deaths.get(sample, 0) + 1
        if task.deaths[sample] < DEATHS:
            return
        del lost[serial]
        self._leave_place(worker, task)
        index = unpacked_index(task.index)
        which = f"batch {task.batch}, before or after its samples {index!r:.100}"
        if sample >= 0:
            key = list(index)[sample] if self._config.auto_collation else index
            which = f"sample {key!r:.100} of batch {task.batch}"
        self._answer(worker, task, ("died", death(pid, code, f"; {DEATHS} did so, all on {which}", task.batch)))
