"""The headrace regime: what is behind a loader whose data set is one of ours."""

from __future__ import annotations

import asyncio
import math
import os
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from headrace.blueprint import Blueprint
from headrace.datasets.stream import Stream
from headrace.deliver.iterator import BatchIterator
from headrace.errors import LoaderClosedError, OptionError
from headrace.machinery import Machinery
from headrace.observe.stats import Stats
from headrace.options import Settings
from headrace.plan import sample_seed
from headrace.scheduler.skips import Skips
from headrace.torch_compat import packing


class Streaming:
    """A stream with the machinery that runs it.

    Args:
        stream: the data, shuffled and cut as the loader was told.
        settings: what the loader was told.
        in_threads: whether workers are threads of this process.
        shard: whether ranks of a distributed run get different samples.
        name: what a profiler calls `next`.
    """

    def __init__(self, stream: Stream, settings: Settings, *, in_threads: bool, shard: bool, name: str) -> None:
        self._stream, self._settings, self._shard, self._name = stream, settings, shard, name
        self._epochs = _Epochs()
        self._peeked: BatchIterator[Any] | None = None
        self._machinery = Machinery(replace(settings, collate=None, init=None, skips=None), in_threads=in_threads)
        self._blueprint = Blueprint(stream.pipeline(), settings, self._machinery.part_of)
        self._finalizer = weakref.finalize(self, self._machinery.close_soon)
        self._finalizer.atexit = False

    @property
    def options(self) -> dict[str, Any]:
        """What every "auto" has become."""
        names = ("prefetch_factor", "fetch_concurrency", "memory_budget", "seed", "fetch")
        skips = self._settings.skips
        told: dict[str, Any] = {"on_error": "raise" if skips is None else skips.decide or "skip"}
        if skips is not None:
            told["max_skips"] = skips.in_all, skips.in_a_row
        return {name: getattr(self._settings, name) for name in names} | told

    def iterate(self, loader: Any, caller: asyncio.AbstractEventLoop | None) -> BatchIterator[Any]:
        """The next epoch's batches.

        Args:
            loader: not kept.
            caller: the loop of an `async for`.
        """
        del loader
        peeked, self._peeked = self._peeked, None
        return peeked if peeked is not None else self._new_iterator(caller)

    def length(self) -> int:
        """Batches in an epoch; TypeError where that is not known before it ends."""
        count, settings = len(self._stream), self._settings
        if self._stream.pipeline().group is not None:
            return count
        return count // settings.batch_size if settings.drop_last else math.ceil(count / settings.batch_size)

    @property
    def epoch(self) -> int:
        """The number of the epoch that the next `iterate` begins."""
        return self._epochs.number

    def set_epoch(self, epoch: int) -> None:
        """Have the next `iterate` begin this epoch."""
        self._epochs.number = epoch
        self._peeked = None

    def peek(self) -> Any:
        """The first batch of the next epoch, which is not consumed by that."""
        if self._peeked is None:
            iterator = self._new_iterator(None)
            iterator.peek()
            self._peeked = iterator
        return self._peeked.peek()

    def stats(self) -> Stats:
        """A snapshot of all counters."""
        return self._machinery.stats(self._epochs.number)

    def close(self) -> None:
        """End everything that runs, and wait until nothing of it is left."""
        self._peeked = None
        self._machinery.close()
        self._finalizer.detach()

    def _new_iterator(self, caller: asyncio.AbstractEventLoop | None) -> BatchIterator[Any]:
        world = _world()
        if world > 1 and self._shard:
            raise OptionError(
                f"{world} ranks are running, and dividing samples among ranks is not built yet; "
                "shard=False gives every rank all samples"
            )
        number = self._epochs.number
        reader = self._machinery.reader(self._blueprint.storage_options)
        return self._machinery.iterate(
            self,
            self._blueprint.source(number, reader, caller),
            self._blueprint.recipe,
            sample_seed(self._settings.seed, number),
            _weakly(self._blueprint.prepare),
            partial(self._epochs.advance, number),
            self._name,
            self._known_length(),
            skips=self._skips(number),
        )

    def _skips(self, epoch: int) -> Skips | None:
        policy = self._settings.skips
        if policy is None:
            return None
        return Skips(weakref.ref(policy), epoch, self._machinery.meters, packing.unpack_error, packing.pack_error)

    def _known_length(self) -> int | None:
        try:
            return self.length()
        except TypeError:
            return None


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


def _world() -> int:
    """How many ranks are running."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))
