"""Wanted ranges become requests: nothing is missing, nothing is cut, and no bound is broken."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.fetch.coalescer import Requests, coalesce, split

Ranges = list[tuple[int, int]]


def chained(steps: Ranges) -> Ranges:
    begins = itertools.accumulate(step for step, _ in steps)
    return [(start, start + length) for start, (_, length) in zip(begins, steps, strict=True)]


RANGES = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 9)), max_size=15).map(chained)
LONGEST = st.sampled_from([1, 4, 10, 20, 1000])
BOUNDS = st.fixed_dictionaries(
    {
        "gap": st.integers(0, 8),
        "waste": st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0]),
        "longest": LONGEST,
    }
)


def requests_for(ranges: Ranges, gap: int, waste: float, longest: int) -> Requests:
    table = np.array(ranges, np.int64).reshape(-1, 2)
    return coalesce(table[:, 0], table[:, 1], gap=gap, waste=waste, longest=longest)


@given(RANGES, BOUNDS)
def test_requests_hold_every_range_whole_and_keep_every_bound(ranges: Ranges, bounds: dict[str, Any]) -> None:
    starts, stops, number = requests_for(ranges, **bounds)
    assert (np.diff(starts) > 0).all()
    for k, (begin, end) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
        members = sorted(ranges[i] for i in np.flatnonzero(number == k))
        wanted = {byte for start, stop in members for byte in range(start, stop)}
        assert (min(wanted), max(wanted) + 1) == (begin, end)
        assert end - begin - len(wanted) <= bounds["waste"] * (end - begin)
        assert end - begin <= max(bounds["longest"], *(stop - start for start, stop in members))
        assert np.diff(sorted(wanted)).max(initial=1) <= bounds["gap"] + 1
    assert [k == -1 for k in number] == [start == stop for start, stop in ranges]


@given(RANGES, BOUNDS, st.randoms())
def test_requests_are_the_same_in_whatever_order_the_ranges_come(
    ranges: Ranges, bounds: dict[str, Any], rng: random.Random
) -> None:
    shuffled = rng.sample(ranges, len(ranges))
    for one, other in zip(requests_for(ranges, **bounds)[:2], requests_for(shuffled, **bounds)[:2], strict=True):
        assert one.tolist() == other.tolist()


@given(RANGES, st.integers(0, 8), LONGEST)
def test_requests_that_are_wanted_themselves_stay_as_they_are(ranges: Ranges, gap: int, longest: int) -> None:
    bounds: dict[str, Any] = {"gap": gap, "waste": 1.0, "longest": longest}
    starts, stops, _ = requests_for(ranges, **bounds)
    again = requests_for(list(zip(starts, stops, strict=True)), **bounds)
    assert (again.starts.tolist(), again.stops.tolist()) == (starts.tolist(), stops.tolist())


@pytest.mark.parametrize(
    ("is_wanted", "requests"),
    [
        (lambda row: row % 10 != 3, [(0, 4_000_000)]),  # most of the object: one stream
        (lambda row: row % 50 == 0, [(row * 4000, row * 4000 + 4000) for row in range(0, 1000, 50)]),
        (lambda row: row < 100 or row >= 900, [(0, 400_000), (3_600_000, 4_000_000)]),
    ],
)
def test_rows_of_a_shard_are_one_stream_or_ranges_by_what_another_request_costs(
    is_wanted: Callable[[int], bool], requests: Ranges
) -> None:
    rows = [(row * 4000, row * 4000 + 4000) for row in range(1000) if is_wanted(row)]
    starts, stops, _ = requests_for(rows, gap=100_000, waste=0.25, longest=2**40)
    assert list(zip(starts.tolist(), stops.tolist(), strict=True)) == requests


@pytest.mark.parametrize(
    ("range_", "part", "parts"),
    [((0, 0), 4, []), ((3, 5), 4, [(3, 5)]), ((3, 12), 4, [(3, 7), (7, 11), (11, 12)]), ((0, 8), 4, [(0, 4), (4, 8)])],
)
def test_split_gives_parts_that_follow_one_another(range_: tuple[int, int], part: int, parts: Ranges) -> None:
    assert split(*range_, part) == parts
