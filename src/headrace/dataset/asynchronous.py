"""The base classes of data sets that users write."""

from __future__ import annotations

import asyncio
import copy
import inspect
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from headrace._util import check
from headrace._util.functions import is_async
from headrace._util.reads import Opens
from headrace.dataset.operators import Operators
from headrace.dataset.source import ReadsMany, SampleSource, Traits, Wanted, blocking, forwarded
from headrace.dataset.stream import Stream
from headrace.ops.operator import Operator
from headrace.torch_compat.tracebacks import trimming

if TYPE_CHECKING:
    from headrace.engine.open_readers import EpochIO
    from headrace.readers.protocol import Producer

RanksBy = Literal["shard_info", "position"]
"""How ranks divide the samples of an iterable data set; see `AsyncIterableDataset.ranks_by`."""


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """The part of an epoch's samples that an iterable data set is to yield.

    Attributes:
        rank: Index of the part.
        world: Number of parts.
        epoch: Number of the epoch.
        seed: Seed of the loader, the same on all ranks.

    Examples:
        >>> class Numbers(hr.AsyncIterableDataset):
        ...     ranks_by = "shard_info"
        ...     async def aiter(self):
        ...         part: hr.ShardInfo = hr.shard_info()
        ...         for n in range(part.rank, 6, part.world):
        ...             yield n
        >>> list(hr.DataLoader(Numbers(), None, ranks=hr.Ranks(rank=1, world_size=2, last_batch="uneven")))
        [1, 3, 5]
    """

    rank: int
    world: int
    epoch: int
    seed: int


@dataclass(slots=True)
class Asked:
    """The `ShardInfo` of one run of `aiter`, and whether that run has read it."""

    info: ShardInfo
    is_asked: bool = field(default=False, init=False)


running_shard: ContextVar[Asked | None] = ContextVar("headrace_running_shard", default=None)
"""Result of `shard_info`; set where `aiter` runs."""


def shard_info() -> ShardInfo:
    """Return the part of the samples that this run of `aiter` is to yield.

    Also works in the function passed to `hr.from_iterable`. On one rank it is part 0 of 1. Call it before the first
    sample, in each epoch.

    Raises:
        OptionError: No loader runs this.

    Examples:
        >>> class Numbers(hr.AsyncIterableDataset):
        ...     ranks_by = "shard_info"
        ...     async def aiter(self):
        ...         part = hr.shard_info()
        ...         for number in range(part.rank, 8, part.world):
        ...             yield number
        >>> data = Numbers().epoch(samples=8)
        >>> [list(hr.DataLoader(data, None, ranks=hr.Ranks(rank=rank, world_size=2))) for rank in range(2)]
        [[0, 2, 4, 6], [1, 3, 5, 7]]
    """
    asked = running_shard.get()
    if asked is None:
        needed = "a call inside the aiter() that a loader runs, or in a task or thread with its context"
        raise check.lacking("hr.shard_info()", needed)
    asked.is_asked = True
    return asked.info


Data = TypeVar("Data", bound=Opens)


class OwnDataset(Operators):
    """A data set that opens its own resources."""

    async def aopen(self) -> None:
        """Open resources, on the loop that will use them."""

    async def aclose(self) -> None:
        """Close the resources, on the same loop."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self._as_stream())

    def __aiter__(self) -> AsyncIterator[Any]:
        return aiter(self._as_stream())

    def __sample_source__(self) -> SampleSource:
        raise NotImplementedError

    def _as_stream(self) -> Stream:
        return Stream(self)

    def _with(self, operator: Operator) -> Stream:
        return Stream(self, (operator,))


class AsyncDataset(OwnDataset):
    """Samples fetched asynchronously by key: hundreds at once, on the loader's event loop.

    Write `__len__` and `async def aget(self, key)`. Optional: `async def aget_many(self, keys)`; `keys()` if the keys
    are not 0 … n - 1; `async def aopen(self)` and `async def aclose(self)` for resources that belong to the loop that
    uses them. If another loader has the data set open, the loader opens a shallow copy, so each has its own session.

    Examples:
        >>> class Squares(hr.AsyncDataset):
        ...     def __len__(self):
        ...         return 4
        ...     async def aget(self, index):
        ...         return index * index
        >>> [batch.tolist() for batch in hr.DataLoader(Squares(), batch_size=2)]
        [[0, 1], [4, 9]]
    """

    def __len__(self) -> int:
        raise NotImplementedError(f"{type(self).__name__} needs __len__")

    async def aget(self, key: Any) -> Any:
        """Return the sample with this key."""
        raise NotImplementedError(f"{type(self).__name__} needs async def aget(self, key)")

    def keys(self) -> Sequence[Any]:
        """Return the keys, in the order of the data set."""
        return range(len(self))

    def __getitem__(self, key: Any) -> Any:
        """Return the sample with this key. Blocks; for use outside a loader."""

        async def get() -> Any:
            session = LoopSession(self)
            await session.aopen()
            try:
                return await awaited(session.data, key)
            finally:
                await session.aclose()

        with trimming:
            return blocking(get)

    def __sample_source__(self) -> SampleSource:
        return KeySource(self)


class AsyncIterableDataset(OwnDataset):
    """Samples from an asynchronous iterator, which may be endless.

    Write `async def aiter(self)` as an asynchronous generator.

    Attributes:
        loop: "engine" runs `aiter` on the loader's loop. "caller" runs it on the loop of the `async for`, for resources
            of the user's own program, such as its asyncio.Queue.
        ranks_by: How several ranks divide the samples; `.epoch(samples=N)` is needed, too. "shard_info": `aiter` yields
            the part of this rank, given by `hr.shard_info()`. "position": `aiter` yields the same samples in the same
            order on all ranks, and each rank keeps its part of every global batch. The batches are then the same as on
            one rank, but every rank reads all samples. None: several ranks are refused.
    """

    loop: Literal["engine", "caller"] = "engine"
    ranks_by: RanksBy | None = None

    def aiter(self) -> AsyncIterator[Any]:
        """Yield the samples of one epoch."""
        raise NotImplementedError(f"{type(self).__name__} needs async def aiter(self)")

    def __sample_source__(self) -> SampleSource:
        return IterSource(self)


def is_built_in(data: object) -> bool:
    """Return whether the class of a data set is headrace's, not its user's."""
    return type(data).__module__.startswith("headrace.")


@dataclass(slots=True)
class _Open:
    """A data set, or a copy, that is open on a loop, with its number of users."""

    data: Any
    users: int = 0


_open = dict[tuple[int, asyncio.AbstractEventLoop], _Open]()
_open_lock = threading.Lock()


class LoopSession(Generic[Data]):
    """A data set as opened on the running event loop.

    The first loop opens the data set itself. Loops that open it meanwhile get shallow copies, because a session belongs
    to its loop. Data sets that open nothing, and those of headrace, are used as they are.
    """

    def __init__(self, data: Data) -> None:
        self._data = data

    @property
    def is_needed(self) -> bool:
        kind = type(self._data)
        opens = kind.aopen is not OwnDataset.aopen or kind.aclose is not OwnDataset.aclose
        return opens and not is_built_in(self._data)

    @property
    def data(self) -> Data:
        """The data set, or the copy that is open on the running loop."""
        found = _open.get((id(self._data), asyncio.get_running_loop())) if _open else None
        data: Data = self._data if found is None else found.data
        return data

    async def aopen(self) -> None:
        if not self.is_needed:
            await self._data.aopen()
            return
        key = id(self._data), asyncio.get_running_loop()
        with _open_lock:
            if key not in _open:
                is_first = all(number != key[0] for number, _ in _open)
                _open[key] = _Open(self._data if is_first else copy.copy(self._data))
            mine = _open[key]
            mine.users += 1
        if mine.users == 1:
            try:
                await mine.data.aopen()
            except BaseException:
                _forget(key)
                raise

    async def aclose(self) -> None:
        """Close the data set when its last user on this loop closes."""
        if not self.is_needed:
            await self._data.aclose()
            return
        key = id(self._data), asyncio.get_running_loop()
        mine = _open[key]
        mine.users -= 1
        if not mine.users:
            try:
                await mine.data.aclose()
            finally:
                _forget(key)


def _forget(key: tuple[int, asyncio.AbstractEventLoop]) -> None:
    with _open_lock:
        del _open[key]


async def awaited(data: AsyncDataset, key: object) -> object:
    """Return the sample with this key."""
    sample: object = data.aget(key)
    if not inspect.isawaitable(sample):
        name = type(data).__name__
        raise TypeError(f"{name}.aget gave a {type(sample).__name__} that cannot be awaited: write `async def aget`")
    return await sample


class KeySource(SampleSource):
    traits = Traits(numbered=True)

    def __init__(self, data: AsyncDataset) -> None:
        super().__init__(data)
        self.data: AsyncDataset = data

    @property
    def opens(self) -> LoopSession[AsyncDataset]:
        return LoopSession(self.data)

    def has_numbers(self, *, by_number: bool, by_key: bool) -> bool:
        return True

    def count(self) -> int:
        return len(self.data)

    def keys(self) -> Sequence[object]:
        return self.data.keys()

    async def aget(self, key: object, wanted: Wanted | None = None) -> object:
        return await awaited(LoopSession(self.data).data, key)

    def many(self, wanted: Wanted | None) -> ReadsMany | None:
        return getattr(self.data, "get_many", None) if is_built_in(self.data) else None

    def open(self, io: EpochIO) -> Producer:
        data, session = self.data, LoopSession[Any](self.data)
        many = self.many(io.pipeline.wanted) or getattr(data, "aget_many", None)
        if not session.is_needed:
            return io.keys(data, data.aget if is_async(data.aget) else partial(awaited, data), many)
        return io.keys(data, self.aget, many and (lambda keys: session.data.aget_many(keys)))  # noqa: PLW0108


class IterSource(SampleSource):
    traits = Traits(iterated=True)
    ranks_by = forwarded("data")

    def __init__(self, data: AsyncIterableDataset) -> None:
        super().__init__(data)
        self.data: AsyncIterableDataset = data

    @property
    def opens(self) -> LoopSession[AsyncIterableDataset]:
        return LoopSession(self.data)

    def can_permute(self, by: str) -> bool:
        return by == "buffer"

    def open(self, io: EpochIO) -> Producer:
        return io.iterated(self.data)


class MadeDataset(AsyncDataset):
    """Numbered samples made of those of another source, which opens and closes with this."""

    @property
    def inner(self) -> SampleSource:
        raise NotImplementedError

    async def original(self, number: int, wanted: Wanted | None) -> object:
        return await self.inner.at(number if self._keys is None else self._keys[number], wanted)

    async def aopen(self) -> None:
        if self.inner.opens is not None:
            await self.inner.opens.aopen()

    async def aclose(self) -> None:
        if self.inner.opens is not None:
            await self.inner.opens.aclose()

    @cached_property
    def _keys(self) -> Sequence[object] | None:
        """Keys of the inner samples. None: they are fetched by number."""
        traits = self.inner.traits
        return None if traits.sharded or traits.by_number else self.inner.keys()


class MadeSource(KeySource):
    traits = Traits(numbered=True, by_number=True)

    def __init__(self, data: MadeDataset) -> None:
        super().__init__(data)
        self._inner = data.inner

    facts = forwarded("_inner")
    has_count = forwarded("_inner")
    storage_options = forwarded("_inner")
    has_store = forwarded("_inner")
    objects = forwarded("_inner")
