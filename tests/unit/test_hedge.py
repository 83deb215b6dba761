"""When a first byte is late, and how many second requests that allows."""

from __future__ import annotations

import random

import pytest

from headrace.fetch.policy.endpoint import Hedges


def test_delay_needs_twenty_answers_and_is_a_millisecond_at_least() -> None:
    hedges, fast = Hedges(0.05), Hedges(0.05)
    for _ in range(19):
        hedges.learn(0.01)
        fast.learn(0.0001)
    assert hedges.delay_s == float("inf")
    hedges.learn(0.01)
    fast.learn(0.0001)
    assert (hedges.delay_s, fast.delay_s) == (0.01, 0.001)


def test_late_is_what_is_later_than_95_of_100() -> None:
    hedges, rng = Hedges(0.05), random.Random(1)
    for _ in range(1000):
        hedges.learn(rng.uniform(0.1, 0.2))
    assert hedges.delay_s == pytest.approx(0.195, abs=0.003)


def test_late_follows_a_host_that_changes() -> None:
    hedges = Hedges(0.05)
    for seconds in (0.01, 0.5):
        for _ in range(300):
            hedges.learn(seconds)
        assert hedges.delay_s == seconds


@pytest.mark.parametrize("share", [0.01, 0.05, 0.5])
def test_second_requests_stay_within_their_share(share: float) -> None:
    hedges, made = Hedges(share), 0
    for n in range(2000):
        hedges.learn(0.01)
        made += hedges.take()
        assert made <= 1 + share * (n + 1)
    assert made >= share * 2000 - 5


def test_share_that_was_not_used_is_not_saved_up() -> None:
    hedges = Hedges(0.05)
    for _ in range(10_000):
        hedges.learn(0.01)
    assert sum(hedges.take() for _ in range(100)) == 5
