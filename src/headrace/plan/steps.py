"""How an epoch is cut into steps, and each step into the batches of the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from headrace.errors import OptionError
from headrace.plan.cursor import Cursor, compressed
from headrace.plan.lanes import lane_turns
from headrace.types import Ints, Tail

Deal = Callable[[Ints, Sequence[int]], Ints]
"""Of positions, and of how many of them each rank gets: the rank of each."""


@dataclass(slots=True)
class Steps:
    """The steps of an epoch that are still to come, as one rank sees them.

    A step is the batch of all ranks together. Its positions are sorted by lanes, and each rank has a stretch of them:
    so the ranks' batches, one behind the other, are the batch of a single rank, for any number of them.

    Args:
        begin: what is to come.
        end: where the epoch ends.
        size: samples of a step.
        tail: what becomes of a last step that is short: "short" gives it; where it has fewer samples than there are
            ranks, the last two steps share what is left. "drop" leaves it out, "pad" fills it with the epoch's first
            samples, "carry" leaves it to the next epoch. "uneven" gives it, and some ranks may have no sample of it.
        rank, world: which share of each step is meant.
        lanes: positions of a step are sorted by the lane that their remainder by this has, see `lane_turns`.
        done: [k, 2]: ascending ranges of this rank's samples, counted from `begin`, that have been delivered already.
        deal: gives the rank of each of a step's positions, where ranks do not have a stretch each: as many for each
            rank as that would be, and they come in the same order.

    Raises:
        OptionError: a step, or all that is left, has fewer samples than there are ranks.
    """

    begin: Cursor
    end: int
    size: int
    tail: Tail = "short"
    rank: int = 0
    world: int = 1
    lanes: int = 1
    done: Ints = field(default_factory=lambda: np.zeros((0, 2), np.int64))
    deal: Deal | None = None
    full: int = field(init=False)
    last: tuple[int, ...] = field(init=False)
    _lane: Ints = field(init=False)  # of each turn
    _turn: Ints = field(init=False)  # of each lane
    _dealt: tuple[int, Ints] | None = field(init=False, default=None)  # the last step: (its begin, this rank's)

    def __post_init__(self) -> None:
        if self.size < self.world:
            raise OptionError(
                f"a step of {self.size} samples has none for some of {self.world} ranks: it must have at least "
                "one for each"
            )
        self._lane = lane_turns(self.lanes)
        self._turn = np.argsort(self._lane)
        left = self.left
        self.full, rest = divmod(left, self.size)
        self.last = ()
        if not rest or self.tail in ("drop", "carry"):
            return
        if self.tail == "pad":
            self.last = (self.size,)
        elif rest >= self.world or self.tail == "uneven":
            self.last = (rest,)
        elif not self.full:
            raise OptionError(
                f"{rest} samples are left of the epoch for {self.world} ranks: each step must have one for each; "
                "tail='drop' leaves them out, tail='uneven' gives some ranks none; tail='pad' repeats some, where "
                "samples have numbers"
            )
        else:
            self.full -= 1
            both = self.size + rest
            self.last = (both - both // 2, both // 2) if both // 2 >= self.world else (both,)

    @property
    def left(self) -> int:
        """How many samples of the epoch are to come, on all ranks together."""
        return max(0, self.end - self.begin.position) + self.begin.hole_count

    @property
    def repeated(self) -> int:
        """How many samples come a second time, to fill the last step."""
        return self.full * self.size + sum(self.last) - self.left if self.tail == "pad" else 0

    @property
    def left_out(self) -> int:
        """How many samples do not come, or come in the next epoch."""
        return self.left % self.size if self.tail in ("drop", "carry") else 0

    @property
    def steps(self) -> int:
        """How many steps there are."""
        return self.full + len(self.last)

    @property
    def batches(self) -> int:
        """The steps of which this rank has samples: all but for the last ones of tail="uneven"."""
        return self.full + sum(high > low for low, high in map(self._share, self.last))

    @property
    def batch(self) -> int:
        """How many samples of a full step are this rank's."""
        low, high = self._share(self.size)
        return high - low

    @property
    def whole(self) -> int:
        """How many samples are this rank's, delivered ones too."""
        return self.full * self.batch + sum(high - low for low, high in map(self._share, self.last))

    @property
    def before(self) -> int:
        """How many samples are of the ranks before this one, delivered ones too."""
        return self.full * self._share(self.size)[0] + sum(low for low, _ in map(self._share, self.last))

    @property
    def count(self) -> int:
        """How many samples of this rank's are to come."""
        return self.whole - int((self.done[:, 1] - self.done[:, 0]).sum())

    def sizes(self) -> tuple[int, int, tuple[int, ...]]:
        """This rank's batches that are to come: (samples in each, how many have so many, samples in those after)."""
        last = tuple(high - low for low, high in map(self._share, self.last))
        edge = self.full * self.batch
        done_full = int(np.clip(edge - self.done[:, 0], 0, self.done[:, 1] - self.done[:, 0]).sum())
        full, part = divmod(edge - done_full, self.batch)
        begins = np.cumsum([edge, *last])
        left = [
            size - sum(max(0, min(b, at + size) - max(a, at)) for a, b in self.done.tolist())
            for at, size in zip(begins.tolist(), last, strict=False)
        ]
        return self.batch, full, tuple(n for n in (part, *left) if n)

    def positions(self, start: int, stop: int) -> Ints:
        """The positions in the epoch of this rank's samples, from the `start`-th up to the `stop`-th to come."""
        return self._at(self._numbers(start, stop))

    def original(self, start: int, stop: int) -> Ints:
        """The same samples as ranges of numbers that count from `begin`, with those that are done."""
        return compressed(self._numbers(start, stop))

    def step_at(self, position: int) -> int:
        """How many of this rank's samples to come lie in steps that are wholly before a position."""
        steps = max(0, position - self.begin.position + self.begin.hole_count) // self.size
        edge = self.samples(steps)
        return edge - int(np.clip(edge - self.done[:, 0], 0, self.done[:, 1] - self.done[:, 0]).sum())

    def within(self, count: int) -> int:
        """How many whole steps this rank's first `count` samples are, delivered ones too."""
        if count < self.full * self.batch:
            return count // self.batch
        return next(steps for steps in range(self.steps, -1, -1) if self.samples(steps) <= count)

    def samples(self, steps: int) -> int:
        """How many samples of the first so many steps are this rank's, delivered ones too."""
        last = self.last[: max(0, steps - self.full)]
        return min(steps, self.full) * self.batch + sum(high - low for low, high in map(self._share, last))

    def after(self, steps: int) -> Cursor:
        """What is to come once so many steps have been delivered on all ranks."""
        if steps <= self.full:
            return self.begin.after(steps * self.size)
        return self.begin.after(min(self.left, self.full * self.size + sum(self.last[: steps - self.full])))

    def _share(self, size: int) -> tuple[int, int]:
        return share(size, self.rank, self.world)

    def _numbers(self, start: int, stop: int) -> Ints:
        """This rank's samples from the `start`-th up to the `stop`-th to come, counted with those that are done."""
        coming = np.arange(start, stop)
        if not len(self.done):
            return coming
        gaps = np.concatenate([[0], self.done[:, 1]])  # where those begin that are not done
        before = gaps - np.concatenate([[0], np.cumsum(self.done[:, 1] - self.done[:, 0])])  # of those to come
        gap = np.searchsorted(before, coming, side="right") - 1
        return np.asarray(coming + (gaps - before)[gap], np.int64)

    def _at(self, numbers: Ints) -> Ints:
        """The positions of this rank's samples with these ascending numbers, counted with those that are done."""
        if len(numbers) and numbers[-1] >= self.whole:
            raise IndexError(f"sample {numbers[-1]} of {self.whole}")
        batch, edge = self.batch, self.full * self.batch
        mine = numbers[: numbers.searchsorted(edge)]
        step = mine // batch
        positions = self._mine(step * self.size, self.size, mine - step * batch)
        if len(mine) == len(numbers):
            return positions
        pieces, begin = [positions], self.full * self.size
        for size in self.last:
            low, high = self._share(size)
            mine = numbers[numbers.searchsorted(edge) : numbers.searchsorted(edge + high - low)]
            pieces.append(self._mine(np.full(len(mine), begin), size, mine - edge))
            begin, edge = begin + size, edge + high - low
        return np.concatenate(pieces)

    def _mine(self, begins: Ints, size: int, inside: Ints) -> Ints:
        """The positions of these samples of this rank's batches.

        Args:
            begins: ascending: where each one's step begins among all samples to come.
            size: of these steps.
            inside: where each one lies in its batch.
        """
        if self.deal is None or self.world == 1:
            return self._in_steps(begins, size, inside + self._share(size)[0])
        positions = np.empty_like(inside)
        for begin in np.unique(begins).tolist():
            some = np.flatnonzero(begins == begin)
            positions[some] = self._dealt_to_it(begin, size)[inside[some]]
        return positions

    def _dealt_to_it(self, begin: int, size: int) -> Ints:
        """This rank's positions of a step."""
        if self._dealt is None or self._dealt[0] != begin:
            positions, ranks = self.dealt(begin, size)
            self._dealt = begin, positions[ranks == self.rank]
        return self._dealt[1]

    def dealt(self, begin: int, size: int) -> tuple[Ints, Ints]:
        """(the positions of a step that begins there, the rank of each)."""
        positions = self._in_steps(np.full(size, begin), size, np.arange(size))
        shares = [high - low for low, high in (share(size, rank, self.world) for rank in range(self.world))]
        ranks = np.repeat(np.arange(self.world), shares) if self.deal is None else self.deal(positions, shares)
        return positions, ranks

    def _in_steps(self, begins: Ints, size: int, inside: Ints) -> Ints:
        """The positions of samples of all ranks' batches together, see `_mine`."""
        if not len(inside):
            return inside
        held = self.begin.hole_count
        if begins[-1] + size > self.end - self.begin.position + held:  # a last one that is filled up
            return self._by_sorting(begins, size, inside)
        edge = int(begins.searchsorted(held))
        after = self._by_counting(self.begin.position - held + begins[edge:], size, inside[edge:])
        return np.concatenate([self._by_sorting(begins[:edge], size, inside[:edge]), after]) if edge else after

    def _by_counting(self, firsts: Ints, size: int, inside: Ints) -> Ints:
        """Of steps of successive positions from `firsts` on, sorted by lanes, the ones at `inside`.

        In time for these alone, and for the lanes: what a rank of 8,000 needs of a step is a small part of it.
        """
        if self.lanes == 1 or not len(firsts):
            return firsts + inside
        phases, phase = firsts[:1] % self.lanes, np.zeros(1, np.int64)
        if size % self.lanes and firsts[-1] != firsts[0]:
            phases, phase = np.unique(firsts % self.lanes, return_inverse=True)
        rounds, more = divmod(size, self.lanes)
        ahead = (self._turn - phases[:, None]) % self.lanes  # [phases, lanes]: of a lane's first position in the step
        sizes = rounds + (ahead < more)
        ends = np.cumsum(sizes, axis=1)
        rows = np.arange(len(phases))[:, None] * size
        lane = (ends + rows).ravel().searchsorted(inside + phase * size, side="right")
        return np.asarray(firsts + ahead.ravel()[lane] + (inside - (ends - sizes).ravel()[lane]) * self.lanes, np.int64)

    def _by_sorting(self, begins: Ints, size: int, inside: Ints) -> Ints:
        """The same of steps that have holes or are filled up."""
        first, stop = int(begins[0]), int(begins[-1]) + size
        positions = self.begin.coming(first, min(stop, self.left))
        if stop > self.left:
            again = np.arange(stop - self.left)  # what comes first in the epoch, or where it is empty, of what is left
            again = again % self.end if self.end else self.begin.coming(0, self.left)[again % self.left]
            positions = np.sort(np.concatenate([positions, again]))
        steps = positions.reshape(-1, size)
        order = np.argsort(self._lane[steps % self.lanes].astype(np.uint16), axis=1, kind="stable")
        return np.take_along_axis(steps, order, axis=1)[(begins - first) // size, inside]


def share(size: int, rank: int, world: int) -> tuple[int, int]:
    """Which of the samples of a step are a rank's: (the first, the one behind the last)."""
    return rank * size // world, (rank + 1) * size // world
