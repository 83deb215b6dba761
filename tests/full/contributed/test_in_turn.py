"""What a stranger writes to have an operator on the order, and what is refused of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from full.contributed import in_turn

import headrace as hr
from headrace.testing import OperatorContract


class TestInTurn(OperatorContract):
    samples = list(range(11))
    expected = [0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7]

    def apply(self, data: Any) -> hr.Stream:
        return data.apply_op("in_turn", 3)


def one_of_each(size: int) -> hr.OrderOp:
    def numbers(positions: Any, count: int, seed: int) -> Any:
        return positions * size + np.random.default_rng(seed).integers(size, size=count // size)[positions]

    return hr.OrderOp(numbers=numbers, count=lambda count: count // size)


class TestOneOfEach(OperatorContract):
    samples = list(range(23))

    def apply(self, data: Any) -> hr.Stream:
        hr.register_operator("one_of_each", one_of_each)
        return data.apply_op("one_of_each", 2)


def delivered(data: hr.Stream, **options: Any) -> list[Any]:
    return list(hr.DataLoader(data, batch_size=None, **options))


def test_order_operator_goes_with_others_when_those_are_about_the_order_too() -> None:
    assert in_turn.in_turn(2).numbers(np.arange(5), 5, 0).tolist() == [0, 3, 1, 4, 2]
    data = hr.from_map(range(10)).slice(4, 9).apply_op("in_turn", 2).take(3).repeat(2).map(float)
    assert delivered(data) == [4, 7, 5, 4, 7, 5]
    assert len(data) == 6
    assert repr(data).endswith(".slice(4, 9, 1).in_turn(2).take(3).repeat(2).map(float)")
    assert sorted(n for rank in (0, 1) for n in delivered(data, rank=rank, world_size=2)) == [4, 4, 5, 5, 7, 7]


def test_order_is_another_one_in_each_pass_and_epoch_when_it_goes_by_the_seed() -> None:
    hr.register_operator("one_of_each", one_of_each)
    data = hr.from_map(range(200)).apply_op("one_of_each", 4).repeat(2)
    loader = hr.DataLoader(data, batch_size=50, seed=7)
    passes = [tuple(batch.tolist()) for _ in range(2) for batch in loader]
    assert len(set(passes)) == 4
    assert all([n // 4 for n in one] == list(range(50)) for one in passes)
    assert [tuple(batch.tolist()) for batch in hr.DataLoader(data, batch_size=50, seed=7)] == passes[:2]


@pytest.mark.parametrize("other", [lambda data: data.apply_op("in_turn", 2), lambda data: data.apply_op("take", 3)])
def test_state_belongs_to_the_operator_and_its_arguments(other: Callable[[Any], hr.Stream]) -> None:
    hr.register_operator("take", in_turn.in_turn)  # a name that is one of ours, too
    state = hr.DataLoader(hr.from_map(range(9)).take(3)).state_dict()
    with hr.DataLoader(other(hr.from_map(range(9)))) as loader, pytest.raises(hr.StateMismatchError, match="order"):
        loader.load_state_dict(state)
    state = hr.DataLoader(hr.from_map(range(9)).apply_op("in_turn", 3)).state_dict()
    with hr.DataLoader(other(hr.from_map(range(9)))) as loader, pytest.raises(hr.StateMismatchError, match="order"):
        loader.load_state_dict(state)


async def later(positions: Any, count: int, seed: int) -> Any:
    return positions


@pytest.mark.parametrize(
    ("op", "told"),
    [
        (
            lambda: hr.OrderOp(numbers=lambda positions, count, seed: positions + 1),
            "no sample 9; their numbers are 0 to 8",
        ),
        (lambda: hr.OrderOp(numbers=lambda positions, count, seed: positions / 2), "a whole number for each"),
        (lambda: hr.OrderOp(numbers=lambda positions, count, seed: positions[1:]), "a whole number for each"),
        (lambda: hr.OrderOp(numbers=lambda positions, count, seed: positions, count=lambda count: -1), "gave -1"),
        (lambda: hr.OrderOp(numbers=later), "not an `async def`"),
        (lambda: hr.OrderOp(numbers=[2, 1]), "must be a plain function"),  # type: ignore[arg-type]
    ],
)
def test_order_operator_is_refused_when_it_is_of_no_use(op: Callable[[], hr.OrderOp], told: str) -> None:
    hr.register_operator("wrong", op)
    with pytest.raises(hr.OptionError, match=told):
        delivered(hr.from_map(range(9)).apply_op("wrong"))


def test_order_operator_is_refused_when_samples_have_no_numbers() -> None:
    with pytest.raises(hr.OptionError, match=r"in_turn\(3\) cannot follow .*: samples have no numbers"):
        hr.from_iterable([1, 2]).apply_op("in_turn", 3)
    with pytest.raises(hr.OptionError, match=r"in_turn\(3\) selects samples of the source"):
        hr.from_map([[1], [2]]).flat_map(list).apply_op("in_turn", 3)
