"""A loader in economic mode, and data sets for it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

import headrace as hr
from headrace.torch_regime.economic import EconomicIterator, Economy

KINDS = ["process", "thread"]


class Loader(torch.utils.data.DataLoader[Any]):
    """torch's loader with our engine."""

    def __init__(self, data: Any, *, kind: Any = "process", num_batch_workers: int | None = None, **more: Any) -> None:
        super().__init__(data, **more)
        self.economy = Economy(self, num_batch_workers=num_batch_workers, memory_budget=2**28, workers=kind)

    def _get_iterator(self) -> Any:
        return EconomicIterator(self, self.economy)


Make = Callable[..., Loader]


class Squares(Dataset[int]):
    def __init__(self, count: int = 23) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, k: int) -> int:
        return k * k


class Images(Dataset[tuple[torch.Tensor, int]]):
    """Large enough for slabs."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, k: int) -> tuple[torch.Tensor, int]:
        return torch.full((3, 100, 100), float(k)), k


class Dice(Dataset[list[float]]):
    """Random numbers of each generator."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, k: int) -> list[float]:
        throws = [random.random(), np.random.random(), torch.rand(()).item(), hr.rng().random()]  # noqa: NPY002
        return [float(k), *throws]


class Faulty(Dataset[int]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, k: int) -> int:
        if k == 5:
            raise ValueError(f"no sample {k}")
        return k


class AnyKey(Dataset[Any]):
    def __getitem__(self, key: Any) -> tuple[str, float]:
        return repr(key), hr.rng().random()


class Function(Dataset[Any]):
    def __init__(self, function: Callable[[int], Any], count: int = 16) -> None:
        self.function, self.count = function, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, k: int) -> Any:
        return self.function(k)


def as_list(samples: list[Any]) -> list[Any]:
    return list(samples)


def flat(batches: Any) -> list[Any]:
    return [value for batch in batches for value in batch]
