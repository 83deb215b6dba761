"""Which samples an epoch has, and in which order: the plan of a pipeline whose samples have numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from headrace.datasets.operators import Shuffle, counted
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
from headrace.plan.order import ENDLESS, WITHIN_WINDOW
from headrace.producers.indexed_shards import ReadWindow, ShardVisit
from headrace.types import Ints

WINDOW_SAMPLES = 16384
WINDOW_BYTES = 128 * 2**20
_STRETCH_SAMPLES = 512  # samples of a shard that are worth a read of their own, or so many bytes
_STRETCH_BYTES = 4 * 2**20


class Planning:
    """The orders of a pipeline's epochs.

    Args:
        pipeline: its samples have numbers.
        seed: the loader's.
    """

    def __init__(self, pipeline: Pipeline, seed: int) -> None:
        self._pipeline, self._source, self._seed = pipeline, pipeline.source, seed
        self._own = self._source.orders(pipeline.keeps, seed)

    def order(self, epoch: int) -> Order:
        """Which samples come at the positions of an epoch; negative ones are those of the epochs before."""
        return EpochOrder(lambda later: self._one_epoch(epoch + later))

    def _one_epoch(self, epoch: int) -> Order:
        times, limit = self._pipeline.passes
        # of what comes before these; the others concern all passes together
        passes = Passes(partial(self.one_pass, epoch), times)
        if limit is not None and not passes.pass_count:
            raise self._lacks_samples()
        order: Order = passes if limit is None else FirstOf(passes, limit)
        for samples in self._pipeline.order.takes_of_all:
            order = FirstOf(order, samples)
        return order

    def count(self) -> int:
        """How many positions an epoch has: without its order, and without asking a sampler for numbers.

        Raises:
            OptionError: epochs are to have samples, and there are none to make them of.
        """
        if self._pipeline.passes[1] is not None and not self._count_of_a_pass():
            raise self._lacks_samples()
        return counted(self.count_of_pass, self._pipeline.order.operators)

    def _lacks_samples(self) -> OptionError:
        limit, source = self._pipeline.passes[1], self._source.name
        return OptionError(f".epoch(samples={limit}): {source} has no samples to make one of")

    def _count_of_a_pass(self) -> int:
        return counted(self.count_of_pass, self._pipeline.order.one_pass)

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
        operators, shuffle = self._pipeline.order.one_pass, self._first_shuffle
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
        return self._pipeline.order.shuffle if self._pipeline.order.is_shuffled_first else None

    def _by(self, shuffle: Shuffle) -> str:
        by = shuffle.by
        if by == "auto":
            by = "window" if self._source.traits.indexed else "global"
        return "windows" if by == "window" else by

    def windows(self, shuffle: Shuffle) -> Windows:
        """How a shuffle by windows mixes this source."""
        nbytes = max(1.0, self._source.sample_bytes or 0)
        window = shuffle.window or max(1, min(WINDOW_SAMPLES, int(WINDOW_BYTES / nbytes)))
        if window >= self.count_of_pass:
            return Windows(1, max(1, self.count_of_pass))  # all of it at once
        stretch = max(1, min(_STRETCH_SAMPLES, int(_STRETCH_BYTES / nbytes)))
        if self._source.shares_blocks:  # or each would be read for every stretch
            stretch = min(window, max(stretch, int(self.sizes.max(initial=1))))
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

    def numbers(self, order: Order, positions: Ints) -> Ints:
        """The numbers of the samples at some positions."""
        return self._own.numbers(order, positions)

    def reads(self, order: Order, steps: Steps) -> Iterator[ReadWindow]:
        """What to read for the samples to come, shard by shard, window after window."""
        urls, start = self._source.urls, 0
        while start < steps.count:
            first = int(steps.positions(start, start + 1)[0])
            ahead = max(1, math.ceil((order.window_end(max(0, first)) - first) / steps.size))
            stop = min(steps.count, start + ahead * steps.batch)
            shards, rows = self.locate(order, steps.positions(start, stop))
            yield _window(start, urls, shards, rows)
            start = stop

    def described(self) -> list[str]:
        """The operators that make the order, as a state names them."""
        order, shuffle = self._pipeline.order, self._pipeline.order.shuffle
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
        return self._own.fingerprint

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
