"""The data sets that users write."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Literal

from headrace.datasets.base import Operators
from headrace.datasets.blocking import blocking
from headrace.datasets.operators.values import Operator
from headrace.datasets.sharing import RanksBy
from headrace.datasets.source import EpochIO, SampleSource, Traits
from headrace.datasets.stream import Stream
from headrace.producer import Producer


class AsyncDataset(Operators[Stream]):
    """Samples by key, got asynchronously: hundreds at once, on the loader's event loop.

    Write `__len__` and `async def aget(self, key)`; optionally `async def aget_many(self, keys)`, `keys()` where the
    keys are not 0 … n - 1, and `async def aopen(self)` / `async def aclose(self)` for what must be opened on the loop
    that uses it.

    Examples:
        >>> import headrace as hr
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
        """The sample with this key."""
        raise NotImplementedError(f"{type(self).__name__} needs async def aget(self, key)")

    def keys(self) -> Sequence[Any]:
        """The keys, in the order of the data set."""
        return range(len(self))

    async def aopen(self) -> None:
        """Open what is needed, on the loop that will use it."""

    async def aclose(self) -> None:
        """Close it, on the same loop."""

    def __getitem__(self, key: Any) -> Any:
        """The sample with this key, waiting for it: for use outside a loader."""

        async def get() -> Any:
            await self.aopen()
            try:
                return await self.aget(key)
            finally:
                await self.aclose()

        return blocking(get)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._as_stream())

    def __aiter__(self) -> AsyncIterator[Any]:
        return aiter(self._as_stream())

    def __sample_source__(self) -> SampleSource:
        return KeySource(self)

    def _as_stream(self) -> Stream:
        return Stream(self)

    def _with(self, operator: Operator) -> Stream:
        return Stream(self, (operator,))


class AsyncIterableDataset(Operators[Stream]):
    """Samples as an asynchronous iterator gives them; it may be endless.

    Write `async def aiter(self)` as an asynchronous generator.

    Attributes:
        loop: "engine" runs it on the loader's loop; "caller" on that of the `async for`, for what belongs to the
            user's own program, such as its asyncio.Queue.
        ranks_by: how several ranks divide its samples; they need `.epoch(samples=N)`, too. "shard_info": `aiter` gives
            the part of this rank, which it asks `hr.shard_info()` for. "position": `aiter` gives the same samples in
            the same order on all ranks, and each keeps its part of every global batch: as one rank alone would get
            them, but every rank reads all of them. None: nobody knows, and several ranks are refused.
    """

    loop: Literal["engine", "caller"] = "engine"
    ranks_by: RanksBy | None = None

    def aiter(self) -> AsyncIterator[Any]:
        """The samples of one epoch."""
        raise NotImplementedError(f"{type(self).__name__} needs async def aiter(self)")

    async def aopen(self) -> None:
        """Open what is needed, on the loader's loop."""

    async def aclose(self) -> None:
        """Close it, on the same loop."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self._as_stream())

    def __aiter__(self) -> AsyncIterator[Any]:
        return aiter(self._as_stream())

    def __sample_source__(self) -> SampleSource:
        return IterSource(self)

    def _as_stream(self) -> Stream:
        return Stream(self)

    def _with(self, operator: Operator) -> Stream:
        return Stream(self, (operator,))


class KeySource(SampleSource):
    """Samples that are got one by one, by keys."""

    traits = Traits(numbered=True)

    def __init__(self, data: AsyncDataset) -> None:
        super().__init__(data)
        self.data: AsyncDataset = data

    @property
    def opens(self) -> AsyncDataset:
        return self.data

    def has_numbers(self, *, by_number: bool, by_key: bool) -> bool:  # noqa: ARG002
        return True

    def count(self) -> int:
        return len(self.data)

    def keys(self) -> Sequence[object]:
        return self.data.keys()

    async def aget(self, key: object) -> object:
        return await self.data.aget(key)

    def open(self, io: EpochIO) -> Producer:
        return io.keys(self.data, self.data.aget, getattr(self.data, "aget_many", None))


class IterSource(SampleSource):
    """Samples that an iterator gives, in an order of its own."""

    traits = Traits(iterated=True)

    def __init__(self, data: AsyncIterableDataset) -> None:
        super().__init__(data)
        self.data: AsyncIterableDataset = data

    @property
    def opens(self) -> AsyncIterableDataset:
        return self.data

    @property
    def ranks_by(self) -> RanksBy | None:
        return self.data.ranks_by

    def open(self, io: EpochIO) -> Producer:
        return io.iterated(self.data)
