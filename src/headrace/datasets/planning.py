"""Which samples an epoch has, and in which order: the plan of a pipeline whose samples have numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from headrace.datasets.faces import HasKeys
from headrace.datasets.operators.order import Shuffle
from headrace.datasets.operators.values import counted
from headrace.datasets.pipeline import Pipeline
from headrace.errors import OptionError
from headrace.plan import (
    EpochOrder,
    FirstOf,
    Order,
    Passes,
    Places,
    ShardOrder,
    Steps,
    Windows,
)
from headrace.plan.lane_run import LaneRun
from headrace.plan.order import ENDLESS, WITHIN_WINDOW
from headrace.producers.indexed_shards import ReadWindow, ShardVisit
from headrace.types import Ints

WINDOW_SAMPLES = 16384
WINDOW_BYTES = 128 * 2**20
_STRETCH_SAMPLES = 512  # samples of a shard that are worth a read of their own, or so many bytes
_STRETCH_BYTES = 4 * 2**20
_BLOCKS_AT_ONCE = 16  # in a window, where samples share long blocks and it holds so many bytes
_LONG_BLOCKS = 4  # how many times more bytes than others a window may hold, to hold a block


ReadSteps = Steps | LaneRun
"""Say which samples are read, one after the other."""


class Planning:
    """The orders of a pipeline's epochs.

    Args:
        pipeline: its samples have numbers.
        seed: the loader's.

    Attributes:
        pipeline: the same.
    """

    def __init__(self, pipeline: Pipeline, seed: int) -> None:
        self.pipeline, self._source, self._seed = pipeline, pipeline.source, seed
        self._own = self._source.orders(pipeline.keeps, seed)

    def order(self, epoch: int) -> Order:
        """Which samples come at the positions of an epoch; negative ones are those of the epochs before."""
        return EpochOrder(lambda later: self.passes(epoch + later))

    def passes(self, epoch: int, first: int = 0) -> Order:
        """Which samples come in all passes of an epoch, or of a part of it.

        Args:
            epoch: its number.
            first: the number of its first pass.
        """
        times, limit = self.pipeline.passes
        # of what comes before these; the others concern all passes together
        passes = Passes(lambda number: self.one_pass(epoch, first + number), times)
        if limit is not None and not passes.pass_count:
            raise self._lacks_samples()
        order: Order = passes if limit is None else FirstOf(passes, limit)
        for samples in self.pipeline.order.takes_of_all:
            order = FirstOf(order, samples)
        return order

    def count(self) -> int:
        """How many positions an epoch has: without its order, and without asking a sampler for numbers.

        Raises:
            OptionError: epochs are to have samples, and there are none to make them of.
        """
        if self.pipeline.passes[1] is not None and not self._count_of_a_pass():
            raise self._lacks_samples()
        return counted(self.count_of_pass, self.pipeline.order.operators)

    def _lacks_samples(self) -> OptionError:
        limit, source = self.pipeline.passes[1], self._source.name
        return OptionError(f".epoch(samples={limit}): {source} has no samples to make one of")

    def _count_of_a_pass(self) -> int:
        return counted(self.count_of_pass, self.pipeline.order.one_pass)

    @property
    def pass_count(self) -> int | None:
        """Samples of a pass, where an epoch goes over them again and again without end; None: it does not.

        A mixture without end has none: it is how many samples of it come until each source has come in full. Where its
        shares change, nobody knows, and it is None.
        """
        if self.count() < ENDLESS:
            return None
        count = self._count_of_a_pass()
        return count if count < ENDLESS else self._own.full_count

    def one_pass(self, epoch: int, number: int) -> Order:
        """Which samples come in one pass over the source."""
        operators, shuffle = self.pipeline.order.one_pass, self._first_shuffle
        if shuffle is not None and (by := self._by(shuffle)) != "global":
            key = shuffle.seed_or(self._seed), epoch, number
            order: Order = ShardOrder(self.sizes, by, key, self.windows(shuffle) if by == "windows" else None)
            operators = operators[1:]
        else:
            order = self._own.order(epoch, number)
        for operator in operators:
            order = operator.apply(order, (operator.seed_or(self._seed), epoch, number))
        return order

    @property
    def _first_shuffle(self) -> Shuffle | None:
        """How samples are shuffled before all else, which may go by the shards that they lie in."""
        return self.pipeline.order.shuffle if self.pipeline.order.is_shuffled_first else None

    def _by(self, shuffle: Shuffle) -> str:
        by = shuffle.by
        if by == "auto":
            by = "window" if self._source.traits.indexed else "global"
        return "windows" if by == "window" else by

    def windows(self, shuffle: Shuffle) -> Windows:
        """How a shuffle by windows mixes this source."""
        nbytes = max(1.0, self._source.sample_bytes or 0)
        most, blocks = int(WINDOW_BYTES / nbytes), self._source.blocks
        longest = 0 if blocks is None else int(np.diff(blocks).max(initial=0))
        # Each block is read for every window that it reaches into: small ones would read it again and again.
        window = max(1, min(max(WINDOW_SAMPLES, _BLOCKS_AT_ONCE * longest), most))
        window = shuffle.window or max(window, min(longest, _LONG_BLOCKS * most))
        if window >= self.count_of_pass:
            return Windows(1, max(1, self.count_of_pass))  # all of it at once
        stretch = max(1, min(_STRETCH_SAMPLES, int(_STRETCH_BYTES / nbytes)))
        stretch = min(window, max(stretch, longest))
        return Windows.of(window, stretch)

    @property
    def sizes(self) -> Ints:
        """How many samples each shard has, of those that are wanted; a source without shards is one."""
        return self._own.sizes

    @property
    def count_of_pass(self) -> int:
        """How many samples the source has that are wanted."""
        return self._own.count

    def locate(self, order: Order, positions: Ints) -> Places:
        """Where the samples at some positions lie in the source."""
        return self._own.locate(order, positions)

    def keys(self, keys: Sequence[object]) -> HasKeys:
        """What is asked for by these numbers, of samples with these keys."""
        return self._own.keys(keys)

    def numbers(self, order: Order, positions: Ints) -> Ints:
        """The numbers of the samples at some positions."""
        return self._own.numbers(order, positions)

    def work(self, numbers: Ints, power: int) -> NDArray[np.float64]:
        """The work that samples with these numbers are: their documents' lengths, each to this power."""
        return self._own.work(numbers, power)

    def reads(self, order: Order, steps: ReadSteps) -> Iterator[ReadWindow]:
        """What to read for the samples to come, shard by shard, window after window."""
        urls, start = self._source.urls, 0
        while start < steps.count:
            first = int(steps.positions(start, start + 1)[0])
            ahead = max(1, math.ceil((order.window_end(max(0, first)) - first) / steps.size))
            stop = min(steps.count, start + ahead * steps.batch)
            places = [self.locate(order, steps.positions(start, stop))]
            if self._reads_on:
                places += self._to_the_end_of_its_block(order, steps, stop, places[0])
            shards, rows = (np.concatenate(some) for some in zip(*places, strict=True))
            yield _window(start, urls, shards, rows)
            start += len(rows)

    @property
    def _reads_on(self) -> bool:
        """Whether samples that share blocks come as they lie: a window that ends within a block would have it read
        once more.
        """
        shuffle = self._first_shuffle
        return self._source.blocks is not None and (shuffle is None or self._by(shuffle) == "shards")

    def _to_the_end_of_its_block(self, order: Order, steps: ReadSteps, stop: int, last: Places) -> Iterator[Places]:
        """The samples from `stop` on that lie in the block of the last one before, in whole batches."""
        blocks = self._source.blocks
        assert blocks is not None

        def numbers(places: Places) -> Ints:
            return np.searchsorted(blocks, self._starts[places.shards] + places.rows, side="right")

        if not len(last.rows):
            return
        block = numbers(Places(last.shards[-1:], last.rows[-1:]))[0]
        ahead = max(1, WINDOW_SAMPLES // steps.batch) * steps.batch
        while stop < steps.count:
            more = self.locate(order, steps.positions(stop, min(steps.count, stop + ahead)))
            others = np.flatnonzero(numbers(more) != block)
            count = len(more.rows) if not len(others) else -(-int(others[0]) // steps.batch) * steps.batch
            yield Places(more.shards[:count], more.rows[:count])
            if count < ahead:
                return
            stop += count

    @cached_property
    def _starts(self) -> Ints:
        return self._source.starts

    def described(self) -> list[str]:
        """The operators that make the order, as a state names them."""
        order, shuffle = self.pipeline.order, self.pipeline.order.shuffle
        if shuffle is None:
            return self._own.described() + order.described("")
        by, sizes = self._by(shuffle) if order.is_shuffled_first else "global", ""
        if by == "windows":
            windows = self.windows(shuffle)
            sizes = f", lanes={windows.lanes}, block={windows.block}"
        return self._own.described() + order.described(shuffle.in_words(by, sizes))

    @property
    def fingerprint(self) -> str:
        """What tells the source's data from other data: its shards' names and sizes, or how many samples it has."""
        return self._source.at_revision(self._own.fingerprint)

    @property
    def window_bytes(self) -> int:
        """About how many bytes the samples of a window have that is read before any of it is used."""
        shuffle, nbytes = self._first_shuffle, self._source.sample_bytes
        if shuffle is None:
            return self._own.window_bytes
        if nbytes is None:
            return 0
        by = self._by(shuffle)
        if by == "within":
            return int((self.sizes.max(initial=0) + WITHIN_WINDOW) * nbytes)
        if by != "windows":
            return 0
        windows = self.windows(shuffle)
        return int(windows.lanes * windows.block * nbytes)


def _window(start: int, urls: Sequence[str], shards: Ints, rows: Ints) -> ReadWindow:
    """The samples of a window, shard by shard: shards in the order in which they are first needed."""
    _, first, number = np.unique(shards, return_index=True, return_inverse=True)
    turn = np.empty_like(first)
    turn[np.argsort(first)] = np.arange(len(first))
    group = turn[number]
    by_place = np.lexsort((rows, group))
    group, rows, shards = group[by_place], rows[by_place], shards[by_place]
    is_new = np.ones(len(rows), np.bool_)
    is_new[1:] = (group[1:] != group[:-1]) | (rows[1:] != rows[:-1])  # what comes twice is read once
    order = np.empty(len(rows), np.int64)
    order[by_place] = np.cumsum(is_new) - 1
    group, rows, shards = group[is_new], rows[is_new], shards[is_new]
    begins = np.flatnonzero(np.concatenate([[True], group[1:] != group[:-1]]))
    visits = [
        ShardVisit(urls[shards[begin]], int(shards[begin]), some)
        for begin, some in zip(begins.tolist(), np.split(rows, begins[1:]), strict=True)
    ]
    is_sorted = len(order) == len(rows) and bool((order == np.arange(len(order))).all())
    return ReadWindow(start, visits, None if is_sorted else order)
