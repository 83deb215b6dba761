"""Additions of our iterators to torch's own data sets; tests/drop_in compares the rest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from builders.numbers import Numbers
from torch.utils.data import BatchSampler, Dataset, IterableDataset, RandomSampler, random_split

import headrace as hr

pytestmark = pytest.mark.usefixtures("warm_workers")


class Squares(Dataset[int]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, k: int) -> int:
        return k * k


class Counting(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


class Plain:
    def __len__(self) -> int:
        return 5

    def __getitem__(self, k: int) -> int:
        return k


def test_data_sets_of_ours_alone_are_in_our_regime() -> None:
    assert hr.DataLoader(Numbers()).regime == "headrace"
    for data in (Squares(), Counting(), Plain(), list(range(9))):
        assert hr.DataLoader(data).regime == "torch"


def test_parts_of_a_data_set_of_ours_are_torchs_data_sets() -> None:
    first, second = random_split(Numbers(6), [4, 2], torch.Generator().manual_seed(1))  # type: ignore[arg-type]
    got = [int(n) for part in (first, second) for batch in hr.DataLoader(part, batch_size=2) for n in batch]
    assert sorted(got) == list(range(6))


def test_batch_that_was_made_cannot_be_peeked_at() -> None:
    with pytest.raises(hr.OptionError, match="consumed"):
        hr.DataLoader(Squares()).peek()


@pytest.mark.parametrize(
    ("data", "options"),
    [
        (Squares(), {}),
        (Squares(), {"shuffle": True}),
        (Squares(), {"batch_size": None}),
        (Squares(), {"sampler": [3, 1, 4]}),
        (Squares(), {"batch_sampler": BatchSampler(RandomSampler(range(20)), 3, drop_last=False)}),
        (Counting(), {}),
        (Plain(), {"num_workers": 1, "economic": True}),
    ],
)
def test_any_loader_can_be_told_the_epoch(data: Any, options: dict[str, Any]) -> None:
    with hr.DataLoader(data, **options) as loader:
        loader.set_epoch(3)
        assert loader.epoch == 3
        assert len(list(loader)) > 0
