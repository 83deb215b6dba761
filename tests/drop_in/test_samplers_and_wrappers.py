"""torch's samplers and data set wrappers, and samplers of users' own, work as they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from drop_in.reading import plain
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

import headrace as hr

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.parametrize("num_workers", [0, 2]),
]


def numbers(loader: Iterable[torch.Tensor]) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def flat(loader: Iterable[torch.Tensor]) -> list[int]:
    return [x for batch in loader for x in batch.tolist()]


class Tenfold(Dataset[int]):
    def __init__(self, length: int = 20) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return 10 * range(self.length)[index]


# Wrappers of data sets


@pytest.mark.slow
def test_subset_gives_its_samples(loader_class: type[Any], num_workers: int) -> None:
    data = Subset(Tenfold(), [7, 3, 3, 19])
    loader = loader_class(data, batch_size=3, num_workers=num_workers)
    assert len(loader) == 2
    assert numbers(loader) == [[70, 30, 30], [190]]


def test_subset_of_a_subset_uses_getitems_of_the_data_set(loader_class: type[Any], num_workers: int) -> None:
    class Bulk(Tenfold):
        def __getitems__(self, indices: list[int]) -> list[int]:
            return [1000 * len(indices) + index for index in indices]

    data = Subset(Subset(Bulk(), list(range(10, 20))), [0, 2, 4])
    assert numbers(loader_class(data, batch_size=2, num_workers=num_workers)) == [[2010, 2012], [1014]]


def test_concat_data_set_gives_its_parts_in_turn(loader_class: type[Any], num_workers: int) -> None:
    data = ConcatDataset([Tenfold(3), TensorDataset(torch.arange(2)), Subset(Tenfold(), [9])])
    loader = loader_class(data, batch_size=None, num_workers=num_workers)
    assert plain(list(loader)) == plain([0, 10, 20, [torch.tensor(0)], [torch.tensor(1)], 90])


class Part(IterableDataset[int]):
    def __init__(self, start: int, stop: int) -> None:
        self.start, self.stop = start, stop

    def __len__(self) -> int:
        return self.stop - self.start

    def __iter__(self) -> Iterator[int]:
        worker = torch.utils.data.get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        return iter(range(self.start, self.stop)[first::step])


def test_chain_data_set_gives_each_workers_share_of_all_parts(loader_class: type[Any], num_workers: int) -> None:
    loader = loader_class(ChainDataset([Part(0, 5), Part(10, 14)]), batch_size=3, num_workers=num_workers)
    assert len(loader) == 3
    expected = {
        0: [[0, 1, 2], [3, 4, 10], [11, 12, 13]],
        2: [[0, 2, 4], [1, 3, 11], [10, 12], [13]],
    }
    assert numbers(loader) == expected[num_workers]


def test_tensor_data_set_gives_lists_of_tensors(loader_class: type[Any], num_workers: int) -> None:
    x, y = torch.randn(7, 3), torch.arange(7)
    batches = list(loader_class(TensorDataset(x, y), batch_size=4, num_workers=num_workers))
    assert plain(batches) == plain([[x[:4], y[:4]], [x[4:], y[4:]]])


def test_stack_data_set_gives_dicts(loader_class: type[Any], num_workers: int) -> None:
    data = StackDataset(image=Tenfold(4), label=TensorDataset(torch.arange(4)))
    batches = list(loader_class(data, batch_size=2, num_workers=num_workers))
    assert plain(batches) == plain(
        [{"image": torch.tensor([10 * k, 10 * k + 10]), "label": [torch.tensor([k, k + 1])]} for k in (0, 2)]
    )


@pytest.mark.slow
def test_random_split_gives_disjoint_parts(loader_class: type[Any], num_workers: int) -> None:
    parts = random_split(Tenfold(), [0.75, 0.25], generator=torch.Generator().manual_seed(1))
    expected = torch.randperm(20, generator=torch.Generator().manual_seed(1)).mul(10).tolist()
    got = [flat(loader_class(part, batch_size=4, num_workers=num_workers)) for part in parts]
    assert got == [expected[:15], expected[15:]]


# Samplers of torch


@pytest.mark.slow
def test_distributed_samplers_share_the_samples_and_follow_set_epoch(loader_class: type[Any], num_workers: int) -> None:
    epochs = []
    samplers = [DistributedSampler(Tenfold(), num_replicas=2, rank=rank, seed=5) for rank in range(2)]
    loaders = [loader_class(Tenfold(), batch_size=4, sampler=s, num_workers=num_workers) for s in samplers]
    for epoch in (0, 1, 1):
        for loader in loaders:
            assert len(loader) == 3
            loader.sampler.set_epoch(epoch)
        shares = [flat(loader) for loader in loaders]
        order = torch.randperm(20, generator=torch.Generator().manual_seed(5 + epoch)).mul(10).tolist()
        assert shares == [order[0::2], order[1::2]]
        epochs.append(shares)
    assert epochs[0] != epochs[1] == epochs[2]


@pytest.mark.slow
def test_distributed_sampler_repeats_or_drops_what_does_not_divide(loader_class: type[Any], num_workers: int) -> None:
    for drop_last, expected in ((False, [10, 40, 70]), (True, [10, 40])):
        sampler = DistributedSampler(Tenfold(8), num_replicas=3, rank=1, shuffle=False, drop_last=drop_last)
        assert flat(loader_class(Tenfold(8), sampler=sampler, num_workers=num_workers)) == expected


def test_weighted_sampler_never_gives_what_weighs_nothing(loader_class: type[Any], num_workers: int) -> None:
    weights = [0.0, 1.0, 0.0, 3.0]
    sampler = WeightedRandomSampler(weights, 40, generator=torch.Generator().manual_seed(2))
    expected = torch.multinomial(
        torch.tensor(weights, dtype=torch.double), 40, True, generator=torch.Generator().manual_seed(2)
    )
    got = flat(loader_class(Tenfold(4), batch_size=7, sampler=sampler, num_workers=num_workers))
    assert got == expected.mul(10).tolist()
    assert set(got) == {10, 30}


def test_subset_random_sampler_gives_its_indices_in_another_order(loader_class: type[Any], num_workers: int) -> None:
    indices = [1, 5, 9, 13]
    sampler = SubsetRandomSampler(indices, generator=torch.Generator().manual_seed(4))
    order = torch.randperm(4, generator=torch.Generator().manual_seed(4)).tolist()
    got = flat(loader_class(Tenfold(), batch_size=3, sampler=sampler, num_workers=num_workers))
    assert got == [10 * indices[k] for k in order]


@pytest.mark.slow
def test_random_sampler_goes_on_with_its_generator_in_each_epoch(loader_class: type[Any], num_workers: int) -> None:
    sampler = RandomSampler(Tenfold(), generator=torch.Generator().manual_seed(6))
    loader = loader_class(Tenfold(), batch_size=6, sampler=sampler, num_workers=num_workers)
    expected = torch.Generator().manual_seed(6)
    for _ in range(2):
        assert flat(loader) == torch.randperm(20, generator=expected).mul(10).tolist()
        torch.randperm(20, generator=expected)  # what the sampler draws at its end, and needs none of


class Bulk(Dataset[torch.Tensor]):
    """Takes a list of indices for one sample."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, indices: list[int]) -> torch.Tensor:
        assert isinstance(indices, list)
        return torch.tensor(indices) * 10


def test_batch_sampler_as_sampler_loads_in_bulk(loader_class: type[Any], num_workers: int) -> None:
    sampler = BatchSampler(SequentialSampler(range(10)), batch_size=4, drop_last=False)
    loader = loader_class(Bulk(), batch_size=None, sampler=sampler, num_workers=num_workers)
    assert len(loader) == 3
    assert numbers(loader) == [[0, 10, 20, 30], [40, 50, 60, 70], [80, 90]]


def test_batch_sampler_of_a_random_sampler_gives_its_batches(loader_class: type[Any], num_workers: int) -> None:
    sampler = RandomSampler(range(10), generator=torch.Generator().manual_seed(8))
    loader = loader_class(Tenfold(), batch_sampler=BatchSampler(sampler, 4, drop_last=True), num_workers=num_workers)
    order = torch.randperm(10, generator=torch.Generator().manual_seed(8)).mul(10).tolist()
    assert len(loader) == 2
    assert numbers(loader) == [order[:4], order[4:8]]


# Samplers of users


class Evens:
    """No kind of torch's Sampler: it can be iterated, and has a length."""

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[int]:
        yield from range(0, 10, 2)


@pytest.mark.slow
def test_sampler_of_ones_own_is_asked_anew_for_each_epoch(loader_class: type[Any], num_workers: int) -> None:
    loader = loader_class(Tenfold(), batch_size=2, sampler=Evens(), num_workers=num_workers)
    assert len(loader) == 3
    for _ in range(2):
        assert numbers(loader) == [[0, 20], [40, 60], [80]]


@pytest.mark.slow
def test_generator_object_serves_one_epoch_and_has_no_length(loader_class: type[Any], num_workers: int) -> None:
    loader = loader_class(Tenfold(), batch_size=2, sampler=(k for k in (3, 1, 4)), num_workers=num_workers)
    with pytest.raises(TypeError):
        len(loader)
    assert numbers(loader) == [[30, 10], [40]]
    assert numbers(loader) == []


def test_endless_sampler_can_be_left(loader_class: type[Any], num_workers: int) -> None:
    class Endless(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            while True:
                yield from (2, 4)

    iterator = iter(loader_class(Tenfold(), batch_size=3, sampler=Endless(), num_workers=num_workers))
    assert [next(iterator).tolist() for _ in range(3)] == [[20, 40, 20], [40, 20, 40], [20, 40, 20]]
    del iterator


class ByKey(Dataset[str]):
    """Its keys are no numbers."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, key: Any) -> str:
        return f"{type(key).__name__} {key!r}"


KEYS: list[Any] = ["a name", ("shard", 3), b"bytes", frozenset({1}), None, 2.5, -1, 10**30]


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [None, 1, 3])
def test_keys_of_any_type_arrive_as_they_are(loader_class: type[Any], num_workers: int, batch_size: int | None) -> None:
    loader = loader_class(ByKey(), batch_size=batch_size, sampler=KEYS, num_workers=num_workers)
    got = list(loader) if batch_size is None else [x for batch in loader for x in batch]
    assert got == [f"{type(key).__name__} {key!r}" for key in KEYS]


def test_numpy_indices_arrive_as_they_are(loader_class: type[Any], num_workers: int) -> None:
    keys = [np.int32(3), np.arange(2), np.arange(4)[2]]
    loader = loader_class(ByKey(), batch_size=None, sampler=keys, num_workers=num_workers)
    assert list(loader) == [f"{type(key).__name__} {key!r}" for key in keys]


def test_tensor_indices_arrive_as_they_are(num_workers: int) -> None:
    # Of ours alone: torch starts a thread that shares tensors, for the life of the process.
    keys = [torch.tensor(3), torch.arange(2), torch.zeros(0)]
    loader = hr.DataLoader(ByKey(), batch_size=None, sampler=keys, num_workers=num_workers)
    assert list(loader) == [f"{type(key).__name__} {key!r}" for key in keys]


# Long lists of indices


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
@pytest.mark.parametrize("taken", [0, 3])
def test_long_lists_of_indices_lock_nothing_up_when_the_trainer_leaves_early(
    loader_class: type[Any], num_workers: int, numbers_in_a_sample: int, taken: int
) -> None:
    options: dict[str, Any] = {"prefetch_factor": 16} if num_workers else {}
    iterator = iter(
        loader_class(Wide(numbers_in_a_sample), batch_size=20_000, num_workers=num_workers, collate_fn=whole, **options)
    )
    for number in range(taken):
        first = 20_000 * number
        assert next(iterator) == [sum(range(first, first + 20_000))] * numbers_in_a_sample
    del iterator


@pytest.mark.slow
def test_long_lists_of_indices_arrive_whole(loader_class: type[Any], num_workers: int) -> None:
    options: dict[str, Any] = {"prefetch_factor": 12} if num_workers else {}
    batches = [list(range(20_000 * k, 20_000 * (k + 1))) for k in range(24)]
    loader = loader_class(Wide(1), batch_sampler=batches, num_workers=num_workers, collate_fn=whole, **options)
    assert list(loader) == [[sum(batch)] for batch in batches]
