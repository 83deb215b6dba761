"""Steps: all ranks together have each step's samples, whatever is still to come and however many ranks there are."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from unit import order_reference as reference

from headrace.errors import OptionError
from headrace.order import Cursor, Steps
from headrace.order.balance import dealt
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


@given(epoch=epochs())
def test_steps_follow_their_specification(epoch: Epoch) -> None:
    coming = [*expanded(epoch.begin.holes).tolist(), *range(epoch.begin.position, epoch.end)]
    wanted = reference.steps(coming, epoch.end, epoch.size, epoch.tail, epoch.world, epoch.lanes)
    for rank, steps in enumerate(epoch.all_ranks()):
        assert batches_of(steps) == [step[rank] for step in wanted]
        assert steps.steps == len(wanted)


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
def test_samples_done_by_a_rank_are_not_repeated(epoch: Epoch, data: st.DataObject) -> None:
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


@pytest.mark.parametrize(("samples", "size", "last"), [(18, 8, (5, 5)), (19, 8, (6, 5)), (11, 4, (7,))])
def test_last_two_steps_are_shared_or_one_when_a_rank_would_have_none(
    samples: int, size: int, last: tuple[int, ...]
) -> None:
    ranks = [Steps(Cursor.at(), samples, size, "short", rank, 4) for rank in range(4)]
    assert [steps.last for steps in ranks] == [last] * 4


def test_too_few_samples_for_the_ranks_are_an_error() -> None:
    with pytest.raises(OptionError, match="3 samples are left of the epoch for 4 ranks"):
        Steps(Cursor.at(), 3, 8, "short", 0, 4)
    with pytest.raises(OptionError, match="a step of 3 samples has none for some of 4 ranks"):
        Steps(Cursor.at(), 100, 3, "drop", 0, 4)


def test_endless_steps_continue_at_large_positions() -> None:
    steps = Steps(Cursor.at(10**15), 2**62, 8192, rank=77, world=1000, lanes=256)
    far = steps.positions(10**12, 10**12 + 50)
    assert (far > 8 * 10**12).all()
    assert len(set(far.tolist())) == 50


@given(work=st.lists(st.floats(0, 1e9), min_size=1, max_size=60), world=st.integers(1, 9))
def test_each_rank_gets_as_many_as_it_is_to(work: list[float], world: int) -> None:
    cuts = [rank * len(work) // world for rank in range(world + 1)]
    sizes = np.diff(cuts).tolist()
    ranks = dealt(np.array(work), sizes)
    assert np.bincount(ranks, minlength=world).tolist() == sizes
    assert np.array_equal(ranks, dealt(np.array(work), sizes))


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


def test_what_is_larger_than_all_others_is_alone_with_the_least() -> None:
    assert dealt(np.array([1.0, 100.0, 1.0, 2.0]), [2, 2]).tolist() in ([0, 1, 1, 0], [1, 0, 0, 1])


@given(world=st.integers(1, 5), size=st.integers(5, 12), count=st.integers(5, 80), done=st.integers(0, 5))
def test_steps_are_the_same_and_each_rank_has_its_part(world: int, size: int, count: int, done: int) -> None:
    def deal(positions: np.ndarray, sizes: list[int]) -> np.ndarray:
        return dealt((positions * 7919 % 13).astype(float), sizes)

    begin = Cursor.at(min(done, count - world))
    plain = [Steps(begin, count, size, rank=rank, world=world) for rank in range(world)]
    even = [Steps(begin, count, size, rank=rank, world=world, deal=deal) for rank in range(world)]
    at = [0] * world
    for step in range(plain[0].steps):
        sizes = [steps.samples(step + 1) - steps.samples(step) for steps in plain]
        mine = [steps.positions(k, k + n).tolist() for steps, k, n in zip(even, at, sizes, strict=True)]
        whole = [steps.positions(k, k + n).tolist() for steps, k, n in zip(plain, at, sizes, strict=True)]
        assert [len(one) for one in mine] == sizes
        assert sorted(itertools.chain(*mine)) == sorted(itertools.chain(*whole))
        assert all(one == sorted(one) for one in mine)
        at = [k + n for k, n in zip(at, sizes, strict=True)]
    assert [steps.positions(0, n).tolist() for steps, n in zip(even, at, strict=True)] == [
        [p for k in range(0, n, 3) for p in steps.positions(k, min(n, k + 3)).tolist()]
        for steps, n in zip(even, at, strict=True)
    ]
