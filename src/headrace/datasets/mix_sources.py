"""Mixtures as data sets: how they are mixed, and how their samples are got."""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import numpy as np

from headrace.datasets.asynchronous import AsyncDataset, KeySource
from headrace.datasets.ordering import Ordering
from headrace.datasets.own_readers import OwnReaders
from headrace.datasets.pipeline import Pipeline
from headrace.datasets.shards import IndexedShards, IndexedShardSource
from headrace.datasets.source import SampleSource, Wanted
from headrace.datasets.stream import Stream
from headrace.errors import OptionError
from headrace.functions import is_async, name_of
from headrace.indexes.index import Index
from headrace.indexes.joined import JoinedFiles
from headrace.plan.mixture import ChangingShares, ConstantShares, MixLayout, Until
from headrace.producers.members import Members
from headrace.tasks import Step
from headrace.types import Ints

Weights = Mapping[str, float] | Callable[[int], Mapping[str, float]] | None


class MixSpec:
    """The sources of a mixture, and how they are mixed.

    Attributes:
        names, streams: of the sources.
        until, step: see `mix`.
    """

    def __init__(self, streams: Mapping[str, Stream], weights: Weights, until: Until, step: int) -> None:
        self.names, self.streams = tuple(streams), tuple(streams.values())
        self.until, self.step = until, step
        self._weights = weights
        if isinstance(weights, Mapping):
            self._checked(weights)

    def __reduce__(self) -> tuple[Any, ...]:
        return MixSpec, (dict(zip(self.names, self.streams, strict=True)), self._weights, self.until, self.step)

    @functools.cached_property
    def pipelines(self) -> tuple[Pipeline, ...]:
        """Of the streams."""
        return tuple(stream.pipeline() for stream in self.streams)

    @property
    def sources(self) -> list[SampleSource]:
        """What the streams' samples come from."""
        return [pipeline.source for pipeline in self.pipelines]

    @property
    def is_changing(self) -> bool:
        """Whether the weights are a function of the step."""
        return callable(self._weights)

    @property
    def text(self) -> str:
        """How it is shown."""
        return f"mix({', '.join(self.names)})"

    @property
    def is_endless(self) -> bool:
        """Whether it has no end."""
        return self.until == "forever"

    def check_order(self, order: Ordering) -> None:
        """Whether samples of it can come in such an order.

        Raises:
            OptionError: they cannot.
        """
        names = self.names
        if order.shuffle is not None:
            raise OptionError(
                f"a mixture has an order of its own: shuffle its sources, hr.mix({{{names[0]!r}: data.shuffle(), …}}), "
                "and not what comes of them"
            )
        first = next(iter(order.operators), None)
        if self.is_endless and first is not None and not first.is_bound:
            raise OptionError(
                f"{first.text} of a mixture without end: bound it first, by .take(n) or .epoch(samples=N)"
            )

    @functools.cached_property
    def layout(self) -> MixLayout:
        """How many samples of each come when; asks how many each has."""
        sizes = [len(stream) for stream in self.streams]
        weights = self._weights
        if callable(weights):
            asked: Callable[[int], Mapping[str, float]] = weights
            by_step = lambda step: self._checked(asked(step), f" at step {step}")
            return MixLayout(sizes, ChangingShares(by_step, len(sizes), self.step), self.until)
        parts = sizes if weights is None else self._checked(weights)
        self._check_not_empty(sizes, parts)
        return MixLayout(sizes, ConstantShares(parts, self.step), self.until)

    def described(self) -> str:
        """The mixture as a state names it."""
        weights = self._weights
        shares = "sizes"
        if callable(weights):
            shares = name_of(weights)
        elif weights is not None:
            shares = ":".join(f"{weight:.12g}" for weight in self._checked(weights))
        return f"mix({', '.join(self.names)}; weights={shares}, until={self.until}, step={self.step})"

    def _checked(self, weights: Any, when: str = "") -> list[float]:
        """The weights in the order of the sources."""
        if not isinstance(weights, Mapping) or set(weights) != set(self.names):
            raise OptionError(
                f"weights{when} are {weights!r:.200}: a number for each of {', '.join(self.names)} is needed"
            )
        for name, weight in weights.items():
            if not isinstance(weight, (int, float, np.integer, np.floating)) or not math.isfinite(weight) or weight < 0:
                raise OptionError(f"the weight of {name!r}{when} is {weight!r}: weights are finite and not negative")
        if not any(weights.values()):
            raise OptionError(f"all weights{when} are 0: at least one must be larger")
        return [weight if type(weight) is int else float(weight) for weight in (weights[name] for name in self.names)]

    def _check_not_empty(self, sizes: Sequence[int], weights: Sequence[float]) -> None:
        for name, size, weight in zip(self.names, sizes, weights, strict=True):
            if weight and not size:
                raise OptionError(f"source {name!r} of the mixture has no samples: leave it out, or give it weight 0")


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
        self._keys: list[Sequence[Any] | None] = [None] * len(mixed.names)

    def __sample_source__(self) -> SampleSource:
        return MixSource(self)

    def __len__(self) -> int:
        return self._firsts[-1]

    @property
    def storage_options(self) -> Mapping[str, Any] | None:
        """Those that single objects are read with; shards that have others have readers of their own."""
        sources = sorted(self.mixed.sources, key=lambda source: not source.traits.objects)
        return next((s.storage_options for s in sources if s.urls or s.mix is not None), None)

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

    async def aget(self, key: int) -> Any:
        """(the number of its source, the sample), or the sample itself where it has its name."""
        key = range(len(self))[key]
        number = bisect.bisect_right(self._firsts, key) - 1
        name, source = self.mixed.names[number], self.mixed.sources[number]
        inside: Any = key - self._firsts[number]
        text = f"source {name!r}"
        try:
            if not source.traits.sharded and source.mix is None:
                keys = self._keys[number]
                if keys is None:
                    keys = self._keys[number] = source.data.keys()
                inside = keys[inside]
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

    def __reduce__(self) -> tuple[Any, ...]:
        return MixShards, (self.mixed,)

    async def members(self, ordinal: int, chosen: Ints, wanted: Wanted | None) -> Members:
        return await super().members(ordinal, chosen, self._wanted(ordinal) if wanted is None else wanted)

    async def get(self, number: int, wanted: Wanted | None) -> dict[str, Any]:
        ordinal, _ = self.index.locate(number)
        return await super().get(number, self._wanted(ordinal) if wanted is None else wanted)

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

    def __call__(self, sample: Any) -> Any:
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


def named(sample: Any, name: str) -> Any:
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


class MixSource(KeySource):
    """A mixture whose samples are got one by one."""

    def __init__(self, data: MixDataset) -> None:
        super().__init__(data)
        self.data: MixDataset = data

    @property
    def mix(self) -> MixSpec:
        return self.data.mixed

    @property
    def text(self) -> str:
        return self.mix.text

    @property
    def is_endless(self) -> bool:
        return self.mix.is_endless

    @property
    def storage_options(self) -> Mapping[str, Any] | None:
        return self.data.storage_options

    @property
    def starts(self) -> Ints:
        return self.data.starts

    def count(self) -> int:
        return self.mix.layout.count

    def check_order(self, order: Ordering) -> None:
        self.mix.check_order(order)


class MixShardSource(IndexedShardSource):
    """A mixture of shards that are read in ranges."""

    def __init__(self, data: MixShards) -> None:
        super().__init__(data)
        self.data: MixShards = data

    @property
    def mix(self) -> MixSpec:
        return self.data.mixed

    @property
    def text(self) -> str:
        return self.mix.text

    @property
    def is_endless(self) -> bool:
        return self.mix.is_endless

    @property
    def starts(self) -> Ints:
        len(self.data)
        return self.data.index.starts

    def has_numbers(self, *, by_number: bool, by_key: bool) -> bool:  # noqa: ARG002
        return True

    def count(self) -> int:
        return self.mix.layout.count

    def check_order(self, order: Ordering) -> None:
        self.mix.check_order(order)
