"""Where batches lie: a place stays with its worker, until there are enough; and none is lost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headrace._util.shared_memory import Segment
from headrace.torch_regime.workers.batch_memory import BatchMemory

WORKERS, LIMIT = 4, 8


@pytest.fixture
def forgotten() -> list[int]:
    return []


@pytest.fixture
def places(forgotten: list[int]) -> Iterator[BatchMemory]:
    places = BatchMemory(WORKERS, LIMIT, forgotten.append)
    yield places
    places.close()


def fill(places: BatchMemory, worker: int) -> int:
    """A batch of a worker's, in a place that it was given or makes; gives the place's number."""
    segment = places.free_for(worker)
    if segment is None:
        places.settled()
        segment = Segment.create(4096)
        places.add(segment)
    places.filled(segment.number, worker)
    return segment.number


def test_place_goes_back_to_the_worker_that_has_filled_it(places: BatchMemory) -> None:
    number = fill(places, 2)
    places.give_back(number)
    assert fill(places, 1) != number
    assert fill(places, 2) == number


def test_no_more_are_made_than_batches_under_way_and_those_of_the_trainer(places: BatchMemory) -> None:
    held: list[int] = []
    for k in range(200):
        held.append(fill(places, k % WORKERS))
        if len(held) > LIMIT + 1:
            places.give_back(held.pop(0))
    assert len(places.segments) == LIMIT + 2


def test_places_that_workers_may_be_making_count_too(places: BatchMemory) -> None:
    given = [places.free_for(k % WORKERS) for k in range(LIMIT + 1)]
    assert given == [None] * (LIMIT + 1)
    for _ in given[1:]:
        places.settled()
    first = Segment.create(4096)
    places.add(first)
    places.filled(first.number, 0)
    places.give_back(first.number)
    for _ in range(LIMIT):
        assert places.free_for(1) is None
    assert places.free_for(3) is first, "there are enough: another worker's is taken"


def test_place_that_is_too_small_is_gone_and_workers_are_told(places: BatchMemory, forgotten: list[int]) -> None:
    segment = Segment.create(4096)
    places.add(segment)
    places.unused(segment, 0, is_too_small=True)
    assert forgotten == [segment.number]
    assert not places.segments


def test_place_that_a_forked_process_may_look_at_is_not_used_again(places: BatchMemory, forgotten: list[int]) -> None:
    number = fill(places, 0)
    places.retire(number)
    places.give_back(number)
    assert fill(places, 0) != number
    assert forgotten == [number]


def test_pages_are_unlocked_before_a_segment_is_closed(places: BatchMemory) -> None:
    unlocked: list[int] = []
    segment = Segment.create(4096)
    places.unlock_pages = lambda number: unlocked.append(len(places.segments[number].view))
    places.add(segment)
    places.unused(segment, 0, is_too_small=True)
    assert unlocked == [4096]
