"""Order 1 is frozen: what is computed equals the golden file, and the plain program that follows its specification."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.orders import located, order_of
from hypothesis import given, settings
from hypothesis import strategies as st
from unit import order_reference as reference

from headrace.order import Cursor, ShardOrder, Steps, Windows, draw, permutation, sample_seed, window_order
from headrace.order.cursor import compressed
from headrace.order.permutation import below, numbers
from headrace.order.sampling import DrawnOrder
from headrace.order.windows import lane_turns

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "golden" / "order_1.json").read_text())
KEYS = st.integers(0, 2**64 - 1)


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


LARGE = [k * 7919 % 400 + 9000 * (k == 5) for k in range(200)]


@pytest.mark.parametrize(
    "case", GOLDEN["orders"] + GOLDEN["large_orders"], ids=lambda case: f"{case['by']}-{case['lanes']}-{case['block']}"
)
def test_orders_are_those_of_order_1(case: dict[str, Any]) -> None:
    sizes, how = case.get("sizes", LARGE), [case[name] for name in ("by", "key", "lanes", "block")]
    by, key, *windows = how
    positions = range(0, sum(sizes), case.get("step", 1))
    assert located(order_of(sizes, by, key, Windows(*windows)), positions) == case["places"]
    if sizes is not LARGE:
        assert [list(reference.place(p, sizes, *how)) for p in positions] == case["places"]


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
    wanted = [list(reference.place(p, sizes, by, key, lanes, block)) for p in range(sum(sizes))]
    assert located(order_of(sizes, by, key, Windows(lanes, block))) == wanted


@settings(max_examples=60)
@given(n=st.one_of(st.integers(4097, 2**33), st.integers(4097, 10**15)), key=KEYS, data=st.data())
def test_large_permutations_follow_their_specification(n: int, key: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=5))
    wanted = [reference.permutation(p, n, key) for p in positions]
    assert permutation(np.array(positions), n, key).tolist() == wanted


@settings(max_examples=160)
@given(
    count=st.integers(1, 60),
    weights=st.none() | st.lists(st.floats(0, 1e6), min_size=1, max_size=60).filter(any),
    key=st.lists(st.integers(0, 9), max_size=2),
    replacement=st.booleans(),
    data=st.data(),
)
def test_draws_at_any_positions_follow_their_specification(
    count: int, weights: list[float] | None, key: list[int], replacement: bool, data: st.DataObject
) -> None:
    among = count if weights is None else len(weights)
    drawn = data.draw(st.integers(0, 60 if replacement else among if weights is None else sum(map(bool, weights))))
    positions = data.draw(st.lists(st.integers(0, drawn - 1), max_size=60)) if drawn else []
    array = None if weights is None else np.array(weights)
    order = DrawnOrder(ShardOrder(np.array([among]), "none", ()), drawn, tuple(key), array, replacement)
    wanted = reference.drawn(drawn, among, key, weights, replacement=replacement)
    assert order.locate(np.array(positions, np.int64)).rows.tolist() == [wanted[p] for p in positions]
