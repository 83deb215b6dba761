"""Steps and cursors: the rest of an epoch for any number of ranks, and every sample once after any resume."""

from __future__ import annotations

import base64
import itertools
import json
import random
import zlib
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
from builders.numbers import peak_of
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from unit import order_reference as reference

from headrace.errors import OptionError
from headrace.order.cursor import Cursor, among_left, compressed, expanded, pack_ranges, united, unpack_ranges
from headrace.order.orders import ShardOrder, Windows
from headrace.order.steps import Steps, dealt
from headrace.state.state import Fingerprint, State, merged
from headrace.types import Tail

state_of = partial(State, fingerprint=Fingerprint(seed=0, data=""))
NO_HOLES = np.zeros((0, 2), np.int64)
TAILS: tuple[Tail, ...] = ("short", "drop", "pad", "carry")


class Epoch(NamedTuple):
    begin: Cursor
    end: int
    size: int
    tail: Tail
    world: int
    lanes: int

    def steps(self, rank: int = 0, done: np.ndarray = NO_HOLES) -> Steps:
        return Steps(self.begin, self.end, self.size, self.tail, rank, self.world, self.lanes, done)


@st.composite
def epochs(draw: st.DrawFn) -> Epoch:
    end = draw(st.integers(0, 300))
    position = draw(st.integers(0, end))
    below = draw(st.sets(st.integers(-20, position - 1), max_size=25))
    size = draw(st.integers(1, 60))
    epoch = Epoch(
        Cursor(position, compressed(np.array(sorted(below), np.int64))),
        end,
        size,
        draw(st.sampled_from(TAILS)),
        draw(st.integers(1, size)),
        draw(st.sampled_from([1, 2, 3, 8, 13, 64])),
    )
    left = end - position + len(below)
    assume(epoch.tail != "short" or left % size == 0 or left >= min(size, epoch.world))
    return epoch


def positions_of(steps: Steps) -> list[int]:
    return steps.positions(0, steps.count).tolist()


def batches_of(steps: Steps) -> list[list[int]]:
    size, full, more = steps.sizes()
    ends = list(itertools.accumulate([size] * full + list(more), initial=0))
    assert ends[-1] == steps.count
    return [steps.positions(a, b).tolist() for a, b in itertools.pairwise(ends)]


@given(epoch=epochs())
def test_steps_follow_their_specification(epoch: Epoch) -> None:
    coming = [*expanded(epoch.begin.holes).tolist(), *range(epoch.begin.position, epoch.end)]
    wanted = reference.steps(coming, epoch.end, epoch.size, epoch.tail, epoch.world, epoch.lanes)
    for rank in range(epoch.world):
        assert batches_of(epoch.steps(rank)) == [step[rank] for step in wanted]
        assert epoch.steps(rank).steps == len(wanted)


@given(epoch=epochs())
def test_steps_count_samples_that_are_left_repeated_or_dropped(epoch: Epoch) -> None:
    steps = epoch.steps()
    delivered = sum(epoch.steps(rank).count for rank in range(epoch.world))
    assert steps.left == epoch.end - epoch.begin.position + epoch.begin.hole_count
    rest = steps.left % epoch.size
    assert steps.repeated == (-rest % epoch.size if epoch.tail == "pad" else 0)
    assert steps.left_out == (rest if epoch.tail in ("drop", "carry") else 0)
    assert delivered == steps.left + steps.repeated - steps.left_out


@given(epoch=epochs(), data=st.data())
def test_samples_done_by_a_rank_are_not_repeated(epoch: Epoch, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, epoch.world - 1))
    whole = positions_of(epoch.steps(rank))
    gone = sorted(data.draw(st.sets(st.integers(0, len(whole) - 1)))) if whole else []
    steps = epoch.steps(rank, done=compressed(np.array(gone, np.int64)))
    numbers = [k for k in range(len(whole)) if k not in set(gone)]
    assert positions_of(steps) == [whole[k] for k in numbers]
    start = data.draw(st.integers(0, len(numbers)))
    stop = data.draw(st.integers(start, len(numbers)))
    assert steps.positions(start, stop).tolist() == [whole[k] for k in numbers[start:stop]]
    assert expanded(steps.original(start, stop)).tolist() == numbers[start:stop]
    size, full, more = steps.sizes()
    assert size * full + sum(more) == steps.count
    assert all(more)


@given(epoch=epochs(), data=st.data())
def test_steps_after_a_cursor_equal_the_uninterrupted_ones(epoch: Epoch, data: st.DataObject) -> None:
    steps = epoch.steps()
    taken = data.draw(st.integers(0, steps.steps))
    later = epoch._replace(begin=steps.after(taken))
    for rank in range(epoch.world):
        assert batches_of(later.steps(rank)) == batches_of(epoch.steps(rank))[taken:]
    with pytest.raises(IndexError):
        steps.positions(steps.count, steps.count + 1)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 63, 64, 65, 100, 4096])
@pytest.mark.parametrize("lanes", [1, 7, 64, 256])
def test_long_stretches_equal_steps_one_by_one(size: int, lanes: int) -> None:
    steps = Steps(Cursor.at(11), 20_000, size, lanes=lanes)
    one_by_one = [steps.positions(k * size, (k + 1) * size) for k in range(steps.full)]
    assert steps.positions(0, steps.full * size).tolist() == np.concatenate(one_by_one).tolist()


def test_too_few_samples_for_the_ranks_are_an_error() -> None:
    with pytest.raises(OptionError, match="3 samples are left of the epoch for 4 ranks"):
        Steps(Cursor.at(), 3, 8, "short", 0, 4)
    with pytest.raises(OptionError, match="steps of 3 samples for 4 ranks"):
        Steps(Cursor.at(), 100, 3, "drop", 0, 4)


def test_endless_steps_continue_at_large_positions() -> None:
    steps = Steps(Cursor.at(10**15), 2**62, 8192, rank=77, world=1000, lanes=256)
    far = steps.positions(10**12, 10**12 + 50)
    assert (far > 8 * 10**12).all()
    assert len(set(far.tolist())) == 50


@pytest.mark.parametrize("world", [2, 8, 64])
@pytest.mark.parametrize("power", [1, 2])
def test_packed_documents_are_dealt_evenly(world: int, power: int) -> None:
    """Sequences of documents, 16 for each rank: what lognormal documents in sequences of 4,096 tokens are."""
    random = np.random.default_rng(0)
    for _ in range(5):
        work = np.zeros(16 * world)
        for sequence in range(len(work)):
            room = 4096
            while room:
                length = min(room, int(random.lognormal(np.log(600), 1)) + 1)
                work[sequence] += float(length) ** power
                room -= length
        loads = np.bincount(dealt(work, [16] * world), work, world)
        in_turn = work.reshape(world, 16).sum(axis=1)
        assert loads.max() <= 1.02 * loads.mean()
        assert loads.max() <= in_turn.max()


@given(world=st.integers(1, 5), size=st.integers(5, 12), count=st.integers(5, 80), done=st.integers(0, 5))
def test_dealt_steps_have_the_same_samples_and_sizes(world: int, size: int, count: int, done: int) -> None:
    def deal(positions: np.ndarray, sizes: list[int]) -> np.ndarray:
        return dealt((positions * 7919 % 13).astype(float), sizes)

    begin = Cursor.at(min(done, count - world))
    plain = [batches_of(Steps(begin, count, size, rank=rank, world=world)) for rank in range(world)]
    even = [Steps(begin, count, size, rank=rank, world=world, deal=deal) for rank in range(world)]
    for some, wanted in zip(zip(*map(batches_of, even), strict=True), zip(*plain, strict=True), strict=True):
        assert list(map(len, some)) == list(map(len, wanted))
        assert sorted(itertools.chain(*some)) == sorted(itertools.chain(*wanted))
        assert all(one == sorted(one) for one in some)
    for steps in even:
        parts = (steps.positions(k, min(steps.count, k + 3)).tolist() for k in range(0, steps.count, 3))
        assert positions_of(steps) == list(itertools.chain(*parts))


NUMBERS = st.sets(st.integers(-30, 200), max_size=60).map(sorted)


@st.composite
def cursors(draw: st.DrawFn) -> Cursor:
    position = draw(st.integers(0, 100))
    below = draw(st.sets(st.integers(-20, position - 1), max_size=30))
    return Cursor(position, compressed(np.array(sorted(below), np.int64)))


def coming(cursor: Cursor, count: int = 150) -> list[int]:
    return cursor.coming(0, count).tolist()


@given(numbers=NUMBERS)
def test_ranges_hold_their_numbers_before_and_after_json(numbers: list[int]) -> None:
    ranges = compressed(np.array(numbers, np.int64))
    assert expanded(ranges).tolist() == numbers
    assert (ranges[:, 0] < ranges[:, 1]).all()
    assert (ranges[1:, 0] > ranges[:-1, 1]).all()
    assert unpack_ranges(json.loads(json.dumps(pack_ranges(ranges)))).tolist() == ranges.tolist()


HALF_OF_ALL = np.flatnonzero(np.random.default_rng(1).random(100_000) < 0.5)


@pytest.mark.parametrize(("numbers", "kind"), [
    *((HALF_OF_ALL + first, str) for first in (-70_000, -5, 0, 10**15)),
    (np.arange(1000) * 10**9, list),
])  # fmt: skip
def test_many_ranges_are_packed_in_short_text_where_they_are_near_one_another(numbers: np.ndarray, kind: type) -> None:
    packed = pack_ranges(compressed(numbers))
    assert isinstance(packed, kind)
    assert len(packed) < 20_000
    assert np.array_equal(expanded(unpack_ranges(json.loads(json.dumps(packed)))), numbers)


@pytest.mark.parametrize("packed", [
    [1], [0, 0], [0, -1], [0, 2, 0, 1], [0, 2, -1, 1], [0.5, 1], ["0", "1"], [None, 1], [True, True], [2**63, 1],
    [0, 2**63], [2**61, 2**61], "", "5", "x:eJw=", "5:eJw=", "5:?", "5:YWJj", f"{2**63}:eJxrAAAAgQCB",
    "0:" + base64.b64encode(zlib.compress(bytes(2**24))).decode(),  # too many
])  # fmt: skip
def test_damaged_ranges_are_refused(packed: Any) -> None:
    with pytest.raises(ValueError):
        unpack_ranges(packed)


@given(cursor=cursors(), data=st.data())
def test_holes_come_first_and_then_the_rest(cursor: Cursor, data: st.DataObject) -> None:
    whole = coming(cursor)
    assert whole == [*expanded(cursor.holes).tolist(), *range(cursor.position, cursor.position + 150)][:150]
    start = data.draw(st.integers(0, 150))
    stop = data.draw(st.integers(start, 150))
    assert cursor.coming(start, stop).tolist() == whole[start:stop]
    assert coming(cursor.after(start), 150 - start) == whole[start:]
    assert cursor.without(np.zeros(0, np.int64)) is cursor


@given(cursor=cursors(), numbers=st.sets(st.integers(0, 70), max_size=60))
def test_delivered_samples_are_removed_from_a_cursor(cursor: Cursor, numbers: set[int]) -> None:
    whole = coming(cursor)
    delivered = np.array([whole[k] for k in numbers], np.int64)
    left = cursor.without(np.random.default_rng(0).permutation(delivered))
    others = sorted(set(whole) - set(delivered.tolist()))
    assert coming(left, len(others)) == others
    assert left.position >= cursor.position
    assert (left.holes[1:, 0] > left.holes[:-1, 1]).all()
    assert left.hole_count <= cursor.hole_count + 71


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=10))
def test_united_ranges_hold_the_same_numbers(ranges: list[tuple[int, int]]) -> None:
    found = united(ranges)
    assert sorted({n for a, b in ranges for n in range(a, b)}) == [n for a, b in found for n in range(a, b)]
    assert all(a[1] < b[0] for a, b in itertools.pairwise(found))


@given(gone=st.sets(st.integers(0, 60), max_size=40), start=st.integers(0, 50), count=st.integers(0, 50))
def test_ranges_among_remaining_numbers_are_translated(gone: set[int], start: int, count: int) -> None:
    ranges = united((n, n + 1) for n in gone)
    left = [n for n in range(200) if n not in gone]
    found = [n for a, b in among_left(start, start + count, ranges) for n in range(a, b)]
    assert found == left[start : start + count]


def steps_of(part: State) -> Steps:
    return Steps(part.cursor, part.end, part.step, part.tail, part.rank or 0, part.world, part.lanes)


@st.composite
def states(draw: st.DrawFn) -> list[State]:
    position = draw(st.integers(0, 40))
    holes = sorted(draw(st.sets(st.integers(-10, position - 1), max_size=12)))
    cursor = Cursor(position, compressed(np.array(holes, np.int64)))
    world = draw(st.integers(1, 5))
    step = draw(st.integers(world, 12))
    tail = draw(st.sampled_from(["short", "drop", "pad", "carry"]))
    end = position + draw(st.integers(world, 90))
    lanes = draw(st.integers(1, 9))
    parts = []
    for rank in range(world):
        part = state_of(cursor=cursor, end=end, step=step, tail=tail, rank=rank, world=world, lanes=lanes)
        whole = steps_of(part).whole
        begun = draw(st.integers(0, whole))
        more = draw(st.sets(st.integers(0, whole - 1), max_size=6)) if whole else set()
        parts.append(replace(part, received=united([(0, begun), *((n, n + 1) for n in more)])))
    return parts


@pytest.mark.slow
@settings(max_examples=200)
@given(parts=states())
def test_merged_states_leave_samples_no_rank_received(parts: list[State]) -> None:
    received = set()
    for part in parts:
        for start, stop in part.received:
            received.update(steps_of(part).positions(start, stop).tolist())
    cursor, end = parts[0].cursor, parts[0].end
    planned = [*expanded(cursor.holes).tolist(), *range(cursor.position, end)]
    left = merged(parts)
    assert [*expanded(left.holes).tolist(), *range(left.position, end)] == [p for p in planned if p not in received]
    assert left.position <= end


def test_a_billion_received_samples_are_merged_without_a_list_of_them() -> None:
    world, step, lanes, billion = 4, 4096, 256, 10**9
    mine = billion // world
    done = ((0, mine - 100), (mine - 50, mine))
    parts = [
        state_of(cursor=Cursor.at(), received=done, end=10 * billion, step=step, lanes=lanes, rank=rank, world=world)
        for rank in range(world)
    ]
    assert peak_of(lambda: merged(parts)) < 2e6
    cursor = merged(parts)
    assert cursor.position <= billion + 2 * step
    left = cursor.hole_count + 10 * billion - cursor.position
    assert left == 9 * billion + 50 * world


def test_merging_begins_where_it_differs_when_an_epoch_has_holes() -> None:
    cursor = Cursor(1000, np.array([[-5, -1], [10, 400]]))
    parts = [state_of(cursor=cursor, received=((0, 5000 + r),), end=10**6, step=64, rank=r, world=2) for r in range(2)]
    left = merged(parts)
    received = np.concatenate([steps_of(part).positions(0, 5000 + rank) for rank, part in enumerate(parts)])
    planned = np.concatenate([expanded(cursor.holes), np.arange(1000, 20_000)])
    coming = np.setdiff1d(planned, received)
    assert np.array_equal(left.coming(0, len(coming)), coming)


def test_state_of_one_rank_covers_that_rank_only() -> None:
    part = state_of(cursor=Cursor.at(), received=((0, 8),), end=40, step=8, rank=1, world=2)
    assert merged([part]).coming(0, 12).tolist() == [0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19]


@pytest.mark.parametrize("first", [0, 10**12])
def test_range_far_ahead_is_removed_without_a_list_of_earlier_positions(first: int) -> None:
    far = np.arange(first + 5, first + 10)
    assert peak_of(lambda: Cursor.at().without(far)) < 1e6
    left = Cursor.at().without(far)
    assert left.position == first + 10
    assert left.holes.tolist() == [[0, first + 5]]


@pytest.mark.slow
def test_a_state_stays_small_when_a_thousand_ranks_were_not_equally_far() -> None:
    chance = random.Random(13)
    order = ShardOrder(np.full(1000, 1000), "windows", (1, 2), Windows.of(131_072, 512))
    ranks = [Steps(Cursor.at(), order.count, 32 * 1024, "short", rank, 1024, order.lanes) for rank in range(1024)]
    delivered = np.concatenate([unequal(chance, steps, 20) for steps in ranks])
    cursor = Cursor.at().without(delivered)
    assert cursor.hole_count + len(delivered) == cursor.position
    assert len(json.dumps([cursor.position, pack_ranges(cursor.holes)])) <= 40_000


def unequal(chance: random.Random, steps: Steps, reached: int) -> np.ndarray:
    size, full, more = steps.sizes()
    all_of_them = size * min(reached, full) + sum(more[: max(0, reached - full)])
    count = all_of_them if chance.random() < 0.3 else chance.randint(max(0, all_of_them - 2 * size), all_of_them)
    mine = steps.positions(0, all_of_them)
    jumbled = mine[max(0, count - size) : count + size].copy()
    np.random.default_rng(chance.randrange(2**32)).shuffle(jumbled)
    return np.concatenate([mine[: max(0, count - size)], jumbled])[:count]
