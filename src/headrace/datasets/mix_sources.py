"""Mixtures as data sets: how their samples are got."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import numpy as np

from headrace.datasets.asynchronous import AsyncDataset, KeySource
from headrace.datasets.mix_orders import MixOrders
from headrace.datasets.mix_spec import MixSpec
from headrace.datasets.ordering import Ordering
from headrace.datasets.planning import Planning
from headrace.datasets.shards import IndexedShards, IndexedShardSource
from headrace.datasets.source import KeepsKey, SampleSource, Traits, Wanted
from headrace.errors import OptionError
from headrace.functions import is_async
from headrace.indexes.index import Index
from headrace.indexes.joined import JoinedFiles
from headrace.plan import draw
from headrace.producers.members import Members
from headrace.reading import OwnReaders
from headrace.tasks import Step
from headrace.types import Ints


class MixDataset(AsyncDataset):
    """The samples of several sources, one behind the other, by number; a sample goes with its source's number.

    Args:
        mixed: the sources.
        is_named: whether samples have their names already, and go by themselves: nothing is done to them in workers.
    """

    def __init__(self, mixed: MixSpec, *, is_named: bool) -> None:
        self.mixed = mixed
        self._is_named = is_named
        self._async_steps = [split_steps(pipeline.steps)[0] for pipeline in mixed.pipelines]
        self._keys: list[Sequence[object] | None] = [None] * len(mixed.names)

    def __sample_source__(self) -> SampleSource:
        return MixSource(self)

    def __len__(self) -> int:
        return self._firsts[-1]

    @property
    def storage_options(self) -> Mapping[str, object] | None:
        """Those that single objects are read with; shards that have others have readers of their own."""
        sources = sorted(self.mixed.sources, key=lambda source: not source.traits.objects)
        return next((source.storage_options for source in sources if source.has_store), None)

    @functools.cached_property
    def starts(self) -> Ints:
        """The number of the first sample of each shard of each source; sources without shards are one."""
        starts = [source.starts for source in self.mixed.sources]
        firsts = np.cumsum([0, *(each[-1] for each in starts)])
        parts = [first + each[:-1] for first, each in zip(firsts.tolist(), starts, strict=False)]
        return np.concatenate([*parts, firsts[-1:]])

    @functools.cached_property
    def _firsts(self) -> list[int]:
        return [0, *np.cumsum([int(source.starts[-1]) for source in self.mixed.sources]).tolist()]

    async def aget(self, key: int) -> object:
        """(the number of its source, the sample), or the sample itself where it has its name."""
        key = range(len(self))[key]
        number = bisect.bisect_right(self._firsts, key) - 1
        name, source = self.mixed.names[number], self.mixed.sources[number]
        at = key - self._firsts[number]
        inside: object = at
        text = f"source {name!r}"
        try:
            if not (source.traits.sharded or source.traits.by_number):
                keys = self._keys[number]
                if keys is None:
                    keys = self._keys[number] = source.data.keys()
                inside = keys[at]
                text += f", key {inside!r:.200}"
            sample = await source.aget(inside)
            for step in self._async_steps[number]:
                text += f"; stage: {step.name}"
                sample = await step.fn(sample)
        except Exception as error:
            error.add_note(text)
            raise
        return named(sample, name) if self._is_named else (number, sample)

    async def aopen(self) -> None:
        async with AsyncExitStack() as opened:
            for source in _distinct(self.mixed.sources):
                await source.aopen()
                opened.push_async_callback(source.aclose)
            opened.pop_all()

    async def aclose(self) -> None:
        async with AsyncExitStack() as opened:
            for source in _distinct(self.mixed.sources):
                opened.push_async_callback(source.aclose)


class MixShards(IndexedShards):
    """The shards of several sources as those of one, to be read in ranges.

    Args:
        mixed: the sources, all of them such shards.
    """

    def __init__(self, mixed: MixSpec) -> None:
        shards: list[IndexedShards] = [source.data for source in mixed.sources]
        urls = tuple(url for source in shards for url in source.urls)
        index = Index(urls, JoinedFiles([source.index for source in shards]), shards[0].limits)
        super().__init__(urls, index, shards[0].storage_options, shards[0].limits)
        self._readers = OwnReaders(self.storage_options, self.aclose)
        self.mixed = mixed
        self._firsts = [0, *np.cumsum([len(source.urls) for source in shards]).tolist()]

    def __sample_source__(self) -> SampleSource:
        return MixShardSource(self)

    def __reduce__(self) -> tuple[object, ...]:
        return MixShards, (self.mixed,)

    async def members(self, ordinal: int, chosen: Ints, wanted: Wanted | None) -> Members:
        source, first = self._source_of(ordinal)
        return await source.members(ordinal - first, chosen, self._wanted(ordinal) if wanted is None else wanted)

    async def get(self, number: int, wanted: Wanted | None) -> dict[str, object]:
        ordinal, _ = self.index.locate(number)
        source, first = self._source_of(ordinal)
        number -= int(self.index.starts[first])
        return await source.get(number, self._wanted(ordinal) if wanted is None else wanted)

    def _source_of(self, ordinal: int) -> tuple[IndexedShards, int]:
        """The source of a shard, and the number of its first one: only it may know where samples lie there."""
        number = bisect.bisect_right(self._firsts, ordinal) - 1
        source: IndexedShards = self.mixed.sources[number].data
        return source, self._firsts[number]

    async def aclose(self) -> None:
        async with AsyncExitStack() as opened:
            for source in _distinct(self.mixed.sources):
                opened.push_async_callback(source.aclose)
            await super().aclose()

    def _wanted(self, ordinal: int) -> Wanted | None:
        """What the steps of its source use of a shard's samples."""
        return self.mixed.pipelines[bisect.bisect_right(self._firsts, ordinal) - 1].wanted


class MixStep:
    """Does to each sample what its source's own steps do, and gives it that source's name.

    Args:
        names: of the sources.
        steps: of each, with their names.
        by_url: the number of the source whose shard has an address; None: samples come with these numbers.
    """

    def __init__(
        self,
        names: Sequence[str],
        steps: Sequence[Sequence[tuple[str, Callable[[Any], Any]]]],
        by_url: dict[str, int] | None,
    ) -> None:
        self.names, self.steps, self.by_url = tuple(names), tuple(map(tuple, steps)), by_url

    def __call__(self, sample: Any) -> object:
        if self.by_url is None:
            number, sample = sample
        else:
            number = self.by_url[sample["__url__"]]
        for name, function in self.steps[number]:
            try:
                sample = function(sample)
            except Exception as error:
                error.add_note(f"source {self.names[number]!r}; stage: {name}")
                raise
        return named(sample, self.names[number])


def named(sample: object, name: str) -> object:
    """A sample that says which source it is of, if it is a dict."""
    return {**sample, "__source__": name} if isinstance(sample, dict) else sample


def split_steps(steps: Sequence[Step], name: str = "") -> tuple[list[Step], list[Step]]:
    """(the coroutine functions that come first, the plain functions that follow)."""
    first = next((k for k, step in enumerate(steps) if not is_async(step.fn)), len(steps))
    late = next((step for step in steps[first:] if is_async(step.fn)), None)
    if late is not None:
        raise OptionError(
            f"{late.name} of source {name!r} is an async function behind a plain one: put it before that, or behind "
            "hr.mix"
        )
    return list(steps[:first]), list(steps[first:])


def _distinct(sources: Sequence[SampleSource]) -> list[AsyncDataset]:
    return list({id(source.data): source.data for source in sources}.values())


class MixedSource(SampleSource):
    """A mixture."""

    data: MixDataset | MixShards

    @property
    def _mixed(self) -> MixSpec:
        return self.data.mixed

    @property
    def text(self) -> str:
        return self._mixed.text

    @property
    def is_endless(self) -> bool:
        return self._mixed.is_endless

    @property
    def has_store(self) -> bool:
        return True

    @property
    def draws(self) -> bool:
        return True

    def count(self) -> int:
        return self._mixed.layout.count

    def check_order(self, order: Ordering) -> None:
        self._mixed.check_order(order)

    def orders(self, keeps: tuple[KeepsKey, ...], seed: int) -> MixOrders:
        assert not keeps, "no index is asked for keys of a mixture"
        seeds = [draw("source", seed, name) for name in self._mixed.names]  # else sources of one size had one order
        return MixOrders(self, self._mixed, list(map(Planning, self._mixed.pipelines, seeds)), seed)


class MixSource(MixedSource, KeySource):
    """A mixture whose samples are got one by one."""

    traits = Traits(numbered=True, by_number=True)

    def __init__(self, data: MixDataset) -> None:
        super().__init__(data)
        self.data: MixDataset = data

    @property
    def storage_options(self) -> Mapping[str, object] | None:
        return self.data.storage_options

    @property
    def starts(self) -> Ints:
        return self.data.starts


class MixShardSource(MixedSource, IndexedShardSource):
    """A mixture of shards that are read in ranges."""

    def __init__(self, data: MixShards) -> None:
        super().__init__(data)
        self.data: MixShards = data

    @property
    def starts(self) -> Ints:
        len(self.data)
        return self.data.index.starts

    def has_numbers(self, *, by_number: bool, by_key: bool) -> bool:  # noqa: ARG002
        return True
