"""Permutations by key: any part can be had of them, and they look random."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.order import draw, permutation, window_order
from headrace.order.permutation import _narrow_network, _round_keys, _wide_network, _words, permutations

KEYS = st.integers(0, 2**64 - 1)


def whole(n: int, key: int) -> np.ndarray:
    return permutation(np.arange(n), n, key)


def test_every_small_size_is_permuted() -> None:
    for n in range(1, 301):
        for key in (0, 1, 2**64 - 1):
            assert sorted(whole(n, key).tolist()) == list(range(n)), (n, key)


@pytest.mark.parametrize("n", [1023, 1024, 1025, 65_536, 99_991, 1_000_003])
def test_large_sizes_are_permuted(n: int) -> None:
    seen = np.zeros(n, bool)
    seen[whole(n, 17)] = True
    assert seen.all()


@given(n=st.integers(1, 5000), key=KEYS, data=st.data())
def test_any_part_equals_that_part_of_the_whole(n: int, key: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, n))
    stop = data.draw(st.integers(start, n))
    assert permutation(np.arange(start, stop), n, key).tolist() == whole(n, key)[start:stop].tolist()


@given(n=st.integers(1, 10**15), key=KEYS)
def test_positions_of_huge_epochs_stay_in_range_and_apart(n: int, key: int) -> None:
    positions = np.unique(np.linspace(0, n - 1, 50).astype(np.int64))
    sent = permutation(positions, n, key)
    assert ((sent >= 0) & (sent < n)).all()
    assert len(np.unique(sent)) == len(positions)


def test_the_argument_is_left_alone() -> None:
    positions = np.arange(100)
    permutation(positions, 100, 3)
    assert positions.tolist() == list(range(100))


def test_nothing_is_permuted_to_nothing() -> None:
    assert permutation(np.arange(0), 0, 1).tolist() == []
    assert window_order(0, 1, 2, 3).tolist() == []


def test_another_key_is_another_order() -> None:
    orders = {tuple(whole(50, draw("keys", seed, epoch)).tolist()) for seed in range(20) for epoch in range(20)}
    assert len(orders) == 400


def test_windows_of_an_epoch_have_orders_of_their_own() -> None:
    orders = {tuple(window_order(64, s, e, w).tolist()) for s in range(4) for e in range(4) for w in range(4)}
    assert len(orders) == 64


@pytest.mark.parametrize("n", [2, 50, 4095, 4096, 4097, 10_000, 2**32 - 1, 2**32, 2**32 + 1, 10**13])
def test_keys_of_their_own_give_what_each_key_gives(n: int) -> None:
    keys = np.array([3, 3, 9, 4, 9, 2**64 - 1], np.uint64)
    positions = np.array([0, 1, n - 1, n // 2, 0, 1]) % n
    wanted = [int(permutation(positions[k : k + 1], n, int(key))[0]) for k, key in enumerate(keys)]
    assert permutations(positions, n, keys).tolist() == wanted


def test_keys_of_their_own_give_the_same_for_many_as_for_few() -> None:
    random = np.random.default_rng(0)
    for n in (7, 4096, 5000):
        keys, positions = random.integers(0, 200, 40_000).astype(np.uint64), random.integers(0, n, 40_000)
        few = np.concatenate([permutations(positions[k : k + 100], n, keys[k : k + 100]) for k in range(0, 2000, 100)])
        assert permutations(positions, n, keys)[:2000].tolist() == few.tolist()


@given(n=st.integers(2, 2**32), key=KEYS, data=st.data())
def test_narrow_words_give_what_wide_ones_give(n: int, key: int, data: st.DataObject) -> None:
    positions = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20)), np.int64)
    b = math.isqrt(n - 1) + 1
    a, keys = -(-n // b), list(_round_keys(_words(key))[:, 0])
    assert _narrow_network(positions, a, b, keys).tolist() == _wide_network(positions, a, b, keys).tolist()


def test_numpys_numbers_draw_the_same_as_pythons() -> None:
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


def excess(counts: np.ndarray, expected: float, freedom: int) -> float:
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


def test_every_place_is_as_likely_as_any_other() -> None:
    n, rounds = 50, 4000
    counts = np.zeros((n, n))
    for key in range(rounds):
        counts[np.arange(n), whole(n, draw("likely", key))] += 1
    expected = rounds / n
    chi = ((counts - expected) ** 2 / expected).sum()
    freedom = (n - 1) ** 2
    assert abs(chi - freedom) < 5 * np.sqrt(2 * freedom)


def test_where_the_second_goes_does_not_follow_from_where_the_first_goes() -> None:
    n, parts, rounds = 800, 8, 8000
    counts = np.zeros((parts, parts))
    for key in range(rounds):
        first, second = permutation(np.arange(2), n, draw("pairs", key)) * parts // n
        counts[first, second] += 1
    expected = rounds / parts**2
    chi = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi - parts**2) < 5 * np.sqrt(2 * parts**2)
