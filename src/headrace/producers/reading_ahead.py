"""Several readers at once, and what they give in the readers' order."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from typing import Any

import anyio
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from headrace.failures import Failure
from headrace.parts import Part

Given = Part | Failure
Sends = MemoryObjectSendStream[Given]
ReadsInto = Callable[[Sends], Coroutine[Any, Any, None]]


class ReadingAhead:
    """Readers, some of which are ahead of the one whose turn it is.

    Args:
        readers: each sends what it reads, and closes its stream.
        at_once: how many are begun.
    """

    def __init__(self, readers: Iterator[ReadsInto], at_once: Callable[[], int]) -> None:
        self._readers, self._at_once = readers, at_once
        self._ahead: deque[MemoryObjectReceiveStream[Given]] = deque()

    async def streams(self, group: TaskGroup) -> AsyncGenerator[MemoryObjectReceiveStream[Given], None]:
        """What each reader sends, one reader after the other."""
        is_more = True
        while True:
            while is_more and len(self._ahead) < self._at_once():
                reader = next(self._readers, None)
                if reader is None:
                    is_more = False
                    break
                send, receive = anyio.create_memory_object_stream[Given](float("inf"))
                self._ahead.append(receive)
                group.start_soon(reader, send)
            if not self._ahead:
                return
            yield self._ahead[0]
            self._ahead.popleft().close()

    def release(self) -> None:
        """Let go of what was read ahead, once no reader runs any more."""
        for receive in self._ahead:
            while receive.statistics().current_buffer_used:
                given: Any = receive.receive_nowait()
                if not isinstance(given, Failure):
                    given.release()
            receive.close()
