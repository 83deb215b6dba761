"""Segments for batches: each stays with its worker while there are enough, and none is lost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headrace._util.shared_memory import Segment
from headrace.torch_regime.workers.pool import BatchMemory

WORKERS, LIMIT = 4, 8


@pytest.fixture
def forgotten() -> list[int]:
    return []


@pytest.fixture
def places(forgotten: list[int]) -> Iterator[BatchMemory]:
    places = BatchMemory(WORKERS, LIMIT, forgotten.append)
    yield places
    places.close()


def added(places: BatchMemory) -> Segment:
    segment = Segment.create(4096)
    places.add(segment)
    return segment


def fill(places: BatchMemory, worker: int) -> int:
    """Fill a free or new segment with a batch of the worker. Returns the number of the segment."""
    segment = places.free_for(worker)
    if segment is None:
        places.settled()
        segment = added(places)
    places.filled(segment.number, worker)
    return segment.number


def test_segment_returns_to_its_worker(places: BatchMemory) -> None:
    number = fill(places, 2)
    places.give_back(number)
    assert fill(places, 1) != number
    assert fill(places, 2) == number


def test_segments_are_limited_to_batches_in_use(places: BatchMemory) -> None:
    held: list[int] = []
    for k in range(200):
        held.append(fill(places, k % WORKERS))
        if len(held) > LIMIT + 1:
            places.give_back(held.pop(0))
    assert len(places.segments) == LIMIT + 2


def test_segments_being_created_count_towards_the_limit(places: BatchMemory) -> None:
    given = [places.free_for(k % WORKERS) for k in range(LIMIT + 1)]
    assert given == [None] * (LIMIT + 1)
    for _ in given[1:]:
        places.settled()
    first = added(places)
    places.filled(first.number, 0)
    places.give_back(first.number)
    for _ in range(LIMIT):
        assert places.free_for(1) is None
    assert places.free_for(3) is first, "there are enough: another worker's is taken"


def test_segment_that_is_too_small_is_unlocked_and_removed(places: BatchMemory, forgotten: list[int]) -> None:
    unlocked: list[int] = []
    segment = added(places)
    places.unlock_pages = lambda number: unlocked.append(len(places.segments[number].view))
    places.unused(segment, 0, is_too_small=True)
    assert unlocked == [4096], "before the segment is closed"
    assert forgotten == [segment.number]
    assert not places.segments


def test_segment_that_a_forked_process_may_read_is_not_reused(places: BatchMemory, forgotten: list[int]) -> None:
    number = fill(places, 0)
    places.retire(number)
    places.give_back(number)
    assert fill(places, 0) != number
    assert forgotten == [number]
