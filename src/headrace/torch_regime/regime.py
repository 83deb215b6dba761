"""Session of a loader of torch data sets: torch's semantics, with headrace's workers."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping
from time import perf_counter
from typing import Any, NoReturn

from torch.utils.data.dataloader import _DatasetKind

from headrace.delivery.loop_lookahead import TrainingLoop
from headrace.errors import OptionError
from headrace.observe import DeliverStats, FetchStats, LoaderMeters, Stats, WorkStats
from headrace.torch_compat.stateful import chain_of
from headrace.torch_compat.torch_loader import TorchLoader
from headrace.torch_regime.economic import EconomicIterator, Economy
from headrace.torch_regime.inline_iterator import SingleIterator
from headrace.torch_regime.resumable_iterator import ResumableIterator
from headrace.torch_regime.state import SnapshotBook, check, epoch_of
from headrace.torch_regime.worker_iterator import WorkerIterator
from headrace.torch_regime.workers.pool import BatchMemory
from headrace.torch_regime.workers.starting import has_fork_server
from headrace.workers.forkserver.client import ForkServer


class LoaderCounts:
    """Counters of one loader over all its iterators, without references to them."""

    def __init__(self, step: str, workers: int) -> None:
        self.meters = LoaderMeters()
        self.bytes = 0
        self.step, self._workers = step, workers
        self._memories: list[weakref.ref[BatchMemory]] = []  # replaced, not changed: other threads read it

    def clock(self) -> Clock:
        self.meters.begin()
        return Clock(self)

    def follow(self, memory: BatchMemory) -> None:
        self._memories = [*(one for one in self._memories if one() is not None), weakref.ref(memory)]

    def stats(self, epoch: int) -> Stats:
        meters = self.meters
        return Stats(
            epoch=epoch,
            elapsed_s=meters.elapsed_s(),
            fetch=FetchStats(),
            work=WorkStats(
                workers=max(1, self._workers),
                busy_s=dict(meters.busy_s),
                deaths=meters.deaths,
                is_inline=not self._workers,
            ),
            deliver=DeliverStats(
                batches=meters.batches,
                samples=meters.samples,
                bytes=self.bytes,
                wait_s=meters.wait_s,
                first_wait_s=meters.first_wait_s,
                trainer_s=meters.trainer_s,
            ),
            shared_bytes=sum(memory.nbytes for one in self._memories if (memory := one()) is not None),
            budget_bytes=0,
            started_s=None,
        )


class Clock:
    """Waiting time of the trainer for the batches of one epoch, and the time between them."""

    def __init__(self, counts: LoaderCounts) -> None:
        self._counts, self._meters = counts, counts.meters
        self._asked: float | None = None
        self._left: float | None = None

    def ask(self) -> None:
        if self._asked is None:
            self._asked = perf_counter()

    def got(self, samples: int, nbytes: int = 0) -> None:
        now = perf_counter()
        asked = now if self._asked is None else self._asked
        self._meters.count_next(samples, now - asked, None if self._left is None else asked - self._left)
        if nbytes:
            self._counts.bytes += nbytes
        self._asked, self._left = None, now


class Torch:
    """Session of a loader of torch data sets. Iterators or the economy own the workers."""

    def __init__(self, loader: TorchLoader[object]) -> None:
        self._epoch = 0
        self.options = {name: getattr(loader, name) for name in ("prefetch_factor", "workers", "economic")}
        self._samplers = [part for part in chain_of(loader._index_sampler) if hasattr(part, "set_epoch")]
        self._snapshots = SnapshotBook(loader)
        way = "__iter__" if loader._dataset_kind == _DatasetKind.Iterable else "__getitem__"
        self._counts = LoaderCounts(f"{type(loader.dataset).__name__}.{way}", loader.num_workers)
        self._made: ResumableIterator | None = None  # an iterator made for `state_dict`, for the next `iter`
        self._made_epoch: int | None = None
        self._is_making = False
        self._live: weakref.WeakSet[WorkerIterator | EconomicIterator] = weakref.WeakSet()
        self._economy: Economy | None = None
        self._end: weakref.finalize[..., object] | None = None
        if loader.economic:
            self._economy = Economy(loader)
            self.options |= {name: getattr(self._economy, name) for name in ("num_batch_workers", "memory_budget")}
        elif loader.num_workers and has_fork_server(loader):
            # Start it early, and keep it between epochs.
            self._end = weakref.finalize(self, ForkServer.acquire().release)
            self._end.atexit = False

    def iterate(self, loader: TorchLoader[object], caller: object) -> ResumableIterator:
        del caller
        self._drop_stale(loader)
        if self._made is not None:
            iterator, self._made = self._made, None
            return iterator
        self._is_making = True
        try:
            return self._new(loader)
        finally:
            self._is_making = False

    def _new(self, loader: TorchLoader[object]) -> ResumableIterator:
        if loader.num_workers == 0:
            return SingleIterator(loader, self._snapshots, self._counts)
        made = (
            WorkerIterator(loader, self._snapshots, self._counts)
            if self._economy is None
            else EconomicIterator(loader, self._economy, self._snapshots)
        )
        self._live.add(made)
        return made

    def _drop_stale(self, loader: TorchLoader[object]) -> None:
        """Drop an iterator made for `state_dict` if the samplers' epoch has changed since."""
        if self._made is not None and epoch_of(loader) != self._made_epoch:
            self._made = self._snapshots.run = None

    def state_dict(self, loader: TorchLoader[object], batches: int | None, loop: TrainingLoop) -> dict[str, Any]:
        """Return the state of the newest iterator, or make the first one, for the next `iter`.

        While `iter` makes the first iterator, the state is empty, which is the start.

        Raises:
            OptionError: the state after `batches` batches is not available. Or persistent workers were closed before
                the states that their data sets carry between epochs were requested.
        """
        self._snapshots.pace.is_asked = True
        self._drop_stale(loader)
        if self._snapshots.loaded is not None:
            if batches not in (None, self._snapshots.loaded["batches"]):
                raise OptionError(
                    f"batches={batches}: the state after {self._snapshots.loaded['batches']} batches is there"
                )
            return {**copy.deepcopy(self._snapshots.loaded)}
        if self._snapshots.run is None:
            if self._is_making:  # called by a signal handler or another thread meanwhile
                return {}
            self._made, self._made_epoch = self.iterate(loader, None), epoch_of(loader)
        run = self._snapshots.run
        assert run is not None
        if batches is not None:
            return {**run.state(batches)}
        held = loop.prefetched(knows_end=run.is_finished)
        return {**run.state(run.point.given - held.batches if held.batches else None, is_over=held.is_over)}

    def load_state_dict(self, loader: TorchLoader[object], state: Mapping[str, Any], force: bool = False) -> None:
        """Make the next `iter` resume from a state. An empty state is the start.

        Live iterators are dropped.

        Raises:
            StateMismatchError: the state belongs to another loader. The message names the field.
        """
        self._snapshots.pace.is_asked = True
        loaded = check(loader, state, force=force) if state != {} else None
        self._snapshots.run, self._snapshots.loaded = None, loaded
        self._made = loader._iterator = None
        if loaded is None:
            return
        if loaded["epoch"] is not None:
            self.set_epoch(loaded["epoch"])
        if self._economy is not None:
            self._economy.epoch = loaded["epoch_of_samples"] + loaded["is_finished"]

    def is_in(self, epoch: int) -> bool:
        """Return False: samplers get every epoch."""
        del epoch
        return False

    @property
    def goes_on(self) -> bool:
        return self._snapshots.loaded is not None

    @property
    def epoch(self) -> int:
        """The last epoch of `set_epoch`. In economic mode, the epoch of the next run."""
        return self._epoch if self._economy is None else self._economy.epoch

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        if self._economy is not None and not (self._made is not None and epoch == self._economy.epoch - 1):
            if self._made is not None:  # its samples are of another epoch
                self._made = self._snapshots.run = None
            self._economy.epoch = epoch
        for sampler in self._samplers:
            sampler.set_epoch(epoch)

    @property
    def position(self) -> NoReturn:
        raise _not_of_torch("position", "the sampler knows it")

    def skip(self, batches: int) -> NoReturn:
        del batches
        raise _not_of_torch("skip", "take batches and drop them")

    def peek(self) -> NoReturn:
        raise _not_of_torch("peek", "a batch that was made is consumed")

    def stats(self) -> Stats:
        if self._economy is None:
            return self._counts.stats(self.epoch)
        return self._economy.runtime.stats(self.epoch)

    def close(self) -> None:
        self._made = None
        for iterator in list(self._live):
            iterator.close()
        if self._economy is not None:
            self._economy.close()
        if self._end is not None:
            self._end()


def _not_of_torch(name: str, why: str) -> OptionError:
    return OptionError(f"{name} is for headrace's data sets: with torch's data sets, {why}")
