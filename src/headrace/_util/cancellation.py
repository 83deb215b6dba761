"""Telling the cancellation of a task from exceptions of user code."""

from __future__ import annotations

import asyncio


def is_ours(error: BaseException) -> bool:
    """True if this task itself was cancelled or closed.

    All other exceptions come from the user's coroutine and are raised in the trainer. A SystemExit that left the task
    would end the loop. A CancelledError may also come from something that the user's coroutine awaits.
    """
    if isinstance(error, GeneratorExit):
        return True
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0
