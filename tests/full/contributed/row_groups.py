"""A format as a package of somebody else would have it: groups of rows, each packed by columns and compressed.

"ROWG", then for each group: u32 rows, u32 bytes, u32 CRC-32 of those, zlib of a JSON {field: [value of each row]};
a group of 0 rows and 0 bytes is the end.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from headrace._util.sample_ranges import Rows
from headrace.errors import FormatError, LimitError
from headrace.formats.format import Block, Format
from headrace.formats.limits import Limits

MAGIC, HEAD = b"ROWG", struct.Struct("<III")


def write(samples: Sequence[Mapping[str, Any]], rows: int = 8) -> bytes:
    def parts() -> Iterator[bytes]:
        for start in range(0, len(samples), rows):
            group = samples[start : start + rows]
            body = zlib.compress(json.dumps({name: [one[name] for one in group] for name in group[0]}).encode())
            yield HEAD.pack(len(group), len(body), zlib.crc32(body)) + body

    return MAGIC + b"".join(parts()) + HEAD.pack(0, 0, 0)


class GroupScanner:
    """Finds groups by their heads; of a head that reaches over two buffers it keeps the first bytes."""

    def __init__(self, url: str, limits: Limits) -> None:
        self.url, self.limits = url, limits
        self.error: FormatError | None = None
        self.done = False
        self.low = 0  # where the group begins that is not known whole
        self.count = 0  # samples before it
        self.head = b""
        self.end = 0
        self.is_ended = False

    def feed(self, buffer: memoryview, offset: int, last: bool) -> Rows:
        found: list[tuple[int, int, int]] = []
        self.end = offset + len(buffer)
        try:
            while not self.is_ended and (group := self._next(buffer, offset)) is not None:
                found.append(group)
            if last and not self.is_ended:
                raise FormatError(f"{self.url} is truncated at byte {self.end}", url=self.url, offset=self.end)
        except FormatError as error:
            self.error = error
        self.done = last or self.error is not None
        return self._rows(found)

    def _next(self, buffer: memoryview, offset: int) -> tuple[int, int, int] | None:
        start = 0 if self.low else len(MAGIC)
        need = start + HEAD.size
        at = self.low + len(self.head)
        self.head += bytes(buffer[at - offset : at - offset + need - len(self.head)])
        if not self.low and not MAGIC.startswith(self.head[: len(MAGIC)]):
            raise FormatError(f"{self.url} has no row groups", url=self.url, offset=0)
        if len(self.head) < need:
            return None
        rows, nbytes, _ = HEAD.unpack_from(self.head, start)
        body = self.low + need
        if nbytes > self.limits.member_bytes or rows > 2**20:
            raise LimitError(f"{self.url}: a group of {rows} rows, {nbytes} bytes", url=self.url, offset=self.low)
        if body + nbytes > self.end:
            return None
        self.low, self.head, self.is_ended = body + nbytes, b"", not nbytes
        return (body - HEAD.size, nbytes + HEAD.size, rows) if nbytes else None

    def _rows(self, found: Sequence[tuple[int, int, int]]) -> Rows:
        counts = np.array([rows for _, _, rows in found], np.int64)
        block = np.repeat(np.arange(len(found)), counts)
        row = np.arange(len(block)) - np.repeat(np.cumsum(counts) - counts, counts)
        keys = np.arange(self.count, self.count + len(block)).astype("S12")
        self.count += len(block)
        return Rows(
            keys,
            np.arange(len(found) + 1),
            np.zeros(len(found), np.int32),
            np.array([at for at, _, _ in found], np.int64),
            np.array([size for _, size, _ in found], np.int64),
            ("group",),
            block,
            row,
        )


class RowGroups(Format):
    name = "rowgroups"
    suffixes = (".rowg",)

    def sniff(self, name: str, head: bytes) -> float:
        return 1.0 if head.startswith(MAGIC) else 0.0

    def scanner(self, url: str, limits: Limits) -> GroupScanner:
        return GroupScanner(url, limits)

    def open_block(self, block: Block, bodies: Sequence[bytes]) -> Sequence[dict[str, Any]]:
        rows, nbytes, check = HEAD.unpack_from(bodies[0])
        body = bodies[0][HEAD.size :]
        if len(body) != nbytes or zlib.crc32(body) != check:
            raise ValueError("the group does not match its checksum")
        columns = json.loads(zlib.decompress(body))
        if any(len(values) != rows for values in columns.values()):
            raise ValueError("its columns are not of one length")
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
