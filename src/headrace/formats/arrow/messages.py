"""Parses the heads of Arrow messages, which are FlatBuffers, without the bodies.

pyarrow parses a head only together with its body, so it cannot provide the ranges to fetch.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

SCHEMA, DICTIONARY, BATCH = 1, 2, 3

PREFIX_BYTES = 8
CONTINUATION = b"\xff\xff\xff\xff"
_BLOCK = "<qi4xq"
_CODECS = 2  # LZ4 and ZSTD
_FORMATS = {1: "<b", 2: "<h", 4: "<i", 8: "<q"}


class MessageHead(NamedTuple):
    """The head of a message.

    Attributes:
        body: Size of the body.
        nodes: Number of arrays, with nested ones.
        buffers: (offset in the body, size) of each buffer.
        variadic: Number of additional buffers of each column of views.
        dictionary: Number of the dictionary.
        is_delta: True if the message extends the previous dictionary of its number.
    """

    kind: int
    body: int
    rows: int = 0
    nodes: int = 0
    buffers: tuple[tuple[int, int], ...] = ()
    is_packed: bool = False
    variadic: tuple[int, ...] = ()
    dictionary: int = 0
    is_delta: bool = False


class MessagePlace(NamedTuple):
    """The offset of a message in a file, and the sizes of its head and body."""

    start: int
    head: int
    body: int


class _Table:
    """A FlatBuffers table at offset `at` of untrusted bytes. Damage raises a ValueError."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data, self._at = data, at
        self._vtable = at - _number(data, at, "<i")
        self._size = _number(data, self._vtable, "<H")

    def number(self, field: int, nbytes: int) -> int:
        """Return a signed number. 0 if it is absent."""
        place = self._place(field)
        return 0 if place is None else _number(self._data, place, _FORMATS[nbytes])

    def table(self, field: int) -> _Table | None:
        place = self._place(field)
        return None if place is None else _Table(self._data, place + _number(self._data, place, "<I"))

    def structs(self, field: int, layout: str) -> Iterator[tuple[int, ...]]:
        place = self._place(field)
        if place is None:
            return iter(())
        start = place + _number(self._data, place, "<I")
        count, start, size = _number(self._data, start, "<I"), start + 4, struct.calcsize(layout)
        if start + count * size > len(self._data):
            raise ValueError(f"a list of {count} does not fit into {len(self._data)} bytes")
        return struct.iter_unpack(layout, self._data[start : start + count * size])

    def _place(self, field: int) -> int | None:
        entry = 4 + 2 * field
        if entry + 2 > self._size:
            return None
        offset = _number(self._data, self._vtable + entry, "<H")
        return self._at + offset if offset else None


def _number(data: bytes, at: int, layout: str) -> int:
    if not 0 <= at <= len(data) - struct.calcsize(layout):
        raise ValueError("its head is damaged")
    return int(struct.unpack_from(layout, data, at)[0])


def head_bytes(prefix: bytes) -> int:
    """Return the size of a message before its body, from its first 8 bytes. 0: end of stream."""
    if len(prefix) < PREFIX_BYTES:
        raise ValueError("it is cut off in the head of a message")
    if prefix[:4] != CONTINUATION:
        raise ValueError("a message does not begin as those do that Arrow has written since 0.15")
    length = int.from_bytes(prefix[4:PREFIX_BYTES], "little", signed=True)
    if length < 0:
        raise ValueError(f"the head of a message would have {length} bytes")
    return length + PREFIX_BYTES if length else 0


def head_of(data: bytes) -> MessageHead:
    """Parse the head of a message, the bytes before the body. Damage raises a ValueError."""
    body = data[PREFIX_BYTES:]
    message = _Table(body, _number(body, 0, "<I"))
    kind, size, header = message.number(1, 1), message.number(3, 8), message.table(2)
    if header is None or size < 0:
        raise ValueError("the head of a message is damaged")
    batch = header.table(1) if kind == DICTIONARY else header
    if batch is None:
        raise ValueError("a dictionary has no values")
    if kind not in (DICTIONARY, BATCH):
        return MessageHead(kind, size)
    rows, packed = batch.number(0, 8), batch.table(3)
    if rows < 0 or (packed is not None and not 0 <= packed.number(0, 1) < _CODECS):
        raise ValueError(f"a batch has {rows} rows, or an unknown compression")
    buffers, end = [], 0
    for start, length in batch.structs(2, "<qq"):
        if length < 0 or start < (end if length else 0) or start + length > size:
            raise ValueError(f"a buffer has {length} bytes at {start} of {size}, and the one before ends at {end}")
        end = start + length if length else end
        buffers.append((start, length))
    nodes, variadic = sum(1 for _ in batch.structs(1, "<qq")), tuple(count for (count,) in batch.structs(4, "<q"))
    head = MessageHead(kind, size, rows, nodes, tuple(buffers), packed is not None, variadic)
    if kind == DICTIONARY:
        return head._replace(dictionary=header.number(0, 8), is_delta=bool(header.number(2, 1)))
    return head


def blocks_of(footer: bytes) -> tuple[list[MessagePlace], list[MessagePlace]]:
    """Return (dictionaries, batches) from a file's footer. Damage raises a ValueError."""
    table = _Table(footer, _number(footer, 0, "<I"))
    dictionaries, batches = ([MessagePlace(*one) for one in table.structs(field, _BLOCK)] for field in (2, 3))
    return dictionaries, batches
