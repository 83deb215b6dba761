"""A reader of Thrift's compact protocol, the encoding of Parquet's metadata."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from headrace.types import Buffer

Value = bool | int | float | bytes | list["Value"] | dict[int, "Value"]
Struct = dict[int, Value]

TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = range(1, 13)

_DEPTH_MOST = 32
_DOUBLE = struct.Struct("<d")
_VARINT_BYTES_MOST = 10


class ThriftReader:
    """Reads structs from untrusted bytes. Damage raises a ValueError.

    Attributes:
        at: Position of the next byte.
    """

    def __init__(self, data: Buffer) -> None:
        self._data, self.at = bytes(data), 0

    def struct(self) -> Struct:
        found = self.value(STRUCT)
        assert isinstance(found, dict)
        return found

    def fields(self) -> Iterator[tuple[int, int]]:
        """Iterate over (number, kind) of a struct's fields. The caller reads each value."""
        number = 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self.value(I64)  # type: ignore[assignment]
            yield number, head & 15

    def value(self, kind: int) -> Value:
        try:
            return self._value(kind, 0)
        except IndexError:
            raise ValueError("it is cut off") from None

    def list_head(self) -> tuple[int, int]:
        """Read the head of a list: (kind of the elements, their number)."""
        head = self._byte()
        count = head >> 4 if head >> 4 < 15 else self.unsigned()
        if count > len(self._data) - self.at:  # each element takes at least a byte
            raise ValueError(f"a list of {count} does not fit into {len(self._data) - self.at} bytes")
        return head & 15, count

    def unsigned(self) -> int:
        """Read an unsigned varint."""
        data, at, number, shift = self._data, self.at, 0, 0
        try:
            byte = data[at]
            while byte >= 128:
                number |= (byte & 127) << shift
                shift, at = shift + 7, at + 1
                if shift >= 7 * _VARINT_BYTES_MOST:
                    raise ValueError("a number has more than 10 bytes")
                byte = data[at]
        except IndexError:
            raise ValueError("it is cut off") from None
        self.at = at + 1
        return number | byte << shift

    def signed(self) -> int:
        """Read a zigzag-encoded varint."""
        number = self.unsigned()
        number = number >> 1 ^ -(number & 1)
        if not -(2**63) <= number < 2**63:
            raise ValueError("a number has more than 64 bits")
        return number

    def _byte(self) -> int:
        if self.at >= len(self._data):
            raise ValueError("it is cut off")
        self.at += 1
        return self._data[self.at - 1]

    def take(self, count: int) -> bytes:
        if count > len(self._data) - self.at:
            raise ValueError("it is cut off")
        self.at += count
        return self._data[self.at - count : self.at]

    def _value(self, kind: int, depth: int) -> Value:
        if depth > _DEPTH_MOST:
            raise ValueError(f"structs are nested more than {_DEPTH_MOST} times")
        if kind == STRUCT:
            return self._struct(depth)
        if kind == BINARY:
            return self.take(self.unsigned())
        if kind in (I16, I32, I64):
            return self.signed()
        if kind in (LIST, SET):
            inner, count = self.list_head()
            if inner in (TRUE, FALSE):
                return [byte == TRUE for byte in self.take(count)]
            return [self._value(inner, depth + 1) for _ in range(count)]
        if kind in (TRUE, FALSE):
            return kind == TRUE
        if kind == DOUBLE:
            return float(_DOUBLE.unpack(self.take(8))[0])
        if kind == BYTE:
            return self._byte()
        raise ValueError(f"a field is of kind {kind}, which is not known")

    def _struct(self, depth: int) -> Struct:
        data, number, fields = self._data, 0, Struct()
        while head := data[self.at]:
            self.at += 1
            kind, step = head & 15, head >> 4
            number = number + step if step else self.signed()
            if kind in (I16, I32, I64):  # most fields
                fields[number] = self.signed()
            else:
                fields[number] = self._value(kind, depth + 1)
        self.at += 1
        return fields
