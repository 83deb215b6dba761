"""Samples through asynchronous steps, on the loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from headrace.fetch.keys import USERS_OWN, is_ours
from headrace.tasks import Failure, Step
from headrace.torch_compat import packing
from headrace.work.workbench import note_origin


async def apply(steps: Sequence[Step], sample: Any, position: int) -> tuple[Any, bool]:
    """A sample through asynchronous steps: (what became of it, whether it is kept)."""
    if isinstance(sample, Failure):
        return sample, True
    name, source = "", sample
    try:
        for step in steps:
            name = step.name
            result = await step.fn(sample)
            if step.kind == "map":
                sample = result
            elif not result:
                return None, False
    except USERS_OWN as error:
        if is_ours(error):
            raise
        note_origin(error, name, source, position, None)
        return Failure(packing.pack_error(error)), True
    return sample, True


async def get_through(get: Callable[[Any], Any], steps: Sequence[Step], key: Any) -> Any:
    sample = await get(key)
    for step in steps:
        try:
            sample = await step.fn(sample)
        except Exception as error:
            error.add_note(f"stage: {step.name}")
            raise
    return sample


async def iterate_through(samples: AsyncIterator[Any], steps: Sequence[Step], position: int) -> AsyncIterator[Any]:
    try:
        async for sample in samples:
            made, _ = await apply(steps, sample, position)  # one that fails does not end the others
            yield made
            position += 1
    finally:
        if hasattr(samples, "aclose"):
            await samples.aclose()
