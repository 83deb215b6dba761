"""FlatBuffers, as heads of Arrow's messages are written: tables by the numbers of fields, read where they lie."""

from __future__ import annotations

import struct
from collections.abc import Iterator

_FORMATS = {1: "<b", 2: "<h", 4: "<i", 8: "<q"}


class FlatTable:
    """A table within bytes from elsewhere.

    Args:
        data: all of the bytes.
        at: where the table begins.

    Raises:
        ValueError: by every method: it lies beyond the bytes.
    """

    def __init__(self, data: bytes, at: int) -> None:
        self._data, self._at = data, at
        self._vtable = at - self._number(at, "<i")
        self._size = self._number(self._vtable, "<H")

    @staticmethod
    def root(data: bytes) -> FlatTable:
        """The table that all others hang on."""
        return FlatTable(data, _number(data, 0, "<I"))

    def number(self, field: int, nbytes: int, default: int = 0) -> int:
        """A signed whole number."""
        place = self._place(field)
        return default if place is None else self._number(place, _FORMATS[nbytes])

    def table(self, field: int) -> FlatTable | None:
        """Another table; None where there is none."""
        place = self._place(field)
        return None if place is None else FlatTable(self._data, place + self._number(place, "<I"))

    def structs(self, field: int, layout: str) -> Iterator[tuple[int, ...]]:
        """The structs of a vector, each read as `layout` of `struct` says; none where there is no vector."""
        place = self._place(field)
        if place is None:
            return iter(())
        start = place + self._number(place, "<I")
        count, start, size = self._number(start, "<I"), start + 4, struct.calcsize(layout)
        if start + count * size > len(self._data):
            raise ValueError(f"a list of {count} does not fit into {len(self._data)} bytes")
        return struct.iter_unpack(layout, self._data[start : start + count * size])

    def _place(self, field: int) -> int | None:
        """Where a field lies; None where it has its default."""
        entry = 4 + 2 * field
        if entry + 2 > self._size:
            return None
        offset = self._number(self._vtable + entry, "<H")
        return self._at + offset if offset else None

    def _number(self, at: int, layout: str) -> int:
        return _number(self._data, at, layout)


def _number(data: bytes, at: int, layout: str) -> int:
    if not 0 <= at <= len(data) - struct.calcsize(layout):
        raise ValueError("its head is damaged")
    return int(struct.unpack_from(layout, data, at)[0])
