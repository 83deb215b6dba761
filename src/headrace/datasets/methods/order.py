"""The operators of data sets that decide which samples come, and in which order."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, Never

import numpy as np
from numpy.typing import NDArray

from headrace.datasets.methods.adding import AddsOperators
from headrace.datasets.operators.choosing import SelectIndices, Stretch, WeightedSample
from headrace.datasets.operators.delivering import OnEveryRank
from headrace.datasets.operators.order import EpochSize, Repeat, Shuffle, Take
from headrace.errors import OptionError
from headrace.numbers import is_whole

if TYPE_CHECKING:
    from headrace.datasets.stream import Stream


class OrderMethods(AddsOperators):
    """Which samples come, and in which order; nothing is read for that."""

    def shuffle(
        self,
        by: Literal["auto", "shards", "within", "window", "global", "buffer"] = "auto",
        *,
        window: int | None = None,
        buffer: int | None = None,
        seed: int | None = None,
    ) -> Stream:
        """Another order each epoch, a function of (seed, epoch) alone.

        Args:
            by: "shards" gives whole shards in another order. "within" exchanges the samples of each shard; one at a
                time is held in memory. "window" does both: shards come in another order, and samples are exchanged
                within windows, each of which holds stretches of many shards (with an index) or one stretch of the
                shards (without). "global" exchanges all samples, and reads each by itself. "buffer" draws from
                samples that wait in a buffer: it needs nothing to be known, and states are refused. "auto" is
                "window" for shards, and "global" for data sets with keys. Samples that operators made of others, as
                `.flat_map()`, `.unbatch()` and `.batch()` do, are permuted within windows of those that follow one
                another.
            window: samples in a window. By default 16,384, or as many as have 128 MiB; without an index 2,048, or as
                many as have 64 MiB. Twice as much is held in memory. Of samples made of others 2,048, of batches 16.
            buffer: samples that wait, by default 4,096.
            seed: of the order; by default the loader's.

        Raises:
            OptionError: an argument is out of its bounds.
        """
        names = ("auto", "shards", "within", "window", "global", "buffer")
        if by not in names:
            raise OptionError(f".shuffle(by={by!r}): one of {', '.join(map(repr, names))} is meant")
        for name, value in (("window", window), ("buffer", buffer)):
            if value is not None and value < 1:
                raise OptionError(f".shuffle({name}={value}): a {name} has 1 sample or more")
        if buffer is not None and by not in ("auto", "buffer"):
            raise OptionError(f".shuffle(by={by!r}, buffer={buffer}): a buffer is for by='buffer'")
        if window is not None and by not in ("auto", "window"):
            raise OptionError(f".shuffle(by={by!r}, window={window}): a window is for by='window'")
        return self._with(Shuffle("buffer" if buffer is not None else by, window, seed, buffer))

    def slice(self, start: int, stop: int | None = None, step: int = 1) -> Stream:
        """The samples with the numbers from `start` up to `stop`, each `step`-th one, of data sets with numbers."""
        if not is_whole(start) or not (stop is None or is_whole(stop, start)) or not is_whole(step, 1):
            raise OptionError(f".slice({start!r}, {stop!r}, {step!r}): 0 <= start <= stop and step >= 1, whole numbers")
        return self._with(Stretch(f"slice({start}, {stop}, {step})", functools.partial(_slice, start, stop, step)))

    def skip(self, n: int) -> Stream:
        """All samples but the first `n`, of data sets with numbers."""
        if not is_whole(n):
            raise OptionError(f".skip({n!r}): 0 or more, a whole number")
        return self._with(Stretch(f"skip({n})", functools.partial(_slice, n, None, 1)))

    def shard(self, *positional: Never, index: int = -1, count: int = 0) -> Stream:
        """One of `count` parts of the samples, of data sets with numbers: each as long as the others, but for one.

        A part has samples that follow each other: of shards, one reads few of them. For a part of samples from all
        over, shuffle before, by a seed that is the same for all parts. (A loader gives each rank its part by itself.)

        Args:
            *positional: refused, as other libraries have another order.
            index: which part, from 0.
            count: how many parts there are.
        """
        if positional:
            given = ", ".join(map(repr, positional))
            raise OptionError(
                f".shard({given}): name the arguments, as in .shard(index=0, count=4). Their order differs between "
                "libraries: tf.data and Hugging Face's datasets have the number of parts first"
            )
        if not is_whole(index) or not is_whole(count) or index >= count:
            raise OptionError(f".shard(index={index!r}, count={count!r}): 0 <= index < count, whole numbers")
        return self._with(Stretch(f"shard({index}, {count})", functools.partial(_part, index, count), True))

    def on_every_rank(self) -> Stream:
        """Ranks do not divide the samples: each gets all of them, in the same order, as by a loader's `shard=False`.

        It is about the stream as a whole: what ranks do not divide cannot be one of several inputs of one that they
        divide, since which of its samples come with which others would depend on the number of ranks.

        Examples:
            >>> import headrace as hr
            >>> data = hr.from_map(range(3)).on_every_rank()
            >>> [list(hr.DataLoader(data, batch_size=None, rank=rank, world_size=2)) for rank in range(2)]
            [[0, 1, 2], [0, 1, 2]]
        """
        return self._with(OnEveryRank())

    def sample(
        self,
        sampler: Iterable[int] | None = None,
        *,
        weights: Sequence[float] | NDArray[Any] | None = None,
        count: int | None = None,
        replacement: bool = True,
        seed: int | None = None,
    ) -> Stream:
        """The samples with the numbers that `sampler` gives, in its order; or samples that are drawn at random.

        Args:
            sampler: one of torch's, or a list or array of numbers; a number may come several times. It is asked anew
                for each epoch; one whose numbers are not the same in each process needs a fixed seed of its own.
            weights: how likely each sample is to be drawn; by default all are as likely.
            count: how many are drawn for an epoch; by default as many as there are.
            replacement: whether a sample may be drawn several times.
            seed: of the draws, which are a function of (seed, epoch, position); by default the loader's.

        Raises:
            OptionError: an argument is of no use.
        """
        if sampler is not None:
            if weights is not None or count is not None or seed is not None or not replacement:
                raise OptionError(".sample(): a sampler does its own drawing; give it alone")
            if isinstance(sampler, Iterator) or not hasattr(sampler, "__iter__"):
                raise OptionError(f".sample({sampler!r:.200}): a sampler, or a list or array of numbers is needed")
            return self._with(SelectIndices("sample", functools.partial(_all_of, sampler)))
        if count is not None and count < 0:
            raise OptionError(f".sample(count={count}): 0 or more")
        return self._with(
            WeightedSample(None if weights is None else np.asarray(weights, np.float64), count, replacement, seed)
        )

    def repeat(self, n: int | None = None) -> Stream:
        """All samples `n` times an epoch, each time in another order where they are shuffled; None: without end."""
        if n is not None and n < 1:
            raise OptionError(f".repeat({n}): 1 or more")
        return self._with(Repeat(n))

    def epoch(self, *, samples: int) -> Stream:
        """Epochs of `samples` samples, over all ranks together: the data are begun again, or left, where that is full.

        All ranks make as many steps also where samples are not counted beforehand: of shards, each reads its own; of an
        iterable data set, `ranks_by` says how they are divided. Then some samples may come again and others be skipped,
        which `stats()` counts; with `tail="uneven"` of the loader, and without `.epoch()`, each comes once.
        """
        if samples < 1:
            raise OptionError(f".epoch(samples={samples}): 1 or more")
        return self._with(EpochSize(samples))

    def take(self, n: int) -> Stream:
        """The first `n` samples (or batches, behind `batch`) of each epoch."""
        if not is_whole(n):
            raise OptionError(f".take({n!r}): 0 or more, a whole number")
        return self._with(Take(n))


def _slice(start: int, stop: int | None, step: int, count: int) -> range:
    return range(start, count if stop is None else min(stop, count), step)


def _part(index: int, parts: int, count: int) -> range:
    return range(index * count // parts, (index + 1) * count // parts)


def _all_of(sampler: Iterable[int], count: int) -> Iterable[int]:  # noqa: ARG001 (it knows how many there are)
    return sampler
