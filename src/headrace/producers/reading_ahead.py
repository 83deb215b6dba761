"""Several readers at once, and what they give in the readers' order."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from typing import Generic, TypeVar

import anyio
from anyio.abc import TaskGroup

from headrace.failures import ErrorPacker, Failure, first_of
from headrace.parts import Part
from headrace.producers.members import PackedFailureError

P = TypeVar("P", bound=Part)


class Reading(Generic[P]):
    """What one reader gives: its parts, to be iterated over, and what ended them early.

    Attributes:
        failure: why there are no more parts than there were; None: these are all, or more come.
    """

    def __init__(self) -> None:
        self._send, self._receive = anyio.create_memory_object_stream[P](float("inf"))
        self.failure: Failure | None = None

    def put(self, part: P) -> None:
        """The next part."""
        self._send.send_nowait(part)

    def fail(self, error: Exception, pack_error: ErrorPacker) -> None:
        """End early by an error, or by the first of a group."""
        first = first_of(error)
        self.failure = first.failure if isinstance(first, PackedFailureError) else Failure(pack_error(first))

    def close(self) -> None:
        """No more parts come."""
        self._send.close()

    def __aiter__(self) -> Reading[P]:
        return self

    async def __anext__(self) -> P:
        return await self._receive.__anext__()

    def release(self) -> None:
        """Let go of the parts that are not taken."""
        while self._receive.statistics().current_buffer_used:
            self._receive.receive_nowait().release()
        self._receive.close()
        self._send.close()  # a reader that never ran has not


ReadsInto = Callable[[Reading[P]], Coroutine[object, object, None]]


class ReadingAhead(Generic[P]):
    """Readers, some of which are ahead of the one whose turn it is.

    Args:
        readers: each puts what it reads, and says where that ends.
        at_once: how many are begun.
    """

    def __init__(self, readers: Iterator[ReadsInto[P]], at_once: Callable[[], int]) -> None:
        self._readers, self._at_once = readers, at_once
        self._ahead: deque[Reading[P]] = deque()

    async def readings(self, group: TaskGroup) -> AsyncGenerator[Reading[P], None]:
        """What each reader gives, one reader after the other."""
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
        """Let go of what was read ahead, once no reader runs any more."""
        for reading in self._ahead:
            reading.release()
