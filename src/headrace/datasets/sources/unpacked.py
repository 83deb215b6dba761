"""Frames of compressed shards, unpacked once for the samples that lie in them."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from weakref import WeakKeyDictionary

import anyio

from headrace.protocols import Reads

_KEPT_BYTES = 4 * 2**20  # samples that are read in order, or a few at a time, come from these
_of_readers: WeakKeyDictionary[Reads, Unpacked] = WeakKeyDictionary()


class Unpacked:
    """What was unpacked last, 4 MiB at the most, by names that tell its object, version and place.

    Who asks for what another is just unpacking waits for that. One event loop uses it.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, bytes] = OrderedDict()
        self._nbytes = 0
        self._locks: dict[Hashable, anyio.Lock] = {}
        self._asking: Counter[Hashable] = Counter()

    async def get(self, name: Hashable, unpack: Callable[[], Awaitable[bytes | None]]) -> bytes | None:
        """What is kept by this name, or what `unpack` gives; None is not kept, nor is what is too large."""
        lock = self._locks.setdefault(name, anyio.Lock())
        self._asking[name] += 1
        try:
            async with lock:
                data = self._kept.pop(name, None)
                if data is None:
                    data = await unpack()
                else:
                    self._nbytes -= len(data)
                if data is not None and len(data) <= _KEPT_BYTES:
                    self._kept[name] = data
                    self._nbytes += len(data)
                    while self._nbytes > _KEPT_BYTES:
                        self._nbytes -= len(self._kept.popitem(last=False)[1])
                return data
        finally:
            self._asking[name] -= 1
            if not self._asking[name]:
                del self._asking[name], self._locks[name]

    def drop(self, name: Hashable) -> None:
        """Keep it no longer."""
        self._nbytes -= len(self._kept.pop(name, b""))


def unpacked_by(reader: Reads) -> Unpacked:
    """What was unpacked of what this reader has read; it ends with the reader."""
    return _of_readers.setdefault(reader, Unpacked())
