"""A source of a stranger's has what all sources have: length, order, states and ranks."""

from __future__ import annotations

from typing import Any

import pytest
from builders.loops import flat, given, resumed_anywhere
from full.contributed.pairs import Pairs

import headrace as hr


class Times(hr.AsyncDataset):
    def __init__(self, factor: int, count: int) -> None:
        self.factor, self.count = factor, count

    def __len__(self) -> int:
        return self.count

    async def aget(self, key: int) -> int:
        return self.factor * key


def pairs() -> hr.Stream:
    return hr.Stream(Pairs(Times(1, 20), Times(10, 25)))


def test_pairs_come_in_their_order_and_by_number() -> None:
    data = pairs()
    assert len(data) == 20
    assert data[3] == (3, 30)
    assert flat(given(data)) == [(k, 10 * k) for k in range(20)]


@pytest.mark.parametrize("workers", [0, 1])
def test_shuffled_pairs_go_on_from_a_state(workers: int) -> None:
    data = pairs().shuffle().map(lambda pair: (*pair, sum(pair)))
    options: dict[str, Any] = {"batch_size": 4, "collate_fn": list, "num_workers": workers}
    (whole,) = resumed_anywhere(lambda: hr.DataLoader(data, **options))
    assert sorted(k for batch in whole for k, _, _ in batch) == list(range(20))


def test_ranks_share_pairs() -> None:
    parts = [given(pairs().shuffle(), rank=rank, world_size=2) for rank in range(2)]
    assert sorted(pair[0] for part in parts for batch in part for pair in batch) == list(range(20))
