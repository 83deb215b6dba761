"""`.apply_op()`: operators written by users and other packages."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

import anyio.to_thread

from headrace._util import check
from headrace._util.context import running_part, running_threads
from headrace._util.functions import is_async, name_of
from headrace.ops.flat_map import gives_async, gives_many
from headrace.ops.operator import EachSample, GroupOperator, Operator
from headrace.ops.sample import ComputedNumbers
from headrace.types import Batcher, Ints
from headrace.workers.tasks import Step

GROUP = "headrace.operators"

_KINDS: dict[str, Literal["map", "filter", "many"]] = {"one": "map", "at most one": "filter", "many": "many"}
_registered: dict[str, Callable[..., Registered]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOp:
    """An operator on each sample of a stream.

    Attributes:
        fn: Function of a sample. A plain function runs in workers, an `async def` on the event loop.
        yields: "one": `fn` returns the new sample. "at most one": `fn` is a predicate that keeps or drops the sample.
            "many": `fn` returns a list of samples or another iterable, which may be empty.
        random: In workers, seed the generators of Python, numpy and torch from (seed, epoch, position) before each
            call. False saves 7 µs a sample. `hr.rng()` is specific to the sample in either case.
        is_shardable: True if each rank may run `fn` on its own samples. With False, several ranks are refused.
        sharding_settings: Called as `sharding_settings(count, index)` in each process that runs `fn`, before its first
            sample. `count` is the number of ranks that share the samples, `index` is this rank. `fn` must be a plain
            function.
        is_separate_process: True: `fn` runs in worker processes only, and a loader without workers is refused. False:
            `fn` runs in the loader's own process, a plain function in a thread. None: the kind of function decides.
        lazy_init: Called once in each process of a loader that runs `fn`, before its first sample. Its result is the
            second argument of `fn`. The result is never sent to other processes, so it may be a connection, or a model.
    """

    fn: Callable[..., Any]
    yields: Literal["one", "at most one", "many"] = "one"
    random: bool = True
    is_shardable: bool = True
    sharding_settings: Callable[[int, int], object] | None = None
    is_separate_process: bool | None = None
    lazy_init: Callable[[], object] | None = None

    def __post_init__(self) -> None:
        check.one_of("SampleOp: yields", self.yields, _KINDS)
        is_on_loop = gives_async(check.function("SampleOp: fn", self.fn))
        for name in ("sharding_settings", "lazy_init"):
            hook = getattr(self, name)
            if hook is not None:
                check.function(f"SampleOp: {name}", hook, is_plain=True)
        if is_on_loop and (self.is_separate_process or self.sharding_settings is not None):
            name = "is_separate_process=True" if self.is_separate_process else "sharding_settings"
            raise check.invalid(f"SampleOp({name}): fn", self.fn, "a plain function: others run on the event loop")
        if self.is_separate_process is False and self.sharding_settings is not None:
            raise check.conflict("SampleOp: sharding_settings=", "is_separate_process=False", "workers call it")

    @property
    def where(self) -> Literal["loop", "worker"]:
        """Where `fn` runs."""
        return "loop" if is_async(self.operator("").step.fn) else "worker"

    def operator(self, name: str) -> EachSample:
        """Return the operator of a stream, with its name in errors, reports and states."""
        fn: Any = self._prepared
        fn = gives_many(fn) if self.yields == "many" else fn
        if self.is_separate_process is False and not is_async(fn):
            fn = CalledInThread(fn)
        step = Step(name, _KINDS[self.yields], fn, self.random, is_shardable=self.is_shardable)
        return EachSample(replace(step, is_separate=self.is_separate_process is True))

    @property
    def _prepared(self) -> Callable[[Any], Any]:
        if self.lazy_init is None and self.sharding_settings is None and not self.is_separate_process:
            return self.fn
        kind = AsyncPrepared if is_async(self.fn) else AsyncManyPrepared if gives_async(self.fn) else Prepared
        return kind(self.fn, self.lazy_init, self.sharding_settings, is_separate=self.is_separate_process is True)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOp:
    """A grouping of samples of a stream. Each group is one sample of the following steps.

    Attributes:
        batcher: Called for each group, without arguments. Returns a new `headrace.types.Batcher`, which decides the
            group. It runs in the trainer's process, on the event loop, and sees only the measures of samples.
        measure: Returns a whole number for a sample, such as its length; runs in a worker. None: 1. Failed samples have
            0.
        collate: Combines the list of a group's samples; runs in a worker. By default it returns the list.
        is_shardable: True if each rank may group its own samples. With False, several ranks are refused.
    """

    batcher: Callable[[], Batcher]
    measure: Callable[[Any], int] | None = None
    collate: Callable[[list[Any]], Any] = list
    is_shardable: bool = True

    def __post_init__(self) -> None:
        for name, function in (("batcher", self.batcher), ("measure", self.measure or len), ("collate", self.collate)):
            check.function(f"BatchOp: {name}", function, is_plain=True)

    def operator(self, name: str) -> GroupOperator:
        """Return the operator of a stream, with its name in errors, reports and states."""
        return GroupOperator(name, self.batcher, self.measure, self.collate, is_shardable=self.is_shardable)


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderOp:
    """A selection and order of numbered samples, as a function of positions.

    Attributes:
        numbers: `numbers(positions, count, seed)` returns the sample numbers, each below `count`, at an array of
            positions (int64, from 0 on). `count` is the number of samples before the operator. The seed differs in each
            epoch, and in each pass of `.repeat()`. It is called for any positions, in any order, in the loader's
            process, and must be deterministic.
        count: Returns the number of samples after the operator, given the number before it. By default the same.
    """

    numbers: Callable[[Ints, int, int], Ints]
    count: Callable[[int], int] = int

    def __post_init__(self) -> None:
        for name, function in (("numbers", self.numbers), ("count", self.count)):
            check.function(f"OrderOp: {name}", function, is_plain=True)

    def operator(self, name: str) -> ComputedNumbers:
        """Return the operator of a stream, with its name in errors and states."""
        return ComputedNumbers(name, self.numbers, self.count)


Registered = SampleOp | BatchOp | OrderOp


def register_operator(name: str, make: Callable[..., Registered]) -> None:
    """Register an operator, which `data.apply_op(name, …)` applies to any stream.

    Streams carry their operators to workers, so nothing needs to be registered there. A second registration replaces
    the first. An installed package can declare its function as an entry point of the group `headrace.operators`.
    `headrace.testing.OperatorContract` tests an operator.

    Args:
        name: An identifier, also used in states and errors.
        make: Called with the arguments of `apply_op`. Returns a `SampleOp`, `BatchOp` or `OrderOp`.

    Raises:
        OptionError: The name is not an identifier, or `make` is not callable.

    Example:
        >>> from headrace.plugins import SampleOp, register_operator
        >>> register_operator("times", lambda n: SampleOp(fn=lambda sample: [sample] * n, yields="many"))
        >>> list(hr.DataLoader(hr.from_map([3, 4]).apply_op("times", 2), batch_size=None))
        [3, 3, 4, 4]
    """
    if not str(name).isidentifier():
        raise check.invalid("register_operator(): name", name, "a word of letters, digits and '_'")
    check.function("register_operator(): make", make)
    _registered[name] = make


def registered_operators() -> dict[str, Callable[..., Registered]]:
    """Return registered operators by name. Installed ones are imported on first use."""
    return {**_installed(), **_registered}


def made_operator(name: str, args: tuple[object, ...], named: dict[str, object]) -> Operator:
    """Create the registered operator with these arguments."""
    known = registered_operators()
    check.one_of(".apply_op(): name", name, sorted(known), "; register others by hr.plugins.register_operator")
    made = known[name](*args, **named)
    if not isinstance(made, Registered):
        raise check.invalid(
            f".apply_op({name!r}): result", made, "a hr.plugins.SampleOp, hr.plugins.BatchOp or hr.plugins.OrderOp"
        )
    described = [*map(_describe, args), *(f"{key}={_describe(value)}" for key, value in named.items())]
    return made.operator(f"{name}({', '.join(described)})")


def _describe(value: object) -> str:
    """Return an argument's text in a state, which is the same in each process."""
    return name_of(value) if callable(value) else repr(value)


@functools.cache
def _installed() -> dict[str, Callable[..., Registered]]:
    return {entry.name: functools.partial(_load, entry) for entry in entry_points(group=GROUP)}


def _load(entry: EntryPoint, *args: object, **named: object) -> Registered:
    made: Registered = entry.load()(*args, **named)
    return made


_NOTHING = object()


class Prepared:
    """A function with setup that runs once in each process. Pickles omit the setup's result.

    Args:
        lazy_init: Creates the second argument of `function`.
        sharding_settings: Called with the number of ranks and the index of this one.
        is_separate: True if `function` must not run in the process that created this object.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        lazy_init: Callable[[], object] | None,
        sharding_settings: Callable[[int, int], object] | None,
        *,
        is_separate: bool,
    ) -> None:
        self.function, self._lazy_init, self._sharding_settings = function, lazy_init, sharding_settings
        self._home = os.getpid() if is_separate else None
        self.__qualname__ = name_of(function)
        self._forget()

    def _forget(self) -> None:
        self._lock, self._made, self._part = threading.Lock(), _NOTHING, (0, 0)

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_lock", "_made", "_part")}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._forget()

    def __call__(self, sample: object) -> Any:
        return self.function(sample, *self._ready())

    def _ready(self) -> tuple[object, ...]:
        """Run pending setup. Return the arguments after the sample."""
        if self._home == os.getpid():
            name = f"{self.__qualname__} has is_separate_process=True, and it"
            raise check.lacking(name, "processes: give num_workers")
        part = running_part.get()
        if self._sharding_settings is not None and part != self._part:
            with self._lock:
                if part != self._part:
                    self._sharding_settings(*part)
                    self._part = part
        if self._lazy_init is None:
            return ()
        if self._made is _NOTHING:
            with self._lock:
                if self._made is _NOTHING:
                    self._made = self._lazy_init()
        return (self._made,)


class AsyncPrepared(Prepared):
    async def __call__(self, sample: object) -> Any:
        return await self.function(sample, *self._ready())


class AsyncManyPrepared(Prepared):
    async def __call__(self, sample: object) -> AsyncIterator[object]:
        async for part in self.function(sample, *self._ready()):
            yield part


class CalledInThread:
    def __init__(self, function: Callable[[object], object]) -> None:
        self.function = function
        self.__qualname__ = name_of(function)

    async def __call__(self, sample: object) -> object:
        return await anyio.to_thread.run_sync(self.function, sample, limiter=running_threads.get())
