"""Samples drawn by chance: as likely as their weights say, and the same each time."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import OptionError
from headrace.order import ShardOrder, Windows
from headrace.order.permutation import below
from headrace.order.sampling import DrawnOrder, chosen_by_weight, minus_log


def plain(count: int) -> ShardOrder:
    return ShardOrder(np.array([count]), "none", ())


def rows(order: DrawnOrder) -> np.ndarray:
    return order.locate(np.arange(order.count)).rows


def excess(counts: np.ndarray, expected: np.ndarray) -> float:
    freedom = len(counts) - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


def test_all_are_equally_likely_without_weights() -> None:
    counts = np.bincount(rows(DrawnOrder(plain(50), 100_000, (1, 2), None, True)), minlength=50)
    assert abs(excess(counts, np.full(50, 2000.0))) < 5


def test_each_comes_as_often_as_its_weight_says() -> None:
    weights = np.array([1.0, 0.0, 5.0, 0.25, 10.0, 3.0, 0.0])
    counts = np.bincount(rows(DrawnOrder(plain(7), 100_000, (1, 2), weights, True)), minlength=7)
    having = weights > 0
    assert not counts[~having].any()
    assert abs(excess(counts[having], 100_000 * weights[having] / weights.sum())) < 5


def test_draws_that_follow_one_another_are_independent() -> None:
    for weights in (None, np.array([1.0, 2.0, 3.0, 4.0])):
        found = rows(DrawnOrder(plain(4), 80_000, (3,), weights, True))
        likely = np.full(4, 0.25) if weights is None else weights / weights.sum()
        pairs = np.bincount(found[:-1] * 4 + found[1:], minlength=16)
        assert abs(excess(pairs, 79_999 * np.outer(likely, likely).ravel())) < 5


def test_without_replacement_each_comes_once() -> None:
    for count in (0, 1, 700, 1000):
        for weights in (None, np.linspace(0.1, 9, 1000)):
            found = rows(DrawnOrder(plain(1000), count, (1,), weights, False))
            assert len(found) == len(set(found.tolist())) == count


@pytest.mark.slow
def test_who_is_drawn_first_and_second_without_replacement_follows_the_weights() -> None:
    weights = np.array([1.0, 2.0, 3.0, 6.0])
    pairs = np.zeros((4, 4))
    rounds = 12_000
    for key in range(rounds):
        first, second = chosen_by_weight(weights, 2, key)
        pairs[first, second] += 1
    likely = weights / weights.sum()
    expected = rounds * likely[:, None] * likely[None, :] / (1 - likely[:, None])
    apart = ~np.eye(4, dtype=bool)
    assert not pairs[~apart].any()
    assert abs(excess(pairs[apart], expected[apart])) < 5


@given(
    inner=st.integers(1, 60),
    count=st.integers(0, 60),
    weighted=st.booleans(),
    replacement=st.booleans(),
    data=st.data(),
)
def test_any_part_is_that_part_of_the_whole(
    inner: int, count: int, weighted: bool, replacement: bool, data: st.DataObject
) -> None:
    count = count if replacement else min(count, inner)
    weights = np.arange(1.0, inner + 1) if weighted else None
    make = lambda: DrawnOrder(plain(inner), count, (7, 1), weights, replacement)
    whole = rows(make()).tolist()
    positions = data.draw(st.lists(st.integers(0, count - 1))) if count else []
    assert make().locate(np.array(positions, np.int64)).rows.tolist() == [whole[p] for p in positions]


def test_other_epochs_draw_others() -> None:
    for weights in (None, np.ones(30)):
        for replacement in (True, False):
            drawn = {tuple(rows(DrawnOrder(plain(30), 30, (1, k), weights, replacement)).tolist()) for k in range(50)}
            assert len(drawn) == 50


def test_drawn_positions_are_those_of_the_other_order() -> None:
    inner = ShardOrder(np.array([30, 4, 16]), "windows", (5, 5), Windows(4, 3))
    order = DrawnOrder(inner, 50, (2,), None, False)
    shards, found = order.locate(np.arange(50))
    assert sorted(zip(shards.tolist(), found.tolist(), strict=True)) == [
        (shard, row) for shard, size in enumerate((30, 4, 16)) for row in range(size)
    ]
    assert order.window_end(0) > 0
    assert order.lanes == 1


def test_a_hundred_times_as_many_as_there_are_can_be_drawn_with_replacement() -> None:
    assert set(rows(DrawnOrder(plain(3), 300, (0,), None, True)).tolist()) == {0, 1, 2}


@pytest.mark.parametrize(
    ("count", "weights", "replacement", "message"),
    [
        (-1, None, True, "-1 samples"),
        (5, None, False, "5 samples cannot be drawn of 4"),
        (2, [1, 2, 3], True, r"shape \(3,\): there must be one for each of 4"),
        (2, [[1, 2, 3, 4]], True, r"shape \(1, 4\)"),
        (2, [1, -2, 3, 4], True, r"weights\[1\] is -2.0"),
        (2, [1, 2, math.nan, 4], True, r"weights\[2\] is nan"),
        (2, [1, 2, 3, math.inf], False, r"weights\[3\] is inf"),
        (2, [0, 0, 0, 0], True, "all weights are 0"),
        (3, [1, 0, 0, 4], False, "3 samples cannot be drawn of 2 that have a weight"),
    ],
)
def test_what_cannot_be_drawn_is_an_error(
    count: int, weights: list[float] | None, replacement: bool, message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        DrawnOrder(plain(4), count, (0,), None if weights is None else np.array(weights, np.float64), replacement)


def test_nothing_can_be_drawn_of_nothing() -> None:
    assert rows(DrawnOrder(plain(0), 0, (0,), None, True)).tolist() == []
    with pytest.raises(OptionError, match="1 samples cannot be drawn of 0"):
        DrawnOrder(plain(0), 1, (0,), None, True)


def test_weights_of_any_magnitude_are_drawn_by() -> None:
    for scale in (1e-300, 1e300):
        weights = np.array([1.0, 0.5, 0.0]) * scale
        assert set(rows(DrawnOrder(plain(3), 500, (0,), weights, True)).tolist()) == {0, 1}
        assert sorted(rows(DrawnOrder(plain(3), 2, (0,), weights, False)).tolist()) == [0, 1]
    assert sorted(chosen_by_weight(np.array([5e-324, 1.0]), 2, 1).tolist()) == [0, 1]


@given(st.integers(1, 2**53))
def test_our_logarithm_is_the_logarithm(numerator: int) -> None:
    wanted = -math.log(numerator / 2**53)
    assert math.isclose(minus_log(np.array([numerator], np.uint64))[0], wanted, rel_tol=1e-15, abs_tol=1e-30)


@given(x=st.integers(0, 2**64 - 1), n=st.integers(1, 2**62))
def test_numbers_below_a_bound_are_the_high_half_of_the_product(x: int, n: int) -> None:
    assert below(np.array([x], np.uint64), n).tolist() == [x * n >> 64]
