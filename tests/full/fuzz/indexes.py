"""Index files and journals: damage is a FormatError, and all members are in the archive.

Checksums are put right in most inputs, so that the code after the check is reached too.
"""

from __future__ import annotations

import io
import itertools
import json
import struct
import zlib
from collections.abc import Callable, Iterator

import numpy as np
from builders.rows import listed_index
from full.fuzz.dice import Dice

from headrace._util.sample_ranges import Rows
from headrace.errors import FormatError, LimitError
from headrace.formats.compression import Frames
from headrace.formats.index import HEAD, MAGIC, MOST, VERSION, Directory, Entry, ShardIndex, check_block, read_directory
from headrace.indexes.building import index_of_one, read_journal, write_index

WHAT = "s3://bucket/train.idx"
FIELDS = ("jpg", "cls", "seg.png", "ünï", "bad\udcff", "")


def _built(data: bytes) -> None:
    made = built(Dice(data))
    packed = made.pack()
    assert listed_index(ShardIndex.unpack(packed, WHAT)) == listed_index(made)
    entry = Entry.of("s3://bucket/a.tar", made, packed)
    journal, file = io.BytesIO(index_of_one(entry, packed)), io.BytesIO()
    write_index(file, read_journal(journal)[0], journal)
    directory = read_directory(file.getvalue(), WHAT)
    start, stop, check_number = directory.block(0)
    assert len(directory) == 1
    assert file.getvalue()[start:stop] == packed
    check_block(packed, check_number, WHAT)


def _journal(data: bytes) -> None:
    file = io.BytesIO(data)
    (entries, last), end = read_journal(file), 0
    for entry in entries:
        assert end < entry.start
        end = entry.start + entry.length
    assert end == last <= len(data)
    if len({entry.name for entry in entries}) == len(entries):
        out = io.BytesIO()
        write_index(out, entries, file)
        _directory(read_directory(out.getvalue(), WHAT), len(out.getvalue()))


WAYS: tuple[Callable[[bytes], None], ...] = (
    lambda data: _shard(ShardIndex.unpack(data, WHAT)),
    lambda data: _shard(ShardIndex.unpack(_sealed(data), WHAT)),
    lambda data: _shard(ShardIndex.unpack(_sealed(_described(data)), WHAT)),
    lambda data: _directory(read_directory(data, WHAT)),
    lambda data: _directory(read_directory(_with_head(data), WHAT)),
    lambda data: _directory(read_directory(_with_head(_described(data)), WHAT)),
    _journal,
    lambda data: _journal(GOOD_RECORD + _with_head(data) + GOOD_RECORD),
    _built,
)


def seeds() -> Iterator[bytes]:
    for k in range(0, 256, 8):
        yield bytes([8]) + bytes(range(k, 256))
        index = built(Dice(bytes(range(k, 256))))
        packed = index.pack()
        body = zlib.decompress(packed[8:])
        yield from (b"\x00" + packed, b"\x01" + body, b"\x02" + _undescribed(body))
    for count in range(12):
        entries = [
            Entry(name=f"s3://a/{k:02}.tar", samples=k, members=k, nbytes=9 * k, size=k - 1, etag=str(k) * (k % 3))
            for k in range(count)
        ]
        journal, file = io.BytesIO(b"".join(map(index_of_one, entries)) + GOOD_RECORD), io.BytesIO()
        write_index(file, read_journal(journal)[0], journal)
        directory = file.getvalue()
        body = zlib.decompressobj().decompress(directory[HEAD.size + 8 :])
        yield from (b"\x03" + directory, b"\x04" + body, b"\x05" + _undescribed(body))
        yield from (b"\x06" + journal.getvalue(), b"\x07" + body)


def check(data: bytes) -> None:
    way, rest = WAYS[data[0] % len(WAYS)] if data else _journal, data[1:]
    try:
        way(rest)
    except FormatError as error:
        if way is _built or error.url is None:
            raise


def _shard(index: ShardIndex) -> None:
    rows = index.rows
    members = len(rows.offset)
    assert rows.starts[0] == 0
    assert rows.starts[-1] == members == len(rows.size) == len(rows.field)
    assert len(rows.starts) == len(rows) + 1
    assert (np.diff(rows.starts) >= 0).all()
    assert index.crc is None or len(index.crc) == members
    if members:
        assert rows.size.min() >= 0
        assert rows.field.min() >= 0
        assert rows.field.max() < len(rows.fields)
        assert (rows.offset % 512 == 0).all()
        ends = rows.offset + rows.size
        assert (ends[:-1] <= rows.offset[1:]).all()
        end = index.frames.unpacked[-1] if index.frames else index.size if index.size >= 0 else MOST
        assert ends[-1] <= end
    for first, last in itertools.pairwise(rows.starts[:100].tolist()):
        assert len(set(rows.field[first:last].tolist())) == last - first
    try:
        again = ShardIndex.unpack(index.pack(), WHAT)
    except LimitError:  # keys too long
        return
    assert listed_index(again) == listed_index(index)


def _directory(directory: Directory, size: int | None = None) -> None:
    end = 0
    for at in range(min(len(directory), 100)):
        entry = directory[at]
        assert end <= entry.start
        assert entry.length >= 0
        assert min(entry.samples, entry.members, entry.nbytes, entry.size + 1) >= 0
        end = entry.start + entry.length
        found = directory.find(entry.name)
        assert found is None or directory.names[found] == entry.name
    assert size is None or end <= size


def built(dice: Dice) -> ShardIndex:
    keys = list[bytes]()
    starts, field, offset, size = [0], list[int](), list[int](), list[int]()
    end, crc, framed = 0, dice.number(1), dice.number(3) == 0
    etag = dice.one_of((None, '"e"', "W/ü"))
    while dice.more and len(keys) < 40:
        keys.append(dice.some(dice.number(6)).rstrip(b"\0"))
        chosen = {dice.number(len(FIELDS) - 1) for _ in range(dice.number(3))}
        for number in sorted(chosen, reverse=bool(dice.number(1))):
            field.append(number)
            offset.append(end + 512 * dice.number(300))
            size.append(dice.number(70_000))
            end = offset[-1] + size[-1] + 511 & -512
        starts.append(len(field))
    rows = Rows(
        np.array(keys, np.bytes_) if keys else np.zeros(0, "S1"),
        np.array(starts, np.int64),
        np.array(field, np.int32),
        np.array(offset, np.int64),
        np.array(size, np.int64),
        FIELDS,
    )
    crcs = np.array([zlib.crc32(b"%d" % at) for at in offset], np.uint32) if crc else None
    frames = Frames(np.array([0, 700]), np.array([0, end])) if framed else None
    return ShardIndex(rows, crcs, 700 if framed else end + 1024, etag, frames)


def _sealed(body: bytes) -> bytes:
    rest = struct.pack("<I", len(body)) + zlib.compress(body, 1)
    return struct.pack("<I", zlib.crc32(rest)) + rest


def _with_head(body: bytes) -> bytes:
    sealed = _sealed(body)
    return HEAD.pack(MAGIC, VERSION, 0, len(sealed)) + sealed


def _undescribed(body: bytes) -> bytes:
    (length,) = struct.unpack_from("<I", body)
    return body[4 : 4 + length] + b"\n" + body[4 + length :]


def _described(data: bytes) -> bytes:
    """The body of a container; the counts of its arrays are made to fit where that can be."""
    text, _, arrays = data.partition(b"\n")
    try:
        said = json.loads(text)
        left = len(arrays)
        for name, (dtype, count) in said["arrays"].items():
            width = int(dtype[1:])
            said["arrays"][name][1] = min(count, left // width)
            left -= said["arrays"][name][1] * width
        text, arrays = json.dumps(said).encode(), arrays[: len(arrays) - left]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, ZeroDivisionError, OverflowError):
        pass
    return struct.pack("<I", len(text)) + text + arrays


GOOD = ShardIndex.unpack(built(Dice(bytes(range(1, 200)))).pack(), WHAT)
GOOD_RECORD = index_of_one(Entry.of("s3://a/good.tar", GOOD, GOOD.pack()), GOOD.pack())
