"""Compact pickling of the small messages between engine and workers, and an LRU cache."""

from __future__ import annotations

import dataclasses
import operator
import pickle
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


def as_call(cls: type[T]) -> type[T]:
    """Decorate a dataclass so that its objects pickle as a call with all fields.

    A dataclass with slots pickles the names of its fields too, which takes twice as long.
    """
    first, *others = [field.name for field in dataclasses.fields(cls) if field.init]  # type: ignore[arg-type]  # it is a dataclass
    fields_of: Callable[[object], tuple[object, ...]] = operator.attrgetter(first, *others)

    def reduce(self: T) -> tuple[object, ...]:
        return type(self), fields_of(self)

    cls.__reduce__ = reduce  # type: ignore[assignment,method-assign]  # as a decorator must
    return cls


_LATEST_BYTES = 2 * 2**20


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


class _One:
    """A key that compares an object by identity, which is faster than by equality."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _One) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


_packed = Lru[bytes](len, _LATEST_BYTES)
_unpacked = Lru[tuple[object, int]](lambda one: one[1], _LATEST_BYTES)


def packed_once(fields_of: Callable[[T], tuple[object, ...]]) -> Callable[[type[T]], type[T]]:
    """Decorate a class whose objects occur in many messages: each is pickled and loaded once.

    The objects must not change. `fields_of` returns the arguments that rebuild an object.
    """

    def packed(value: Any) -> bytes:
        found = _packed.held(one := _One(value))
        return _packed.hold(one, pickle.dumps((type(value), fields_of(value)), protocol=5)) if found is None else found

    def decorate(cls: type[T]) -> type[T]:
        cls.__reduce__ = lambda self: (_loaded, (packed(self),))  # type: ignore[method-assign]
        return cls

    return decorate


def _loaded(data: bytes) -> object:
    found = _unpacked.held(data)
    if found is None:
        cls, fields = pickle.loads(data)
        found = _unpacked.hold(data, (cls(*fields), len(data)))
    return found[0]
