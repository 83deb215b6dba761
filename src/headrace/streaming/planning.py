"""Which samples an epoch has, and in which order: the plan of a pipeline whose samples have numbers."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from headrace.datasets.mix_sources import MixSpec
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
    draw,
)
from headrace.plan.order import ENDLESS, WITHIN_WINDOW
from headrace.producers.indexed_shards import ReadWindow, ShardVisit
from headrace.streaming.mixing import MixPlan
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
        self._sizes: Ints | None = None
        self._passing: Ints | None = None
        self._mixing: MixPlan | None = None
        mixed = self._source.mix
        if isinstance(mixed, MixSpec):
            seeds = [draw("source", seed, name) for name in mixed.names]  # else sources with like sizes had like orders
            self._mixing = MixPlan(self._source, mixed, list(map(Planning, mixed.pipelines, seeds)), seed)

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
        return count if count < ENDLESS or self._mixing is None else self._mixing.pass_count

    def one_pass(self, epoch: int, number: int) -> Order:
        """Which samples come in one pass over the source."""
        operators, shuffle = self._pipeline.order.one_pass, self._first_shuffle
        if shuffle is not None and (by := self._by(shuffle)) != "global":
            key = shuffle.seed_or(self._seed), epoch, number
            order: Order = ShardOrder(self.sizes, by, key, self.windows(shuffle) if by == "windows" else None)
            operators = operators[1:]
        else:
            order = self._plain(epoch, number)
        for operator in operators:
            order = operator.apply(order, (operator.seed_or(self._seed), epoch, number))
        return order

    @property
    def _first_shuffle(self) -> Shuffle | None:
        """How samples are shuffled before all else, which may go by the shards that they lie in."""
        return self._pipeline.order.shuffle if self._pipeline.order.is_shuffled_first else None

    def _plain(self, epoch: int, number: int) -> Order:
        if self._mixing is not None:
            return self._mixing.order(epoch, number)
        return ShardOrder(self.sizes, "none", ())

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
        if self._mixing is not None:
            return self._mixing.sizes
        if self._sizes is None:
            starts = self._source.starts
            self._passing = self._source.passing(self._pipeline.keeps)
            self._sizes = np.diff(starts if self._passing is None else np.searchsorted(self._passing, starts))
        return self._sizes

    @property
    def count_of_pass(self) -> int:
        """How many samples the source has that are wanted."""
        return int(self.sizes.sum()) if self._mixing is None else self._mixing.count

    def locate(self, order: Order, positions: Ints) -> Places:
        """Where the samples at some positions lie in the source."""
        shards, rows = order.locate(positions)
        if self._passing is not None:
            starts = np.concatenate([[0], np.cumsum(self.sizes)])
            rows = self._passing[starts[shards] + rows] - self._source.starts[shards]
        return Places(shards, rows)

    def numbers(self, order: Order, positions: Ints) -> Ints:
        """The numbers of the samples at some positions."""
        shards, rows = self.locate(order, positions)
        is_one = not self._source.traits.sharded and self._mixing is None
        return rows if is_one else np.asarray(self._source.starts[shards] + rows, np.int64)

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
        mixed = [] if self._mixing is None else self._mixing.described()
        order, shuffle = self._pipeline.order, self._pipeline.order.shuffle
        if shuffle is None:
            return mixed + order.described("")
        by, sizes = self._by(shuffle) if order.is_shuffled_first else "global", ""
        if by == "windows":
            windows = self.windows(shuffle)
            sizes = f", lanes={windows.lanes}, block={windows.block}"
        return mixed + order.described(shuffle.in_words(by, sizes))

    @property
    def data(self) -> str:
        """What tells this data from other data: its shards' names and sizes, or how many samples it has."""
        if self._mixing is not None:
            return self._mixing.data
        return data_digest(self._source.urls, self.sizes)

    @property
    def window_bytes(self) -> int:
        """About how many bytes the samples of a window have that is read before any of it is used."""
        if self._mixing is not None:
            return self._mixing.window_bytes
        source, shuffle = self._source, self._first_shuffle
        if source.sample_bytes is None or shuffle is None:
            return 0
        by = self._by(shuffle)
        if by == "within":
            return int((self.sizes.max(initial=0) + WITHIN_WINDOW) * source.sample_bytes)
        if by != "windows":
            return 0
        windows = self.windows(shuffle)
        return int(windows.lanes * windows.block * source.sample_bytes)


def data_digest(urls: Sequence[str], sizes: Ints | None) -> str:
    """What tells some shards from others, wherever they lie."""
    digest = hashlib.blake2b(digest_size=8)
    digest.update(
        "\n".join(url.partition("?")[0].rpartition("/")[2] for url in urls).encode("utf-8", "surrogateescape")
    )
    if sizes is not None:
        digest.update(np.ascontiguousarray(sizes, "<i8").tobytes())
    return digest.hexdigest()


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
