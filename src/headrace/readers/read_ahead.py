"""Concurrent readers whose results are used in the readers' order."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from typing import Generic, TypeVar

import anyio
from anyio.abc import TaskGroup

from headrace.readers.indexed_members import PackedFailureError
from headrace.workers.failures import ErrorPacker, Failure, first_of
from headrace.workers.sample_chunks import Part

P = TypeVar("P", bound=Part)


class Reading(Generic[P]):
    """The parts from one reader, as an iterator, and the failure that ended them early."""

    def __init__(self) -> None:
        self._send, self._receive = anyio.create_memory_object_stream[P](float("inf"))
        self.failure: Failure | None = None

    def put(self, part: P) -> None:
        self._send.send_nowait(part)

    def fail(self, error: Exception, pack_error: ErrorPacker) -> None:
        first = first_of(error)
        self.failure = first.failure if isinstance(first, PackedFailureError) else Failure(pack_error(first))

    def close(self) -> None:
        self._send.close()

    def __aiter__(self) -> Reading[P]:
        return self

    async def __anext__(self) -> P:
        return await self._receive.__anext__()

    def release(self) -> None:
        while self._receive.statistics().current_buffer_used:
            self._receive.receive_nowait().release()
        self._receive.close()
        self._send.close()  # a reader that never ran has not closed it


ReadsInto = Callable[[Reading[P]], Coroutine[object, object, None]]


class ReadingAhead(Generic[P]):
    """Runs readers ahead of the one whose parts are consumed."""

    def __init__(self, readers: Iterator[ReadsInto[P]], at_once: Callable[[], int]) -> None:
        self._readers, self._at_once = readers, at_once
        self._ahead: deque[Reading[P]] = deque()

    async def readings(self, group: TaskGroup) -> AsyncGenerator[Reading[P], None]:
        is_more = True
        while True:
            while is_more and len(self._ahead) < self._at_once():
                reader = next(self._readers, None)
                if reader is None:
                    is_more = False
                    break
                reading = Reading[P]()
                self._ahead.append(reading)
                group.start_soon(reader, reading)
            if not self._ahead:
                return
            yield self._ahead[0]
            self._ahead.popleft().release()

    def release(self) -> None:
        """Release parts read ahead. To be called after all readers have ended."""
        for reading in self._ahead:
            reading.release()
