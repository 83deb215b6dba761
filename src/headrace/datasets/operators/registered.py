"""Operators that others have written."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

from headrace.datasets.operators.choosing import ComputedNumbers
from headrace.datasets.operators.many import gives_async, gives_many
from headrace.datasets.operators.prepared import AsyncManyPrepared, AsyncPrepared, CalledInThread, Prepared
from headrace.datasets.operators.values import EachSample, GroupOperator, Operator
from headrace.errors import OptionError
from headrace.functions import checked, is_async, name_of
from headrace.tasks import Step
from headrace.types import Batcher, Ints

GROUP = "headrace.operators"

_KINDS: dict[str, Literal["map", "filter", "many"]] = {"one": "map", "at most one": "filter", "many": "many"}
_registered: dict[str, Callable[..., Registered]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOp:
    """What is done to each sample of a stream.

    Attributes:
        fn: of a sample. A plain function runs in workers, an `async def` on the event loop.
        yields: "one": `fn` gives the sample that takes its place. "at most one": it says whether the sample is kept.
            "many": it gives a list of samples, or another iterable, which may be empty.
        random: in workers, seed the generators of Python, numpy and torch from (seed, epoch, position) before each
            call. False saves 7 µs a sample; `hr.rng()` is the sample's own in any case.
        is_shardable: whether ranks may each run it over samples of their own. With False several ranks are refused.
        sharding_settings: called as `sharding_settings(count, index)` in each process that runs `fn`, before its first
            sample, with how many ranks share the samples, and which of them this is. `fn` is a plain function then.
        is_separate_process: True: it runs in worker processes alone, and a loader without any is refused. False: in
            the loader's own process, a plain function in a thread. None: as its colour says.
        lazy_init: called once in each process of a loader that runs `fn`, before its first sample. What it gives is
            the second argument of `fn` there. It is never sent anywhere, so it may be a connection, or a model.
    """

    fn: Callable[..., Any]
    yields: Literal["one", "at most one", "many"] = "one"
    random: bool = True
    is_shardable: bool = True
    sharding_settings: Callable[[int, int], object] | None = None
    is_separate_process: bool | None = None
    lazy_init: Callable[[], object] | None = None

    def __post_init__(self) -> None:
        if self.yields not in _KINDS:
            raise OptionError(f"SampleOp(yields={self.yields!r}): one of {', '.join(map(repr, _KINDS))} is meant")
        is_on_loop = gives_async(checked(self.fn, "SampleOp"))
        for name in ("sharding_settings", "lazy_init"):
            hook = getattr(self, name)
            if hook is not None and is_async(checked(hook, f"SampleOp: {name}=")):
                raise OptionError(f"SampleOp({name}={name_of(hook)}): a plain function is needed, and no `async def`")
        if is_on_loop and (self.is_separate_process or self.sharding_settings is not None):
            name = "is_separate_process=True" if self.is_separate_process else "sharding_settings"
            raise OptionError(
                f"SampleOp({name}): {name_of(self.fn)} is an `async def`, which runs on the loader's event loop: a "
                "plain function is needed"
            )
        if self.is_separate_process is False and self.sharding_settings is not None:
            raise OptionError("SampleOp(sharding_settings=…) is for what workers run: leave is_separate_process out")

    @property
    def where(self) -> Literal["loop", "worker"]:
        """Where it runs."""
        return "loop" if is_async(self.operator("").step.fn) else "worker"

    def operator(self, name: str) -> EachSample:
        """What this is in a stream, under the name that errors, reports and states give it."""
        fn: Any = self._prepared
        fn = gives_many(fn) if self.yields == "many" else fn
        if self.is_separate_process is False and not is_async(fn):
            fn = CalledInThread(fn)
        step = Step(name, _KINDS[self.yields], fn, self.random, is_shardable=self.is_shardable)
        return EachSample(replace(step, is_separate=self.is_separate_process is True))

    @property
    def _prepared(self) -> Callable[[Any], Any]:
        """The function of a sample alone."""
        if self.lazy_init is None and self.sharding_settings is None and not self.is_separate_process:
            return self.fn
        kind = AsyncPrepared if is_async(self.fn) else AsyncManyPrepared if gives_async(self.fn) else Prepared
        return kind(self.fn, self.lazy_init, self.sharding_settings, is_separate=self.is_separate_process is True)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOp:
    """How samples of a stream are put together: each group is one sample of what follows.

    Attributes:
        batcher: called for each group, without arguments: gives a new `headrace.types.Batcher`, which says what the
            group is. It runs in the trainer's process, on the event loop, and sees no samples but their measures.
        measure: gives a whole number of a sample, such as its length, in a worker; None: it is 1. Of a sample that
            failed it is 0.
        collate: makes one of the group's samples, which it gets as a list, in a worker. By default the list is it.
        is_shardable: whether ranks may each put samples of their own together. With False several ranks are refused.
    """

    batcher: Callable[[], Batcher]
    measure: Callable[[Any], int] | None = None
    collate: Callable[[list[Any]], Any] = list
    is_shardable: bool = True

    def __post_init__(self) -> None:
        for name, function in (("batcher", self.batcher), ("measure", self.measure or len), ("collate", self.collate)):
            if is_async(checked(function, f"BatchOp: {name}=")):
                raise OptionError(
                    f"BatchOp({name}={name_of(function)}): a plain function is needed, and no `async def`"
                )

    def operator(self, name: str) -> GroupOperator:
        """What this is in a stream, under the name that errors, reports and states give it."""
        return GroupOperator(name, self.batcher, self.measure, self.collate, is_shardable=self.is_shardable)


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderOp:
    """Which of a data set's samples come, and in which order: a function of their positions. They have numbers for it.

    Attributes:
        numbers: `numbers(positions, count, seed)` gives, for an array of positions (int64, from 0 on), which of the
            `count` samples that there were come at these: an array of their numbers, each below `count`. The seed is
            another one in each epoch, and in each pass of `.repeat()`. It is asked for any positions, in any order, in
            the process of the loader, and must give the same whenever it is asked for the same.
        count: how many samples come of so many; by default as many.
    """

    numbers: Callable[[Ints, int, int], Ints]
    count: Callable[[int], int] = int

    def __post_init__(self) -> None:
        for name, function in (("numbers", self.numbers), ("count", self.count)):
            if is_async(checked(function, f"OrderOp: {name}=")):
                raise OptionError(
                    f"OrderOp({name}={name_of(function)}): a plain function is needed, and no `async def`"
                )

    def operator(self, name: str) -> ComputedNumbers:
        """What this is in a stream, under the name that errors and states give it."""
        return ComputedNumbers(name, self.numbers, self.count)


Registered = SampleOp | BatchOp | OrderOp


def register_operator(name: str, make: Callable[..., Registered]) -> None:
    """Have `data.apply_op(name, …)` do what the operator does that `make(…)` gives, in any stream.

    It goes to the workers with the streams: nothing has to be registered there. A second registration wins over the
    first. A package that is installed can name its function as an entry point of the group `headrace.operators`.
    `headrace.testing.OperatorContract` tests an operator.

    Args:
        name: a word, under which states and errors name it, too.
        make: called with the arguments of `apply_op`; gives a `hr.SampleOp`, a `hr.BatchOp` or a `hr.OrderOp`.

    Raises:
        OptionError: the name is none, or `make` cannot be called.

    Example:
        >>> import headrace as hr
        >>> hr.register_operator("times", lambda n: hr.SampleOp(fn=lambda sample: [sample] * n, yields="many"))
        >>> list(hr.DataLoader(hr.from_map([3, 4]).apply_op("times", 2), batch_size=None))
        [3, 3, 4, 4]
    """
    if not str(name).isidentifier():
        raise OptionError(f"register_operator({name!r}): a word is needed, of letters, digits and '_'")
    if not callable(make):
        raise OptionError(
            f"register_operator({name!r}, {make!r}): a function that gives a SampleOp, a BatchOp or an OrderOp is "
            "needed"
        )
    _registered[name] = make


def registered_operators() -> dict[str, Callable[..., Registered]]:
    """Those that others have written, by name; what is installed is imported when it is first used."""
    return {**_installed(), **_registered}


def made_operator(name: str, args: tuple[object, ...], named: dict[str, object]) -> Operator:
    """What an operator is in a stream, with these arguments.

    Raises:
        OptionError: there is no such operator, or it gives none.
    """
    known = registered_operators()
    if name not in known:
        have = ", ".join(sorted(known)) or "none"
        raise OptionError(f".apply_op({name!r}): register it first, by hr.register_operator; registered are: {have}")
    made = known[name](*args, **named)
    if not isinstance(made, Registered):
        raise OptionError(
            f".apply_op({name!r}): what is registered gave a {type(made).__name__}, and no hr.SampleOp, hr.BatchOp or "
            "hr.OrderOp"
        )
    described = [*map(_describe, args), *(f"{key}={_describe(value)}" for key, value in named.items())]
    return made.operator(f"{name}({', '.join(described)})")


def _describe(value: object) -> str:
    """An argument, as a state names it: the same in each process."""
    return name_of(value) if callable(value) else repr(value)


@functools.cache
def _installed() -> dict[str, Callable[..., Registered]]:
    return {entry.name: functools.partial(_load, entry) for entry in entry_points(group=GROUP)}


def _load(entry: EntryPoint, *args: object, **named: object) -> Registered:
    made: Registered = entry.load()(*args, **named)
    return made
