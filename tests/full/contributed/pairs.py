"""A source as a stranger would write it: the samples of two data sets side by side, got at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio

from headrace.dataset.source import SampleSource, Traits
from headrace.engine.open_readers import EpochIO
from headrace.readers.protocol import Producer


class Pairs:
    """The samples of two data sets with the same numbers, as pairs."""

    def __init__(self, first: Any, second: Any) -> None:
        self.both = first, second

    def __len__(self) -> int:
        return min(map(len, self.both))

    def keys(self) -> Sequence[int]:
        return range(len(self))

    async def aget(self, number: int) -> tuple[Any, Any]:
        pair: list[Any] = [None, None]

        async def get(k: int) -> None:
            pair[k] = await self.both[k].aget(number)

        async with anyio.create_task_group() as group:
            group.start_soon(get, 0)
            group.start_soon(get, 1)
        return pair[0], pair[1]

    def __sample_source__(self) -> SampleSource:
        return PairSource(self)


class PairSource(SampleSource):
    traits = Traits(numbered=True)

    def has_numbers(self, *, by_number: bool, by_key: bool) -> bool:
        return True

    def count(self) -> int:
        return len(self.data)

    def keys(self) -> Sequence[int]:
        return self.data.keys()

    async def aget(self, key: Any, wanted: object = None) -> Any:
        return await self.data.aget(key)

    def open(self, io: EpochIO) -> Producer:
        return io.keys(self.data, self.data.aget, None)
