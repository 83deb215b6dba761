"""Planned packing: each token once, as plain Python packs them."""

from __future__ import annotations

import itertools
from collections import Counter
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.order.packing import BestFitPlan, Bins, ConcatPlan, PackPlan

LENGTHS = st.one_of(
    st.lists(st.integers(0, 30), max_size=40),
    st.lists(st.sampled_from([0, 1, 4, 7]), max_size=60),
    st.lists(st.integers(0, 300), max_size=8),
)
SIZES = st.integers(1, 24)
Piece = tuple[int, int, int]


def best_fit(lengths: list[int], size: int, key: int = 5) -> BestFitPlan:
    some = np.array(lengths, np.int64)
    return BestFitPlan(some, size, Bins(some, size), key)


def all_of(plan: PackPlan) -> list[list[Piece]]:
    found = (plan.pieces(sequence) for sequence in range(plan.count))
    return [list(zip(*(some.tolist() for some in pieces), strict=True)) for pieces in found]


def patterns(lengths: list[int], size: int, key: int = 5) -> list[tuple[int, ...]]:
    return [tuple(stop - start for _, start, stop in some) for some in all_of(best_fit(lengths, size, key))]


def cut(lengths: list[int], size: int) -> list[Piece]:
    """Documents in pieces of `size` tokens, and what is left of each."""
    return [
        (document, start, min(start + size, length))
        for document, length in enumerate(lengths)
        for start in range(0, length, size)
    ]


def by_hand(lengths: list[int], size: int) -> list[int]:
    """Best fit, the longest first: the room that is left in each sequence."""
    rooms: list[int] = []
    for length in sorted((stop - start for _, start, stop in cut(lengths, size)), reverse=True):
        fitting = [(room, k) for k, room in enumerate(rooms) if room >= length]
        if fitting:
            rooms[min(fitting)[1]] -= length
        else:
            rooms.append(size - length)
    return sorted(rooms)


@given(lengths=LENGTHS, size=SIZES)
def test_concatenated_documents_are_cut_at_the_ends_of_sequences(lengths: list[int], size: int) -> None:
    tokens = [(document, at) for document, length in enumerate(lengths) for at in range(length)]
    plan = ConcatPlan(np.array(lengths, np.int64), size)
    found = [[(one, at) for one, start, stop in some for at in range(start, stop)] for some in all_of(plan)]
    assert found == [tokens[at : at + size] for at in range(0, len(tokens), size)]
    assert all(start < stop for some in all_of(plan) for _, start, stop in some)


@pytest.mark.slow
@given(lengths=LENGTHS, size=SIZES)
def test_best_fit_is_that_of_documents_one_by_one(lengths: list[int], size: int) -> None:
    found = all_of(best_fit(lengths, size))
    assert sorted(piece for some in found for piece in some) == cut(lengths, size)
    assert sorted(size - sum(stop - start for _, start, stop in some) for some in found) == by_hand(lengths, size)


@given(lengths=LENGTHS, size=SIZES, random=st.randoms(use_true_random=False))
def test_order_of_documents_changes_no_sequence(lengths: list[int], size: int, random: Random) -> None:
    before, shuffled = patterns(lengths, size), list(lengths)
    random.shuffle(shuffled)
    assert patterns(shuffled, size) == before


@given(lengths=LENGTHS, size=SIZES)
def test_documents_of_a_length_come_in_their_order(lengths: list[int], size: int) -> None:
    come: dict[int, list[Piece]] = {}
    for piece in itertools.chain(*all_of(best_fit(lengths, size))):
        come.setdefault(piece[2] - piece[1], []).append(piece)
    assert all(pieces == sorted(pieces) for pieces in come.values())


def test_another_key_gives_the_same_sequences_in_another_order() -> None:
    lengths = np.random.default_rng(3).integers(1, 40, 300).tolist()
    one, other = (patterns(lengths, 40, key) for key in (1, 2))
    assert one != other
    assert Counter(one) == Counter(other)


@pytest.mark.parametrize(("documents", "most"), [(2_000, 0.005), (50_000, 0.0005)])
@pytest.mark.parametrize("sigma", [0.8, 1.0, 1.2])
def test_little_is_filled_up_of_documents_as_they_are_on_the_web(documents: int, most: float, sigma: float) -> None:
    drawn = np.random.default_rng(0).lognormal(np.log(600), sigma, documents)
    lengths = np.maximum(drawn, 1).astype(np.int64)
    count = Bins(lengths, 4096).count
    assert 0 <= 1 - lengths.sum() / (count * 4096) <= most


@settings(max_examples=20, deadline=None)
@given(size=st.sampled_from([65_535, 65_536, 100_000]), seed=st.integers(0, 99))
def test_lengths_beyond_16_bits_are_distinct(size: int, seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(0, 3 * size, 30).tolist()
    found = all_of(best_fit(lengths, size))
    assert sorted(piece for some in found for piece in some) == cut(lengths, size)
    assert all(sum(stop - start for _, start, stop in some) <= size for some in found)
