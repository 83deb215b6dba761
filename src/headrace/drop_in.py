"""The iterators of the torch regime: torch's own semantics and draws, over our workers.

Base seed and indices are drawn in the caller's thread, in `iter` and `next`, exactly as torch's loader draws them. No
thread and no event loop stands between the caller and the workers.
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
from typing import Any

import anyio
import torch
from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _DatasetKind,
    _sharding_worker_init_fn,
    _SingleProcessDataLoaderIter,
)

from headrace.deliver.ahead import Ahead, ahead_of, mover_of
from headrace.deliver.iterator import Opener, readable
from headrace.deliver.slabs import Views
from headrace.economic import EconomicIterator, Economy, check_benefit
from headrace.errors import LateOptionError, LoaderClosedError, NotReady, OptionError
from headrace.observe.stats import Stats
from headrace.settings import budget_bytes
from headrace.tasks import Delivery
from headrace.torch_compat import packing
from headrace.torch_compat.errors import unpack_worker_error
from headrace.work.crew import Crew, Made
from headrace.work.hands import ContextStarter, HelperStarter, Starter, ThreadStarter
from headrace.work.job import Job
from headrace.work.starter import Helper


class SingleIterator(_SingleProcessDataLoaderIter):
    """Batches that are made in the caller's thread, inside `next` (`num_workers=0`): torch's own iterator.

    Only a StopIteration that a data set's `__getitem__` or a collate_fn raises does not end the epoch in silence.
    """

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self._mover = mover_of(loader)
        if self._dataset_kind == _DatasetKind.Iterable:  # whose own StopIteration does end it
            fetcher = self._dataset_fetcher
            fetcher.collate_fn = functools.partial(_quietly, fetcher.collate_fn)

    def _next_data(self) -> Any:
        batch = self._made()
        return batch if self._mover is None else self._mover.finish(self._mover.start(batch))

    def _made(self) -> Any:
        if self._dataset_kind == _DatasetKind.Iterable:
            return super()._next_data()  # type: ignore[no-untyped-call]
        index = self._next_index()  # type: ignore[no-untyped-call]
        self._sampler_iter, rest = iter([index]), self._sampler_iter
        try:
            return super()._next_data()  # type: ignore[no-untyped-call]
        except StopIteration as error:
            raise RuntimeError(f"the data set or collate_fn raised StopIteration for {index!r:.200}") from error
        finally:
            self._sampler_iter = rest


def _quietly(collate_fn: Callable[[Any], Any], samples: Any) -> Any:
    try:
        return collate_fn(samples)
    except StopIteration as error:
        raise RuntimeError("collate_fn raised StopIteration") from error


class WorkerIterator(_BaseDataLoaderIter):
    """Batches that workers make, each a whole one: batch k is worker k mod n's, as long as batches come in order.

    Args:
        loader: the torch loader whose data they are; its `workers` says what they are.
    """

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self._prefetch_factor, self._in_order = loader.prefetch_factor, loader.in_order
        if self._prefetch_factor <= 0:
            raise LateOptionError(f"prefetch_factor must be greater than 0, and is {self._prefetch_factor}")
        init_fn = loader.worker_init_fn
        if isinstance(self._dataset, IterDataPipe | MapDataPipe):
            init_fn = functools.partial(_sharding_worker_init_fn, init_fn, self._world_size, self._rank)
        job = Job(
            dataset=self._dataset,
            is_iterable=self._dataset_kind == _DatasetKind.Iterable,
            auto_collation=self._auto_collation,
            collate_fn=self._collate_fn,
            drop_last=self._drop_last,
            base_seed=int(self._base_seed),
            init_fn=init_fn,
            num_workers=self._num_workers,
            shared_seed=self._shared_seed,
        )
        self._ahead = ahead_of(loader, mover_of(loader))
        self._crew = Crew(job, _starter(loader, job), self._prefetch_factor * self._num_workers)
        places = self._crew.places
        places.unlock_pages = self._ahead.unlock_pages
        self._end = weakref.finalize(self, _end, self._crew, self._ahead)
        self._end.atexit = False
        views = Views(places.segments, places.give_back, places.retire, self._ahead.lock_pages, self._ahead.depth)
        self._opener = Opener(views)
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._tasks_lock: anyio.Lock | None = None
        self._is_polling = False
        self._staged: deque[int] = deque()
        try:
            self._reset(loader, first_iter=True)
        except BaseException:
            self._end()
            raise

    @property
    def _workers(self) -> list[Any]:
        """As torch's iterators have it; people and tests reach for it."""
        return self._crew.hands

    def _shutdown_workers(self) -> None:
        """The same."""
        self.close()

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        super()._reset(loader, first_iter)
        self._check_process()
        if not first_iter:
            while self._staged:
                with contextlib.suppress(Exception):
                    self._taken()()
            for made in self._arrived.values():
                self._crew.drop(made)
        self._sent = 0
        self._under_way: dict[int, int] = {}  # batches that were sent and have not been due yet, with their workers
        self._arrived: dict[int, Made] = {}
        self._staged = deque()  # the workers of batches that were due, and wait for `next`
        self._is_active = [True] * self._num_workers
        self._loads = [0] * self._num_workers
        self._turns = itertools.cycle(range(self._num_workers))
        if not first_iter:
            self._crew.reset(self._shared_seed)
        for _ in range(self._prefetch_factor * self._num_workers):
            self._try_put_index()

    def _try_put_index(self) -> None:
        """Have one more batch made, if there is one, and a worker for it."""
        try:
            index = self._next_index()  # type: ignore[no-untyped-call]
        except StopIteration:
            return
        most = self._prefetch_factor * self._num_workers
        for worker in itertools.islice(self._turns, self._num_workers):
            if self._is_active[worker] and (self._in_order or self._loads[worker] < most // sum(self._is_active)):
                self._crew.send(self._sent, worker, index)
                self._under_way[self._sent] = worker
                self._loads[worker] += 1
                self._sent += 1
                return

    def __next__(self) -> Any:
        if self._dataset_kind == _DatasetKind.Iterable or torch._C._autograd._profiler_enabled():
            return super().__next__()
        batch = self._next_data()  # without the mark for a profiler, which takes longer than all the rest
        self._num_yielded += 1
        return batch

    def _next_data(self) -> Any:
        with self._lock:
            self._check_process()
            while not self._stage():
                if not self._under_way:
                    if not self._persistent_workers:
                        self.close()
                    raise StopIteration
                self._take_in(self._receive())
            batch = self._taken()
            try:
                self._try_put_index()
            except BaseException:
                with contextlib.suppress(Exception):
                    batch()  # its place is free again
                raise
            return batch()

    def _take_in(self, made: Made) -> None:
        """Something has come from a worker."""
        if made.result[0] != "end":
            self._arrived[made.batch] = made
            return
        self._loads[self._under_way.pop(made.batch)] -= 1
        if self._is_active[made.worker]:
            self._is_active[made.worker] = False
            self._try_put_index()

    def _stage(self) -> bool:
        """Begin what is done to batches before they are given on, with those that are due; whether there are any."""
        if self._ahead.depth > 1:  # while the trainer is busy nobody takes in what comes
            while (made := self._crew.receive(0)) is not None:
                self._take_in(made)
        while len(self._staged) < self._ahead.depth:
            due = next(iter(self._under_way if self._in_order else self._arrived), None)
            if due not in self._arrived:
                break
            self._staged.append(self._under_way.pop(due))
            self._ahead.put(functools.partial(_open, self._opener, self._arrived.pop(due)))
        return bool(self._staged)

    def _taken(self) -> Callable[[], Any]:
        """The first of the batches that are staged."""
        batch = self._ahead.take(0 if self._is_polling else None)
        self._loads[self._staged.popleft()] -= 1
        return batch

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise LoaderClosedError("the iterator belongs to the process that this one was forked from")

    def _receive(self) -> Made:
        """What came of some batch.

        Raises:
            RuntimeError: nothing came in time.
            anyio.WouldBlock: nothing has come yet, and this is not to wait.
            LoaderClosedError: the iterator was closed by another thread.
        """
        limit_s = 0 if self._is_polling else self._timeout or math.inf
        deadline = time.monotonic() + limit_s
        while True:
            try:
                made = self._crew.receive(None if limit_s == math.inf else max(0.0, deadline - time.monotonic()))
            except EOFError:
                raise LoaderClosedError("this iterator was closed; make a new one with iter(loader)") from None
            if made is not None:
                return made
            if time.monotonic() >= deadline:
                if self._is_polling:
                    raise anyio.WouldBlock
                raise RuntimeError(f"DataLoader timed out after {self._timeout} seconds")

    def try_next(self) -> Any:
        """The next batch if it is ready.

        Raises:
            NotReady: it is not; nothing was lost, ask again.
            StopIteration: the epoch is over.
        """
        with self._lock:
            self._is_polling = True
            try:
                return next(self)
            except anyio.WouldBlock:
                raise NotReady("no batch is ready yet") from None
            finally:
                self._is_polling = False

    def close(self) -> None:
        """End the epoch, and the workers."""
        self._ahead.drain()
        self._end()

    # The same for `async for`, under any event loop that anyio knows.

    def __aiter__(self) -> WorkerIterator:
        return self

    async def __anext__(self) -> Any:
        if self._tasks_lock is None:
            self._tasks_lock = anyio.Lock()
        async with self._tasks_lock:
            while True:
                try:
                    return self.try_next()
                except NotReady:
                    pass  # waiting in here would show it in the traceback of a cancellation
                except StopIteration:
                    raise StopAsyncIteration from None
                await readable(self._ahead.fileno() if self._staged else self._crew.fileno(), self._timeout)


def _end(crew: Crew, ahead: Ahead) -> None:
    ahead.close()
    crew.close()


def _open(opener: Opener, made: Made) -> Any:
    """The batch that a worker has made, or the exception that it has told instead."""
    kind, *rest = made.result
    if kind == "inline":
        return packing.unpack_parts(*rest)
    if kind == "object":
        return rest[0]
    if kind == "error":
        raise unpack_worker_error(rest[0])
    if kind == "died":
        raise packing.unpack_error(rest[0])
    if kind == "packed":
        segment, lengths = rest
        return opener.open(Delivery(made.batch, 0, 0, "packed", segment, lengths=lengths))
    segment, count, capacity, columns = rest
    form = {"columns": tuple(columns), "capacity": capacity, "blob": made.spec}
    return opener.open(Delivery(made.batch, count, 0, "slots", segment, **form))


def _starter(loader: Any, job: Job) -> Starter:
    if loader.workers == "thread":
        return ThreadStarter(job)
    if loader.multiprocessing_context is not None:
        return ContextStarter(loader.multiprocessing_context, job)
    return HelperStarter(job)


class Torch:
    """What is behind a loader in the torch regime. Its workers and memory are its iterators' own, or the economy's.

    Args:
        loader: the loader; it is not kept.
    """

    def __init__(self, loader: Any) -> None:
        self._epoch = 0
        self.options = {name: getattr(loader, name) for name in ("prefetch_factor", "workers", "economic")}
        self._samplers = [s for s in (loader.sampler, loader.batch_sampler) if hasattr(s, "set_epoch")]
        self._live: weakref.WeakSet[Any] = weakref.WeakSet()
        self._economy: Economy | None = None
        self._end: weakref.finalize[..., Any] | None = None
        if loader.economic:
            self._economy = self._economy_of(loader)
        elif loader.num_workers and loader.workers == "process" and loader.multiprocessing_context is None:
            # So that it stands ready when the first epoch begins, and the next one.
            self._end = weakref.finalize(self, Helper.acquire().release)
            self._end.atexit = False

    def _economy_of(self, loader: Any) -> Economy:
        batch_workers = loader.num_batch_workers or loader.num_workers_batches
        check_benefit(loader.num_workers, batch_workers, loader.prefetch_factor, loader.batch_size)
        budget = budget_bytes(loader.memory_budget)
        self.options |= {"num_batch_workers": batch_workers or loader.prefetch_factor, "memory_budget": budget}
        return Economy(
            loader,
            num_batch_workers=batch_workers,
            memory_budget=budget,
            workers=loader.workers,
            device=loader.device,
            seed=loader.seed,
        )

    def iterate(self, loader: Any, caller: Any) -> Any:
        """A new iterator."""
        del caller
        if loader.num_workers == 0:
            return SingleIterator(loader)
        iterator: Any = WorkerIterator(loader) if self._economy is None else EconomicIterator(loader, self._economy)
        self._live.add(iterator)
        return iterator

    @property
    def epoch(self) -> int:
        """The last number that `set_epoch` was given; in economic mode that of the next run."""
        return self._epoch if self._economy is None else self._economy.epoch

    def set_epoch(self, epoch: int) -> None:
        """Tell the samplers."""
        self._epoch = epoch
        if self._economy is not None:
            self._economy.epoch = epoch
        for sampler in self._samplers:
            sampler.set_epoch(epoch)

    def peek(self) -> Any:
        raise OptionError("peek is for headrace's data sets: of torch's, a batch that was made is consumed")

    def stats(self) -> Stats:
        """A snapshot of all counters."""
        if self._economy is None:
            raise OptionError("a loader of torch's data sets counts nothing, unless it has economic=True")
        return self._economy.machinery.stats(self.epoch)

    def close(self) -> None:
        """End the workers of all iterators."""
        for iterator in list(self._live):
            iterator.close()
        if self._economy is not None:
            self._economy.close()
        if self._end is not None:
            self._end()
