"""Places in MP4 files at which a reader could go wrong."""

import struct
from collections.abc import Iterator

_WITH_BOXES = (b"moof", b"traf", b"moov", b"trak", b"mvex", b"mdia", b"minf", b"stbl", b"edts", b"dinf")


def places_of_boxes(data: bytes, begin: int = 0, stop: int | None = None) -> Iterator[int]:
    """The beginning of each box, the middle of its header, its body, and its last byte."""
    at, stop = begin, len(data) if stop is None else stop
    while at < stop:
        size, kind = struct.unpack_from(">I4s", data, at)
        yield from (at, at + 3, at + 8, at + size - 1)
        if kind in _WITH_BOXES:
            yield from places_of_boxes(data, at + 8, at + size)
        at += size
