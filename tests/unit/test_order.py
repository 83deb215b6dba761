"""The order of an epoch is a permutation that any part can be had of, and looks random."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.plan import draw, permutation, sample_seed, window_order

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


def test_neighbours_are_as_far_apart_as_at_random() -> None:
    n = 10_000
    correlations = []
    for key in range(200):
        order = whole(n, draw(key)).astype(float)
        correlations.append(np.corrcoef(order[:-1], order[1:])[0, 1])
    # Of a random permutation the serial correlation has mean -1/n and standard deviation 1/sqrt(n).
    scaled = np.array(correlations) * np.sqrt(n)
    assert abs(scaled.mean()) < 4 / np.sqrt(len(scaled))
    assert 0.8 < scaled.std() < 1.2


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


def test_the_order_never_changes() -> None:
    assert whole(10, 0).tolist() == GOLDEN_10
    assert permutation(np.arange(5), 1_000_000, draw("keys", 17, 3, 0)).tolist() == GOLDEN_MILLION
    assert draw("keys", 0, 0, 0) == GOLDEN_DRAW
    assert sample_seed(17, 3) == GOLDEN_SEED
    assert window_order(8, 1, 2, 3).tolist() == GOLDEN_WINDOW


GOLDEN_10 = [7, 9, 8, 3, 0, 1, 6, 5, 2, 4]
GOLDEN_MILLION = [678693, 116711, 695802, 846492, 72074]
GOLDEN_DRAW = 15551186354059627027
GOLDEN_SEED = 758843665692670901
GOLDEN_WINDOW = [3, 7, 1, 0, 5, 4, 2, 6]
