"""The journal of an index build, a sequence of index files of one shard each. An interrupted build resumes from it."""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import IO

from headrace.errors import FormatError, masked
from headrace.formats.index.file import HEAD, Entry, pack_directory, read_directory, read_head, wrong_check
from headrace.types import Buffer

_PIECE = 2**20


def index_of_one(entry: Entry, block: Buffer = b"") -> bytes:
    """Return the index file of one shard, which is also the record of a journal."""
    return pack_directory([replace(entry, length=len(block), check=zlib.crc32(block))]) + block


class Journal:
    """Iterates over the entries of a journal, up to the first incomplete or damaged record.

    Entries have `start` and `length` of their block in the journal. Of several entries of one object the last one is
    valid. Truncate the journal at `end` before appending to it.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.end = 0

    def __iter__(self) -> Iterator[Entry]:
        self.end = 0
        size = self._file.seek(0, io.SEEK_END)
        while (entry := self._read(self.end, size)) is not None:
            yield entry

    def _read(self, at: int, size: int) -> Entry | None:
        self._file.seek(at)
        head = self._file.read(HEAD.size)
        try:
            start = at + read_head(head)
            if start > size:
                return None
            directory = read_directory(head + self._file.read(start - at - HEAD.size))
        except FormatError:
            return None
        if len(directory) != 1 or start + directory[0].length > size:
            return None
        entry, check = replace(directory[0], start=start), 0
        for piece in _pieces(self._file, entry):
            check = zlib.crc32(piece, check)
        if check != entry.check:
            return None
        self.end = start + entry.length
        return entry


def write_index(file: IO[bytes], entries: Sequence[Entry], journal: IO[bytes]) -> int:
    """Write an index file of `entries`, whose blocks are in `journal`. Return its size."""
    if len({entry.name for entry in entries}) < len(entries):
        raise ValueError("two entries of one index have the same address")
    written = file.write(pack_directory(entries))
    for entry in entries:
        check = 0
        for piece in _pieces(journal, entry):
            check = zlib.crc32(piece, check)
            written += file.write(piece)
        if check != entry.check:
            raise wrong_check(entry.name)
    return written


def _pieces(journal: IO[bytes], entry: Entry) -> Iterator[bytes]:
    journal.seek(entry.start)
    left = entry.length
    while left:
        piece = journal.read(min(left, _PIECE))
        if not piece:
            raise FormatError(f"the journal ends inside the index of {masked(entry.name)}", url=entry.name)
        left -= len(piece)
        yield piece
