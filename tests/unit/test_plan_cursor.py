"""Cursors: what is still to come of an epoch, and how its ranges are written down."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.order import Cursor
from headrace.order.cursor import among_left, compressed, expanded, pack_ranges, united, unpack_ranges

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


@pytest.mark.parametrize(
    "packed",
    [
        [1],
        [0, 0],
        [0, -1],
        [0, 2, 0, 1],
        [0, 2, -1, 1],
        [0.5, 1],
        ["0", "1"],
        [None, 1],
        [True, True],
        [2**63, 1],
        [0, 2**63],
        [2**61, 2**61],
        "",
        "5",
        "x:eJw=",
        "5:eJw=",
        "5:?",
        "5:YWJj",
        f"{2**63}:eJxrAAAAgQCB",
    ],
)
def test_what_is_no_ranges_is_refused(packed: object) -> None:
    with pytest.raises(ValueError):
        unpack_ranges(packed)  # type: ignore[arg-type]


def test_a_text_that_unpacks_to_too_much_is_refused() -> None:
    import base64
    import zlib

    text = "0:" + base64.b64encode(zlib.compress(bytes(2**24))).decode()
    with pytest.raises(ValueError, match="too many"):
        unpack_ranges(text)


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
