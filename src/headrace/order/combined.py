"""Several orders combined into one: concatenated, interleaved, zipped, or mixed by shares.

Everything here is part of order 1, and never changes: see docs/reference/order.md.

In a mixture each source has a clock of its own. By samples, its k-th sample is due when its share reaches k samples. By
tokens and known lengths, a document is due when its share reaches the document's middle. So totals never drift from the
shares by a whole sample, or by half a document. An epoch is planned in blocks of that time. The number of a source's
samples before a block depends only on the block's number. If lengths are read, packed rows draw documents: see
`TokenMixing`.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace._util import check
from headrace.errors import OptionError
from headrace.order.orders import ENDLESS, Order, Places, UnwindowedOrder
from headrace.order.permutation import draw, numbers, permutation
from headrace.types import Ints


class JoinedOrder(ABC):
    """Several orders combined into one. Subclasses decide which input each position takes.

    Args:
        first_shards: Offset of each input's shard numbers. None: 0.
        window: Samples in a window.
    """

    lanes = 1

    def __init__(
        self, inputs: Sequence[Order], count: int, first_shards: Sequence[int] | None = None, window: int = 1
    ) -> None:
        self._inputs, self.count, self._window = inputs, count, max(1, window)
        self._first_shards = first_shards or [0] * len(inputs)

    @abstractmethod
    def turns(self, positions: Ints) -> tuple[Ints, Ints]:
        """Return the input of each position, and the sample's position in this input."""

    def window_end(self, position: int) -> int:
        return (position // self._window + 1) * self._window

    def locate(self, positions: Ints) -> Places:
        positions = np.asarray(positions, np.int64)
        inputs, turns = self.turns(positions)
        shards, rows = np.empty_like(positions), np.empty_like(positions)
        for k in np.unique(inputs).tolist():
            mine = np.flatnonzero(inputs == k)
            found = self._inputs[k].locate(turns[mine])
            shards[mine], rows[mine] = found.shards + self._first_shards[k], found.rows
        return Places(shards, rows)


class ConcatOrder(JoinedOrder):
    """Concatenated orders. Only the last one may be endless."""

    def __init__(self, inputs: Sequence[Order], first_shards: Sequence[int] | None = None) -> None:
        self._starts = np.cumsum([0, *(order.count for order in inputs)])
        super().__init__(inputs, min(ENDLESS, int(self._starts[-1])), first_shards)

    def turns(self, positions: Ints) -> tuple[Ints, Ints]:
        inputs = np.searchsorted(self._starts, positions, side="right") - 1
        return inputs, positions - self._starts[inputs]

    def window_end(self, position: int) -> int:
        number = int(np.searchsorted(self._starts, position, side="right")) - 1
        start = int(self._starts[number])
        return min(start + self._inputs[number].window_end(position - start), int(self._starts[number + 1]))


class _Stretch(NamedTuple):
    """Consecutive rounds in which the same inputs contribute equal numbers of samples.

    Attributes:
        start: First position.
        first: First round.
        ends: Samples of a round up to the end of each input's block.
    """

    start: int
    first: int
    inputs: Ints
    ends: Ints


class InterleaveLayout:
    """Blocks of several inputs in turn. Exhausted inputs are skipped. Some may be endless."""

    def __init__(self, sizes: Sequence[int], block: int) -> None:
        self._block = block
        self.count = min(ENDLESS, sum(sizes))
        rounds = [-(-size // block) for size in sizes]
        self._stretches: list[_Stretch] = []
        start = first = 0
        for last in sorted(set(rounds) - {0}):
            for begin, end in ((first, last - 1), (last - 1, last)):  # blocks may be shorter in the last round
                if begin == end or start >= ENDLESS:
                    continue
                taking = [k for k, count in enumerate(rounds) if count > begin]
                lengths = [min(block, sizes[k] - begin * block) for k in taking]
                self._stretches.append(_Stretch(start, begin, np.array(taking), np.cumsum(lengths)))
                start += (end - begin) * sum(lengths)
            first = last
        self._starts = [stretch.start for stretch in self._stretches]

    def turns(self, positions: Ints) -> tuple[Ints, Ints]:
        inputs, turns = np.empty_like(positions), np.empty_like(positions)
        numbers = np.searchsorted(self._starts, positions, side="right") - 1
        for number in np.unique(numbers).tolist():
            stretch, mine = self._stretches[number], np.flatnonzero(numbers == number)
            rounds, inside = np.divmod(positions[mine] - stretch.start, stretch.ends[-1])
            which = np.searchsorted(stretch.ends, inside, side="right")
            begins = np.concatenate([[0], stretch.ends[:-1]])[which]
            inputs[mine] = stretch.inputs[which]
            turns[mine] = (stretch.first + rounds) * self._block + inside - begins
        return inputs, turns


class InterleaveOrder(JoinedOrder):
    def __init__(
        self, inputs: Sequence[Order], layout: InterleaveLayout, first_shards: Sequence[int] | None, window: int
    ) -> None:
        super().__init__(inputs, layout.count, first_shards, window)
        self._layout = layout

    def turns(self, positions: Ints) -> tuple[Ints, Ints]:
        return self._layout.turns(positions)


class ZipOrder(UnwindowedOrder):
    """Zipped orders, where the number of a tuple is composed of those of its samples.

    Args:
        digits: Range of each component, and a function from positions to its values.
    """

    def __init__(self, count: int, digits: Sequence[tuple[int, Callable[[Ints], Ints]]]) -> None:
        self.count, self._digits = count, digits

    def locate(self, positions: Ints) -> Places:
        numbers = np.zeros_like(positions, np.int64)
        for radix, numbers_at in self._digits:
            numbers = numbers * radix + numbers_at(positions)
        return Places(np.zeros_like(numbers), numbers)


Until = Literal["first", "all", "forever"]

WINDOW_SAMPLES = 16384
_CHANGING_UNIT = 2**20
_PASSES_MOST = 1000  # total passes after which each source must have been used in full, with changing shares
_SAMPLES_MORE = 2**20
_KEPT_PASSES = 2  # of each source's documents: a block may span two


class ConstantShares:
    """Constant shares, by exact relative weights.

    Attributes:
        unit: Amount that equals one sample, or one token.
        size: Samples or tokens in a block.
        parts: Share of each source in a unit.
    """

    def __init__(self, weights: Sequence[float], size: int) -> None:
        exact = [Fraction(weight) for weight in weights]
        whole = math.lcm(*(weight.denominator for weight in exact))
        parts = [int(weight * whole) for weight in exact]
        common = math.gcd(*parts) or 1
        self.parts, self.size = [part // common for part in parts], size
        self.unit = sum(self.parts)

    def due(self, block: int) -> Sequence[int]:
        """Return the amount due of each source before a block. A block adds `size` samples in total."""
        return [block * self.size * part for part in self.parts]


class ChangingShares:
    """Shares that are a function of the step, which is a block. Attributes as of `ConstantShares`.

    They are summed up once, and take 8 bytes per step and source. `weights` must be deterministic.
    """

    unit, parts = _CHANGING_UNIT, None

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


Shares = ConstantShares | ChangingShares


class _Block(NamedTuple):
    """A block at positions [start, stop): the source of each sample, and its position in this source."""

    number: int
    start: int
    stop: int
    sources: Ints
    turns: Ints


class BlockOrder(JoinedOrder):
    """Several orders mixed block by block. The last planned block is cached."""

    _kept: _Block | None = None

    @abstractmethod
    def _before(self, block: int) -> Sequence[int]:
        """Return the number of each source's samples before a block."""

    @abstractmethod
    def _about(self, position: int) -> int:
        """Estimate the block of a position."""

    @abstractmethod
    def _times(self, block: int, before: Sequence[int], after: Sequence[int]) -> NDArray[np.float64]:
        """Return the time of each sample of a block, source by source, from `before` to `after` of each."""

    def turns(self, positions: Ints) -> tuple[Ints, Ints]:
        sources, turns = np.empty_like(positions), np.empty_like(positions)
        by_position = np.argsort(positions, kind="stable")
        ascending = positions[by_position]
        at = 0
        while at < len(ascending):
            block = self._block_at(int(ascending[at]))
            end = int(np.searchsorted(ascending, block.stop))
            mine, inside = by_position[at:end], ascending[at:end] - block.start
            sources[mine], turns[mine] = block.sources[inside], block.turns[inside]
            at = end
        return sources, turns

    def _block_at(self, position: int) -> _Block:
        kept = self._kept  # read once: another thread may replace it
        if kept is not None and kept.start <= position < kept.stop:
            return kept
        if not 0 <= position < self.count:
            raise IndexError(f"there is no position {position}: the epoch has {self.count}")
        block = kept.number + 1 if kept is not None and kept.stop == position else self._about(position)
        while sum(self._before(block)) > position:
            block -= 1
        while sum(self._before(block + 1)) <= position:
            block += 1
        self._kept = kept = self._planned(block)
        return kept

    def _planned(self, number: int) -> _Block:
        before, after = self._before(number), self._before(number + 1)
        order = np.argsort(self._times(number, before, after), kind="stable")
        sources = np.repeat(np.arange(len(before)), np.subtract(after, before))[order]
        turns = np.concatenate([np.arange(*some) for some in zip(before, after, strict=True)])[order]
        return _Block(number, sum(before), sum(after), sources, turns)


class MixLayout:
    """Counts of each source's samples before each block of an epoch, and the end of the epoch.

    Args:
        until: "first": the epoch ends before the first sample that would repeat. "all": it ends when each source has
            been used in full. "forever": it is endless.

    Attributes:
        count: Samples in an epoch.
        step: Samples in a block.

    Raises:
        OptionError: A source with a share has no samples, or "all" cannot be reached.
    """

    def __init__(self, sizes: Sequence[int], shares: Shares, until: Until) -> None:
        self.sizes, self._shares, self._unit, self.step = tuple(sizes), shares, shares.unit, shares.size
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
                raise _too_long(self._end)

    def before(self, block: int) -> Sequence[int]:
        if self.count < ENDLESS and block > self._last:
            return self._end
        return self._counts(block)

    def _counts(self, block: int) -> list[int]:
        due = self._shares.due(block)
        counts = [(mine + phase) // self._unit for mine, phase in zip(due, self._phases, strict=True)]
        for k, count in enumerate(counts):
            if count and not self.sizes[k]:
                raise _empty(f"source {k}", "samples")
        return counts

    def _last_block(self, until: Until) -> int:
        def is_over(block: int) -> bool:
            counts = zip(self._counts(block), self.sizes, strict=True)
            if until == "first":
                return any(count > size for count, size in counts)
            return all(count >= size for count, size in counts)

        if self._shares.parts is not None:
            never = [k for k, part in enumerate(self._shares.parts) if self.sizes[k] and not part]
            if until == "all" and never:
                needed = "above 0: with until='all' each source comes in full"
                raise check.invalid(f"hr.mix(): weight of source {never[0]}", 0, needed)
            stop = 1
            while not is_over(stop):
                stop *= 2
            start = stop // 2
            while start + 1 < stop:
                middle = (start + stop) // 2
                start, stop = (start, middle) if is_over(middle) else (middle, stop)
            return stop - 1
        most = (_PASSES_MOST * sum(self.sizes) + _SAMPLES_MORE) // self.step
        block = 1
        while not is_over(block):
            if block > most:
                raise _endless(f"some sources have not come in full after {block} steps")
            # Never skip the end, as later weights may be undefined: a step has at most `step` samples of a source.
            left = [size - count for size, count in zip(self.sizes, self._counts(block), strict=True)]
            block += max(1, (min(left) if until == "first" else max(left)) // self.step - 1)
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


def _too_long(counts: Sequence[int]) -> OptionError:
    rare, whole = counts.index(min(filter(None, counts))), sum(counts)
    share = float(Fraction(counts[rare], whole))
    return _endless(
        f"the weight of source {rare} is {share:.1g} of all, and it comes in full after {float(whole):.1g} samples"
    )


def _endless(what: str) -> OptionError:
    return check.lacking(f"{what}: the epoch", "larger weights, or until='forever' with .epoch(samples=N)")


class MixOrder(BlockOrder):
    """Several orders mixed by samples.

    Within a block, each source's samples are spread evenly with random jitter, so even a few consecutive samples have
    nearly the right shares.
    """

    def __init__(
        self,
        sources: Sequence[Order],
        layout: MixLayout,
        key: tuple[int, ...],
        first_shards: Sequence[int] | None = None,
        window: int = WINDOW_SAMPLES,
    ) -> None:
        super().__init__(sources, layout.count, first_shards, window)
        self._layout, self._key = layout, ("mixture", *key)

    def _before(self, block: int) -> Sequence[int]:
        return self._layout.before(block)

    def _about(self, position: int) -> int:
        return position // self._layout.step

    def _times(self, block: int, before: Sequence[int], after: Sequence[int]) -> NDArray[np.float64]:
        counts = np.subtract(after, before)
        inside = np.concatenate(list(map(np.arange, counts)))
        drawn = numbers(np.arange(len(inside)), draw(*self._key, block)) >> np.uint64(11)
        return np.asarray((inside + drawn.astype(np.float64) * 2.0**-53) / np.repeat(counts, counts))


class TokenOrder(BlockOrder):
    """Several orders of documents mixed by tokens.

    Args:
        inputs: Endless orders, which repeat when exhausted.
        counts: Documents of each until it repeats.
        lengths: For each input, a function from places to token counts of documents.

    Raises:
        OptionError: An input with a share has no tokens.
    """

    def __init__(
        self,
        inputs: Sequence[Order],
        counts: Sequence[int],
        lengths: Sequence[Callable[[Places], Ints]],
        shares: Shares,
        labels: Sequence[str],
        first_shards: Sequence[int] | None,
        window: int,
    ) -> None:
        super().__init__(inputs, ENDLESS, first_shards, window)
        self._shares = shares
        self._middles = [_Middles(*one) for one in zip(inputs, counts, lengths, labels, strict=True)]
        for middles, part in zip(self._middles, shares.parts or (), strict=False):
            if part and not middles.tokens:
                raise _empty(middles.label, "tokens")

    def _due(self, block: int) -> list[tuple[int, int]]:
        """Return the half tokens of each input due before a block: (whole ones, parts of `unit`)."""
        return [divmod(2 * due, self._shares.unit) for due in self._shares.due(block)]

    def _before(self, block: int) -> Sequence[int]:
        due = zip(self._middles, self._due(block), strict=True)
        return [middles.count_before(whole + (parts > 0)) for middles, (whole, parts) in due]

    def _about(self, position: int) -> int:
        """Estimate the block of a position from the mean length; never far below."""
        unit = self._shares.unit

        def documents(block: int) -> float:
            due = zip(self._shares.due(block), self._middles, strict=True)
            return sum(tokens / unit * middles.each for tokens, middles in due)

        if self._shares.parts is not None:
            return int(position / documents(1))
        block, most = 0, self._shares.size * max(middles.each for middles in self._middles)
        while (more := int((position - documents(block)) / most)) > 0:  # never requests weights far ahead
            block += more
        return block

    def _times(self, block: int, before: Sequence[int], after: Sequence[int]) -> NDArray[np.float64]:
        unit, times = self._shares.unit, []
        for middles, start, stop, (whole, parts), end in zip(
            self._middles, before, after, self._due(block), self._due(block + 1), strict=True
        ):
            lasts = (end[0] - whole) + (end[1] - parts) / unit
            since = (middles.between(start, stop) - whole) - parts / unit
            times.append(since / (lasts or 1.0))
        return np.concatenate(times)


class _Middles:
    """Middles of an input's documents among its tokens, in half tokens."""

    def __init__(self, order: Order, count: int, lengths: Callable[[Places], Ints], label: str) -> None:
        self._order, self._count, self._lengths, self.label = order, count, lengths, label
        first, self.tokens = self._planned(0)
        self._kept = {0: first}
        self.each = count / self.tokens if self.tokens else 0.0

    def count_before(self, half_tokens: int) -> int:
        """Return the number of documents whose middle is before this many half tokens."""
        if not half_tokens:
            return 0
        if not self.tokens:
            raise _empty(self.label, "tokens")
        turn, rest = divmod(half_tokens, 2 * self.tokens)
        inside = int(np.searchsorted(self._of_pass(turn), rest)) if rest else 0
        return turn * self._count + inside

    def between(self, start: int, stop: int) -> Ints:
        """Return the middles of documents [start, stop)."""
        found, at = [np.empty(0, np.int64)], start
        while at < stop:
            turn, row = divmod(at, self._count)
            end = min(stop, (turn + 1) * self._count)
            found.append(self._of_pass(turn)[row : row + end - at] + 2 * self.tokens * turn)
            at = end
        return np.concatenate(found)

    def _of_pass(self, turn: int) -> Ints:
        kept = self._kept  # read once: another thread may replace it
        if turn not in kept:
            found, tokens = self._planned(turn)
            if tokens != self.tokens:
                remedy = "by tokens, each pass has the same documents"
                has, first = f"{tokens} tokens in pass {turn}", f"{self.tokens} in the first one"
                raise check.unequal(self.label, has, "it", first, remedy)
            kept = self._kept = {**dict(list(kept.items())[1 - _KEPT_PASSES :]), turn: found}
        return kept[turn]

    def _planned(self, turn: int) -> tuple[Ints, int]:
        places = self._order.locate(np.arange(turn * self._count, (turn + 1) * self._count))
        lengths = self._lengths(places)
        ends = np.cumsum(lengths)
        return 2 * ends - lengths, int(ends[-1]) if len(ends) else 0


def _empty(label: str, things: str) -> OptionError:
    return check.empty(label, things, "leave it out, or give it weight 0")


@dataclass(frozen=True, slots=True)
class TokenMixing:
    """How packed rows draw documents from the inputs of a mixture by tokens.

    Attributes:
        shares: Shares of tokens. A step is a number of tokens, over all rows.
    """

    names: tuple[str, ...]
    shares: Shares

    def phases(self, row: int, rows: int) -> list[int]:
        """Return the deficit at which a row draws from each input, in 1 / (2 * `rows`) documents.

        Deficits are odd numbers, spread evenly over the rows. With equal ones, all rows would run ahead with an input
        at the same time. So, averaged over rows, each stretch of tokens has the right shares.
        """
        return [2 * int(permutation(np.array([row]), rows, draw("phases", k))[0]) + 1 for k in range(len(self.names))]

    def choice(self, rows: int, phases: Sequence[int], drawn: Sequence[int], heads: Sequence[int | None]) -> int | None:
        """Choose the input whose document a row draws next: the one that is due first.

        Args:
            drawn: Tokens of each input that the row has drawn.
            heads: Token count of each input's next document. None: it has not arrived.

        Returns:
            The number of the input. None: documents must arrive first.
        """
        shares, scale = self.shares, 2 * rows
        block, rest = divmod(sum(drawn) * rows, shares.size)
        before, after = shares.due(block), shares.due(block + 1)
        whole = shares.unit * shares.size * rows
        best, best_rate, best_early = None, 1, 0
        for k, (due, late, tokens, head) in enumerate(zip(before, after, drawn, heads, strict=True)):
            rate = late - due
            if rate <= 0:
                continue  # the input has no share in this step
            if head is None:
                return None
            # The tokens by which it is early; divided by the growth of its share, this is the time until it is due.
            early = (tokens * scale + phases[k] * head) * whole - (due * shares.size + rate * rest) * scale
            if best is None or early * best_rate < best_early * rate:
                best, best_rate, best_early = k, rate, early
        return best

    def lacking(self, rows: int, drawn: Sequence[float]) -> dict[int, float]:
        """Return the approximate deficit in tokens of each active input, for a row's drawn tokens."""
        shares = self.shares
        steps = sum(drawn) * rows / shares.size
        block = int(steps)
        due = zip(shares.due(block), shares.due(block + 1), drawn, strict=True)
        return {
            k: (early + (late - early) * (steps - block)) / (shares.unit * rows) - tokens
            for k, (early, late, tokens) in enumerate(due)
            if late > early
        }
