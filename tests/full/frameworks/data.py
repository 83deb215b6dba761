"""Data sets of each kind, and samples that name the process that made them."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from traceback import walk_stack
from typing import Any

import torch
from builders.numbers import Numbers
from torch.utils.data import Dataset, IterableDataset

import headrace as hr

COUNT = 12  # of the samples of data_of
FEW = 10  # of those of KINDS


def sample(key: int) -> dict[str, Any]:
    """x: [1] float32, the key; labels: [1] float32, twice as much; made_by: [2] int64, the process, and 1 if headrace
    has called this function."""
    is_ours = any(str(frame.f_globals.get("__name__")).startswith("headrace.") for frame, _ in walk_stack(None))
    return {
        "x": torch.tensor([float(key)]),
        "labels": torch.tensor([2.0 * key]),
        "made_by": torch.tensor([os.getpid(), int(is_ours)]),
    }


class TorchData(Dataset[Any]):
    def __init__(self, count: int = COUNT, make: Callable[[int], Any] = sample) -> None:
        self.count, self.make = count, make

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, key: int) -> Any:
        return self.make(key)


class TorchIterable(IterableDataset[Any]):
    def __init__(self, count: int = COUNT, make: Callable[[int], Any] = sample) -> None:
        self.count, self.make = count, make

    def __iter__(self) -> Iterator[Any]:
        return map(self.make, range(self.count))


class Feed(hr.AsyncIterableDataset):
    """Resumes from its state."""

    def __init__(self) -> None:
        self.next, self.is_loaded = 0, False

    async def aiter(self) -> AsyncIterator[int]:
        self.next, self.is_loaded = self.next if self.is_loaded else 0, False
        while self.next < FEW:
            self.next += 1
            yield self.next - 1

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next, self.is_loaded = state["next"], True


def always(number: int) -> bool:
    return number >= 0


KINDS: dict[str, Callable[[], Any]] = {
    "sized stream": lambda: Numbers(FEW).shuffle(),
    "stream without a length": lambda: Numbers(FEW).shuffle().filter(always),
    "iterable": Feed,
    "torch": lambda: TorchData(FEW, int),
    "torch, iterable": lambda: TorchIterable(FEW, int),
}


def loader_of(kind: str, workers: int = 0) -> hr.DataLoader[Any]:
    shuffle = kind == "torch" or None
    return hr.DataLoader(KINDS[kind](), batch_size=2, shuffle=shuffle, num_workers=workers)


def data_of(regime: str) -> Any:
    return TorchData() if regime == "torch" else Numbers(COUNT).map(sample)


def keys_of(batch: dict[str, Any]) -> list[int]:
    return [int(value) for value in batch["x"].flatten()]


def assert_made_by_our_workers(batches: Iterable[dict[str, Any]]) -> None:
    for batch in batches:
        for made_by, is_ours in batch["made_by"].tolist():
            assert made_by != os.getpid()
            assert is_ours
