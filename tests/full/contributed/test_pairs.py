"""A source of a stranger's has what all sources have: length, order, states and ranks."""

from __future__ import annotations

from typing import Any

import pytest
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


def batches_of(data: hr.Stream, **options: Any) -> list[Any]:
    with hr.DataLoader(data, batch_size=4, collate_fn=list, **options) as loader:
        return list(loader)


def test_pairs_come_in_their_order_and_by_number() -> None:
    data = pairs()
    assert len(data) == 20
    assert data[3] == (3, 30)
    assert [pair for batch in batches_of(data) for pair in batch] == [(k, 10 * k) for k in range(20)]


@pytest.mark.parametrize("workers", [0, 1])
def test_shuffled_pairs_go_on_from_a_state(workers: int) -> None:
    data = pairs().shuffle().map(lambda pair: (*pair, sum(pair)))
    whole = batches_of(data)
    with hr.DataLoader(data, batch_size=4, collate_fn=list, num_workers=workers) as loader:
        batches = iter(loader)
        begun = [next(batches), next(batches)]
        state = loader.state_dict()
    with hr.DataLoader(data, batch_size=4, collate_fn=list, num_workers=workers) as loader:
        loader.load_state_dict(state)
        assert begun + list(loader) == whole
    assert sorted(k for batch in whole for k, _, _ in batch) == list(range(20))


def test_ranks_share_pairs() -> None:
    parts = [batches_of(pairs().shuffle(), rank=rank, world_size=2) for rank in range(2)]
    assert sorted(pair[0] for part in parts for batch in part for pair in batch) == list(range(20))
