"""Data whose samples say which process made them, for both regimes."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

import headrace as hr

COUNT = 12


def sample(key: int) -> dict[str, Any]:
    """x: [1] float32, the key; labels: [1] float32, twice as much; made_by: [3] int64, this process and two above."""
    parent = os.getppid()
    above = int(Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1])
    return {
        "x": torch.tensor([float(key)]),
        "labels": torch.tensor([2.0 * key]),
        "made_by": torch.tensor([os.getpid(), parent, above]),
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
    """A data set of COUNT samples made by `sample` in workers: of torch's kind, or a stream of ours."""
    return TorchData() if regime == "torch" else Keys().map(sample)


def keys_of(batch: dict[str, Any]) -> list[int]:
    return [int(value) for value in batch["x"].flatten()]


def assert_made_by_our_workers(batches: Iterable[dict[str, Any]]) -> None:
    """Every sample comes from a worker that our fork server forked; torch's workers are the trainer's children."""
    trainer = os.getpid()
    for batch in batches:
        for made_by, parent, above in batch["made_by"].tolist():
            assert made_by != trainer
            assert parent != trainer
            assert above == trainer
