"""How an epoch is cut into steps, and each step into the batches of the ranks."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from headrace.errors import OptionError
from headrace.plan.cursor import Cursor, compressed, expanded
from headrace.types import Ints

Tail = Literal["short", "drop", "pad", "carry"]

_OFFSETS_MOST = 4_000_000  # numbers held


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
            samples, "carry" leaves it to the next epoch.
        rank, world: which share of each step is meant.
        lanes: positions of a step are sorted by their remainders by this.
        done: [k, 2]: ranges of this rank's samples, counted from `begin`, that have been delivered already.

    Raises:
        OptionError: there are fewer samples than ranks.
    """

    begin: Cursor
    end: int
    size: int
    tail: Tail = "short"
    rank: int = 0
    world: int = 1
    lanes: int = 1
    done: Ints = field(default_factory=lambda: np.zeros((0, 2), np.int64))
    full: int = field(init=False)
    last: tuple[int, ...] = field(init=False)
    _offsets: OrderedDict[tuple[int, int], Ints] = field(init=False, default_factory=OrderedDict)

    def __post_init__(self) -> None:
        left = self.left
        self.full, rest = divmod(left, self.size)
        self.last = ()
        if not rest or self.tail in ("drop", "carry"):
            return
        if self.tail == "pad":
            self.last = (self.size,)
        elif rest >= self.world:
            self.last = (rest,)
        elif not self.full:
            raise OptionError(
                f"{rest} samples are left of the epoch for {self.world} ranks: each step must have one for each; "
                "tail='pad' repeats some, tail='drop' leaves them out"
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
    def batch(self) -> int:
        """How many samples of a full step are this rank's."""
        low, high = self._share(self.size)
        return high - low

    @property
    def whole(self) -> int:
        """How many samples are this rank's, delivered ones too."""
        return self.full * self.batch + sum(high - low for low, high in map(self._share, self.last))

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
        if not len(self.done):
            return self._at(start, stop)
        starts = np.concatenate([[0], self.done[:, 1]])
        stops = np.concatenate([self.done[:, 0], [self.whole]])
        before = np.concatenate([[0], np.cumsum(stops - starts)])  # of those to come, before each gap
        pieces = []
        for k in range(len(starts)):
            low, high = max(start, int(before[k])), min(stop, int(before[k + 1]))
            if low < high:
                shift = int(starts[k] - before[k])
                pieces.append(self._at(low + shift, high + shift))
        return np.concatenate(pieces) if pieces else np.zeros(0, np.int64)

    def original(self, start: int, stop: int) -> Ints:
        """The same samples as ranges of numbers that count from `begin`, with those that are done."""
        if not len(self.done):
            return np.array([[start, stop]], np.int64)
        coming = compressed(np.setdiff1d(np.arange(int(self.done[-1, 1]) + stop), expanded(self.done))[start:stop])
        return coming

    def after(self, steps: int) -> Cursor:
        """What is to come once so many steps have been delivered on all ranks."""
        if steps <= self.full:
            return self.begin.after(steps * self.size)
        return self.begin.after(min(self.left, self.full * self.size + sum(self.last[: steps - self.full])))

    def _share(self, size: int) -> tuple[int, int]:
        return self.rank * size // self.world, (self.rank + 1) * size // self.world

    def _at(self, start: int, stop: int) -> Ints:
        """The same as `positions`, of this rank's samples with those that are done."""
        pieces = []
        batch, edge = self.batch, self.full * self.batch
        while start < stop:
            if start < edge:
                step, inside = divmod(start, batch)
                begin, size, mine = step * self.size, self.size, batch
            else:
                begin, at = self.full * self.size, edge
                for size in self.last:
                    low, high = self._share(size)
                    mine, inside = high - low, start - at
                    if inside < mine:
                        break
                    begin, at = begin + size, at + mine
                else:
                    raise IndexError(start)
            here = min(stop - start, mine - inside)
            pieces.append(self._of_step(begin, size)[inside : inside + here])
            start += here
        return np.concatenate(pieces) if pieces else np.zeros(0, np.int64)

    def _of_step(self, begin: int, size: int) -> Ints:
        """This rank's positions in the step that consists of the `begin`-th and following ones to come."""
        low, high = self._share(size)
        first = self.begin.position + begin - self.begin.hole_count
        is_whole = begin >= self.begin.hole_count and first + size <= self.end
        if is_whole:
            return first + self._offsets_of(first % self.lanes, size)
        left = self.left
        positions = self.begin.coming(begin, min(begin + size, left))
        if begin + size > left:  # filled up, with those that came first
            again = np.arange(begin + size - left) % max(1, self.end)
            positions = np.concatenate([positions, again])
        return positions[np.lexsort((positions // self.lanes, positions % self.lanes))][low:high]

    def _offsets_of(self, phase: int, size: int) -> Ints:
        """This rank's places in a step of so many successive positions, of which the first one is in lane `phase`."""
        known = self._offsets.get((phase, size))
        if known is None:
            known = self._offsets[phase, size] = _by_lanes(phase, size, self.lanes, *self._share(size))
            while len(self._offsets) > 1 and sum(map(len, self._offsets.values())) > _OFFSETS_MOST:
                self._offsets.popitem(last=False)
        return known


def _by_lanes(phase: int, count: int, lanes: int, start: int, stop: int) -> Ints:
    """The `start`-th up to the `stop`-th of range(count), sorted by (k + phase) % lanes; in time for these alone."""
    index = np.arange(start, stop)
    if lanes == 1:
        return index
    rounds, more = divmod(count, lanes)
    first = (np.arange(lanes) - phase) % lanes  # of each lane
    sizes = rounds + (first < more)
    ends = np.cumsum(sizes)
    lane = np.searchsorted(ends, index, side="right")
    return np.asarray(first[lane] + (index - (ends - sizes)[lane]) * lanes, np.int64)
