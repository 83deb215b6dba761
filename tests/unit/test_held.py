"""What it takes to know how long users' own code holds the event loop."""

from __future__ import annotations

import itertools
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest

from headrace._util.shared_memory import bytes_in
from headrace.fetch.meter import TimedFunction, WatchedIterator
from headrace.workers.failures import Failure, PackedError
from headrace.workers.sample_chunks import ListPart

CALLS = 1000


class Own:
    """An awaitable of the user's, to be told from one of ours."""

    def __await__(self) -> Any:
        yield from ()


class Feed(AsyncIterator[Any]):
    def __anext__(self) -> Any:
        return Own()


def calls_in(function: Callable[[], Any]) -> int:
    calls = itertools.count()
    before = sys.getprofile()
    sys.setprofile(lambda _frame, event, _argument: next(calls) if event == "call" else None)
    try:
        function()
    finally:
        sys.setprofile(before)
    return next(calls)


def test_call_costs_one_more_when_it_is_watched() -> None:
    function = TimedFunction("loop").watched(Own)
    assert calls_in(lambda: [function() for _ in range(CALLS)]) < 1.3 * CALLS


def test_sample_costs_one_call_more_when_its_iterator_is_watched() -> None:
    samples = WatchedIterator(Feed(), TimedFunction("loop"))
    assert calls_in(lambda: [samples.__anext__() for _ in range(CALLS)]) < 2.3 * CALLS


def test_numbers_cost_no_call_each_when_their_bytes_are_counted() -> None:
    assert calls_in(lambda: bytes_in(list(range(CALLS)))) < 10


def test_watched_function_gives_most_awaitables_as_they_are_when_it_is_called_often() -> None:
    held = TimedFunction("loop")
    function = held.watched(Own)
    given = [function() for _ in range(CALLS)]
    kept = [awaitable for awaitable in given if isinstance(awaitable, Own)]
    assert held.calls == CALLS
    assert CALLS * 0.8 < len(kept) < CALLS


def test_watched_iterator_gives_most_awaitables_as_they_are_when_it_is_asked_often() -> None:
    held = TimedFunction("loop")
    samples = WatchedIterator(Feed(), held)
    given = [samples.__anext__() for _ in range(CALLS)]
    kept = [awaitable for awaitable in given if isinstance(awaitable, Own)]
    assert held.calls == CALLS
    assert CALLS * 0.8 < len(kept) < CALLS


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [
        ([], 0),
        ([1, 2.0, True, None, 1j], 0),
        ([1, b"12", "345", bytearray(4)], 9),
        ((1, [2, np.zeros(3, np.int64)]), 24),
        ([{"a": b"12", "b": 1}, {"a": b"3", "b": [b"4"]}], 4),
        (np.int64(1), 8),
        ([np.bool_(True), True], 1),
    ],
)
def test_bytes_are_counted_in_all_when_some_values_have_none(value: Any, nbytes: int) -> None:
    assert bytes_in(value) == nbytes


@pytest.mark.parametrize(("start", "stop", "failed"), [(0, 5, 1), (1, 5, 0), (2, 5, 1), (4, 5, None), (0, 1, None)])
def test_first_failure_of_list_is_told_when_it_is_cut(start: int, stop: int, failed: int | None) -> None:
    samples = [0, Failure(PackedError(b"")), 2, Failure(PackedError(b"")), 4]
    part = ListPart(samples).cut(start, stop)
    assert list(part.failed)[:1] == ([] if failed is None else [failed])
