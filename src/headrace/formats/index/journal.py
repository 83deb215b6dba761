"""The journal of an index build. An interrupted build resumes from it.

A journal is a sequence of records. A record is

    u32 magic, u32 length of the payload, u32 CRC-32 of the payload
    the payload: one line of JSON (the entry), then the packed index of the shard
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import IO

from headrace.errors import FormatError, masked
from headrace.formats.index.file import Entry, pack_directory, wrong_check
from headrace.formats.index.named_arrays import MOST
from headrace.formats.json_values import as_count, as_number, as_object, as_text
from headrace.types import Buffer

_MAGIC = int.from_bytes(b"HRJ1", "little")
_HEAD = struct.Struct("<III")
_LINE_MOST = 2**16
_PIECE = 2**20
_COUNTS = ("samples", "members", "nbytes", "size", "check")
_FACTS = ("name", "etag", *_COUNTS)


def journal_record(entry: Entry, block: Buffer = b"") -> bytes:
    """Return the journal record of an indexed shard.

    Raises:
        ValueError: the address is too long to be read back.
    """
    line = json.dumps({name: getattr(entry, name) for name in _FACTS}, separators=(",", ":")).encode() + b"\n"
    if len(line) > _LINE_MOST:
        raise ValueError(f"an address of {len(entry.name)} characters is over the limit")
    payload = line + block
    return _HEAD.pack(_MAGIC, len(payload), zlib.crc32(payload)) + payload


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
        while (entry := self._read(self.end)) is not None:
            yield entry

    def _read(self, at: int) -> Entry | None:
        self._file.seek(at)
        head = self._file.read(_HEAD.size)
        if len(head) < _HEAD.size:
            return None
        magic, length, check = _HEAD.unpack(head)
        if magic != _MAGIC:
            return None
        first = piece = self._file.read(min(length, _PIECE))
        seen, left = zlib.crc32(piece), length - len(piece)
        while piece and left:  # in pieces: a damaged length must not cost memory
            piece = self._file.read(min(left, _PIECE))
            seen, left = zlib.crc32(piece, seen), left - len(piece)
        line, newline, _ = first[:_LINE_MOST].partition(b"\n")
        if left or seen != check or not newline:
            return None
        start = at + _HEAD.size + len(line) + 1
        stop = at + _HEAD.size + length
        try:
            entry = _entry(as_object(json.loads(line)) or {})
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        self.end = stop
        return replace(entry, start=start, length=stop - start)


def _entry(facts: dict[str, object]) -> Entry:
    name, etag = as_text(facts["name"]), as_text(facts["etag"])
    if name is None or (etag is None and facts["etag"] is not None):
        raise ValueError("it has no name")
    counts = {name: as_count(facts[name], MOST) for name in _COUNTS}
    if facts["size"] == -1:  # unknown
        counts["size"] = as_number(facts["size"])
    known = {name: count for name, count in counts.items() if count is not None}
    if len(known) < len(counts):
        raise ValueError("its counts are none")
    return Entry(name=name, etag=etag, **known)


def write_index(file: IO[bytes], entries: Sequence[Entry], journal: IO[bytes]) -> int:
    """Write an index file of `entries`, whose blocks are in `journal`. Return its size.

    Raises:
        ValueError: two entries have one address.
        FormatError: a block in the journal does not match its entry.
    """
    if len({entry.name for entry in entries}) < len(entries):
        raise ValueError("two entries of one index have the same address")
    written = file.write(pack_directory(entries))
    for entry in entries:
        if entry.length:
            written += _copy_block(file, entry, journal)
    return written


def _copy_block(file: IO[bytes], entry: Entry, journal: IO[bytes]) -> int:
    journal.seek(entry.start)
    left, check = entry.length, 0
    while left:
        piece = journal.read(min(left, _PIECE))
        if not piece:
            raise FormatError(f"the journal ends inside the index of {masked(entry.name)}", url=entry.name)
        check, left = zlib.crc32(piece, check), left - len(piece)
        file.write(piece)
    if check != entry.check:
        raise wrong_check(entry.name)
    return entry.length
