"""Requests for ranges, and for members of an archive: nothing is missing or cut, and every bound holds."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace._util.sample_ranges import Rows
from headrace.fetch.coalescer import Requests, coalesce, member_requests, split

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
def test_coalesced_requests_are_stable(ranges: Ranges, gap: int, longest: int) -> None:
    bounds: dict[str, Any] = {"gap": gap, "waste": 1.0, "longest": longest}
    starts, stops, _ = requests_for(ranges, **bounds)
    again = requests_for(list(zip(starts, stops, strict=True)), **bounds)
    assert (again.starts.tolist(), again.stops.tolist()) == (starts.tolist(), stops.tolist())


@pytest.mark.parametrize(("is_wanted", "requests"), [
    (lambda row: row % 10 != 3, [(0, 4_000_000)]),  # most of the object: one stream
    (lambda row: row % 50 == 0, [(row * 4000, row * 4000 + 4000) for row in range(0, 1000, 50)]),
    (lambda row: row < 100 or row >= 900, [(0, 400_000), (3_600_000, 4_000_000)]),
])  # fmt: skip
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


BLOCK = 512
HEADERS = 4 * BLOCK  # that a member may have, extended ones too
MANY = 10**9

# (size, number of other blocks before its header)
MEMBERS = st.lists(
    st.tuples(st.sampled_from([0, 0, 1, 511, 512, 513, 2000, 9000]), st.sampled_from([0, 0, 0, 1, 2, 5, 30])),
    max_size=20,
)


def rows_of(members: list[tuple[int, int]]) -> Rows:
    offsets, at = [], 0
    for size, skipped in members:
        at += (skipped + 1) * BLOCK
        offsets.append(at)
        at += -(-size // BLOCK) * BLOCK
    count = len(members)
    sizes = np.array([size for size, _ in members], np.int64)
    offset = np.array(offsets, np.int64)
    keys = np.array([b"%d" % n for n in range(count)] or [], "S8")
    return Rows(keys, np.arange(count + 1), np.zeros(count, np.int32), offset, sizes, ("a",))


@given(
    members=MEMBERS,
    gap=st.sampled_from([0, 511, 1024, 16384]),
    longest=st.sampled_from([512, 1024, 4096, MANY]),
)
def test_requests_hold_each_member_whole_and_keep_every_bound(
    members: list[tuple[int, int]], gap: int, longest: int
) -> None:
    rows = rows_of(members)
    starts, stops, number = member_requests(rows, gap=gap, longest=longest)
    ends = rows.offset + rows.size
    assert (starts[1:] > stops[:-1]).all()
    for m in np.flatnonzero(number >= 0):
        assert starts[number[m]] <= rows.offset[m]
        assert ends[m] <= stops[number[m]]
    for k, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
        inside = np.flatnonzero((number == k) & (rows.size > 0))
        assert len(inside)
        assert stop - start <= max(longest, int(rows.size[inside].max()))
        holes = rows.offset[inside][1:] - ends[inside][:-1]
        has_empty = ((rows.offset >= start) & (rows.offset <= stop) & (rows.size == 0)).any()  # these are in holes
        assert has_empty or (holes <= max(gap, HEADERS)).all()
    assert (number[rows.size > 0] >= 0).all()


@pytest.mark.parametrize("longest", [512, 10_000, 100_000])
def test_complete_shards_are_read_as_streams(longest: int) -> None:
    rows = rows_of([(700, 0), (3, 0)] * 200)
    starts, stops, _ = member_requests(rows, gap=0, longest=longest)
    covered = int((stops - starts).sum())
    end = int(rows.offset[-1] + rows.size[-1])
    assert covered <= end - BLOCK
    assert len(starts) == 400 if longest == 512 else len(starts) <= -(-end // (longest - 2560))


def test_neighbours_are_one_request_including_headers_between_them() -> None:
    rows = rows_of([(1, 0), (0, 0), (1, 0), (0, 0)])
    starts, stops, number = member_requests(rows, gap=0, longest=MANY)
    assert (starts.tolist(), number.tolist()) == ([512], [0, 0, 0, 0])
    assert stops.tolist() == [rows.offset[3]]


APART = [(4000, 0), (4000, 6), (100, 9)]


@pytest.mark.parametrize(("members", "gap", "count"), [
    *((APART, blocks * BLOCK, count) for blocks, count in ((0, 3), (6, 3), (8, 2), (11, 1))),
    ([(700, 2)] * 400, 0, 1),  # extended headers: each has two more blocks before its header
    ([(0, 0), (0, 0), (0, 9)], MANY, 0),  # members without bytes
])  # fmt: skip
def test_wide_gaps_separate_requests(members: list[tuple[int, int]], gap: int, count: int) -> None:
    starts, stops, number = member_requests(rows_of(members), gap=gap, longest=MANY)
    assert len(starts) == len(stops) == count
    assert count or number.tolist() == [-1] * len(members)
