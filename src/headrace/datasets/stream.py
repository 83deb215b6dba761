"""Streams: a source and what is done to its samples, immutable and lazy."""

from __future__ import annotations

import math
import os
import posixpath
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import anyio.to_thread

from headrace.datasets.base import AsyncDataset, AsyncIterableDataset, Operators
from headrace.datasets.operators import Group, Operator, Shuffle, Take
from headrace.datasets.urls import expand
from headrace.errors import OptionError, masked
from headrace.fetch import read
from headrace.tasks import Step

Urls = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


@dataclass(frozen=True)
class Shards:
    """Shards in object storage, whose samples are found while they are read."""

    urls: tuple[str, ...]
    storage_options: Mapping[str, Any] | None = None


Source = Shards | AsyncDataset | AsyncIterableDataset


@dataclass(frozen=True)
class Pipeline:
    """The operators of a stream, sorted by who carries them out.

    Attributes:
        order: shuffles and takes of the source's samples, in their order.
        steps: for each sample.
        limit: how many samples come out of the steps at most, where that is not the source's business.
        group: how the stream itself makes batches, if it does.
        after: for each of those batches.
    """

    source: Source
    order: tuple[Shuffle | Take, ...]
    steps: tuple[Step, ...]
    limit: int | None
    group: Group | None
    after: tuple[Step, ...]

    @property
    def keeps_count(self) -> bool:
        """Whether each sample of the source becomes one sample of a batch."""
        return self.limit is None and all(step.kind == "map" for step in self.steps)


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
        if any(step.kind == "filter" for step in pipeline.steps):
            raise TypeError(f"{self!r} has no length: a filter says only later how many samples it keeps")
        count = len(pipeline.source)
        for operator in self.operators:
            if isinstance(operator, Take):
                count = min(count, operator.count)
            elif isinstance(operator, Group):
                count = count // operator.size if operator.drop_last else math.ceil(count / operator.size)
        return count

    def __iter__(self) -> Iterator[Any]:
        from headrace.loader import DataLoader

        return iter(DataLoader(self, batch_size=None, collate_fn=_as_it_is))

    def __aiter__(self) -> AsyncIterator[Any]:
        from headrace.loader import DataLoader

        return DataLoader(self, batch_size=None, collate_fn=_as_it_is).__aiter__()

    def __repr__(self) -> str:
        source = self.source
        if isinstance(source, Shards):
            more = f" and {len(source.urls) - 1} more" if len(source.urls) > 1 else ""
            name = f"stream({masked(source.urls[0])}{more})"
        else:
            name = f"{type(source).__name__}(…)"
        return name + "".join(f".{_told(operator)}" for operator in self.operators)

    def describe(self) -> str:
        """The stream in words, an operator a line, and where each runs."""
        from headrace.datasets.operators import is_async

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
        order: list[Shuffle | Take] = []
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
            elif isinstance(operator, Step):
                if limit is not None and operator.kind == "filter":
                    raise OptionError(f"{told} behind .filter() and .take(): filter before .take()")
                (steps if group is None else after).append(operator)
            elif isinstance(operator, Take) and any(step.kind == "filter" for step in steps):
                limit = operator.count if limit is None else min(limit, operator.count)
            elif limit is not None:
                raise OptionError(f"{told} behind .filter() and .take(): shuffle before .take()")
            else:
                order.append(operator)
        self._check_order(order)
        return Pipeline(self.source, tuple(order), tuple(steps), limit, group, tuple(after))

    def _check_order(self, order: list[Shuffle | Take]) -> None:
        shuffles = [k for k, operator in enumerate(order) if isinstance(operator, Shuffle)]
        if len(shuffles) > 1:
            raise OptionError("the stream is shuffled twice; once does it")
        if not isinstance(self.source, AsyncDataset) and shuffles:
            if shuffles[0] > 0:
                raise OptionError(".take() before .shuffle() needs samples that are counted; put it behind .shuffle()")
            if isinstance(self.source, AsyncIterableDataset):
                raise OptionError(".shuffle() of an AsyncIterableDataset: it decides its order itself")
            if order[0].by == "global":  # type: ignore[union-attr]
                raise OptionError(".shuffle(by='global') of shards without an index: by='window' is what can be done")

    def _with(self, operator: Operator) -> Stream:
        return Stream(self.source, (*self.operators, operator))


def _as_it_is(sample: Any) -> Any:
    return sample


def _told(operator: Operator) -> str:
    if isinstance(operator, Step):
        return operator.name
    if isinstance(operator, Shuffle):
        return f"shuffle({operator.by})"
    return f"take({operator.count})" if isinstance(operator, Take) else f"batch({operator.size})"


def stream(
    urls: Urls,
    *,
    format: str | None = None,  # noqa: A002 (the name that the field uses)
    storage_options: Mapping[str, Any] | None = None,
) -> Stream:
    """The samples of shards, read while they are needed; nothing is downloaded first, nothing is asked for here.

    Members of a tar shard whose names agree up to the first dot behind the last slash are one sample: a dict with
    `__key__`, `__url__`, and the rest of each name, in lower case, as a field of bytes.

    Args:
        urls: an address, a pattern such as "s3://bucket/train-{000..999}.tar", or a list of them. s3, gs, az, http(s),
            files, and every scheme that fsspec knows.
        format: "tar"; by default it follows from the address.
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
        if not urlsplit(url).path.endswith(".tar"):
            raise OptionError(f"{masked(url)} does not say its format; names in .tar do, or give format='tar'")
    if format not in (None, "tar"):
        raise OptionError(f"format={format!r} is not known; 'tar' is")
    return Stream(Shards(found, storage_options))


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
    """Any data set with `__len__` and `__getitem__`, its calls made in threads, many at once."""
    return Stream(_FromMap(dataset))


def from_iterable(iterable: Iterable[Any]) -> Stream:
    """Any iterable, its `next` called in a thread."""
    return Stream(_FromIterable(iterable))
