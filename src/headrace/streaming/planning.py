"""Which samples an epoch has, and in which order: the plan of a pipeline whose samples have numbers."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from headrace.datasets.base import AsyncDataset
from headrace.datasets.mixture import MixedShards, Mixture
from headrace.datasets.operators import Drawn, EpochOf, Pick, Repeat, Shuffle, Take
from headrace.datasets.shards import IndexedShards
from headrace.datasets.stream import Files, Pipeline
from headrace.errors import OptionError
from headrace.fetch.visits import Visit, Window
from headrace.plan import (
    ChosenOrder,
    DrawnOrder,
    EpochOrder,
    FirstOf,
    Order,
    Passes,
    Places,
    ShardOrder,
    ShuffledOrder,
    Steps,
    Windows,
    draw,
)
from headrace.plan.order import ENDLESS, WITHIN_WINDOW
from headrace.streaming.mixing import Mixing
from headrace.types import Ints

WINDOW_SAMPLES = 16384
WINDOW_BYTES = 128 * 2**20
_STRETCH_SAMPLES = 512  # samples of a shard that are worth a read of their own, or so many bytes
_STRETCH_BYTES = 4 * 2**20
_BLOCKS = 2**40  # of a mixture: as many as show its shares exactly enough


class Planning:
    """The orders of a pipeline's epochs.

    Args:
        pipeline: its source is an AsyncDataset.
        seed: the loader's.
    """

    def __init__(self, pipeline: Pipeline, seed: int) -> None:
        assert isinstance(pipeline.source, AsyncDataset)
        self._pipeline, self._source, self._seed = pipeline, pipeline.source, seed
        self._sizes: Ints | None = None
        self._passing: Ints | None = None
        self._mixing: Mixing | None = None
        if isinstance(self._source, Mixture | MixedShards):
            mixed = self._source.mixed
            seeds = [draw("source", seed, name) for name in mixed.names]  # else sources with like sizes had like orders
            self._mixing = Mixing(self._source, list(map(Planning, mixed.pipelines, seeds)), seed)

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
        for operator in self._behind_passes():
            order = FirstOf(order, operator.count)
        return order

    def count(self) -> int:
        """How many positions an epoch has: without its order, and without asking a sampler for numbers.

        Raises:
            OptionError: epochs are to have samples, and there are none to make them of.
        """
        times, limit = self._pipeline.passes
        count = self._count_of_a_pass()
        if limit is not None and not count:
            raise self._lacks_samples()
        count = (ENDLESS if count else 0) if times is None else count * times
        limits = [take.count for take in self._behind_passes()]
        return min([count, *limits] if limit is None else [count, limit, *limits])

    def _lacks_samples(self) -> OptionError:
        limit, source = self._pipeline.passes[1], type(self._source).__name__
        return OptionError(f".epoch(samples={limit}): {source} has no samples to make one of")

    def _count_of_a_pass(self) -> int:
        count = self.count_of_pass
        for operator in self._pipeline.order:
            if isinstance(operator, Repeat | EpochOf):
                break
            if isinstance(operator, Take):
                count = min(count, operator.count)
            elif isinstance(operator, Pick):
                count = operator.count(count)
            elif isinstance(operator, Drawn) and operator.count is not None:
                count = operator.count
        return count

    @property
    def pass_count(self) -> int | None:
        """Samples of a pass, where an epoch goes over them again and again without end; None: it does not.

        A mixture without end has none: it is how many samples of it come until each source has come in full. Where its
        shares change, nobody knows, and it is None.
        """
        if self.count() < ENDLESS:
            return None
        count = self._count_of_a_pass()
        if count < ENDLESS or not isinstance(self._source, Mixture | MixedShards):
            return count
        mixed = self._source.mixed
        if mixed.is_changing:
            return None
        counts = mixed.blend.before(_BLOCKS)
        return max(-(-size * sum(counts) // some) for size, some in zip(mixed.blend.sizes, counts, strict=True) if some)

    def _behind_passes(self) -> Iterator[Take]:
        is_behind = False
        for operator in self._pipeline.order:
            if isinstance(operator, Repeat | EpochOf):
                is_behind = True
            elif is_behind:
                assert isinstance(operator, Take)
                yield operator

    def one_pass(self, epoch: int, number: int) -> Order:
        """Which samples come in one pass over the source."""
        sizes, plain = self.sizes, partial(self._plain, epoch, number)
        order: Order | None = None
        for operator in self._pipeline.order:
            if isinstance(operator, Repeat | EpochOf):
                break
            seed = getattr(operator, "seed", None)
            key = (self._seed if seed is None else seed, epoch, number)
            if isinstance(operator, Shuffle):
                by = self._by(operator, is_first=order is None)
                windows = self.windows(operator) if by == "windows" else None
                is_global = by == "global"
                order = ShuffledOrder(order or plain(), key) if is_global else ShardOrder(sizes, by, key, windows)
                continue
            order = order or plain()
            if isinstance(operator, Take):
                order = FirstOf(order, operator.count)
            elif isinstance(operator, Pick):
                order = ChosenOrder(order, operator.numbers(order.count))
            else:
                count = order.count if operator.count is None else operator.count
                order = DrawnOrder(order, count, key, operator.weights, operator.replacement)
        return order or plain()

    def _plain(self, epoch: int, number: int) -> Order:
        if self._mixing is not None:
            return self._mixing.order(epoch, number)
        return ShardOrder(self.sizes, "none", ())

    def _by(self, shuffle: Shuffle, *, is_first: bool) -> str:
        by = shuffle.by
        if by == "auto":
            by = "window" if isinstance(self._source, IndexedShards) else "global"
        return {"window": "windows"}.get(by, by) if is_first else "global"

    def windows(self, shuffle: Shuffle) -> Windows:
        """How a shuffle by windows mixes this source."""
        source, nbytes = self._source, 1.0
        if isinstance(source, IndexedShards):
            nbytes = max(1.0, source.sample_bytes)
        window = shuffle.window or max(1, min(WINDOW_SAMPLES, int(WINDOW_BYTES / nbytes)))
        if window >= self.count_of_pass:
            return Windows(1, max(1, self.count_of_pass))  # all of it at once
        return Windows.of(window, max(1, min(_STRETCH_SAMPLES, int(_STRETCH_BYTES / nbytes))))

    @property
    def sizes(self) -> Ints:
        """How many samples each shard has, of those that are wanted; a source without shards is one."""
        if self._mixing is not None:
            return self._mixing.sizes
        if self._sizes is None:
            source, count = self._source, len(self._source)
            if not isinstance(source, IndexedShards):
                self._sizes = np.array([count])
            elif self._pipeline.keeps:
                self._passing = source.passing(self._pipeline.keeps)
                self._sizes = np.diff(np.searchsorted(self._passing, source.index.starts))
            else:
                self._sizes = np.diff(source.index.starts)
        return self._sizes

    @property
    def count_of_pass(self) -> int:
        """How many samples the source has that are wanted."""
        return int(self.sizes.sum()) if self._mixing is None else self._mixing.count

    def locate(self, order: Order, positions: Ints) -> Places:
        """Where the samples at some positions lie in the source."""
        shards, rows = order.locate(positions)
        if self._passing is not None:
            assert isinstance(self._source, IndexedShards)
            starts = np.concatenate([[0], np.cumsum(self.sizes)])
            rows = self._passing[starts[shards] + rows] - self._source.index.starts[shards]
        return Places(shards, rows)

    def numbers(self, order: Order, positions: Ints) -> Ints:
        """The numbers of the samples at some positions."""
        shards, rows = self.locate(order, positions)
        if self._mixing is not None:
            return self._mixing.numbers(Places(shards, rows))
        return self._source.index.starts[shards] + rows if isinstance(self._source, IndexedShards) else rows

    def reads(self, order: Order, steps: Steps) -> Iterator[Window]:
        """What to read for the samples to come, shard by shard, window after window."""
        assert isinstance(self._source, IndexedShards)
        urls, start = self._source.urls, 0
        while start < steps.count:
            first = int(steps.positions(start, start + 1)[0])
            ahead = max(1, math.ceil((order.window_end(max(0, first)) - first) / steps.size))
            stop = min(steps.count, start + ahead * steps.batch)
            shards, rows = self.locate(order, steps.positions(start, stop))
            yield _window(start, urls, shards, rows)
            start = stop

    def told(self) -> list[str]:
        """The operators that make the order, as a state names them."""
        mixed = [] if self._mixing is None else self._mixing.told()
        return mixed + [self._told(operator) for operator in self._pipeline.order]

    def _told(self, operator: Any) -> str:
        if isinstance(operator, Shuffle):
            by = self._by(operator, is_first=self._pipeline.order[0] is operator)
            seed = "" if operator.seed is None else f", seed={operator.seed}"
            if by != "windows":
                return f"shuffle({by}{seed})"
            windows = self.windows(operator)
            return f"shuffle(windows, lanes={windows.lanes}, block={windows.block}{seed})"
        if isinstance(operator, Pick | Drawn):
            return type(operator).__name__.lower()  # which samples it gave is in the check
        return f"{type(operator).__name__.lower()}({getattr(operator, operator.__slots__[0])})"

    @property
    def data(self) -> str:
        """What tells this data from other data: its shards' names and sizes, or how many samples it has."""
        if self._mixing is not None:
            return self._mixing.data
        source = self._source
        names = source.urls if isinstance(source, IndexedShards | Files) else ()
        return data_digest(names, self.sizes)

    @property
    def window_bytes(self) -> int:
        """About how many bytes the samples of a window have that is read before any of it is used."""
        if self._mixing is not None:
            return self._mixing.window_bytes
        source, shuffle = self._source, self._pipeline.order[0] if self._pipeline.order else None
        if not isinstance(source, IndexedShards) or not isinstance(shuffle, Shuffle):
            return 0
        by = self._by(shuffle, is_first=True)
        if by == "within":
            return int((self.sizes.max(initial=0) + WITHIN_WINDOW) * source.sample_bytes)
        if by != "windows":
            return 0
        windows = self.windows(shuffle)
        return int(windows.lanes * windows.block * source.sample_bytes)


def data_digest(urls: Sequence[str], sizes: Ints | None) -> str:
    """What tells some shards from others, wherever they lie."""
    told = hashlib.blake2b(digest_size=8)
    told.update("\n".join(url.partition("?")[0].rpartition("/")[2] for url in urls).encode("utf-8", "surrogateescape"))
    if sizes is not None:
        told.update(np.ascontiguousarray(sizes, "<i8").tobytes())
    return told.hexdigest()


def _window(start: int, urls: Sequence[str], shards: Ints, rows: Ints) -> Window:
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
        Visit(urls[shards[begin]], int(shards[begin]), some)
        for begin, some in zip(begins.tolist(), np.split(rows, begins[1:]), strict=True)
    ]
    is_sorted = len(order) == len(rows) and bool((order == np.arange(len(order))).all())
    return Window(start, visits, None if is_sorted else order)
