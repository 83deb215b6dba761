"""Economic mode: all workers make the samples of one batch together, which bounds memory.

The caller's thread draws from torch's samplers, as torch does, and sends the keys to the loader's engine, one batch at
a time. `prefetch_factor` counts batches of all workers together.
"""

from __future__ import annotations

import heapq
import itertools
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Self

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import default_collate

from headrace.delivery.iterator import BatchIterator, Watcher
from headrace.delivery.progress import Progress
from headrace.delivery.slabs import Arrived
from headrace.engine.scheduler.epoch_spec import BatchSpec, EpochSpec, Learned
from headrace.engine.scheduler.position_map import GivenBoundaries
from headrace.options import Settings
from headrace.order.permutation import sample_seed
from headrace.readers.by_key import KeyFeed
from headrace.session.resolve import budget_bytes
from headrace.session.runtime import Runtime
from headrace.torch_compat.collate import Single, is_extended, plain_collate
from headrace.torch_compat.torch_loader import TorchLoader
from headrace.torch_compat.tracebacks import trimming
from headrace.torch_compat.worker_info import with_sharding
from headrace.torch_regime.resumable_iterator import ResumableIterator
from headrace.torch_regime.state import RunProgress, SnapshotBook, is_among
from headrace.workers.map_dataset_steps import Begin, get_many, getter, pack_in
from headrace.workers.tasks import CHAINS, Chain, Step, StreamChains


class Economy:
    """Runtime of a loader in economic mode. Ends with the loader and its last iterator."""

    def __init__(self, loader: TorchLoader[object]) -> None:
        self.prefetch_factor = loader.prefetch_factor or 1
        self.num_batch_workers = getattr(loader.economic, "num_batch_workers", None) or self.prefetch_factor
        self.memory_budget = budget_bytes(loader.memory_budget)  # only the oldest batch may exceed it
        self.in_threads = loader.workers == "thread"
        self.seed = loader.seed  # of samples' random numbers. None: torch's base seed of each iterator
        self.epoch = 0  # of the next run
        self.learned = Learned(use_slots=False)  # of the newest run
        settings = Settings(
            batch_size=loader.batch_size or 1,
            drop_last=loader.drop_last,
            num_workers=loader.num_workers,
            prefetch_factor=self.prefetch_factor,
            in_order=loader.in_order,
            timeout_s=loader.timeout,
            memory_budget=self.memory_budget,
            pin_memory=loader.pin_memory,
            device=loader.device,
        )
        self.runtime = Runtime(settings, workers="thread" if self.in_threads else "process")
        self.runtime.read_ahead(self.memory_budget)  # bounded by the batches under way: no other samples are made
        self.runtime.meters.batches_at_once = self.prefetch_factor
        self.runtime.meters.collations_at_once = self.num_batch_workers
        self.free: list[int] = []  # numbers of chains that were used before: a new chain gets the lowest
        self.fresh = itertools.count(1, CHAINS)
        self._end = weakref.finalize(self, self.runtime.close_soon)
        self._end.atexit = False

    def close(self) -> None:
        """End all iterators and workers, and wait for their end. Batches stay valid."""
        self.runtime.close()
        self._end.detach()


class EconomicIterator(ResumableIterator):
    """One run over a loader in economic mode, or all runs with persistent workers.

    The data set is sent to the workers at construction. After an error in a batch the next one can be requested.
    """

    def __init__(self, loader: TorchLoader[object], economy: Economy, snapshots: SnapshotBook) -> None:
        self._prepare(loader, snapshots)
        loaded = self._loaded
        super().__init__(loader)  # warns, and draws, as torch does
        self._economy = economy
        self._run_number = 0  # number of the run with one base seed
        if loaded is not None and (self._goes_on or self._persistent_workers):
            self._run_number = loaded["run"] + loaded["is_finished"]
        self._number = heapq.heappop(economy.free) if economy.free else next(economy.fresh)
        weakref.finalize(self, heapq.heappush, economy.free, self._number).atexit = False
        # Kept: threads have a weak reference only.
        self._chains = StreamChains({self._number: _chain(self, loader, economy)})
        economy.runtime.teach(self._chains)
        self._in_order = loader.in_order
        self._open_run(self._before)
        self._begin()
        self._has_begun()

    def _reset(self, loader: DataLoader[object], first_iter: bool = False) -> None:
        super()._reset(loader, first_iter)
        self._batches.close()
        self._economy.runtime.forget_spec(self._number)
        self._run_number += 1
        self._begin()

    def _begin(self) -> None:
        runtime = self._economy.runtime
        batches = BatchSpec(
            chain=self._number,
            batch_size=None,
            workers=self._num_workers,
            in_order=self._in_order,
            is_spread=self._auto_collation,
            collations=self._economy.num_batch_workers,
            is_adaptive=self._chains[self._number].many
            is None,  # `many` draws random numbers by the first key of each task
            depth=self._economy.prefetch_factor,
        )
        use_slots = self._auto_collation and self._collate_fn is default_collate and not is_extended()
        self._source = KeyFeed(runtime.parts.of_keys)
        # The form of samples may change between runs. Their time is an estimate anyway, and is kept.
        self._economy.learned = Learned(use_slots, self._economy.learned.sample_s)
        self._drawn, self._is_drawn = 0, False
        self._first, self._beyond = self.run.point.due, self.run.point.beyond
        self._numbers: dict[int, int] = {}  # number in the epoch, by the engine's number
        self._batches: BatchIterator[object] = runtime.iterate(
            self._economy,
            EpochSpec(
                source=self._source,
                batches=batches,
                learned=self._economy.learned,
                key=self._key(),
                boundaries=GivenBoundaries(),
            ),
            Watcher(name="headrace.delivery", progress=_DrawnProgress(self.run, self._numbers)),
        )
        # If each `next` receives a batch, its credit wakes the engine. If batches were received ahead, new keys must.
        self._tell: Callable[..., None] = runtime.post if self._batches.looks_ahead else runtime.put
        self._draw(self._economy.prefetch_factor, runtime.post)

    def _next_data(self) -> Any:
        return next(self._drawn_ahead())

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> object:
        batches = self._drawn_ahead()
        with trimming:
            batch = await anext(batches)
        self._num_yielded += 1
        return batch

    def try_next(self) -> object:
        """Return the next batch if it is ready. Raises as `BatchIterator.try_next`."""
        batches = self._drawn_ahead()
        with trimming:
            batch = batches.try_next()
        self._num_yielded += 1
        return batch

    def _drawn_ahead(self) -> BatchIterator[object]:
        self._draw(self._batches.batches + self._economy.prefetch_factor + 1)
        return self._batches

    def _key(self) -> int:
        economy = self._economy
        epoch, economy.epoch = economy.epoch, economy.epoch + 1
        self.run.add(epoch_of_samples=epoch, run=self._run_number)
        if economy.seed is not None:
            return sample_seed(economy.seed, epoch)
        return sample_seed(int(self._base_seed), self._run_number)  # drawn for each iterator, not for each of its runs

    def close(self) -> None:
        """End this run: free its memory, and cancel the work of its workers."""
        self._batches.close()

    def _draw(self, count: int, tell: Callable[..., None] | None = None) -> None:
        """Draw indices from the sampler, in this thread, until `count` batches were drawn."""
        tell, source = tell or self._tell, self._source
        while self._drawn < count and not self._is_drawn:
            try:
                index = self._next_index()  # type: ignore[no-untyped-call]
                while is_among(self._first, self._beyond):  # returned already
                    self._first += 1
                    index = self._next_index()  # type: ignore[no-untyped-call]
            except StopIteration:
                self._is_drawn = True
                tell(source.add, None)
            else:
                self._numbers[self._drawn] = self._first
                self._first += 1
                self._drawn += 1
                tell(source.add, list(index) if self._auto_collation else [index])


class _DrawnProgress(Progress):
    """Progress of a run by the numbers of its batches in the sampler's epoch."""

    def __init__(self, run: RunProgress, numbers: dict[int, int]) -> None:
        self._run, self._numbers = run, numbers

    def ask(self) -> None: ...

    def receive(self, batch: Arrived) -> None:
        self._run.receive(self._numbers.pop(batch.batch), 0, self._run.point.given + 1)

    def fail(self, batch: Arrived) -> None:
        self._run.receive(self._numbers.pop(batch.batch), 0, self._run.point.given)

    def end(self) -> None:
        self._run.is_finished = True


def _chain(iterator: EconomicIterator, loader: TorchLoader[object], economy: Economy) -> Chain:
    dataset, collate = iterator._dataset, iterator._collate_fn
    init = with_sharding(loader.worker_init_fn, dataset, iterator._world_size, iterator._rank)
    if not iterator._auto_collation:
        collate = Single(collate)
    elif collate is default_collate:
        collate = plain_collate
    many = get_many(dataset) if iterator._auto_collation else None
    return Chain(
        (Step("__getitem__" if many is None else "__getitems__", "map", getter(dataset), random=True),),
        collate,
        by_key=True,
        many=many,
        begin=Begin(dataset, loader.num_workers, int(iterator._base_seed), init, economy.in_threads),
        pack_error=partial(pack_in, "thread" if economy.in_threads else "process"),
    )
