"""Random numbers in real workers: those of the sample, whichever worker makes it."""

import asyncio
import functools
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
import torch
from builders.numbers import Iterated, Made, Numbers
from drop_in import acting
from naming import name_of

import headrace as hr

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

TOTAL = 40


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


def in_field(number: int) -> dict[str, Any]:
    return {"__key__": str(number), "data": b""}


def data_of(sample: dict[str, Any]) -> tuple[float, ...]:
    return sample["data"]


def twice(function: Any, sample: Any) -> tuple[float, ...]:
    return (*function(sample), *function(sample))


def drawn(data: Any, num_workers: int, epochs: int = 1, **options: Any) -> list[tuple[float, ...]]:
    options = {"batch_size": 4, "seed": 5, "num_workers": num_workers, "collate_fn": list, **options}
    with hr.DataLoader(data, **options) as loader:
        return [sample for _ in range(epochs) for batch in loader for sample in batch]


FUNCTIONS = [from_each, from_random, from_numpy, from_torch, hidden, functools.partial(twice, from_random)]
# Made when they are used: what a module of functions makes is made in the fork server, too.
DATA: dict[str, Callable[[], Any]] = {
    **{name_of(function): lambda function=function: Numbers(TOTAL).map(function) for function in FUNCTIONS},
    "of the sample": lambda: Made(Drawing, TOTAL).map(of_sample),
    "after a step that draws from hr.rng alone": lambda: Numbers(TOTAL).map(from_rng).map(from_random),
    "of the sample, after one": lambda: Numbers(TOTAL).map(from_rng).map(Drawing, random=False).map(of_sample),
    "of a decoder, by hr.rng": lambda: Made(in_field, TOTAL).decode(data=from_rng).map(data_of),
    "of a decoder": lambda: Made(in_field, TOTAL).decode(data=from_each).map(data_of),
    "of a data set of torch": lambda: acting.Made(from_random, TOTAL),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DATA)
def test_each_sample_draws_its_own_for_any_number_of_workers(name: str) -> None:
    data = DATA[name]()
    options = {"economic": isinstance(data, acting.Made)}
    one = drawn(data, 1, **options)
    assert drawn(data, 4, **options) == one
    numbers = [number for sample in one for number in sample]
    assert len(set(numbers)) == len(numbers) > 0


def test_rng_gives_the_same_for_no_workers_one_and_four() -> None:
    data = Numbers(TOTAL).map(from_rng)
    assert drawn(Numbers(TOTAL).map(from_rng, random=False), 4) == drawn(data, 4)
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

    assert seen(Numbers(TOTAL).map(len_of, random=random)) == expected
    assert seen(Numbers(TOTAL).filter(len_of, random=random)) == expected
    assert seen(Numbers(TOTAL).flat_map(lambda number: [number], random=random)) == expected


def test_rng_gives_the_same_in_threads_and_processes() -> None:
    data = acting.Made(from_rng, TOTAL)
    expected = drawn(data, 1, economic=True)
    for count in (1, 4):
        assert drawn(data, count, economic=True, workers="thread") == expected
    assert drawn(data, 4, economic=True) == expected


# Coroutines: the sample's own numbers, however many run at once.


async def stir() -> None:
    for _ in range(int(np.random.default_rng().integers(4))):
        await asyncio.sleep(0)


async def draw_twice(_: int = 0) -> tuple[float, ...]:
    first = hr.rng().random()
    await stir()
    return first, hr.rng().random()


async def one_by_one() -> AsyncIterator[tuple[float, ...]]:
    for _ in range(TOTAL):
        yield await draw_twice()


async def more(sample: tuple[float, ...]) -> tuple[float, ...]:
    await stir()
    return (*sample, *await draw_twice())


def in_worker(sample: tuple[float, ...]) -> tuple[float, ...]:
    return (*sample, hr.rng().random())


def by_key() -> Any:
    return Made(draw_twice, TOTAL)


# Data, and how many numbers each sample draws.
COROUTINES: dict[str, tuple[Callable[[], Any], int]] = {
    "by key": (by_key, 2),
    "in turn": (lambda: Iterated(one_by_one), 2),
    "in threads": (lambda: hr.from_map(acting.Made(from_rng, TOTAL)), 2),
    "by key, and a step": (lambda: by_key().map(more), 4),
    "in turn, and a step": (lambda: Iterated(one_by_one).map(more), 4),
    "after a worker's step": (lambda: by_key().map(in_worker).map(more), 5),
    "between two of them": (lambda: by_key().map(in_worker).map(more).map(in_worker), 6),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COROUTINES)
def test_coroutines_draw_the_samples_numbers_for_any_concurrency_and_number_of_workers(name: str) -> None:
    make, count = COROUTINES[name]
    expected = drawn(make(), 0, epochs=2)
    assert len({number for sample in expected for number in sample}) == 2 * TOTAL * count
    assert drawn(make(), 0, epochs=2, fetch=hr.Fetch(concurrency=1)) == expected
    assert drawn(make(), 0, epochs=2, fetch=hr.Fetch(concurrency=64), batch_size=16) == expected
    assert drawn(make(), 1, epochs=2) == expected


def test_an_iterator_on_the_callers_loop_draws_the_samples_numbers() -> None:
    async def all_of() -> list[Any]:
        data = Iterated(one_by_one, loop="caller")
        async with hr.DataLoader(data, batch_size=4, seed=5, collate_fn=list) as loader:
            return [sample async for batch in loader for sample in batch]

    assert asyncio.run(all_of()) == drawn(Iterated(one_by_one), 0)
