"""Text: in whatever pieces it comes, lines and paragraphs are those of a reader that has all of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import get_args

from full.fuzz.dice import Dice
from full.fuzz.scanned import MARK, PIECES, Found, scanned

from headrace.formats.limits import Limits
from headrace.formats.lines import By, TextScanner

LIMITS = Limits(member_bytes=300)
URL = "memory://fuzz/text"
BYS: tuple[By, ...] = get_args(By)
BLANK = b" \t\r\v\f"


def seeds() -> Iterator[bytes]:
    texts = (b"a\nb\n\nc", MARK + b"\r\n a\r\n\t\r\nb\r\n", b"\n\n\nx\n \n \ny\nz\n\n", b"x" * 400 + b"\n", b"", b"\n",
             b"line\n" * 120, b"\xff\xfea", b"p\n" * 200 + b"\n" + b"q")  # fmt: skip
    for (k, text), by in itertools.product(enumerate(texts), range(len(BYS))):
        yield bytes([k % len(PIECES), by]) + text


def check(data: bytes) -> None:
    dice = Dice(data)
    piece, by, text = dice.one_of(PIECES), dice.one_of(BYS), dice.rest()
    found, _, error = scanned(lambda: TextScanner(URL, by, LIMITS), text, piece)
    expected = plain(by, text)
    assert found == expected[: len(found)]
    assert error is not None or len(found) == len(expected)


def plain(by: By, text: bytes) -> Found:
    at = len(MARK) if text.startswith(MARK) else 0
    if by == "file":
        return [(b"1", at, len(text) - at)]
    lines, numbered = text[at:].split(b"\n"), list[tuple[int, int, bytes]]()
    for number, line in enumerate(lines if lines[-1] else lines[:-1], 1):
        numbered.append((number, at, line))
        at += len(line) + 1
    if by == "line":
        return [(b"%d" % number, at, len(line)) for number, at, line in numbered]
    found = Found()
    for is_blank, group in itertools.groupby(numbered, lambda one: not one[2].strip(BLANK)):
        if not is_blank:
            paragraph = list(group)
            (number, first, _), (_, last, line) = paragraph[0], paragraph[-1]
            found.append((b"%d" % number, first, last + len(line) - first))
    return found
