"""Methods of data sets that decide which samples occur, and in which order."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, Never

import numpy as np
from numpy.typing import NDArray

from headrace._util import check
from headrace.dataset.methods.adding import AddsOperators
from headrace.errors import OptionError
from headrace.ops.prefetch import OnEveryRank
from headrace.ops.shuffle import EpochSize, Repeat, Shuffle, Take

if TYPE_CHECKING:
    from headrace.dataset.stream import Stream


class OrderMethods(AddsOperators):
    """Selection and order of samples. Nothing is read for them."""

    def shuffle(
        self,
        by: Literal["auto", "shards", "within", "window", "global", "buffer"] = "auto",
        *,
        window: int | None = None,
        buffer: int | None = None,
        seed: int | None = None,
    ) -> Stream:
        """Permute the samples of each epoch. The order depends on (seed, epoch) only.

        Args:
            by: "shards" permutes whole shards. "within" permutes the samples of each shard, which is held in memory.
                "window" permutes shards, and samples within windows. With an index, a window holds stretches of many
                shards; without, one stretch of the shards. "global" permutes all samples, and reads each individually.
                "buffer" draws from a buffer of waiting samples: nothing needs to be known, and states are refused.
                "auto" is "window" for shards and "global" for data sets with keys. Samples made by operators such as
                `.flat_map()`, `.unbatch()` and `.batch()` are permuted within windows of consecutive ones.
            window: Samples in a window. Default: 16,384, or as many as fit in 128 MiB. Without an index 2,048, or as
                many as fit in 64 MiB. For derived samples 2,048, for batches 16. Twice as much is held in memory.
            buffer: Samples in the buffer; by default 4,096.
            seed: Seed of the order; by default the loader's. Windows of samples without numbers, and of what other
                operators made, combine it with the loader's.

        Raises:
            OptionError: An argument is out of range.
        """
        check.one_of(".shuffle(): by", by, ("auto", "shards", "within", "window", "global", "buffer"))
        for name, value in (("window", window), ("buffer", buffer)):
            check.whole_or_none(f".shuffle(): {name}", value, 1)
            if value is not None and by not in ("auto", name):
                raise check.conflict(f".shuffle(): by={by!r}", f"{name}={value}", f"{name}= is for by={name!r}")
        stream = self._as_stream()
        if by == "global" and stream.pipeline().source.only_in_order is None:
            stream = stream.indexed(".shuffle(by='global') needs")
        return stream._with(Shuffle("buffer" if buffer is not None else by, window, seed, buffer))

    def slice(self, start: int, stop: int | None = None, step: int = 1) -> Stream:
        """Select the samples with numbers in `range(start, stop, step)`.

        The source's samples must have numbers. After operators that drop, make or group samples, the samples that come
        out of these are counted, on one rank.
        """
        from headrace.ops.slice import Stretch

        check.whole(".slice(): start", start)
        check.whole_or_none(".slice(): stop", stop, start)
        check.whole(".slice(): step", step, 1)
        return self._with(Stretch(f"slice({start}, {stop}, {step})", functools.partial(_slice, start, stop, step)))

    def skip(self, n: int) -> Stream:
        """Skip the first `n` samples: equivalent to `.slice(n)`."""
        from headrace.ops.slice import Stretch

        check.whole(".skip(): n", n)
        return self._with(Stretch(f"skip({n})", functools.partial(_slice, n, None, 1)))

    def shard(self, *positional: Never, index: int = -1, count: int = 0) -> Stream:
        """Keep one of `count` parts of the samples. Needs samples with numbers.

        Part sizes differ by at most 1. A part has consecutive samples, so few shards are read for it. For a random
        part, shuffle before, with a seed that is the same for all parts. A loader divides samples among ranks by
        itself.

        Args:
            *positional: Refused, as the order differs between libraries.
            index: Number of the part, from 0.
            count: Number of parts.
        """
        from headrace.ops.slice import Stretch

        if positional:
            given = ", ".join(map(repr, positional))
            raise OptionError(
                f".shard({given}): name the arguments, as in .shard(index=0, count=4). Their order differs between "
                "libraries: tf.data and Hugging Face's datasets have the number of parts first"
            )
        check.whole(".shard(): index", index)
        check.whole(".shard(): count", count, index + 1)
        return self._with(Stretch(f"shard({index}, {count})", functools.partial(_part, index, count), True))

    def on_every_rank(self) -> Stream:
        """Give every rank all samples in the same order, like a loader's `shard=False`.

        It applies to a whole stream. Such a stream cannot be an input of one that ranks divide, as the combination of
        samples would then depend on the number of ranks.

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
        """Select the samples that a sampler lists, or draw samples at random.

        Args:
            sampler: A sampler of torch, or a list or array of sample numbers, which may repeat. It is iterated again
                for each epoch. A sampler that differs between processes needs a fixed seed of its own.
            weights: Relative probability of each sample; by default equal.
            count: Samples drawn in an epoch; by default the number of samples.
            replacement: Whether a sample may be drawn several times.
            seed: Seed of the draws, which depend on (seed, epoch, position); by default the loader's.

        Raises:
            OptionError: An argument is invalid.
        """
        from headrace.ops.slice import SelectIndices, WeightedSample

        if sampler is not None:
            if weights is not None or count is not None or seed is not None or not replacement:
                raise check.conflict(".sample(): a sampler", "options of drawing", "give the sampler alone")
            if isinstance(sampler, Iterator) or not hasattr(sampler, "__iter__"):
                raise check.invalid(".sample(): sampler", sampler, "a sampler, or a list or array of numbers")
            return self._with(SelectIndices("sample", functools.partial(_all_of, sampler)))
        check.whole_or_none(".sample(): count", count)
        return self._with(
            WeightedSample(None if weights is None else np.asarray(weights, np.float64), count, replacement, seed)
        )

    def repeat(self, n: int | None = None) -> Stream:
        """Repeat all samples `n` times in an epoch, reshuffled each time. None: without end.

        Batches, numbers of `.enumerate()`, limits and iterable data sets are repeated pass by pass: each pass runs in a
        loader of its own, and starts batches and numbers again.
        """
        check.whole_or_none(".repeat(): n", n, 1)
        from headrace.ops.combine import repeated

        return repeated((self,), operator=Repeat(n))

    def epoch(self, *, samples: int) -> Stream:
        """Set the samples of an epoch, over all ranks together. The data are repeated or cut.

        All ranks make the same number of steps, even if samples are not counted beforehand. Each rank reads its own
        shards; for an iterable data set, `ranks_by` sets how samples are divided. Then some samples may repeat and
        others be skipped; `stats()` counts both. Without `.epoch()`, and with the loader's `tail="uneven"`, each sample
        occurs once. After `.batch()`, batches are counted, as by `.take()`.
        """
        check.whole(".epoch(): samples", samples, 1)
        from headrace.ops.combine import repeated

        return repeated((self,), operator=EpochSize(samples))

    def take(self, n: int) -> Stream:
        """Keep the first `n` samples (or batches, after `batch`) of each epoch."""
        check.whole(".take(): n", n)
        return self._with(Take(n))


def _slice(start: int, stop: int | None, step: int, count: int) -> range:
    return range(start, count if stop is None else min(stop, count), step)


def _part(index: int, parts: int, count: int) -> range:
    return range(index * count // parts, (index + 1) * count // parts)


def _all_of(sampler: Iterable[int], count: int) -> Iterable[int]:  # noqa: ARG001 (it knows how many there are)
    return sampler
