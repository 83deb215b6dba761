"""Asynchronous steps, run on the loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from headrace._util.context import RunningSample, is_ours, running_sample
from headrace.state.sub_position import part_position
from headrace.torch_compat import serialize
from headrace.workers.failures import Failure
from headrace.workers.tasks import NO_STEP, Step


async def apply(steps: Sequence[Step], sample: object, position: int) -> list[object]:
    """Run asynchronous steps on a sample. The result may be empty or have many samples."""
    if isinstance(sample, Failure):
        return [sample]
    at, source = NO_STEP, sample
    try:
        for index, step in enumerate(steps, 1):
            at = step
            result = await step.fn(sample)
            if step.kind == "many":
                return await _each(steps[index:], result, position)
            if step.kind == "map":
                sample = result
            elif not result:
                return []
    except BaseException as error:
        if is_ours(error):
            raise
        from headrace.workers.error_notes import note_origin

        origin = note_origin(error, at, source, position, None)
        return [Failure(serialize.pack_error(error, origin))]
    return [sample]


async def _each(steps: Sequence[Step], parts: Sequence[object], position: int) -> list[object]:
    """Run the remaining steps on each of the samples that a step made from one."""
    running, made = running_sample.get(), list[object]()
    for number, part in enumerate(parts):
        at = part_position(position, number, len(steps))
        if running is not None:
            running_sample.set(RunningSample(running.key, at))
        made += await apply(steps, part, at)
    return made


async def get_through(get: Callable[[Any], Awaitable[object]], steps: Sequence[Step], key: object) -> object:
    sample = await get(key)
    for step in steps:
        try:
            sample = await step.fn(sample)
        except Exception as error:
            error.add_note(f"stage: {step.told}")
            raise
    return sample


async def iterate_through(
    samples: AsyncIterator[object], steps: Sequence[Step], position: int
) -> AsyncIterator[object]:
    try:
        async for sample in samples:
            (made,) = await apply(steps, sample, position)  # a failure does not end the iteration
            yield made
            position += 1
    finally:
        if hasattr(samples, "aclose"):
            await samples.aclose()
