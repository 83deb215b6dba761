"""The DataLoader: torch's constructor, and behind it either torch's own engine or ours, as the data set says."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import anyio.to_thread
import torch
import torch.utils.data
from torch.utils.data._utils.collate import default_convert

from headrace.blueprint import Blueprint
from headrace.datasets.base import Operators
from headrace.datasets.stream import Pipeline, Stream
from headrace.deliver.iterator import BatchIterator, pinned, unchanged
from headrace.errors import LoaderBusyError, LoaderClosedError, OptionError
from headrace.machinery import Machinery
from headrace.observe.report import report, verdict
from headrace.observe.stats import Stats
from headrace.options import FetchOptions, Settings
from headrace.plan import sample_seed
from headrace.torch_compat.collate import default_collate, is_extended

T_co = TypeVar("T_co", covariant=True)

_FETCH_CONCURRENCY = 128
_MEMORY_SHARE = 4  # memory_budget="auto" is the machine's memory divided by this
_PREFETCH_BATCHES = 4
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", re.IGNORECASE)


class DataLoader(torch.utils.data.DataLoader[T_co]):
    """Batches of a data set, for `for` and for `async for`.

    It takes torch's arguments by torch's names. What happens behind it follows from the data set: streams,
    AsyncDatasets and AsyncIterableDatasets run on headrace's engine and keep its promises (regime "headrace"); torch's
    own data sets run on torch's engine, as they always have (regime "torch").

    In the headrace regime batches come in the order of the plan, which depends on (seed, epoch) alone; each sample
    comes once; and workers, reads in flight and memory have bounds of their own. Workers, connections and memory are
    the loader's, from its first iteration until `close()`, or until it is collected.

    Args:
        dataset: the data.
        batch_size: samples in a batch; None gives single samples.
        shuffle: the same as `.shuffle()` on the data set.
        num_workers: worker processes for plain functions and collation; 0: a thread of this process.
        collate_fn: makes a batch of a list of samples; by default torch's default_collate.
        pin_memory: copy batches into page-locked memory, where there is an accelerator.
        drop_last: leave a short last batch out.
        timeout: seconds that `next` waits for a batch at most; 0: for ever.
        worker_init_fn: called in each worker process with its number.
        generator: gives the seed, by one draw.
        prefetch_factor: batches made ahead, for all workers together; by default 4, or 2 for each worker where a worker
            makes whole batches (a collate_fn of your own); 0: nothing is made before it is asked for.
        in_order: False gives batches as they become ready.
        seed: of the order and of the samples' random numbers; None means 0.
        shard: ranks of a distributed run get different samples. Not built yet: False is needed there.
        fetch_concurrency: reads under way at once; "auto" is 128.
        memory_budget: bytes, or text such as "2GiB", for inputs and batches together; "auto" is a quarter of the
            memory that this process may use.
        fetch: how reads are made.

    Raises:
        OptionError: an option of ours has a value that cannot be used.
        ValueError: torch's own checks of torch's own options.

    Examples:
        >>> import headrace as hr
        >>> class Squares(hr.AsyncDataset):
        ...     def __len__(self):
        ...         return 5
        ...     async def aget(self, index):
        ...         return index * index
        >>> with hr.DataLoader(Squares(), batch_size=2) as loader:
        ...     [batch.tolist() for batch in loader]
        [[0, 1], [4, 9], [16]]
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Any = None,
        batch_sampler: Any = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], Any] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        seed: int | None = None,
        shard: bool = True,
        fetch_concurrency: int | Literal["auto"] = "auto",
        memory_budget: int | str = "auto",
        fetch: FetchOptions | None = None,
    ) -> None:
        self.regime: Literal["torch", "headrace"] = "headrace" if isinstance(dataset, Operators) else "torch"
        if self.regime == "torch":
            ours = {"seed": seed, "fetch": fetch} | {
                name: value
                for name, value in (("fetch_concurrency", fetch_concurrency), ("memory_budget", memory_budget))
                if value != "auto"
            }
            for name, value in ours.items():
                if value is not None:
                    raise OptionError(
                        f"{name}={value!r} is for headrace's data sets; {type(dataset).__name__} runs on torch's engine"
                    )
            super().__init__(
                dataset,
                batch_size,
                shuffle,
                sampler,
                batch_sampler,
                num_workers,
                collate_fn,
                pin_memory,
                drop_last,
                timeout,
                worker_init_fn,
                multiprocessing_context,
                generator,
                prefetch_factor=prefetch_factor,
                persistent_workers=persistent_workers,
                pin_memory_device=pin_memory_device,
                in_order=in_order,
            )
            return
        foreign = {
            "sampler": sampler,
            "batch_sampler": batch_sampler,
            "multiprocessing_context": multiprocessing_context,
        }
        for name, value in foreign.items():
            if value is not None:
                raise OptionError(f"{name}={value!r} is not supported for {type(dataset).__name__}; use its operators")
        if prefetch_factor is not None and prefetch_factor < 0:
            raise ValueError("prefetch_factor option should be non-negative")
        stream = dataset if isinstance(dataset, Stream) else Stream(dataset)
        if shuffle:
            stream = stream.shuffle()
        if drop_last:
            stream = stream.without_short_batches()
        pipeline = stream.pipeline()
        super().__init__(
            dataset,
            batch_size,
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            drop_last=drop_last,
            timeout=timeout,
            worker_init_fn=worker_init_fn,
            generator=generator,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )
        if seed is None:
            seed = 0 if generator is None else int(torch.randint(2**63 - 1, (), generator=generator).item())
        self._stream, self._shard, self._seed = stream, shard, seed
        settings = self._settings(
            pipeline, collate_fn, prefetch_factor, seed, fetch_concurrency, memory_budget, fetch or FetchOptions()
        )
        self.prefetch_factor = settings.prefetch_factor
        self.options = {
            "prefetch_factor": settings.prefetch_factor,
            "fetch_concurrency": settings.fetch_concurrency,
            "memory_budget": settings.memory_budget,
            "seed": settings.seed,
            "fetch": settings.fetch,
        }
        self._epoch = _Epochs()
        self._peeked: BatchIterator[T_co] | None = None
        self._machinery = Machinery(replace(settings, collate=None, init=None))
        self._blueprint = Blueprint(pipeline, settings, self._machinery.part_of)
        self._finalizer = weakref.finalize(self, self._machinery.close_soon)
        self._finalizer.atexit = False

    def __iter__(self) -> Iterator[T_co]:  # type: ignore[override]
        return super().__iter__() if self.regime == "torch" else self._iterate(None)

    def __aiter__(self) -> AsyncIterator[T_co]:
        if self.regime == "torch":
            return _in_threads(super().__iter__)
        return self._iterate(asyncio.get_running_loop())

    def __len__(self) -> int:
        """Batches in an epoch; TypeError where that is not known before it ends."""
        if self.regime == "torch":
            return super().__len__()
        count = len(self._stream)
        if self.batch_size is None or self._stream.pipeline().group is not None:
            return count
        return count // self.batch_size if self.drop_last else math.ceil(count / self.batch_size)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @property
    def epoch(self) -> int:
        """The number of the epoch that the next `iter` begins; it advances when an epoch is used up."""
        return self._ours("epoch")._epoch.number

    def set_epoch(self, epoch: int) -> None:
        """Have the next `iter` begin this epoch."""
        self._ours("set_epoch")._epoch.number = epoch
        self._peeked = None

    def peek(self) -> T_co:
        """The first batch of the next epoch, which the next `iter` gives again: nothing is consumed."""
        if self._ours("peek")._peeked is None:
            iterator = self._new_iterator(None)
            iterator.peek()
            self._peeked = iterator
        assert self._peeked is not None
        return self._peeked.peek()

    def stats(self) -> Stats:
        """A snapshot of what the loader has done so far, stage by stage."""
        return self._ours("stats")._machinery.stats(self._epoch.number)

    def report(self) -> str:
        """The same as a table, with one sentence that says what bounds the loader and what to try."""
        return report(self.stats())

    def bound_by(self) -> str:
        """What bounds the loader: "trainer", "fetch", "work", "collate", or "unknown" after too few batches."""
        return verdict(self.stats()).bound_by

    def close(self) -> None:
        """End all iterators, workers and reads, and wait until nothing is left; batches stay valid."""
        if self.regime == "headrace":
            self._peeked = None
            self._machinery.close()
            self._finalizer.detach()

    async def aclose(self) -> None:
        """As `close`, without blocking the caller's loop."""
        await anyio.to_thread.run_sync(self.close)

    def _iterate(self, caller: asyncio.AbstractEventLoop | None) -> BatchIterator[T_co]:
        peeked, self._peeked = self._peeked, None
        return peeked if peeked is not None else self._new_iterator(caller)

    def _new_iterator(self, caller: asyncio.AbstractEventLoop | None) -> BatchIterator[T_co]:
        world = _world()
        if world > 1 and self._shard:
            raise OptionError(
                f"{world} ranks are running, and dividing samples among ranks is not built yet; "
                "shard=False gives every rank all samples"
            )
        number = self._epoch.number
        name = f"enumerate(DataLoader)#{type(self).__name__}.__next__"
        reader = self._machinery.reader(self._blueprint.storage_options)
        return self._machinery.iterate(
            self,
            self._blueprint.source(number, reader, caller),
            self._blueprint.recipe,
            sample_seed(self._seed, number),
            _weakly(self._blueprint.prepare),
            partial(self._epoch.advance, number),
            name,
        )

    def _settings(
        self,
        pipeline: Pipeline,
        collate_fn: Callable[[list[Any]], Any] | None,
        prefetch_factor: int | None,
        seed: int,
        fetch_concurrency: int | Literal["auto"],
        memory_budget: int | str,
        fetch: FetchOptions,
    ) -> Settings:
        batch_size, drop_last = self.batch_size, self.drop_last
        collate: Callable[[list[Any]], Any] = collate_fn or default_collate
        if pipeline.group is not None:
            if batch_size not in (None, 1):
                raise OptionError(f"batch_size={batch_size} and .batch({pipeline.group.size}): give one of them")
            batch_size, drop_last = pipeline.group.size, pipeline.group.drop_last
        elif batch_size is None:
            collate = _Single(collate_fn or default_convert)
        use_slots = collate is default_collate and not pipeline.after and not is_extended()
        if prefetch_factor is None:
            prefetch_factor = _PREFETCH_BATCHES if use_slots else max(_PREFETCH_BATCHES, 2 * self.num_workers)
        concurrency: Any = _FETCH_CONCURRENCY if fetch_concurrency == "auto" else fetch_concurrency
        if not isinstance(concurrency, int) or concurrency < 1:
            raise OptionError(f"fetch_concurrency={fetch_concurrency!r} must be a number of 1 or more, or 'auto'")
        return Settings(
            batch_size=batch_size or 1,
            drop_last=drop_last,
            num_workers=self.num_workers,
            prefetch_factor=prefetch_factor,
            collate=collate,
            use_slots=use_slots,
            init=self.worker_init_fn if self.num_workers else None,
            seed=seed,
            in_order=self.in_order,
            timeout_s=self.timeout,
            fetch_concurrency=concurrency,
            memory_budget=_bytes(memory_budget),
            fetch=fetch,
            finish=pinned if self.pin_memory and torch.accelerator.is_available() else unchanged,
        )

    def _ours(self, name: str) -> Self:
        if self.regime == "torch":
            raise LoaderBusyError(f"{name} is there for data sets of headrace's; this loader runs on torch's engine")
        return self


def _weakly(prepare: Callable[[Machinery], Awaitable[None]]) -> Callable[[Machinery], Awaitable[None]]:
    """The same method, without keeping its object alive."""
    method = weakref.WeakMethod(prepare)

    async def call(machinery: Machinery) -> None:
        found = method()
        if found is None:
            raise LoaderClosedError("the loader is gone")
        await found(machinery)

    return call


class _Epochs:
    """Which epoch is next. The iterators advance it, and must not keep the loader alive by that."""

    def __init__(self) -> None:
        self.number = 0

    def advance(self, finished: int) -> None:
        self.number = max(self.number, finished + 1)


class _Single:
    """Collation where there is none: the function of the only sample."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def __call__(self, samples: list[Any]) -> Any:
        return self.function(samples[0])


async def _in_threads(make: Callable[[], Iterator[Any]]) -> AsyncIterator[Any]:
    """A blocking iterator, its calls made in a thread."""
    end = object()
    iterator = await anyio.to_thread.run_sync(make)
    while (batch := await anyio.to_thread.run_sync(next, iterator, end)) is not end:
        yield batch


def _world() -> int:
    """How many ranks are running."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def _bytes(budget: int | str) -> int:
    """A number of bytes out of an option.

    Raises:
        OptionError: it is none.
    """
    if budget == "auto":
        return _memory_bytes() // _MEMORY_SHARE
    if isinstance(budget, str):
        match = _SIZE.fullmatch(budget)
        if match is None:
            raise OptionError(f"memory_budget={budget!r}: bytes, or text such as '2GiB', or 'auto'")
        base = 1024 if match[3] or not match[2] else 1000
        budget = int(float(match[1]) * base ** (" KMGT".index(match[2].upper()) if match[2] else 0))
    if budget <= 0:
        raise OptionError(f"memory_budget={budget!r} must be more than 0 bytes")
    return budget


def _memory_bytes() -> int:
    """The memory that this process may use: the machine's, or its control group's where that is less."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            limits.append(int(Path(path).read_text()))
    return min(limits)
