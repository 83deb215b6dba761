"""Steps that are done to samples outside of the pipeline's own way: to those of one input, or before some are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import anyio.to_thread

from headrace.errors import OptionError
from headrace.functions import is_async
from headrace.running import running_threads
from headrace.tasks import Step

NamedSteps = Sequence[tuple[str, Callable[[Any], Any]]]
"""Plain functions, and what notes of errors call them."""


def split_steps(steps: Sequence[Step], label: str = "", call: str = "") -> tuple[list[Step], list[Step]]:
    """(the coroutine functions that come first, with what opens samples for them; the plain functions that follow)."""
    others = (k for k, step in enumerate(steps) if not step.reads and (step.random or not step.is_implied))
    opens = next(others, len(steps))
    begin = opens if any(is_async(step.fn) for step in steps[: opens + 1]) else 0
    first = next((k for k in range(begin, len(steps)) if not is_async(steps[k].fn)), len(steps))
    late = next((step for step in steps[first:] if is_async(step.fn)), None)
    if late is not None:
        raise OptionError(
            f"{late.name} of {label} is an async function behind a plain one: put it before that, or behind {call}"
        )
    return list(steps[:first]), list(steps[first:])


async def through_first(steps: Sequence[Step], sample: Any) -> Any:
    """What the first ones of `split_steps` make of a sample, on the event loop; plain functions run in a thread."""
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
    """What plain functions make of a sample.

    Args:
        label: what errors say before the name of the step.
    """
    for name, function in steps:
        try:
            sample = function(sample)
        except Exception as error:
            error.add_note(f"{label}stage: {name}")
            raise
    return sample
