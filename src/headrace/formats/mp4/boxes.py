"""Boxes, the elements of MP4 files (ISO/IEC 14496-12): length, kind of four letters, body."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from headrace.types import Buffer, Ints

HEADER_BYTES = 16
"""Maximum size of a box's header."""

_BOXES_MOST = 10_000  # in one box: malicious files have millions of empty ones
_U32, _U64 = struct.Struct(">I"), struct.Struct(">Q")


def header_of(data: bytes | memoryview, left: int) -> tuple[bytes, int, int]:
    """Parse a box header: (kind, header bytes, box bytes). `left`: bytes left in the container."""
    if len(data) < 8:
        raise ValueError(f"{len(data)} bytes are left, fewer than a box's header")
    (size,), kind, header = _U32.unpack_from(data), bytes(data[4:8]), 8
    if size == 1:
        if len(data) < HEADER_BYTES:
            raise ValueError(f"the header of its box {shown(kind)} is cut off")
        (size,), header = _U64.unpack_from(data, 8), HEADER_BYTES
    elif size == 0:
        size = left
    if not header <= size:
        raise ValueError(f"its box {shown(kind)} has {size} bytes, fewer than its header")
    return kind, header, size


def shown(kind: bytes) -> str:
    return repr(kind.decode("latin-1"))


@dataclass(frozen=True, slots=True)
class Box:
    """A box with its kind and body. Iteration returns the boxes in it."""

    kind: bytes
    body: memoryview

    def __iter__(self) -> Iterator[Box]:
        at, end = 0, len(self.body)
        for _ in range(_BOXES_MOST):
            if end - at < 8 and not any(self.body[at:]):  # QuickTime ends some boxes with zeros
                return
            kind, header, size = header_of(self.body[at : at + HEADER_BYTES], end - at)
            if size > end - at:
                raise ValueError(f"its box {shown(kind)} has {size} bytes, and {end - at} are left in {self}")
            yield Box(kind, self.body[at + header : at + size])
            at += size
        raise ValueError(f"there are over {_BOXES_MOST} boxes in {self}")

    def __str__(self) -> str:
        return shown(self.kind)

    def find(self, *path: bytes) -> Box | None:
        found: Box | None = self
        for kind in path:
            found = next((box for box in found if box.kind == kind), None) if found is not None else None
        return found

    def need(self, *path: bytes) -> Box:
        found = self.find(*path)
        if found is None:
            raise ValueError(f"{self} has no box {'/'.join(shown(kind).strip(chr(39)) for kind in path)}")
        return found

    def number(self, at: int, size: int = 4) -> int:
        if at + size > len(self.body):
            raise ValueError(f"its box {self} has {len(self.body)} bytes, and is cut off")
        return int.from_bytes(self.body[at : at + size], "big")

    @property
    def version(self) -> int:
        """Version of a box that begins with a version and flags."""
        return self.number(0, 1)

    def table(self, columns: int, *, at: int = 4, dtype: str = ">u4") -> Ints:
        """Return the rows after a row count at `at`: `[rows, columns]`."""
        rows, width = self.number(at), columns * np.dtype(dtype).itemsize
        if at + 4 + rows * width > len(self.body):
            raise ValueError(f"its box {self} would have {rows} rows of {width} bytes, and has {len(self.body)} bytes")
        numbers = np.frombuffer(self.body, dtype, rows * columns, at + 4)
        if dtype == ">u8" and rows and int(numbers.max()) > 2**53:
            raise ValueError(f"its box {self} has a number that is too large")
        return numbers.astype(np.int64).reshape(rows, columns)


def box(kind: bytes, *parts: Buffer) -> bytes:
    """Return a box of these parts, of less than 4 GiB."""
    return b"".join([_U32.pack(8 + sum(map(len, parts))), kind, *parts])
