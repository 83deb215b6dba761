"""One zlib stream of parts that are compressed in different ways: whoever reads it sees a stream like any other.

Arrays of an index differ. Of the numbers of lines as text, zlib finds long matches far away, which cost more bits than
short ones close by: 2.2 bytes for each of 10⁶ lines, and 1.3 where it looks back no farther than 512 bytes. Sizes match
nowhere, and checksums are noise.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from typing import NamedTuple

_MEMORY_LEVEL = 9
_HEAD = b"\x78\x9c"
_LAST = b"\x03\x00"  # a block of no bytes that says that it is the last one


class Way(NamedTuple):
    """How a part is compressed: zlib's level, how far it looks back (as a power of two), and its strategy."""

    level: int
    window_bits: int
    strategy: int


STORED = Way(0, 15, zlib.Z_DEFAULT_STRATEGY)
_WAYS = (
    STORED,
    Way(6, 15, zlib.Z_HUFFMAN_ONLY),
    Way(6, 9, zlib.Z_DEFAULT_STRATEGY),
    Way(6, 15, zlib.Z_DEFAULT_STRATEGY),
)


def best_way(sample: bytes) -> Way:
    """The way that makes the fewest bytes of `sample`; of several the one that takes the least time."""
    return min(_WAYS, key=lambda way: _size(sample, way))


class StreamOfParts:
    """Writes a zlib stream, part by part; what it holds does not grow with them.

    Attributes:
        size: bytes that were written.
    """

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write, self._check, self.size = write, zlib.adler32(b""), 0
        self._put(_HEAD)

    def part(self, pieces: Iterable[bytes], way: Way) -> None:
        """Append what `pieces` are together."""
        compressor = _compressor(way)
        for piece in pieces:
            self._check = zlib.adler32(piece, self._check)
            self._put(compressor.compress(piece))
        self._put(compressor.flush(zlib.Z_FULL_FLUSH))  # to a byte's end: the next part begins there

    def end(self) -> None:
        """Nothing follows."""
        self._put(_LAST + self._check.to_bytes(4, "big"))

    def _put(self, data: bytes) -> None:
        self._write(data)
        self.size += len(data)


def _size(sample: bytes, way: Way) -> int:
    compressor = _compressor(way)
    return len(compressor.compress(sample)) + len(compressor.flush())


def _compressor(way: Way) -> zlib._Compress:
    return zlib.compressobj(way.level, zlib.DEFLATED, -way.window_bits, _MEMORY_LEVEL, way.strategy)
