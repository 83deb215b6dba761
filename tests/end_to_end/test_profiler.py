"""A profiler sees the waiting for batches, by the name it has in torch's own loader."""

from __future__ import annotations

from collections.abc import Iterable
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile

import headrace as hr

NAME = "enumerate(DataLoader)#DataLoader.__next__"


class Numbers(hr.AsyncDataset):
    def __len__(self) -> int:
        return 8

    async def aget(self, key: int) -> int:
        return key


def seen(batches: Iterable[object]) -> dict[str, int]:
    with profile(activities=[ProfilerActivity.CPU]) as running:
        for _ in batches:
            torch.ones(2).sum()
    return {event.key: event.count for event in running.key_averages()}


def test_each_wait_is_an_event_of_the_profile() -> None:
    with hr.DataLoader(Numbers(), batch_size=2) as loader:
        assert seen(loader)[NAME] == 5  # four batches and the end
        assert seen(torch.utils.data.DataLoader(torch.arange(8), batch_size=2)).keys() >= {
            "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
        }


def test_a_class_of_ones_own_has_its_own_name() -> None:
    class MyLoader(hr.DataLoader):  # type: ignore[type-arg]
        pass

    with MyLoader(Numbers(), batch_size=2) as loader:
        assert seen(loader)["enumerate(DataLoader)#MyLoader.__next__"] == 5


def test_nothing_is_recorded_while_nobody_profiles() -> None:
    with hr.DataLoader(Numbers(), batch_size=2) as loader:
        with mock.patch.object(torch.autograd.profiler, "record_function", side_effect=AssertionError):
            assert len(list(loader)) == 4
