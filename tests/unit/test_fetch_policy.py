"""The policy of requests: how many at once, how often, when again, and the time limits that end a read."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulation.loop import simulate

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
from headrace.fetch.attempts import RetryPolicy
from headrace.fetch.hosts import ConcurrencyLimit, Hedges, RateLimiter, RateMeter, Semaphore
from headrace.fetch.range_request import DeadlineTimer, RangeRequest
from headrace.options import Fetch

URL = "s3://bucket/key"
POLICY = RetryPolicy.of(Fetch(attempts=6, backoff_s=0.2, backoff_cap_s=10.0))


class Always(random.Random):
    """Draws one number for ever."""

    def __init__(self, drawn: float) -> None:
        super().__init__()
        self.drawn = drawn

    def random(self) -> float:
        return self.drawn


# Further attempts.


def test_longest_wait_doubles_up_to_the_cap() -> None:
    policy = RetryPolicy(attempts=100, backoff_s=0.2, backoff_cap_s=10.0)
    waits = [policy.wait_s(StorageError("x", url=URL), n, n, 60.0, Always(1.0)) for n in range(1, 10)]
    assert waits == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0, 10.0]
    assert [POLICY.wait_s(OSError(), 3, 3, 60.0, Always(drawn)) for drawn in (0.0, 0.5)] == [0.0, 0.4]


@pytest.mark.parametrize(("error", "requests"), [
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
], ids=repr)  # fmt: skip
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
    ("asked", "left", "drawn", "wait"),
    [
        (5, 60, 0.5, 5.1), (5, 5.05, 0.5, None), (600, 61, 0.5, 60.1), (600, 59, 0.5, None), (-9, 9, 0.5, 0.1),
        (None, 0.1, 0.4, 0.08), (None, 0.1, 0.6, None), (None, 0.0, 0.0, None),
    ],
)  # fmt: skip
def test_retry_after_is_obeyed_and_no_attempt_starts_after_the_ranges_time(
    asked: float | None, left: float, drawn: float, wait: float | None
) -> None:
    error = ThrottledError("x", url=URL, status=503, retry_after_s=asked)
    assert POLICY.wait_s(error, 1, 1, left, Always(drawn)) == pytest.approx(wait)


@given(st.integers(1, 10**6), st.floats(0, 100), st.floats(0, 100), st.integers(0, 2**32))
def test_wait_is_never_negative_nor_over_the_cap(attempt: int, backoff: float, cap: float, seed: int) -> None:
    wait = RetryPolicy(10**7, backoff, cap).wait_s(OSError(), attempt, 1, 1e9, random.Random(seed))
    assert wait is not None
    assert 0 <= wait <= cap


# Second requests.


@pytest.mark.parametrize(("answer_s", "delay_s"), [(0.01, 0.01), (0.0001, 0.001)])
def test_delay_needs_twenty_answers_and_is_a_millisecond_at_least(answer_s: float, delay_s: float) -> None:
    hedges = Hedges(0.05)
    for _ in range(20):
        assert hedges.delay_s == float("inf")
        hedges.learn(answer_s)
    assert hedges.delay_s == delay_s


def test_hedge_delay_is_the_95th_percentile() -> None:
    hedges, rng = Hedges(0.05), random.Random(1)
    for _ in range(1000):
        hedges.learn(rng.uniform(0.1, 0.2))
    assert hedges.delay_s == pytest.approx(0.195, abs=0.003)


def test_hedge_delay_follows_a_host_that_changes() -> None:
    hedges = Hedges(0.05)
    for seconds in (0.01, 0.5):
        for _ in range(300):
            hedges.learn(seconds)
        assert hedges.delay_s == seconds


# Limits of requests at once, and of their rate.


def test_semaphore_admits_retries_first() -> None:
    async def run() -> list[str]:
        gate, order = Semaphore(1), []

        async def visit(name: str, again: bool) -> None:
            await gate.enter(again=again)
            order.append(name)
            gate.leave()

        await gate.enter()
        tasks = []
        for name, again in (("a", False), ("b", False), ("c", True), ("d", True)):
            tasks.append(asyncio.ensure_future(visit(name, again)))
            await asyncio.sleep(0)
        gate.leave()
        await asyncio.gather(*tasks)
        assert gate.inside == 0
        return order

    assert simulate(run())[0] == ["c", "d", "a", "b"]


def test_concurrency_falls_once_and_rises_by_one_per_round_trip() -> None:
    now = 0.0
    level = ConcurrencyLimit(100, lambda: now)
    level.inside = 100
    now = 1.0
    for _ in range(50):
        level.overloaded(0.5, throttled=False)
    assert (level.limit, level.lowest, level.is_free) == (70.0, 70, False)
    level.overloaded(1.0, throttled=False)
    assert level.limit == pytest.approx(49.0)
    for _ in range(49):
        level.succeeded(now)
    assert level.limit == pytest.approx(50.0, abs=0.02)
    for _ in range(5000):
        level.succeeded(now)
    assert level.limit == 100.0
    assert level.is_free


@pytest.mark.parametrize(("limit", "inside", "times", "lowered"), [(4, 1, 50, 1.0), (256, 10, 1, 7.0)])
def test_limit_falls_from_what_is_in_flight_but_not_below_one(
    limit: int, inside: int, times: int, lowered: float
) -> None:
    level = ConcurrencyLimit(limit, lambda: 0.0)
    level.inside = inside
    for began in range(times):
        level.overloaded(float(began), throttled=False)
    assert level.limit == lowered


def test_rate_falls_to_a_share_of_the_throughput_and_recovers_in_seconds() -> None:
    pace = RateLimiter(100.0, 10.0)
    assert pace.at(10.0) == pytest.approx(70.0)
    assert pace.at(10.0 + 75 ** (1 / 3)) == pytest.approx(100.0)
    assert pace.at(30.0) > 300.0
    rates = [pace.at(10.0 + seconds / 10) for seconds in range(200)]
    assert rates == sorted(rates)
    # it falls at most once in half a second
    pace.lower(10.1, 10.4, 100.0)
    pace.lower(9.9, 11.0, 100.0)
    assert pace.at(10.0) == pytest.approx(70.0)
    pace.lower(10.1, 11.0, 50.0)
    assert pace.at(11.0) == pytest.approx(35.0)
    assert pace.at(14.0) < 50.0  # it does not go for 100 again at once


def test_rate_is_that_of_the_last_second_or_that_before_a_pause() -> None:
    rate, paused = RateMeter(0.0), RateMeter(0.0)
    for n in range(1000):
        rate.add(n / 100)
        paused.add(n / 100)
    assert rate.of(10.0) == pytest.approx(100.0, rel=0.05)
    for n in range(20):
        rate.add(10.0 + n / 10)
    assert rate.of(12.0) == pytest.approx(10.0, rel=0.2)
    assert paused.of(100.0) == pytest.approx(100.0, rel=0.1)


OPTIONS = Fetch(
    first_byte_timeout_s=10.0, stall_timeout_s=5.0, total_timeout_s=100.0, min_rate_bytes_s=1000, hedge_share=0.0
)


async def watched(steps: Callable[[RangeRequest], list[tuple[float, int]]]) -> tuple[str | None, float]:
    """Wait and receive bytes in steps. Returns the limit that ended the read, and the time."""
    loop = asyncio.get_running_loop()
    watch, read = DeadlineTimer(OPTIONS, loop.time), RangeRequest("memory://some", 0, 1)
    read.start_now(loop.time())
    watch.begin(read, read.began)
    why = None
    try:
        for wait_s, received in steps(read):
            await asyncio.sleep(wait_s)
            read.position += received
    except asyncio.CancelledError:
        why = read.settle()
        assert why is not None
    finally:
        watch.end(read)
        watch.close()
    return why, loop.time()


@pytest.mark.parametrize(("steps", "why", "at"), [
    ([(9.9, 1), (4.9, 1)], None, 14.8),
    ([(99.0, 0)], "no first byte within 10 seconds", 10.0),
    ([(1.0, 50_000), (99.0, 0)], "no byte for 5 seconds", 6.0),
    ([(1.0, 999)] * 60, "fewer than 1000 bytes a second for 30 seconds", 31.0),
    ([(1.0, 1100)] * 60, None, 60.0),
    ([(1.0, 10**6)] * 200, "not all within 100 seconds", 100.0),
])  # fmt: skip
def test_first_broken_limit_ends_the_read(steps: list[tuple[float, int]], why: str | None, at: float) -> None:
    (ended, seconds), _ = simulate(watched(lambda _: steps))
    assert ended == why
    assert at <= seconds <= at + 2.1


@pytest.mark.parametrize(("progress", "ends_at"), [(float("inf"), None), (-1.0, 100.0)])
def test_waiting_for_a_turn_counts_only_without_progress(progress: float, ends_at: float | None) -> None:
    def steps(read: RangeRequest) -> list[tuple[float, int]]:
        read.waits_for = lambda: progress
        return [(500.0, 0)]

    (why, seconds), _ = simulate(watched(steps))
    assert (why is None) is (ends_at is None)
    assert seconds == pytest.approx(ends_at or 500.0, abs=1.1)


def test_cancellation_is_not_reported_as_a_time_limit() -> None:
    async def run() -> None:
        task = asyncio.ensure_future(watched(lambda _: [(50.0, 0)]))
        await asyncio.sleep(9.0)
        task.cancel()
        with pytest.raises(AssertionError):  # of `settle`: it was not the watch
            await task

    simulate(run())


def test_time_the_loop_was_blocked_does_not_count() -> None:
    async def run() -> None:
        clock_ahead = 0.0
        loop = asyncio.get_running_loop()
        watch, read = DeadlineTimer(OPTIONS, lambda: loop.time() + clock_ahead), RangeRequest("memory://some", 0, 1)
        read.start_now(0.0)
        watch.begin(read, 0.0)
        await asyncio.sleep(2.5)
        clock_ahead = 60.0
        await asyncio.sleep(1.0)  # the watch has looked, late
        read.position = 100_000
        await asyncio.sleep(3.0)
        assert read.stopped_by is None
        watch.end(read)
        watch.close()

    simulate(run())


def test_timer_runs_only_while_something_is_watched() -> None:
    async def run() -> int:
        loop = asyncio.get_running_loop()
        watch, read = DeadlineTimer(OPTIONS, loop.time), RangeRequest("memory://some", 0, 1)
        watch.begin(read, loop.time())
        watch.end(read)
        await asyncio.sleep(5.0)
        return loop.timers  # type: ignore[attr-defined, no-any-return]

    assert simulate(run())[0] <= 1  # that of `simulate` itself
