"""The scanner of tar archives, fed in every way that it may be."""

from __future__ import annotations

import pickle
from contextlib import suppress

from builders.rows import listed

from headrace.errors import FormatError
from headrace.formats.limits import DEFAULTS, Limits
from headrace.formats.tar.scanner import TarScanner

URL = "s3://bucket/train.tar"

Found = list[tuple[bytes, list[tuple[str, int, int]]]]
"""Samples: the key, and field, offset and size of each member."""


class OneByOne(TarScanner):
    """The general way alone."""

    longest_run = 0


def scan(
    data: bytes,
    piece: int = 2**62,
    limits: Limits = DEFAULTS,
    *,
    kind: type[TarScanner] = TarScanner,
    carry: bool = False,
    hop: bool = False,
) -> tuple[Found, FormatError | None]:
    scanner, found, start = kind(URL, limits), Found(), 0
    while not scanner.done:
        stop, low = min(start + piece, len(data)), scanner.low
        rows = scanner.feed(memoryview(data)[start:stop], start, stop == len(data))
        assert int(rows.offset.min(initial=low)) >= low, "the reader may have released what is before `low`"
        found += listed(rows)
        start = stop
        if carry:
            scanner = pickle.loads(pickle.dumps(scanner))
        if hop and not scanner.done and scanner.next_header > stop:
            target = min(scanner.next_header, len(data))
            with suppress(ValueError):  # of an extended header the body is needed
                scanner.skip(target)
                start = target
    return found, scanner.error
