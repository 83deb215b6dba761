"""Operators of other packages: they keep the contract, and wrong ones are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from builders.loops import loaded, state_after
from full.contributed.documented import in_turn
from full.contributed.operators import noisy_copies

import headrace as hr
from headrace.ops import registry
from headrace.testing import OperatorContract

LENGTHS = (1, 12, 3, 2, 5, 6, 0, 30, 7, 11, 2, 8, 3, 1, 9)


def delivered(data: hr.Stream, **options: Any) -> list[Any]:
    return loaded(data, batch_size=None, **options)


def one_of_each(size: int) -> hr.plugins.OrderOp:
    """A random sample of each `size` ones."""

    def numbers(positions: Any, count: int, seed: int) -> Any:
        return positions * size + np.random.default_rng(seed).integers(size, size=count // size)[positions]

    return hr.plugins.OrderOp(numbers=numbers, count=lambda count: count // size)


class TestInTurn(OperatorContract):
    samples = list(range(11))
    expected = [0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7]

    def apply(self, data: Any) -> hr.Stream:
        return data.apply_op("in_turn", 3)


class TestOneOfEach(OperatorContract):
    samples = list(range(23))

    def apply(self, data: Any) -> hr.Stream:
        hr.plugins.register_operator("one_of_each", one_of_each)
        return data.apply_op("one_of_each", 2)


class TestNoisyCopies(OperatorContract):
    samples = [{"n": n} for n in range(11)]

    def apply(self, data: Any) -> hr.Stream:
        return data.apply_op("noisy_copies", most=3)


class TestLengthBuckets(OperatorContract):
    samples = [{"n": "x" * n} for n in LENGTHS]
    expected = [
        [{"n": "x" * n, "longest": max(group)} for n in group]
        for group in ([1, 3, 2], [5, 6, 7], [12, 30, 11], [0, 2, 3], [8], [1], [9])
    ]

    def apply(self, data: Any) -> hr.Stream:
        return data.apply_op("length_buckets", 3, bounds=(4, 9))


async def doubled(n: int) -> int:
    return 2 * n


def test_sample_operator_yields_one_or_at_most_one() -> None:
    hr.plugins.register_operator("doubled", lambda: hr.plugins.SampleOp(fn=doubled))
    hr.plugins.register_operator("below", lambda most: hr.plugins.SampleOp(fn=lambda n: n < most, yields="at most one"))
    data = hr.from_map(range(9)).apply_op("doubled").apply_op("below", most=9)
    assert delivered(data) == [0, 2, 4, 6, 8]
    assert repr(data).endswith(".doubled().below(most=9)")
    assert [hr.plugins.SampleOp(fn=fn).where for fn in (doubled, abs)] == ["loop", "worker"]


def test_operator_of_an_entry_point_is_found(install: Callable[..., None]) -> None:
    install(registry, ("copies", "full.contributed.operators:noisy_copies"))
    data = hr.from_map([{"n": n} for n in (2, 0, 1, 4)]).apply_op("copies")
    assert [sample["n"] for sample in delivered(data)] == [2, 2, 1]


def test_order_operator_combines_with_others() -> None:
    assert in_turn(2).numbers(np.arange(5), 5, 0).tolist() == [0, 3, 1, 4, 2]
    data = hr.from_map(range(10)).slice(4, 9).apply_op("in_turn", 2).take(3).repeat(2).map(float)
    assert delivered(data) == [4, 7, 5, 4, 7, 5]
    assert len(data) == 6
    assert repr(data).endswith(".slice(4, 9, 1).in_turn(2).take(3).repeat(2).map(float)")
    ranks = [hr.Ranks(rank=rank, world_size=2) for rank in (0, 1)]
    assert sorted(n for one in ranks for n in delivered(data, ranks=one)) == [4, 4, 5, 5, 7, 7]


def test_order_operator_draws_another_order_in_each_pass_and_epoch() -> None:
    hr.plugins.register_operator("one_of_each", one_of_each)
    data = hr.from_map(range(200)).apply_op("one_of_each", 4).repeat(2)
    loader = hr.DataLoader(data, batch_size=50, seed=7)
    passes = [tuple(batch.tolist()) for _ in range(2) for batch in loader]
    assert len(set(passes)) == 4
    assert all([n // 4 for n in one] == list(range(50)) for one in passes)
    assert [tuple(batch.tolist()) for batch in hr.DataLoader(data, batch_size=50, seed=7)] == passes[:2]


# States


def test_state_stores_waiting_samples_as_ranges() -> None:
    data = hr.from_map([{"n": 30 if n == 5 else 1} for n in range(1000)]).apply_op("length_buckets", 4)
    state = state_after(hr.DataLoader(data, batch_size=None), 200)
    assert (state["source"]["received"], state["stages"]) == ([0, 5], [{}, {"used": [1, 795]}])


def test_state_names_operators_and_arguments() -> None:
    with hr.DataLoader(hr.from_map([{"n": 2}]).apply_op("noisy_copies", 2, field="n")) as loader:
        assert loader.state_dict()["fingerprint"]["steps"] == ["noisy_copies(2, field='n')"]


NUMBERS, SIZED = hr.from_map(range(9)), hr.from_map([{"n": 2}] * 9)
OTHERS: list[tuple[Callable[[], hr.Stream], Callable[[], hr.Stream], str]] = [
    (lambda: NUMBERS.take(3), lambda: NUMBERS.apply_op("in_turn", 2), "order"),
    (lambda: NUMBERS.take(3), lambda: NUMBERS.apply_op("take", 3), "order"),
    (lambda: NUMBERS.apply_op("in_turn", 3), lambda: NUMBERS.apply_op("in_turn", 2), "order"),
    (lambda: NUMBERS.apply_op("in_turn", 3), lambda: NUMBERS.apply_op("take", 3), "order"),
    (lambda: SIZED.apply_op("token_batches", 6), lambda: SIZED.apply_op("token_batches", 8), "operators"),
]


@pytest.mark.parametrize(("saved", "loaded", "field"), OTHERS)
def test_state_of_another_operator_or_argument_is_refused(
    saved: Callable[[], hr.Stream], loaded: Callable[[], hr.Stream], field: str
) -> None:
    hr.plugins.register_operator("take", in_turn)  # the name is that of a built-in operator
    state = state_after(hr.DataLoader(saved(), batch_size=None), 1)
    with hr.DataLoader(loaded(), batch_size=None) as loader, pytest.raises(hr.StateMismatchError, match=field):
        loader.load_state_dict(state)


# Refusals


async def later(positions: Any, count: int, seed: int) -> Any:
    return positions


def ordered(data: Any, op: Callable[[], Any]) -> list[Any]:
    hr.plugins.register_operator("wrong", op)
    return delivered(data.apply_op("wrong"))


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: hr.from_map([1]).apply_op("nobodys"), "'nobodys'.*register others"),
    (lambda: hr.plugins.register_operator("no word", noisy_copies), "must be a word"),
    (lambda: hr.plugins.register_operator("word", 3), "make=3 must be a function"),  # type: ignore[arg-type]
    (lambda: hr.plugins.SampleOp(fn=abs, yields="two"), "yields='two'"),  # type: ignore[arg-type]
    (lambda: hr.plugins.SampleOp(fn=3), "fn=3 must be a function"),  # type: ignore[arg-type]
    (lambda: ordered(NUMBERS, lambda: None), "result=None must be"),
    (lambda: ordered(NUMBERS, lambda: hr.plugins.OrderOp(numbers=lambda p, n, s: p + 1)), r"numbers\[8\]=9 must"),
    (lambda: ordered(NUMBERS, lambda: hr.plugins.OrderOp(numbers=lambda p, n, s: p / 2)), "must be 9 whole numbers"),
    (lambda: ordered(NUMBERS, lambda: hr.plugins.OrderOp(numbers=lambda p, n, s: p[1:])), "must be 9 whole numbers"),
    (lambda: ordered(NUMBERS, lambda: hr.plugins.OrderOp(numbers=lambda p, n, s: p, count=lambda n: -1)), "=-1 must"),
    (lambda: ordered(NUMBERS, lambda: hr.plugins.OrderOp(numbers=later)), "not an `async def`"),
    (lambda: ordered(NUMBERS, lambda: hr.plugins.OrderOp(numbers=[2, 1])), "must be a plain function"),  # type: ignore[arg-type]
    (lambda: hr.from_iterable([1]).apply_op("in_turn", 3), r"in_turn\(3\) cannot follow .*: samples have no numbers"),
    (lambda: NUMBERS.flat_map(list).apply_op("in_turn", 3), r"in_turn\(3\) cannot follow .*numbers of the source"),
]


@pytest.mark.parametrize(("call", "text"), REFUSED)
def test_wrong_operator_is_refused(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(hr.OptionError, match=text):
        call()
