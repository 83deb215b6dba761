"""Mixtures: several streams whose samples come by weight, as one data set."""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from headrace.datasets.base import AsyncDataset, Operators
from headrace.datasets.operators import EpochOf, Repeat, is_async, name_of
from headrace.datasets.own_readers import OwnReaders
from headrace.datasets.shards import IndexedShards, Wanted
from headrace.errors import OptionError, masked
from headrace.fetch.members import Members
from headrace.indexes.index import Index
from headrace.indexes.joined import JoinedFiles
from headrace.plan.mixture import Blend, ChangingShares, ConstantShares, Until
from headrace.tasks import Step
from headrace.types import Ints

if TYPE_CHECKING:
    from headrace.datasets.stream import Pipeline, Stream

Weights = Mapping[str, float] | Callable[[int], Mapping[str, float]] | None

_STEP_SAMPLES = 1024


class Mixed:
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
        return Mixed, (dict(zip(self.names, self.streams, strict=True)), self._weights, self.until, self.step)

    @functools.cached_property
    def pipelines(self) -> tuple[Pipeline, ...]:
        """Of the streams."""
        return tuple(stream.pipeline() for stream in self.streams)

    @property
    def sources(self) -> list[AsyncDataset]:
        """What the streams' samples come from."""
        return cast("list[AsyncDataset]", [pipeline.source for pipeline in self.pipelines])  # `mix` sees to it

    @property
    def is_changing(self) -> bool:
        """Whether the weights are a function of the step."""
        return callable(self._weights)

    @functools.cached_property
    def blend(self) -> Blend:
        """How many samples of each come when; asks how many each has."""
        sizes = [len(stream) for stream in self.streams]
        weights = self._weights
        if callable(weights):
            asked: Callable[[int], Mapping[str, float]] = weights
            by_step = lambda step: self._checked(asked(step), f" at step {step}")
            return Blend(sizes, ChangingShares(by_step, len(sizes), self.step), self.until)
        parts = sizes if weights is None else self._checked(weights)
        self._check_not_empty(sizes, parts)
        return Blend(sizes, ConstantShares(parts, self.step), self.until)

    def told(self) -> str:
        """The mixture as a state names it."""
        weights = self._weights
        told = "sizes"
        if callable(weights):
            told = name_of(weights)
        elif weights is not None:
            told = ":".join(f"{weight:.12g}" for weight in self._checked(weights))
        return f"mix({', '.join(self.names)}; weights={told}, until={self.until}, step={self.step})"

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


class Mixture(AsyncDataset):
    """The samples of several sources, one behind the other, by number; a sample goes with its source's number.

    Args:
        mixed: the sources.
        is_named: whether samples have their names already, and go by themselves: nothing is done to them in workers.
    """

    def __init__(self, mixed: Mixed, *, is_named: bool) -> None:
        self.mixed = mixed
        self._is_named = is_named
        self._async_steps = [_split(pipeline.steps)[0] for pipeline in mixed.pipelines]
        self._keys: list[Sequence[Any] | None] = [None] * len(mixed.names)

    def __len__(self) -> int:
        return self._firsts[-1]

    @property
    def storage_options(self) -> Mapping[str, Any] | None:
        """Those that single objects are read with; shards that have others have readers of their own."""
        from headrace.datasets.stream import Files

        sources = sorted(self.mixed.sources, key=lambda source: not isinstance(source, Files))
        return next((s.storage_options for s in sources if isinstance(s, Files | IndexedShards | Mixture)), None)

    @functools.cached_property
    def starts(self) -> Ints:
        """The number of the first sample of each shard of each source; sources without shards are one."""
        starts = [starts_of(source) for source in self.mixed.sources]
        firsts = np.cumsum([0, *(each[-1] for each in starts)])
        parts = [first + each[:-1] for first, each in zip(firsts.tolist(), starts, strict=False)]
        return np.concatenate([*parts, firsts[-1:]])

    @functools.cached_property
    def _firsts(self) -> list[int]:
        return [0, *np.cumsum([len(source) for source in self.mixed.sources]).tolist()]

    async def aget(self, key: int) -> Any:
        """(the number of its source, the sample), or the sample itself where it has its name."""
        key = range(len(self))[key]
        number = bisect.bisect_right(self._firsts, key) - 1
        name, source = self.mixed.names[number], self.mixed.sources[number]
        inside: Any = key - self._firsts[number]
        told = f"source {name!r}"
        try:
            if not isinstance(source, IndexedShards | Mixture):
                keys = self._keys[number]
                if keys is None:
                    keys = self._keys[number] = source.keys()
                inside = keys[inside]
                told += f", key {inside!r:.200}"
            sample = await source.aget(inside)
            for step in self._async_steps[number]:
                told += f"; stage: {step.name}"
                sample = await step.fn(sample)
        except Exception as error:
            error.add_note(told)
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


class MixedShards(IndexedShards):
    """The shards of several sources as those of one, to be read in ranges.

    Args:
        mixed: the sources, all of them such shards.
    """

    def __init__(self, mixed: Mixed) -> None:
        shards = [source for source in mixed.sources if isinstance(source, IndexedShards)]
        urls = tuple(url for source in shards for url in source.urls)
        index = Index(urls, JoinedFiles([source.index for source in shards]), shards[0].limits)
        super().__init__(urls, index, shards[0].storage_options, shards[0].limits)
        self._readers = OwnReaders(self.storage_options, self.aclose)
        self.mixed = mixed
        self._firsts = [0, *np.cumsum([len(source.urls) for source in shards]).tolist()]

    def __reduce__(self) -> tuple[Any, ...]:
        return MixedShards, (self.mixed,)

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


class Switch:
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

    @property
    def is_bare(self) -> bool:
        """Whether it does nothing but give names."""
        return self.by_url is not None and not any(self.steps)

    def __call__(self, sample: Any) -> Any:
        if self.by_url is None:
            number, sample = sample
        else:
            number = self.by_url[sample["__url__"]]
        for told, function in self.steps[number]:
            try:
                sample = function(sample)
            except Exception as error:
                error.add_note(f"source {self.names[number]!r}; stage: {told}")
                raise
        return named(sample, self.names[number])


def named(sample: Any, name: str) -> Any:
    """A sample that says which source it is of, if it is a dict."""
    return {**sample, "__source__": name} if isinstance(sample, dict) else sample


def starts_of(source: AsyncDataset) -> Ints:
    """The number of each shard's first sample, and of all samples last."""
    if isinstance(source, Mixture):
        return source.starts
    count = len(source)
    return source.index.starts if isinstance(source, IndexedShards) else np.array([0, count])


def mix(
    streams: Mapping[str, Operators],
    weights: Weights = None,
    *,
    by: str = "samples",
    until: Until = "first",
    step: int = _STEP_SAMPLES,
) -> Stream:
    """The samples of several streams as one, by weight; those that are dicts say under `__source__` which one they are
    of.

    Which sample comes at which position depends on the seed, the epoch and the position alone, as with any stream whose
    samples have numbers. Sources keep their own order and their own steps: shuffle each of them, before they are mixed.
    Where one is used up it begins again, in another order if it is shuffled. Their shares are kept within a sample in
    all, and within some two samples in each batch.

    Args:
        streams: by name. Their samples have numbers: shards need an index. They are neither filtered (but by keys that
            an index knows) nor batched: do both with what comes of this.
        weights: for each name a number, relative to the others. None: each sample comes once. A function of the step:
            it is given the step's number, from 0 in each epoch, and gives such numbers. It is asked once for each step,
            in the process of the loader, and must give the same for the same step whenever it is asked: a state
            that was saved with others is refused. It may be asked for a step behind the last one.
        by: "samples": weights are those of samples.
        until: "first": the epoch ends before the first sample that would come again. "all": it ends when each source
            has come in full. "forever": it has no end; `.epoch(samples=N)` or `.take(n)` bound it.
        step: samples of a step, of all ranks together. Where one ends and the next one begins may be out by as many
            samples as there are sources. Shares that do not change are planned in such steps, too.

    Raises:
        OptionError: a source or an argument cannot be used.

    Examples:
        >>> import headrace as hr
        >>> web, code = hr.from_map([{"n": n} for n in range(60)]), hr.from_map([{"n": n} for n in range(20)])
        >>> data = hr.mix({"web": web.shuffle(), "code": code.shuffle()}, {"web": 0.75, "code": 0.25})
        >>> [batch["__source__"].count("code") for batch in hr.DataLoader(data, batch_size=20)]
        [5, 5, 5, 5]
    """
    from headrace.datasets.stream import Files, Stream

    _check_arguments(streams, weights, by, until, step)
    sources = {}
    for name, stream in streams.items():
        if not isinstance(stream, Operators):
            raise OptionError(f"source {name!r} is a {type(stream).__name__}, no stream or data set of headrace's")
        sources[name] = stream if isinstance(stream, Stream) else Stream(stream)  # type: ignore[arg-type]
        _check_source(name, sources[name].pipeline())
    files = [one.source for one in sources.values() if isinstance(one.source, Files)]
    if any(one.storage_options != files[0].storage_options for one in files):
        raise OptionError("hr.files() with different storage_options cannot be mixed")
    mixed = Mixed(sources, weights, until, step)
    by_url = _numbers_by_url(mixed)
    later = [_split(pipeline.narrowed_steps)[1] for pipeline in mixed.pipelines]
    source: AsyncDataset = Mixture(mixed, is_named=not any(later)) if by_url is None else MixedShards(mixed)
    if by_url is None and not any(later):
        return Stream(source)
    random = any(step.random for steps in later for step in steps)
    switch = Switch(mixed.names, [[(step.name, step.fn) for step in steps] for steps in later], by_url)
    return Stream(source, (Step("mix", "map", switch, random),))


def _check_arguments(streams: Any, weights: Any, by: Any, until: Any, step: Any) -> None:
    if by != "samples":
        raise OptionError(f"by={by!r}: 'samples' is what mixtures can go by")
    if until not in ("first", "all", "forever"):
        raise OptionError(f"until={until!r}: 'first', 'all' or 'forever' is meant")
    if not isinstance(step, int) or step < 1:
        raise OptionError(f"step={step!r}: a step has 1 sample or more")
    if not isinstance(streams, Mapping) or not streams or not all(isinstance(name, str) for name in streams):
        raise OptionError(f"hr.mix({streams!r:.200}): streams by their names are needed")
    if not (weights is None or isinstance(weights, Mapping) or callable(weights)):
        raise OptionError(f"weights={weights!r:.200}: a number for each name is needed, or a function of the step")


def _check_source(name: str, pipeline: Pipeline) -> None:
    if not isinstance(pipeline.source, AsyncDataset):
        raise OptionError(
            f"the samples of source {name!r} have no numbers: make an index of its shards (headrace index URL…); what "
            "comes of an iterator cannot be mixed"
        )
    if pipeline.group is not None:
        raise OptionError(f"source {name!r} makes batches: put .batch() behind hr.mix")
    if not pipeline.keeps_count:
        raise OptionError(f"{pipeline.changing[0]} of source {name!r} leaves samples out: put .filter() behind hr.mix")
    if any(isinstance(operator, Repeat | EpochOf) for operator in pipeline.order):
        raise OptionError(f"source {name!r} is repeated: until= and weights= of hr.mix say how often its samples come")
    _split(pipeline.steps, name)


def _split(steps: Sequence[Step], name: str = "") -> tuple[list[Step], list[Step]]:
    """(the coroutine functions that come first, the plain functions that follow)."""
    first = next((k for k, step in enumerate(steps) if not is_async(step.fn)), len(steps))
    late = next((step for step in steps[first:] if is_async(step.fn)), None)
    if late is not None:
        raise OptionError(
            f"{late.name} of source {name!r} is an async function behind a plain one: put it before that, or behind "
            "hr.mix"
        )
    return list(steps[:first]), list(steps[first:])


def _numbers_by_url(mixed: Mixed) -> dict[str, int] | None:
    """The number of the source that each shard is of, where they can be read in ranges; else None."""
    shards = []
    for pipeline in mixed.pipelines:
        source = pipeline.source
        if not isinstance(source, IndexedShards) or source.is_compressed or pipeline.is_by_number:
            return None
        if _split(pipeline.steps)[0]:
            return None
        shards.append(source)
    if any(one.limits != shards[0].limits or one.storage_options != shards[0].storage_options for one in shards):
        return None
    numbers: dict[str, int] = {}
    for number, one in enumerate(shards):
        for url in one.urls:
            if numbers.setdefault(url, number) != number or numbers.setdefault(masked(url), number) != number:
                return None
    return numbers


def _distinct(sources: Sequence[AsyncDataset]) -> list[AsyncDataset]:
    return list({id(source): source for source in sources}.values())
