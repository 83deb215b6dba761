"""torch's samplers and data set wrappers work as they are, with workers of each kind.

`tests/full/programs/samplers.py` has many more of them, with processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from drop_in.reading import plain
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
)

import headrace as hr

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


class Tenfold(Dataset[int]):
    def __init__(self, length: int = 20) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return 10 * range(self.length)[index]


class Bulk(Tenfold):
    """Takes whole batches, and lists of indices for one sample."""

    def __getitem__(self, indices: Any) -> Any:
        return torch.tensor(indices) * 10

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [1000 * len(indices) + index for index in indices]


class Part(IterableDataset[int]):
    def __init__(self, start: int, stop: int) -> None:
        self.start, self.stop = start, stop

    def __iter__(self) -> Iterator[int]:
        worker = torch.utils.data.get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        return iter(range(self.start, self.stop)[first::step])


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield from (2, 4)


class ByKey(Dataset[str]):
    """Its keys are no numbers."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, key: Any) -> str:
        return f"{type(key).__name__} {key!r}"


KEYS: list[Any] = ["a name", ("shard", 3), frozenset({1}), None, -1, 10**30, np.int32(3), np.arange(2)]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


Case = Callable[[], tuple[Any, dict[str, Any]]]
CASES: dict[str, Case] = {
    "subset of a subset": lambda: (Subset(Subset(Bulk(), range(10, 20)), [0, 2, 4]), {"batch_size": 2}),
    "chain": lambda: (ChainDataset([Part(0, 5), Part(10, 14)]), {"batch_size": 3}),
    "bulk": lambda: (Bulk(), {"batch_size": None, "sampler": BatchSampler(SequentialSampler(range(10)), 4, False)}),
    "batches": lambda: (
        Tenfold(),
        {"batch_sampler": BatchSampler(RandomSampler(range(10), generator=seeded(8)), 4, True)},
    ),
    "endless": lambda: (Tenfold(), {"batch_size": 3, "sampler": Endless()}),
    "keys of any type": lambda: (ByKey(), {"batch_size": 3, "sampler": KEYS}),
}


def epochs(loader: Any) -> list[Any]:
    return [[plain(batch) for batch, _ in zip(loader, range(10), strict=False)] for _ in range(2)]


@pytest.mark.parametrize("case", CASES)
def test_samplers_and_wrappers_give_the_same_as_with_torch(our_class: type[Any], case: str) -> None:
    """The class of torch in one process is the reference; for the chain, whose parts workers share, with workers."""
    for workers in (0, 2):
        data, options = CASES[case]()
        theirs = epochs(torch.utils.data.DataLoader(data, num_workers=workers if case == "chain" else 0, **options))
        data, options = CASES[case]()
        assert epochs(our_class(data, num_workers=workers, **options)) == theirs
        assert theirs[0] and theirs[0] != [[]]


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
