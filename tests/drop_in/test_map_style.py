"""Data sets with `__getitem__`: what each parameter does, in the process and with workers."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from drop_in.reading import next_error
from drop_in.stateful_data import Numbers
from process.waiting import wait_until


class Counted:
    """A sampler, or a batch sampler, that counts what was drawn from it, in the process that iterates."""

    def __init__(self, values: Iterable[Any]) -> None:
        self.values, self.drawn = list(values), 0

    def __iter__(self) -> Iterator[Any]:
        for value in self.values:
            self.drawn += 1
            yield value


class Failing(Numbers):
    def __getitem__(self, k: int) -> int:
        raise LookupError(f"no sample {k}")


class Gate(Numbers):
    """The sample 0 waits until the gate is opened; every sample that was made is a line in the log."""

    def __init__(self, folder: Path, count: int) -> None:
        super().__init__(count)
        self.gate, self.log = str(folder / "gate"), str(folder / "log")
        os.mkfifo(self.gate)
        Path(self.log).touch()

    def __getitem__(self, k: int) -> int:
        if k == 0:
            Path(self.gate).read_bytes()
        with Path(self.log).open("a") as log:
            log.write(f"{k}\n")
        return k

    def open(self) -> None:
        """Let the sample 0 pass; waits until somebody is at the gate."""
        Path(self.gate).write_bytes(b"")

    def made(self) -> set[int]:
        return {int(line) for line in Path(self.log).read_text().splitlines()}


# How batches are made


# Lengths


# When things happen


def test_nothing_happens_before_next_when_there_are_no_workers(loader_class: Any) -> None:
    asked = []

    class Recording(Numbers):
        def __getitem__(self, k: int) -> int:
            asked.append(k)
            return k

    sampler = Counted(range(6))
    iterator = iter(loader_class(Recording(6), 2, sampler=sampler))
    assert (sampler.drawn, asked) == (0, [])
    next(iterator)
    assert (sampler.drawn, asked) == (2, [0, 1])
    next(iterator)
    assert (sampler.drawn, asked) == (4, [0, 1, 2, 3])


def test_workers_begin_at_iter_without_a_call_of_next(loader_class: Any, tmp_path: Path) -> None:
    data = Gate(tmp_path, 6)
    iterator = iter(loader_class(data, None, sampler=[1, 2, 3, 4, 5], num_workers=2, prefetch_factor=1))
    wait_until(lambda: data.made() == {1, 2}, "one batch for each worker is made")
    assert next(iterator) == 1


def test_outstanding_batches_are_prefetch_factor_for_each_worker(loader_class: Any) -> None:
    sampler = Counted(range(40))
    loader = loader_class(Numbers(), 2, sampler=sampler, num_workers=2, prefetch_factor=3)
    loader.collate_fn = tuple
    loader.dataset.count = 100
    iterator = iter(loader)
    for received in range(5):
        assert sampler.drawn == 2 * (2 * 3 + received), "primed at iter(), one more at each next()"
        next(iterator)


def test_one_more_batch_is_asked_for_before_an_error_is_raised(loader_class: Any) -> None:
    sampler = Counted(range(9))
    iterator = iter(loader_class(Failing(), None, sampler=sampler, num_workers=1, prefetch_factor=2))
    for received in range(1, 4):
        assert f"no sample {received - 1}" in str(next_error(iterator))
        assert sampler.drawn == 2 + received


# Which worker, and in which order


def test_batches_come_in_the_samplers_order_when_a_later_one_is_ready_first(loader_class: Any, tmp_path: Path) -> None:
    data = Gate(tmp_path, 6)
    iterator = iter(loader_class(data, None, num_workers=2))
    wait_until(lambda: 3 in data.made(), "the other worker is ahead")
    assert 0 not in data.made()
    data.open()
    assert list(iterator) == [0, 1, 2, 3, 4, 5]


def test_batches_come_as_they_are_ready_when_in_order_is_false(loader_class: Any, tmp_path: Path) -> None:
    data = Gate(tmp_path, 12)
    iterator = iter(loader_class(data, None, num_workers=2, prefetch_factor=2, in_order=False))
    others = [next(iterator) for _ in range(10)]
    assert sorted(others) == [1, 3, 4, 5, 6, 7, 8, 9, 10, 11], "only what the stuck worker holds has to wait"
    data.open()
    assert list(iterator) == [0, 2]


# Epochs


# Time-outs


@pytest.mark.slow
def test_next_raises_when_a_batch_takes_longer_than_the_timeout(loader_class: Any, tmp_path: Path) -> None:
    data = Gate(tmp_path, 2)
    iterator = iter(loader_class(data, None, num_workers=1, timeout=0.25))
    error = next_error(iterator)
    assert isinstance(error, RuntimeError)
    assert str(error) == "DataLoader timed out after 0.25 seconds"
    data.open()
