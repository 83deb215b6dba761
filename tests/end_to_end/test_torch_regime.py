"""torch's own data sets run on torch's own engine, unchanged."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset, random_split

import headrace as hr


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


def batches(kind: Any, data: Any, **options: Any) -> list[Any]:
    torch.manual_seed(5)
    return [batch.tolist() for batch in kind(data, **options)]


@pytest.mark.parametrize("data", [Squares(), Counting(), Plain(), list(range(9)), Subset(Squares(), [3, 1, 4])])
def test_batches_are_torchs(data: Any) -> None:
    assert hr.DataLoader(data).regime == "torch"
    for options in ({}, {"batch_size": 4}, {"batch_size": 4, "drop_last": True}, {"shuffle": True}):
        if options.get("shuffle") and isinstance(data, IterableDataset):
            with pytest.raises(ValueError, match="shuffle"):
                hr.DataLoader(data, **options)
        else:
            assert batches(hr.DataLoader, data, **options) == batches(torch.utils.data.DataLoader, data, **options)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_torchs_workers_are_torchs() -> None:
    options = {"batch_size": 4, "num_workers": 1, "shuffle": True}
    assert batches(hr.DataLoader, Squares(), **options) == batches(torch.utils.data.DataLoader, Squares(), **options)


def test_both_regimes_are_torchs_class() -> None:
    class Ours(hr.AsyncDataset):
        def __len__(self) -> int:
            return 3

        async def aget(self, key: int) -> int:
            return key

    for data in (Squares(), Ours()):
        loader: Any = hr.DataLoader(data, batch_size=2)
        assert isinstance(loader, torch.utils.data.DataLoader)
        assert loader.batch_size == 2
        assert loader.dataset is data
    assert hr.DataLoader(Ours()).regime == "headrace"


def test_parts_of_a_data_set_of_ours_are_torchs_data_sets() -> None:
    class Ours(hr.AsyncDataset):
        def __len__(self) -> int:
            return 6

        async def aget(self, key: int) -> int:
            return key

    first, second = random_split(Ours(), [4, 2], torch.Generator().manual_seed(1))  # type: ignore[arg-type]
    got = [int(n) for part in (first, second) for batch in hr.DataLoader(part, batch_size=2) for n in batch]
    assert sorted(got) == list(range(6))


@pytest.mark.may_leave(threads="AnyIO worker thread", reason="threads end with their loop")
def test_torchs_data_sets_are_for_async_loops_too() -> None:
    async def main() -> list[Any]:
        loader = hr.DataLoader(TensorDataset(torch.arange(6)), batch_size=4)
        return [batch async for batch in loader]

    assert [b[0].tolist() for b in asyncio.run(main())] == [[0, 1, 2, 3], [4, 5]]


@pytest.mark.parametrize(
    "options", [{"seed": 1}, {"memory_budget": "1GiB"}, {"fetch_concurrency": 3}, {"fetch": hr.FetchOptions()}]
)
def test_options_of_ours_are_refused_there(options: dict[str, Any]) -> None:
    with pytest.raises(hr.OptionError, match=next(iter(options))):
        hr.DataLoader(Squares(), **options)


@pytest.mark.parametrize("name", ["stats", "report", "peek", "bound_by"])
def test_what_is_ours_alone_says_so_there(name: str) -> None:
    with pytest.raises(hr.LoaderBusyError, match="torch's engine"):
        getattr(hr.DataLoader(Squares()), name)()


def test_torchs_checks_and_texts_are_torchs() -> None:
    bad: list[dict[str, Any]] = [
        {"batch_size": 0},
        {"num_workers": -1},
        {"timeout": -1},
        {"prefetch_factor": 3},
        {"persistent_workers": True},
        {"batch_size": None, "drop_last": True},
        {"shuffle": True, "sampler": [1]},
        {"batch_sampler": [[1]], "batch_size": 3},
    ]
    for options in bad:
        texts = []
        for kind in (hr.DataLoader, torch.utils.data.DataLoader):
            with pytest.raises(ValueError) as caught:
                kind(Squares(), **options)
            texts.append(str(caught.value))
        assert texts[0] == texts[1]
