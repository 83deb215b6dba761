"""Promises of mixed orders: each sample in its turn, by its source's share, whatever part of an epoch is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
from builders.memory import peak_of
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import OptionError
from headrace.order import Order, Passes, ShardOrder, ShuffledOrder, Steps
from headrace.order.cursor import Cursor
from headrace.order.mixture import ChangingShares, ConstantShares, MixLayout, MixOrder, Until
from headrace.types import Ints

Weights = Sequence[float] | Callable[[int], Sequence[float]]

STEPS = st.sampled_from([1, 2, 7, 32, 1024])
# (sizes, step): each block of an epoch takes time, so that sources are small where steps are.
MIXES = STEPS.flatmap(
    lambda step: st.tuples(st.lists(st.integers(1, min(12 * step, 300)), min_size=1, max_size=6), st.just(step))
)


def blend(sizes: Sequence[int], weights: Weights, until: Until, step: int = 1024) -> MixLayout:
    if callable(weights):
        return MixLayout(sizes, ChangingShares(weights, len(sizes), step), until)
    return MixLayout(sizes, ConstantShares(weights, step), until)


def shuffled(size: int, source: int, turn: int) -> Order:
    return ShuffledOrder(ShardOrder(np.array([size]), "none", ()), (source, turn))


def mixed(
    sizes: Sequence[int], weights: Weights, until: Until = "first", step: int = 1024, key: tuple[int, ...] = (0, 0)
) -> MixOrder:
    sources = [Passes(partial(shuffled, size, k), None) for k, size in enumerate(sizes)]
    return MixOrder(sources, blend(sizes, weights, until, step), key, range(len(sizes)))


def counts(order: MixOrder, positions: Ints, sources: int) -> Ints:
    return np.bincount(order.turns(positions)[0], minlength=sources)


@settings(max_examples=40)
@given(MIXES, st.sampled_from(["first", "all"]))
def test_mixture_gives_each_sample_once_when_weights_are_the_sizes(mix: tuple[list[int], int], until: Until) -> None:
    sizes, step = mix
    order = mixed(sizes, sizes, until, step)
    places = order.locate(np.arange(order.count))
    wanted = {(source, row) for source, size in enumerate(sizes) for row in range(size)}
    assert order.count == sum(sizes)
    assert set(zip(places.shards.tolist(), places.rows.tolist(), strict=True)) == wanted


@settings(max_examples=40)
@given(MIXES, st.data())
def test_mixture_ends_before_a_sample_would_repeat_when_until_is_first(
    mix: tuple[list[int], int], data: st.DataObject
) -> None:
    sizes, step = mix
    weights = data.draw(st.lists(st.floats(0.05, 5), min_size=len(sizes), max_size=len(sizes)))
    order = mixed(sizes, weights, "first", step)
    came = counts(order, np.arange(order.count), len(sizes))
    assert (came <= sizes).all()
    assert (came == sizes).any()
    places = order.locate(np.arange(order.count))
    assert len(set(zip(places.shards.tolist(), places.rows.tolist(), strict=True))) == order.count


@pytest.mark.slow
@settings(max_examples=40)
@given(MIXES, st.data())
def test_mixture_gives_every_source_in_full_when_until_is_all(mix: tuple[list[int], int], data: st.DataObject) -> None:
    sizes, step = mix
    weights = data.draw(st.lists(st.floats(0.2, 5), min_size=len(sizes), max_size=len(sizes)))
    order = mixed(sizes, weights, "all", step)
    sources, turns = order.turns(np.arange(order.count))
    places = order.locate(np.arange(order.count))
    came = np.bincount(sources, minlength=len(sizes))
    assert (came >= sizes).all()
    for source, size in enumerate(sizes):
        mine = np.flatnonzero(sources == source)
        assert turns[mine].tolist() == list(range(came[source]))
        rows = places.rows[mine]
        for first in range(0, came[source] - size + 1, size):
            assert sorted(rows[first : first + size].tolist()) == list(range(size))
    assert any(came[k] == size for k, size in enumerate(sizes)), "it went on after the last source was used up"


def test_mixture_begins_a_source_again_in_another_order_when_it_is_used_up() -> None:
    order = mixed([50, 1000], [1, 1], "all")
    places = order.locate(np.arange(order.count))
    rows = places.rows[places.shards == 0]
    assert rows[:50].tolist() != rows[50:100].tolist()
    assert sorted(rows[50:100].tolist()) == list(range(50))


@settings(max_examples=40)
@given(st.lists(st.floats(1e-6, 1e3), min_size=2, max_size=6), st.sampled_from([16, 1024]), st.integers(0, 10**6))
def test_mixture_keeps_totals_within_a_sample_of_the_shares_when_blocks_end(
    weights: list[float], step: int, block: int
) -> None:
    mix = blend([10**9] * len(weights), weights, "forever", step)
    whole = sum(map(Fraction, weights))
    for weight, count in zip(weights, mix.before(block), strict=True):
        assert abs(count - block * step * Fraction(weight) / whole) < 1
    assert all(b >= a for a, b in zip(mix.before(block), mix.before(block + 1), strict=True))


@pytest.mark.parametrize("weights", [(0.7, 0.3), (5, 3, 2), (1, 1, 1, 1)])
@pytest.mark.parametrize("batch", [20, 64, 250, 1000])
def test_mixture_has_nearly_its_shares_in_every_batch_when_weights_stay(weights: tuple[float, ...], batch: int) -> None:
    order = mixed([10**6] * len(weights), weights, "forever")
    sources = order.turns(np.arange(500 * batch))[0].reshape(500, batch)
    for source, weight in enumerate(weights):
        share = batch * weight / sum(weights)
        assert abs((sources == source).sum(axis=1) - share).max() <= 2.5


def test_mixture_is_not_a_fixed_pattern_when_blocks_follow_one_another() -> None:
    sources = mixed([10**6, 10**6], [1, 1], "forever").turns(np.arange(64 * 1024))[0].reshape(64, 1024)
    assert len({row.tobytes() for row in sources}) == 64
    share_of_first = sources[:, 0].mean()
    assert 0.2 < share_of_first < 0.8


@settings(max_examples=40)
@given(MIXES, st.data())
def test_mixture_gives_the_same_for_a_part_as_for_the_whole_when_asked_anyhow(
    mix: tuple[list[int], int], data: st.DataObject
) -> None:
    sizes, step = mix
    whole = mixed(sizes, sizes, "first", step)
    places = whole.locate(np.arange(whole.count))
    positions = np.array(data.draw(st.lists(st.integers(0, whole.count - 1), max_size=50)), np.int64)
    part = mixed(sizes, sizes, "first", step).locate(positions)
    assert part.shards.tolist() == places.shards[positions].tolist()
    assert part.rows.tolist() == places.rows[positions].tolist()


def test_mixture_has_another_order_when_seed_or_epoch_are_others() -> None:
    orders = [mixed([400, 200], [2, 1], key=key).turns(np.arange(600))[0].tobytes() for key in [(0, 0), (0, 1), (1, 0)]]
    assert len(set(orders)) == 3


def test_mixture_has_as_many_samples_in_every_epoch_when_it_ends_by_itself() -> None:
    assert len({mixed([37, 90, 11], [0.5, 0.2, 0.3], key=(0, epoch)).count for epoch in range(20)}) == 1


def curriculum(step: int) -> Sequence[float]:
    return [1, 0] if step < 3 else [1, step - 2]


def test_mixture_follows_the_weights_of_each_step_when_they_are_a_function() -> None:
    order = mixed([10**6, 10**6], curriculum, "forever", step=100)
    came = [counts(order, np.arange(100 * step, 100 * step + 100), 2).tolist() for step in range(6)]
    assert came[:3] == [[100, 0]] * 3
    assert all(abs(b - 100 * share) <= 1 for (_, b), share in zip(came[3:], [1 / 2, 2 / 3, 3 / 4], strict=True))


@settings(max_examples=40)
@given(
    st.lists(st.lists(st.floats(0, 3), min_size=3, max_size=3).filter(any), min_size=1, max_size=8),
    STEPS,
    st.sampled_from(["first", "forever"]),
)
def test_mixture_keeps_totals_near_the_summed_shares_when_weights_change(
    rows: list[list[float]], step: int, until: Until
) -> None:
    sizes, weights = [40, 60, 50], lambda number: rows[number % len(rows)]
    order = mixed(sizes, weights, until, step)
    end = min(order.count, 120)
    sources, turns = order.turns(np.arange(end))
    for source in range(3):
        assert turns[sources == source].tolist() == list(range(int((sources == source).sum())))
    mix, due = blend(sizes, weights, "forever", step), np.zeros(3)
    for number in range(end // step):
        assert (abs(np.array(mix.before(number)) - due) < 1 + 1e-6).all()
        due += step * np.array(weights(number)) / sum(weights(number))
    if until == "first":
        assert order.count <= sum(sizes)
        assert (np.bincount(order.turns(np.arange(order.count))[0], minlength=3) == sizes).any()


def test_mixture_asks_for_the_weights_of_each_step_once_and_of_one_beyond_the_end_when_it_ends() -> None:
    asked: list[int] = []

    def weights(step: int) -> Sequence[float]:
        asked.append(step)
        return [3, 1]

    order = mixed([300, 1000], weights, "first", step=40)
    order.locate(np.arange(order.count))
    assert asked == list(range(11))  # 400 samples: the first repeated one would be in the next step


def test_mixture_gives_every_rank_its_part_when_steps_are_shared() -> None:
    order = mixed([500, 300, 200], [5, 3, 2])
    whole = order.turns(np.arange(order.count))
    parts = []
    for rank in range(3):
        positions = Steps(Cursor.at(), order.count, 30, "short", rank, 3).positions(0, 100)  # ten steps
        parts.append(np.stack(order.turns(positions)).reshape(2, -1, 10))
    assert np.concatenate(parts, axis=2).reshape(2, -1).tolist() == np.stack(whole)[:, :300].tolist()


def test_mixture_takes_no_memory_by_samples_when_sources_are_large() -> None:
    last = np.arange(10**12 - 4096, 10**12)
    assert peak_of(lambda: mixed([10**12, 10**12], [0.9, 0.1]).turns(last)) < 2 * 2**20


def test_mixture_gives_the_ends_of_windows() -> None:
    order = MixOrder([Passes(partial(shuffled, 10, 0), None)], blend([10], [1], "forever"), (0, 0), window=300)
    assert [order.window_end(position) for position in (0, 299, 300)] == [300, 300, 600]


def test_mixture_is_empty_when_no_source_has_samples() -> None:
    order = mixed([0, 0], [0, 0])
    assert (order.count, len(order.locate(np.arange(0)).rows)) == (0, 0)


@pytest.mark.parametrize(("sizes", "weights", "until", "why"), [
    ([5, 5], [1, 0], "all", "weight of 0"),
    ([5, 5], lambda _: [1, 0], "all", "not come in full"),
    ([5, 0], lambda _: [1, 1], "first", "no samples"),
])  # fmt: skip
def test_mixture_with_a_source_that_cannot_be_given_is_refused(
    sizes: list[int], weights: Weights, until: Until, why: str
) -> None:
    with pytest.raises(OptionError, match=why):
        blend(sizes, weights, until)


def test_mixture_has_the_order_that_saved_states_refer_to_when_the_key_is_the_same() -> None:
    sources, _ = mixed([40, 30, 20], [4, 3, 2], step=16, key=(7, 1)).turns(np.arange(48))
    assert "".join(map(str, sources)) == "201001021012201001021012010010121020120012021010"


@settings(max_examples=40)
@given(MIXES, st.sampled_from(["first", "all"]), st.data())
def test_mixture_ends_where_it_would_with_constant_weights_when_a_function_gives_these(
    mix: tuple[list[int], int], until: Until, data: st.DataObject
) -> None:
    sizes, step = mix
    weights = data.draw(st.lists(st.floats(0.2, 5), min_size=len(sizes), max_size=len(sizes)))
    constant, changing = blend(sizes, weights, until, step), blend(sizes, lambda _: weights, until, step)
    assert abs(constant.count - changing.count) <= len(sizes)  # what is due at the very end may be rounded


def test_changing_shares_are_the_same_when_a_signal_handler_asks_for_them_meanwhile() -> None:
    def weights(step: int) -> list[float]:
        return [1, 1 + step % 3]

    def interrupted(step: int) -> list[float]:
        if step == 3 and not asked:
            asked.append(step)
            assert shares.due(200) == expected.due(200)
        return weights(step)

    asked = list[int]()
    shares, expected = ChangingShares(interrupted, 2, 8), ChangingShares(weights, 2, 8)
    assert [shares.due(block) for block in range(150)] == [expected.due(block) for block in range(150)]
    assert asked


def test_mixture_refuses_positions_after_its_end() -> None:
    order = mixed([10, 10], [1, 1])
    with pytest.raises(IndexError):
        order.locate(np.array([20]))
