"""A profiler sees the waiting for batches, by the name it has in torch's own loader."""

from collections.abc import Iterable, Iterator
from unittest import mock

import pytest
import torch
from builders.numbers import Numbers
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import IterableDataset

import headrace as hr


class Counted(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def seen(batches: Iterable[object]) -> dict[str, int]:
    with profile(activities=[ProfilerActivity.CPU]) as running:
        for _ in batches:
            torch.ones(2).sum()
    return {event.key: event.count for event in running.key_averages()}


class MyLoader(hr.DataLoader):  # type: ignore[type-arg]
    pass


@pytest.mark.slow
def test_each_wait_is_an_event_of_the_profile_with_the_name_of_the_class() -> None:
    for kind in (hr.DataLoader, MyLoader):
        with kind(Numbers(8), batch_size=2) as loader:
            assert seen(loader)[f"enumerate(DataLoader)#{kind.__name__}.__next__"] == 5  # four batches and the end
    name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    assert name in seen(torch.utils.data.DataLoader(torch.arange(8), batch_size=2))


def test_nothing_is_recorded_while_nobody_profiles() -> None:
    with mock.patch.object(torch.autograd.profiler, "record_function", side_effect=AssertionError):
        for data in (Numbers(8), torch.arange(8), Counted()):
            with hr.DataLoader(data, batch_size=2) as loader:
                assert len(list(loader)) == 4


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_batches_of_torchs_data_sets_are_events_too(workers: int) -> None:
    with hr.DataLoader(torch.arange(8), batch_size=2, num_workers=workers) as loader:
        events = seen(loader)
    assert [count for name, count in events.items() if name.startswith("enumerate(DataLoader)#")] == [5]
