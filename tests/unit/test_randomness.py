"""The random numbers of samples: their own, as good as any, and of no other sample of the epoch."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import headrace as hr
from headrace._util.context import RunningSample, running_sample
from headrace.workers.randomness import begin_sample, seed_global_generators, seed_of

KEY = 0x5EED_0123_4567_89AB
MANY = 100_000
FIRST: dict[str, Callable[[], float]] = {
    "random": random.random,
    "numpy": np.random.rand,
    "torch": lambda: torch.rand((), dtype=torch.float64).item(),
    "rng": lambda: hr.rng().random(),
}


@pytest.fixture(autouse=True)
def global_generators_as_they_were() -> Any:
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])  # noqa: NPY002
    torch.set_rng_state(before[2])


def begin(key: int, position: int) -> None:
    begin_sample(key, position)
    seed_global_generators(key, position)


def first_draws(name: str, key: int, positions: range) -> NDArray[np.float64]:
    drawn = np.empty(len(positions))
    for k, position in enumerate(positions):
        begin(key, position)
        drawn[k] = FIRST[name]()
    return drawn


def correlation(one: NDArray[Any], other: NDArray[Any]) -> float:
    return float(np.corrcoef(one, other)[0, 1])


@pytest.mark.slow
@pytest.mark.parametrize("name", FIRST)
def test_first_numbers_of_samples_in_a_row_look_drawn_from_one_generator(name: str) -> None:
    drawn = first_draws(name, KEY, range(MANY))
    assert len(np.unique(drawn)) == MANY
    buckets = np.histogram(drawn, 256, (0, 1))[0]
    chi2 = float(((buckets - MANY / 256) ** 2 / (MANY / 256)).sum())
    assert 160 < chi2 < 370  # 255 degrees of freedom: four deviations of 22.6 to each side, and some more
    for lag in (1, 2, 64, 256):
        assert abs(correlation(drawn[lag:], drawn[:-lag])) < 5 / MANY**0.5


@pytest.mark.parametrize("name", FIRST)
def test_epochs_that_follow_each_other_draw_unlike_numbers(name: str) -> None:
    one, other = (first_draws(name, key, range(10_000)) for key in (6, 7))
    assert not np.isin(one, other).any()
    assert abs(correlation(one, other)) < 0.05


@pytest.mark.slow
def test_no_two_positions_of_an_epoch_have_one_seed() -> None:
    for key in (0, 1, KEY):
        assert len({seed_of(key, position) for position in range(300_000)}) == 300_000


def test_seeds_change_with_all_bits_of_key_and_position() -> None:
    seeds = {seed_of(KEY ^ bit, 5) for bit in (1 << k for k in range(64))}
    seeds |= {seed_of(KEY, 5 ^ bit) for bit in (1 << k for k in range(64))}
    assert len(seeds | {seed_of(KEY, 5)}) == 129


def test_half_of_a_seeds_bits_change_with_each_bit_of_the_position() -> None:
    seeds = [seed_of(KEY, position) for position in range(2_000)]
    for bit in range(32):
        others = [seed_of(KEY, position ^ 1 << bit) for position in range(2_000)]
        changed = [sum((a ^ b) >> k & 1 for a, b in zip(seeds, others, strict=True)) / 2_000 for k in range(32)]
        assert 0.4 < min(changed) < max(changed) < 0.6


def test_generators_of_one_sample_draw_unlike_numbers() -> None:
    drawn = np.empty((4_000, 3))
    for position in range(len(drawn)):
        begin(KEY, position)
        drawn[position] = random.getrandbits(8), np.random.randint(256), torch.randint(256, ()).item()  # noqa: NPY002
    assert np.abs(np.corrcoef(drawn.T) - np.eye(3)).max() < 5 / len(drawn) ** 0.5


def test_a_sample_draws_the_same_again() -> None:
    def draws() -> list[float]:
        begin(KEY, 3)
        return [draw() for draw in FIRST.values()] + [random.gauss(), float(np.random.randn()), torch.randn(()).item()]  # noqa: NPY002

    first = draws()
    begin(KEY, 4)
    random.gauss(), np.random.randn(), torch.randn(())  # noqa: NPY002 (each keeps a second number back)
    assert draws() == first


def test_global_generators_are_left_alone_when_rng_alone_is_set() -> None:
    def states() -> list[bytes]:
        numpys: Any = np.random.get_state()  # noqa: NPY002
        return [repr(random.getstate()).encode(), numpys[1].tobytes(), torch.get_rng_state().numpy().tobytes()]

    before = states()
    begin_sample(KEY, 3)
    hr.rng().random()
    assert states() == before


async def drawn_by_many(limit: int) -> list[tuple[float, ...]]:
    gate = asyncio.Semaphore(limit)

    async def sample(position: int) -> tuple[float, ...]:
        async with gate:
            running_sample.set(RunningSample(KEY, position))
            first = hr.rng().random()
            await asyncio.sleep(0)
            second = hr.rng().random()
            third = await asyncio.create_task(one_more())
            return first, second, third, hr.rng().random()

    async def one_more() -> float:
        return hr.rng().random()

    return list(await asyncio.gather(*map(sample, range(20))))


def test_coroutines_draw_what_a_worker_draws_for_any_number_of_them_at_once() -> None:
    alone, together = asyncio.run(drawn_by_many(1)), asyncio.run(drawn_by_many(20))
    assert alone == together
    assert len({number for numbers in alone for number in numbers}) == 80
    begin_sample(KEY, 7)
    assert alone[7] == tuple(hr.rng().random() for _ in range(4))


def test_a_threads_sample_is_its_own_while_coroutines_run() -> None:
    async def other() -> float:
        running_sample.set(RunningSample(KEY, 1))
        return hr.rng().random()

    begin_sample(KEY, 2)
    expected = [hr.rng().random() for _ in range(3)]
    begin_sample(KEY, 2)
    drawn = [hr.rng().random()]
    asyncio.run(other())
    drawn.append(hr.rng().random())
    thread = threading.Thread(target=lambda: asyncio.run(other()))
    thread.start()
    thread.join()
    assert [*drawn, hr.rng().random()] == expected
