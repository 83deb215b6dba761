"""How many samples go into one task: few at first, then as many as are worth one."""

from __future__ import annotations

import pytest

from headrace.engine.scheduler.chunk_sizer import Pace


def sizes(pace: Pace, count: int) -> list[int]:
    got = []
    for _ in range(count):
        got.append(pace.size)
        pace.begin()
    return got


def test_tasks_grow_from_one_sample_to_as_many_as_may_be() -> None:
    assert sizes(Pace(64), 10) == [1, 1, 2, 4, 8, 16, 32, 64, 64, 64]
    assert sizes(Pace(5), 6) == [1, 1, 2, 4, 5, 5]


def grown(*, is_awaited: bool = False) -> Pace:
    pace = Pace(64, is_awaited=is_awaited)
    sizes(pace, 10)
    return pace


@pytest.mark.parametrize(("samples", "seconds", "nbytes"), [(64, 64 * 0.05, 100), (1, 1e-6, 4 * 2**20)])
def test_samples_that_take_long_or_are_many_bytes_are_made_alone(samples: int, seconds: float, nbytes: int) -> None:
    pace = grown()
    pace.learn(samples, seconds, nbytes)
    assert pace.size == 1


def test_task_has_as_many_samples_as_are_worth_its_time_and_its_bytes() -> None:
    pace = grown()
    pace.learn(10, 10 * 2e-3, 10)
    assert pace.size == 10
    for is_awaited, most in ((False, 32), (True, 8)):
        pace = grown(is_awaited=is_awaited)
        pace.learn(4, 1e-9, 4 * 2**15)
        assert pace.size == most


def test_what_is_more_counts_at_once_and_what_is_less_by_and_by() -> None:
    pace = grown()
    pace.learn(1, 4e-3, 10)
    assert pace.size == 5
    pace.learn(1, 0.0, 10)
    assert pace.size == 10
    pace.learn(1, 20e-3, 10)
    assert pace.size == 1


def test_task_whose_first_sample_is_waited_for_is_a_quarter_of_others() -> None:
    sizes_of = []
    for is_awaited in (False, True):
        pace = Pace(64, is_awaited=is_awaited)
        sizes(pace, 10)
        pace.learn(1, 1e-3, 10)
        sizes_of.append(pace.size)
    assert sizes_of == [20, 5]
