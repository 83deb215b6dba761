"""`async for` under trio: only the hand-over runs there, the loader's own loop is asyncio's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest
from torch.utils.data import Dataset

import headrace as hr


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        return index


class AsyncNumbers(hr.AsyncDataset):
    def __len__(self) -> int:
        return 20

    async def aget(self, key: int) -> int:
        return key


LOADERS: dict[str, Callable[[], hr.DataLoader[Any]]] = {
    "workers": lambda: hr.DataLoader(Numbers(), 4, num_workers=2),
    "no workers": lambda: hr.DataLoader(Numbers(), 4),
    "threads": lambda: hr.DataLoader(Numbers(), 4, num_workers=2, workers="thread"),
    "economic": lambda: hr.DataLoader(Numbers(), 4, num_workers=2, economic=True),
    "asynchronous data set": lambda: hr.DataLoader(AsyncNumbers(), 4, num_workers=1),
}


trio_keeps_threads = pytest.mark.may_leave(threads="^Trio thread", reason="trio keeps idle threads for ten seconds")


@pytest.mark.slow
@trio_keeps_threads
@pytest.mark.parametrize("backend", ["trio", "asyncio"])
@pytest.mark.parametrize("kind", LOADERS)
def test_batches_come_in_order_to_an_async_for_of_either_library(kind: str, backend: str) -> None:
    async def read() -> list[list[int]]:
        batches = []
        async with LOADERS[kind]() as loader:
            async for batch in loader:
                batches.append(batch.tolist())
                await anyio.lowlevel.checkpoint()
        return batches

    assert anyio.run(read, backend=backend) == [list(range(k, k + 4)) for k in range(0, 20, 4)]


@trio_keeps_threads
def test_waiting_for_a_batch_can_be_cancelled_under_trio_and_nothing_is_lost() -> None:
    async def read() -> list[int]:
        loader = hr.DataLoader(Numbers(), 10, num_workers=1)
        iterator = aiter(loader)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await anext(iterator)
        return [number async for batch in iterator for number in batch.tolist()]

    assert anyio.run(read, backend="trio") == list(range(20))
