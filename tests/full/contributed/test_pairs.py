"""A source of another package has what all sources have: length, order, states and ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from builders.loops import flat, given, resumed_anywhere
from builders.numbers import Made

import headrace as hr
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

    async def aget(self, number: int) -> tuple[Any, ...]:
        return tuple(await asyncio.gather(*(data.aget(number) for data in self.both)))

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


def pairs() -> hr.Stream:
    return hr.Stream(Pairs(Made(int, 20), Made(lambda n: 10 * n, 25)))


def test_pairs_come_in_their_order_and_by_number() -> None:
    data = pairs()
    assert len(data) == 20
    assert data[3] == (3, 30)
    assert flat(given(data)) == [(k, 10 * k) for k in range(20)]


@pytest.mark.parametrize("workers", [0, 1])
def test_shuffled_pairs_resume_from_every_state(workers: int) -> None:
    data = pairs().shuffle().map(lambda pair: (*pair, sum(pair)))
    (whole,) = resumed_anywhere(lambda: hr.DataLoader(data, batch_size=4, collate_fn=list, num_workers=workers))
    assert sorted(k for batch in whole for k, _, _ in batch) == list(range(20))


def test_ranks_share_pairs() -> None:
    parts = [given(pairs().shuffle(), ranks=hr.Ranks(rank=rank, world_size=2)) for rank in range(2)]
    assert sorted(pair[0] for part in parts for batch in part for pair in batch) == list(range(20))
