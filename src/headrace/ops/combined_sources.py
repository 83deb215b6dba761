"""Several inputs as one data set: reading of their samples."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, SupportsIndex

import numpy as np

from headrace._util.reads import Opens
from headrace.dataset.asynchronous import AsyncDataset, KeySource
from headrace.dataset.source import KeepsKey, SampleSource, Traits, Wanted
from headrace.dataset.stream import Stream
from headrace.formats.tar.format import TAR
from headrace.indexes.index import Index
from headrace.indexes.joined import JoinedFiles
from headrace.ops.combined import JoinedSpec
from headrace.ops.combined_orders import JoinedOrders
from headrace.ops.run_inline import NamedSteps, split_steps, through, through_first
from headrace.order.mixture import TokenMixing
from headrace.pipeline.ordering import Ordering
from headrace.readers.indexed_members import Members
from headrace.sources.reading import OwnReaders
from headrace.sources.shards import IndexedShards, IndexedShardSource
from headrace.types import Ints


class InPlace:
    """Positions of a source whose samples do not depend on the seed or the epoch."""

    def __init__(self, source: SampleSource) -> None:
        self._orders = source.orders((), 0)
        self._order = self._orders.order(0, 0)

    def number(self, key: SupportsIndex) -> int:
        """Return the number of the sample at a position. Negative positions count from the end.

        Raises:
            IndexError: The position is out of range.
        """
        try:
            position = range(self._order.count)[key]
        except IndexError:
            raise IndexError(f"there is no sample {key}: there are {self._order.count}") from None
        return int(self._orders.numbers(self._order, np.array([position]))[0])


class InputsDataset(AsyncDataset):
    def __init__(self, spec: JoinedSpec) -> None:
        self.spec = spec
        self._first_steps = [split_steps(pipeline.steps)[0] for pipeline in spec.pipelines]
        self._keys: list[Sequence[object] | None] = [None] * len(spec.names)

    def __sample_source__(self) -> SampleSource:
        return JoinedKeySource(self)

    @functools.cached_property
    def in_place(self) -> InPlace:
        return InPlace(self.__sample_source__())

    @property
    def starts(self) -> Ints:
        raise NotImplementedError

    def with_spec(self, spec: JoinedSpec) -> InputsDataset:
        """Return the data set of the same inputs in another order."""
        raise NotImplementedError

    @property
    def storage_options(self) -> Mapping[str, object] | None:
        """Options for single objects. Shards with other options have their own readers."""
        sources = self.spec.sources
        objects = (one for source in sources for one in source.objects)
        return next((one.storage_options for one in (*objects, *sources) if one.has_store), None)

    async def got(self, number: int, at: int) -> object:
        """Read sample `at` of input `number`, through the leading coroutine functions."""
        source, text = self.spec.sources[number], self.spec.labels[number]
        inside: object = at
        try:
            if not (source.traits.sharded or source.traits.by_number):
                keys = self._keys[number]
                if keys is None:
                    keys = self._keys[number] = source.data.keys()
                inside = keys[at]
                text += f", key {inside!r:.200}"
            sample = await source.at(inside, self.spec.pipelines[number].wanted)
            return await through_first(self._first_steps[number], sample)
        except Exception as error:
            error.add_note(text)
            raise

    async def aopen(self) -> None:
        async with AsyncExitStack() as opened:
            for opens in _opens(self.spec.sources):
                await opens.aopen()
                opened.push_async_callback(opens.aclose)
            opened.pop_all()

    async def aclose(self) -> None:
        async with AsyncExitStack() as opened:
            for opens in _opens(self.spec.sources):
                opened.push_async_callback(opens.aclose)


class JoinedDataset(InputsDataset):
    """Samples of several inputs, numbered in sequence.

    Unless `is_done`, which means that no steps follow in workers, each sample is paired with its input's number.
    """

    def __init__(self, spec: JoinedSpec, *, is_done: bool) -> None:
        super().__init__(spec)
        self._is_done = is_done

    def __reduce__(self) -> tuple[object, ...]:
        return functools.partial(JoinedDataset, is_done=self._is_done), (self.spec,)

    def with_spec(self, spec: JoinedSpec) -> JoinedDataset:
        return JoinedDataset(spec, is_done=self._is_done)

    def __len__(self) -> int:
        return self._firsts[-1]

    @functools.cached_property
    def starts(self) -> Ints:
        """First sample number of each shard, then the total. An input without shards counts as one."""
        starts = [source.starts for source in self.spec.sources]
        firsts = np.cumsum([0, *(each[-1] for each in starts)])
        parts = [first + each[:-1] for first, each in zip(firsts.tolist(), starts, strict=False)]
        return np.concatenate([*parts, firsts[-1:]])

    @functools.cached_property
    def _firsts(self) -> list[int]:
        return [0, *np.cumsum([int(source.starts[-1]) for source in self.spec.sources]).tolist()]

    async def aget(self, key: int) -> object:
        key = range(len(self))[key]
        number = bisect.bisect_right(self._firsts, key) - 1
        sample = await self.got(number, key - self._firsts[number])
        if not self._is_done:
            return number, sample
        return named(sample, self.spec.names[number]) if self.spec.adds_names else sample


class JoinedShards(IndexedShards):
    """The shards of several inputs as one set, read by ranges."""

    def __init__(self, spec: JoinedSpec) -> None:
        shards: list[IndexedShards] = [source.data for source in spec.sources]
        urls = tuple(url for source in shards for url in source.urls)
        index = Index(urls, JoinedFiles([source.index for source in shards]), shards[0].limits, TAR)
        # Members stay raw here: each input decodes its own.
        super().__init__(urls, index, shards[0].storage_options, shards[0].limits, TAR)
        self._readers = OwnReaders(self.storage_options, self.aclose)
        self.spec = spec
        self._firsts = [0, *np.cumsum([len(source.urls) for source in shards]).tolist()]

    def __sample_source__(self) -> SampleSource:
        return JoinedShardSource(self)

    def __reduce__(self) -> tuple[object, ...]:
        return JoinedShards, (self.spec,)

    def with_spec(self, spec: JoinedSpec) -> JoinedShards:
        return JoinedShards(spec)

    @functools.cached_property
    def in_place(self) -> InPlace:
        return InPlace(self.__sample_source__())

    async def members(self, ordinal: int, chosen: Ints, wanted: Wanted | None) -> Members:
        source, first = self._source_of(ordinal)
        return await source.members(ordinal - first, chosen, self._wanted(ordinal) if wanted is None else wanted)

    async def get(self, number: int, wanted: Wanted | None) -> dict[str, object]:
        ordinal, _ = self.index.locate(number)
        source, first = self._source_of(ordinal)
        number -= int(self.index.starts[first])
        return await source.get(number, self._wanted(ordinal) if wanted is None else wanted)

    def _source_of(self, ordinal: int) -> tuple[IndexedShards, int]:
        """Return the input of a shard, which knows the sample ranges, and the input's first shard."""
        number = bisect.bisect_right(self._firsts, ordinal) - 1
        source: IndexedShards = self.spec.sources[number].data
        return source, self._firsts[number]

    async def aclose(self) -> None:
        async with AsyncExitStack() as opened:
            for opens in _opens(self.spec.sources):
                opened.push_async_callback(opens.aclose)
            await super().aclose()

    def _wanted(self, ordinal: int) -> Wanted | None:
        return self.spec.pipelines[bisect.bisect_right(self._firsts, ordinal) - 1].wanted


class JoinedStep:
    """Applies to each sample the steps of its input.

    Args:
        names: Names of the inputs to add to samples. None: none are added.
        by_url: Input number by URL of a shard. None: samples are paired with the number.
    """

    def __init__(
        self,
        labels: Sequence[str],
        names: Sequence[str] | None,
        steps: Sequence[NamedSteps],
        by_url: dict[str, int] | None,
    ) -> None:
        self.labels, self.names = tuple(labels), None if names is None else tuple(names)
        self.steps, self.by_url = tuple(map(tuple, steps)), by_url

    def __call__(self, sample: Any) -> object:
        if self.by_url is None:
            number, sample = sample
        else:
            number = self.by_url[sample["__url__"]]
        sample = through(self.steps[number], sample, f"{self.labels[number]}; ")
        return sample if self.names is None else named(sample, self.names[number])


def named(sample: object, name: str) -> object:
    """Add the name of the source to a sample that is a dict."""
    return {**sample, "__source__": name} if isinstance(sample, dict) else sample


def _opens(sources: Sequence[SampleSource]) -> list[Opens]:
    """Return the resources to open, once for each data set."""
    by_data = {id(source.data): source.opens for source in sources}
    return [opens for opens in by_data.values() if opens is not None]


class JoinedSource(SampleSource):
    data: InputsDataset | JoinedShards

    @property
    def _spec(self) -> JoinedSpec:
        return self.data.spec

    @property
    def text(self) -> str:
        return self._spec.text

    @property
    def objects(self) -> Sequence[SampleSource]:
        return [one for source in self._spec.sources for one in source.objects]

    @property
    def is_endless(self) -> bool:
        return self._spec.is_endless

    @property
    def has_store(self) -> bool:
        return True

    @property
    def inputs(self) -> Sequence[tuple[str, Stream]]:
        return list(zip(self._spec.names, self._spec.streams, strict=True))

    @property
    def has_count(self) -> bool:
        return all(source.has_count for source in self._spec.sources)

    @property
    def drawn_by_tokens(self) -> tuple[Any, TokenMixing] | None:
        drawn = self._spec.drawn_by_tokens
        return None if drawn is None else (self.data.with_spec(drawn[0]), drawn[1])

    @property
    def is_in_order(self) -> bool:
        return self._spec.is_in_order

    @property
    def is_steady(self) -> bool:
        return self._spec.is_steady

    @property
    def draws(self) -> bool:
        return not self._spec.is_in_order

    @property
    def answers_keys(self) -> bool:
        return False

    def count(self) -> int:
        return self._spec.count

    def keys(self) -> Sequence[Any]:
        return super().keys() if self._is_by_own_number else range(self.count())

    async def aget(self, key: Any) -> object:
        return await self.aget_wanted(key, None)

    async def aget_wanted(self, key: Any, wanted: Wanted | None) -> object:
        return await self.at(self.number(key), wanted)

    def number(self, key: Any) -> object:
        if self._is_by_own_number:
            return key
        if not self.is_steady:
            raise TypeError(
                f"{self.text} gives no sample by its number: its inputs come in other orders in other epochs; "
                "shuffle or draw what comes of them, and not the inputs"
            )
        return self.data.in_place.number(key)

    @property
    def is_paired(self) -> bool:
        return self._spec.is_paired

    @property
    def _is_by_own_number(self) -> bool:
        return self._spec.has_own_numbers or self._spec.is_in_order

    def can_permute(self, by: str) -> bool:
        return self._spec.can_permute("global" if by == "auto" and not self.traits.sharded else by)

    def check_order(self, order: Ordering) -> None:
        self._spec.check_order(order)

    def orders(self, keeps: tuple[KeepsKey, ...], seed: int) -> JoinedOrders:
        assert not keeps, "no index is asked for keys of several inputs"
        return JoinedOrders(self, self._spec, seed)


class JoinedKeySource(JoinedSource, KeySource):
    traits = Traits(numbered=True, by_number=True)

    def __init__(self, data: InputsDataset) -> None:
        super().__init__(data)
        self.data: InputsDataset = data

    async def at(self, key: Any, wanted: Wanted | None) -> object:  # noqa: ARG002 (each input knows what it needs)
        return await self.data.aget(key)

    @property
    def storage_options(self) -> Mapping[str, object] | None:
        return self.data.storage_options

    @property
    def starts(self) -> Ints:
        return self.data.starts


class JoinedShardSource(JoinedSource, IndexedShardSource):
    def __init__(self, data: JoinedShards) -> None:
        super().__init__(data)
        self.data: JoinedShards = data

    async def at(self, key: Any, wanted: Wanted | None) -> object:
        return await self.data.aget(key, wanted)

    @property
    def starts(self) -> Ints:
        len(self.data)
        return self.data.index.starts

    @property
    def blocks(self) -> Ints | None:
        return self.data.blocks if self.is_in_order else None  # otherwise blocks are not read sequentially

    def has_numbers(self, *, by_number: bool, by_key: bool) -> bool:  # noqa: ARG002
        return True
