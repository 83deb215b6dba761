"""Random numbers in real workers: those of the sample, whichever worker makes it."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from naming import name_of
from torch.utils.data import Dataset

import headrace as hr

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

TOTAL = 24


class Numbers(hr.AsyncDataset):
    def __init__(self, wrap: Any = int) -> None:
        self.wrap = wrap

    def __len__(self) -> int:
        return TOTAL

    async def aget(self, key: int) -> Any:
        return self.wrap(key)


class Drawing:
    """A sample whose own method draws, which its caller does not show."""

    def __init__(self, number: int) -> None:
        self.number = number

    def draw(self) -> float:
        return random.random()


def from_each(number: int) -> tuple[float, ...]:
    return random.random(), float(np.random.rand()), float(torch.rand(())), float(hr.rng().random())  # noqa: NPY002


def from_random(number: int) -> tuple[float, ...]:
    return random.random(), random.gauss()


def from_numpy(number: int) -> tuple[float, ...]:
    return float(np.random.rand()), float(np.random.randn())  # noqa: NPY002


def from_torch(number: int) -> tuple[float, ...]:
    return float(torch.rand(())), float(torch.randn(()))


def from_rng(number: int) -> tuple[float, ...]:
    return hr.rng().random(), float(hr.rng().normal())


def of_sample(sample: Drawing) -> tuple[float, ...]:
    return (sample.draw(), sample.draw())


def hidden(number: int) -> tuple[float, ...]:
    return (getattr(random, "random")(),)  # noqa: B009


def len_of(number: int) -> int:
    return len(str(number))


def listed(number: int) -> list[int]:
    return [number]


def in_field(number: int) -> dict[str, Any]:
    return {"__key__": str(number), "data": b""}


def data_of(sample: dict[str, Any]) -> tuple[float, ...]:
    return sample["data"]


class Draws(Dataset[tuple[float, ...]]):
    def __len__(self) -> int:
        return TOTAL

    def __getitem__(self, index: int) -> tuple[float, ...]:
        return from_random(index)


class DrawsFromRng(Draws):
    def __getitem__(self, index: int) -> tuple[float, ...]:
        return from_rng(index)


def twice(function: Any, sample: Any) -> tuple[float, ...]:
    return (*function(sample), *function(sample))


def drawn(data: Any, num_workers: int, **options: Any) -> list[tuple[float, ...]]:
    options = {"batch_size": 4, "seed": 5, "num_workers": num_workers, "collate_fn": list, **options}
    with hr.DataLoader(data, **options) as loader:
        return [sample for batch in loader for sample in batch]


FUNCTIONS = [from_each, from_random, from_numpy, from_torch, hidden, functools.partial(twice, from_random)]
# Made when they are used: what a module of functions makes is made in the fork server, too.
DATA: dict[str, Callable[[], Any]] = {
    **{name_of(function): lambda function=function: Numbers().map(function) for function in FUNCTIONS},
    "of the sample": lambda: Numbers(Drawing).map(of_sample),
    "of a decoder, by hr.rng": lambda: Numbers(in_field).decode(data=from_rng).map(data_of),
    "of a decoder": lambda: Numbers(in_field).decode(data=from_each).map(data_of),
    "of a data set of torch": Draws,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DATA)
def test_each_sample_draws_its_own_for_any_number_of_workers(name: str) -> None:
    data = DATA[name]()
    options = {"economic": isinstance(data, Draws)}
    one = drawn(data, 1, **options)
    assert drawn(data, 4, **options) == one
    numbers = [number for sample in one for number in sample]
    assert len(set(numbers)) == len(numbers) > 0


@pytest.mark.slow
def test_what_a_later_step_draws_is_the_samples_own_when_the_first_draws_from_rng_alone() -> None:
    data = Numbers().map(from_rng).map(from_random)
    assert drawn(data, 1) == drawn(data, 4)
    data = Numbers().map(from_rng).map(lambda _: Drawing(0), random=False).map(of_sample)
    assert drawn(data, 1) == drawn(data, 4)


def test_rng_gives_the_same_for_no_workers_one_and_four() -> None:
    data = Numbers().map(from_rng)
    assert drawn(Numbers().map(from_rng, random=False), 4) == drawn(data, 4)
    without = drawn(data, 0)
    assert drawn(data, 1) == drawn(data, 4) == without
    assert len({number for sample in without for number in sample}) == 2 * TOTAL


def states(number: int) -> tuple[Any, ...]:
    return random.getstate()[1], np.random.get_state()[1].tobytes()  # type: ignore[index,union-attr] # noqa: NPY002


@pytest.mark.parametrize(("random", "expected"), [(False, 1), (True, TOTAL)])
def test_global_generators_stay_as_they_are_when_a_step_says_so(random: bool, expected: int) -> None:
    def seen(data: Any) -> int:
        # In one batch: its collate_fn draws after all samples.
        return len(set(drawn(data.map(states, random=False), 1, batch_size=TOTAL)))

    assert seen(Numbers().map(len_of, random=random)) == expected
    assert seen(Numbers().filter(len_of, random=random)) == expected
    assert seen(Numbers().flat_map(listed, random=random)) == expected


def test_rng_gives_the_same_in_threads_and_processes() -> None:
    expected = drawn(DrawsFromRng(), 1, economic=True)
    for count in (1, 4):
        assert drawn(DrawsFromRng(), count, economic=True, workers="thread") == expected
    assert drawn(DrawsFromRng(), 4, economic=True) == expected
