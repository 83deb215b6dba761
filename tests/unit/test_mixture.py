"""Mixtures: each source's share of samples or tokens in any part of an epoch; lengths, descriptions and refusals."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
from builders.numbers import Counting, located, peak_of
from hypothesis import given, settings
from hypothesis import strategies as st

import headrace as hr
from headrace.errors import OptionError
from headrace.order.combined import ChangingShares, ConstantShares, MixLayout, MixOrder, Shares, TokenOrder, Until
from headrace.order.orders import Order, Passes, ShardOrder, ShuffledOrder
from headrace.pipeline.epoch_orders import Planning
from headrace.types import Ints

Weights = Sequence[float] | Callable[[int], Sequence[float]]

Mix = tuple[list[int], int]  # sizes, step

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


@settings(max_examples=40)
@given(MIXES, st.sampled_from(["first", "all"]))
def test_mixture_weighted_by_size_emits_each_sample_once(mix: Mix, until: Until) -> None:
    sizes, step = mix
    order = mixed(sizes, sizes, until, step)
    assert sorted(located(order)) == [[source, row] for source, size in enumerate(sizes) for row in range(size)]


@settings(max_examples=40)
@given(MIXES, st.data())
def test_mixture_ends_before_a_sample_would_repeat(mix: Mix, data: st.DataObject) -> None:
    sizes, step = mix
    weights = data.draw(st.lists(st.floats(0.05, 5), min_size=len(sizes), max_size=len(sizes)))
    order = mixed(sizes, weights, "first", step)
    samples = located(order)
    came = np.bincount([source for source, _ in samples], minlength=len(sizes))
    assert (came <= sizes).all()
    assert (came == sizes).any()
    assert len(set(map(tuple, samples))) == order.count


@pytest.mark.slow
@settings(max_examples=40)
@given(MIXES, st.data())
def test_mixture_until_all_emits_every_source_in_full(mix: Mix, data: st.DataObject) -> None:
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


@settings(max_examples=40)
@given(st.lists(st.floats(1e-6, 1e3), min_size=2, max_size=6), st.sampled_from([16, 1024]), st.integers(0, 10**6))
def test_totals_are_within_a_sample_of_the_shares(weights: list[float], step: int, block: int) -> None:
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


@settings(max_examples=40)
@given(MIXES, st.data())
def test_part_of_a_mixture_is_that_part_of_the_whole(mix: Mix, data: st.DataObject) -> None:
    sizes, step = mix
    whole = located(mixed(sizes, sizes, "first", step))
    positions = data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=50))
    assert located(mixed(sizes, sizes, "first", step), positions) == [whole[position] for position in positions]


def test_seed_and_epoch_determine_the_order_and_not_the_length() -> None:
    orders = [mixed([400, 200], [2, 1], key=key).turns(np.arange(600))[0].tobytes() for key in [(0, 0), (0, 1), (1, 0)]]
    assert len(set(orders)) == 3
    assert len({mixed([37, 90, 11], [0.5, 0.2, 0.3], key=(0, epoch)).count for epoch in range(20)}) == 1
    sources, _ = mixed([40, 30, 20], [4, 3, 2], step=16, key=(7, 1)).turns(np.arange(48))
    assert "".join(map(str, sources)) == "201001021012201001021012010010121020120012021010"


@settings(max_examples=40)
@given(
    st.lists(st.lists(st.floats(0, 3), min_size=3, max_size=3).filter(any), min_size=1, max_size=8),
    STEPS,
    st.sampled_from(["first", "forever"]),
)
def test_totals_follow_changing_weights(rows: list[list[float]], step: int, until: Until) -> None:
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


def test_mixture_takes_no_memory_by_samples_when_sources_are_large() -> None:
    last = np.arange(10**12 - 4096, 10**12)
    assert peak_of(lambda: mixed([10**12, 10**12], [0.9, 0.1]).turns(last)) < 2 * 2**20


def test_mixture_has_an_end_and_ends_of_windows() -> None:
    order = MixOrder([Passes(partial(shuffled, 10, 0), None)], blend([10], [1], "forever"), (0, 0), window=300)
    assert [order.window_end(position) for position in (0, 299, 300)] == [300, 300, 600]
    empty = mixed([0, 0], [0, 0])
    assert (empty.count, located(empty)) == (0, [])
    with pytest.raises(IndexError):
        mixed([10, 10], [1, 1]).locate(np.array([20]))


@settings(max_examples=40)
@given(MIXES, st.sampled_from(["first", "all"]), st.data())
def test_function_of_constant_weights_ends_as_constants(mix: Mix, until: Until, data: st.DataObject) -> None:
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


def order_of(lengths: list[Ints], shares: Shares) -> TokenOrder:
    counts = list(map(len, lengths))
    inputs = [
        Passes(lambda turn, k=k, count=count: ShardOrder(np.array([count]), "within", (k, turn)), None)
        for k, count in enumerate(counts)
    ]
    labels = [f"source {k}" for k in range(len(lengths))]
    known = [lambda places, some=some: some[places.rows] for some in lengths]
    return TokenOrder(inputs, counts, known, shares, labels, None, 1000)


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
    for positions in (some, *([at] for at in some[:3])):
        found = order_of(known, ConstantShares(weights, step)).turns(np.array(positions))
        assert [one.tolist() for one in found] == [inputs[positions].tolist(), turns[positions].tolist()]


def test_what_comes_does_not_follow_from_the_step_that_constant_shares_are_planned_in() -> None:
    random = np.random.default_rng(1)
    lengths = [random.integers(1, 900, 70), random.integers(1, 90, 300)]
    orders = [come(order_of(lengths, ConstantShares([3, 1], step)), lengths, 2000) for step in (64, 1000, 2**20)]
    assert all((one[0] == orders[0][0]).all() and (one[1] == orders[0][1]).all() for one in orders)


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
    with pytest.raises(OptionError, match="source 0 has 8 tokens in pass 1, and it has 7 in the first one"):
        order.turns(np.arange(4))


def numbers(count: int) -> hr.Stream:
    return hr.from_map(range(count))


async def later(sample: Any) -> Any:
    return sample


def plain(sample: Any) -> Any:
    return sample


def mix_two(**options: Any) -> hr.Stream:
    return hr.mix({"a": numbers(50), "b": numbers(50)}, **options)


UNNUMBERED = "no numbers before they are read; (.|\n)*samples are counted as they come instead"
TWO_STEPS = lambda step: {"a": 1, "b": 1} if step < 2 else {"a": 1}
REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: hr.mix({"good": numbers(5), "bad": Counting()}), UNNUMBERED),
    (lambda: hr.mix({"good": numbers(5), "bad": iter([1])}), "must be a stream, or a data set with"),
    (lambda: hr.mix({"bad": numbers(5).map(plain).map(later)}), "`async def` functions before plain ones"),
    (lambda: mix_two(weights={"a": 1}), "a number for each of a, b"),
    (lambda: mix_two(weights={"a": 1, "b": 1, "c": 1}), "a number for each of a, b"),
    (lambda: mix_two(weights={"a": 1, "b": -1}), r"weights.'b'.=-1 must be a finite number, 0 or more"),
    (lambda: mix_two(weights={"a": 1, "b": float("nan")}), "finite"),
    (lambda: mix_two(weights={"a": [1], "b": [2]}), r"weights\['a'\]=\[1\] must be a finite number"),
    (lambda: mix_two(weights={"a": "1", "b": 2}), r"weights\['a'\]='1' must"),
    (lambda: len(mix_two(weights={"a": 1, "b": 0}, until="all")), r"weight of source 1=0 must be above 0"),
    (lambda: len(mix_two(weights=lambda _: {"a": 1, "b": 0}, until="all")), "not come in full"),
    (lambda: len(hr.mix({"a": numbers(5), "b": numbers(0)}, lambda _: {"a": 1, "b": 1})), "no samples"),
    (lambda: mix_two(weights={"a": 0, "b": 0}), "one of them above 0"),
    (lambda: mix_two(weights=[1, 2]), "a function of the step"),
    (lambda: mix_two(by="lines"), "by='lines'"),
    (lambda: mix_two(by="tokens", until="all"), "by='tokens' and until='all'"),
    (lambda: mix_two(by="tokens"), "needs weights="),
    (lambda: mix_two(until="never"), "until='never'"),
    (lambda: mix_two(step=0), "step=0"),
    (lambda: len(mix_two(weights=TWO_STEPS, step=10)), "at step 2"),
    (lambda: hr.mix({}), "by their names"),
    (lambda: hr.mix([numbers(3)]), "by their names"),  # type: ignore[arg-type]
    (lambda: hr.mix({1: numbers(3)}), "by their names"),  # type: ignore[dict-item]
    (lambda: mix_two(until="forever").shuffle("global"), "by='global' must be 'window' for"),
    (lambda: mix_two(until="forever").repeat(2), "has no end"),
    (lambda: mix_two(until="forever").slice(3, 5), "has no end"),
    (lambda: mix_two(until="forever").sample(), "has no end"),
]


@pytest.mark.parametrize(("make", "why"), REFUSED)
def test_mixture_that_cannot_be_made_or_used_is_refused(make: Callable[[], Any], why: str) -> None:
    with pytest.raises(hr.OptionError, match=why):
        make()


def test_source_without_samples_is_named_when_it_has_a_weight() -> None:
    data = {"a": numbers(5), "nothing": numbers(0)}
    with pytest.raises(hr.OptionError, match="'nothing' of the mixture has no samples"):
        len(hr.mix(data, {"a": 1, "nothing": 1}))
    assert len(hr.mix(data, {"a": 1, "nothing": 0})) == len(hr.mix(data)) == 5


@pytest.mark.parametrize(("options", "count"), [
    ({}, 100),
    ({"weights": {"a": 1, "b": 1}}, 40),
    ({"weights": {"a": 1, "b": 1}, "until": "all"}, 160),
    ({"weights": {"a": 9, "b": 1}}, 89),  # the 81st of a would be the next one
])  # fmt: skip
def test_mixture_has_a_length_when_it_ends(options: dict[str, Any], count: int) -> None:
    data = hr.mix({"a": numbers(80), "b": numbers(20)}, **options)
    assert len(data) == count
    assert len(data.take(7)) == 7
    assert len(data.repeat(2)) == 2 * count
    assert len(data.batch(8)) == -(-count // 8)


def test_mixture_describes_itself() -> None:
    data = hr.mix({"a": numbers(80).shuffle(), "b": numbers(20).map(plain)}, {"a": 3, "b": 0.5}).map(plain).batch(4)
    assert repr(data) == "mix(a, b).map(plain).batch(4)"
    described = Planning(data.pipeline(), 0).described()
    assert described == ["mix(a, b; weights=3:0.5, until=first, step=1024)", "a: shuffle(global)"]
    assert mix_two(until="forever").describe().splitlines()[1] == "  samples: without end"
    five, six = numbers(5), numbers(6)
    others = [hr.mix(one) for one in ({"a": five, "b": six}, {"a": six, "b": five}, {"a": five, "c": six})]
    assert len({Planning(other.pipeline(), 0).fingerprint for other in others}) == 3


def by_step(step: int) -> Mapping[str, float]:
    return {"a": 1, "b": step}


def test_mixture_is_the_same_when_it_was_pickled_or_copied_after_use() -> None:
    data = hr.mix({"a": hr.from_map(list(range(40))), "b": hr.from_map(list(range(40, 60)))}, by_step, step=8)
    samples = list(data)
    assert len(samples) == len(data) > 30
    assert list(pickle.loads(pickle.dumps(data))) == list(copy.deepcopy(data)) == samples


def test_objects_in_a_mixture_within_a_mixture_are_read_with_their_options() -> None:
    def files(**options: str) -> hr.Stream:
        return hr.files(["memory://a.bin", "memory://b.bin"], storage_options=options)

    inner = hr.mix({"numbers": numbers(2), "files": files(region="here")})
    shards = hr.stream("memory://a.tar", index="memory://a.hri", storage_options={"region": "elsewhere"})
    assert hr.mix({"shards": shards, "inner": inner}).source.storage_options == {"region": "here"}
    with pytest.raises(hr.OptionError, match="give all the same ones"):
        hr.mix({"inner": inner, "files": files(region="there")})
