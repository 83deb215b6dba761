"""A cache of the most recently used items, bounded by their bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Lru(Generic[T]):
    """LRU cache of up to `most` bytes, with at least one item. Thread-safe."""

    def __init__(self, nbytes: Callable[[T], int], most: int) -> None:
        self._nbytes, self.most = nbytes, most
        self._lock = threading.Lock()
        self._held: OrderedDict[Hashable, T] = OrderedDict()
        self.held_bytes = 0

    def held(self, key: Hashable) -> T | None:
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
            return self._held.get(key)

    def hold(self, key: Hashable, one: T) -> T:
        """Add an item. Return it, or the item that has been added with this key meanwhile."""
        with self._lock:
            if key not in self._held:
                self._held[key] = one
                self.held_bytes += self._nbytes(one)
            found = self._held[key]
            while self.held_bytes > self.most and len(self._held) > 1:
                _, oldest = self._held.popitem(last=False)
                self.held_bytes -= self._nbytes(oldest)
            return found

    def drop(self, key: Hashable) -> None:
        with self._lock:
            if key in self._held:
                self.held_bytes -= self._nbytes(self._held.pop(key))

    def clear(self) -> None:
        with self._lock:
            self._held.clear()
            self.held_bytes = 0
