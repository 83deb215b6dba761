"""What is known of the loader, and of the sample, on whose behalf code runs: context variables, set by the engine."""

from __future__ import annotations

from asyncio import AbstractEventLoop, get_running_loop
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass

import numpy as np
from anyio import CapacityLimiter

from headrace.protocols import LoaderReads

running_reader: ContextVar[LoaderReads | None] = ContextVar("headrace_running_reader", default=None)
"""The reader of the loader on whose loop we run; `hr.read` asks it."""

running_loop: ContextVar[AbstractEventLoop | None] = ContextVar("headrace_running_loop", default=None)
"""The loop of that reader: threads that are started there, and their own loops, see the reader and cannot use it."""


def reader_here() -> LoaderReads | None:
    """The running reader, where we are on its loop."""
    loop = running_loop.get()
    return running_reader.get() if loop is None or loop is get_running_loop() else None


running_threads: ContextVar[CapacityLimiter | None] = ContextVar("headrace_running_threads", default=None)
"""How many of the user's synchronous calls the loader on whose loop we run makes in threads at once.

Decompression and the disk have threads beside them: no call of the user's holds those up.
"""

running_workers: ContextVar[int] = ContextVar("headrace_running_workers", default=0)
"""How many worker processes the loader has on whose loop we run."""

running_part: ContextVar[tuple[int, int]] = ContextVar("headrace_running_part", default=(1, 0))
"""(how many ranks share the samples, which of them this is), in what workers do."""

Charges = Callable[[int], Awaitable[None] | None]
"""Has so many bytes counted; gives what to wait for until they may be held, or None where they may be at once."""

running_charge: ContextVar[Charges | None] = ContextVar("headrace_running_charge", default=None)
"""Waits until a read may hold so many bytes; asked once the size is known, and before the body is read.

While it waits, the read holds no place among the requests under way, and no time limit runs.
"""


@dataclass(slots=True, eq=False)
class RunningSample:
    """The sample that a coroutine makes: its epoch's key and its position are those of its random numbers.

    Attributes:
        generator: what `hr.rng` gives in that coroutine and in the tasks that it starts; made when it is first asked
            for.
    """

    key: int
    position: int
    generator: np.random.Generator | None = None


running_sample: ContextVar[RunningSample | None] = ContextVar("headrace_running_sample", default=None)
"""The sample that the coroutine we run in makes; None in workers, which make one at a time."""


def begin_part(part: tuple[int, int], worker: int) -> None:  # noqa: ARG001 (chains tell it)
    """Make known in a worker which rank it works for.

    Chains name this function: workers import its module, and all that it imports, before their first sample.
    """
    running_part.set(part)
