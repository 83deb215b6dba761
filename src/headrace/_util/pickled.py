"""Compact pickling of the small messages between engine and workers."""

from __future__ import annotations

import dataclasses
import operator
import pickle
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

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


class _One:
    """A key that compares an object by identity, which is faster than by equality."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _One) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class _Latest:
    """LRU cache bounded by the bytes of pickles, with at least one entry. Thread-safe."""

    def __init__(self) -> None:
        self._kept: OrderedDict[object, tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()
        self.nbytes = 0

    def get(self, key: object, make: Callable[[], tuple[Any, int]]) -> Any:
        """Return the cached object of `key`, or the one from `make`: (object, bytes of its pickle)."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key][0]
        made, nbytes = make()
        with self._lock:
            if key not in self._kept:
                self._kept[key] = made, nbytes
                self.nbytes += nbytes
            while self.nbytes > _LATEST_BYTES and len(self._kept) > 1:
                self.nbytes -= self._kept.popitem(last=False)[1][1]
        return made


_packed, _unpacked = _Latest(), _Latest()


def packed_once(fields_of: Callable[[T], tuple[object, ...]]) -> Callable[[type[T]], type[T]]:
    """Decorate a class whose objects occur in many messages: each is pickled and loaded once.

    The objects must not change. `fields_of` returns the arguments that rebuild an object.
    """

    def packed(value: Any) -> bytes:
        def pack() -> tuple[bytes, int]:
            data = pickle.dumps((type(value), fields_of(value)), protocol=5)
            return data, len(data)

        data: bytes = _packed.get(_One(value), pack)
        return data

    def decorate(cls: type[T]) -> type[T]:
        cls.__reduce__ = lambda self: (_loaded, (packed(self),))  # type: ignore[method-assign]
        return cls

    return decorate


def _loaded(data: bytes) -> object:
    def load() -> tuple[object, int]:
        cls, fields = pickle.loads(data)
        return cls(*fields), len(data)

    return _unpacked.get(data, load)
