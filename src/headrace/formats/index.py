"""Index files: the tables of shards, and a directory of them."""

from __future__ import annotations

import itertools
import json
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from headrace._util.reads import lasting
from headrace._util.sample_ranges import Rows
from headrace.errors import FormatError, LimitError
from headrace.formats.compression import Frames
from headrace.formats.json_values import as_list, as_number, as_text, as_texts
from headrace.types import Buffer, Ints

T = TypeVar("T")

MOST = 2**53
"""Maximum of all offsets, sizes and counts."""

_HEAD = struct.Struct("<II")
_LENGTH = struct.Struct("<I")
_DTYPES = {f"u{size}": np.dtype(f"<u{size}") for size in (1, 2, 4, 8)}
# Compression ratios of indexes are 2 to 10. A higher claim than this is a decompression bomb.
_RATIO_MOST = 50
_FREE_BYTES = 2**20
_BODY_MOST = 2**32 - 1
_FAR_BYTES = 2**16


def damage(what: str, why: str) -> FormatError:
    return FormatError.at(what, f"is damaged: {why}")


def smallest(values: NDArray[np.generic]) -> NDArray[np.generic]:
    """Convert `values` to the smallest unsigned type that holds them all."""
    low, high = (int(values.min()), int(values.max())) if len(values) else (0, 0)
    if low < 0:
        raise ValueError(f"{low} is negative: it is no offset, size or count")
    return values.astype(_DTYPES[np.min_scalar_type(high).str[1:]])


def pack_arrays(facts: Mapping[str, object], arrays: Mapping[str, NDArray[np.generic]]) -> bytes:
    """Pack non-negative integer `arrays` and small JSON `facts` as bytes."""
    small = {name: smallest(array) for name, array in arrays.items()}
    said = {"arrays": {name: [array.dtype.str[1:], len(array)] for name, array in small.items()}, **facts}
    text = json.dumps(said, separators=(",", ":")).encode()
    length = _LENGTH.size + len(text) + sum(array.nbytes for array in small.values())
    if length > _BODY_MOST:
        raise LimitError(f"the arrays of an index have {length} bytes, over the limit of {_BODY_MOST}: cut the shard")
    body = b"".join([_LENGTH.pack(len(text)), text, *(array.tobytes() for array in small.values())])
    packed = _compressed(body, 6)
    if length > _most(len(packed)):  # the reader would refuse it as a bomb
        packed = _compressed(body, 0)
    checked = _LENGTH.pack(length) + packed
    return _LENGTH.pack(zlib.crc32(checked)) + checked


def _compressed(body: bytes, level: int) -> bytes:
    # In long columns of numbers, distant matches cost more bits than close ones: 6.0 bytes a line instead of 6.9.
    stream = zlib.compressobj(level, wbits=9 if len(body) > _FAR_BYTES else 15)
    return stream.compress(body) + stream.flush()


def _most(packed: int) -> int:
    return max(_FREE_BYTES, _RATIO_MOST * packed)


def unpack_arrays(data: Buffer, what: str) -> tuple[dict[str, object], dict[str, NDArray[np.generic]]]:
    """Unpack the result of `pack_arrays` to facts and arrays (read-only views)."""
    body = _body(memoryview(data).cast("B"), what)
    try:
        (length,) = _LENGTH.unpack_from(body)
        facts = json.loads(body[4 : 4 + length])
        said = facts.pop("arrays").items()
    except (struct.error, ValueError, RecursionError, KeyError, AttributeError, TypeError):
        raise damage(what, "it does not state which arrays it has") from None
    arrays, at = {}, 4 + length
    for name, shape in said:
        entries = as_list(shape) or []
        dtype, count = (as_text(entries[0]), as_number(entries[1])) if len(entries) == 2 else (None, None)
        if dtype is None or dtype not in _DTYPES or count is None or count < 0:
            raise damage(what, f"its array {name!r} has the shape {str(shape)[:80]}")
        stop = at + count * _DTYPES[dtype].itemsize
        if stop > len(body):
            raise damage(what, f"its array {name!r} would end at byte {stop} of {len(body)}")
        arrays[name] = np.frombuffer(body, _DTYPES[dtype], count, at)
        at = stop
    if at != len(body):
        raise damage(what, f"its arrays end at byte {at} of {len(body)}")
    return facts, arrays


def _body(view: memoryview, what: str) -> bytes:
    if len(view) < _HEAD.size:
        raise damage(what, f"it has {len(view)} bytes, fewer than its head")
    check, length = _HEAD.unpack_from(view)
    if zlib.crc32(view[4:]) != check:
        raise damage(what, "its CRC-32 differs")
    if length > _most(len(view) - _HEAD.size):
        raise LimitError.at(
            what, f": {len(view)} bytes would unpack to {length}; the limit is {_RATIO_MOST} times as many"
        )
    unpack = zlib.decompressobj()
    try:
        body = unpack.decompress(view[_HEAD.size :], length + 1)
    except zlib.error as error:
        raise damage(what, f"it does not unpack ({error})") from None
    if len(body) != length or not unpack.eof or unpack.unused_data:
        raise damage(what, f"it does not unpack to the {length} bytes that it claims")
    return body


class Arrays:
    def __init__(self, data: Buffer, what: str) -> None:
        self.what = what
        self.facts, self.arrays = unpack_arrays(data, what)

    def has(self, name: str) -> bool:
        return name in self.arrays

    def ints(self, name: str, count: int | None = None, *, most: int = MOST) -> Ints:
        """Return the array `name`: `count` numbers up to `most`, with a sum far below 2**63."""
        array = self.arrays.get(name)
        if array is None:
            raise damage(self.what, f"it has no array {name!r}")
        if count is not None and len(array) != count:
            raise damage(self.what, f"its array {name!r} has {len(array)} entries, not {count}")
        if len(array) and (int(array.max()) > most or float(array.sum(dtype=np.float64)) > 2.0**60):
            raise damage(self.what, f"its array {name!r} has numbers that are too large")
        return array.astype(np.int64)

    def texts(self, name: str, lengths: str, count: int | None = None) -> tuple[bytes, Ints]:
        """Return the concatenated texts in the array `name`, and their ends after a 0."""
        ends = np.zeros(len(self.ints(lengths, count)) + 1, np.int64)
        np.cumsum(self.ints(lengths, count), out=ends[1:])
        text = self.arrays.get(name, np.zeros(0, np.uint16))
        if text.dtype != np.uint8 or len(text) != ends[-1]:
            raise damage(self.what, f"its texts {name!r} are not {ends[-1]} bytes long")
        return text.tobytes(), ends

    def fact(self, name: str, wanted: Callable[[object], T | None]) -> T:
        """Return a value of the JSON, converted by `wanted`: see `json_values`."""
        said = self.facts.get(name)
        value = wanted(said)
        if value is None:
            raise damage(self.what, f"its {name!r} is {str(said)[:80]!r}")
        return value

    def fact_if_any(self, name: str, wanted: Callable[[object], T | None]) -> T | None:
        """Return a value as `fact` does, or None if the JSON has null or no value."""
        return None if self.facts.get(name) is None else self.fact(name, wanted)


TAR_BLOCK = 512
"""Unit of the gaps between members of a tar archive, in bytes."""

GAP = {TAR_BLOCK: "gap", 1: "gap_bytes"}
"""Name of the array of gaps, by their unit in bytes."""

# Keys become a table as wide as the longest, so one long key among very many could take any amount of memory.
_KEY_TABLE_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, eq=False)
class ShardIndex:
    """Sample locations of a shard.

    Attributes:
        rows: The samples, in the order of the archive. Offsets are in the unpacked archive.
        crc: CRC-32C of each member's bytes. None: unknown.
        size: Bytes of the object; -1 if unknown.
        etag: The object's version when it was indexed, if the store has versions.
        frames: Frames of a compressed archive. One that must be read from its start is one frame.
        opened_bytes: Approximate bytes of all samples after decoding their blocks, if more than the bytes read.
        has_names: True if keys and fields are the names of members, as in the shard's headers.
        columns: (name, kind) of each field, if all samples have the same. Shards of a data set must agree.
    """

    rows: Rows
    crc: NDArray[np.uint32] | None
    size: int
    etag: str | None
    frames: Frames | None = None
    opened_bytes: int = 0
    columns: tuple[tuple[str, str], ...] | None = None
    has_names: bool = False

    def pack(self) -> bytes:
        """Pack the index: 5 to 10 bytes a member, half of them its checksum."""
        rows = self.rows
        unit = 1 if (rows.offset % TAR_BLOCK).any() else TAR_BLOCK
        lengths = np.strings.str_len(rows.keys).astype(np.int64)
        check_keys("this index", int(lengths.max(initial=0)), len(lengths), int(lengths.sum()))
        arrays: dict[str, NDArray[np.generic]] = {
            "key_length": lengths,
            "key_text": text_of(rows.keys, lengths),
            "members": np.diff(rows.starts),
            "field": rows.field,
            "size": rows.size,
            GAP[unit]: gaps(rows.offset, rows.size, unit),
        }
        if rows.block is not None and rows.row is not None:
            arrays["block"], arrays["row"] = rows.block, rows.row
        if self.crc is not None:
            arrays["crc"] = self.crc
        if self.frames is not None:
            arrays["frame_packed"] = np.diff(self.frames.packed, prepend=0)
            arrays["frame_unpacked"] = np.diff(self.frames.unpacked, prepend=0)
        size = None if self.size < 0 else self.size
        return pack_arrays({"size": size, "etag": lasting(self.etag), "fields": list(rows.fields)}, arrays)

    @staticmethod
    def unpack(data: Buffer, what: str) -> ShardIndex:
        """Unpack the result of `pack`."""
        arrays = Arrays(data, what)
        size, etag = arrays.fact_if_any("size", as_number), arrays.fact_if_any("etag", as_text)
        if size is not None and not 0 <= size <= MOST:
            raise damage(what, f"the object would have {size} bytes")
        if etag is not None and not etag.isprintable():
            raise damage(what, "the object's version is no text")
        frames = _frames(arrays, size) if arrays.has("frame_packed") else None
        end = int(frames.unpacked[-1]) if frames is not None else MOST if size is None else size
        rows = _rows(arrays, end)
        crc = None
        if arrays.has("crc"):
            crc = arrays.ints("crc", len(rows.offset), most=2**32 - 1).astype(np.uint32)
        return ShardIndex(rows, crc, -1 if size is None else size, etag, frames, has_names=True)


def gaps(offset: Ints, size: Ints, unit: int) -> Ints:
    """Return the gap before each member, in units of `unit` bytes, after rounding members up."""
    before = np.zeros(len(offset), np.int64)
    before[1:] = offset[:-1] + size[:-1] + (unit - 1) & -unit
    gap = offset - before
    if len(gap) and (int(gap.min()) < 0 or (gap % unit).any()):
        raise ValueError(f"members of a shard follow one another, at multiples of {unit} bytes")
    return gap // unit


def text_of(keys: NDArray[np.bytes_], lengths: Ints) -> NDArray[np.uint8]:
    table = np.ascontiguousarray(keys).view(np.uint8).reshape(len(keys), keys.dtype.itemsize)
    return table[np.arange(keys.dtype.itemsize) < lengths[:, None]]


def _rows(arrays: Arrays, end: int) -> Rows:
    what = arrays.what
    fields = as_texts(arrays.fact("fields", as_list))
    if fields is None or any(name.startswith("__") for name in fields) or len(set(fields)) < len(fields):
        raise damage(what, "the names of its fields are none")
    unit = 1 if arrays.has(GAP[1]) else TAR_BLOCK
    size = arrays.ints("size")
    gap = arrays.ints(GAP[unit], len(size), most=MOST // unit)
    blocks = gap.copy()
    blocks[1:] += (size[:-1] + (unit - 1)) // unit
    offset = np.cumsum(blocks) * unit if float(blocks.sum(dtype=np.float64)) <= MOST / unit else None
    if offset is None or (len(offset) and int(offset[-1] + size[-1]) > end):
        raise damage(what, f"a member is beyond the archive's end at {end}")
    keys = _keys(arrays)
    block = row = None
    if arrays.has("block"):
        block = arrays.ints("block", len(keys), most=max(len(arrays.ints("members")) - 1, 0))
        row = arrays.ints("row", len(keys), most=2**32)
    counts = arrays.ints("members", len(keys) if block is None else None)
    if block is not None and len(block) and not len(counts):
        raise damage(what, "its samples are rows of no blocks")
    starts = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    if starts[-1] != len(size):
        raise damage(what, f"its samples have {starts[-1]} members, and it has {len(size)}")
    field = arrays.ints("field", len(size), most=max(len(fields) - 1, 0))
    if len(field) and not fields:
        raise damage(what, "its members have no fields")
    if _has_twice(field, counts):
        raise damage(what, "a sample has a field twice")
    return Rows(keys, starts, field.astype(np.int32), offset, size, tuple(fields), block, row)


def _keys(arrays: Arrays) -> NDArray[np.bytes_]:
    text, ends = arrays.texts("key_text", "key_length")
    lengths = np.diff(ends)
    width = check_keys(arrays.what, int(lengths.max(initial=0)), len(lengths), int(lengths.sum()))
    table = np.zeros((len(lengths), width), np.uint8)
    table[np.arange(width) < lengths[:, None]] = np.frombuffer(text, np.uint8)
    keys: NDArray[np.bytes_] = table.reshape(-1).view(f"S{width}")
    if (np.strings.str_len(keys) != lengths).any():
        raise damage(arrays.what, "a key ends with a zero byte")
    return keys


def check_keys(what: str, longest: int, count: int, nbytes: int) -> int:
    """Return the width of a table of `count` keys with `nbytes` in total."""
    width = max(longest, 1)
    if width * count > max(_KEY_TABLE_BYTES, 8 * nbytes):
        raise LimitError.at(what, f": {count} keys of up to {width} bytes are over the limit")
    return width


def _has_twice(field: Ints, counts: Ints) -> bool:
    sample = np.repeat(np.arange(len(counts)), counts)
    pair = (sample << 32) + field
    if (pair[1:] > pair[:-1]).all():
        return False  # the common case: each sample has its fields in the order of their numbers
    return len(np.unique(pair)) < len(pair)


def _frames(arrays: Arrays, size: int | None) -> Frames:
    packed = np.cumsum(arrays.ints("frame_packed"))
    unpacked = np.cumsum(arrays.ints("frame_unpacked", len(packed)))
    if not len(packed) or unpacked[0] != 0 or packed[-1] > (MOST if size is None else size) or unpacked[-1] > MOST:
        raise damage(arrays.what, "its frames are in no archive")
    return Frames(packed, unpacked)


MAGIC = b"HRINDEX\n"
VERSION = 1
LEVELS = 1
HEAD = struct.Struct("<8sIIQ")
_DIRECTORY_MOST = 2**32
_CODEC = "utf-8", "surrogateescape"
_SEVERAL = -2


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A directory's entry of one shard.

    Attributes:
        name: Its address.
        samples, members: Numbers of samples and members. `members` is 0 if only samples were counted.
        nbytes: Bytes of all members together.
        size: Bytes of the object; -1 if unknown.
        etag: The object's version.
        start, length: Position of its block in the file, in bytes. A missing block has length 0.
        check: CRC-32 of the block.
    """

    name: str
    samples: int
    members: int = 0
    nbytes: int = 0
    size: int = -1
    etag: str | None = None
    start: int = 0
    length: int = 0
    check: int = 0

    @staticmethod
    def of(url: str, index: ShardIndex, block: bytes) -> Entry:
        rows = index.rows
        return Entry(
            name=url,
            samples=len(rows),
            members=len(rows.offset),
            nbytes=int(rows.size.sum()),
            size=index.size,
            etag=lasting(index.etag),
            length=len(block),
            check=zlib.crc32(block),
        )


class Texts:
    """Many strings with a common prefix in one buffer, decoded on access."""

    def __init__(self, prefix: str, text: bytes, ends: Ints) -> None:
        self._prefix, self._text, self._ends = prefix, text, ends

    def __len__(self) -> int:
        return len(self._ends) - 1

    def match(self, urls: Sequence[str]) -> bool:
        """True if `urls` are the same names in any folder. False if not checkable quickly."""
        prefix = _common(urls)
        if len(urls) != len(self) or prefix.rpartition("/")[2] != self._prefix.rpartition("/")[2]:
            return False
        ends = np.cumsum(np.fromiter(map(len, urls), np.int64, len(urls)) - len(prefix))
        text = "".join([url[len(prefix) :] for url in urls])
        return text.isascii() and text.encode() == self._text and np.array_equal(ends, self._ends[1:])

    def __iter__(self) -> Iterator[str]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, at: int) -> str:
        at = range(len(self))[at]
        return self._prefix + self._text[self._ends[at] : self._ends[at + 1]].decode(*_CODEC)


class Directory:
    """The shards of an index file and the positions of their blocks, as arrays."""

    def __init__(self, arrays: Arrays, end: int) -> None:
        self.names = Texts(arrays.fact("prefix", as_text), *arrays.texts("name_text", "name_length"))
        count = len(self.names)
        self.samples = arrays.ints("samples", count)
        self.members = arrays.ints("members", count)
        self.nbytes = arrays.ints("nbytes", count)
        self.sizes = arrays.ints("size_plus_one", count) - 1
        etags, etag_ends = arrays.texts("etag_text", "etag_length", count)
        if etags and (min(etags) < 32 or 127 in etags):
            raise damage(arrays.what, "a version has control characters in it")  # it is sent in requests
        self._etags = Texts("", etags, etag_ends)
        self._blocks = end + np.concatenate([[0], np.cumsum(arrays.ints("block_length", count))])
        self._checks = arrays.ints("block_check", count, most=2**32 - 1)

    def __len__(self) -> int:
        return len(self.names)

    def etag(self, at: int) -> str | None:
        return self._etags[at] or None

    def block(self, at: int) -> tuple[int, int, int]:
        """Return start and stop of a block (equal if members are unknown), and its CRC-32."""
        return int(self._blocks[at]), int(self._blocks[at + 1]), int(self._checks[at])

    def __getitem__(self, at: int) -> Entry:
        start, stop, check = self.block(at)
        return Entry(
            name=self.names[at],
            samples=int(self.samples[at]),
            members=int(self.members[at]),
            nbytes=int(self.nbytes[at]),
            size=int(self.sizes[at]),
            etag=self.etag(at),
            start=start,
            length=stop - start,
            check=check,
        )

    def find(self, url: str) -> int | None:
        at = int(self.find_all([url])[0])
        return at if at >= 0 else None

    def find_all(self, urls: Sequence[str]) -> Ints:
        """Return the shard number of each URL; -1 if it is missing or ambiguous.

        A shard matches by the same address, or else by the longest common end of the path, in whole segments, without
        the query. So an index stays valid when the data is copied elsewhere.
        """
        if self.names.match(urls):
            return np.arange(len(urls))
        found = np.full(len(urls), -1, np.int64)
        open_urls = list(range(len(urls)))
        for count in itertools.count():  # 0: the whole address; else the number of path segments
            asked = [(at, tail) for at in open_urls if (tail := _tail(urls[at], count)) is not None]
            if not asked:
                break
            numbers: dict[str | None, int] = {}
            for number, name in enumerate(self.names):
                tail = _tail(name, count)
                numbers[tail] = _SEVERAL if tail in numbers else number
            open_urls = []
            for at, tail in asked:
                number = numbers.get(tail, -1 if count else _SEVERAL)
                if number == _SEVERAL:
                    open_urls.append(at)
                else:
                    found[at] = number
        return found


def _tail(url: str, count: int) -> str | None:
    """Return the last `count` segments of the path, or None if there are fewer. 0: all."""
    if not count:
        return url
    if "://" in url:
        url = url.partition("?")[0].partition("#")[0]
    segments = url.rsplit("/", count)
    return "/".join(segments[-count:]) if len(segments) >= count else None


def _common(texts: Sequence[str]) -> str:
    first, last = min(texts, default=""), max(texts, default="")  # all others sort between them
    same = (a == b for a, b in zip(first, last, strict=False))
    return first[: sum(itertools.takewhile(bool, same))]


def pack_directory(entries: Sequence[Entry]) -> bytes:
    """Return the bytes before the blocks, which must follow in the order of `entries`."""
    prefix = _common([entry.name for entry in entries])
    names = [entry.name[len(prefix) :].encode(*_CODEC) for entry in entries]
    etags = [(entry.etag or "").encode(*_CODEC) for entry in entries]
    arrays = {
        "name_length": [len(name) for name in names],
        "samples": [entry.samples for entry in entries],
        "members": [entry.members for entry in entries],
        "nbytes": [entry.nbytes for entry in entries],
        "size_plus_one": [entry.size + 1 for entry in entries],
        "block_length": [entry.length for entry in entries],
        "block_check": [entry.check for entry in entries],
        "etag_length": [len(etag) for etag in etags],
    }
    texts = {"name_text": b"".join(names), "etag_text": b"".join(etags)}
    packed = pack_arrays(
        {"levels": LEVELS, "prefix": prefix},
        {name: np.array(values, np.int64) for name, values in arrays.items()}
        | {name: np.frombuffer(text, np.uint8) for name, text in texts.items()},
    )
    return HEAD.pack(MAGIC, VERSION, 0, len(packed)) + packed


def read_head(data: Buffer, what: str = "the index") -> int:
    """Return the bytes up to the directory's end. `data` has at least the first 24 bytes."""
    if len(data) < HEAD.size or bytes(data[:8]) != MAGIC:
        raise FormatError.at(what, f"is no headrace index file: it does not begin with {MAGIC!r}")
    _, version, flags, length = HEAD.unpack_from(data)
    if version != VERSION or flags:
        raise FormatError.at(
            what,
            f"is an index file of version {version}, flags {flags}; this headrace reads version {VERSION}, flags 0: "
            "install a newer headrace, or make the index again with this one",
        )
    if length > _DIRECTORY_MOST:
        raise LimitError.at(what, f": its directory would have {length} bytes, over the limit")
    return HEAD.size + int(length)


def read_directory(data: Buffer, what: str = "the index") -> Directory:
    """Parse the directory of the index file that starts with `data`."""
    end = read_head(data, what)
    if len(data) < end:
        raise damage(what, f"its directory takes {end} bytes, and there are {len(data)}")
    arrays = Arrays(memoryview(data)[HEAD.size : end], what)
    levels = arrays.fact("levels", as_number)
    if levels != LEVELS:
        raise FormatError.at(
            what, f"has {levels} levels; this headrace reads indexes of {LEVELS} level: install a newer one"
        )
    return Directory(arrays, end)


def check_block(data: Buffer, check: int, what: str) -> None:
    """Check the CRC-32 of a block."""
    if zlib.crc32(data) != check:
        raise wrong_check(what)


def wrong_check(what: str) -> FormatError:
    return damage(what, "its CRC-32 is not the one in the directory")
