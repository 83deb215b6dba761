"""Data sets with `__getitem__` and `__getitems__`: when they are asked, for what, and the order of batches.

`tests/full/programs/samplers.py` has what is as with torch's loader.
"""

import collections
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from drop_in.acting import Acting, Made, next_error, raising
from drop_in.stateful_data import Numbers
from full.programs.watching import described
from process.waiting import wait_until
from torch.utils.data import Dataset

import headrace as hr


class Counted:
    """A sampler that counts what was drawn from it, in the process that iterates."""

    def __init__(self, count: int) -> None:
        self.count, self.drawn = count, 0

    def __iter__(self) -> Iterator[int]:
        for value in range(self.count):
            self.drawn += 1
            yield value


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


def test_nothing_happens_before_next_when_there_are_no_workers(loader_class: Any) -> None:
    asked: list[int] = []
    sampler = Counted(6)
    iterator = iter(loader_class(Acting(asked.append, at=tuple(range(6))), 2, sampler=sampler))
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
    sampler = Counted(40)
    iterator = iter(loader_class(Numbers(40), 2, sampler=sampler, num_workers=2, prefetch_factor=3))
    for received in range(5):
        assert sampler.drawn == 2 * (2 * 3 + received), "primed at iter(), one more at each next()"
        next(iterator)


def test_one_more_batch_is_asked_for_before_an_error_is_raised(loader_class: Any) -> None:
    sampler = Counted(9)
    failing = Made(lambda k: {}[k], 9)
    iterator = iter(loader_class(failing, None, sampler=sampler, num_workers=1, prefetch_factor=2))
    for received in range(1, 4):
        assert f"KeyError: {received - 1}" in str(next_error(iterator))
        assert sampler.drawn == 2 + received


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


@pytest.mark.slow
def test_next_raises_when_a_batch_takes_longer_than_the_timeout(loader_class: Any, tmp_path: Path) -> None:
    data = Gate(tmp_path, 2)
    iterator = iter(loader_class(data, None, num_workers=1, timeout=0.25))
    error = next_error(iterator)
    assert isinstance(error, RuntimeError)
    assert str(error) == "DataLoader timed out after 0.25 seconds"
    data.open()


class Columns(Mapping[str, Any]):
    """Columns with a number of rows, as a TensorDict has: its length is not that of its keys."""

    def __init__(self, columns: dict[str, Any], rows: int) -> None:
        self.columns, self.rows = columns, rows

    def __getitem__(self, name: str) -> Any:
        return self.columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def __len__(self) -> int:
        return self.rows


# What whole batches may be, of three samples; only a list can be divided.
FORMS: dict[str, Callable[..., Any]] = {
    "dict": lambda: {"x": torch.arange(3)},
    "dict of as many columns as keys": lambda: {key: key for key in range(3)},
    "mapping": lambda: Columns({"x": torch.arange(3)}, 3),
    "tensor": lambda: torch.zeros(3, 3000),
    "array": lambda: np.arange(3),
    "array of records": lambda: np.zeros(3, dtype=[("a", "i4"), ("b", "f4")]),
    "tuple": lambda: (torch.arange(3), torch.arange(3)),
    "named tuple": lambda: Two(np.arange(3), ["a", "b", "c"]),
    "list": lambda count=3: [torch.ones(3000)] * count,
    "kind of list": lambda: Rows(range(3)),
    "deque": lambda: collections.deque(range(3)),
    "range": lambda: range(3),
    "string": lambda: "abc",
    "bytes": lambda: bytes(3),
    "generator": lambda: (key for key in range(3)),
    "number": lambda: 3,
    "None": lambda: None,
}


class Rows(list[Any]):
    source = "a table"


class Two(NamedTuple):
    first: Any
    second: Any


class Many(Made):
    def __getitems__(self, keys: list[Any]) -> Any:
        return self.make(keys)  # type: ignore[arg-type]


def test_economic_mode_refuses_batches_that_cannot_be_divided_among_workers(our_class: Any) -> None:
    def make_many(keys: Any) -> Any:
        return FORMS["list"](len(keys)) if keys[0] == "list" else FORMS[keys[0]]()

    data = Many(make_many)
    keys = [[form] * 3 for form in FORMS]
    with our_class(data, batch_sampler=keys, num_workers=2, economic=True, collate_fn=described) as loader:
        iterator = iter(loader)
        for form, make in FORMS.items():
            if form == "list":
                assert next(iterator) == described(make())
                continue
            error = next_error(iterator)
            assert isinstance(error, TypeError)
            assert f"__getitems__ gave a {type(make()).__qualname__}: " in str(error)
            assert "economic=False" in str(error)


def test_getitems_that_raises_stop_iteration_is_an_error(our_class: Any) -> None:
    error = next_error(iter(our_class(Many(raising(StopIteration)), 4, num_workers=1)))
    assert isinstance(error, RuntimeError)
    assert "__getitems__([0, 1, 2, 3]) raised StopIteration" in str(error)


def test_tensor_indices_arrive_as_they_are() -> None:
    # Of ours alone: torch starts a thread that shares tensors, for the life of the process.
    keys = [torch.tensor(3), torch.arange(2), torch.zeros(0)]
    loader = hr.DataLoader(Made(repr), batch_size=None, sampler=keys, num_workers=2)
    assert list(loader) == [repr(key) for key in keys]


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
def test_early_end_works_with_long_index_lists(loader_class: type[Any], numbers_in_a_sample: int, taken: int) -> None:
    batches = [list(range(20_000 * k, 20_000 * (k + 1))) for k in range(24)]
    data = Wide(numbers_in_a_sample)
    iterator = iter(loader_class(data, batch_sampler=batches, num_workers=2, collate_fn=whole, prefetch_factor=16))
    for number in range(taken):
        assert next(iterator) == [sum(batches[number])] * numbers_in_a_sample
    del iterator
