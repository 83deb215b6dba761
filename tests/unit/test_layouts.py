"""Concatenated and interleaved orders equal joined lists, at any positions of an epoch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.order import Order, Passes, ShardOrder
from headrace.order.combined import ConcatOrder, InterleaveLayout, InterleaveOrder, ZipOrder
from headrace.order.orders import ENDLESS

SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=6)
Pairs = list[tuple[int, int]]


def plain(size: int) -> Order:
    return ShardOrder(np.array([size]), "none", ())


def concat(sizes: Sequence[int]) -> ConcatOrder:
    return ConcatOrder([plain(size) for size in sizes], range(len(sizes)))


def interleave(sizes: Sequence[int], block: int) -> InterleaveOrder:
    return InterleaveOrder([plain(size) for size in sizes], InterleaveLayout(sizes, block), range(len(sizes)), 10)


def numbered(sizes: Sequence[int]) -> list[Pairs]:
    return [[(k, n) for n in range(size)] for k, size in enumerate(sizes)]


def by_hand(lists: list[Pairs], block: int) -> Pairs:
    starts = range(0, max(map(len, lists)), block)
    return [pair for start in starts for one in lists for pair in one[start : start + block]]


def places(order: Order, positions: Sequence[int]) -> Pairs:
    shards, rows = order.locate(np.asarray(positions, np.int64))
    return list(zip(shards.tolist(), rows.tolist(), strict=True))


@settings(max_examples=200)
@given(SIZES, st.integers(1, 12), st.data())
def test_concat_and_interleave_equal_joined_lists(sizes: list[int], block: int, data: st.DataObject) -> None:
    joined = list(itertools.chain(*numbered(sizes)))
    for order, wanted in ((concat(sizes), joined), (interleave(sizes, block), by_hand(numbered(sizes), block))):
        assert order.count == len(wanted)
        assert places(order, range(order.count)) == wanted
        some = data.draw(st.lists(st.sampled_from(range(len(wanted))), max_size=30)) if wanted else []
        assert places(order, some) == [wanted[position] for position in some]


@given(SIZES, st.integers(1, 12))
def test_window_of_each_position_ends_after_it(sizes: list[int], block: int) -> None:
    for order in (concat(sizes), interleave(sizes, block)):
        ends = [order.window_end(position) for position in range(order.count)]
        assert all(end > position for position, end in enumerate(ends))
        assert ends == sorted(ends)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.data())
def test_number_of_a_tuple_is_made_of_its_parts(radices: list[int], data: st.DataObject) -> None:
    digits = [data.draw(st.lists(st.integers(0, radix - 1), min_size=5, max_size=5)) for radix in radices]
    given_by = [(radix, lambda at, some=some: np.array(some)[at]) for radix, some in zip(radices, digits, strict=True)]
    order = ZipOrder(5, given_by)
    numbers = [number for _, number in places(order, range(5))]
    assert numbers == [np.ravel_multi_index(one, radices) for one in zip(*digits, strict=True)]


def test_windows_of_a_concat_are_those_of_its_inputs() -> None:
    sizes = [20_000, 5, 40_000]
    order = concat(sizes)
    assert [order.window_end(at) for at in (0, 16_384, 20_000, 20_005)] == [16_384, 20_000, 20_005, 20_005 + 16_384]


@pytest.mark.parametrize("block", [1, 3])
def test_endless_inputs_continue_after_the_others(block: int) -> None:
    def again(size: int) -> Order:
        return Passes(lambda number: plain(size), None)

    inputs = [plain(4), again(5), plain(0), again(2)]
    sizes = [order.count for order in inputs]
    order = InterleaveOrder(inputs, InterleaveLayout(sizes, block), range(4), 10)
    assert order.count == ENDLESS
    lists = [[(k, n % size) for n in range(count)] for k, size, count in ((0, 4, 4), (1, 5, 90), (3, 2, 90))]
    assert places(order, range(120)) == by_hand(lists, block)[:120]
    far = ConcatOrder([plain(4), again(5)], range(2))
    assert far.count == ENDLESS
    assert places(far, [3, 4, 2**61 + 4]) == [(0, 3), (1, 0), (1, 2**61 % 5)]
