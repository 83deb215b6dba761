"""`hr.rng()` in coroutines that make samples: the sample's own, however many run at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

import headrace as hr

TOTAL = 40


async def stir() -> None:
    for _ in range(int(np.random.default_rng().integers(4))):
        await asyncio.sleep(0)


async def draws() -> tuple[float, ...]:
    first = hr.rng().random()
    await stir()
    return first, hr.rng().random()


class ByKey(hr.AsyncDataset):
    def __len__(self) -> int:
        return TOTAL

    async def aget(self, key: int) -> tuple[float, ...]:
        await stir()
        return await draws()


class InTurn(hr.AsyncIterableDataset):
    async def aiter(self) -> AsyncIterator[tuple[float, ...]]:
        for _ in range(TOTAL):
            yield await draws()


class InThreads:
    def __len__(self) -> int:
        return TOTAL

    def __getitem__(self, key: int) -> tuple[float, ...]:
        return hr.rng().random(), hr.rng().random()


class Callers(InTurn):
    loop = "caller"


async def more(sample: tuple[float, ...]) -> tuple[float, ...]:
    await stir()
    return (*sample, *await draws())


def in_worker(sample: tuple[float, ...]) -> tuple[float, ...]:
    return (*sample, hr.rng().random())


DATA = {
    "by key": (ByKey(), 2),
    "in turn": (InTurn(), 2),
    "in threads": (hr.from_map(InThreads()), 2),
    "by key, and a step": (ByKey().map(more), 4),
    "in turn, and a step": (InTurn().map(more), 4),
    "after a worker's step": (ByKey().map(in_worker).map(more), 5),
    "between two of them": (ByKey().map(in_worker).map(more).map(in_worker), 6),
}


def drawn(data: Any, epochs: int = 1, **options: Any) -> list[tuple[float, ...]]:
    options = {"batch_size": 4, "seed": 3, "num_workers": 0, "collate_fn": list} | options
    with hr.DataLoader(data, **options) as loader:
        return [sample for _ in range(epochs) for batch in loader for sample in batch]


@pytest.mark.slow
@pytest.mark.parametrize("name", DATA)
def test_coroutines_draw_the_samples_numbers_for_any_concurrency_and_number_of_workers(name: str) -> None:
    data, count = DATA[name]
    expected = drawn(data, epochs=2)
    assert len({number for sample in expected for number in sample}) == 2 * TOTAL * count
    assert drawn(data, epochs=2, fetch_concurrency=1) == expected
    assert drawn(data, epochs=2, fetch_concurrency=64, batch_size=16) == expected
    assert drawn(data, epochs=2, num_workers=1) == expected


def test_an_iterator_on_the_callers_loop_draws_the_samples_numbers() -> None:
    async def all_of() -> list[Any]:
        async with hr.DataLoader(Callers(), batch_size=4, seed=3, collate_fn=list) as loader:
            return [sample async for batch in loader for sample in batch]

    assert asyncio.run(all_of()) == drawn(InTurn())
