"""The data sets that users write, and the operators that all of ours have."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from headrace.datasets.operators import (
    AsyncFieldFilter,
    Drawn,
    EpochOf,
    FieldFilter,
    Group,
    Pick,
    Repeat,
    Select,
    Shuffle,
    Take,
    ToTuple,
    checked,
    is_async,
    name_of,
    on_field,
)
from headrace.errors import OptionError
from headrace.formats.limits import DEFAULTS, Limits
from headrace.tasks import Step

if TYPE_CHECKING:
    from headrace.datasets.stream import Stream


class Operators:
    """The operators of every data set of ours. Each gives a new stream; none reads anything.

    Where a function runs follows from its colour: an `async def` on the event loop, with many samples at once, any
    other in the worker processes.
    """

    told_epoch: tuple[int] | None = None  # another tuple each time that it is told

    def _with(self, operator: Any) -> Stream:
        raise NotImplementedError

    def set_epoch(self, epoch: int) -> None:
        """Have the loader of this data set begin this epoch next, as its own `set_epoch` does."""
        self.told_epoch = (epoch,)

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
        **by_field: Any,
    ) -> Stream:
        """Decode fields by their names: images, numbers, text, JSON, arrays, also in gzip. Unknown ones stay bytes.

        Where `.to_tuple()` or `.select()` follows, fields that it does not name are not decoded.

        Args:
            spec: what images become: "rgb8" (uint8 array [H, W, 3]), "l8" (uint8 [H, W]), "torch" (uint8 [3, H, W]),
                "pil"; None leaves them as bytes.
            size: (height, width) in pixels to which images are scaled.
            limits: how much files may ask for.
            by_field: for single fields a name such as "rgb8", "text", "json", "bytes", or a function of bytes.

        Raises:
            OptionError: there is no such decoder.
        """
        from headrace.formats.values import decoder

        name = f"decode({spec})" if spec else "decode"
        return self._with(Step(name, "map", decoder(spec, size=size, limits=limits, **by_field)))

    def map(self, fn: Callable[[Any], Any], *, field: str | int | None = None, random: bool = True) -> Stream:
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
        return self._with(Step(f"map({name_of(fn)})", "map", fn, random))

    def filter(self, fn: Callable[[Any], Any], *, field: str | int | None = None) -> Stream:
        """Only the samples for which `fn(sample)` is true; batches stay full.

        Args:
            fn: a plain function runs in workers, an `async def` on the event loop.
            field: give `fn` this field only. With "__key__", where shards have an index, nothing is read of what is
                left out.
        """
        fn = checked(fn, "filter")
        if field is not None:
            fn = AsyncFieldFilter(fn, field) if is_async(fn) else FieldFilter(fn, field)
        return self._with(Step(f"filter({name_of(fn)})", "filter", fn, random=True))

    def select(self, *names: str) -> Stream:
        """The named fields of each sample only; where shards have an index, the others are not read.

        "jpg;png" is the first of the two that a sample has; one that lacks a field is a FormatError, which names it.
        """
        if not names:
            raise OptionError(".select(): name at least one field")
        return self._with(Step(f"select({', '.join(names)})", "map", Select(names)))

    def slice(self, start: int, stop: int | None = None, step: int = 1) -> Stream:
        """The samples with the numbers from `start` up to `stop`, each `step`-th one, of data sets with numbers."""
        if start < 0 or (stop is not None and stop < start) or step < 1:
            raise OptionError(f".slice({start}, {stop}, {step}): 0 <= start <= stop and step >= 1 must hold")
        chooses = functools.partial(_slice, start, stop, step)
        return self._with(Pick("slice", chooses))

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
            return self._with(Pick("sample", functools.partial(_all_of, sampler)))
        if count is not None and count < 0:
            raise OptionError(f".sample(count={count}): 0 or more")
        return self._with(Drawn(None if weights is None else np.asarray(weights, np.float64), count, replacement, seed))

    def repeat(self, n: int | None = None) -> Stream:
        """All samples `n` times an epoch, each time in another order where they are shuffled; None: without end."""
        if n is not None and n < 1:
            raise OptionError(f".repeat({n}): 1 or more")
        return self._with(Repeat(n))

    def epoch(self, *, samples: int) -> Stream:
        """Epochs of `samples` samples, over all ranks together: the data are begun again, or left, where that is full.

        Where samples are not counted beforehand each rank reads shards of its own, so that all make as many steps.
        """
        if samples < 1:
            raise OptionError(f".epoch(samples={samples}): 1 or more")
        return self._with(EpochOf(samples))

    def to_tuple(self, *names: str) -> Stream:
        """A tuple of the named fields; "jpg;png" is the first of the two that a sample has.

        A sample that lacks a field is a FormatError, which names it.
        """
        if not names:
            raise OptionError(".to_tuple(): name at least one field")
        return self._with(Step(f"to_tuple({', '.join(names)})", "map", ToTuple(names)))

    def batch(self, n: int, *, drop_last: bool = False) -> Stream:
        """Batches of `n` samples, collated; a `map` behind it gets whole batches.

        Args:
            n: samples in a batch.
            drop_last: leave a last batch out that has fewer.
        """
        if n < 1:
            raise OptionError(f".batch({n}): a batch has 1 sample or more")
        return self._with(Group(n, drop_last))

    def take(self, n: int) -> Stream:
        """The first `n` samples (or batches, behind `batch`) of each epoch."""
        if n < 0:
            raise OptionError(f".take({n}): 0 or more")
        return self._with(Take(n))

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._with(None).__aiter__()


class AsyncDataset(Operators):
    """Samples by key, got asynchronously: hundreds at once, on the loader's event loop.

    Write `__len__` and `async def aget(self, key)`; optionally `async def aget_many(self, keys)`, `keys()` where the
    keys are not 0 … n - 1, and `async def aopen(self)` / `async def aclose(self)` for what must be opened on the loop
    that uses it.

    Examples:
        >>> import headrace as hr
        >>> class Squares(hr.AsyncDataset):
        ...     def __len__(self):
        ...         return 4
        ...     async def aget(self, index):
        ...         return index * index
        >>> [batch.tolist() for batch in hr.DataLoader(Squares(), batch_size=2)]
        [[0, 1], [4, 9]]
    """

    def __len__(self) -> int:
        raise NotImplementedError(f"{type(self).__name__} needs __len__")

    async def aget(self, key: Any) -> Any:
        """The sample with this key."""
        raise NotImplementedError(f"{type(self).__name__} needs async def aget(self, key)")

    def keys(self) -> Sequence[Any]:
        """The keys, in the order of the data set."""
        return range(len(self))

    async def aopen(self) -> None:
        """Open what is needed, on the loop that will use it."""

    async def aclose(self) -> None:
        """Close it, on the same loop."""

    def __getitem__(self, key: Any) -> Any:
        """The sample with this key, waiting for it: for use outside a loader."""

        async def get() -> Any:
            await self.aopen()
            try:
                return await self.aget(key)
            finally:
                await self.aclose()

        return blocking(get)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._with(None))

    def _with(self, operator: Any) -> Stream:
        from headrace.datasets.stream import Stream

        return Stream(self, () if operator is None else (operator,))


class AsyncIterableDataset(Operators):
    """Samples as an asynchronous iterator gives them; it may be endless.

    Write `async def aiter(self)` as an asynchronous generator.

    Attributes:
        loop: "engine" runs it on the loader's loop; "caller" on that of the `async for`, for what belongs to the
            user's own program, such as its asyncio.Queue.
    """

    loop: Literal["engine", "caller"] = "engine"

    def aiter(self) -> AsyncIterator[Any]:
        """The samples of one epoch."""
        raise NotImplementedError(f"{type(self).__name__} needs async def aiter(self)")

    async def aopen(self) -> None:
        """Open what is needed, on the loader's loop."""

    async def aclose(self) -> None:
        """Close it, on the same loop."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self._with(None))

    def _with(self, operator: Any) -> Stream:
        from headrace.datasets.stream import Stream

        return Stream(self, () if operator is None else (operator,))


def _slice(start: int, stop: int | None, step: int, count: int) -> range:
    return range(start, count if stop is None else min(stop, count), step)


def _all_of(sampler: Iterable[int], count: int) -> Iterable[int]:  # noqa: ARG001 (it knows how many there are)
    return sampler


def blocking(function: Callable[[], Any]) -> Any:
    """Run a coroutine function to its end, also where a loop is running in this thread."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append((asyncio.run(function()), None))
        except BaseException as error:
            result.append((None, error))

    thread = threading.Thread(target=run, name="headrace-blocking")
    thread.start()
    thread.join()
    value, error = result[0]
    if error is not None:
        raise error
    return value
