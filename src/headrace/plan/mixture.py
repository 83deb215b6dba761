"""Mixtures by samples, with shares that are constant or change from step to step.

Each source has a clock of its own: its k-th sample is due when its share reaches k samples. An epoch is planned in
blocks, which are stretches of that time. The number of samples of a source before a block depends only on the block's
number. So totals never drift from the shares by a whole sample, and the size of a block is off only by samples that are
due at its ends.

Everything here is part of order 1, and never changes.
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
_PASSES_MOST = 1000  # total passes after which each source must have been used in full, with changing shares
_SAMPLES_MORE = 2**20


class Shares(Protocol):
    """Amounts of each source that are due over time.

    Attributes:
        unit: Amount that equals one sample.
        size: Samples in a block.
        are_constant: True if shares are the same in all blocks.
    """

    are_constant: ClassVar[bool]

    @property
    def unit(self) -> int: ...

    @property
    def size(self) -> int: ...

    def due(self, block: int) -> Sequence[int]:
        """Return the amount due of each source before a block. A block adds `size` samples in total."""
        ...

    def has(self, source: int) -> bool:
        """True if a source may occur."""
        ...


class ConstantShares:
    """Constant shares, by exact relative weights."""

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
    """Shares that are a function of the step. A block is a step.

    They are summed up once, and take 8 bytes per step and source. `weights` must be deterministic.
    """

    are_constant: ClassVar[bool] = False
    unit = _CHANGING_UNIT

    def __init__(self, weights: Callable[[int], Sequence[float]], count: int, size: int) -> None:
        self._weights, self.size = weights, size
        self._due, self._known = np.zeros((64, count)), 0
        self._lock = threading.RLock()  # reentrant: a signal handler may save a state during `weights`

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
    """Counts of each source's samples before each block of an epoch, and the end of the epoch.

    Args:
        sizes: Samples of each source, until it repeats.
        until: "first": the epoch ends before the first sample that would repeat. "all": it ends when each source has
            been used in full. "forever": it is endless.

    Attributes:
        count: Samples in an epoch.

    Raises:
        OptionError: A source with a share has no samples, or "all" cannot be reached.
    """

    def __init__(self, sizes: Sequence[int], shares: Shares, until: Until) -> None:
        self.sizes, self._shares, self._unit = tuple(sizes), shares, shares.unit
        # Evenly spaced, so that sources with equal shares are not rounded up at the same time.
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
        if self.count < ENDLESS and block > self._last:
            return self._end
        return self._counts(block)

    def block_of(self, position: int) -> int:
        """Return the block that contains a position of the epoch.

        Raises:
            IndexError: The position is not in the epoch.
        """
        if not 0 <= position < self.count:
            raise IndexError(f"there is no position {position}: the epoch has {self.count}")
        block = position // self._shares.size  # an estimate: block sizes differ by a few samples
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
            # Never skip the end, as later weights may be undefined: a step has at most `size` samples of a source.
            left = [size - count for size, count in zip(self.sizes, self._counts(block), strict=True)]
            block += max(1, (min(left) if until == "first" else max(left)) // self._shares.size - 1)
        return block - 1

    def _counts_at_end(self, until: Until) -> list[int]:
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
        if until == "first":  # samples due at exactly that moment are excluded
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
    """Several orders mixed by a `MixLayout`.

    Within a block, each source's samples are spread evenly with random jitter, so even a few consecutive samples have
    nearly the right shares.
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
