"""Data sets with `__iter__`: one copy in each worker, batches made of what that copy gives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import IterableDataset, get_worker_info

import headrace as hr


class Counting(IterableDataset[int]):
    """Counts up, the same in each worker: who shares the work among workers is the data set itself."""

    def __init__(self, count: int = 5) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


class Shared(Counting):
    """Each worker gives the numbers that it has to, by its id."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(range(info.id, self.count, info.num_workers) if info else range(self.count))


class Logging(IterableDataset[int]):
    """Writes a line, with the worker's id, whenever it is iterated."""

    def __init__(self, log: Path) -> None:
        self.log = str(log)

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        with Path(self.log).open("a") as log:
            log.write(f"{info.id if info else 'trainer'}\n")
        yield from (1, 2, 3)


def test_nothing_is_lost_when_batches_come_as_they_are_ready(loader_class: Any) -> None:
    loader = loader_class(Shared(10), None, num_workers=2, in_order=False)
    assert sorted(loader) == list(range(10))


def test_an_endless_data_set_is_read_no_further_than_the_consumer_and_the_prefetch(loader_class: Any) -> None:
    read = []

    class Endless(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            k = 0
            while True:
                read.append(k)
                yield k
                k += 1

    iterator = iter(loader_class(Endless(), 2))
    assert read == []
    assert next(iterator).tolist() == [0, 1]
    assert read == [0, 1]
    with_workers = iter(loader_class(Endless(), 2, num_workers=2))
    assert [next(with_workers).tolist() for _ in range(4)] == [[0, 1], [0, 1], [2, 3], [2, 3]]


# When the data set is iterated


def test_data_set_is_iterated_at_iter_without_workers(loader_class: Any, tmp_path: Path) -> None:
    class Eager(Logging):
        def __iter__(self) -> Iterator[int]:
            with Path(self.log).open("a") as log:
                log.write("trainer\n")
            return iter((1, 2))

    data = Eager(tmp_path / "log")
    loader = loader_class(data, None)
    assert not (tmp_path / "log").exists()
    iterator = iter(loader)
    assert (tmp_path / "log").read_text() == "trainer\n"
    assert list(iterator) == [1, 2]
    assert (tmp_path / "log").read_text() == "trainer\n"


def test_half_used_epoch_is_gone_when_persistent_workers_begin_the_next(loader_class: Any) -> None:
    loader = loader_class(Shared(20), None, num_workers=2, persistent_workers=True)
    first = iter(loader)
    assert [next(first) for _ in range(3)] == [0, 1, 2]
    again = iter(loader)
    assert again is first
    assert list(again) == list(range(20))


# What counts as iterable


def test_a_class_that_is_not_torchs_is_taken_for_a_map(loader_class: Any) -> None:
    class OnlyIter:
        def __iter__(self) -> Iterator[int]:
            return iter((1, 2))

    with pytest.raises(TypeError):
        next(iter(loader_class(OnlyIter())))
    assert list(loader_class(OnlyIter(), batch_sampler=[])) == []


def test_data_set_that_fails_to_begin_may_begin_the_next_epoch() -> None:
    class Late(IterableDataset[int]):
        tries = 0

        def __iter__(self) -> Iterator[int]:
            self.tries += 1
            if self.tries == 1:
                raise OSError("not yet")
            return iter(range(3))

    loader = hr.DataLoader(Late(), None, num_workers=1, persistent_workers=True)
    with pytest.raises(OSError, match="not yet"):
        list(loader)
    assert list(loader) == [0, 1, 2]
