"""Implementations of the methods that combine data sets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import anyio

from headrace._util import check
from headrace.dataset.stream import Stream
from headrace.errors import OptionError
from headrace.ops.apply import applied_to
from headrace.ops.cache import cached
from headrace.ops.concat import ConcatSpec, InputsSpec, InterleaveSpec
from headrace.ops.counted_inputs import (
    AsTheyCome,
    Turn,
    check_within,
    each_of_them,
    has_no_numbers,
    in_blocks,
    one_after_the_other,
)
from headrace.ops.fork import check_apart, side_by_side
from headrace.ops.inputs import check_input, check_objects, input_stream, joined
from headrace.ops.join import JoinSpec, SameKeys
from headrace.ops.nested_loader import WithinDataset
from headrace.ops.operator import EachSample
from headrace.ops.run_inline import split_steps
from headrace.ops.shuffle import EpochOperator
from headrace.ops.zip import ZipDataset, ZipSpec, ZipStep
from headrace.workers.tasks import Step

__all__ = ["applied", "applied_to", "cached", "concat", "interleave", "join", "repeated", "zipped"]

Spec = TypeVar("Spec", bound=InputsSpec)


def concat(inputs: Sequence[object]) -> Stream:
    streams = _streams("concat", inputs)
    return _counted("concat", streams, one_after_the_other, concat) or joined(_checked(ConcatSpec(streams)))


def interleave(inputs: Sequence[object], *, block: int) -> Stream:
    check.whole(".interleave(): block", block, 1)
    streams = _streams("interleave", inputs)
    turn, again = partial(in_blocks, block), partial(interleave, block=block)
    counted = _counted("interleave", streams, turn, again, f"block={block}")
    return counted or joined(_checked(InterleaveSpec(streams, block)))


def zipped(inputs: Sequence[object], *, strict: bool) -> Stream:
    streams = _streams("zip", inputs)
    if (branches := side_by_side(streams)) is not None:
        return branches
    again = partial(zipped, strict=strict)
    counted = _counted("zip", streams, each_of_them, again, f"strict={strict}", is_tuple=True, strict=strict)
    return counted or _in_tuples(_checked(ZipSpec(streams, strict=strict)))


def join(inputs: Sequence[object], *, on: object) -> Stream:
    """Pair the samples of two inputs by key. With `on=None`, merge both as they arrive."""
    left, right = streams = _streams("join", inputs)
    check_apart(streams, ".join()")
    if on is None:
        return Stream(FirstComeDataset(streams))
    for number, stream in enumerate(streams):
        check_input(f"input {number} of .join()", stream.pipeline(), ".join()")
        if (advice := stream.pipeline().source.only_in_order) is not None:
            raise OptionError(f"input {number} of .join(): samples are got by their keys; {advice}")
    spec = JoinSpec.of(left, right, on)
    pairs = _in_tuples(spec)
    if not any(spec.changing):
        return pairs
    same = SameKeys(spec.on, spec.changing)
    return pairs._with(EachSample(Step("join", "map", same, is_implied=True)))


def repeated(inputs: Sequence[object], *, operator: EpochOperator) -> Stream:
    """Repeat by the order of the source if possible, else pass by pass."""
    (stream,) = _streams("repeat", inputs)
    pipeline, (times, samples) = stream.pipeline(), operator.passes
    is_regrouped = bool(pipeline.regroups) or pipeline.group is not None or pipeline.source.traits.iterated
    if not pipeline.is_in_passes and (samples is not None or not is_regrouped):
        return stream._with(operator)
    if pipeline.packing is not None:
        raise OptionError(f".{operator.text} after .pack() of documents that are read first: put it before that, alone")
    check_within("what is repeated", pipeline)
    again = partial(repeated, operator=operator)
    passes = Stream(AsTheyCome("repeat", [stream], one_after_the_other, again, arguments=(str(times),), times=times))
    return passes if samples is None else passes._with(operator)


def applied(inputs: Sequence[object], *, fn: Callable[[Any], Any]) -> Stream:
    (stream,) = _streams("apply", inputs)
    return applied_to(stream, fn)


def _counted(
    name: str,
    streams: Sequence[Stream],
    turn: Turn,
    again: Callable[[Sequence[Stream]], Stream],
    *arguments: str,
    is_tuple: bool = False,
    strict: bool = False,
) -> Stream | None:
    """Return the stream of inputs of which any has no numbers. None: all have numbers."""
    check_apart(streams, f".{name}()")
    pipelines = [stream.pipeline() for stream in streams]
    if not any(map(has_no_numbers, pipelines)):
        return None
    for number, pipeline in enumerate(pipelines):
        check_within(f"input {number} of .{name}()", pipeline)
    return Stream(AsTheyCome(name, streams, turn, again, arguments=arguments, is_tuple=is_tuple, strict=strict))


def _in_tuples(spec: ZipSpec) -> Stream:
    check_objects(spec)
    later = [split_steps(pipeline.narrowed_steps)[1] for pipeline in spec.pipelines]
    source = ZipDataset(spec)
    if not any(later):
        return Stream(source)
    random = any(step.random for steps in later for step in steps)
    each = ZipStep(spec.labels, [[(step.told, step.fn) for step in some] for some in later])
    return Stream(source, (EachSample(Step(spec.kind, "map", each, random, is_implied=True)),))


def _streams(name: str, inputs: Sequence[object]) -> list[Stream]:
    return [input_stream(f"input {number} of .{name}()", one) for number, one in enumerate(inputs)]


def _checked(spec: Spec) -> Spec:
    check_apart(spec.streams, spec.call)
    for label, pipeline in zip(spec.labels, spec.pipelines, strict=True):
        check_input(label, pipeline, spec.call)
    return spec


_END = object()


class FirstComeDataset(WithinDataset):
    name = "join"
    why_no_state = (
        "states of .join(other) without on= would have to say which sample was first: it is another one in each run; "
        ".interleave(), hr.mix and .join(other, on=…) have states"
    )

    @property
    def text(self) -> str:
        first, *others = map(repr, self.streams)
        return f"{first}.join({', '.join(others)})"

    async def aiter(self) -> AsyncIterator[object]:
        loaders = self.loaders()
        waiting: dict[asyncio.Task[object], tuple[int, AsyncIterator[object]]] = {}
        try:
            iterators = [aiter(loader) for loader in loaders]
            waiting = {asyncio.ensure_future(_next(one)): (number, one) for number, one in enumerate(iterators)}
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=lambda task: waiting[task][0]):
                    number, iterator = waiting.pop(task)
                    if (sample := task.result()) is not _END:
                        waiting[asyncio.ensure_future(_next(iterator))] = number, iterator
                        yield sample
        finally:
            with anyio.CancelScope(shield=True):
                for task in waiting:
                    task.cancel()
                await asyncio.gather(*waiting, return_exceptions=True)
                for loader in loaders:
                    await loader.aclose()


async def _next(iterator: AsyncIterator[object]) -> object:
    return await anext(iterator, _END)
