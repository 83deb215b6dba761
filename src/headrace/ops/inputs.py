"""Streams combined as their samples are read: the samples of at least one of them have no numbers."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import anyio

from headrace._util import check
from headrace._util.functions import as_it_is
from headrace.dataset.asynchronous import AsyncIterableDataset, IterSource, shard_info
from headrace.dataset.source import forwarded
from headrace.dataset.stream import Stream
from headrace.errors import StateMismatchError
from headrace.ops.operator import with_source
from headrace.order.permutation import draw
from headrace.pipeline.pipeline import Pipeline, refusal
from headrace.torch_compat import serialize
from headrace.workers.failures import Failure

if TYPE_CHECKING:
    from headrace.session.input import Input


class NestedDataset(AsyncIterableDataset):
    """Base class of iterable data sets that iterate over other streams by `inputs`."""

    ranks_by = "shard_info"
    name = ""
    why_no_state: str | None = None
    makes_batches = False

    def __init__(self, streams: Sequence[Stream]) -> None:
        self.streams = tuple(streams)

    def __sample_source__(self) -> NestedSource:
        return NestedSource(self)

    def indexed(self) -> Stream | None:
        return None

    @property
    def described(self) -> str:
        """Text in states. Different texts mean different samples."""
        return self.name

    def inputs(self, number_of_pass: int = 0) -> list[Input]:
        """Create the inputs for this rank, epoch and pass."""
        from headrace.session.input import Input  # imports torch

        part = shard_info()
        own_seed = draw("pass", part.seed, number_of_pass) if number_of_pass else part.seed
        seeds = [draw("input", own_seed, k) if len(self.streams) > 1 else own_seed for k in range(len(self.streams))]
        return [
            Input(stream, rank=part.rank, world=part.world, seed=seed, epoch=part.epoch)
            for stream, seed in zip(self.streams, seeds, strict=True)
        ]


class NestedSource(IterSource):
    data: NestedDataset
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


class TurnsDataset(NestedDataset):
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
    """One epoch of a `TurnsDataset`."""

    def __init__(self, data: TurnsDataset) -> None:
        self._data, self._pass = data, 0
        self._begin()

    def _begin(self) -> None:
        count = len(self._data.streams)
        self._inputs: list[Input] = []
        self._taken, self._ended = [0] * count, [False] * count
        self._turn: dict[int, object] = {}  # samples of the turn that is not complete, by input
        self._states: Sequence[Mapping[str, object] | None] = [None] * count  # loaded ones, until opened

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> object:
        while True:
            if not self._inputs:
                self._open()
            while inputs := self._data.turn(self._taken, self._ended):
                for k in inputs:
                    await self._ask(k)
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

    async def _ask(self, k: int) -> None:
        """Add the next sample of an input, or its failure, to the turn."""
        note = f"input {k} of .{self._data.name}()"
        try:
            sample = await self._inputs[k].next_or_failure()
        except StopAsyncIteration:
            self._ended[k] = True
        except Exception as error:
            error.add_note(note)
            raise
        else:
            self._turn[k] = self._noted(k, sample, note) if type(sample) is Failure else sample

    def _noted(self, k: int, failure: Failure, note: str) -> Failure:
        packed = failure.error
        error = serialize.unpack_error(packed)
        error.add_note(note)
        packed = replace(serialize.pack_error(error, packed.origin), scope=packed.scope)
        pipeline = self._data.streams[k].pipeline()  # others of a group would be skipped, too
        return Failure(packed.widened() if pipeline.group or pipeline.puts_together is not None else packed)

    def _named(self, k: int, sample: object) -> object:
        names = self._data.names
        return sample if names is None else with_source(sample, names[k])

    def _open(self) -> None:
        self._inputs = self._data.inputs(self._pass)
        for one, state in zip(self._inputs, self._states, strict=True):
            if state is not None:
                one.load_state_dict(state)

    def __snapshot__(self) -> Callable[[], dict[str, object]]:
        """Return a function that returns the state of now."""
        if self._data.why_no_state is not None:
            return dict
        states: list[Callable[[], object]] = [partial(as_it_is, state) for state in self._states]
        if self._inputs:  # without the samples of a turn that an error has interrupted
            states = [
                partial(as_it_is, None) if ended else one.snapshot(one.taken - (k in self._turn))
                for k, (one, ended) in enumerate(zip(self._inputs, self._ended, strict=True))
            ]
        counts = {"taken": list(self._taken), "ended": list(self._ended), "pass": self._pass}
        return lambda: {"inputs": [state() for state in states], **counts}

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
            for one in self._inputs:
                await one.aclose()


def one_after_the_other(taken: Sequence[int], ended: Sequence[bool]) -> Sequence[int]:
    return [k for k in range(len(taken)) if not ended[k]][:1]
