"""Batches made inside `next`, without workers: torch's own iterator with states, and one for `async for`."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import anyio.to_thread
from torch.utils.data.dataloader import _DatasetKind, _SingleProcessDataLoaderIter

from headrace.delivery.loop_lookahead import TaskLock
from headrace.delivery.staging import mover_of
from headrace.errors import LoaderClosedError, OptionError
from headrace.torch_compat.stateful import load, packed_states
from headrace.torch_compat.torch_loader import TorchLoader
from headrace.torch_compat.tracebacks import trimming
from headrace.torch_regime.resumable_iterator import ResumableIterator
from headrace.torch_regime.state import SnapshotBook, WorkerSnapshot

if TYPE_CHECKING:
    from headrace.torch_regime.regime import LoaderCounts


class SingleIterator(_SingleProcessDataLoaderIter, ResumableIterator):
    """Batches made inside `next` (`num_workers=0`), by torch's own iterator.

    One difference: a StopIteration from `__getitem__` or collate_fn is an error, not the end of the epoch.
    """

    def __init__(self, loader: TorchLoader[object], snapshots: SnapshotBook, counts: LoaderCounts) -> None:
        self._clock = counts.clock()
        self._prepare(loader, snapshots)
        states = self._loaded["copies"][0]["states"] if self._loaded is not None and self._loaded["copies"] else None
        if not self._goes_on:  # the state that a data set carries into the next epoch
            load(loader.dataset, states, "dataset")
            if states and "iterator" in states:
                load(iter(loader.dataset), states, "iterator")
        self._states = states if self._goes_on else None
        super().__init__(loader)
        fetcher = self._dataset_fetcher
        load(getattr(fetcher, "dataset_iter", None), self._states, "iterator")
        if self._goes_on and self._loaded is not None and hasattr(fetcher, "ended"):
            fetcher.ended = self._loaded["copies"][0]["is_over"]
        self._open_run(self._before)
        if self._is_stateful:
            self.run.copy_now = functools.partial(_copy_now, fetcher)
        self._make_again()
        self._mover = mover_of(loader.device)
        self._size, self._batch_size = 1, (loader.batch_size or 1) if self._auto_collation else 1
        self._has_begun()
        self._count = counts.meters.count_work
        self._step = counts.step
        fetcher.collate_fn = functools.partial(_timed, self._count, self._step, fetcher.collate_fn)
        if self._dataset_kind == _DatasetKind.Iterable:  # a data set's own StopIteration ends the epoch
            fetcher.collate_fn = functools.partial(_quietly, fetcher.collate_fn)

    def _open_data(self) -> None:
        load(self._dataset, self._states, "dataset")

    def _first_copies(self) -> tuple[WorkerSnapshot, ...]:
        fetcher = self._dataset_fetcher
        blob = packed_states(fetcher.dataset, getattr(fetcher, "dataset_iter", None))
        self._is_stateful = blob is not None
        is_counted = self._is_stateful or self._dataset_kind == _DatasetKind.Iterable
        return (WorkerSnapshot(blob=blob),) if is_counted else ()

    def _make_again(self) -> None:
        known, *_ = *self.run.point.copies, WorkerSnapshot()
        if self._dataset_kind == _DatasetKind.Iterable:
            indices = [next(self._sampler_iter)] * (known.batches - known.known)
        else:
            indices = [index for number, index in self._again if known.known <= number < known.batches]
        for index in indices:
            with contextlib.suppress(Exception):  # raised when the batch was first made
                self._dataset_fetcher.fetch(index)

    def _next_data(self) -> Any:
        self._clock.ask()
        try:
            batch = self._timed_batch()
            if self._mover is not None:
                batch = self._mover.finish(self._mover.start(batch))
        except StopIteration:
            self.run.is_finished = True
            raise
        except BaseException:  # also an interrupt: the index was drawn
            self._receive(self._num_yielded)
            self._clock.got(0)
            raise
        self._receive(self._num_yielded + 1)
        self._clock.got(self._size)
        return batch

    def _timed_batch(self) -> object:
        began = time.perf_counter()
        try:
            return self._made()
        finally:
            self._count(self._step, time.perf_counter() - began)

    def _receive(self, given: int) -> None:
        run, fetcher = self.run, self._dataset_fetcher
        if run.indices is not None and run.indices.drawn <= run.point.due:
            return  # the sampler failed
        blob, every = None, self._every()
        if self._is_stateful and every and (run.point.copies[0].batches + 1) % every == 0:
            blob = packed_states(fetcher.dataset, getattr(fetcher, "dataset_iter", None))
        run.receive(run.point.due, 0, given, blob=blob, is_over=getattr(fetcher, "ended", False), died=False)

    def _made(self) -> object:
        if self._dataset_kind == _DatasetKind.Iterable:
            self._size = self._batch_size
            return super()._next_data()  # type: ignore[no-untyped-call]
        while self.run.indices is not None and self.run.indices.drawn < self.run.point.due:
            self._next_index()  # type: ignore[no-untyped-call]  # returned already
        index = self._next_index()  # type: ignore[no-untyped-call]
        self._size = len(index) if self._auto_collation else 1
        self._sampler_iter, rest = iter([index]), self._sampler_iter
        try:
            return super()._next_data()  # type: ignore[no-untyped-call]
        except StopIteration as error:
            raise RuntimeError(f"the data set or collate_fn raised StopIteration for {index!r:.200}") from error
        finally:
            self._sampler_iter = rest


def _copy_now(fetcher: Any, received: WorkerSnapshot) -> WorkerSnapshot:
    """Return the current snapshot of the data set. No batch is made ahead here."""
    blob = packed_states(fetcher.dataset, getattr(fetcher, "dataset_iter", None))
    return WorkerSnapshot(received.batches, received.batches, getattr(fetcher, "ended", False), blob)


def _timed(
    count: Callable[[str, float], None], step: str, collate_fn: Callable[[object], object], samples: object
) -> object:
    began = time.perf_counter()
    try:
        return collate_fn(samples)
    finally:
        spent_s = time.perf_counter() - began
        count("collate", spent_s)
        count(step, -spent_s)  # `next` adds the time of the whole batch


def _quietly(collate_fn: Callable[[object], object], samples: object) -> object:
    try:
        return collate_fn(samples)
    except StopIteration as error:
        raise RuntimeError("collate_fn raised StopIteration") from error


class InThread:
    """Batches of an iterator that makes them inside `next`, which is called in a thread.

    Independent of event loops: another loop can continue it. If waiting is cancelled, the batch is still made and
    returned next. States cover the batches returned.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make: Callable[[], Any] = make
        self._iterator: ResumableIterator | None = None
        self._made: deque[tuple[Any, BaseException | None]] = deque()  # at most one: a batch, or an exception
        self._lock = threading.Lock()  # held while a batch is made
        self._tasks_lock = TaskLock()

    def __aiter__(self) -> InThread:
        return self

    async def __anext__(self) -> Any:
        async with self._tasks_lock.here:
            while not self._made:
                await anyio.to_thread.run_sync(self._make_one)
            batch, error = self._taken()
        if error is None:
            return batch
        try:
            with trimming:
                raise StopAsyncIteration if isinstance(error, StopIteration) else error
        finally:
            del error  # break the cycle of error, traceback and this frame

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """Return the state after the batches returned so far. Raises OptionError if no batch was requested so far."""
        if self._iterator is None:
            raise OptionError("no batch of this iterator has been asked for; ask its loader for a state")
        return self._iterator.state_dict(batches)

    async def aclose(self) -> None:
        self._make, self._iterator = _closed, None
        self._made.clear()

    def _make_one(self) -> None:
        """Make a batch, unless one is left from a cancelled wait."""
        with self._lock:
            if self._made:
                return
            if self._iterator is None:
                self._iterator = self._make()
            iterator = self._iterator
            with iterator.run.lock:
                before = iterator.run.point.given
                made: tuple[Any, BaseException | None]
                try:
                    made = next(iterator), None
                except BaseException as error:
                    made = None, error
                iterator.run.held = iterator.run.point.given - before
                self._made.append(made)

    def _taken(self) -> tuple[Any, BaseException | None]:
        assert self._iterator is not None
        with self._iterator.run.lock:
            self._iterator.run.held = None
            return self._made.popleft()


def _closed() -> NoReturn:
    raise LoaderClosedError("this iterator was closed; make a new one with aiter(loader)")
