"""Results of scanners of lines, for whole texts and pieces."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence

from headrace._util.sample_ranges import Scanner
from headrace.errors import LimitError

PIECES = (512, 1, 7, 64, 10**6)
"""Sizes of pieces to choose from."""

MARK = b"\xef\xbb\xbf"
"""The byte order mark of UTF-8."""

Found = list[tuple[bytes, int, int]]
"""Key, place and size of each line."""


Result = tuple[Found, Sequence[str], tuple[str, str] | None]
"""The lines, their fields, and type and text of the error that ends the text."""


def scanned(new: Callable[[], Scanner], text: bytes, piece: int, *, first: int = 512) -> Result:
    """The result for the whole text, which is that for pieces.

    Args:
        new: makes a scanner.
        text: all of it.
        piece: size of the pieces.
        first: size of the first piece if it is larger. An engine's first piece is never shorter.
    """
    whole = _scanned(new(), text, max(len(text), 1), first)
    assert _scanned(new(), text, piece, first) == whole, "in pieces"
    return whole


def _scanned(scanner: Scanner, text: bytes, piece: int, first: int) -> Result:
    """The scanner is pickled between any two pieces. The text of a limit error is only where."""
    found, fields, start = Found(), list[str](), 0
    while not scanner.done:
        stop = min(start + piece, len(text))
        if start == 0:
            stop = min(max(stop, first), len(text))
        low = scanner.low
        rows = scanner.feed(memoryview(text)[start:stop], start, stop == len(text))
        found += zip(rows.keys.tolist(), rows.offset.tolist(), rows.size.tolist(), strict=True)
        fields += [rows.fields[number] for number in rows.field.tolist()]
        assert not len(rows) or int(rows.offset.min()) >= low
        start, scanner = stop, pickle.loads(pickle.dumps(scanner))
    error = scanner.error
    if error is None:
        return found, fields, None
    text_of = str(error)
    if isinstance(error, LimitError):  # how much too long something is depends on how much of it has come
        text_of = text_of[text_of.index(" (") :]
    return found, fields, (type(error).__name__, text_of)
