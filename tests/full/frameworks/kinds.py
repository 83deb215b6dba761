"""Data sets of each kind, with little to import: workers import the module of what they are sent."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from torch.utils.data import Dataset, IterableDataset

import headrace as hr

COUNT = 10


class Keys(hr.AsyncDataset):
    def __len__(self) -> int:
        return COUNT

    async def aget(self, key: int) -> int:
        return key


class Feed(hr.AsyncIterableDataset):
    """Resumes from its state."""

    def __init__(self) -> None:
        self.next, self.is_told = 0, False

    async def aiter(self) -> AsyncIterator[int]:
        self.next, self.is_told = self.next if self.is_told else 0, False
        while self.next < COUNT:
            self.next += 1
            yield self.next - 1

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next, self.is_told = state["next"], True


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, key: int) -> int:
        return key


class Counting(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(COUNT))


def always(number: int) -> bool:
    return number >= 0


DATA: dict[str, Callable[[], Any]] = {
    "sized stream": lambda: Keys().shuffle(),
    "stream without a length": lambda: Keys().shuffle().filter(always),
    "iterable": Feed,
    "torch": Numbers,
    "torch, iterable": Counting,
}


def loader_of(kind: str, workers: int) -> hr.DataLoader[Any]:
    shuffle = kind == "torch" or None
    return hr.DataLoader(DATA[kind](), batch_size=2, shuffle=shuffle, num_workers=workers)
