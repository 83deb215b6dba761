"""Thrift's compact protocol, as footers and heads of pages of Parquet are written: structs by the numbers of fields."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from headrace.types import Buffer

Value = bool | int | float | bytes | list["Value"] | dict[int, "Value"]
Struct = dict[int, Value]

TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = range(1, 13)

_DEPTH_MOST = 32
_DOUBLE = struct.Struct("<d")
_VARINT_BYTES_MOST = 10


class ThriftReader:
    """Reads structs out of bytes from elsewhere.

    Args:
        data: the bytes.
        at: where to begin; afterwards where the last struct ended.

    Raises:
        ValueError: they are none, or end before they should.
    """

    def __init__(self, data: Buffer, at: int = 0) -> None:
        self._data, self.at = bytes(data), at

    def struct(self, depth: int = 0) -> Struct:
        """The fields of the struct that begins here, by their numbers."""
        if depth > _DEPTH_MOST:
            raise ValueError(f"structs lie within one another more than {_DEPTH_MOST} times")
        data, number, fields = self._data, 0, Struct()
        try:
            while head := data[self.at]:
                self.at += 1
                kind, step = head & 15, head >> 4
                number = number + step if step else self._signed()
                fields[number] = kind == TRUE if kind <= FALSE else self._value(kind, depth)
        except IndexError:
            raise ValueError("it is cut off") from None
        self.at += 1
        return fields

    def fields(self) -> Iterator[tuple[int, int]]:
        """(number, kind) of the fields of the struct that begins here; whoever asks reads each by `value` or `raw`."""
        number = 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._signed_or_end()
            yield number, head & 15

    def value(self, kind: int) -> Value:
        """A value of this kind, which begins here."""
        try:
            return kind == TRUE if kind <= FALSE else self._value(kind, 0)
        except IndexError:
            raise ValueError("it is cut off") from None

    def raw(self, kind: int) -> list[tuple[bytes, Struct]]:
        """The structs of a list of them, each also as its bytes."""
        head = self._byte()
        try:
            count = head >> 4 if head >> 4 < 15 else self._unsigned()
        except IndexError:
            raise ValueError("it is cut off") from None
        if kind != LIST or head & 15 != STRUCT:
            raise ValueError("a list of structs is no such list")
        self._check_count(count)
        structs = []
        for _ in range(count):
            start, one = self.at, self.struct()
            structs.append((self._data[start : self.at], one))
        return structs

    def _byte(self) -> int:
        if self.at >= len(self._data):
            raise ValueError("it is cut off")
        self.at += 1
        return self._data[self.at - 1]

    def _signed_or_end(self) -> int:
        try:
            return self._signed()
        except IndexError:
            raise ValueError("it is cut off") from None

    def _unsigned(self) -> int:
        data, at = self._data, self.at
        byte = data[at]
        if byte < 128:
            self.at = at + 1
            return byte
        number, shift = byte & 127, 7
        while byte >= 128:
            at += 1
            byte = data[at]
            number |= (byte & 127) << shift
            shift += 7
            if shift > 7 * _VARINT_BYTES_MOST:
                raise ValueError("a number has more than 10 bytes")
        self.at = at + 1
        return number

    def _signed(self) -> int:
        number = self._unsigned()
        number = number >> 1 ^ -(number & 1)
        if not -(2**63) <= number < 2**63:
            raise ValueError("a number has more than 64 bits")
        return number

    def _value(self, kind: int, depth: int) -> Value:
        if kind in (I16, I32, I64):
            return self._signed()
        if kind == BINARY:
            stop = self._unsigned() + self.at
            if stop > len(self._data):
                raise ValueError("it is cut off")
            start, self.at = self.at, stop
            return self._data[start:stop]
        if kind == STRUCT:
            return self.struct(depth + 1)
        if kind in (LIST, SET):
            return self._list(depth)
        if kind == MAP:
            return self._map(depth)
        if kind == DOUBLE:
            self.at += 8
            if self.at > len(self._data):
                raise ValueError("it is cut off")
            return float(_DOUBLE.unpack_from(self._data, self.at - 8)[0])
        if kind == BYTE:
            self.at += 1
            return self._data[self.at - 1]
        raise ValueError(f"a field is of kind {kind}, which there is not")

    def _list(self, depth: int) -> list[Value]:
        head = self._data[self.at]
        self.at += 1
        kind, count = head & 15, head >> 4
        if count == 15:
            count = self._unsigned()
        self._check_count(count)
        if kind in (TRUE, FALSE):
            self.at += count
            if self.at > len(self._data):
                raise ValueError("it is cut off")
            return [byte == TRUE for byte in self._data[self.at - count : self.at]]
        if kind == STRUCT:
            return [self.struct(depth + 1) for _ in range(count)]
        if depth >= _DEPTH_MOST:
            raise ValueError(f"lists lie within one another more than {_DEPTH_MOST} times")
        return [self._value(kind, depth + 1) for _ in range(count)]

    def _map(self, depth: int) -> list[Value]:
        count = self._unsigned()
        self._check_count(count)
        if not count:
            return []
        if depth >= _DEPTH_MOST:
            raise ValueError(f"maps lie within one another more than {_DEPTH_MOST} times")
        kinds = self._data[self.at]
        self.at += 1
        pairs: list[Value] = []
        for _ in range(count):
            pairs += [self._member(kinds >> 4, depth), self._member(kinds & 15, depth)]
        return pairs

    def _member(self, kind: int, depth: int) -> Value:
        if kind in (TRUE, FALSE):
            self.at += 1
            return self._data[self.at - 1] == TRUE
        return self._value(kind, depth + 1)

    def _check_count(self, count: int) -> None:
        if count > len(self._data) - self.at:  # each takes a byte at least
            raise ValueError(f"a list of {count} does not fit into {len(self._data) - self.at} bytes")


Field = tuple[int, int, object]
"""A field to write: its number, its kind, its value. Of a struct that is a list of fields, of a list (kind, values)."""


class Begun(NamedTuple):
    """The first fields of a struct, written, and the number of the last one."""

    data: bytes
    number: int


_NOTHING = Begun(b"", 0)


def begun(fields: Sequence[Field]) -> Begun:
    """These fields, by ascending numbers, of a struct that has others behind them."""
    out = bytearray()
    _write_fields(out, fields, 0)
    return Begun(bytes(out), fields[-1][0])


def written(fields: Iterable[Field], first: Begun = _NOTHING) -> bytes:
    """A struct of these fields, by ascending numbers, behind the first ones."""
    out = bytearray(first.data)
    _write_fields(out, fields, first.number)
    out.append(0)
    return bytes(out)


def _write_fields(out: bytearray, fields: Iterable[Field], last: int) -> None:
    for number, kind, value in fields:
        kind = (TRUE if value else FALSE) if kind in (TRUE, FALSE) else kind  # noqa: PLW2901
        if 0 < number - last < 16:
            out.append((number - last) << 4 | kind)
        else:
            out.append(kind)
            _write_unsigned(out, number << 1)
        if kind > FALSE:
            _write(out, kind, value)
        last = number


def _write(out: bytearray, kind: int, value: object) -> None:
    match value:
        case int() if kind in (I16, I32, I64):
            _write_unsigned(out, (value << 1 ^ value >> 63) & 2**64 - 1)
        case bytes() if kind == BINARY:
            _write_unsigned(out, len(value))
            out += value
        case bytes() if kind == STRUCT:
            out += value  # one that is written already
        case list() if kind == STRUCT:
            out += written(value)
        case (int() as inner, list() as values) if kind == LIST:
            if len(values) < 15:
                out.append(len(values) << 4 | inner)
            else:
                out.append(15 << 4 | inner)
                _write_unsigned(out, len(values))
            for one in values:
                _write(out, inner, one)
        case _:
            raise TypeError(f"{value!r:.40} is not of kind {kind}")


def _write_unsigned(out: bytearray, number: int) -> None:
    while number >= 128:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
