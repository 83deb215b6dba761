"""The costs of measuring how long users' code blocks the event loop, and of counting bytes."""

from __future__ import annotations

import itertools
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest

from headrace._util.shared_memory import bytes_in
from headrace.fetch.meter import TimedFunction, WatchedIterator

CALLS = 1000


class Own:
    """An awaitable of the user's."""

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


@pytest.mark.parametrize(("watches", "limit"), [("function", 1.3), ("iterator", 2.3)])
def test_watching_costs_one_call_more_and_wraps_some_awaitables_only(watches: str, limit: float) -> None:
    timed = TimedFunction("loop")
    call = timed.watched(Own) if watches == "function" else WatchedIterator(Feed(), timed).__anext__
    given: list[Any] = []
    assert calls_in(lambda: given.extend([call() for _ in range(CALLS)])) < limit * CALLS
    kept = [awaitable for awaitable in given if isinstance(awaitable, Own)]
    assert timed.calls == CALLS
    assert CALLS * 0.8 < len(kept) < CALLS


@pytest.mark.parametrize(("value", "nbytes"), [
    ([], 0),
    ([1, 2.0, True, None, 1j], 0),
    ([1, b"12", "345", bytearray(4)], 9),
    ((1, [2, np.zeros(3, np.int64)]), 24),
    ([{"a": b"12", "b": 1}, {"a": b"3", "b": [b"4"]}], 4),
    (np.int64(1), 8),
    ([np.bool_(True), True], 1),
])  # fmt: skip
def test_bytes_are_counted_in_all_when_some_values_have_none(value: Any, nbytes: int) -> None:
    assert bytes_in(value) == nbytes
    assert calls_in(lambda: bytes_in(list(range(CALLS)))) < 10, "numbers cost no call each"
