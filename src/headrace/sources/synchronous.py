"""Synchronous data sets: called in workers, or in threads of the trainer's process."""

from __future__ import annotations

import copy
import inspect
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import Any, Self

import anyio.to_thread

from headrace._util import check
from headrace._util.context import RunningSample, running_reader, running_sample
from headrace.dataset.asynchronous import AsyncDataset, AsyncIterableDataset, RanksBy
from headrace.dataset.stream import Stream
from headrace.errors import OptionError
from headrace.ops.operator import EachSample
from headrace.sources.item_calls import GetItem, Taken, gate_of, timed
from headrace.workers.tasks import Step


class FromMap(AsyncDataset):
    """The data set of `from_map`: its keys, or its samples.

    Args:
        threads: Number of threads that may call `__getitem__` at the same time, over all loaders of this process. None:
            samples are the keys, and a step in the workers calls `__getitem__`.
    """

    def __init__(self, dataset: Any, threads: int | None) -> None:
        self.dataset, self.threads = dataset, threads
        self._gate = None if threads is None else gate_of(dataset, threads)
        self.get_many = _themselves if threads is None else None

    def __reduce__(self) -> tuple[object, ...]:
        return FromMap, (self.dataset, self.threads)

    def __len__(self) -> int:
        return len(self.dataset)

    async def aget(self, key: object) -> object:
        if self._gate is None:
            return key
        sample, taken = await self._gate.call(self.dataset.__getitem__, key)
        _count(self.dataset, "__getitem__", taken)
        return sample


async def _themselves(keys: Sequence[object]) -> Sequence[object]:
    return keys


def from_map(dataset: Any, *, threads: int | None = None) -> Stream:
    """Read samples from a data set, whose `__getitem__` is called in the workers.

    Each worker has a copy of the data set. Random numbers that `__getitem__` draws depend on the seed, the epoch and
    the sample only.

    Args:
        dataset: Has `__len__` and `__getitem__`.
        threads: Call `__getitem__` in this many threads of this process instead, without copies. With 1, calls never
            overlap, even if several loaders use the data set. If calls wait for a disk or the network, and are
            thread-safe, try 16 or more. Draws from the global generators then differ from run to run.

    Raises:
        OptionError: `threads` is not a number of 1 or more.

    Examples:
        >>> list(hr.from_map(["a", "b", "c"]))
        ['a', 'b', 'c']
    """
    check.whole_or_none("hr.from_map(): threads", threads, 1)
    data = FromMap(dataset, threads)
    if threads is not None:
        return Stream(data)
    step = Step(f"{_name(dataset)}.__getitem__", "map", GetItem(dataset), random=True, is_implied=True, reads=True)
    return Stream(data, (EachSample(step),))


class FromIterable(AsyncIterableDataset):
    def __init__(
        self,
        iterable: Iterable[object] | Callable[[], Iterable[object]],
        ranks_by: RanksBy | None,
        *,
        one_epoch: bool = False,
    ) -> None:
        self.iterable, self.ranks_by, self.one_epoch = iterable, ranks_by, one_epoch
        self._is_begun = False

    def opened(self) -> Iterator[object]:
        iterable: Any = self.iterable
        samples: Iterator[object] = iter(iterable() if makes_one(iterable) else iterable)
        is_over = inspect.isgenerator(samples) and inspect.getgeneratorstate(samples) == inspect.GEN_CLOSED
        if is_over or (self.one_epoch and self._is_begun):
            raise OptionError(
                f"hr.from_iterable({iterable!r:.200}): an earlier loop has used up its samples. For more than one "
                "epoch give a function that returns a new iterator: hr.from_iterable(lambda: …)"
            )
        self._is_begun = True
        return samples

    def aiter(self) -> AsyncIterator[object]:
        return _InThread(self.opened, self.iterable)


_TOGETHER_S = 0.005  # of a call in a thread, which cannot be cancelled


class _InThread:
    """An iterator whose `next` is called in a thread, for several samples in one call of the thread."""

    def __init__(self, open_: Callable[[], Iterator[object]], iterable: object) -> None:
        self._open, self._iterable = open_, iterable
        self._samples: Iterator[object] | None = None
        self._error: Exception | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> object:
        return (await self.__next_several__(1))[0]

    async def __next_several__(self, most: int) -> list[object]:
        samples, taken = await anyio.to_thread.run_sync(timed, self._read, most)
        if not samples:
            raise self._error or StopAsyncIteration
        _count(self._iterable, "__next__", taken, len(samples))
        return samples

    def _read(self, most: int) -> list[object]:
        """Return up to `most` samples, or none at the end. An error is raised by the call after these."""
        until, running, samples = time.perf_counter() + _TOGETHER_S, running_sample.get(), list[object]()
        if self._samples is None:
            self._samples = self._open()
        try:
            while len(samples) < most and self._error is None and not (samples and time.perf_counter() > until):
                if running is not None and samples:  # the first one continues the numbers of `iter`
                    running_sample.set(RunningSample(running.key, running.position + len(samples)))
                samples.append(next(self._samples))
        except StopIteration:
            self._samples = iter(())
        except StopAsyncIteration as error:  # raised on, it would end the epoch
            self._error = RuntimeError(f"{_name(self._iterable)} raised {error!r}")
        except Exception as error:
            self._error = error
        return samples


class ResumableIterable(FromIterable):
    """A `FromIterable` that saves and restores its position by `state_dict` of the iterable.

    States are taken between samples, while no next sample is being read.
    """

    def __init__(self, iterable: Any, ranks_by: RanksBy | None, *, one_epoch: bool = False) -> None:
        super().__init__(iterable, ranks_by, one_epoch=one_epoch)
        self._fresh: Any = None
        self._is_loaded = self._goes_on = False

    def state_dict(self) -> Any:
        return self.iterable.state_dict()  # type: ignore[union-attr]

    def load_state_dict(self, state: Any) -> None:
        if self._fresh is None:
            self._fresh = copy.deepcopy(self.state_dict())
        self.iterable.load_state_dict(state)  # type: ignore[union-attr]
        self._is_loaded = True

    def opened(self) -> Iterator[object]:
        # Hugging Face's iterables start every later pass, not only the next one, from the loaded state.
        if self._goes_on and not self._is_loaded and type(self.iterable).__module__.startswith("datasets."):
            self.iterable.load_state_dict(copy.deepcopy(self._fresh))  # type: ignore[union-attr]
        self._goes_on, self._is_loaded = self._is_loaded, False
        return super().opened()


def from_iterable(
    iterable: Iterable[Any] | Callable[[], Iterable[Any]], *, ranks_by: RanksBy | None = None, one_epoch: bool = False
) -> Stream:
    """Read samples from an iterable, whose `iter` and `next` are called in a thread.

    An iterable with `state_dict` and `load_state_dict`, such as Hugging Face's `IterableDataset`, is resumed with
    these.

    Args:
        iterable: An iterable, iterated over again in each epoch; or a function that is called for one in each epoch.
        ranks_by: How several ranks divide the samples, as in `AsyncIterableDataset.ranks_by`. `hr.shard_info()` works
            in the function, and in the iterable's `iter` and `next`.
        one_epoch: Accept an iterator, such as a generator or an open file. It has samples for one epoch; a second one
            raises an error.

    Raises:
        OptionError: `iterable` is neither an iterable nor a function, or an iterator without `one_epoch=True`.
    """
    from headrace.torch_compat.stateful import is_stateful

    if not (hasattr(iterable, "__iter__") or makes_one(iterable)):
        raise check.invalid("hr.from_iterable(): iterable", iterable, "an iterable, or a function that returns one")
    if not one_epoch and not makes_one(iterable) and is_iterator(iterable):
        needed = "a function that returns a new iterator, as in hr.from_iterable(lambda: …), as one ends with its epoch"
        remedy = "or give one_epoch=True, and loop once"
        raise check.invalid("hr.from_iterable(): iterable", iterable, f"{needed}; {remedy}")
    is_resumable = is_stateful(iterable) and not makes_one(iterable)
    return Stream((ResumableIterable if is_resumable else FromIterable)(iterable, ranks_by, one_epoch=one_epoch))


def is_iterator(iterable: object) -> bool:
    """True if `iter` returns the object itself, so that a second epoch has no samples."""
    return hasattr(iterable, "__next__") and iter(iterable) is iterable  # type: ignore[call-overload]


def makes_one(iterable: object) -> bool:
    """True for a function, or a class, that makes an iterable."""
    return callable(iterable) and (isinstance(iterable, type) or not hasattr(iterable, "__iter__"))


def _name(data: object) -> str:
    return str(getattr(data, "__name__", None) or type(data).__name__)


def _count(data: object, name: str, taken: Taken, calls: int = 1) -> None:
    reader = running_reader.get()
    if reader is not None:
        held = reader.meter.held(f"{_name(data)}.{name}", "threads")
        held.calls += calls
        held.seconds += taken.computed
        held.waited += taken.waited
