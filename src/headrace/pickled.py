"""How the small messages between engine and workers are pickled, and what many of them have."""

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
    """A dataclass of several fields, whose objects are pickled as a call with all of them.

    By itself a dataclass with slots is pickled with the names of its fields, in twice the time.
    """
    first, *others = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]  # it is a dataclass
    fields_of: Callable[[object], tuple[object, ...]] = operator.attrgetter(first, *others)

    def reduce(self: T) -> tuple[object, ...]:
        return type(self), fields_of(self)

    cls.__reduce__ = reduce  # type: ignore[assignment,method-assign]  # as a decorator must
    return cls


_LATEST_BYTES = 2 * 2**20


class _One:
    """An object that is told from others that are equal to it: to compare them takes longer."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _One) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class _Latest:
    """What was made last, by keys: as much as its pickles have so many bytes, and one at least. Any thread may ask."""

    def __init__(self) -> None:
        self._kept: OrderedDict[object, tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()
        self.nbytes = 0

    def get(self, key: object, make: Callable[[], tuple[Any, int]]) -> Any:
        """What is kept under a key, or (what is made now, the bytes of its pickle)."""
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
    """A class whose objects many messages have: each is pickled once, and loaded once in each process.

    They must not change; those of the latest messages are held, and are one object in all of them.

    Args:
        fields_of: what to call the class with.
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
