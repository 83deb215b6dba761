"""Data sets with `__iter__`: one copy in each worker, batches made of what that copy gives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from drop_in.classes import caught
from drop_in.reading import next_error
from torch.utils.data import IterableDataset, get_worker_info

import headrace as hr

both = pytest.mark.parametrize("num_workers", [0, 2])


class Counting(IterableDataset[int]):
    """Counts up, the same in each worker: who shares the work among workers is the data set itself."""

    def __init__(self, count: int = 5) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


class Sized(Counting):
    def __len__(self) -> int:
        return self.count


class Shared(Counting):
    """Each worker gives the numbers that it has to, by its id."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(range(info.id, self.count, info.num_workers) if info else range(self.count))


class Uneven(IterableDataset[str]):
    """Worker 0 has one sample, worker 1 has four."""

    def __iter__(self) -> Iterator[str]:
        worker = get_worker_info().id
        return iter([f"{worker}.{k}" for k in range(4 if worker else 1)])


class Failing(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        raise LookupError("nothing to iterate")


class Logging(IterableDataset[int]):
    """Writes a line, with the worker's id, whenever it is iterated."""

    def __init__(self, log: Path) -> None:
        self.log = str(log)

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        with Path(self.log).open("a") as log:
            log.write(f"{info.id if info else 'trainer'}\n")
        yield from (1, 2, 3)


def plain(loader: Any) -> list[Any]:
    return [batch.tolist() for batch in loader]


# Who reads what


def test_samples_come_once_without_workers(loader_class: Any) -> None:
    assert plain(loader_class(Counting(5), 2)) == [[0, 1], [2, 3], [4]]
    assert plain(loader_class(Counting(5), 2, drop_last=True)) == [[0, 1], [2, 3]]


def test_every_worker_gives_all_samples_of_its_copy(loader_class: Any) -> None:
    assert plain(loader_class(Counting(3), 2, num_workers=2)) == [[0, 1], [0, 1], [2], [2]]


def test_nothing_is_lost_when_batches_come_as_they_are_ready(loader_class: Any) -> None:
    loader = loader_class(Shared(10), None, num_workers=2, in_order=False)
    assert sorted(loader) == list(range(10))


@both
def test_collate_fn_gets_lists_of_samples(loader_class: Any, num_workers: int) -> None:
    loader = loader_class(Shared(5), 3, num_workers=num_workers, collate_fn=lambda batch: (type(batch), len(batch)))
    assert list(loader) == [(list, 3), (list, 2)]


@both
def test_generators_are_iterators_as_well(loader_class: Any, num_workers: int) -> None:
    class Generating(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            yield from range(get_worker_info().id if get_worker_info() else 0, 4, max(1, num_workers))

    assert list(loader_class(Generating(), None, num_workers=num_workers)) == [0, 1, 2, 3]


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


def test_errors_of_iter_come_at_iter_without_workers(loader_class: Any) -> None:
    with pytest.raises(LookupError, match=r"^nothing to iterate$"):
        iter(loader_class(Failing()))


def test_errors_of_iter_come_at_the_first_next_with_workers(loader_class: Any) -> None:
    iterator = iter(loader_class(Failing(), num_workers=1))
    error = next_error(iterator)
    assert type(error) is LookupError
    assert str(error).startswith(caught(loader_class, "LookupError", 0))


def test_data_set_is_iterated_once_for_each_epoch_without_workers(loader_class: Any, tmp_path: Path) -> None:
    loader = loader_class(Logging(tmp_path / "log"), None)
    for epoch in (1, 2):
        assert list(loader) == [1, 2, 3]
        assert (tmp_path / "log").read_text().split() == ["trainer"] * epoch


def test_half_used_epoch_is_gone_when_persistent_workers_begin_the_next(loader_class: Any) -> None:
    loader = loader_class(Shared(20), None, num_workers=2, persistent_workers=True)
    first = iter(loader)
    assert [next(first) for _ in range(3)] == [0, 1, 2]
    again = iter(loader)
    assert again is first
    assert list(again) == list(range(20))


def test_workers_that_had_no_more_are_back_in_the_next_epoch_when_persistent(loader_class: Any) -> None:
    loader = loader_class(Uneven(), None, num_workers=2, persistent_workers=True)
    for _ in range(3):
        assert list(loader) == ["0.0", "1.0", "1.1", "1.2", "1.3"]


# Lengths


@pytest.mark.parametrize(
    ("batch_size", "drop_last", "length"), [(None, False, 7), (1, False, 7), (3, False, 3), (3, True, 2), (8, True, 0)]
)
def test_length_is_the_data_sets_in_batches(
    loader_class: Any, batch_size: int | None, drop_last: bool, length: int
) -> None:
    data = Sized(7)
    loader = loader_class(data, batch_size, drop_last=drop_last, num_workers=2)
    assert len(loader) == length
    data.count = 0
    assert len(loader) == 0, "it follows the data set's"


def test_length_is_a_type_error_when_the_data_set_has_none(loader_class: Any) -> None:
    with pytest.raises(TypeError):
        len(loader_class(Counting()))


@both
def test_length_of_an_iterator_is_a_type_error(loader_class: Any, num_workers: int) -> None:
    iterator = iter(loader_class(Sized(), num_workers=num_workers))
    with pytest.raises(TypeError):
        len(iterator)


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
