"""Iterator over torch's data sets with workers: whole batches, made as torch's workers do.

The caller's thread draws base seed and indices in `iter` and `next`, exactly as torch's loader. No other thread or
event loop is involved between caller and workers.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import anyio
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _DatasetKind

from headrace.delivery.channel import Delivery
from headrace.delivery.loop_lookahead import TaskLock
from headrace.delivery.slabs import BatchOpener, Views
from headrace.delivery.staging import Ahead, ahead_of, mover_of
from headrace.errors import LateOptionError, LoaderClosedError, NotReady, StateMismatchError
from headrace.torch_compat import serialize
from headrace.torch_compat.serialize import unpack_error
from headrace.torch_compat.spec import Spec
from headrace.torch_compat.stateful import PackedStates, is_stateful
from headrace.torch_compat.torch_loader import TorchLoader
from headrace.torch_compat.tracebacks import trimming
from headrace.torch_compat.worker_info import with_sharding
from headrace.torch_regime.resumable_iterator import ResumableIterator
from headrace.torch_regime.state import SnapshotBook, StateDict, WorkerSnapshot, copy_of, is_among
from headrace.torch_regime.workers.pool import MadeBatch, TorchWorkerPool
from headrace.torch_regime.workers.starting import WorkerHandle, starter
from headrace.torch_regime.workers.worker_main import Start, WorkerConfig, packed_index
from headrace.workers.forkserver.fd_socket import PATIENCE

if TYPE_CHECKING:
    from headrace.torch_regime.regime import LoaderCounts


class WorkerIterator(ResumableIterator):
    """Whole batches made by workers. With ordered batches, worker k mod n makes batch k."""

    def __init__(self, loader: TorchLoader[object], snapshots: SnapshotBook, counts: LoaderCounts) -> None:
        self._counts = counts
        self._prepare(loader, snapshots)
        super().__init__(loader)
        assert loader.prefetch_factor is not None  # set by torch's constructor if there are workers
        self._prefetch_factor, self._in_order = loader.prefetch_factor, loader.in_order
        if self._prefetch_factor <= 0:
            raise LateOptionError(f"prefetch_factor must be greater than 0, and is {self._prefetch_factor}")
        init_fn = with_sharding(loader.worker_init_fn, self._dataset, self._world_size, self._rank)
        config = WorkerConfig(
            dataset=self._dataset,
            is_iterable=self._dataset_kind == _DatasetKind.Iterable,
            auto_collation=self._auto_collation,
            collate_fn=self._collate_fn,
            drop_last=self._drop_last,
            base_seed=int(self._base_seed),
            init_fn=init_fn,
            num_workers=self._num_workers,
            shared_seed=self._shared_seed,
            step=counts.step,
        )
        self._ahead = ahead_of(mover_of(loader.device), pin_memory=loader.pin_memory)
        limit = self._prefetch_factor * self._num_workers
        self._pool = TorchWorkerPool(config, starter(loader, config), limit, counts.meters)
        places = self._pool.places
        counts.follow(places)
        places.unlock_pages = self._ahead.unlock_pages
        self._end = weakref.finalize(self, _end, self._pool, self._ahead)
        self._end.atexit = False
        views = Views(places.segments, places.give_back, places.retire, self._ahead.lock_pages, self._ahead.depth)
        self._opener = BatchOpener(views)
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._tasks_lock = TaskLock()
        self._is_polling = False
        self._staged: deque[MadeBatch] = deque()
        try:
            self._reset(loader, first_iter=True)
            self._has_begun()
        except BaseException:
            self._end()
            raise

    @property
    def _workers(self) -> list[WorkerHandle | None]:
        """The handles, by the name that torch's iterators use and users' code accesses."""
        return self._pool.handles

    def _shutdown_workers(self) -> None:
        self.close()

    def _reset(self, loader: DataLoader[object], first_iter: bool = False) -> None:
        super()._reset(loader, first_iter)
        self._check_process()
        self._clock = self._counts.clock()
        if not first_iter:
            while self._staged:
                with contextlib.suppress(Exception):
                    self._taken()[0]()
            for made in self._arrived.values():
                self._pool.drop(made)
        loaded, point = self._loaded, self.run.point
        self.run.lock = self._lock
        self._sent, self._beyond = point.due, point.beyond
        self._under_way: dict[int, int] = {}  # worker by number of a batch sent and not yet due
        self._asked_for: dict[int, int] = {}  # number of samples requested, by batch
        self._arrived: dict[int, MadeBatch] = {}
        self._staged = deque()  # due batches that wait for `next`
        self._arrived_of = [0] * self._num_workers  # arrived and not returned, by worker
        self._ends: dict[int, PackedStates | None] = {}  # copies that ended while their batches wait, by worker
        self._is_active = [True] * self._num_workers
        self._loads = [0] * self._num_workers
        self._turns = itertools.cycle(range(self._num_workers))
        next(itertools.islice(self._turns, point.turn, point.turn), None)
        if not first_iter:
            self._pool.reset(self._shared_seed)
        elif loaded is not None and loaded["copies"] and (self._goes_on or self._persistent_workers):
            self._pool.go_on(self._starts(loaded))
        if point.copies and self._persistent_workers:
            self.run.ask_now = weakref.WeakMethod(self._pool.ask_now)
        if point.copies and not self._goes_on:
            self.run.initial = self._pool.initial
            self.run.ask_initial = weakref.WeakMethod(self._pool.ask_initial)
        for _ in range(self._prefetch_factor * self._num_workers):
            self._try_put_index()

    def _first_copies(self) -> tuple[WorkerSnapshot, ...]:
        is_asked = self._dataset_kind == _DatasetKind.Iterable or is_stateful(self._dataset)
        return (WorkerSnapshot(),) * self._num_workers if is_asked else ()

    def _starts(self, loaded: StateDict) -> list[Start]:
        again: list[list[tuple[object, int]]] = [[] for _ in range(self._num_workers)]
        is_finished = loaded["is_finished"]
        copies = [copy_of(known) for known in loaded["copies"]]
        if self._dataset_kind == _DatasetKind.Iterable:
            index = next(iter(self._index_sampler))
            for worker, known in enumerate(copies):
                if known.blob is not None or not (known.is_over or is_finished):
                    again[worker].append((packed_index(index), known.batches - known.known))
        elif not is_finished:
            for number, index in self._again:
                turn, worker = divmod(number, self._num_workers)
                if copies[worker].known <= turn < copies[worker].batches:
                    again[worker].append((packed_index(index), 1))
        return [
            Start(known.blob, known.is_over, known.batches, tuple(again[worker]), is_finished)
            for worker, known in enumerate(copies)
        ]

    def _try_put_index(self) -> None:
        if (every := self._every()) != self._pool.every:
            self._pool.keep_states(every)
        try:
            index = self._next_index()  # type: ignore[no-untyped-call]
            while is_among(self._sent, self._beyond):  # returned already
                self._sent += 1
                index = self._next_index()  # type: ignore[no-untyped-call]
        except StopIteration:
            return
        most = self._prefetch_factor * self._num_workers
        for worker in itertools.islice(self._turns, self._num_workers):
            if self._is_active[worker] and (self._in_order or self._loads[worker] < most // sum(self._is_active)):
                self._pool.send(self._sent, worker, index)
                self._under_way[self._sent] = worker
                if self._auto_collation:
                    self._asked_for[self._sent] = len(index)
                self._loads[worker] += 1
                self._sent += 1
                return

    def _next_data(self) -> Any:
        with self._lock:
            self._check_process()
            self._clock.ask()
            while not self._stage():
                if not self._under_way:
                    self.run.is_finished = True
                    if not self._persistent_workers:
                        self.close()
                    raise StopIteration
                self._take_in(self._receive())
            batch, made = self._taken()
            given = self._num_yielded
            try:
                self._try_put_index()
            except BaseException:
                with contextlib.suppress(Exception):
                    batch()  # frees its segment
                self._receive_from(made, given)
                raise
            try:
                value = batch()
                given += 1
            finally:
                self._receive_from(made, given)
                self._clock.got(self._samples_of(made), _bytes_of(made))
            return value

    def _samples_of(self, made: MadeBatch) -> int:
        size = self._asked_for.pop(made.batch, 1)
        if made.result[0] == "slots":
            return made.result[2]
        return 0 if made.result[0] in ("error", "died") else size

    def _receive_from(self, made: MadeBatch, given: int) -> None:
        died, is_map = made.result[0] == "died", self._dataset_kind == _DatasetKind.Map
        self._arrived_of[made.worker] -= 1
        if is_map or not died:
            number = made.batch if is_map else self.run.point.due  # batches of ended iterable copies do not count
            self.run.receive(number, made.worker, given, blob=made.blob, is_over=made.is_over, died=died)
        if made.worker in self._ends and not self._arrived_of[made.worker]:
            self.run.end_copy(made.worker, self._ends.pop(made.worker))

    def _take_in(self, made: MadeBatch) -> None:
        if made.result[0] != "end":
            self._arrived[made.batch] = made
            self._arrived_of[made.worker] += 1
            return
        self._loads[self._under_way.pop(made.batch)] -= 1
        if self._is_active[made.worker]:
            self._is_active[made.worker] = False
            if self._arrived_of[made.worker]:
                self._ends[made.worker] = made.blob
            else:
                self.run.end_copy(made.worker, made.blob)
            self._try_put_index()

    def _stage(self) -> bool:
        """Start opening and moving the batches that are due. Return True if there are any."""
        if self._ahead.depth > 1:  # no other thread receives while the trainer is busy
            while (made := self._pool.receive(0)) is not None:
                self._take_in(made)
        while len(self._staged) < self._ahead.depth:
            due = next(iter(self._under_way if self._in_order else self._arrived), None)
            if due not in self._arrived:
                break
            del self._under_way[due]
            made = self._arrived.pop(due)
            self._staged.append(made)
            self._ahead.put(functools.partial(_opened, self._opener, made))
        return bool(self._staged)

    def _taken(self) -> tuple[Callable[[], Any], MadeBatch]:
        batch = self._ahead.take(0 if self._is_polling else None)
        made = self._staged.popleft()
        self._loads[made.worker] -= 1
        return batch, made

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise LoaderClosedError("the iterator belongs to the process that this one was forked from")

    def _receive(self) -> MadeBatch:
        """Wait for the result of a batch.

        Raises:
            RuntimeError: the timeout has passed.
            anyio.WouldBlock: there is no result yet, and this call must not wait.
            LoaderClosedError: another thread closed the iterator.
        """
        limit_s = 0 if self._is_polling else self._timeout or math.inf
        deadline = time.monotonic() + limit_s
        while True:
            try:
                made = self._pool.receive(None if limit_s == math.inf else max(0.0, deadline - time.monotonic()))
            except EOFError:
                raise LoaderClosedError("this iterator was closed; make a new one with iter(loader)") from None
            if made is not None:
                return made
            if time.monotonic() >= deadline:
                if self._is_polling:
                    raise anyio.WouldBlock
                raise RuntimeError(f"DataLoader timed out after {self._timeout} seconds")

    def try_next(self) -> Any:
        """Return the next batch if it is ready. Raises as `BatchIterator.try_next`."""
        with trimming, self._lock:
            self._is_polling = True
            try:
                return next(self)
            except anyio.WouldBlock:
                raise NotReady("no batch is ready yet") from None
            finally:
                self._is_polling = False

    @property
    def is_over(self) -> bool:
        return not self._end.alive

    def close(self) -> None:
        self._ahead.drain()
        self._end()

    # For `async for`, under any event loop that anyio supports.

    def __aiter__(self) -> WorkerIterator:
        return self

    async def __anext__(self) -> Any:
        with trimming:
            return await self._anext()

    async def _anext(self) -> object:
        async with self._tasks_lock.here:
            began_s = time.monotonic()
            while True:
                try:
                    return self.try_next()  # also checks the workers
                except NotReady:
                    pass  # waiting in here would show it in the traceback of a cancellation
                except StopIteration:
                    raise StopAsyncIteration from None
                left_s = began_s + (self._timeout or math.inf) - time.monotonic()
                with anyio.move_on_after(min(left_s, PATIENCE.each_s)) as scope:
                    await anyio.wait_readable(self._ahead.fileno() if self._staged else self._pool.fileno())
                if scope.cancelled_caught and left_s <= PATIENCE.each_s:
                    raise RuntimeError(f"DataLoader timed out after {self._timeout} seconds")


def _end(pool: TorchWorkerPool, ahead: Ahead) -> None:
    ahead.close()
    pool.close()


# Results of workers.


def _bytes_of(made: MadeBatch) -> int:
    result = made.result
    if result[0] == "inline":
        return sum(map(len, result[1]))
    if result[0] == "packed":
        return sum(result[2])
    return Spec.loads(result[5]).nbytes(result[2]) if result[0] == "slots" else 0


def _opened(opener: BatchOpener, made: MadeBatch) -> object:
    result = made.result
    if result[0] == "inline":
        return serialize.unpack_parts(result[1])
    if result[0] == "object":
        return result[1]
    if result[0] == "packed":
        _, segment, lengths = result
        return opener.open(Delivery(made.batch, 0, 0, "packed", segment, lengths=lengths))
    if result[0] == "slots":
        _, segment, count, capacity, columns, spec = result
        where = Delivery(made.batch, count, 0, "slots", segment, columns=tuple(columns), capacity=capacity, blob=spec)
        return opener.open(where)
    assert result[0] != "end"
    error = unpack_error(result[1])
    if isinstance(error, StateMismatchError) and isinstance(error.__cause__, StateMismatchError):
        error.field = error.__cause__.field
    raise error
