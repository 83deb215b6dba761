"""The random numbers of samples are their own and independent; the numbers of their keys are stable and distinct."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import headrace as hr
from headrace._util.context import RunningSample, running_sample
from headrace.workers.randomness import begin_sample, key_number, seed_global_generators, seed_of

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
def test_epochs_that_follow_each_other_draw_uncorrelated_numbers(name: str) -> None:
    one, other = (first_draws(name, key, range(10_000)) for key in (6, 7))
    assert not np.isin(one, other).any()
    assert abs(correlation(one, other)) < 0.05


def test_seeds_change_with_all_bits_of_key_and_position() -> None:
    bits = [1 << k for k in range(64)]
    assert len({seed_of(KEY, 5), *(seed_of(KEY ^ b, 5) for b in bits), *(seed_of(KEY, 5 ^ b) for b in bits)}) == 129


def test_half_of_a_seeds_bits_change_with_each_bit_of_the_position() -> None:
    seeds = [seed_of(KEY, position) for position in range(2_000)]
    for bit in range(32):
        others = [seed_of(KEY, position ^ 1 << bit) for position in range(2_000)]
        changed = [sum((a ^ b) >> k & 1 for a, b in zip(seeds, others, strict=True)) / 2_000 for k in range(32)]
        assert 0.4 < min(changed) < max(changed) < 0.6


def test_generators_of_one_sample_draw_different_numbers() -> None:
    drawn = np.empty((4_000, 3))
    for position in range(len(drawn)):
        begin(KEY, position)
        drawn[position] = random.getrandbits(8), np.random.randint(256), torch.randint(256, ()).item()  # noqa: NPY002
    assert np.abs(np.corrcoef(drawn.T) - np.eye(3)).max() < 5 / len(drawn) ** 0.5


def test_a_repeated_sample_draws_the_same_numbers() -> None:
    def draws() -> list[float]:
        begin(KEY, 3)
        return [draw() for draw in FIRST.values()] + [random.gauss(), float(np.random.randn()), torch.randn(()).item()]  # noqa: NPY002

    first = draws()
    begin(KEY, 4)
    random.gauss(), np.random.randn(), torch.randn(())  # noqa: NPY002 (each keeps a second number back)
    assert draws() == first


def test_coroutines_do_not_change_a_threads_sample() -> None:
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


# Numbers of sample keys

PLAIN = (
    *(st.integers(), st.booleans(), st.text(max_size=8), st.binary(max_size=8), st.none()),
    *(st.floats(allow_nan=False), st.integers(-3, 3).map(float)),
)
KEYS = st.recursive(
    st.one_of(PLAIN),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=6,
)


@given(KEYS, KEYS)
def test_keys_have_one_number_when_they_are_equal_and_two_when_not(one: Any, other: Any) -> None:
    assert 0 <= key_number(one) < 2**64
    assert (key_number(one) == key_number(other)) == (one == other)


@given(st.integers(-(2**63), 2**63 - 1))
def test_number_keys_are_equal_in_any_library(number: int) -> None:
    assert key_number(number % 2**64) == number % 2**64
    for kind in (np.int64, np.array, torch.tensor):
        assert key_number(kind(number)) == key_number(number)
        assert key_number((kind(number), "a")) == key_number((number, "a"))


@pytest.mark.parametrize(("one", "other", "is_same"), [
    (np.float64(1.5), 1.5, True),
    (np.float32(1.5), 1.5, True),
    (np.bool_(True), True, True),
    (np.str_("a"), "a", True),
    (-0.0, 0, True),
    (float("nan"), np.float32("nan"), True),
    ("a", b"a", False),
    ((), None, False),
    (("a", "b"), ("ab",), False),
    ((1, (2, 3)), ((1, 2), 3), False),
    ((), frozenset(), False),
    ("1", 1, False),
])  # fmt: skip
def test_keys_that_are_equal_in_python_or_numpy_have_one_number(one: Any, other: Any, is_same: bool) -> None:
    assert (key_number(one) == key_number(other)) is is_same


SAMPLE = '["a", -1, 2**70, (1, "ä", None), b"c", 0.1, frozenset({"x", "y", "z"}), range(3), [1, 2], {"k": 1}]'


@pytest.mark.process
def test_numbers_are_the_same_in_every_process_and_release() -> None:
    code = f"from headrace.workers.randomness import key_number; print([key_number(k) for k in {SAMPLE}])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "PYTHONHASHSEED": "12345"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == str([key_number(key) for key in eval(SAMPLE)])
    assert key_number("a") == 1410542633125930404
    assert key_number(-1) == 12061929287756718838
    assert key_number((1, "b")) == 10462782514508699542
