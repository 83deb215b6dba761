"""TFRecord files: records of tf.train.Example, or any bytes.

A record: u64 length, u32 checksum of the length, the bytes, u32 checksum of the bytes; little-endian. A checksum is the
CRC-32C, rotated right by 15 bits, plus 0xA282EAD8.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from headrace._util.sample_ranges import Rows
from headrace.errors import LimitError
from headrace.formats.format import Block, Format, keys_of, rows_of_members
from headrace.formats.limits import DEFAULTS, Limits
from headrace.formats.lines import SuccessiveScanner
from headrace.formats.tar.headers import looks_like

HEAD = struct.Struct("<QI")
TAIL = struct.Struct("<I")
AROUND = HEAD.size + TAIL.size
_DELTA = 0xA282EAD8


def masked_crc(data: bytes) -> int:
    crc = int(google_crc32c.value(data))
    return ((crc >> 15 | crc << 17) + _DELTA) & 0xFFFFFFFF


class RecordScanner(SuccessiveScanner):
    """Finds the records of an object in successive buffers. The key is the number, from 0.

    Checksums of lengths are checked here, those of bytes when records are decoded. A file that was truncated between
    two records can only be detected with an index.
    """

    _counted = "record"

    def __init__(self, url: str, limits: Limits = DEFAULTS) -> None:
        super().__init__(url)
        self._low = 0  # start of the incomplete record
        self._longest = limits.member_bytes
        self._head = b""  # head of the record at `low`
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
            self._fail(f"the file ends within a record, at byte {self._end}", self._count, self.low)
        return self._rows(starts)

    def _next(self, view: memoryview, offset: int) -> int | None:
        """Return the end of the record at `low`. None if it is incomplete or damaged."""
        if len(self._head) < HEAD.size:
            at = self.low + len(self._head) - offset
            self._head += bytes(view[at : at + HEAD.size - len(self._head)])
            if len(self._head) < HEAD.size:
                return None
        length, crc = HEAD.unpack(self._head)
        if masked_crc(self._head[:8]) != crc:
            what = "the length of a record does not match its checksum"
            self._fail(what if self.low else f"this is no TFRecord file{looks_like(self._head)}", self._count, self.low)
        elif length > self._longest:
            text = f"a record has {length} bytes, over the limit of {self._longest}"
            self._fail(text, self._count, self.low, LimitError)
        end = self.low + AROUND + int(length)
        return end if self.error is None and end <= self._end else None

    def _rows(self, starts: list[int]) -> Rows:
        offsets = np.array(starts, np.int64)
        keys = keys_of(np.arange(self._count - len(starts), self._count))
        return rows_of_members(keys, offsets, np.diff(offsets, append=self.low), "record")


_VARINT, _I64, _LEN, _I32 = 0, 1, 2, 5
_VARINT_MOST = 10
_FEW = 16
_TAG_MOST = 2**32

Field = tuple[int, bytes | int]
"""(number, value) of a field: bytes, or an integer for varints."""


def fields_of(data: bytes) -> Iterator[Field]:
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, kind = tag >> 3, tag & 7
        if tag >= _TAG_MOST or not number:
            raise ValueError(f"it has a field {number}, which cannot be")
        value: bytes | int
        if kind == _VARINT:
            value, at = _varint(data, at)
        else:
            if kind == _LEN:
                size, at = _varint(data, at)
            elif kind in (_I32, _I64):
                size = 4 if kind == _I32 else 8
            else:
                raise ValueError(f"it has a field of the wire type {kind}, which is not known")
            if size > len(data) - at:
                raise ValueError(f"a field of it has {size} bytes, and {len(data) - at} are left")
            value, at = data[at : at + size], at + size
        yield number, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for k, byte in enumerate(data[at : at + _VARINT_MOST]):
        value |= (byte & 0x7F) << 7 * k
        if byte < 0x80:
            if value >= 2**64:
                break
            return value, at + k + 1
    raise ValueError("a number in it is cut off, or longer than 64 bits")


def bytes_of(value: bytes | int) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a field of it is a number, and should be bytes")  # noqa: TRY004 (it is of the data)
    return value


def integers_of(data: bytes) -> NDArray[np.int64]:
    """Decode consecutive varints."""
    if len(data) <= _FEW:
        at, values = 0, []
        while at < len(data):
            value, at = _varint(data, at)
            values.append(value)
        return np.array(values, np.uint64).view(np.int64)
    digits = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(digits < 0x80) + 1
    lengths = np.diff(ends, prepend=0)
    if not len(ends) or ends[-1] != len(data) or int(lengths.max()) > _VARINT_MOST:
        raise ValueError("a number in it is cut off, or longer than 64 bits")
    starts = ends - lengths
    if (digits[starts[lengths == _VARINT_MOST] + _VARINT_MOST - 1] > 1).any():
        raise ValueError("a number in it is longer than 64 bits")
    shifts = (7 * (np.arange(len(digits)) - np.repeat(starts, lengths))).astype(np.uint64)
    parts = (digits & 0x7F).astype(np.uint64) << shifts
    return np.asarray(np.add.reduceat(parts, starts), np.uint64).view(np.int64)


def floats_of(data: bytes) -> NDArray[np.float32]:
    """Decode consecutive 32-bit floats."""
    if len(data) % 4:
        raise ValueError(f"its {len(data)} bytes are no whole number of floats")
    return np.frombuffer(data, "<f4").astype(np.float32)


def varint_bytes(value: int) -> bytes:
    parts = []
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return struct.pack(f"{len(parts) + 1}B", *parts, value)


_BYTES, _FLOATS, _INTEGERS = 1, 2, 3


def sample_of(data: bytes, lists: frozenset[str], limits: Limits) -> dict[str, object]:
    """Decode the features of an example. A ValueError names the damaged feature.

    Args:
        lists: Fields with lists of bytes, even of one value.
    """
    sample: dict[str, object] = {}
    sequences: dict[str, object] = {}
    for number, value in fields_of(data):
        if number == 1:
            for name, one in _entries(bytes_of(value), limits, _values):
                sample[name] = one[0] if isinstance(one, list) and len(one) == 1 and name not in lists else one
        elif number == 2:
            sequences.update(_entries(bytes_of(value), limits, _lists))
        else:
            raise ValueError(
                f"it has a field {number}, so it is no tf.train.Example; TFRecord(raw=True) gives its bytes"
            )
    both = sample.keys() & sequences.keys()
    if both:
        raise ValueError(f"its feature {min(both)[:80]!r} is in its context and in its lists")
    if len(sample) + len(sequences) > limits.fields:
        raise ValueError(f"it has {len(sample) + len(sequences)} features, over the limit of {limits.fields}")
    return {**sample, **sequences}


def _entries(data: bytes, limits: Limits, decode: Callable[[bytes], object]) -> Iterator[tuple[str, object]]:
    for count, (number, entry) in enumerate(fields_of(data)):
        if number != 1:
            raise ValueError(f"its features have a field {number}, which is not known")
        if count >= limits.fields:
            raise ValueError(f"it has more than {limits.fields} features, the limit")
        key = body = b""
        for part, value in fields_of(bytes_of(entry)):
            if part == 1:
                key = bytes_of(value)
            elif part == 2:
                body = bytes_of(value)
        name = str(key, "utf-8")
        try:
            yield name, decode(body)
        except ValueError as error:
            raise ValueError(f"feature {name[:80]!r}: {error}") from None


def _lists(body: bytes) -> object:
    return [_values(bytes_of(value)) for number, value in fields_of(body) if number == 1]


def _values(feature: bytes) -> object:
    """Decode a list of bytes, an array of floats or integers, or None if the kind is not set."""
    kind = 0
    parts: list[bytes | int] = []
    for number, body in fields_of(feature):
        if number not in (_BYTES, _FLOATS, _INTEGERS):
            raise ValueError(f"it is of a kind {number}, which is not known")
        if number != kind:  # the last of several kinds wins
            kind, parts = number, []
        parts += [value for part, value in fields_of(bytes_of(body)) if part == 1]
    if kind == _BYTES:
        return [bytes_of(value) for value in parts]
    if kind == _FLOATS:
        return floats_of(b"".join(map(bytes_of, parts)))
    if kind == _INTEGERS:
        packed = (varint_bytes(value) if isinstance(value, int) else value for value in parts)
        return integers_of(b"".join(packed)) if parts else np.zeros(0, np.int64)
    return None


class TFRecord(Format):
    """Records of tf.train.Example. Features become fields.

    Args:
        raw: Return the bytes of each record, unparsed, as the field "record".
        lists: Features whose bytes are always lists. Other features with one value are that value.

    Examples:
        >>> data = hr.stream("https://example.org/{0..3}.tfrecord", format=hr.TFRecord(lists=("words",)))
    """

    name = "tfrecord"
    suffixes = (".tfrecord", ".tfrecords")

    def __init__(self, *, raw: bool = False, lists: Sequence[str] = ()) -> None:
        self.raw = raw
        self.lists = frozenset((lists,) if isinstance(lists, str) else lists)

    def sniff(self, name: str, head: bytes) -> float:
        return 0.95 if len(head) >= HEAD.size and masked_crc(head[:8]) == HEAD.unpack_from(head)[1] else 0.0

    def scanner(self, url: str, limits: Limits) -> RecordScanner:
        return RecordScanner(url, limits)

    def open_block(self, block: Block, bodies: Sequence[bytes]) -> Sequence[dict[str, object]]:
        (data,) = bodies
        if len(data) < AROUND or HEAD.unpack_from(data)[0] != len(data) - AROUND:
            raise ValueError(f"its record has {len(data)} bytes, and states another size")
        body = data[HEAD.size : -TAIL.size]
        if masked_crc(body) != TAIL.unpack_from(data, len(data) - TAIL.size)[0]:
            raise ValueError("its bytes do not match their checksum")
        return [{"record": body} if self.raw else sample_of(body, self.lists, block.limits)]


TFRECORD = TFRecord()
