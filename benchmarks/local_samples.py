"""Torch data sets whose samples cost next to nothing to make. Workers import this file, so it imports little."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset


class Numbers(Dataset[int]):
    """The index is the sample."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> int:
        return index


class Images(Dataset[torch.Tensor]):
    """[3, 224, 224] float32, all `index`; 600 KB."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.empty(3, 224, 224).fill_(index)


def stacked(samples: list[torch.Tensor]) -> torch.Tensor:
    """A user's own collate_fn: one tensor of the samples'."""
    return torch.stack(samples)
