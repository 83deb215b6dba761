"""The operators that every data set of ours has."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from headrace.datasets.choosing import SelectIndices, WeightedSample
from headrace.datasets.fields import AsyncFieldFilter, FieldFilter, Select, ToTuple, on_field
from headrace.datasets.many import Unbatch, gives_many
from headrace.datasets.operators import Batch, EachSample, EpochSize, Operator, Repeat, Shuffle, Take
from headrace.datasets.registered import made_operator
from headrace.errors import OptionError
from headrace.formats.limits import DEFAULTS, Limits
from headrace.functions import checked, is_async, name_of
from headrace.tasks import Step

S = TypeVar("S")  # a stream


class Operators(Generic[S]):
    """The operators of every data set of ours. Each gives a new stream; none reads anything.

    Where a function runs follows from its colour: an `async def` on the event loop, with many samples at once, any
    other in the worker processes.
    """

    announced_epoch: tuple[int] | None = None  # another tuple each time that it is told

    def _with(self, operator: Operator) -> S:
        raise NotImplementedError

    def _as_stream(self) -> S:
        raise NotImplementedError

    def set_epoch(self, epoch: int) -> None:
        """Have the loader of this data set begin this epoch next, as its own `set_epoch` does."""
        self.announced_epoch = (epoch,)

    def shuffle(
        self,
        by: Literal["auto", "shards", "within", "window", "global", "buffer"] = "auto",
        *,
        window: int | None = None,
        buffer: int | None = None,
        seed: int | None = None,
    ) -> S:
        """Another order each epoch, a function of (seed, epoch) alone.

        Args:
            by: "shards" gives whole shards in another order. "within" exchanges the samples of each shard; one at a
                time is held in memory. "window" does both: shards come in another order, and samples are exchanged
                within windows, each of which holds stretches of many shards (with an index) or one stretch of the
                shards (without). "global" exchanges all samples, and reads each by itself. "buffer" draws from
                samples that wait in a buffer: it needs nothing to be known, and states are refused. "auto" is
                "window" for shards, and "global" for data sets with keys.
            window: samples in a window. By default 16,384, or as many as have 128 MiB; without an index 2,048, or as
                many as have 64 MiB. Twice as much is held in memory.
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

    def decode(
        self,
        spec: str | None = None,
        /,
        *,
        size: tuple[int, int] | None = None,
        limits: Limits = DEFAULTS,
        allow_pickle: bool = False,
        **by_field: Any,
    ) -> S:
        """Decode fields by their names: images, numbers, text, JSON, arrays, also in gzip. Unknown ones stay bytes.

        Where `.to_tuple()` or `.select()` follows, fields that it does not name are not decoded.

        Args:
            spec: what images become: "rgb8" (uint8 array [H, W, 3]), "l8" (uint8 [H, W]), "torch" (uint8 [3, H, W]),
                "pil"; None leaves them as bytes.
            size: (height, width) in pixels to which images are scaled.
            limits: how much files may ask for.
            allow_pickle: also read pickles: fields that are called so by `**by_field`, and those that end in pkl or
                pickle. It runs what the data say, so it is only for data of those whom you trust.
            **by_field: for single fields a name such as "rgb8", "text", "json", "bytes"; a class of protobuf's
                messages; or a function of bytes.

        Raises:
            OptionError: there is no such decoder; or pickles are asked for, and not allowed.
        """
        from headrace.formats.values import decoder

        name = f"decode({spec})" if spec else "decode"
        decodes = decoder(spec, size=size, limits=limits, allow_pickle=allow_pickle, **by_field)
        return self._with(EachSample(Step(name, "map", decodes), decoder=decodes))

    def map(self, fn: Callable[[Any], Any], *, field: str | int | None = None, random: bool = True) -> S:
        """`fn(sample)` in the place of each sample.

        Args:
            fn: a plain function runs in workers, an `async def` on the event loop.
            field: give `fn` this field only, and put its result there.
            random: set the random number generators (hr.rng(), and in workers Python's, numpy's and torch's) from
                (seed, epoch, position) before each call; False saves up to 9 µs a sample, and less where
                `fn` draws from few of them.
        """
        fn = checked(fn, "map")
        if field is not None:
            fn = on_field(fn, field)
        return self._with(EachSample(Step(f"map({name_of(fn)})", "map", fn, random)))

    def filter(self, fn: Callable[[Any], Any], *, field: str | int | None = None) -> S:
        """Only the samples for which `fn(sample)` is true; batches stay full.

        Args:
            fn: a plain function runs in workers, an `async def` on the event loop.
            field: give `fn` this field only. With "__key__", where shards have an index, nothing is read of what is
                left out.
        """
        asks, fn = None, checked(fn, "filter")
        if field is not None:
            asks = fn if field == "__key__" and not is_async(fn) else None
            fn = AsyncFieldFilter(fn, field) if is_async(fn) else FieldFilter(fn, field)
        return self._with(EachSample(Step(f"filter({name_of(fn)})", "filter", fn, random=True), keeps_key=asks))

    def flat_map(self, fn: Callable[[Any], Any], *, random: bool = True) -> S:
        """The samples that `fn(sample)` gives, in the place of each sample: many, one or none; batches stay full.

        A state is exact also in the middle of what comes of one sample: `fn` is called again for it then, and must give
        the same. Where it raises, nothing comes of the sample but the error.

        Args:
            fn: gives a list, or another iterable; a generator function is one, too. A plain one runs in workers, an
                `async def` on the event loop.
            random: as in `map`; each of the samples has random numbers of its own in what follows.

        Examples:
            >>> import headrace as hr
            >>> data = hr.from_map(["a b", "", "c d e"]).flat_map(str.split)
            >>> list(hr.DataLoader(data, batch_size=4))
            [['a', 'b', 'c', 'd'], ['e']]
        """
        fn = checked(fn, "flat_map")
        return self._with(EachSample(Step(f"flat_map({name_of(fn)})", "many", gives_many(fn), random)))

    def unbatch(self) -> S:
        """The samples of each batch, one by one: of arrays, tensors, texts, and dicts and tuples of them.

        With it batches can be of several sizes in a stream: `.batch(64).map(model).unbatch()` and then `.batch(32)`, or
        the loader's `batch_size`. Numbers that were collated come as tensors without dimensions.
        """
        return self._with(EachSample(Step("unbatch()", "many", Unbatch()), is_unbatch=True))

    def apply_op(self, name: str, *args: Any, **named: Any) -> S:
        """What an operator does that was registered by `hr.register_operator`.

        Args:
            name: of the operator.
            *args: for what makes it.
            **named: the same, by name.

        Raises:
            OptionError: there is no such operator.
        """
        return self._with(made_operator(name, args, named))

    def select(self, *names: str) -> S:
        """The named fields of each sample only; where shards have an index, the others are not read.

        "jpg;png" is the first of the two that a sample has; one that lacks a field is a FormatError, which names it.
        """
        if not names:
            raise OptionError(".select(): name at least one field")
        selection = Select(names)
        return self._with(EachSample(Step(f"select({', '.join(names)})", "map", selection), selection=selection))

    def slice(self, start: int, stop: int | None = None, step: int = 1) -> S:
        """The samples with the numbers from `start` up to `stop`, each `step`-th one, of data sets with numbers."""
        if start < 0 or (stop is not None and stop < start) or step < 1:
            raise OptionError(f".slice({start}, {stop}, {step}): 0 <= start <= stop and step >= 1 must hold")
        chooses = functools.partial(_slice, start, stop, step)
        return self._with(SelectIndices("slice", chooses))

    def sample(
        self,
        sampler: Iterable[int] | None = None,
        *,
        weights: Sequence[float] | NDArray[Any] | None = None,
        count: int | None = None,
        replacement: bool = True,
        seed: int | None = None,
    ) -> S:
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

    def repeat(self, n: int | None = None) -> S:
        """All samples `n` times an epoch, each time in another order where they are shuffled; None: without end."""
        if n is not None and n < 1:
            raise OptionError(f".repeat({n}): 1 or more")
        return self._with(Repeat(n))

    def epoch(self, *, samples: int) -> S:
        """Epochs of `samples` samples, over all ranks together: the data are begun again, or left, where that is full.

        All ranks make as many steps also where samples are not counted beforehand: of shards, each reads its own; of an
        iterable data set, `ranks_by` says how they are divided.
        """
        if samples < 1:
            raise OptionError(f".epoch(samples={samples}): 1 or more")
        return self._with(EpochSize(samples))

    def to_tuple(self, *names: str) -> S:
        """A tuple of the named fields; "jpg;png" is the first of the two that a sample has.

        A sample that lacks a field is a FormatError, which names it.
        """
        if not names:
            raise OptionError(".to_tuple(): name at least one field")
        selection = ToTuple(names)
        return self._with(EachSample(Step(f"to_tuple({', '.join(names)})", "map", selection), selection=selection))

    def batch(self, n: int, *, drop_last: bool = False) -> S:
        """Batches of `n` samples, collated; a `map` behind it gets whole batches.

        Where more follows than functions of batches, such as `unbatch` or another `batch`, it is made on the way, by
        the default collation.

        Args:
            n: samples in a batch.
            drop_last: leave a last batch out that has fewer.
        """
        if n < 1:
            raise OptionError(f".batch({n}): a batch has 1 sample or more")
        return self._with(Batch(n, drop_last))

    def take(self, n: int) -> S:
        """The first `n` samples (or batches, behind `batch`) of each epoch."""
        if n < 0:
            raise OptionError(f".take({n}): 0 or more")
        return self._with(Take(n))


def _slice(start: int, stop: int | None, step: int, count: int) -> range:
    return range(start, count if stop is None else min(stop, count), step)


def _all_of(sampler: Iterable[int], count: int) -> Iterable[int]:  # noqa: ARG001 (it knows how many there are)
    return sampler
