"""Single-flight reads with a bounded cache, for facts about many objects."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from copy import deepcopy
from functools import partial
from typing import Any, Generic, TypeVar

from headrace._util.context import running_charge
from headrace.errors import StageError

T = TypeVar("T")

HELD_BYTES = 256 * 2**20


class HeldReads(Generic[T]):
    """An LRU cache of up to `most` bytes, with single-flight reads.

    Thread-safe; for several event loops.
    """

    def __init__(self, nbytes: Callable[[T], int]) -> None:
        self._nbytes, self.most = nbytes, HELD_BYTES
        self._lock = threading.Lock()
        self._held: OrderedDict[int, T] = OrderedDict()
        self._held_bytes = 0
        self._loading: dict[tuple[asyncio.AbstractEventLoop, int], asyncio.Task[T]] = {}

    async def get(self, ordinal: int, load: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the cached item, or load it. Concurrent callers on one loop share the load."""
        if (held := self.held(ordinal)) is not None:
            return held
        asked = asyncio.get_running_loop(), ordinal
        if asked not in self._loading:
            task = self._loading[asked] = asyncio.create_task(self._load(ordinal, load))
            task.add_done_callback(partial(self._loaded, asked))
        try:
            return await asyncio.shield(self._loading[asked])
        except StageError as error:
            raise deepcopy(error) from error.__cause__  # each waiter adds its own notes

    def held(self, ordinal: int) -> T | None:
        with self._lock:
            if ordinal in self._held:
                self._held.move_to_end(ordinal)
            return self._held.get(ordinal)

    def hold(self, ordinal: int, one: T) -> None:
        with self._lock:
            if ordinal in self._held:
                return
            self._held[ordinal] = one
            self._held_bytes += self._nbytes(one)
            while self._held_bytes > self.most and len(self._held) > 1:
                _, oldest = self._held.popitem(last=False)
                self._held_bytes -= self._nbytes(oldest)

    async def aclose(self) -> None:
        loop = asyncio.get_running_loop()
        tasks = [self._loading.pop(asked) for asked in list(self._loading) if asked[0] is loop]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _load(self, ordinal: int, load: Callable[[], Coroutine[Any, Any, T]]) -> T:
        running_charge.set(None)  # shared with other waiters, so not charged to the first sample
        one = await load()
        self.hold(ordinal, one)
        return one

    def _loaded(self, asked: tuple[asyncio.AbstractEventLoop, int], task: asyncio.Task[T]) -> None:
        if self._loading.get(asked) is task:
            del self._loading[asked]
        if not task.cancelled():
            task.exception()  # mark as retrieved: all waiters may be gone
