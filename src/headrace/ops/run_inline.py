"""Running steps on samples outside the engine's pipeline: for one input, or before caching."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import anyio.to_thread

from headrace._util.context import running_threads
from headrace._util.functions import is_async
from headrace.pipeline.pipeline import refusal
from headrace.workers.tasks import Step

NamedSteps = Sequence[tuple[str, Callable[[Any], Any]]]
"""Names, for notes of errors, and plain functions."""


def split_steps(steps: Sequence[Step], label: str = "", call: str = "") -> tuple[list[Step], list[Step]]:
    """Split steps into leading coroutine functions, with decoding before them, and plain ones."""
    others = (k for k, step in enumerate(steps) if not step.reads and (step.random or not step.is_implied))
    opens = next(others, len(steps))
    begin = opens if any(is_async(step.fn) for step in steps[: opens + 1]) else 0
    first = next((k for k in range(begin, len(steps)) if not is_async(steps[k].fn)), len(steps))
    late = next((step for step in steps[first:] if is_async(step.fn)), None)
    if late is not None:
        raise refusal("async first", call, late.name, of=label)
    return list(steps[:first]), list(steps[first:])


async def through_first(steps: Sequence[Step], sample: Any) -> Any:
    """Run the first part of `split_steps` on the event loop, its plain functions in a thread."""
    for step in steps:
        try:
            if is_async(step.fn):
                sample = await step.fn(sample)
            else:
                sample = await anyio.to_thread.run_sync(step.fn, sample, limiter=running_threads.get())
        except Exception as error:
            error.add_note(f"stage: {step.told}")
            raise
    return sample


def through(steps: NamedSteps, sample: Any, label: str = "") -> Any:
    """Run plain functions on a sample. `label` precedes a step's name in notes of errors."""
    for name, function in steps:
        try:
            sample = function(sample)
        except Exception as error:
            error.add_note(f"{label}stage: {name}")
            raise
    return sample
