"""Reads at once grow as long as that brings more, and not beyond."""

from __future__ import annotations

import pytest

from headrace.readers.by_key import AdaptiveConcurrency


def settle(growth: AdaptiveConcurrency, latency_s: float, most_per_s: float, *, answers: int = 20_000) -> float:
    """The seconds that a host takes for so many answers: each after its latency, no more of them than it can."""
    now = 0.0
    growth.begin(now)
    for _ in range(answers):
        now += max(latency_s / growth.level, 1.0 / most_per_s)
        growth.answered(now, is_full=True)
    return now


@pytest.mark.parametrize(
    ("latency_s", "most_per_s", "level"),
    [(0.02, 5000.0, 128), (0.02, 1e9, 1024), (0.1, 4000.0, 512), (0.1, 1e9, 1024), (0.001, 300.0, 128)],
)
def test_concurrency_grows_while_doubling_it_helps(latency_s: float, most_per_s: float, level: int) -> None:
    growth = AdaptiveConcurrency(128, 1024)
    settle(growth, latency_s, most_per_s)
    assert level <= growth.level <= 2 * level
    assert growth.level <= 1024
    before = growth.level
    settle(growth, latency_s, most_per_s)
    assert growth.level == before


def test_fixed_concurrency_does_not_change() -> None:
    growth = AdaptiveConcurrency(300, 300)
    settle(growth, 0.1, 1e9)
    assert growth.level == 300


def test_rounds_with_fewer_requests_do_not_count() -> None:
    growth = AdaptiveConcurrency(64, 1024)
    growth.begin(0.0)
    for number in range(10_000):
        assert not growth.answered(number * 0.001, is_full=False)
    assert growth.level == 64
    settle(growth, 0.1, 1e9)
    assert growth.level == 1024
