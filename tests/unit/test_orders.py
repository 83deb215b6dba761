"""Orders: as specified, random, any part like that of the whole; windows, and joined and interleaved orders."""

from __future__ import annotations

import itertools
import json
import math
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.numbers import located, order_of, peak_of
from hypothesis import given, settings
from hypothesis import strategies as st
from unit import order_reference as reference

from headrace.errors import OptionError
from headrace.order.combined import ConcatOrder, InterleaveLayout, InterleaveOrder
from headrace.order.cursor import Cursor, compressed
from headrace.order.orders import (
    ENDLESS,
    ChosenOrder,
    EpochOrder,
    FirstOf,
    Order,
    Passes,
    ShardOrder,
    StretchOrder,
    Windows,
    lane_turns,
)
from headrace.order.permutation import below, draw, numbers, permutation, permutations, sample_seed, window_order
from headrace.order.sampling import DrawnOrder, chosen_by_weight, minus_log
from headrace.order.steps import Steps

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "golden" / "order_1.json").read_text())
ANY_KEY = st.integers(0, 2**64 - 1)


def test_keys_and_numbers_equal_order_1() -> None:
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


def test_permutations_equal_order_1() -> None:
    for n, key, pairs in GOLDEN["permutation"]:
        positions, wanted = zip(*pairs, strict=True)
        assert permutation(np.array(positions), n, key).tolist() == list(wanted)
        assert [reference.permutation(p, n, key) for p in positions] == list(wanted)


def test_turns_of_lanes_equal_order_1() -> None:
    for lanes, wanted in GOLDEN["lane_turns"]:
        assert lane_turns(lanes).tolist() == reference.turns(lanes) == wanted


LARGE = [k * 7919 % 400 + 9000 * (k == 5) for k in range(200)]


@pytest.mark.parametrize(
    "case", GOLDEN["orders"] + GOLDEN["large_orders"], ids=lambda case: f"{case['by']}-{case['lanes']}-{case['block']}"
)
def test_orders_equal_order_1(case: dict[str, Any]) -> None:
    sizes, how = case.get("sizes", LARGE), [case[name] for name in ("by", "key", "lanes", "block")]
    by, key, *windows = how
    positions = range(0, sum(sizes), case.get("step", 1))
    assert located(order_of(sizes, by, key, Windows(*windows)), positions) == case["places"]
    if sizes is not LARGE:
        assert [list(reference.place(p, sizes, *how)) for p in positions] == case["places"]


@pytest.mark.parametrize("case", GOLDEN["drawn"], ids=lambda case: f"{case['weights'] is None}-{case['replacement']}")
def test_drawn_samples_equal_order_1(case: dict[str, Any]) -> None:
    inner = ShardOrder(np.array([case["of"]]), "none", ())
    weights = None if case["weights"] is None else np.array(case["weights"], np.float64)
    order = DrawnOrder(inner, case["count"], tuple(case["key"]), weights, case["replacement"])
    assert order.locate(np.arange(case["count"])).rows.tolist() == case["positions"]


@pytest.mark.parametrize("case", GOLDEN["steps"], ids=lambda case: f"{case['tail']}-{case['size']}-{case['world']}")
def test_steps_equal_order_1(case: dict[str, Any]) -> None:
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
    data=st.data(),
)
def test_orders_at_any_positions_follow_their_specification(
    sizes: list[int], by: str, key: list[int], lanes: int, block: int, data: st.DataObject
) -> None:
    wanted = [list(reference.place(p, sizes, by, key, lanes, block)) for p in range(sum(sizes))]
    order = order_of(sizes, by, key, Windows(lanes, block))
    assert located(order) == wanted
    assert sorted(wanted) == samples_of(sizes)
    positions = data.draw(st.lists(st.sampled_from(range(len(wanted))), max_size=30)) if wanted else []
    assert located(order, positions) == [wanted[p] for p in positions]


@settings(max_examples=60)
@given(
    n=st.one_of(st.integers(1, 5000), st.integers(4097, 2**33), st.integers(4097, 10**15)), key=ANY_KEY, data=st.data()
)
def test_permutations_at_any_positions_follow_their_specification(n: int, key: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=5))
    given_positions = np.array(positions)
    wanted = [reference.permutation(p, n, key) for p in positions]
    assert permutation(given_positions, n, key).tolist() == wanted
    assert given_positions.tolist() == positions


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


def whole(n: int, key: int) -> np.ndarray:
    return permutation(np.arange(n), n, key)


def test_every_size_is_permuted() -> None:
    for n in (*range(301), 1023, 1024, 1025, 65_536, 99_991, 1_000_003):
        for key in (0, 1, 2**64 - 1):
            assert np.array_equal(np.sort(whole(n, key)), np.arange(n)), (n, key)


@pytest.mark.parametrize("n", [2, 50, 4095, 4096, 4097, 10_000, 2**32 - 1, 2**32, 2**32 + 1, 10**13])
def test_permutations_by_many_keys_equal_those_by_each_key(n: int) -> None:
    keys = np.array([3, 3, 9, 4, 9, 2**64 - 1], np.uint64)
    positions = np.array([0, 1, n - 1, n // 2, 0, 1]) % n
    wanted = [int(permutation(positions[k : k + 1], n, int(key))[0]) for k, key in enumerate(keys)]
    assert permutations(positions, n, keys).tolist() == wanted


def test_keys_give_the_same_for_many_as_for_few_and_in_any_integer_type() -> None:
    random = np.random.default_rng(0)
    for n in (7, 4096, 5000):
        keys, positions = random.integers(0, 200, 40_000).astype(np.uint64), random.integers(0, n, 40_000)
        few = np.concatenate([permutations(positions[k : k + 100], n, keys[k : k + 100]) for k in range(0, 2000, 100)])
        assert permutations(positions, n, keys)[:2000].tolist() == few.tolist()
    assert draw("keys", np.int64(17), np.uint8(3)) == draw("keys", 17, 3)


def plain(count: int) -> ShardOrder:
    return ShardOrder(np.array([count]), "none", ())


def rows(order: DrawnOrder) -> np.ndarray:
    return order.locate(np.arange(order.count)).rows


def test_drawn_positions_are_those_of_the_other_order() -> None:
    inner = ShardOrder(np.array([30, 4, 16]), "windows", (5, 5), Windows(4, 3))
    order = DrawnOrder(inner, 50, (2,), None, False)
    shards, found = order.locate(np.arange(50))
    assert sorted(zip(shards.tolist(), found.tolist(), strict=True)) == [
        (shard, row) for shard, size in enumerate((30, 4, 16)) for row in range(size)
    ]
    assert order.window_end(0) > 0
    assert order.lanes == 1


@pytest.mark.parametrize(("count", "weights", "replacement", "message"), [
    (5, None, False, "at most 4, the number of samples, unless replacement=True"),
    (2, [1, 2, 3], True, r"shape \(3,\), and the stream has 4"),
    (2, [[1, 2, 3, 4]], True, r"shape \(1, 4\)"),
    (2, [1, -2, 3, 4], True, r"weights\[1\]=-2.0 must"),
    (2, [1, 2, math.nan, 4], True, r"weights\[2\]=nan must"),
    (2, [1, 2, 3, math.inf], False, r"weights\[3\]=inf must"),
    (2, [0, 0, 0, 0], True, "one of them above 0"),
    (3, [1, 0, 0, 4], False, "count=3 must be at most 2, the number of samples that have a weight"),
])  # fmt: skip
def test_impossible_draw_is_an_error(count: int, weights: list[float] | None, replacement: bool, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        DrawnOrder(plain(4), count, (0,), None if weights is None else np.array(weights, np.float64), replacement)


def test_weights_may_have_any_magnitude() -> None:
    for scale in (1e-300, 1e300):
        weights = np.array([1.0, 0.5, 0.0]) * scale
        assert set(rows(DrawnOrder(plain(3), 500, (0,), weights, True)).tolist()) == {0, 1}
        assert sorted(rows(DrawnOrder(plain(3), 2, (0,), weights, False)).tolist()) == [0, 1]
    assert sorted(chosen_by_weight(np.array([5e-324, 1.0]), 2, 1).tolist()) == [0, 1]


@given(st.integers(1, 2**53))
def test_our_logarithm_is_the_logarithm(numerator: int) -> None:
    wanted = -math.log(numerator / 2**53)
    assert math.isclose(minus_log(np.array([numerator], np.uint64))[0], wanted, rel_tol=1e-15, abs_tol=1e-30)


UNEVEN = st.lists(st.integers(0, 40), max_size=12)
ZIPF = st.integers(1, 12).map(lambda count: [300 // (k + 1) for k in range(count)])
SIZES = st.one_of(UNEVEN, ZIPF, st.integers(0, 500).map(lambda size: [size]), st.just([1] * 30))
WINDOWS = st.builds(Windows, lanes=st.integers(1, 40), block=st.one_of(st.integers(1, 20), st.integers(100, 5000)))
Key = tuple[int, int]
KEYS = st.tuples(st.integers(0, 2**31), st.integers(0, 100))
KINDS = ("none", "shards", "within", "windows", "global")
KIND = st.sampled_from(KINDS)


def samples_of(sizes: list[int]) -> list[list[int]]:
    return [[shard, row] for shard, size in enumerate(sizes) for row in range(size)]


@pytest.mark.parametrize("windows", [Windows(4, 6000), Windows(3, 4096), Windows(256, 512), Windows(7, 4097)])
def test_every_sample_comes_once_when_blocks_are_large(windows: Windows) -> None:
    sizes = np.array([70_000, 3, 0, 20_001, 999], np.uint32)
    before, positions = sizes.copy(), np.arange(sizes.sum())
    shards, rows = ShardOrder(sizes, "windows", (1, 2), windows).locate(positions)
    starts = np.cumsum(sizes) - sizes
    assert np.array_equal(np.sort(starts[shards] + rows), positions)
    assert np.array_equal(positions, np.arange(len(positions))) and np.array_equal(sizes, before)


@given(sizes=SIZES, by=st.sampled_from(["within", "windows"]), key=KEYS, windows=WINDOWS)
def test_windows_follow_one_another(sizes: list[int], by: str, key: Key, windows: Windows) -> None:
    order, other = (order_of(sizes, by, some, windows) for some in (key, (*key, 1)))
    position = 0
    while position < order.count:
        end = order.window_end(position)
        inside = range(position, min(end, order.count))
        assert {order.window_end(p) for p in inside} == {end}
        if by == "within":  # another key permutes the samples of a window only
            assert sorted(located(order, inside)) == sorted(located(other, inside))
        position = end


def test_small_shards_share_a_window_when_each_is_shuffled_within() -> None:
    order = ShardOrder(np.full(100_000, 2), "within", (0, 0))
    assert order.window_end(0) == order.window_end(1023) == 1024
    assert order.window_end(1024) == 2048


@given(window=st.integers(0, 10**6), stretch=st.integers(0, 10**5))
def test_windows_hold_about_as_many_samples_as_are_asked_for(window: int, stretch: int) -> None:
    windows = Windows.of(window, stretch)
    assert 1 <= windows.lanes <= 256
    assert windows.lanes * windows.block <= max(1, window)
    assert windows.lanes * (windows.block + 1) > window
    assert windows.lanes == 1 or windows.lanes * max(1, stretch) <= window
    assert windows.lanes == 256 or 2 * windows.lanes * max(1, stretch) > window


@pytest.fixture
def _threads_switch_often() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("_threads_switch_often")
def test_threads_may_share_an_order() -> None:
    def make(number: int) -> ShardOrder:
        return ShardOrder(np.full(40, 50), "windows", (number,), Windows(64, 25))

    def look(order: Order, passes: Order, ready: threading.Barrier) -> list[list[list[int]]]:
        ready.wait()
        return [located(order), *(located(passes, range(at, at + 5)) for at in range(0, 8000, 400))]

    wanted = look(make(0), Passes(make, 4), threading.Barrier(1))
    with ThreadPoolExecutor(4) as pool:
        for _ in range(100):
            shared = make(0), Passes(make, 4), threading.Barrier(4)
            assert [found.result() for found in [pool.submit(look, *shared) for _ in range(4)]] == [wanted] * 4


@given(sizes=SIZES, by=KIND, key=KEYS, windows=WINDOWS, data=st.data())
def test_chosen_and_first_samples_are_located(
    sizes: list[int], by: str, key: Key, windows: Windows, data: st.DataObject
) -> None:
    inner = order_of(sizes, by, key, windows)
    whole = located(inner)
    chosen = data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=20)) if whole else []
    order = ChosenOrder(inner, np.array(chosen, np.int64))
    assert located(order) == [whole[p] for p in chosen]
    few = FirstOf(inner, len(chosen))
    assert located(few) == whole[: few.count]
    assert few.count == min(len(chosen), len(whole))


@given(sizes=SIZES, by=KIND, windows=WINDOWS, times=st.integers(0, 4))
def test_passes_follow_one_another(sizes: list[int], by: str, windows: Windows, times: int) -> None:
    passes = Passes(lambda number: order_of(sizes, by, (3, number), windows), times)
    assert passes.count == sum(sizes) * times
    alone = [located(order_of(sizes, by, (3, number), windows)) for number in range(times)]
    assert located(passes) == list(itertools.chain(*alone))
    for position in range(passes.count):
        end = passes.window_end(position)
        assert position < end <= (position // passes.pass_count + 1) * passes.pass_count


def test_epochs_before_are_made_once_they_are_asked_for() -> None:
    made = []

    def make(later: int) -> Order:
        made.append(later)
        return order_of([10], "global", (later,), Windows(1, 1))

    order = EpochOrder(make)
    located(order)
    assert made == [0]
    located(order, range(-3, 10))
    located(order, range(-5, 10))
    assert made == [0, -1]


def test_endless_passes_continue_and_empty_epochs_have_no_positions() -> None:
    passes = Passes(lambda number: order_of([10, 5], "windows", (number,), Windows(3, 2)), None)
    assert passes.count >= 2**60
    assert sorted(located(passes, range(15 * 10**9, 15 * 10**9 + 15))) == samples_of([10, 5])
    assert Passes(lambda number: order_of([], "none", (), Windows(1, 1)), None).count == 0
    order = EpochOrder(lambda later: order_of([], "shards", (later,), Windows(1, 1)))
    assert order.count == 0
    assert located(order) == []


def test_an_order_of_a_million_shards_takes_little_memory() -> None:
    sizes = np.random.default_rng(0).integers(0, 2001, 10**6)
    order = lambda: ShardOrder(sizes, "windows", (0, 0), Windows.of(131_072, 512))
    assert peak_of(lambda: order().locate(np.arange(10**8, 10**8 + 65_536))) < 64e6


JOINED = st.lists(st.integers(0, 40), min_size=1, max_size=6)
Pairs = list[list[int]]


def concat(sizes: Sequence[int]) -> ConcatOrder:
    return ConcatOrder([plain(size) for size in sizes], range(len(sizes)))


def interleave(sizes: Sequence[int], block: int) -> InterleaveOrder:
    return InterleaveOrder([plain(size) for size in sizes], InterleaveLayout(sizes, block), range(len(sizes)), 10)


def numbered(sizes: Sequence[int]) -> list[Pairs]:
    return [[[k, n] for n in range(size)] for k, size in enumerate(sizes)]


def by_hand(lists: list[Pairs], block: int) -> Pairs:
    starts = range(0, max(map(len, lists)), block)
    return [pair for start in starts for one in lists for pair in one[start : start + block]]


@settings(max_examples=200)
@given(JOINED, st.integers(1, 12), st.data())
def test_concat_and_interleave_equal_joined_lists(sizes: list[int], block: int, data: st.DataObject) -> None:
    joined = list(itertools.chain(*numbered(sizes)))
    for order, wanted in ((concat(sizes), joined), (interleave(sizes, block), by_hand(numbered(sizes), block))):
        assert order.count == len(wanted)
        assert located(order, range(order.count)) == wanted
        some = data.draw(st.lists(st.sampled_from(range(len(wanted))), max_size=30)) if wanted else []
        assert located(order, some) == [wanted[position] for position in some]


@given(JOINED, st.integers(1, 12))
def test_window_of_each_position_ends_after_it(sizes: list[int], block: int) -> None:
    for order in (concat(sizes), interleave(sizes, block)):
        ends = [order.window_end(position) for position in range(order.count)]
        assert all(end > position for position, end in enumerate(ends))
        assert ends == sorted(ends)


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
    lists = [[[k, n % size] for n in range(count)] for k, size, count in ((0, 4, 4), (1, 5, 90), (3, 2, 90))]
    assert located(order, range(120)) == by_hand(lists, block)[:120]
    far = ConcatOrder([plain(4), again(5)], range(2))
    assert far.count == ENDLESS
    assert located(far, [3, 4, 2**61 + 4]) == [[0, 3], [1, 0], [1, 2**61 % 5]]


@pytest.mark.parametrize("chosen", [range(300), range(5, 290), range(3, 300, 7), range(0, 300, 200)])
def test_a_stretch_keeps_the_windows_of_its_order(chosen: range) -> None:
    inner = order_of([100, 200], "windows", (1, 0, 0), Windows(4, 16))
    stretch = StretchOrder(inner, chosen)
    assert located(stretch) == located(inner, chosen)
    for number, position in enumerate(chosen):
        window = inner.window_end(position)
        same = [k for k in range(number, len(chosen)) if inner.window_end(chosen[k]) == window]
        assert min(stretch.window_end(number), len(chosen)) == same[-1] + 1
