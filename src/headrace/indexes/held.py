"""What is known about each of many objects: read when it is needed, once for all who ask, and held for a while."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from copy import deepcopy
from functools import partial
from typing import Any, Generic, TypeVar

from headrace.errors import StageError
from headrace.running import running_charge

T = TypeVar("T")

HELD_BYTES = 256 * 2**20


class HeldReads(Generic[T]):
    """It may be used by several threads and event loops.

    Attributes:
        most: bytes that are held.

    Args:
        nbytes: how many bytes one takes. What was asked for longest ago goes when all have more than `most`.
    """

    def __init__(self, nbytes: Callable[[T], int]) -> None:
        self._nbytes, self.most = nbytes, HELD_BYTES
        self._lock = threading.Lock()
        self._held: OrderedDict[int, T] = OrderedDict()
        self._held_bytes = 0
        self._loading: dict[tuple[asyncio.AbstractEventLoop, int], asyncio.Task[T]] = {}

    async def get(self, ordinal: int, load: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What is held of an object, or what `load` reads; several who ask at once on one loop share that."""
        if (held := self.held(ordinal)) is not None:
            return held
        asked = asyncio.get_running_loop(), ordinal
        if asked not in self._loading:
            task = self._loading[asked] = asyncio.create_task(self._load(ordinal, load))
            task.add_done_callback(partial(self._loaded, asked))
        try:
            return await asyncio.shield(self._loading[asked])
        except StageError as error:
            raise deepcopy(error) from error.__cause__  # each who waits adds notes about itself

    def held(self, ordinal: int) -> T | None:
        """What is held of an object, if anything is."""
        with self._lock:
            if ordinal in self._held:
                self._held.move_to_end(ordinal)
            return self._held.get(ordinal)

    def hold(self, ordinal: int, one: T) -> None:
        """Hold what is known of an object, if nothing is."""
        with self._lock:
            if ordinal in self._held:
                return
            self._held[ordinal] = one
            self._held_bytes += self._nbytes(one)
            while self._held_bytes > self.most and len(self._held) > 1:
                _, oldest = self._held.popitem(last=False)
                self._held_bytes -= self._nbytes(oldest)

    async def aclose(self) -> None:
        """End what is being read on this loop; what was read stays."""
        loop = asyncio.get_running_loop()
        tasks = [self._loading.pop(asked) for asked in list(self._loading) if asked[0] is loop]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _load(self, ordinal: int, load: Callable[[], Coroutine[Any, Any, T]]) -> T:
        running_charge.set(None)  # it is no part of the sample that asked first, and others wait for it, too
        one = await load()
        self.hold(ordinal, one)
        return one

    def _loaded(self, asked: tuple[asyncio.AbstractEventLoop, int], task: asyncio.Task[T]) -> None:
        if self._loading.get(asked) is task:
            del self._loading[asked]
        if not task.cancelled():
            task.exception()  # all who have waited for it may be gone
