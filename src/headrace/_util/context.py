"""Context variables set by the engine: the loader and the sample that code runs for."""

from __future__ import annotations

import asyncio
import hashlib
import struct
from asyncio import AbstractEventLoop, get_running_loop
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from anyio import CapacityLimiter

if TYPE_CHECKING:
    from headrace.fetch.reader import Reader


running_reader: ContextVar[Reader | None] = ContextVar("headrace_running_reader", default=None)
"""Reader of the loader on whose loop the code runs. Used by `hr.read`."""

running_loop: ContextVar[AbstractEventLoop | None] = ContextVar("headrace_running_loop", default=None)
"""Loop of that reader. Threads started there, and their loops, inherit the reader and cannot use it."""


def reader_here() -> Reader | None:
    """Return the running reader, if this is its loop."""
    loop = running_loop.get()
    return running_reader.get() if loop is None or loop is get_running_loop() else None


copies_samples: ContextVar[bool] = ContextVar("headrace_copies_samples", default=False)
"""True if samples are copied to workers, so that those of a large block are decoded before."""

running_threads: ContextVar[CapacityLimiter | None] = ContextVar("headrace_running_threads", default=None)
"""Limit of concurrent synchronous user calls in threads of the running loader.

Decompression and disk reads have separate threads, so that user calls do not block them.
"""

running_part: ContextVar[tuple[int, int]] = ContextVar("headrace_running_part", default=(1, 0))
"""(number of ranks that share the samples, this rank), in workers."""

Charges = Callable[[int], Awaitable[None] | None]
"""Reserve bytes. Returns an awaitable until they are admitted, or None if they are admitted at once."""

running_charge: ContextVar[Charges | None] = ContextVar("headrace_running_charge", default=None)
"""Waits until the memory budget admits a read. Called after the size is known, before the body is read.

During the wait the read does not count as a concurrent request, and no timeout runs.
"""


@dataclass(slots=True, eq=False)
class RunningSample:
    """The sample that a coroutine makes. `key` and `position` seed its random numbers.

    Attributes:
        generator: Result of `hr.rng` in that coroutine and its tasks. Created at the first call.
    """

    key: int
    position: int
    generator: np.random.Generator | None = None


running_sample: ContextVar[RunningSample | None] = ContextVar("headrace_running_sample", default=None)
"""The sample made by the current coroutine. None in workers, which make one at a time."""


def begin_part(part: tuple[int, int], worker: int) -> None:  # noqa: ARG001 (chains pass it)
    """Set the rank that a worker works for.

    Chains refer to this function, so workers import its module and all its imports before their first sample.
    """
    running_part.set(part)


def is_ours(error: BaseException) -> bool:
    """True if this task itself was cancelled or closed.

    All other exceptions come from the user's coroutine and are raised in the trainer. A SystemExit that left the task
    would end the loop. A CancelledError may also come from something that the user's coroutine awaits.
    """
    if isinstance(error, GeneratorExit):
        return True
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


_BITS = 64
_MASK = (1 << _BITS) - 1


def part_position(position: int, part: int, place: int) -> int:
    """Return the position of the `part`-th sample made by step `place` from one at `position`.

    The first sample keeps that position. The others have a hash in the upper half, so that their random numbers differ.
    """
    if not part:
        return position
    packed = struct.pack("<QQQQ", position & _MASK, position >> _BITS, part, place)
    mixed = int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")
    return position & _MASK | mixed << _BITS


def divided(position: int) -> tuple[int, int]:
    """Split into (position in the epoch of the source's sample, hash that identifies the part)."""
    return position & _MASK, position >> _BITS
