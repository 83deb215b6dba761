"""Indices of samplers that are tensors or long lists; `tests/full/programs/samplers.py` has the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import (
    Dataset,
)

import headrace as hr

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


class ByKey(Dataset[str]):
    """Its keys are no numbers."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, key: Any) -> str:
        return f"{type(key).__name__} {key!r}"


def test_tensor_indices_arrive_as_they_are() -> None:
    # Of ours alone: torch starts a thread that shares tensors, for the life of the process.
    keys = [torch.tensor(3), torch.arange(2), torch.zeros(0)]
    loader = hr.DataLoader(ByKey(), batch_size=None, sampler=keys, num_workers=2)
    assert list(loader) == [f"{type(key).__name__} {key!r}" for key in keys]


class Wide(Dataset[torch.Tensor]):
    """Takes long lists of indices, and may give large samples for them."""

    def __init__(self, numbers_in_a_sample: int) -> None:
        self.numbers_in_a_sample = numbers_in_a_sample

    def __len__(self) -> int:
        return 10_000_000

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        assert len(indices) == 20_000
        return [torch.full((self.numbers_in_a_sample,), sum(indices))]


def whole(samples: list[torch.Tensor]) -> list[Any]:
    return samples[0].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("numbers_in_a_sample", [1, 20_000], ids=["small results", "large results"])
@pytest.mark.parametrize("taken", [0, 3, 24])
def test_long_lists_of_indices_lock_nothing_up_when_the_trainer_leaves_early(
    loader_class: type[Any], numbers_in_a_sample: int, taken: int
) -> None:
    batches = [list(range(20_000 * k, 20_000 * (k + 1))) for k in range(24)]
    data = Wide(numbers_in_a_sample)
    iterator = iter(loader_class(data, batch_sampler=batches, num_workers=2, collate_fn=whole, prefetch_factor=16))
    for number in range(taken):
        assert next(iterator) == [sum(batches[number])] * numbers_in_a_sample
    del iterator
