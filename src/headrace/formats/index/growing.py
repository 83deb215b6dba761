"""The index of one shard, packed while the shard is read: what is held does not grow with its samples."""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Self

import numpy as np
from numpy.typing import NDArray

from headrace.formats.compression.seekable import Frames
from headrace.formats.index.file import Entry
from headrace.formats.index.named_arrays import ArrayAtOnce, ArrayInPieces, smallest, write_arrays
from headrace.formats.index.shard import GAP, TAR_BLOCK, check_keys, gaps, text_of
from headrace.protocols import lasting
from headrace.rows import Rows
from headrace.types import Ints

_HELD_BYTES = 2**18  # of each column, before it goes to disk
_PIECE = 2**16  # numbers that are read again at once
_COPIED_BYTES = 2**20
_COLUMNS = ("key_length", "key_text", "members", "field", "size", *GAP.values(), "block", "row", "crc")


class _Spilled:
    """An array that grows, on disk once it is long; see `headrace.formats.index.named_arrays.ArrayInPieces`."""

    def __init__(self, folder: Path) -> None:
        self._file = tempfile.SpooledTemporaryFile(_HELD_BYTES, dir=str(folder))  # noqa: SIM115 (closed with its table)
        self._runs: list[tuple[np.dtype[np.generic], int]] = []  # of numbers that were written in one dtype
        self.dtype, self.count = "u1", 0

    def add(self, values: NDArray[np.generic]) -> None:
        small = smallest(values)
        self._file.write(small.tobytes())
        if self._runs and self._runs[-1][0] == small.dtype:
            self._runs[-1] = small.dtype, self._runs[-1][1] + len(small)
        else:
            self._runs.append((small.dtype, len(small)))
        self.dtype, self.count = max(self.dtype, small.dtype.str[1:]), self.count + len(small)

    def pieces(self) -> Iterator[NDArray[np.generic]]:
        self._file.seek(0)
        for dtype, count in self._runs:
            for start in range(0, count, _PIECE):
                yield np.frombuffer(self._file.read(min(_PIECE, count - start) * dtype.itemsize), dtype)

    def close(self) -> None:
        self._file.close()


class GrowingIndex:
    """Takes the samples of a shard as they are found, and packs its index as `ShardIndex.pack` does.

    Used as a context manager: its files have no names, and are gone when it is left.

    Args:
        folder: for them.
    """

    def __init__(self, folder: Path) -> None:
        with ExitStack() as files:
            self._columns: dict[str, _Spilled] = {}
            for name in _COLUMNS:
                self._columns[name] = column = _Spilled(folder)
                files.callback(column.close)
            self._files = files.pop_all()
        self._fields: dict[str, int] = {}
        self._end = self._samples = self._members = self._blocks = self._nbytes = 0
        self._longest_key = self._key_bytes = 0
        self._are_blocks = self._has_gaps = True
        self._shares_blocks = False

    def add(self, rows: Rows, crc: NDArray[np.uint32]) -> None:
        """Samples that follow those that were given, and the checksums of their members.

        Raises:
            ValueError: members overlap, or lie not in order: no shard is so.
        """
        columns = self._columns
        lengths = np.strings.str_len(rows.keys).astype(np.int64)
        columns["key_length"].add(lengths)
        columns["key_text"].add(text_of(rows.keys, lengths))
        columns["members"].add(np.diff(rows.starts))
        numbers = [self._fields.setdefault(name, len(self._fields)) for name in rows.fields]
        columns["field"].add(np.array(numbers or [0], np.int64)[rows.field])
        columns["size"].add(rows.size)
        self._add_gaps(rows.offset, rows.size)
        blocks = len(rows.starts) - 1
        own = np.arange(blocks) if rows.block is None else rows.block
        columns["block"].add(own + self._blocks)
        columns["row"].add(np.zeros(len(rows), np.int64) if rows.row is None else rows.row)
        columns["crc"].add(crc)
        self._shares_blocks = self._shares_blocks or rows.block is not None
        self._blocks += blocks
        self._samples, self._members = self._samples + len(rows), self._members + len(rows.offset)
        self._nbytes += int(rows.size.sum())
        if len(lengths):
            self._longest_key = max(self._longest_key, int(lengths.max()))
            self._key_bytes += int(lengths.sum())

    def _add_gaps(self, offset: Ints, size: Ints) -> None:
        self._are_blocks = self._are_blocks and not (offset % TAR_BLOCK).any()
        if self._are_blocks:
            self._columns[GAP[TAR_BLOCK]].add(gaps(offset, size, TAR_BLOCK, end=self._end))
        self._columns[GAP[1]].add(gaps(offset, size, 1, end=self._end))
        if len(offset):
            self._end = int(offset[-1] + size[-1])

    def write(self, file: IO[bytes], name: str, size: int, etag: str | None, frames: Frames | None = None) -> Entry:
        """Write the block of the shard called `name` to an empty file; gives its entry.

        Args:
            size: of the shard, in bytes.
            etag: its version.
            frames: where its packed bytes can be entered; None: it is not compressed.

        Raises:
            LimitError: one key among very many is very long.
        """
        check_keys("this index", self._longest_key, self._samples, self._key_bytes)
        left_out = {GAP[1] if self._are_blocks else GAP[TAR_BLOCK]}
        if not self._shares_blocks:
            left_out |= {"block", "row"}
        columns: dict[str, ArrayInPieces] = {each: self._columns[each] for each in _COLUMNS if each not in left_out}
        if frames is not None:
            columns["frame_packed"] = ArrayAtOnce(np.diff(frames.packed, prepend=0))
            columns["frame_unpacked"] = ArrayAtOnce(np.diff(frames.unpacked, prepend=0))
        etag = lasting(etag)
        facts = {"size": None if size < 0 else size, "etag": etag, "fields": list(self._fields)}
        length = write_arrays(file, facts, columns)
        file.seek(0)
        check = 0
        while piece := file.read(_COPIED_BYTES):
            check = zlib.crc32(piece, check)
        return Entry(
            name=name,
            samples=self._samples,
            members=self._members,
            nbytes=self._nbytes,
            size=size,
            etag=etag,
            length=length,
            check=check,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *about: object) -> None:
        self._files.close()
