"""Several sources in one order, by shares that are constant or change from step to step.

Each source has a clock of its own: its k-th sample is due when so much of its share has come together. An epoch is
planned in blocks, which are stretches of that time: how many samples of each source come before a block follows from
its number, for each source by itself. So totals never drift from the shares by a whole sample, and a block has as many
samples as it is to have, but for those that are due right at its ends.

All of it belongs to order 1, and never changes.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import ClassVar, Literal, Protocol

import numpy as np

from headrace.errors import OptionError
from headrace.plan.joined import BlockOrder, PlannedBlock
from headrace.plan.order import ENDLESS, Order
from headrace.plan.permutation import draw, numbers

Until = Literal["first", "all", "forever"]

WINDOW_SAMPLES = 16384
_CHANGING_UNIT = 2**20
_PASSES_MOST = 1000  # of all sources together, by which each must have come once with shares that change
_SAMPLES_MORE = 2**20


class Shares(Protocol):
    """How much of each source is due by when.

    Attributes:
        unit: what a whole sample counts.
        size: samples of a block.
        are_constant: they are known for every block at once.
    """

    are_constant: ClassVar[bool]

    @property
    def unit(self) -> int: ...

    @property
    def size(self) -> int: ...

    def due(self, block: int) -> Sequence[int]:
        """How much of each source is due before a block, counted in parts of a sample; all together are `size` more
        with each block.
        """
        ...

    def has(self, source: int) -> bool:
        """Whether any of a source may come."""
        ...


class ConstantShares:
    """The same shares all the time.

    Args:
        weights: of each source, relative to the others; exact, however large or small they are.
        size: samples of a block.
    """

    are_constant: ClassVar[bool] = True

    def __init__(self, weights: Sequence[float], size: int) -> None:
        exact = [Fraction(weight) for weight in weights]
        whole = math.lcm(*(weight.denominator for weight in exact))
        parts = [int(weight * whole) for weight in exact]
        common = math.gcd(*parts) or 1
        self._parts, self.size = [part // common for part in parts], size
        self.unit = sum(self._parts)

    def due(self, block: int) -> Sequence[int]:
        return [block * self.size * part for part in self._parts]

    def has(self, source: int) -> bool:
        return self._parts[source] > 0


class ChangingShares:
    """Shares that are a function of the step; a block is a step. They are summed up once, and 8 bytes are kept of each.

    Args:
        weights: of each source, at a step. The same each time it is asked.
        count: how many sources there are.
        size: samples of a step.
    """

    are_constant: ClassVar[bool] = False
    unit = _CHANGING_UNIT

    def __init__(self, weights: Callable[[int], Sequence[float]], count: int, size: int) -> None:
        self._weights, self.size = weights, size
        self._due, self._known = np.zeros((64, count)), 0
        self._lock = threading.RLock()  # a signal handler may ask for a state in the middle of `weights`

    def __reduce__(self) -> tuple[object, ...]:
        with self._lock:
            known = {"_due": self._due[: self._known + 1].copy(), "_known": self._known}
        return ChangingShares, (self._weights, self._due.shape[1], self.size), known

    def due(self, block: int) -> Sequence[int]:
        if block > self._known:
            with self._lock:
                while self._known < block:
                    self._add()
        return [int(due * self.unit) for due in self._due[block].tolist()]

    def has(self, source: int) -> bool:  # noqa: ARG002 (others need it)
        return True

    def _add(self) -> None:
        step = self._known
        if step + 1 == len(self._due):
            self._due = np.concatenate([self._due, np.zeros_like(self._due)])
        weights = self._weights(step)
        whole = sum(weights)
        self._due[step + 1] = [
            due + self.size * (weight / whole) for due, weight in zip(self._due[step].tolist(), weights, strict=True)
        ]
        self._known = step + 1


class MixLayout:
    """How many samples of each source come before each block of an epoch, and where the epoch ends.

    Args:
        sizes: how many samples each source has, until it begins again.
        shares: when they are due.
        until: "first": the epoch ends before the first sample that would come again. "all": it ends when each source
            has come in full. "forever": it has no end.

    Attributes:
        count: samples of an epoch.

    Raises:
        OptionError: a source is to come that has no samples, or one is to come in full that never does.
    """

    def __init__(self, sizes: Sequence[int], shares: Shares, until: Until) -> None:
        self.sizes, self._shares, self._unit = tuple(sizes), shares, shares.unit
        # Spread evenly, so that sources with like shares are not rounded up at the same time.
        self._phases = [shares.unit * (2 * k + 1) // (2 * len(sizes)) for k in range(len(sizes))]
        self._last, self._end, self.count = 0, (0,) * len(sizes), ENDLESS
        if not shares.unit:
            self.count = 0
        elif until != "forever":
            self._last = self._last_block(until)
            self._end = tuple(self._counts_at_end(until))
            self.count = sum(self._end)
            if self.count >= ENDLESS:
                raise OptionError(_too_long(self._end))

    def before(self, block: int) -> Sequence[int]:
        """How many samples of each source come before a block."""
        if self.count < ENDLESS and block > self._last:
            return self._end
        return self._counts(block)

    def block_of(self, position: int) -> int:
        """The block that a position of the epoch lies in.

        Raises:
            IndexError: the epoch ends before it.
        """
        if not 0 <= position < self.count:
            raise IndexError(f"there is no position {position}: the epoch has {self.count}")
        block = position // self._shares.size  # or one nearby: blocks' sizes differ by a few samples
        while sum(self.before(block)) > position:
            block -= 1
        while sum(self.before(block + 1)) <= position:
            block += 1
        return block

    def _counts(self, block: int) -> list[int]:
        due = self._shares.due(block)
        counts = [(mine + phase) // self._unit for mine, phase in zip(due, self._phases, strict=True)]
        for k, count in enumerate(counts):
            if count and not self.sizes[k]:
                raise OptionError(f"source {k} has no samples, and is to come")
        return counts

    def _last_block(self, until: Until) -> int:
        def is_over(block: int) -> bool:
            """Whether the epoch ends before this block."""
            counts = zip(self._counts(block), self.sizes, strict=True)
            if until == "first":
                return any(count > size for count, size in counts)
            return all(count >= size for count, size in counts)

        if self._shares.are_constant:
            never = [k for k, size in enumerate(self.sizes) if size and not self._shares.has(k)]
            if until == "all" and never:
                raise OptionError(f"source {never[0]} has a weight of 0: it never comes in full")
            stop = 1
            while not is_over(stop):
                stop *= 2
            start = stop // 2
            while start + 1 < stop:
                middle = (start + stop) // 2
                start, stop = (start, middle) if is_over(middle) else (middle, stop)
            return stop - 1
        most = (_PASSES_MOST * sum(self.sizes) + _SAMPLES_MORE) // self._shares.size
        block = 1
        while not is_over(block):
            if block > most:
                raise OptionError(
                    f"some sources have not come in full after {block} steps: with until='forever', "
                    ".epoch(samples=N) says where epochs end"
                )
            # Never beyond the end, where nobody knows the weights: a step brings a source no more than all its samples.
            left = [size - count for size, count in zip(self.sizes, self._counts(block), strict=True)]
            block += max(1, (min(left) if until == "first" else max(left)) // self._shares.size - 1)
        return block - 1

    def _counts_at_end(self, until: Until) -> list[int]:
        """How many samples of each source come in all: up to the moment in the last block at which the epoch ends."""
        unit = self._unit
        first, before = self._shares.due(self._last), self._counts(self._last)
        more = [b - a for a, b in zip(first, self._shares.due(self._last + 1), strict=True)]
        ready = [due + phase for due, phase in zip(first, self._phases, strict=True)]
        moments = [
            Fraction((size + (until == "first")) * unit - ready[k], more[k])
            for k, size in enumerate(self.sizes)
            if more[k] and (until == "first" or before[k] < size)
        ]
        moment = min(moments) if until == "first" else max(moments, default=Fraction(0))
        amounts = [(now + moment * rate) / unit for now, rate in zip(ready, more, strict=True)]
        if until == "first":  # what is due at that very moment does not come
            return [max(math.ceil(amount) - 1, count) for amount, count in zip(amounts, before, strict=True)]
        return [math.floor(amount) for amount in amounts]


def _too_long(counts: Sequence[int]) -> str:
    rare, whole = counts.index(min(filter(None, counts))), sum(counts)
    share = Fraction(counts[rare], whole)
    return (
        f"the weight of source {rare} is {float(share):.1g} of all: it has come in full after {float(whole):.1g} "
        "samples, and no epoch has so many: give it a larger weight, or until='forever' with .epoch(samples=N)"
    )


class MixOrder(BlockOrder):
    """Several orders in one. Within a block each source's samples are spread evenly, each drawn from a stretch of its
    own: so a few samples that follow one another have nearly the right shares, too.

    Args:
        sources: endless orders: each begins again where it is used up.
        blend: how many samples of each come when.
        key: what the epoch's pseudo-random numbers are drawn from, such as (seed, epoch).
        first_shards: by how much each source's shards are numbered higher than by itself.
        window: positions of a window.
    """

    def __init__(
        self,
        sources: Sequence[Order],
        blend: MixLayout,
        key: tuple[int, ...],
        first_shards: Sequence[int] | None = None,
        window: int = WINDOW_SAMPLES,
    ) -> None:
        super().__init__(sources, blend.count, first_shards, window)
        self._blend, self._key = blend, ("mixture", *key)

    def _number_of(self, position: int) -> int:
        return self._blend.block_of(position)

    def _block(self, number: int) -> PlannedBlock:
        before = np.array(self._blend.before(number))
        counts = np.array(self._blend.before(number + 1)) - before
        count, start = int(counts.sum()), int(before.sum())
        sources = np.repeat(np.arange(len(counts)), counts)
        inside = np.arange(count) - np.repeat(np.cumsum(counts) - counts, counts)
        drawn = numbers(np.arange(count), draw(*self._key, number)) >> np.uint64(11)
        times = (inside + drawn.astype(np.float64) * 2.0**-53) / counts[sources]
        order = np.argsort(times, kind="stable")
        sources, inside = sources[order], inside[order]
        return PlannedBlock(number, start, start + count, sources, before[sources] + inside)
