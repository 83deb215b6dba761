"""The policy of further attempts, without clock, network or chance."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import (
    AccessDeniedError,
    BadResponseError,
    ObjectChangedError,
    ObjectMissingError,
    ReadTimeoutError,
    ShortReadError,
    StorageError,
    ThrottledError,
)
from headrace.fetch.policy.retry import RetryPolicy
from headrace.options import FetchOptions

URL = "s3://bucket/key"
POLICY = RetryPolicy(attempts=6, backoff_s=0.2, backoff_cap_s=10.0)


class Always(random.Random):
    """Draws one number for ever."""

    def __init__(self, drawn: float) -> None:
        super().__init__()
        self.drawn = drawn

    def random(self) -> float:
        return self.drawn


def test_policy_takes_its_numbers_from_the_options() -> None:
    options = FetchOptions(attempts=3, backoff_s=1.0, backoff_cap_s=4.0)
    assert RetryPolicy.of(options) == RetryPolicy(3, 1.0, 4.0)


def test_longest_wait_doubles_up_to_the_cap() -> None:
    policy = RetryPolicy(attempts=100, backoff_s=0.2, backoff_cap_s=10.0)
    waits = [policy.wait_s(StorageError("x", url=URL), n, n, 60.0, Always(1.0)) for n in range(1, 10)]
    assert waits == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0, 10.0]


def test_wait_is_drawn_from_nothing_up_to_the_longest() -> None:
    assert POLICY.wait_s(OSError(), 3, 3, 60.0, Always(0.0)) == 0.0
    assert POLICY.wait_s(OSError(), 3, 3, 60.0, Always(0.5)) == 0.4


@pytest.mark.parametrize(
    ("error", "requests"),
    [
        (ObjectMissingError("x", url=URL), 1),
        (AccessDeniedError("x", url=URL), 1),
        (ObjectChangedError("x", url=URL), 1),
        (StorageError("x", url=URL, status=400), 1),
        (ValueError("x"), 1),
        (BadResponseError("x", url=URL), 2),
        (StorageError("x", url=URL), 6),
        (StorageError("x", url=URL, status=408), 6),
        (StorageError("x", url=URL, status=500), 6),
        (ThrottledError("x", url=URL, status=429), 6),
        (ThrottledError("x", url=URL, status=503), 6),
        (ShortReadError("x", url=URL), 6),
        (ReadTimeoutError("x", url=URL), 6),
        (TimeoutError(), 6),
        (ConnectionResetError(), 6),
    ],
    ids=lambda value: (
        f"{type(value).__name__}-{getattr(value, 'status', '')}" if isinstance(value, Exception) else None
    ),
)
def test_error_decides_how_many_requests_are_made(error: Exception, requests: int) -> None:
    made = 1
    while POLICY.wait_s(error, made, made, 60.0, Always(0.0)) is not None:
        made += 1
    assert made == requests


def test_bad_response_after_other_failures_is_asked_for_once_more() -> None:
    error = BadResponseError("x", url=URL)
    assert POLICY.wait_s(error, 4, 1, 60.0, Always(0.0)) is not None
    assert POLICY.wait_s(error, 5, 2, 60.0, Always(0.0)) is None


@pytest.mark.parametrize(
    ("asked", "left", "wait"), [(5, 60, 5.1), (5, 5.05, None), (600, 61, 60.1), (600, 59, None), (-9, 9, 0.1)]
)
def test_retry_after_of_a_store_is_obeyed(asked: float, left: float, wait: float | None) -> None:
    error = ThrottledError("x", url=URL, status=503, retry_after_s=asked)
    assert POLICY.wait_s(error, 1, 1, left, Always(0.5)) == wait


def test_no_attempt_begins_after_the_ranges_time() -> None:
    assert POLICY.wait_s(OSError(), 1, 1, 0.1, Always(0.4)) is not None
    assert POLICY.wait_s(OSError(), 1, 1, 0.1, Always(0.6)) is None
    assert POLICY.wait_s(OSError(), 1, 1, 0.0, Always(0.0)) is None


@given(st.integers(1, 10**6), st.floats(0, 100), st.floats(0, 100), st.integers(0, 2**32))
def test_wait_is_never_negative_nor_over_the_cap(attempt: int, backoff: float, cap: float, seed: int) -> None:
    wait = RetryPolicy(10**7, backoff, cap).wait_s(OSError(), attempt, 1, 1e9, random.Random(seed))
    assert wait is not None
    assert 0 <= wait <= cap
