"""The order of mixtures by tokens whose lengths are known: shares hold to half a document, wherever one looks."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import OptionError
from headrace.order import Passes, ShardOrder
from headrace.order.mixture import ChangingShares, ConstantShares, Shares, TokenOrder
from headrace.order.orders import Places
from headrace.types import Ints


def lengths_of(lengths: Ints) -> Callable[[Places], Ints]:
    return lambda places: lengths[places.rows]


def order_of(lengths: list[Ints], shares: Shares, window: int = 1000) -> TokenOrder:
    inputs = [
        Passes(lambda turn, k=k, some=some: ShardOrder(np.array([len(some)]), "within", (k, turn)), None)
        for k, some in enumerate(lengths)
    ]
    labels = [f"source {k}" for k in range(len(lengths))]
    counts = list(map(len, lengths))
    return TokenOrder(inputs, counts, list(map(lengths_of, lengths)), shares, labels, None, window)


def come(order: TokenOrder, lengths: list[Ints], count: int) -> tuple[Ints, Ints, Ints]:
    """(the inputs of the first documents, which one of each, their lengths)."""
    positions = np.arange(count)
    inputs, turns = order.turns(positions)
    rows = order.locate(positions).rows
    return inputs, turns, np.array([lengths[k][row] for k, row in zip(inputs.tolist(), rows.tolist(), strict=True)])


documents = st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(documents, min_size=1, max_size=4),
    weights=st.lists(st.integers(1, 9), min_size=4, max_size=4),
    step=st.integers(1, 500),
    data=st.data(),
)
def test_shares_hold_to_half_a_document_and_any_position_is_found_by_itself(
    lengths: list[list[int]], weights: list[int], step: int, data: st.DataObject
) -> None:
    known, weights = [np.array(some) for some in lengths], weights[: len(lengths)]
    count, longest = 150, max(map(max, lengths))
    order = order_of(known, ConstantShares(weights, step))
    inputs, turns, tokens = come(order, known, count)
    drawn, taken, whole = [0] * len(known), [0] * len(known), sum(weights)
    for k, turn, length in zip(inputs.tolist(), turns.tolist(), tokens.tolist(), strict=True):
        assert turn == taken[k]  # each input keeps its order, and none of its documents is lost
        taken[k] += 1
        drawn[k] += length
        times = [Fraction(some * whole, weight) for some, weight in zip(drawn, weights, strict=True)]
        within = Fraction(longest * whole, 2) / min(weights)
        assert max(times) - min(times) <= 2 * within  # from half a document less to half a document more
    some = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=20))
    fresh = order_of(known, ConstantShares(weights, step))
    for found, expected in zip(fresh.turns(np.array(some)), (inputs, turns), strict=True):
        assert found.tolist() == expected[some].tolist()
    alone = [order_of(known, ConstantShares(weights, step)).turns(np.array([at])) for at in some[:3]]
    assert [(int(k[0]), int(turn[0])) for k, turn in alone] == [(int(inputs[at]), int(turns[at])) for at in some[:3]]


def test_what_comes_does_not_follow_from_the_step_that_constant_shares_are_planned_in() -> None:
    random = np.random.default_rng(1)
    lengths = [random.integers(1, 900, 70), random.integers(1, 90, 300)]
    orders = [come(order_of(lengths, ConstantShares([3, 1], step)), lengths, 2000) for step in (64, 1000, 2**20)]
    assert all((one[0] == orders[0][0]).all() and (one[1] == orders[0][1]).all() for one in orders)


def test_shares_of_ten_million_tokens_are_exact_to_a_document() -> None:
    random = np.random.default_rng(0)
    lengths = [random.lognormal(np.log(median), 1, 4000).astype(np.int64) for median in (600, 200, 3000, 1000)]
    weights = [50, 30, 15, 5]
    inputs, _, tokens = come(order_of(lengths, ConstantShares(weights, 2**20)), lengths, 24_000)
    whole = tokens.sum()
    assert whole > 10_000_000
    for k, weight in enumerate(weights):
        assert abs(tokens[inputs == k].sum() / whole - weight / 100) < 0.001


def test_shares_that_change_hold_in_each_step_and_are_asked_for_no_later_one() -> None:
    random, asked = np.random.default_rng(2), set()

    def weights(step: int) -> list[float]:
        asked.add(step)
        return [1, 0] if step % 3 == 0 else [1, step % 3]

    lengths = [random.integers(1, 40, 50), random.integers(1, 90, 90)]
    order = order_of(lengths, ChangingShares(weights, 2, 5000))
    inputs, turns, tokens = come(order, lengths, 6000)
    ends = np.cumsum(tokens)
    last = int(ends[-1]) // 5000
    assert max(asked) <= last + 2
    for step in range(last - 1):
        inside = np.flatnonzero((ends > step * 5000 + 90) & (ends <= (step + 1) * 5000 - 90))
        share = tokens[inside][inputs[inside] == 1].sum() / tokens[inside].sum()
        assert abs(share - [0, 1 / 2, 2 / 3][step % 3]) < 0.03, step
    again = order_of(lengths, ChangingShares(weights, 2, 5000)).turns(np.array([5000, 17]))
    assert [one.tolist() for one in again] == [inputs[[5000, 17]].tolist(), turns[[5000, 17]].tolist()]


def test_an_input_without_tokens_that_is_to_come_is_an_error_and_with_weight_0_it_never_comes() -> None:
    lengths = [np.array([3, 4]), np.array([0, 0])]
    with pytest.raises(OptionError, match="source 1 has no tokens"):
        order_of(lengths, ConstantShares([1, 1], 10))
    assert not order_of(lengths, ConstantShares([1, 0], 10)).turns(np.arange(50))[0].any()
    with pytest.raises(OptionError, match="source 1 has no tokens"):
        order_of(lengths, ChangingShares(lambda step: [1, step], 2, 10)).turns(np.arange(50))


def test_passes_with_other_documents_are_an_error() -> None:
    inputs = [Passes(lambda turn: ShardOrder(np.array([2]), "none", (turn,)), None)]
    tokens = iter([np.array([3, 4]), np.array([3, 5])])
    order = TokenOrder(inputs, [2], [lambda _: next(tokens)], ConstantShares([1], 3), ["source 0"], None, 10)
    with pytest.raises(OptionError, match="source 0 has 8 tokens in pass 1 and 7 in the first one"):
        order.turns(np.arange(4))
