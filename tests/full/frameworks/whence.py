"""Data whose samples name the process that made them, for both regimes."""

from __future__ import annotations

import os
from collections.abc import Iterable
from traceback import walk_stack
from typing import Any

import torch
from torch.utils.data import Dataset

import headrace as hr

COUNT = 12


def sample(key: int) -> dict[str, Any]:
    """x: [1] float32, the key; labels: [1] float32, twice as much; made_by: [2] int64, the process, and 1 if headrace
    has called this function."""
    is_ours = any(str(frame.f_globals.get("__name__")).startswith("headrace.") for frame, _ in walk_stack(None))
    return {
        "x": torch.tensor([float(key)]),
        "labels": torch.tensor([2.0 * key]),
        "made_by": torch.tensor([os.getpid(), int(is_ours)]),
    }


class TorchData(Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, key: int) -> dict[str, Any]:
        return sample(key)


class Keys(hr.AsyncDataset):
    def __len__(self) -> int:
        return COUNT

    async def aget(self, key: int) -> int:
        return key


def data_of(regime: str) -> Any:
    return TorchData() if regime == "torch" else Keys().map(sample)


def keys_of(batch: dict[str, Any]) -> list[int]:
    return [int(value) for value in batch["x"].flatten()]


def assert_made_by_our_workers(batches: Iterable[dict[str, Any]]) -> None:
    for batch in batches:
        for made_by, is_ours in batch["made_by"].tolist():
            assert made_by != os.getpid()
            assert is_ours
