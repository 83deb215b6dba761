"""Semaphores, concurrency limits and rates of requests, and how they follow the answers."""

from __future__ import annotations

import asyncio

import pytest
from simulation.loop import simulate

from headrace.fetch.policy.limits import ConcurrencyLimit, RateLimiter, RateMeter, Semaphore
from headrace.fetch.policy.retry import RetryBudget


def test_semaphore_admits_returning_visitors_first() -> None:
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


@pytest.mark.parametrize("seed", range(30))
def test_cancelled_visitors_leave_the_semaphore_free(seed: int) -> None:
    async def run() -> None:
        gate = Semaphore(2)

        async def visit() -> None:
            await gate.enter()
            try:
                await asyncio.sleep(0)
            finally:
                gate.leave()

        tasks = [asyncio.ensure_future(visit()) for _ in range(20)]
        for turn, task in enumerate(tasks[::3]):
            await asyncio.sleep(0)
            task.cancel()
            if turn % 2:
                await asyncio.sleep(0)
        await asyncio.wait(tasks)
        assert gate.inside == 0
        assert gate.try_enter()

    simulate(run(), seed)


def test_limit_falls_once_a_round_and_climbs_by_one_a_round() -> None:
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


def test_rate_falls_once_in_half_a_second_for_requests_begun_since() -> None:
    pace = RateLimiter(100.0, 10.0)
    pace.lower(10.1, 10.4, 100.0)
    pace.lower(9.9, 11.0, 100.0)
    assert pace.at(10.0) == pytest.approx(70.0)
    pace.lower(10.1, 11.0, 50.0)
    assert pace.at(11.0) == pytest.approx(35.0)
    assert pace.at(14.0) < 50.0  # it does not go for 100 again at once


def test_rate_limiter_grants_evenly_and_never_stops() -> None:
    pace, now, taken = RateLimiter(0.0, 0.0), 0.0, 0
    for _ in range(10_000):
        pace.lower(now, now, 0.0)
        wait = pace.take(now)
        taken += wait == 0.0
        now += wait or 0.001
    assert taken == pytest.approx(5 * now, rel=0.1)  # five a second, at the least


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


def test_retries_wait_for_the_budget_that_successes_fill() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        retry_budget, went = RetryBudget(loop.time), []

        async def retry() -> None:
            await retry_budget.take()
            went.append(loop.time())

        tasks = [asyncio.ensure_future(retry()) for _ in range(int(RetryBudget.FULL) + 10)]
        await asyncio.sleep(2.001)
        assert len(went) == RetryBudget.FULL + 4
        assert went[-1] == pytest.approx(2.0, abs=0.002)
        next(task for task in tasks if not task.done()).cancel()
        for _ in range(5):
            retry_budget.give(1.0)
        await asyncio.wait(tasks)
        assert len(went) == RetryBudget.FULL + 9
        assert loop.time() < 2.1
        retry_budget.close()

    simulate(run())
