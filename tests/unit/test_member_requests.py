"""Requests for the members of an archive: each is in one of them, none is larger or more wasteful than may be."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace._util.sample_ranges import Rows
from headrace.fetch.coalescer import member_requests

BLOCK = 512
HEADERS = 4 * BLOCK  # that a member may have, extended ones too
MANY = 10**9

# (size, how many other blocks lie before its header)
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
        has_empty = ((rows.offset >= start) & (rows.offset <= stop) & (rows.size == 0)).any()  # these lie in holes
        assert has_empty or (holes <= max(gap, HEADERS)).all()
    assert (number[rows.size > 0] >= 0).all()


@pytest.mark.parametrize("longest", [512, 10_000, 100_000])
def test_what_is_wanted_completely_is_read_like_a_stream(longest: int) -> None:
    rows = rows_of([(700, 0), (3, 0)] * 200)
    starts, stops, _ = member_requests(rows, gap=0, longest=longest)
    covered = int((stops - starts).sum())
    end = int(rows.offset[-1] + rows.size[-1])
    assert covered <= end - BLOCK
    assert len(starts) == 400 if longest == 512 else len(starts) <= -(-end // (longest - 2560))


def test_neighbours_are_one_request_though_headers_lie_between_them() -> None:
    rows = rows_of([(1, 0), (0, 0), (1, 0), (0, 0)])
    starts, stops, number = member_requests(rows, gap=0, longest=MANY)
    assert (starts.tolist(), number.tolist()) == ([512], [0, 0, 0, 0])
    assert stops.tolist() == [rows.offset[3]]


def test_a_gap_parts_requests_where_it_is_too_wide() -> None:
    rows = rows_of([(4000, 0), (4000, 6), (100, 9)])
    counts = [len(member_requests(rows, gap=gap * BLOCK, longest=MANY).starts) for gap in (0, 6, 8, 11)]
    assert counts == [3, 3, 2, 1]


def test_members_with_extended_headers_are_read_like_a_stream() -> None:
    rows = rows_of([(700, 2)] * 400)  # each has two more blocks before its header
    assert len(member_requests(rows, gap=0, longest=MANY).starts) == 1


def test_members_without_bytes_need_no_request() -> None:
    starts, stops, number = member_requests(rows_of([(0, 0), (0, 0), (0, 9)]), gap=MANY, longest=MANY)
    assert (len(starts), len(stops), number.tolist()) == (0, 0, [-1, -1, -1])


def test_a_member_that_is_longer_than_a_request_may_be_is_not_cut() -> None:
    starts, stops, _ = member_requests(rows_of([(10, 0), (9000, 0), (10, 0)]), gap=MANY, longest=1024)
    assert [size for size in (stops - starts).tolist() if size > 1024] == [9000]
    assert len(starts) == 3
