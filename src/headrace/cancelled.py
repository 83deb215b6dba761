"""Whose an exception is that ends a task."""

from __future__ import annotations

import asyncio


def is_ours(error: BaseException) -> bool:
    """Whether this task itself was cancelled, or closed; all else a user's coroutine has raised, whatever it is.

    That is raised again in the trainer: out of a task a SystemExit would end the loop. What a user's coroutine waits
    for may be cancelled without its task.
    """
    if isinstance(error, GeneratorExit):
        return True
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0
