"""What is to come after the states of all ranks: exactly what no rank has received, in time for the differences."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.order import Cursor, Steps
from headrace.order.cursor import compressed, difference, expanded, united
from headrace.state.state import State, merged

BILLION = 10**9


def steps_of(part: State) -> Steps:
    return Steps(part.cursor, part.end, part.step, part.tail, part.rank or 0, part.world, part.lanes)


def peak_of_merging(parts: list[State]) -> tuple[Cursor, int]:
    tracemalloc.start()
    try:
        cursor = merged(parts)
        return cursor, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@st.composite
def states(draw: st.DrawFn) -> list[State]:
    position = draw(st.integers(0, 40))
    holes = sorted(draw(st.sets(st.integers(-10, position - 1), max_size=12)))
    cursor = Cursor(position, compressed(np.array(holes, np.int64)))
    world = draw(st.integers(1, 5))
    step = draw(st.integers(world, 12))
    tail = draw(st.sampled_from(["short", "drop", "pad", "carry"]))
    end = position + draw(st.integers(world, 90))
    lanes = draw(st.integers(1, 9))
    parts = []
    for rank in range(world):
        part = State(cursor=cursor, end=end, step=step, tail=tail, rank=rank, world=world, lanes=lanes)
        whole = steps_of(part).whole
        begun = draw(st.integers(0, whole))
        more = draw(st.sets(st.integers(0, whole - 1), max_size=6)) if whole else set()
        parts.append(replace(part, done=united([(0, begun), *((n, n + 1) for n in more)])))
    return parts


@pytest.mark.slow
@settings(max_examples=200)
@given(parts=states())
def test_merged_states_leave_what_no_rank_has_received(parts: list[State]) -> None:
    received = set()
    for part in parts:
        for start, stop in part.done:
            received.update(steps_of(part).positions(start, stop).tolist())
    cursor, end = parts[0].cursor, parts[0].end
    planned = [*expanded(cursor.holes).tolist(), *range(cursor.position, end)]
    left = merged(parts)
    assert [*expanded(left.holes).tolist(), *range(left.position, end)] == [p for p in planned if p not in received]
    assert left.position <= end


def test_a_billion_received_samples_are_merged_without_a_list_of_them() -> None:
    world, step, lanes = 4, 4096, 256
    mine = BILLION // world
    done = ((0, mine - 100), (mine - 50, mine))
    parts = [
        State(cursor=Cursor.at(), done=done, end=10 * BILLION, step=step, lanes=lanes, rank=rank, world=world)
        for rank in range(world)
    ]
    cursor, peak = peak_of_merging(parts)
    assert peak < 2e6
    assert cursor.position <= BILLION + 2 * step
    left = cursor.hole_count + 10 * BILLION - cursor.position
    assert left == 9 * BILLION + 50 * world


def test_merging_begins_where_it_differs_when_an_epoch_has_holes() -> None:
    cursor = Cursor(1000, np.array([[-5, -1], [10, 400]]))
    parts = [
        State(cursor=cursor, done=((0, 5000 + rank),), end=10**6, step=64, rank=rank, world=2) for rank in range(2)
    ]
    left = merged(parts)
    received = np.concatenate(
        [steps_of(part).positions(0, 5000 + part.rank) for part in parts if part.rank is not None]
    )
    planned = np.concatenate([expanded(cursor.holes), np.arange(1000, 20_000)])
    coming = np.setdiff1d(planned, received)
    assert np.array_equal(left.coming(0, len(coming)), coming)


def test_one_rank_of_several_says_nothing_of_the_others() -> None:
    part = State(cursor=Cursor.at(), done=((0, 8),), end=40, step=8, rank=1, world=2)
    assert merged([part]).coming(0, 12).tolist() == [0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19][:12]


@pytest.mark.parametrize("first", [0, 10**12])
def test_a_stretch_far_ahead_is_left_out_without_a_list_of_what_lies_before(first: int) -> None:
    tracemalloc.start()
    try:
        left = Cursor.at().without(np.arange(first + 5, first + 10))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1e6
    assert left.position == first + 10
    assert left.holes.tolist() == [[0, first + 5]]


NUMBERS = st.sets(st.integers(-20, 60), max_size=40).map(lambda found: compressed(np.array(sorted(found), np.int64)))


@given(ranges=NUMBERS, others=NUMBERS)
def test_the_difference_of_ranges_has_the_numbers_of_the_one_alone(ranges: np.ndarray, others: np.ndarray) -> None:
    left = difference(ranges, others)
    assert expanded(left).tolist() == sorted(set(expanded(ranges).tolist()) - set(expanded(others).tolist()))
    assert (left[1:, 0] > left[:-1, 1]).all()


def test_ranges_that_touch_are_one_in_their_difference() -> None:
    assert difference(np.array([[0, 3], [3, 9]]), np.zeros((0, 2), np.int64)).tolist() == [[0, 9]]
