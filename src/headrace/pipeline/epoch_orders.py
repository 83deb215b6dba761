"""The order of an epoch's samples, for pipelines whose samples have numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from headrace.errors import OptionError
from headrace.ops.operator import counted
from headrace.order.orders import (
    ENDLESS,
    WITHIN_WINDOW,
    EpochOrder,
    FirstOf,
    Order,
    Passes,
    Places,
    ShardOrder,
    Windows,
)
from headrace.order.steps import Steps
from headrace.pipeline.pipeline import Pipeline
from headrace.types import Ints

if TYPE_CHECKING:
    from headrace.dataset.source import HasKeys
    from headrace.ops.shuffle import Shuffle
    from headrace.order.packed_rows import PackedRows
    from headrace.readers.indexed_shards import ReadWindow

    ReadSteps = Steps | PackedRows
    """Positions to read, in order."""

WINDOW_SAMPLES = 16384
_LOOK_AHEAD = 256  # samples that are located at first to find the end of a block
WINDOW_BYTES = 128 * 2**20
_STRETCH_SAMPLES = 512  # contiguous samples of a shard that justify a separate read; or bytes, below
_STRETCH_BYTES = 4 * 2**20
_BLOCKS_AT_ONCE = 16  # in a window, where samples share long blocks and the byte limit allows it
_LONG_BLOCKS = 4  # a window may exceed its byte limit by this factor to hold a block


class Planning:
    """The orders of the epochs of a pipeline, whose samples have numbers."""

    def __init__(self, pipeline: Pipeline, seed: int) -> None:
        self.pipeline, self._source, self._seed = pipeline, pipeline.source, seed
        self._own = self._source.orders(pipeline.keeps, seed)

    def order(self, epoch: int) -> Order:
        """Return the order of an epoch. Negative positions are those of the epochs before."""
        return EpochOrder(lambda later: self.passes(epoch + later))

    def passes(self, epoch: int, first: int = 0) -> Order:
        """Return the order of all passes of an epoch, or of those from `first` on."""
        times, limit = self.pipeline.passes
        # Takes before `.repeat()` or `.epoch()` apply to each pass; `limits_of_all` to all passes together.
        passes = Passes(lambda number: self.one_pass(epoch, first + number), times)
        if limit is not None and not passes.pass_count:
            raise self._lacks_samples()
        order: Order = passes if limit is None else FirstOf(passes, limit)
        for samples in self.pipeline.order.limits_of_all:
            order = FirstOf(order, samples)
        return order

    def count(self) -> int:
        """Return the number of positions in an epoch. Neither builds the order nor calls a sampler."""
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
        """Samples in a pass, if an epoch repeats passes without end. None: it does not.

        For an endless mixture: samples until each source has been used in full. None if its shares change.
        """
        if self.count() < ENDLESS:
            return None
        count = self._count_of_a_pass()
        return count if count < ENDLESS else self._own.full_count

    def one_pass(self, epoch: int, number: int) -> Order:
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
        return self.pipeline.order.shuffle if self.pipeline.order.is_shuffled_first else None

    def _by(self, shuffle: Shuffle) -> str:
        by = shuffle.by
        if by == "auto":
            by = "window" if self._source.traits.indexed else "global"
        return "windows" if by == "window" else by

    def windows(self, shuffle: Shuffle) -> Windows:
        nbytes = max(1.0, self._source.sample_bytes or 0)
        most, blocks = int(WINDOW_BYTES / nbytes), self._source.blocks
        longest = 0 if blocks is None else int(np.diff(blocks).max(initial=0))
        # Each block is read for every window that overlaps it; small windows would repeat the read.
        window = max(1, min(max(WINDOW_SAMPLES, _BLOCKS_AT_ONCE * longest), most))
        window = shuffle.window or max(window, min(longest, _LONG_BLOCKS * most))
        if window >= self.count_of_pass:
            return Windows(1, max(1, self.count_of_pass))  # all of it at once
        stretch = max(1, min(_STRETCH_SAMPLES, int(_STRETCH_BYTES / nbytes)))
        stretch = min(window, max(stretch, longest))
        return Windows.of(window, stretch)

    @property
    def sizes(self) -> Ints:
        """Number of samples of each shard after key filters. A source without shards counts as one."""
        return self._own.sizes

    @property
    def count_of_pass(self) -> int:
        return self._own.count

    def locate(self, order: Order, positions: Ints) -> Places:
        return self._own.locate(order, positions)

    def keys(self, keys: Sequence[object]) -> HasKeys:
        """Return a map from numbers of the orders to `keys`, the keys of the source's samples."""
        return self._own.keys(keys)

    def numbers(self, order: Order, positions: Ints) -> Ints:
        return self._own.numbers(order, positions)

    def work(self, numbers: Ints, power: int) -> NDArray[np.float64]:
        return self._own.work(numbers, power)

    def reads(self, order: Order, steps: ReadSteps) -> Iterator[ReadWindow]:
        """Yield the windows to read for the next samples, each sorted by shard."""
        urls, start = self._source.urls, 0
        while start < steps.count:
            first = int(steps.positions(start, start + 1)[0])
            ahead = max(1, math.ceil((order.window_end(max(0, first)) - first) / steps.size))
            if steps.first_window is not None:
                ahead = min(ahead, max(steps.first_window, start) // steps.batch or 1)
            stop = min(steps.count, start + ahead * steps.batch)
            places = [self.locate(order, steps.positions(start, stop))]
            if self._completes_blocks:
                places += self._rest_of_block(order, steps, stop, places[0])
            shards, rows = (np.concatenate(some) for some in zip(*places, strict=True))
            yield _window(start, urls, shards, rows)
            start += len(rows)

    @property
    def _completes_blocks(self) -> bool:
        """True if a block's samples are consecutive.

        A window that ends within a block would then repeat its read.
        """
        shuffle = self._first_shuffle
        return self._source.blocks is not None and (shuffle is None or self._by(shuffle) == "shards")

    def _rest_of_block(self, order: Order, steps: ReadSteps, stop: int, last: Places) -> Iterator[Places]:
        """Yield the samples from `stop` on that share the last sample's block, in whole batches."""
        blocks = self._source.blocks
        assert blocks is not None

        def numbers(places: Places) -> Ints:
            return np.searchsorted(blocks, self._starts[places.shards] + places.rows, side="right")

        if not len(last.rows):
            return
        block = numbers(Places(last.shards[-1:], last.rows[-1:]))[0]
        limit = stop + int(blocks[block] - blocks[block - 1])  # the next pass may start in this block again
        ahead, most = (max(1, count // steps.batch) * steps.batch for count in (_LOOK_AHEAD, WINDOW_SAMPLES))
        while stop < min(limit, steps.count):
            more = self.locate(order, steps.positions(stop, min(steps.count, stop + ahead)))
            others = np.flatnonzero(numbers(more) != block)
            count = len(more.rows) if not len(others) else -(-int(others[0]) // steps.batch) * steps.batch
            yield Places(more.shards[:count], more.rows[:count])
            if count < ahead:
                return
            stop, ahead = stop + count, min(2 * ahead, most)

    @cached_property
    def _starts(self) -> Ints:
        return self._source.starts

    def described(self) -> list[str]:
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
        return self._source.at_revision(self._own.fingerprint)

    @property
    def window_bytes(self) -> int:
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
    """Sort a window of samples by shard, with shards in the order of first use."""
    from headrace.readers.indexed_shards import ReadWindow, ShardVisit

    _, first, number = np.unique(shards, return_index=True, return_inverse=True)
    turn = np.empty_like(first)
    turn[np.argsort(first)] = np.arange(len(first))
    group = turn[number]
    by_place = np.lexsort((rows, group))
    group, rows, shards = group[by_place], rows[by_place], shards[by_place]
    is_new = np.ones(len(rows), np.bool_)
    is_new[1:] = (group[1:] != group[:-1]) | (rows[1:] != rows[:-1])  # repeated samples are read once
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
