"""Order 1 is frozen: what is computed equals the golden file, and the plain program that follows its specification."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit import order_reference as reference

from headrace.order import (
    Cursor,
    Order,
    ShardOrder,
    ShuffledOrder,
    Steps,
    Windows,
    draw,
    permutation,
    sample_seed,
    window_order,
)
from headrace.order.cursor import compressed
from headrace.order.permutation import below, numbers
from headrace.order.sampling import DrawnOrder
from headrace.order.windows import lane_turns

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "golden" / "order_1.json").read_text())
KEYS = st.integers(0, 2**64 - 1)


def order_of(sizes: list[int], by: str, key: list[int], lanes: int, block: int) -> Order:
    sizes_array = np.array(sizes, np.int64)
    if by == "global":
        return ShuffledOrder(ShardOrder(sizes_array, "none", ()), tuple(key))
    return ShardOrder(sizes_array, by, tuple(key), Windows(lanes, block))


def places_of(order: Order, positions: np.ndarray) -> list[list[int]]:
    shards, rows = order.locate(positions)
    return np.stack([shards, rows], axis=1).tolist()


def test_keys_and_numbers_are_those_of_order_1() -> None:
    for parts, wanted in GOLDEN["draw"]:
        assert draw(*parts) == reference.draw(*parts) == wanted
    for p, key, wanted in GOLDEN["number"]:
        assert numbers(np.array([p]), key).tolist() == [reference.number(p, key)] == [wanted]
    for x, n, wanted in GOLDEN["below"]:
        assert below(np.array([x], np.uint64), n).tolist() == [reference.below(x, n)] == [wanted]
    for seed, epoch, wanted in GOLDEN["sample_seed"]:
        assert sample_seed(seed, epoch) == wanted
    for count, seed, epoch, window, wanted in GOLDEN["window_order"]:
        assert window_order(count, seed, epoch, window).tolist() == wanted


def test_permutations_are_those_of_order_1() -> None:
    for n, key, pairs in GOLDEN["permutation"]:
        positions, wanted = zip(*pairs, strict=True)
        assert permutation(np.array(positions), n, key).tolist() == list(wanted)
        assert [reference.permutation(p, n, key) for p in positions] == list(wanted)


def test_lanes_take_the_turns_of_order_1() -> None:
    for lanes, wanted in GOLDEN["lane_turns"]:
        assert lane_turns(lanes).tolist() == reference.turns(lanes) == wanted


@pytest.mark.parametrize("case", GOLDEN["orders"], ids=lambda case: f"{case['by']}-{case['lanes']}-{case['block']}")
def test_orders_are_those_of_order_1(case: dict[str, Any]) -> None:
    sizes, by, key, lanes, block = (case[name] for name in ("sizes", "by", "key", "lanes", "block"))
    order = order_of(sizes, by, key, lanes, block)
    assert places_of(order, np.arange(order.count)) == case["places"]
    assert [list(reference.place(p, sizes, by, key, lanes, block)) for p in range(sum(sizes))] == case["places"]


@pytest.mark.parametrize("case", GOLDEN["large_orders"], ids=lambda case: f"{case['by']}-{case['lanes']}")
def test_orders_of_large_shards_are_those_of_order_1(case: dict[str, Any]) -> None:
    sizes = [k * 7919 % 400 + 9000 * (k == 5) for k in range(200)]
    order = order_of(sizes, case["by"], case["key"], case["lanes"], case["block"])
    assert places_of(order, np.arange(0, order.count, case["step"])) == case["places"]


@pytest.mark.parametrize("case", GOLDEN["drawn"], ids=lambda case: f"{case['weights'] is None}-{case['replacement']}")
def test_samples_are_drawn_as_in_order_1(case: dict[str, Any]) -> None:
    inner = ShardOrder(np.array([case["of"]]), "none", ())
    weights = None if case["weights"] is None else np.array(case["weights"], np.float64)
    order = DrawnOrder(inner, case["count"], tuple(case["key"]), weights, case["replacement"])
    assert order.locate(np.arange(case["count"])).rows.tolist() == case["positions"]


@pytest.mark.parametrize("case", GOLDEN["steps"], ids=lambda case: f"{case['tail']}-{case['size']}-{case['world']}")
def test_steps_are_those_of_order_1(case: dict[str, Any]) -> None:
    coming, end, size, tail, world, lanes = (case[name] for name in ("coming", "end", "size", "tail", "world", "lanes"))
    assert reference.steps(coming, end, size, tail, world, lanes) == case["ranks"]
    runs = compressed(np.array(coming))
    begin = Cursor(int(runs[-1, 0]), runs[:-1])
    for rank in range(world):
        steps = Steps(begin, end, size, tail, rank, world, lanes)
        wanted = [p for step in case["ranks"] for p in step[rank]]
        assert steps.positions(0, steps.count).tolist() == wanted


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(0, 12), max_size=8),
    by=st.sampled_from(["none", "shards", "within", "windows", "global"]),
    key=st.lists(st.integers(-5, 5), max_size=3),
    lanes=st.integers(1, 9),
    block=st.integers(1, 6),
)
def test_orders_follow_their_specification(sizes: list[int], by: str, key: list[int], lanes: int, block: int) -> None:
    order = order_of(sizes, by, key, lanes, block)
    wanted = [list(reference.place(p, sizes, by, key, lanes, block)) for p in range(sum(sizes))]
    assert places_of(order, np.arange(order.count)) == wanted


@settings(max_examples=60)
@given(n=st.one_of(st.integers(4097, 2**33), st.integers(4097, 10**15)), key=KEYS, data=st.data())
def test_large_permutations_follow_their_specification(n: int, key: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=5))
    wanted = [reference.permutation(p, n, key) for p in positions]
    assert permutation(np.array(positions), n, key).tolist() == wanted


@settings(max_examples=60)
@given(
    weights=st.lists(st.floats(0, 1e6), min_size=1, max_size=12).filter(any),
    key=st.lists(st.integers(0, 9), max_size=2),
    replacement=st.booleans(),
    data=st.data(),
)
def test_weighted_draws_follow_their_specification(
    weights: list[float], key: list[int], replacement: bool, data: st.DataObject
) -> None:
    count = data.draw(st.integers(0, 30 if replacement else sum(map(bool, weights))))
    inner = ShardOrder(np.array([len(weights)]), "none", ())
    order = DrawnOrder(inner, count, tuple(key), np.array(weights), replacement)
    wanted = reference.drawn(count, len(weights), key, weights, replacement=replacement)
    assert order.locate(np.arange(count)).rows.tolist() == wanted
