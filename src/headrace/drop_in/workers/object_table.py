"""Objects on their way from one thread to another, over a wire that carries bytes: only their places travel."""

from __future__ import annotations

import itertools
import weakref

_shelf_numbers = itertools.count()


class ObjectTable:
    """Where one thread puts objects for another."""

    def __init__(self) -> None:
        self._number = next(_shelf_numbers)
        self._objects: dict[int, object] = {}
        self._places = itertools.count()
        self._is_closed = False
        _shelves[self._number] = self

    def put(self, value: object) -> object:
        """What to pickle in its place: it is unpickled, once, as `value` itself."""
        place = next(self._places)
        self._objects[place] = value
        if self._is_closed:  # asked after it was put: whichever of two threads is later clears it away
            self._objects.clear()
        return _ObjectRef(self._number, place)

    def take(self, place: int) -> object:
        """What was put there, which is not in the table any more."""
        return self._objects.pop(place)

    def close(self) -> None:
        """Nobody will take what is there, and what may still be put there."""
        self._is_closed = True
        self._objects.clear()


_shelves: weakref.WeakValueDictionary[int, ObjectTable] = weakref.WeakValueDictionary()


class _ObjectRef:
    def __init__(self, table: int, place: int) -> None:
        self._table, self._place = table, place

    def __reduce__(self) -> tuple[object, ...]:
        return _taken, (self._table, self._place)


def _taken(table: int, place: int) -> object:
    return _shelves[table].take(place)
