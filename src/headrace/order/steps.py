"""Division of an epoch into steps, and of each step into the batches of ranks."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from headrace._util import check
from headrace.errors import OptionError
from headrace.order.cursor import Cursor, compressed
from headrace.order.orders import lane_turns
from headrace.types import Ints, Tail

Deal = Callable[[Ints, Sequence[int]], Ints]
"""Returns the rank of each position, given the positions and the number of them for each rank."""


@dataclass(slots=True)
class Steps:
    """The remaining steps of an epoch, as one rank sees them.

    A step is the global batch of all ranks. Its positions are sorted by lanes, and each rank has a stretch of them. So
    for any number of ranks, their concatenated batches are the batch of a single rank.

    Args:
        tail: Treatment of a short last step. "short": it is delivered; if it has fewer samples than there are ranks,
            the last two steps share their samples. "drop": it is dropped. "pad": it is filled with the epoch's first
            samples. "carry": its samples move to the next epoch. "uneven": it is delivered, and some ranks may have no
            sample of it.
        lanes: Positions of a step are sorted by the lane of their remainder modulo this; see `lane_turns`.
        done: [k, 2]: ascending ranges of this rank's samples, counted from `begin`, that have been delivered.
        deal: Assigns the positions of a step to ranks, instead of stretches. Counts per rank and the order stay the
            same.

    Raises:
        OptionError: A step, or the rest of the epoch, has fewer samples than there are ranks.
    """

    first_window: ClassVar[int | None] = None  # see `PackedRows`

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
    _lane: Ints = field(init=False)  # lane of each turn
    _turn: Ints = field(init=False)  # turn of each lane
    _dealt: tuple[int, Ints] | None = field(init=False, default=None)  # last step: (start, this rank's positions)

    def __post_init__(self) -> None:
        if self.size < self.world:
            raise check.too_few(f"steps of {self.size} samples", self.world, "make them larger")
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
            raise few_left(rest, self.world)
        else:
            self.full -= 1
            both = self.size + rest
            self.last = (both - both // 2, both // 2) if both // 2 >= self.world else (both,)

    @property
    def left(self) -> int:
        return max(0, self.end - self.begin.position) + self.begin.hole_count

    @property
    def repeated(self) -> int:
        return self.full * self.size + sum(self.last) - self.left if self.tail == "pad" else 0

    @property
    def left_out(self) -> int:
        """Number of samples that are dropped, or carried to the next epoch."""
        return self.left % self.size if self.tail in ("drop", "carry") else 0

    @property
    def steps(self) -> int:
        return self.full + len(self.last)

    @property
    def batches(self) -> int:
        """Number of steps with samples of this rank; fewer than `steps` only with last_batch="uneven"."""
        return self.full + sum(high > low for low, high in map(self._share, self.last))

    @property
    def batch(self) -> int:
        low, high = self._share(self.size)
        return high - low

    @property
    def whole(self) -> int:
        """This rank's samples, including delivered ones."""
        return self.full * self.batch + sum(high - low for low, high in map(self._share, self.last))

    @property
    def before(self) -> int:
        """Samples of the lower ranks, including delivered ones."""
        return self.full * self._share(self.size)[0] + sum(low for low, _ in map(self._share, self.last))

    @property
    def count(self) -> int:
        return self.whole - int((self.done[:, 1] - self.done[:, 0]).sum())

    def sizes(self) -> tuple[int, int, tuple[int, ...]]:
        """Return the remaining batches' size if full, number of full ones, and sizes of the others."""
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
        """Return the positions of this rank's remaining samples number `start` to `stop` - 1."""
        return self._at(self._numbers(start, stop))

    def original(self, start: int, stop: int) -> Ints:
        """Return these samples as ranges of numbers counted from `begin`, including delivered ones."""
        return compressed(self._numbers(start, stop))

    def step_at(self, position: int) -> int:
        """Return the number of this rank's remaining samples in whole steps before a position."""
        steps = max(0, position - self.begin.position + self.begin.hole_count) // self.size
        edge = self.samples(steps)
        return edge - int(np.clip(edge - self.done[:, 0], 0, self.done[:, 1] - self.done[:, 0]).sum())

    def within(self, count: int) -> int:
        """Return the number of whole steps in this rank's first `count` samples, delivered ones too."""
        if count < self.full * self.batch:
            return count // self.batch
        return next(steps for steps in range(self.steps, -1, -1) if self.samples(steps) <= count)

    def samples(self, steps: int) -> int:
        """Return the number of this rank's samples in the first steps, including delivered ones."""
        last = self.last[: max(0, steps - self.full)]
        return min(steps, self.full) * self.batch + sum(high - low for low, high in map(self._share, last))

    def after(self, steps: int) -> Cursor:
        """Return the remaining positions after delivery of this many steps on all ranks."""
        if steps <= self.full:
            return self.begin.after(steps * self.size)
        return self.begin.after(min(self.left, self.full * self.size + sum(self.last[: steps - self.full])))

    def _share(self, size: int) -> tuple[int, int]:
        return share(size, self.rank, self.world)

    def _numbers(self, start: int, stop: int) -> Ints:
        """Convert indices of remaining samples to numbers that count delivered ones."""
        coming = np.arange(start, stop)
        if not len(self.done):
            return coming
        gaps = np.concatenate([[0], self.done[:, 1]])  # starts of the gaps, which are not delivered
        before = gaps - np.concatenate([[0], np.cumsum(self.done[:, 1] - self.done[:, 0])])  # remaining before each
        gap = np.searchsorted(before, coming, side="right") - 1
        return np.asarray(coming + (gaps - before)[gap], np.int64)

    def _at(self, numbers: Ints) -> Ints:
        """Return the positions of this rank's samples by ascending number, delivered ones too."""
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
        """Return positions of samples `inside` of this rank's batches.

        `begins` are the starts of their steps among remaining samples, ascending.
        """
        if self.deal is None or self.world == 1:
            return self._in_steps(begins, size, inside + self._share(size)[0])
        positions = np.empty_like(inside)
        for begin in np.unique(begins).tolist():
            some = np.flatnonzero(begins == begin)
            positions[some] = self._dealt_to_it(begin, size)[inside[some]]
        return positions

    def _dealt_to_it(self, begin: int, size: int) -> Ints:
        if self._dealt is None or self._dealt[0] != begin:
            positions, ranks = self.dealt(begin, size)
            self._dealt = begin, positions[ranks == self.rank]
        return self._dealt[1]

    def dealt(self, begin: int, size: int) -> tuple[Ints, Ints]:
        positions = self._in_steps(np.full(size, begin), size, np.arange(size))
        shares = [high - low for low, high in (share(size, rank, self.world) for rank in range(self.world))]
        ranks = np.repeat(np.arange(self.world), shares) if self.deal is None else self.deal(positions, shares)
        return positions, ranks

    def _in_steps(self, begins: Ints, size: int, inside: Ints) -> Ints:
        """Return the positions of samples in global batches; arguments as for `_mine`."""
        if not len(inside):
            return inside
        held = self.begin.hole_count
        if begins[-1] + size > self.end - self.begin.position + held:  # a padded last step
            return self._by_sorting(begins, size, inside)
        edge = int(begins.searchsorted(held))
        after = self._by_counting(self.begin.position - held + begins[edge:], size, inside[edge:])
        return np.concatenate([self._by_sorting(begins[:edge], size, inside[:edge]), after]) if edge else after

    def _by_counting(self, firsts: Ints, size: int, inside: Ints) -> Ints:
        """Return samples `inside` of steps of consecutive positions from `firsts`, sorted by lanes.

        Takes time for these samples and for the lanes only: one of 8,000 ranks needs a small part of a step.
        """
        if self.lanes == 1 or not len(firsts):
            return firsts + inside
        phases, phase = firsts[:1] % self.lanes, np.zeros(1, np.int64)
        if size % self.lanes and firsts[-1] != firsts[0]:
            phases, phase = np.unique(firsts % self.lanes, return_inverse=True)
        rounds, more = divmod(size, self.lanes)
        ahead = (self._turn - phases[:, None]) % self.lanes  # [phases, lanes]: a lane's first position in the step
        sizes = rounds + (ahead < more)
        ends = np.cumsum(sizes, axis=1)
        rows = np.arange(len(phases))[:, None] * size
        lane = (ends + rows).ravel().searchsorted(inside + phase * size, side="right")
        return np.asarray(firsts + ahead.ravel()[lane] + (inside - (ends - sizes).ravel()[lane]) * self.lanes, np.int64)

    def _by_sorting(self, begins: Ints, size: int, inside: Ints) -> Ints:
        """Return samples as `_by_counting` does, for steps with holes or padding."""
        first, stop = int(begins[0]), int(begins[-1]) + size
        positions = self.begin.coming(first, min(stop, self.left))
        if stop > self.left:
            again = np.arange(stop - self.left)  # first samples of the epoch, or of the rest
            again = again % self.end if self.end else self.begin.coming(0, self.left)[again % self.left]
            positions = np.sort(np.concatenate([positions, again]))
        steps = positions.reshape(-1, size)
        order = np.argsort(self._lane[steps % self.lanes].astype(np.uint16), axis=1, kind="stable")
        return np.take_along_axis(steps, order, axis=1)[(begins - first) // size, inside]


def few_left(samples: int, ranks: int) -> OptionError:
    drop = "hr.Ranks(last_batch='drop') drops them, 'uneven' gives some ranks none"
    return check.too_few(
        f"{samples} samples are left of the epoch", ranks, f"{drop}, and 'pad' repeats some, where samples have numbers"
    )


def share(size: int, rank: int, world: int) -> tuple[int, int]:
    return rank * size // world, (rank + 1) * size // world


Work = NDArray[np.float64]

_CLOSE = 1e-4  # of the mean work: smaller differences are ignored
_SWAPS = 8  # maximum, per rank


def dealt(work: Work, sizes: Sequence[int]) -> Ints:
    """Return the rank of each sample. Deterministic.

    Samples are assigned in order of decreasing work, each to the rank with the least work and a free place. Then the
    ranks with the most and the least work exchange samples while that reduces their difference.
    """
    ranks = np.empty(len(work), np.int64)
    loads = [(0.0, rank) for rank in range(len(sizes)) if sizes[rank]]
    left = list(sizes)
    for sample in np.argsort(-work, kind="stable").tolist():
        load, rank = heapq.heappop(loads)
        ranks[sample] = rank
        left[rank] -= 1
        if left[rank]:
            heapq.heappush(loads, (load + float(work[sample]), rank))
    _exchange(work, ranks, len(sizes))
    return ranks


def _exchange(work: Work, ranks: Ints, world: int) -> None:
    loads = np.bincount(ranks, work, world)
    taking = np.flatnonzero(np.bincount(ranks, minlength=world))
    for _ in range(_SWAPS * world):
        most, least = taking[loads[taking].argmax()], taking[loads[taking].argmin()]
        gap = loads[most] - loads[least]
        if gap <= _CLOSE * loads.mean():
            return
        mine, others = np.flatnonzero(ranks == most), np.flatnonzero(ranks == least)
        one, other = _pair(work[mine], work[others], gap / 2)
        moved = work[mine[one]] - work[others[other]]
        if not 0 < moved < gap:
            return
        ranks[mine[one]], ranks[others[other]] = least, most
        loads[most] -= moved
        loads[least] += moved


def _pair(mine: Work, others: Work, wanted: float) -> tuple[int, int]:
    """Return the samples of both ranks whose difference in work is closest to `wanted`."""
    ascending = np.argsort(others, kind="stable")
    at = np.clip(np.searchsorted(others[ascending], mine - wanted), 0, len(others) - 1)
    choices = np.stack([at, np.maximum(at - 1, 0)])
    distance = np.abs(mine - others[ascending[choices]] - wanted)
    which, one = np.unravel_index(distance.argmin(), distance.shape)
    return int(one), int(ascending[choices[which, one]])
