"""An index file: a directory of shards, then a block for each shard with known members.

The directory comes first, so one request at the file's start gives the number of samples. A block is read when its
shard is first needed. `docs/reference/index_format.md` specifies the bytes.
"""

from __future__ import annotations

import itertools
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from headrace._util.reads import lasting
from headrace.errors import FormatError, LimitError
from headrace.formats.index.shard import Arrays, ShardIndex, damage, pack_arrays
from headrace.formats.json_values import as_number, as_text
from headrace.types import Buffer, Ints

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
