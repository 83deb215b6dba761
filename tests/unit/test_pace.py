"""Number of samples of a task: few at first, then as many as are worth a task, and at most a batch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.scheduler.dispatch import Pace
from headrace.engine.scheduler.epoch_spec import BatchSpec, GroupStage, Learned
from headrace.ops.batch import EvenBatcher


def sizes(pace: Pace, count: int) -> list[int]:
    got = []
    for _ in range(count):
        got.append(pace.size)
        pace.begin()
    return got


def test_tasks_grow_from_one_sample_to_the_limit() -> None:
    assert sizes(Pace(64), 10) == [1, 1, 2, 4, 8, 16, 32, 64, 64, 64]
    assert sizes(Pace(5), 6) == [1, 1, 2, 4, 5, 5]


@pytest.mark.parametrize(("learned", "most", "most_awaited"), [
    ([(64, 64 * 0.05, 100)], [1], [1]),  # they take long
    ([(1, 1e-6, 4 * 2**20)], [1], [1]),  # they are many bytes
    ([(10, 10 * 2e-3, 10)], [10], [2]),
    ([(4, 1e-9, 4 * 2**15)], [32], [8]),
    ([(1, 1e-3, 10)], [20], [5]),
    ([(1, 4e-3, 10), (1, 0.0, 10), (1, 20e-3, 10)], [5, 10, 1], [1, 2, 1]),  # more counts at once, less gradually
])  # fmt: skip
def test_size_of_a_task_follows_time_and_bytes_of_samples(
    learned: list[tuple[int, float, int]], most: list[int], most_awaited: list[int]
) -> None:
    for is_awaited, expected in ((False, most), (True, most_awaited)):
        pace = Pace(64, is_awaited=is_awaited)
        sizes(pace, 10)
        for one, size in zip(learned, expected, strict=True):
            pace.learn(*one)
            assert pace.size == size


def spec(workers: int, depth: int, *, is_adaptive: bool) -> BatchSpec:
    return BatchSpec(chain=1, batch_size=8, workers=workers, is_adaptive=is_adaptive, depth=depth)


@given(
    workers=st.integers(1, 64),
    depth=st.integers(0, 64),
    batch_size=st.integers(1, 5000),
    sample_s=st.floats(1e-9, 10.0),
    is_adaptive=st.booleans(),
)
def test_a_task_has_samples_of_one_batch(
    workers: int, depth: int, batch_size: int, sample_s: float, is_adaptive: bool
) -> None:
    batches, learned = spec(workers, depth, is_adaptive=is_adaptive), Learned(use_slots=True)
    before = batches.chunk(batch_size, learned.sample_s)
    learned.learn_time(sample_s, 1)
    after = batches.chunk(batch_size, learned.sample_s)
    assert 1 <= before <= batch_size
    assert 1 <= after <= batch_size
    assert is_adaptive or after == before


def test_heavy_samples_are_divided_among_the_workers() -> None:
    learned = Learned(use_slots=True)
    learned.learn_time(0.5, 100)
    assert spec(2, 8, is_adaptive=True).chunk(512, learned.sample_s) == 128


def test_slow_samples_of_groups_are_made_in_small_tasks() -> None:
    groups = BatchSpec(
        chain=1,
        batch_size=1,
        workers=1,
        inner=(GroupStage(2, lambda: EvenBatcher(4, drop_last=False), "batch(4)"),),
        look_ahead=64,
        is_adaptive=True,
        depth=8,
    )
    assert groups.gathered(1) == groups.together_before == 64
    for sample_s, most in ((0.5, 1), (0.01, 2), (1e-3, 20), (1e-5, 64)):
        pace = Pace(groups.together_before)
        assert pace.size == 1  # not known until the first ones are made
        for _ in range(10):
            pace.begin()
            pace.learn(1, sample_s, 100)
        assert pace.size == min(most, max(1, int(20e-3 / sample_s)))
