"""Steps: all ranks together have each step's samples, whatever is still to come and however many ranks there are."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from unit import order_reference as reference

from headrace.errors import OptionError
from headrace.order import Cursor, Steps
from headrace.order.cursor import compressed, expanded
from headrace.types import Tail

NO_HOLES = np.zeros((0, 2), np.int64)
TAILS: tuple[Tail, ...] = ("short", "drop", "pad", "carry")


class Epoch(NamedTuple):
    begin: Cursor
    end: int
    size: int
    tail: Tail
    world: int
    lanes: int

    def steps(self, rank: int = 0, world: int | None = None, done: np.ndarray = NO_HOLES) -> Steps:
        return Steps(self.begin, self.end, self.size, self.tail, rank, world or self.world, self.lanes, done)

    def all_ranks(self) -> list[Steps]:
        return [self.steps(rank) for rank in range(self.world)]


@st.composite
def epochs(draw: st.DrawFn, tails: tuple[Tail, ...] = TAILS) -> Epoch:
    end = draw(st.integers(0, 300))
    position = draw(st.integers(0, end))
    below = draw(st.sets(st.integers(-20, position - 1), max_size=25))
    size = draw(st.integers(1, 60))
    epoch = Epoch(
        Cursor(position, compressed(np.array(sorted(below), np.int64))),
        end,
        size,
        draw(st.sampled_from(tails)),
        draw(st.integers(1, size)),
        draw(st.sampled_from([1, 2, 3, 8, 13, 64])),
    )
    left = end - position + len(below)
    assume(epoch.tail != "short" or left % size == 0 or left >= min(size, epoch.world))
    return epoch


def positions_of(steps: Steps) -> list[int]:
    return steps.positions(0, steps.count).tolist()


def cut(values: list[int], sizes: list[int]) -> list[list[int]]:
    ends = list(itertools.accumulate(sizes, initial=0))
    assert ends[-1] == len(values)
    return [values[a:b] for a, b in itertools.pairwise(ends)]


def batches_of(steps: Steps) -> list[list[int]]:
    size, full, more = steps.sizes()
    return cut(positions_of(steps), [size] * full + list(more))


@pytest.mark.slow
@given(epoch=epochs())
def test_steps_follow_their_specification(epoch: Epoch) -> None:
    coming = [*expanded(epoch.begin.holes).tolist(), *range(epoch.begin.position, epoch.end)]
    wanted = reference.steps(coming, epoch.end, epoch.size, epoch.tail, epoch.world, epoch.lanes)
    for rank, steps in enumerate(epoch.all_ranks()):
        assert batches_of(steps) == [step[rank] for step in wanted]
        assert steps.steps == len(wanted)


@given(epoch=epochs())
def test_batches_of_ranks_are_the_batch_of_one_rank_when_put_one_behind_the_other(epoch: Epoch) -> None:
    alone = epoch.steps(0, 1)
    together = [list(itertools.chain(*step)) for step in zip(*map(batches_of, epoch.all_ranks()), strict=True)]
    full = epoch.steps().full
    assert together[:full] == batches_of(alone)[:full]
    if alone.last == epoch.steps().last:  # where ranks share the last steps, a single rank need not
        assert together == batches_of(alone)


@given(epoch=epochs())
def test_ranks_have_as_many_steps_whose_sizes_differ_by_one_at_most(epoch: Epoch) -> None:
    sizes = [[len(batch) for batch in batches_of(steps)] for steps in epoch.all_ranks()]
    assert len({len(mine) for mine in sizes}) == 1
    for step in zip(*sizes, strict=True):
        assert max(step) - min(step) <= 1
        assert min(step) >= 1


@given(epoch=epochs())
def test_what_comes_is_what_was_left_each_once_but_for_the_tail(epoch: Epoch) -> None:
    came = sorted(itertools.chain(*map(positions_of, epoch.all_ranks())))
    steps = epoch.steps()
    coming = epoch.begin.coming(0, steps.left).tolist()
    assert steps.left == len(coming)
    if epoch.tail == "pad":
        assert steps.repeated == len(came) - len(coming) == -len(coming) % epoch.size
        again = list(range(epoch.end)) or coming
        assert came == sorted(coming + [again[k % len(again)] for k in range(steps.repeated)])
    elif epoch.tail in ("drop", "carry"):
        assert steps.left_out == len(coming) % epoch.size
        assert came == sorted(coming[: len(coming) - steps.left_out])
    else:
        assert steps.repeated == steps.left_out == 0
        assert came == sorted(coming)


@given(epoch=epochs(tails=("carry",)))
def test_the_next_epoch_begins_with_what_was_carried(epoch: Epoch) -> None:
    steps = epoch.steps()
    left = steps.after(steps.steps)
    begun = Cursor(0, compressed(left.coming(0, steps.left_out) - epoch.end))
    following = Steps(begun, epoch.end, epoch.size, "carry")
    assert following.left == epoch.end + steps.left_out
    taken = min(following.count, epoch.size)
    first = sorted(following.positions(0, taken).tolist())
    assert first == sorted((left.coming(0, steps.left_out) - epoch.end).tolist() + list(range(epoch.end)))[:taken]


@given(epoch=epochs(), data=st.data())
def test_a_part_of_a_ranks_samples_is_that_part_of_them_all(epoch: Epoch, data: st.DataObject) -> None:
    steps = epoch.steps(data.draw(st.integers(0, epoch.world - 1)))
    whole = positions_of(steps)
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    assert steps.positions(start, stop).tolist() == whole[start:stop]
    assert expanded(steps.original(start, stop)).tolist() == list(range(start, stop))


@given(epoch=epochs(), data=st.data())
def test_what_a_rank_has_done_does_not_come_again(epoch: Epoch, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, epoch.world - 1))
    whole = positions_of(epoch.steps(rank))
    gone = sorted(data.draw(st.sets(st.integers(0, len(whole) - 1)))) if whole else []
    steps = epoch.steps(rank, done=compressed(np.array(gone, np.int64)))
    numbers = [k for k in range(len(whole)) if k not in set(gone)]
    assert steps.count == len(numbers)
    assert positions_of(steps) == [whole[k] for k in numbers]
    start = data.draw(st.integers(0, len(numbers)))
    stop = data.draw(st.integers(start, len(numbers)))
    assert steps.positions(start, stop).tolist() == [whole[k] for k in numbers[start:stop]]
    assert expanded(steps.original(start, stop)).tolist() == numbers[start:stop]
    size, full, more = steps.sizes()
    assert size * full + sum(more) == steps.count
    assert all(more)


@given(epoch=epochs(), data=st.data())
def test_after_some_steps_the_rest_comes_as_it_would_have(epoch: Epoch, data: st.DataObject) -> None:
    steps = epoch.steps()
    taken = data.draw(st.integers(0, steps.steps))
    later = epoch._replace(begin=steps.after(taken))
    for rank in range(epoch.world):
        rest = batches_of(epoch.steps(rank))[taken:]
        assert batches_of(later.steps(rank)) == rest


@given(epoch=epochs())
def test_nothing_comes_after_the_last_step(epoch: Epoch) -> None:
    steps = epoch.steps()
    later = epoch._replace(begin=steps.after(steps.steps)).steps()
    assert later.count == later.steps == 0
    with pytest.raises(IndexError):
        steps.positions(steps.count, steps.count + 1)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 63, 64, 65, 100, 4096])
@pytest.mark.parametrize("lanes", [1, 7, 64, 256])
def test_long_stretches_equal_steps_one_by_one(size: int, lanes: int) -> None:
    steps = Steps(Cursor.at(11), 20_000, size, lanes=lanes)
    one_by_one = [steps.positions(k * size, (k + 1) * size) for k in range(steps.full)]
    assert steps.positions(0, steps.full * size).tolist() == np.concatenate(one_by_one).tolist()


def test_the_last_two_steps_are_shared_when_a_rank_would_have_none() -> None:
    ranks = [Steps(Cursor.at(), 18, 8, "short", rank, 4) for rank in range(4)]
    assert [steps.last for steps in ranks] == [(5, 5)] * 4
    assert [[len(batch) for batch in batches_of(steps)] for steps in ranks] == [[2, 1, 1]] * 3 + [[2, 2, 2]]


def test_the_last_two_steps_become_one_when_they_cannot_be_shared() -> None:
    assert Steps(Cursor.at(), 11, 4, "short", 0, 4).last == (7,)


def test_too_few_samples_for_the_ranks_are_an_error() -> None:
    with pytest.raises(OptionError, match="3 samples are left of the epoch for 4 ranks"):
        Steps(Cursor.at(), 3, 8, "short", 0, 4)
    with pytest.raises(OptionError, match="a step of 3 samples has none for some of 4 ranks"):
        Steps(Cursor.at(), 100, 3, "drop", 0, 4)


def test_what_has_no_end_goes_on_far_out() -> None:
    steps = Steps(Cursor.at(10**15), 2**62, 8192, rank=77, world=1000, lanes=256)
    far = steps.positions(10**12, 10**12 + 50)
    assert (far > 8 * 10**12).all()
    assert len(set(far.tolist())) == 50


@settings(max_examples=30)
@given(phase=st.integers(0, 10**6), size=st.integers(1, 500), lanes=st.integers(1, 64))
def test_a_step_is_sorted_by_lanes(phase: int, size: int, lanes: int) -> None:
    turns = reference.turns(lanes)
    found = Steps(Cursor.at(phase), phase + size, size, lanes=lanes).positions(0, size).tolist()
    assert found == sorted(range(phase, phase + size), key=lambda p: (turns[p % lanes], p))
