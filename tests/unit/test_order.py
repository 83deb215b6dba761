"""Permutations by key and samples drawn by weight: any part equals that of the whole, and they look random."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import OptionError
from headrace.order import ShardOrder, Windows, draw, permutation
from headrace.order.permutation import below, permutations
from headrace.order.sampling import DrawnOrder, chosen_by_weight, minus_log

KEYS = st.integers(0, 2**64 - 1)


def whole(n: int, key: int) -> np.ndarray:
    return permutation(np.arange(n), n, key)


def test_every_size_is_permuted() -> None:
    for n in (*range(301), 1023, 1024, 1025, 65_536, 99_991, 1_000_003):
        for key in (0, 1, 2**64 - 1):
            assert np.array_equal(np.sort(whole(n, key)), np.arange(n)), (n, key)


@given(n=st.integers(1, 5000), key=KEYS, data=st.data())
def test_any_part_equals_that_part_of_the_whole(n: int, key: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, n))
    positions = np.arange(start, data.draw(st.integers(start, n)))
    before = positions.copy()
    assert permutation(positions, n, key).tolist() == whole(n, key)[before].tolist()
    assert np.array_equal(positions, before)


@pytest.mark.parametrize("n", [2, 50, 4095, 4096, 4097, 10_000, 2**32 - 1, 2**32, 2**32 + 1, 10**13])
def test_keys_of_their_own_give_what_each_key_gives(n: int) -> None:
    keys = np.array([3, 3, 9, 4, 9, 2**64 - 1], np.uint64)
    positions = np.array([0, 1, n - 1, n // 2, 0, 1]) % n
    wanted = [int(permutation(positions[k : k + 1], n, int(key))[0]) for k, key in enumerate(keys)]
    assert permutations(positions, n, keys).tolist() == wanted


def test_keys_give_the_same_for_many_as_for_few_and_in_any_integer_type() -> None:
    random = np.random.default_rng(0)
    for n in (7, 4096, 5000):
        keys, positions = random.integers(0, 200, 40_000).astype(np.uint64), random.integers(0, n, 40_000)
        few = np.concatenate([permutations(positions[k : k + 100], n, keys[k : k + 100]) for k in range(0, 2000, 100)])
        assert permutations(positions, n, keys)[:2000].tolist() == few.tolist()
    assert draw("keys", np.int64(17), np.uint8(3)) == draw("keys", 17, 3)


def test_all_orders_of_four_are_equally_likely_when_keys_differ_by_one() -> None:
    rounds = 24_000
    counts = dict.fromkeys(itertools.permutations(range(4)), 0)
    for key in range(rounds):
        counts[tuple(whole(4, key).tolist())] += 1
    assert len(counts) == 24
    assert abs(excess(np.array(list(counts.values())), rounds / 24, 23)) < 5


@pytest.mark.slow
@pytest.mark.parametrize("n", [300, 4096, 4097, 5000, 10**6])
def test_orders_of_keys_that_differ_by_one_are_as_random_as_a_shuffle(n: int) -> None:
    rounds = 12 if n == 10**6 else 300
    found = np.array([measures(whole(n, key)) for key in range(rounds)])
    # Each measure has mean 0 and deviation 1 for a random permutation, and its mean over rounds 1/sqrt(rounds).
    assert (np.abs(found.mean(axis=0)) * np.sqrt(rounds) < 5).all(), found.mean(axis=0)
    assert (found.std(axis=0) < 1 + 4 / np.sqrt(rounds)).all(), found.std(axis=0)
    assert (found.std(axis=0) > 1 - 4 / np.sqrt(rounds) - 0.1).all(), found.std(axis=0)


@pytest.mark.parametrize("step", [1, 0x9E3779B97F4A7C15, 2**32, 2**57])
def test_orders_of_keys_that_are_alike_have_nothing_to_do_with_one_another(step: int) -> None:
    for n in (1000, 10_000):
        orders = [whole(n, key * step % 2**64) for key in range(100)]
        alike = [np.corrcoef(one, other)[0, 1] * np.sqrt(n) for one, other in itertools.pairwise(orders)]
        assert abs(np.mean(alike)) * np.sqrt(len(alike)) < 5
        assert np.std(alike) < 1.4
        assert np.mean([(one == other).sum() for one, other in itertools.pairwise(orders)]) < 1.6


def excess(counts: np.ndarray, expected: float | np.ndarray, freedom: int) -> float:
    """Chi-squared of counts, in deviations from the mean of random ones."""
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


def measures(order: np.ndarray) -> list[float]:
    """Serial correlations, chi-squared of differences, of pairs and of places, and fixed points."""
    n, parts = len(order), 8
    across = math.isqrt(n) + 1  # neighbours in the other half of the network
    sent = order.astype(float)
    part = order * parts // n
    found = [np.corrcoef(sent, np.roll(sent, -lag))[0, 1] * np.sqrt(n) for lag in (1, 2, across - 1, across)]
    for lag in (1, across):
        far = np.bincount((np.roll(order, -lag) - order) % n * 16 // n, minlength=16)
        found.append(excess(far, n / 16, 15))
        pairs = np.bincount(part * parts + np.roll(part, -lag), minlength=parts**2)
        found.append(excess(pairs, n / parts**2, (parts - 1) ** 2))
    places = np.bincount(np.arange(n) * parts // n * parts + part, minlength=parts**2)
    found.append(excess(places, n / parts**2, (parts - 1) ** 2))
    found.append(float((order == np.arange(n)).sum() - 1))
    return found


def plain(count: int) -> ShardOrder:
    return ShardOrder(np.array([count]), "none", ())


def rows(order: DrawnOrder) -> np.ndarray:
    return order.locate(np.arange(order.count)).rows


def test_each_is_drawn_in_proportion_to_its_weight() -> None:
    weights = np.array([1.0, 0.0, 5.0, 0.25, 10.0, 3.0, 0.0])
    counts = np.bincount(rows(DrawnOrder(plain(7), 100_000, (1, 2), weights, True)), minlength=7)
    having = weights > 0
    assert not counts[~having].any()
    assert abs(excess(counts[having], 100_000 * weights[having] / weights.sum(), 4)) < 5


def test_draws_that_follow_one_another_are_independent() -> None:
    for weights in (None, np.array([1.0, 2.0, 3.0, 4.0])):
        found = rows(DrawnOrder(plain(4), 80_000, (3,), weights, True))
        likely = np.full(4, 0.25) if weights is None else weights / weights.sum()
        pairs = np.bincount(found[:-1] * 4 + found[1:], minlength=16)
        assert abs(excess(pairs, 79_999 * np.outer(likely, likely).ravel(), 15)) < 5


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
    assert abs(excess(pairs[apart], expected[apart], 11)) < 5


def test_drawn_positions_are_those_of_the_other_order() -> None:
    inner = ShardOrder(np.array([30, 4, 16]), "windows", (5, 5), Windows(4, 3))
    order = DrawnOrder(inner, 50, (2,), None, False)
    shards, found = order.locate(np.arange(50))
    assert sorted(zip(shards.tolist(), found.tolist(), strict=True)) == [
        (shard, row) for shard, size in enumerate((30, 4, 16)) for row in range(size)
    ]
    assert order.window_end(0) > 0
    assert order.lanes == 1


@pytest.mark.parametrize(("count", "weights", "replacement", "message"), [
    (-1, None, True, "-1 samples"),
    (5, None, False, "5 samples cannot be drawn of 4"),
    (2, [1, 2, 3], True, r"shape \(3,\): there must be one for each of 4"),
    (2, [[1, 2, 3, 4]], True, r"shape \(1, 4\)"),
    (2, [1, -2, 3, 4], True, r"weights\[1\] is -2.0"),
    (2, [1, 2, math.nan, 4], True, r"weights\[2\] is nan"),
    (2, [1, 2, 3, math.inf], False, r"weights\[3\] is inf"),
    (2, [0, 0, 0, 0], True, "all weights are 0"),
    (3, [1, 0, 0, 4], False, "3 samples cannot be drawn of 2 that have a weight"),
])  # fmt: skip
def test_impossible_draw_is_an_error(count: int, weights: list[float] | None, replacement: bool, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        DrawnOrder(plain(4), count, (0,), None if weights is None else np.array(weights, np.float64), replacement)


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
