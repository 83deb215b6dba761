"""Where the records of a TFRecord file lie.

Of each: u64 its length, u32 a checksum of that, its bytes, u32 a checksum of these; little-endian. A checksum is the
CRC-32C, turned by 15 bits to the right, plus 0xA282EAD8.
"""

from __future__ import annotations

import struct

import google_crc32c
import numpy as np

from headrace.errors import FormatError, LimitError, masked
from headrace.formats.limits import DEFAULTS, Limits
from headrace.formats.successive import SuccessiveScanner
from headrace.formats.tar.headers import looks_like
from headrace.rows import Rows

HEAD = struct.Struct("<QI")
TAIL = struct.Struct("<I")
AROUND = HEAD.size + TAIL.size
_DELTA = 0xA282EAD8


def masked_crc(data: bytes) -> int:
    """The checksum of `data`, as such files have it."""
    crc = int(google_crc32c.value(data))
    return ((crc >> 15 | crc << 17) + _DELTA) & 0xFFFFFFFF


class RecordScanner(SuccessiveScanner):
    """Finds the records of an object in successive buffers of it; a sample's key is its record's number, from 0.

    The checksums of lengths are compared here, those of bytes where records are opened. That a file was cut between
    two records nobody can see but an index.
    """

    def __init__(self, url: str, limits: Limits = DEFAULTS) -> None:
        super().__init__(url)
        self._low = 0  # where the record begins that is not known whole
        self._longest = limits.member_bytes
        self._head = b""  # of the record at `low`
        self._count = 0

    @property
    def low(self) -> int:
        return self._low

    def _found(self, view: memoryview, offset: int, last: bool) -> Rows:
        starts: list[int] = []
        while (end := self._next(view, offset)) is not None:
            starts.append(self.low)
            self._low, self._head, self._count = end, b"", self._count + 1
        if last and self.error is None and self.low < self._end:
            self._fail(FormatError, f"the file ends within a record, at byte {self._end}")
        return self._rows(starts)

    def _next(self, view: memoryview, offset: int) -> int | None:
        """Where the record at `low` ends, where that is known and there."""
        if len(self._head) < HEAD.size:
            at = self.low + len(self._head) - offset
            self._head += bytes(view[at : at + HEAD.size - len(self._head)])
            if len(self._head) < HEAD.size:
                return None
        length, crc = HEAD.unpack(self._head)
        if masked_crc(self._head[:8]) != crc:
            what = "the length of a record is not what its checksum says"
            self._fail(FormatError, what if self.low else f"this is no TFRecord file{looks_like(self._head)}")
        elif length > self._longest:
            self._fail(LimitError, f"a record has {length} bytes, over the limit of {self._longest}")
        end = self.low + AROUND + int(length)
        return end if self.error is None and end <= self._end else None

    def _rows(self, starts: list[int]) -> Rows:
        count = len(starts)
        offsets = np.array(starts, np.int64)
        keys = np.arange(self._count - count, self._count).astype(f"S{len(str(max(self._count - 1, 0)))}")
        sizes = np.diff(offsets, append=self.low)
        return Rows(keys, np.arange(count + 1), np.zeros(count, np.int32), offsets, sizes, ("record",))

    def _fail(self, kind: type[FormatError], why: str) -> None:
        where = f"{masked(self.url)}, record {self._count}, byte {self.low}"
        self.error = kind(f"{why} ({where})", url=self.url, key=str(self._count), offset=self.low)
