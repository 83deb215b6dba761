"""How many samples a task has: never more than its batch, and a fixed number where their time is not known."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.scheduler.recipe import Recipe


def recipe(workers: int, depth: int, *, is_adaptive: bool) -> Recipe:
    return Recipe(
        inner=(), chain=1, batch_size=8, workers=workers, drop_last=False, keeps_count=True, look_ahead=0,
        in_order=True, use_slots=True, is_adaptive=is_adaptive, depth=depth,
    )  # fmt: skip


@given(
    workers=st.integers(1, 64),
    depth=st.integers(0, 64),
    batch_size=st.integers(1, 5000),
    sample_s=st.floats(1e-9, 10.0),
    is_adaptive=st.booleans(),
)
def test_a_task_has_some_samples_of_one_batch(
    workers: int, depth: int, batch_size: int, sample_s: float, is_adaptive: bool
) -> None:
    made = recipe(workers, depth, is_adaptive=is_adaptive)
    before = made.chunk(batch_size)
    made.learn_time(sample_s, 1)
    assert 1 <= before <= batch_size
    assert 1 <= made.chunk(batch_size) <= batch_size
    assert is_adaptive or made.chunk(batch_size) == before


def test_heavy_samples_are_divided_among_the_workers() -> None:
    made = recipe(2, 8, is_adaptive=True)
    made.learn_time(0.5, 100)
    assert made.chunk(512) == 128
