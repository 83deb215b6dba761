"""The scanner of tar archives, fed in every way that it may be."""

from __future__ import annotations

import pickle
from contextlib import suppress

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
    piece: int,
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
        for k, key in enumerate(rows.keys.tolist()):
            members = range(int(rows.starts[k]), int(rows.starts[k + 1]))
            found.append((key, [(rows.fields[rows.field[m]], int(rows.offset[m]), int(rows.size[m])) for m in members]))
            assert found[-1][1][0][1] >= low, "the reader may have released what is before `low`"
        start = stop
        if carry:
            scanner = pickle.loads(pickle.dumps(scanner))
        if hop and not scanner.done and scanner.next_header > stop:
            target = min(scanner.next_header, len(data))
            with suppress(ValueError):  # of an extended header the body is needed
                scanner.skip(target)
                start = target
    return found, scanner.error
