"""Text: in whatever pieces it comes, lines and paragraphs are those of a reader that has all of it."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator
from typing import get_args

from fuzz.dice import Dice
from headrace.formats.limits import Limits
from headrace.formats.plain_text import By, TextScanner

LIMITS = Limits(member_bytes=300)
PIECES = (512, 1, 7, 64, 10**6)
BYS: tuple[By, ...] = get_args(By)
BLANK = b" \t\r\v\f"
MARK = b"\xef\xbb\xbf"

Found = list[tuple[bytes, int, int]]


def seeds() -> Iterator[bytes]:
    texts = (b"a\nb\n\nc", MARK + b"\r\n a\r\n\t\r\nb\r\n", b"\n\n\nx\n \n \ny\nz\n\n", b"x" * 400 + b"\n", b"", b"\n",
             b"line\n" * 120, b"\xff\xfea", b"p\n" * 200 + b"\n" + b"q")  # fmt: skip
    for (k, text), by in itertools.product(enumerate(texts), range(len(BYS))):
        yield bytes([k % len(PIECES), by]) + text


def check(data: bytes) -> None:
    dice = Dice(data)
    piece, by, text = dice.one_of(PIECES), dice.one_of(BYS), dice.rest()
    whole = scan(by, text, max(len(text), 1))
    pieces = scan(by, text, piece)
    found, error = whole
    assert pieces == whole
    expected = plain(by, text)
    assert found == expected[: len(found)]
    assert error is not None or len(found) == len(expected)


def scan(by: By, text: bytes, piece: int) -> tuple[Found, str | None]:
    scanner, found, start = TextScanner("memory://fuzz/text", by, LIMITS), Found(), 0
    while not scanner.done:
        stop = min(start + piece, len(text))
        if start == 0:
            stop = min(max(stop, 512), len(text))  # an engine's first piece has as many
        low = scanner.low
        rows = scanner.feed(memoryview(text)[start:stop], start, stop == len(text))
        found += zip(rows.keys.tolist(), rows.offset.tolist(), rows.size.tolist(), strict=True)
        assert not len(rows) or int(rows.offset.min()) >= low
        start, scanner = stop, pickle.loads(pickle.dumps(scanner))
    return found, None if scanner.error is None else str(scanner.error)


def plain(by: By, text: bytes) -> Found:
    at, found, paragraph = len(MARK) if text.startswith(MARK) else 0, Found(), list[tuple[int, int, int]]()
    if by == "file":
        return [(b"1", at, len(text) - at)]
    lines = text[at:].split(b"\n")
    for number, line in enumerate(lines if lines[-1] else lines[:-1], 1):
        if by == "line":
            found.append((str(number).encode(), at, len(line)))
        elif line.strip(BLANK):
            paragraph.append((number, at, at + len(line)))
        if paragraph and not line.strip(BLANK):
            found.append((str(paragraph[0][0]).encode(), paragraph[0][1], paragraph[-1][2] - paragraph[0][1]))
            paragraph = []
        at += len(line) + 1
    if paragraph:
        found.append((str(paragraph[0][0]).encode(), paragraph[0][1], paragraph[-1][2] - paragraph[0][1]))
    return found
