"""Cursors: the rest of an epoch, also after the states of all ranks, and its ranges in JSON."""

from __future__ import annotations

import base64
import itertools
import json
import tracemalloc
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.order import Cursor, Steps
from headrace.order.cursor import among_left, compressed, difference, expanded, pack_ranges, united, unpack_ranges
from headrace.state.state import State, merged

NUMBERS = st.sets(st.integers(-30, 200), max_size=60).map(sorted)


@st.composite
def cursors(draw: st.DrawFn) -> Cursor:
    position = draw(st.integers(0, 100))
    below = draw(st.sets(st.integers(-20, position - 1), max_size=30))
    return Cursor(position, compressed(np.array(sorted(below), np.int64)))


def coming(cursor: Cursor, count: int = 150) -> list[int]:
    return cursor.coming(0, count).tolist()


@given(numbers=NUMBERS)
def test_ranges_hold_the_numbers_they_are_made_of(numbers: list[int]) -> None:
    ranges = compressed(np.array(numbers, np.int64))
    assert expanded(ranges).tolist() == numbers
    assert (ranges[:, 0] < ranges[:, 1]).all()
    assert (ranges[1:, 0] > ranges[:-1, 1]).all()


@given(numbers=NUMBERS)
def test_packed_ranges_come_back_through_json(numbers: list[int]) -> None:
    ranges = compressed(np.array(numbers, np.int64))
    assert unpack_ranges(json.loads(json.dumps(pack_ranges(ranges)))).tolist() == ranges.tolist()


@pytest.mark.parametrize("first", [-70_000, -5, 0, 10**15])
def test_many_ranges_come_back_and_are_short(first: int) -> None:
    numbers = np.flatnonzero(np.random.default_rng(1).random(100_000) < 0.5) + first
    packed = pack_ranges(compressed(numbers))
    assert isinstance(packed, str)
    assert len(packed) < 20_000
    assert np.array_equal(expanded(unpack_ranges(json.loads(json.dumps(packed)))), numbers)


def test_many_ranges_far_from_one_another_come_back() -> None:
    numbers = np.arange(1000) * 10**9
    packed = pack_ranges(compressed(numbers))
    assert isinstance(packed, list)
    assert np.array_equal(expanded(unpack_ranges(packed)), numbers)


@pytest.mark.parametrize("packed", [
    [1], [0, 0], [0, -1], [0, 2, 0, 1], [0, 2, -1, 1], [0.5, 1], ["0", "1"], [None, 1], [True, True], [2**63, 1],
    [0, 2**63], [2**61, 2**61], "", "5", "x:eJw=", "5:eJw=", "5:?", "5:YWJj", f"{2**63}:eJxrAAAAgQCB",
    "0:" + base64.b64encode(zlib.compress(bytes(2**24))).decode(),  # too many
])  # fmt: skip
def test_damaged_ranges_are_refused(packed: Any) -> None:
    with pytest.raises(ValueError):
        unpack_ranges(packed)


@given(cursor=cursors(), data=st.data())
def test_holes_come_first_and_then_the_rest(cursor: Cursor, data: st.DataObject) -> None:
    whole = coming(cursor)
    assert whole == [*expanded(cursor.holes).tolist(), *range(cursor.position, cursor.position + 150)][:150]
    start = data.draw(st.integers(0, 150))
    stop = data.draw(st.integers(start, 150))
    assert cursor.coming(start, stop).tolist() == whole[start:stop]


@given(cursor=cursors(), count=st.integers(0, 60))
def test_after_some_have_come_the_others_do(cursor: Cursor, count: int) -> None:
    assert coming(cursor.after(count), 90) == coming(cursor)[count : count + 90]


@given(cursor=cursors(), numbers=st.sets(st.integers(0, 70), max_size=60))
def test_without_what_was_delivered_all_others_come_once(cursor: Cursor, numbers: set[int]) -> None:
    whole = coming(cursor)
    delivered = np.array([whole[k] for k in numbers], np.int64)
    left = cursor.without(np.random.default_rng(0).permutation(delivered))
    others = sorted(set(whole) - set(delivered.tolist()))
    assert coming(left, len(others)) == others
    assert left.position >= cursor.position
    assert left.hole_count <= cursor.hole_count + 71


def test_without_nothing_is_the_same() -> None:
    cursor = Cursor(5, np.array([[-2, 0], [1, 3]]))
    assert cursor.without(np.zeros(0, np.int64)) is cursor


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=10))
def test_united_ranges_hold_the_same_numbers(ranges: list[tuple[int, int]]) -> None:
    found = united(ranges)
    assert sorted({n for a, b in ranges for n in range(a, b)}) == [n for a, b in found for n in range(a, b)]
    assert all(a[1] < b[0] for a, b in itertools.pairwise(found))


@given(gone=st.sets(st.integers(0, 60), max_size=40), start=st.integers(0, 50), count=st.integers(0, 50))
def test_ranges_among_what_is_left_name_the_right_numbers(gone: set[int], start: int, count: int) -> None:
    ranges = united((n, n + 1) for n in gone)
    left = [n for n in range(200) if n not in gone]
    found = [n for a, b in among_left(start, start + count, ranges) for n in range(a, b)]
    assert found == left[start : start + count]


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


def test_one_rank_of_several_knows_nothing_of_the_others() -> None:
    part = State(cursor=Cursor.at(), done=((0, 8),), end=40, step=8, rank=1, world=2)
    assert merged([part]).coming(0, 12).tolist() == [0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19][:12]


@pytest.mark.parametrize("first", [0, 10**12])
def test_range_far_ahead_is_removed_without_a_list_of_earlier_positions(first: int) -> None:
    tracemalloc.start()
    try:
        left = Cursor.at().without(np.arange(first + 5, first + 10))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1e6
    assert left.position == first + 10
    assert left.holes.tolist() == [[0, first + 5]]


RANGES = NUMBERS.map(lambda found: compressed(np.array(found, np.int64)))


@given(ranges=RANGES, others=RANGES)
def test_the_difference_of_ranges_has_the_numbers_of_the_one_alone(ranges: np.ndarray, others: np.ndarray) -> None:
    left = difference(ranges, others)
    assert expanded(left).tolist() == sorted(set(expanded(ranges).tolist()) - set(expanded(others).tolist()))
    assert (left[1:, 0] > left[:-1, 1]).all()


def test_ranges_that_touch_are_one_in_their_difference() -> None:
    assert difference(np.array([[0, 3], [3, 9]]), np.zeros((0, 2), np.int64)).tolist() == [[0, 9]]
