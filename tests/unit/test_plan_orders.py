"""Orders of an epoch: every sample once, any part by itself, windows apart from one another."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from builders.memory import peak_of
from builders.orders import located, order_of
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.order import ChosenOrder, EpochOrder, FirstOf, Order, Passes, ShardOrder, Windows
from headrace.order.windows import lane_turns

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


@given(sizes=SIZES, by=KIND, key=KEYS, windows=WINDOWS, data=st.data())
def test_parts_of_a_permutation(sizes: list[int], by: str, key: Key, windows: Windows, data: st.DataObject) -> None:
    order = order_of(sizes, by, key, windows)
    whole = located(order)
    assert order.count == sum(sizes)
    assert sorted(whole) == samples_of(sizes)
    positions = data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=30)) if whole else []
    assert located(order_of(sizes, by, key, windows), positions) == [whole[p] for p in positions]
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    assert located(order, range(start, stop)) == whole[start:stop]


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


def windows_of(order: Order) -> np.ndarray:
    """The window in which each sample of a pass over shards of one size comes."""
    shards, rows = order.locate(np.arange(order.count))
    windows = np.empty(order.count, np.int64)
    windows[shards * (rows.max() + 1) + rows] = np.arange(order.count) // order.window_end(0)
    return windows


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 2, 32, 64])
def test_samples_come_in_another_window_each_epoch_when_shards_are_equal(shards: int) -> None:
    count = 2**18  # 32 lanes, each of 16 blocks
    sizes = np.full(shards, count // shards)
    epochs = [windows_of(ShardOrder(sizes, "windows", (0, epoch), Windows(32, 512))) for epoch in range(9)]
    assert epochs[0].max() == 15
    same = np.mean([(a == b).mean() for a, b in itertools.pairwise(epochs)])
    assert 0.5 / 16 < same < 2 / 16
    alike = np.mean([(epoch == epochs[0]).all() for epoch in epochs[1:]])
    assert alike == 0


@pytest.mark.parametrize("shards", [1, 32, 64, 256])
def test_batch_has_rows_of_all_parts_of_equal_shards(shards: int) -> None:
    size, classes = 640_000 // shards, 100
    order = ShardOrder(np.full(shards, size), "windows", (0, 0), Windows.of(16_384, 512))
    _, rows = order.locate(np.arange(order.count))
    batches = rows.reshape(-1, 256)
    spread = (batches[:100] / size).std(axis=1).mean()
    assert 0.75 < spread * 12**0.5 < 1.25  # 1 where they are spread evenly
    assert batches[0].max() - batches[0].min() > 0.8 * size
    found = np.mean([len(np.unique(batch)) for batch in batches * classes // size])  # shards are sorted by class
    by_chance = classes * (1 - (1 - 1 / classes) ** order.lanes)  # of so many lanes, each in one class
    assert found > 0.8 * by_chance


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


@pytest.fixture
def _threads_switch_often() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("_threads_switch_often")
def test_threads_find_the_same_places_when_they_share_an_order() -> None:
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
def test_samples_are_chosen(sizes: list[int], by: str, key: Key, windows: Windows, data: st.DataObject) -> None:
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


@pytest.mark.slow
@given(count=st.integers(1, 40), by=KIND, start=st.integers(-100, 0), stop=st.integers(0, 40), windows=WINDOWS)
def test_negative_positions_are_in_earlier_epochs(count: int, by: str, start: int, stop: int, windows: Windows) -> None:
    def epoch(number: int) -> Order:  # two passes over 13 samples, as far as so many
        return FirstOf(Passes(lambda turn: order_of([9, 4], by, (number, turn), windows), 2), count)

    order = EpochOrder(lambda later: epoch(7 + later))
    size = order.count
    assert size == min(count, 26)
    whole = [sample for number in range(-100 // size, 1) for sample in located(epoch(7 + number))]
    stop = min(stop, size)
    assert located(order, range(start, stop)) == whole[len(whole) - size + start : len(whole) - size + stop]
    for position in range(start, stop):
        assert position < order.window_end(position)
        assert position >= 0 or order.window_end(position) <= (position // size + 1) * size


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


@pytest.mark.slow
@settings(max_examples=20)
@given(ranks=st.sampled_from([16, 96, 128]), more=st.integers(0, 40))
def test_a_shard_is_read_by_about_one_node(ranks: int, more: int) -> None:
    sizes = np.full(4000, 50)
    size = ranks * 16 + more  # also of no multiple of the lanes
    order = ShardOrder(sizes, "windows", (0, 0), Windows.of(16_384, 64))
    shards, _ = order.locate(np.arange(order.count))
    turns = lane_turns(order.lanes)
    nodes = np.empty(order.count, np.int64)
    for start in range(0, order.count, size):
        step = np.arange(start, min(start + size, order.count))
        step = step[np.argsort(turns[step % order.lanes], kind="stable")]
        ends = np.arange(ranks + 1) * len(step) // ranks
        nodes[step] = np.repeat(np.arange(ranks) // 8, np.diff(ends))
    assert len(np.unique(shards * ranks + nodes)) / len(sizes) <= 1.2
