"""Streams run by loaders of their own within an epoch, for this rank's part of it.

Streams are combined like this if the samples of any have no numbers: samples are then counted as they are read.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import anyio

from headrace._util import check
from headrace._util.context import running_workers
from headrace.dataset.asynchronous import AsyncIterableDataset, IterSource, shard_info
from headrace.dataset.source import forwarded
from headrace.dataset.stream import Stream
from headrace.errors import StateMismatchError
from headrace.ops.fields import with_source
from headrace.options import Ranks, Skip
from headrace.order.permutation import draw
from headrace.pipeline.pipeline import Pipeline, refusal
from headrace.torch_compat import serialize
from headrace.workers.failures import Failure

if TYPE_CHECKING:
    from headrace.loader import DataLoader


class WithinDataset(AsyncIterableDataset):
    """Base class of iterable data sets that iterate over other streams by `loaders`."""

    ranks_by = "shard_info"
    name = ""
    why_no_state: str | None = None
    makes_batches = False

    def __init__(self, streams: Sequence[Stream]) -> None:
        self.streams = tuple(streams)

    def __sample_source__(self) -> WithinSource:
        return WithinSource(self)

    @property
    def text(self) -> str:
        raise NotImplementedError

    def indexed(self) -> Stream | None:
        return None

    @property
    def described(self) -> str:
        """Text in states. Different texts mean different samples."""
        return self.name

    def loaders(self, number_of_pass: int = 0) -> list[DataLoader[Any]]:
        """Create a loader per stream for this rank, epoch and pass, with the outer loader's workers."""
        from headrace.loader import single_samples  # imports torch

        part = shard_info()
        own_seed = draw("pass", part.seed, number_of_pass) if number_of_pass else part.seed
        loaders: list[DataLoader[Any]] = []
        for number, stream in enumerate(self.streams):
            pipeline = stream.pipeline()
            is_worked_on = bool(pipeline.steps or pipeline.regroups or pipeline.group)
            is_grouped = pipeline.group is not None or pipeline.puts_together is not None
            loader = single_samples(
                stream,
                ranks=Ranks(rank=part.rank, world_size=part.world, compare=False),
                seed=draw("input", own_seed, number) if len(self.streams) > 1 else own_seed,
                num_workers=running_workers.get() if is_worked_on else 0,
                errors=None if is_grouped else _IN_PLACE,
            )
            loader.set_epoch(part.epoch)
            loaders.append(loader)
        return loaders


def _in_place(error: BaseException) -> bool:  # noqa: ARG001
    """Skip no sample. Its error is raised in its place, by itself, and the outer loader decides."""
    return False


_IN_PLACE = Skip(when=_in_place)


class WithinSource(IterSource):
    data: WithinDataset
    name = forwarded("data")
    text = forwarded("data")
    indexed = forwarded("data")
    why_no_state = forwarded("data")
    makes_batches = forwarded("data")

    def fingerprint(self) -> str:
        return hashlib.blake2b(self.data.described.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()

    @property
    def inputs(self) -> Sequence[tuple[str, Stream]]:
        return [(str(number), stream) for number, stream in enumerate(self.data.streams)]


Turn = Callable[[Sequence[int], Sequence[bool]], Sequence[int]]
"""Chooses inputs from (number of samples taken of each input, True for those that have ended). Empty: the end."""


def has_no_numbers(pipeline: Pipeline) -> bool:
    """True if an input's samples have no numbers that follow from positions alone."""
    return (
        pipeline.without_numbers is not None
        or pipeline.group is not None
        or pipeline.is_batched
        or pipeline.numbered is not None
        or not pipeline.keeps_count
    )


def check_within(label: str, pipeline: Pipeline, call: str) -> None:
    """Raise OptionError if an operator of an input is about the loader of the whole stream."""
    if pipeline.is_everywhere or pipeline.prefetch is not None:
        of_loader = "on_every_rank()" if pipeline.is_everywhere else f"prefetch({pipeline.prefetch})"
        raise refusal("stream", call, f".{of_loader}", of=label)


def in_turns(
    name: str,
    streams: Sequence[Stream],
    turn: Turn,
    again: Callable[[Sequence[Stream]], Stream],
    *arguments: str,
    is_tuple: bool = False,
    strict: bool = False,
) -> Stream | None:
    """Return the stream of inputs, if any has no numbers. None: all have numbers."""
    from headrace.ops.combined import check_apart

    check_apart(streams, f".{name}()")
    pipelines = [stream.pipeline() for stream in streams]
    if not any(map(has_no_numbers, pipelines)):
        return None
    for number, pipeline in enumerate(pipelines):
        check_within(f"input {number}", pipeline, f".{name}()")
    return Stream(TurnsDataset(name, streams, turn, again, arguments=arguments, is_tuple=is_tuple, strict=strict))


class TurnsDataset(WithinDataset):
    """Samples of several streams in turns.

    Args:
        name: Name of the method.
        turn: Chooses the inputs of each sample.
        again: Combines other inputs in the same way.
        arguments: Arguments of the method after the streams, as text. States of other arguments are refused.
        times: Number of passes over all inputs. None: without end.
        names: Names of the inputs, added to samples that are dicts. None: nothing is added.
        is_tuple: True to emit a tuple of one sample per chosen input.
        strict: Raise OptionError if the inputs of tuples have different lengths.
    """

    def __init__(
        self,
        name: str,
        streams: Sequence[Stream],
        turn: Turn,
        again: Callable[[Sequence[Stream]], Stream],
        *,
        arguments: Sequence[str] = (),
        times: int | None = 1,
        names: Sequence[str] | None = None,
        is_tuple: bool = False,
        strict: bool = False,
    ) -> None:
        super().__init__(streams)
        self.name, self.turn, self.arguments, self.times = name, turn, tuple(arguments), times
        self.names, self.is_tuple, self.strict = names, is_tuple, strict
        self._again = again
        pipelines = [stream.pipeline() for stream in streams]
        reasons = (pipeline.source.why_no_state for pipeline in pipelines)
        self.why_no_state = next((why for why in reasons if why is not None), None)
        self.makes_batches = not is_tuple and all(one.is_batched for one in pipelines)

    @property
    def text(self) -> str:
        if self.names is not None:
            return f"mix({', '.join(self.names)})"
        first, *others = map(repr, self.streams)
        return f"{first}.{self.name}({', '.join([*others, *self.arguments])})"

    @property
    def described(self) -> str:
        return f"{self.name}({', '.join([*(self.names or ()), *self.arguments])})"

    def indexed(self) -> Stream | None:
        """Return the stream whose samples have numbers. None: they would have none with an index either."""
        streams = [stream.indexed() for stream in self.streams]
        if all(new is old for new, old in zip(streams, self.streams, strict=True)):
            return None
        again = self._again(streams)
        return None if again.pipeline().source.traits.iterated else again

    def aiter(self) -> AsyncIterator[object]:
        return _Turns(self)


class _Turns:
    """One epoch of an `TurnsDataset`, whose state is that of the inputs' loaders."""

    def __init__(self, data: TurnsDataset) -> None:
        self._data, self._pass = data, 0
        self._begin()

    def _begin(self) -> None:
        count = len(self._data.streams)
        self._loaders: list[DataLoader[Any]] = []
        self._iterators: dict[int, Any] = {}  # of the inputs that were asked for a sample
        self._taken, self._ended = [0] * count, [False] * count
        self._turn: dict[int, object] = {}  # samples of the turn that is not complete, by input
        self._states: Sequence[Mapping[str, object] | None] = [None] * count  # loaded ones, until opened

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> object:
        while True:
            if not self._loaders:
                self._open()
            while inputs := self._data.turn(self._taken, self._ended):
                for k in inputs:
                    async for one in self._next(k):
                        self._turn[k] = one
                if len(self._turn) == len(inputs):
                    return self._complete(inputs)
                if self._data.is_tuple:
                    self._check_lengths(inputs)
                    break
            await self._begin_again()

    def _complete(self, inputs: Sequence[int]) -> object:
        sample, self._turn = self._turn, {}
        for k in inputs:
            self._taken[k] += 1
        failed = [one for one in sample.values() if type(one) is Failure]
        if failed:
            return failed[0]
        return tuple(sample.values()) if self._data.is_tuple else self._named(*sample.popitem())

    def _check_lengths(self, inputs: Sequence[int]) -> None:
        """Raise OptionError if only some inputs have ended and `strict` is set."""
        if self._data.strict and (self._turn or not all(self._ended[k] for k in inputs)):
            one, has = f"an input of .{self._data.name}()", f"{min(self._taken)} samples"
            raise check.unequal(one, has, "another", "more", "strict=False ends with the shortest")

    async def _begin_again(self) -> None:
        """Start the next pass."""
        data = self._data
        if self._pass + 1 == data.times:
            raise StopAsyncIteration
        if data.times is None and not any(self._taken):
            raise check.empty(f"{data.text:.200}", "samples to repeat")
        await self.aclose()
        self._pass += 1
        self._begin()

    async def _next(self, k: int) -> AsyncIterator[object]:
        """Yield the next sample of an input or its failure, or nothing at the end of the input."""
        if k not in self._iterators:
            self._iterators[k] = aiter(self._loaders[k])
        iterator = self._iterators[k]
        iterator.failure = None
        try:
            sample: object = await anext(iterator)
        except StopAsyncIteration:
            self._ended[k] = True
            return
        except Exception as error:
            error.add_note(f"input {k} of .{self._data.name}()")
            if iterator.failure is None:
                raise
            packed = replace(serialize.pack_error(error, iterator.failure.origin), scope=iterator.failure.scope)
            is_of_group = self._loaders[k].errors is None  # others of the group would be skipped, too
            sample = Failure(packed.widened() if is_of_group else packed)
        yield sample

    def _named(self, k: int, sample: object) -> object:
        names = self._data.names
        return sample if names is None else with_source(sample, names[k])

    def _open(self) -> None:
        self._loaders = self._data.loaders(self._pass)
        for loader, state in zip(self._loaders, self._states, strict=True):
            if state is not None:
                loader.load_state_dict(state)

    def state_dict(self) -> dict[str, object]:
        if self._data.why_no_state is not None:
            return {}
        states = self._states
        if self._loaders:  # that of a loader whose epoch has ended is about its next epoch
            states = [None if ended else self._state_of(k) for k, ended in enumerate(self._ended)]
        return {"inputs": states, "taken": list(self._taken), "ended": list(self._ended), "pass": self._pass}

    def _state_of(self, k: int) -> dict[str, object]:
        """Return the state of an input before the turn that an error has interrupted."""
        loader = self._loaders[k]
        return loader.state_dict(batches=loader.position.batch - 1 if k in self._turn else None)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if len(state["inputs"]) != len(self._data.streams):
            count = len(state["inputs"])
            raise StateMismatchError(
                f"the state has {count} inputs of .{self._data.name}(), the stream {len(self._data.streams)}",
                field="source_state",
            )
        self._states, self._taken, self._ended = state["inputs"], list(state["taken"]), list(state["ended"])
        self._pass = state["pass"]

    async def aclose(self) -> None:
        with anyio.CancelScope(shield=True):
            for loader in self._loaders:
                await loader.aclose()


def one_after_the_other(taken: Sequence[int], ended: Sequence[bool]) -> Sequence[int]:
    return [k for k in range(len(taken)) if not ended[k]][:1]
