"""Streams: a source and what is done to its samples, immutable and lazy."""

from __future__ import annotations

import os
import posixpath
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import anyio.to_thread

from headrace.datasets.base import AsyncDataset, AsyncIterableDataset, Operators, blocking
from headrace.datasets.mixture import MixedShards, Mixture, Switch
from headrace.datasets.operators import (
    Drawn,
    EpochOf,
    Group,
    Operator,
    Pick,
    Repeat,
    Select,
    Shuffle,
    Take,
    ToTuple,
    is_async,
    is_key_filter,
)
from headrace.datasets.packed import packed
from headrace.datasets.shards import IndexedShards, KeepsKey, Shards, Wanted
from headrace.datasets.urls import expand
from headrace.errors import OptionError, masked
from headrace.fetch import read
from headrace.formats.compression.decompressor import kind_of, path_of
from headrace.formats.limits import DEFAULTS, Limits
from headrace.formats.values import Decoder
from headrace.indexes.building import beside, cache_path, cached
from headrace.indexes.index import BuiltFile, FileForEach, Index, IndexFiles, OneFile
from headrace.plan.order import ENDLESS
from headrace.tasks import Step

Urls = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


Source = Shards | AsyncDataset | AsyncIterableDataset
Order = Shuffle | Take | Pick | Drawn | Repeat | EpochOf


@dataclass(frozen=True)
class Pipeline:
    """The operators of a stream, sorted by who carries them out.

    Attributes:
        order: what decides which of the source's samples come, and when.
        keeps: of a source with an index, says of keys whether they are wanted.
        steps: for each sample.
        limit: how many samples come out of the steps at most, where that is not the source's business.
        group: how the stream itself makes batches, if it does.
        after: for each of those batches.
    """

    source: Source
    order: tuple[Order, ...]
    keeps: tuple[KeepsKey, ...]
    steps: tuple[Step, ...]
    limit: int | None
    group: Group | None
    after: tuple[Step, ...]

    @property
    def keeps_count(self) -> bool:
        """Whether each sample of the source becomes one sample of a batch."""
        return self.limit is None and all(step.keeps_count for step in self.steps)

    @property
    def changing(self) -> tuple[str, ...]:
        """The names of what leaves samples out, or may."""
        names = [step.name for step in self.steps if not step.keeps_count]
        return (*names, *(() if self.limit is None else (f"take({self.limit})",)))

    @property
    def has_numbers(self) -> bool:
        """Whether the samples have numbers before they are read."""
        if not isinstance(self.source, IndexedShards) or isinstance(self.source, MixedShards):
            return isinstance(self.source, AsyncDataset)
        return self.is_by_number or bool(self.keeps) or (self.source.has_members and not self.source.is_compressed)

    @property
    def shuffle(self) -> Shuffle | None:
        """How the samples are shuffled, if they are."""
        return next((operator for operator in self.order if isinstance(operator, Shuffle)), None)

    @property
    def passes(self) -> tuple[int | None, int | None]:
        """(how many passes an epoch is made of, how many samples `.epoch()` leaves of these); None: any number."""
        times: int | None = 1
        limit: int | None = None
        for operator in self.order:
            if isinstance(operator, Repeat):
                times = operator.times
            elif isinstance(operator, EpochOf):
                times, limit = None, operator.samples
        return times, limit

    @property
    def told_count(self) -> int | None:
        """How many samples an epoch has whatever its source gives, and whatever filters leave; None: not said."""
        times, samples = self.passes
        repeats = [k for k, operator in enumerate(self.order) if isinstance(operator, Repeat | EpochOf)]
        last = repeats[0] if repeats else 0
        takes = [operator.count for operator in self.order[last:] if isinstance(operator, Take)]
        if self.keeps_count:
            return None if samples is None else min([samples, *takes])
        is_bounded = samples is not None or bool(takes) or not (times is None or _has_no_end(self.source))
        return None if is_bounded else self.limit

    @property
    def is_by_number(self) -> bool:
        """Whether samples are got one by one, by their numbers; shards with an index can also be read as they lie."""
        if not isinstance(self.source, IndexedShards):
            return isinstance(self.source, AsyncDataset)
        shuffles = [k for k, operator in enumerate(self.order) if isinstance(operator, Shuffle)]
        is_global = any(isinstance(o, Shuffle) and o.by == "global" for o in self.order)
        return is_global or shuffles not in ([], [0]) or any(isinstance(o, Pick | Drawn) for o in self.order)

    @property
    def wanted(self) -> Wanted | None:
        """Which fields of the source's samples the steps use, as far as that can be told; None: all."""
        for step in self.steps:
            if isinstance(step.fn, Select | ToTuple):
                return tuple(frozenset(names.split(";")) for names in step.fn.names if not names.startswith("__"))
            if not isinstance(step.fn, Decoder) and not (isinstance(step.fn, Switch) and step.fn.is_bare):
                return None
        return None

    @property
    def narrowed_steps(self) -> tuple[Step, ...]:
        """The same steps, but nothing is decoded, and no source is named, that is not asked for afterwards."""
        wanted = self.wanted
        if wanted is None:
            return self.steps
        first = next(k for k, step in enumerate(self.steps) if isinstance(step.fn, Select | ToTuple))
        selects: Any = self.steps[first].fn
        is_named = isinstance(selects, Select) or any("__source__" in names.split(";") for names in selects.names)
        fields = frozenset[str]().union(*wanted)
        before: list[Step] = []
        for step in self.steps[:first]:
            if isinstance(step.fn, Decoder):
                before.append(replace(step, fn=step.fn.only(fields)))
            elif is_named:
                before.append(step)
        return (*before, *self.steps[first:])  # behind the selection there may be other fields of these names


class Stream(Operators):
    """Samples of shards, or of a data set, with operators on them.

    Made by `hr.stream`, `hr.files` and the operators of data sets. Give it to `hr.DataLoader`, or iterate over it.
    """

    def __init__(self, source: Source, operators: tuple[Operator, ...] = ()) -> None:
        self.source = source
        self.operators = operators
        self.pipeline()  # says now what does not go together

    def __len__(self) -> int:
        """How many samples (or batches) an epoch has; TypeError where that is not known."""
        pipeline = self.pipeline()
        if not isinstance(pipeline.source, AsyncDataset):
            raise TypeError(f"{self!r} has no length: its samples are counted while they are read")
        if any(step.kind == "filter" for step in pipeline.steps) or (pipeline.keeps and not pipeline.has_numbers):
            raise TypeError(f"{self!r} has no length: a filter says only later how many samples it keeps")
        source = pipeline.source
        count = source.mixed.blend.count if isinstance(source, Mixture | MixedShards) else len(source)
        if isinstance(pipeline.source, IndexedShards) and pipeline.keeps:
            count = len(pipeline.source.passing(pipeline.keeps))
        for operator in self.operators:
            if isinstance(operator, Take):
                count = min(count, operator.count)
            elif isinstance(operator, Drawn):
                count = count if operator.count is None else operator.count
            elif isinstance(operator, Repeat):
                count = ENDLESS if operator.times is None and count else count * (operator.times or 0)
            elif isinstance(operator, EpochOf):
                count = operator.samples
            elif isinstance(operator, Pick):
                count = operator.count(count)
            elif isinstance(operator, Group):
                count = count // operator.size if operator.drop_last else -(-count // operator.size)
        if count >= ENDLESS:
            raise TypeError(f"{self!r} has no length: it has no end")
        return count

    async def aget(self, key: Any) -> Any:
        """The sample with this key (or number) in the source's own order, through all steps.

        Raises:
            TypeError: the source has no keys, or operators take samples away, put them together or elsewhere.
        """
        pipeline = self.pipeline()
        only_maps = all(isinstance(o, Step) and o.kind == "map" for o in self.operators)
        if not isinstance(pipeline.source, AsyncDataset) or not only_maps:
            raise TypeError(
                f"{self!r} gives no sample by its number: shards need an index, and maps are all that may follow"
            )
        sample = await pipeline.source.aget(key)
        for step in pipeline.steps:
            sample = await step.fn(sample) if is_async(step.fn) else step.fn(sample)
        return sample

    def __getitem__(self, key: Any) -> Any:
        source = self.source

        async def get() -> Any:
            if not isinstance(source, AsyncDataset):
                return await self.aget(key)  # says why not
            await source.aopen()
            try:
                return await self.aget(key)
            finally:
                await source.aclose()

        return blocking(get)

    def keys(self) -> Sequence[Any]:
        """The keys of the samples, in the source's own order; of shards with an index those in `__key__`."""
        if isinstance(self.source, IndexedShards):
            return packed(self.source.keys_of_samples())
        if not isinstance(self.source, AsyncDataset):
            raise TypeError(f"{self!r} has no keys; shards need an index for that")
        return self.source.keys()

    def __iter__(self) -> Iterator[Any]:
        from headrace.loader import DataLoader

        return iter(DataLoader(self, batch_size=None, collate_fn=_as_it_is))

    def __aiter__(self) -> AsyncIterator[Any]:
        from headrace.loader import DataLoader

        return DataLoader(self, batch_size=None, collate_fn=_as_it_is).__aiter__()

    def __repr__(self) -> str:
        source = self.source
        if isinstance(source, Mixture | MixedShards):
            name = f"mix({', '.join(source.mixed.names)})"
        elif isinstance(source, Shards | IndexedShards):
            more = f" and {len(source.urls) - 1} more" if len(source.urls) > 1 else ""
            name = f"stream({masked(source.urls[0])}{more})"
        else:
            name = f"{type(source).__name__}(…)"
        told = (o for o in self.operators if not (isinstance(o, Step) and isinstance(o.fn, Switch)))
        return name + "".join(f".{_told(operator)}" for operator in told)

    def describe(self) -> str:
        """The stream in words, an operator a line, and where each runs."""
        lines = [repr(Stream(self.source))]
        for operator in self.operators:
            where = "plan"
            if isinstance(operator, Step):
                where = "event loop" if is_async(operator.fn) else "workers"
            elif isinstance(operator, Group):
                where = "workers"
            lines.append(f"  .{_told(operator)}  [{where}]")
        return "\n".join(lines)

    def without_short_batches(self) -> Stream:
        """The same stream, its `.batch()` leaving a short last batch out."""
        operators = (replace(o, drop_last=True) if isinstance(o, Group) else o for o in self.operators)
        return Stream(self.source, tuple(operators))

    def pipeline(self) -> Pipeline:
        """The operators by who carries them out.

        Raises:
            OptionError: two of them do not go together.
        """
        order: list[Order] = []
        keeps: list[KeepsKey] = []
        steps: list[Step] = []
        after: list[Step] = []
        limit: int | None = None
        group: Group | None = None
        for operator in self.operators:
            told = f".{_told(operator)}"
            if group is not None and isinstance(operator, Take):
                operator = Take(operator.count * group.size)  # noqa: PLW2901 (so many batches have so many samples)
            elif group is not None and not (isinstance(operator, Step) and operator.kind == "map"):
                raise OptionError(
                    f"{told} behind .batch(): only .map() and .take() can follow; move it before .batch()"
                )
            if isinstance(operator, Group):
                group = operator
            elif isinstance(operator, Step) and self._is_about_keys(operator, order, steps):
                keeps.append(operator.fn.function)  # type: ignore[attr-defined]
            elif isinstance(operator, Step):
                if limit is not None and operator.kind == "filter":
                    raise OptionError(f"{told} behind .filter() and .take(): filter before .take()")
                (steps if group is None else after).append(operator)
            elif isinstance(operator, EpochOf) and any(step.kind == "filter" for step in steps):
                limit = operator.samples if limit is None else min(limit, operator.samples)
                if order or not _has_no_end(self.source):
                    order.append(Repeat(None))
            elif isinstance(operator, Take) and any(step.kind == "filter" for step in steps):
                limit = operator.count if limit is None else min(limit, operator.count)
            elif limit is not None:
                raise OptionError(f"{told} behind .filter() and .take(): shuffle before .take()")
            else:
                order.append(operator)
        self._check_order(order)
        return Pipeline(self.source, tuple(order), tuple(keeps), tuple(steps), limit, group, tuple(after))

    def _is_about_keys(self, step: Step, order: list[Order], steps: list[Step]) -> bool:
        """Whether an index can tell what a step asks: then nothing is read of what it leaves out."""
        is_first = not steps and all(isinstance(operator, Shuffle) for operator in order)
        if not is_first or not isinstance(self.source, IndexedShards) or not is_key_filter(step):
            return False
        return not any(kind_of(url) for url in self.source.urls)  # compressed ones are read from their start

    def _check_order(self, order: list[Order]) -> None:
        shuffles = [k for k, operator in enumerate(order) if isinstance(operator, Shuffle)]
        if len(shuffles) > 1:
            raise OptionError("the stream is shuffled twice; once does it")
        if isinstance(self.source, Mixture | MixedShards):
            self._check_order_of_mixture(order)
        repeats = [k for k, operator in enumerate(order) if isinstance(operator, Repeat | EpochOf)]
        if len(repeats) > 1:
            raise OptionError("of .repeat() and .epoch() a stream can have one")
        if repeats and not all(isinstance(operator, Take) for operator in order[repeats[0] + 1 :]):
            raise OptionError(".repeat() and .epoch() come behind what decides the order: only .take() can follow")
        if isinstance(self.source, AsyncDataset) and any(isinstance(o, Shuffle) and o.by == "buffer" for o in order):
            raise OptionError(".shuffle(by='buffer') is for samples without numbers; 'window' and 'global' mix better")
        if any(isinstance(operator, Pick | Drawn) for operator in order) and any(
            o.by in ("window", "shards", "within") for o in order if isinstance(o, Shuffle)
        ):
            raise OptionError(".sample() and .slice() take samples by their numbers, which windows have none of")
        if not isinstance(self.source, AsyncDataset) and any(isinstance(operator, Pick | Drawn) for operator in order):
            raise OptionError(".sample() and .slice() need samples that have numbers: shards need an index for that")
        if (
            not isinstance(self.source, AsyncDataset)
            and repeats
            and any(isinstance(o, Take) for o in order[: repeats[0]])
        ):
            raise OptionError(".take() before .repeat() or .epoch() needs samples that are counted; put it behind them")
        if not isinstance(self.source, AsyncDataset) and shuffles:
            if shuffles[0] > 0:
                raise OptionError(".take() before .shuffle() needs samples that are counted; put it behind .shuffle()")
            by = order[0].by  # type: ignore[union-attr]
            if isinstance(self.source, AsyncIterableDataset) and by != "buffer":
                raise OptionError(
                    ".shuffle() of an AsyncIterableDataset: it decides its order itself; by='buffer' can be done"
                )
            if by in ("global", "within"):
                raise OptionError(
                    f".shuffle(by={by!r}) of shards without an index: by='window' is what can be done, "
                    "or make an index: headrace index URL…, and hr.stream(…, index='auto')"
                )
        if isinstance(self.source, AsyncIterableDataset) and any(isinstance(o, Repeat) for o in order):
            raise OptionError(".repeat() of an AsyncIterableDataset: let its aiter() repeat; .epoch() bounds it")

    def _check_order_of_mixture(self, order: list[Order]) -> None:
        assert isinstance(self.source, Mixture | MixedShards)
        names = self.source.mixed.names
        if any(isinstance(operator, Shuffle) for operator in order):
            raise OptionError(
                f"a mixture has an order of its own: shuffle its sources, hr.mix({{{names[0]!r}: data.shuffle(), …}}), "
                "and not what comes of them"
            )
        if _has_no_end(self.source) and order and not isinstance(order[0], Take | EpochOf):
            raise OptionError(
                f"{_told(order[0])} of a mixture without end: bound it first, by .take(n) or .epoch(samples=N)"
            )

    def _with(self, operator: Operator) -> Stream:
        return Stream(self.source, (*self.operators, operator))


def _has_no_end(source: Source) -> bool:
    return isinstance(source, Mixture | MixedShards) and source.mixed.until == "forever"


def _as_it_is(sample: Any) -> Any:
    return sample


def _told(operator: Operator) -> str:
    if isinstance(operator, Step):
        return operator.name
    if isinstance(operator, Shuffle):
        return f"shuffle({operator.by})"
    if isinstance(operator, Pick):
        return f"{operator.name}(…)"
    if isinstance(operator, Drawn):
        return "sample(…)"
    if isinstance(operator, Repeat):
        return f"repeat({operator.times})"
    if isinstance(operator, EpochOf):
        return f"epoch(samples={operator.samples})"
    return f"take({operator.count})" if isinstance(operator, Take) else f"batch({operator.size})"


def stream(
    urls: Urls,
    *,
    format: str | None = None,  # noqa: A002 (the name that the field uses)
    index: str | os.PathLike[str] | Sequence[str] | None = "auto",
    limits: Limits = DEFAULTS,
    storage_options: Mapping[str, Any] | None = None,
) -> Stream:
    """The samples of shards, read while they are needed; nothing is downloaded first, nothing is asked for here.

    Members of a tar shard whose names agree up to the first dot behind the last slash are one sample: a dict with
    `__key__`, `__url__`, and the rest of each name, in lower case, as a field of bytes. Shards may be compressed:
    .tar.gz, .tar.zst, .tar.bz2, .tar.xz, .tar.lz4.

    With an index the samples have numbers and keys before they are read: `len(data)`, `data[i]`, `.shuffle("global")`,
    `.slice()`, `.sample()`, and filters on keys and `.select()` of which nothing is read that they leave out. The
    bytes of each sample are compared with the checksums in it.

    Args:
        urls: an address, a pattern such as "s3://bucket/train-{000..999}.tar", or a list of them. s3, gs, az, http(s),
            files, and every scheme that fsspec knows.
        format: "tar"; by default it follows from the address.
        index: the address of an index file for all shards (`headrace index` makes it; wids' are read, too), or a list
            or pattern of one for each (DALI's are read, too). "beside": one for each, at its address with ".hri"
            behind it. "build": the one in this machine's cache, made first where it is missing. "auto": the one in the
            cache, where there is one. None: none.
        limits: how much archives may ask for.
        storage_options: for the store: credentials, endpoint, region.

    Raises:
        OptionError: no address, or a format that is not known.

    Examples:
        >>> import headrace as hr
        >>> data = hr.stream("s3://bucket/train-{000000..001281}.tar").shuffle().to_tuple("jpg;png", "cls")
        >>> len(data.source.urls)
        1282
    """
    found = expand(urls)
    for url in found if format is None else ():
        if not path_of(url).endswith(".tar") and kind_of(url) is None:
            raise OptionError(f"{masked(url)} does not say its format; names in .tar do, or give format='tar'")
    if format not in (None, "tar"):
        raise OptionError(f"format={format!r} is not known; 'tar' is")
    where = _index_of(found, index, limits, storage_options)
    if where is None:
        return Stream(Shards(found, storage_options, limits))
    return Stream(IndexedShards(found, Index(found, where, limits), storage_options, limits))


def _index_of(
    urls: tuple[str, ...], index: Any, limits: Limits, storage_options: Mapping[str, Any] | None
) -> IndexFiles | None:
    if index is None:
        return None
    if not index or not isinstance(index, str | os.PathLike | list | tuple):
        raise OptionError(f"index={index!r}: an address, a list of them, 'beside', 'build', 'auto' or None is meant")
    if index == "build":
        return BuiltFile(str(cache_path(urls, storage_options)), limits)
    if index == "auto":
        place = cached(urls, storage_options)
        return None if place is None else OneFile(str(place))
    if index == "beside":
        return FileForEach([beside(url) for url in urls])
    files = expand(index)
    return OneFile(files[0]) if len(files) == 1 else FileForEach(files)


def with_built_index(stream: Stream) -> Stream:
    """The same stream, its shards with the index of this machine's cache, which is made where it is missing."""
    source = stream.source
    assert isinstance(source, Shards)
    index = Index(
        source.urls, BuiltFile(str(cache_path(source.urls, source.storage_options)), source.limits), source.limits
    )
    return Stream(IndexedShards(source.urls, index, source.storage_options, source.limits), stream.operators)


class Files(AsyncDataset):
    """One sample for each object: a dict with `__key__`, `__url__` and the object's bytes under its extension."""

    def __init__(self, urls: tuple[str, ...], storage_options: Mapping[str, Any] | None = None) -> None:
        self.urls, self.storage_options = urls, storage_options

    def __len__(self) -> int:
        return len(self.urls)

    async def aget(self, key: int) -> dict[str, Any]:
        url = self.urls[key]
        name, _, extension = posixpath.basename(urlsplit(url).path).partition(".")
        return {"__key__": name, "__url__": masked(url), extension.lower() or "data": await read(url)}


def files(urls: Urls, *, storage_options: Mapping[str, Any] | None = None) -> Stream:
    """One sample for each object, by random access: shuffled globally, with a length.

    Args:
        urls: an address, a pattern, or a list of them.
        storage_options: for the store: credentials, endpoint, region.
    """
    return Stream(Files(expand(urls), storage_options))


class _FromMap(AsyncDataset):
    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    async def aget(self, key: Any) -> Any:
        return await anyio.to_thread.run_sync(self.dataset.__getitem__, key)


class _FromIterable(AsyncIterableDataset):
    def __init__(self, iterable: Iterable[Any]) -> None:
        self.iterable = iterable

    async def aiter(self) -> AsyncIterator[Any]:
        end = object()
        samples = await anyio.to_thread.run_sync(iter, self.iterable)
        while (sample := await anyio.to_thread.run_sync(next, samples, end)) is not end:
            yield sample


def from_map(dataset: Any) -> Stream:
    """Any data set with `__len__` and `__getitem__`, its calls made in threads, many at once.

    What `__getitem__` draws from Python's, numpy's and torch's global generators is the trainer's, and differs from run
    to run; `hr.rng()` goes by the sample, and so does all that a `.map()` behind it draws in workers.
    """
    return Stream(_FromMap(dataset))


def from_iterable(iterable: Iterable[Any]) -> Stream:
    """Any iterable, its `next` called in a thread."""
    return Stream(_FromIterable(iterable))
