"""Warnings: the exact texts, when they come, and when they don't."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from drop_in.classes import in_processes
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import headrace as hr

TOO_MANY_WORKERS = (
    "This DataLoader will create {} worker processes in total. Our suggested max number of worker in current system "
    "is {}, which is smaller than what this DataLoader is going to create. Please be aware that excessive worker "
    "creation might get DataLoader running slow or even freeze, lower the worker number to avoid potential "
    "slowness/freeze if necessary."
)
NO_ACCELERATOR = (
    "'pin_memory' argument is set as true but no accelerator is found, then device pinned memory won't be used."
)
DEVICE_IGNORED = (
    "pin_memory_device is deprecated, the current accelerator will be used as the device,"
    "ignore pin_memory_device='cuda'."
)
NOT_PICKLED = "Got pickle error when attempting to start a worker Process. "

without_accelerator = pytest.mark.skipif(torch.accelerator.is_available(), reason="is about machines without one")


class Squares(Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, k: int) -> int:
        return k * k


class Longer(IterableDataset[int]):
    """Gives two samples more than it says, in all workers together."""

    def __len__(self) -> int:
        return 4

    def __repr__(self) -> str:
        return "Longer()"

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(range(info.id, 6, info.num_workers) if info else range(6))


@contextmanager
def caught() -> Iterator[list[str]]:
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", ".*fork.*", DeprecationWarning)  # Python's, of torch's way to start workers
        yield texts
    assert {record.category for record in records} <= {UserWarning}
    texts.extend(str(record.message) for record in records)


@pytest.fixture
def one_cpu() -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


# More workers than CPUs


@pytest.mark.slow
def test_more_workers_than_cpus_are_warned_about_at_construction_and_at_each_iter(
    loader_class: Any, one_cpu: None
) -> None:
    with caught() as texts:
        loader = loader_class(Squares(), num_workers=2)
    assert texts == [TOO_MANY_WORKERS.format(2, 1)]
    for _ in range(2):
        with caught() as texts:
            list(loader)
        assert texts == [TOO_MANY_WORKERS.format(2, 1)]


@pytest.mark.slow
def test_persistent_workers_are_warned_about_when_they_are_made_only(loader_class: Any, one_cpu: None) -> None:
    with caught():
        loader = loader_class(Squares(), num_workers=2, persistent_workers=True)
    with caught() as texts:
        list(loader)
    assert texts == [TOO_MANY_WORKERS.format(2, 1)]
    with caught() as texts:
        list(loader)
    assert texts == []


@pytest.mark.parametrize("num_workers", [0, 1])
def test_no_more_workers_than_cpus_are_not_warned_about(loader_class: Any, one_cpu: None, num_workers: int) -> None:
    with caught() as texts:
        list(loader_class(Squares(), num_workers=num_workers))
    assert texts == []


def test_number_of_workers_is_not_warned_about_when_the_constructor_raises(loader_class: Any, one_cpu: None) -> None:
    with caught() as texts, pytest.raises(ValueError, match="batch_size"):
        loader_class(Squares(), 0, num_workers=2)
    assert texts == []


# More samples than were announced


@pytest.mark.parametrize("num_workers", [0, 2])
def test_length_is_not_warned_about_when_nobody_asked_for_it(loader_class: Any, num_workers: int) -> None:
    with caught() as texts:
        assert list(loader_class(Longer(), None, num_workers=num_workers)) == [0, 1, 2, 3, 4, 5]
    assert texts == []


def test_length_is_that_of_the_last_question_before_iter(loader_class: Any) -> None:
    loader = loader_class(Longer(), None)
    iterator = iter(loader)
    len(loader)
    with caught() as texts:
        list(iterator)
    assert texts == [], "the iterator was there before"


def test_batches_are_compared_with_the_data_sets_length_in_samples(loader_class: Any) -> None:
    loader = loader_class(Longer(), 2)
    assert len(loader) == 2
    with caught() as texts:
        assert len(list(loader)) == 3
    assert texts == []


# Pinned memory


@without_accelerator
@pytest.mark.parametrize("num_workers", [0, 1])
def test_pin_memory_is_warned_about_at_iter_when_there_is_no_accelerator(loader_class: Any, num_workers: int) -> None:
    with caught() as texts:
        loader = loader_class(Squares(), num_workers=num_workers, pin_memory=True)
    assert texts == []
    with caught() as texts:
        iterator = iter(loader)
    assert texts == [NO_ACCELERATOR]
    with caught() as texts:
        list(iterator)
    assert texts == []


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_pin_memory_device_is_warned_about_at_iter_when_memory_is_to_be_pinned(
    loader_class: Any, num_workers: int
) -> None:
    with caught() as texts:
        loader = loader_class(Squares(), num_workers=num_workers, pin_memory=True, pin_memory_device="cuda")
    assert texts == []
    with caught() as texts:
        list(loader)
    assert texts == ([DEVICE_IGNORED] if torch.accelerator.is_available() else [DEVICE_IGNORED, NO_ACCELERATOR])
    with caught() as texts:
        list(loader_class(Squares(), num_workers=num_workers, pin_memory_device="cuda"))
    assert texts == []


# Data sets that cannot travel


@in_processes
def test_what_cannot_be_pickled_is_warned_about_and_raised_when_the_context_pickles(loader_class: Any) -> None:
    class Local(Squares):
        def __reduce__(self) -> Any:
            raise TypeError("this one stays here")

    loader = loader_class(Local(), num_workers=1, multiprocessing_context="spawn")
    with caught() as texts, pytest.raises(TypeError, match="this one stays here"):
        list(loader)
    assert len(texts) == 1
    assert texts[0].startswith(NOT_PICKLED)


def test_quiet_use_is_not_warned_about() -> None:
    loader = hr.DataLoader(Squares(), 2, num_workers=1, persistent_workers=True)
    with caught() as texts:
        for _ in range(2):
            assert [batch.tolist() for batch in loader] == [[0, 1], [4, 9]]
    assert texts == []
