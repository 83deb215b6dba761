"""Lines of JSON: in whatever pieces they come, they are those between newlines, and each opens or is a ValueError."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator

from fuzz.dice import Dice
from headrace.formats.format import Block
from headrace.formats.json_lines import JSON_LINES, LineScanner
from headrace.formats.limits import Limits

LIMITS = Limits(member_bytes=300)
URL = "memory://fuzz/lines"
PIECES = (512, 1, 7, 64, 10**6)
MARK = b"\xef\xbb\xbf"

Found = list[tuple[bytes, int, int]]


def seeds() -> Iterator[bytes]:
    for k, text in enumerate(
        (
            b'{"a": 1}\n{"b": [1, 2.5, null]}\n',
            b'{"a": "' + "grüße".encode() + b'"}\r\n\n  \n{"c": {}}',
            MARK + b'{"a": 1}\n' * 60,
            b'{"long": "' + b"x" * 400 + b'"}\n{}\n',
            b"\n\n" + b'{"n": 1e999, "n": -0}\n[1]\n"x"\nnull',
            b'{"a":' * 40 + b"1" + b"}" * 40,
            b"[\n{},\n{}\n]",
            b"",
        )
    ):
        for piece in range(len(PIECES)):
            yield bytes([(k + piece) % len(PIECES)]) + text


def check(data: bytes) -> None:
    dice = Dice(data)
    piece, text = dice.one_of(PIECES), dice.rest()
    whole = scan(text, max(len(text), 1))
    pieces = scan(text, max(piece, 1) if len(text) < 512 else max(piece, 64))
    assert pieces == whole, "in pieces"
    found, error = whole
    expected = plain(text)
    if error is None:
        assert found == expected
    else:
        assert found == expected[: len(found)], "all before what is wrong"
        assert not found or error[0] == "LimitError"
    for _, at, size in found:
        try:
            (sample,) = JSON_LINES.open_block(Block("u", ("line",), LIMITS), [text[at : at + size]])
        except ValueError:
            assert not any(JSON_LINES.open_many(Block("u", ("line",), LIMITS), [text[at : at + size]]))
            continue
        assert sample == json.loads(text[at : at + size]) or sample != sample


def scan(text: bytes, piece: int) -> tuple[Found, tuple[str, str] | None]:
    scanner, found, start = LineScanner(URL, LIMITS), Found(), 0
    while not scanner.done:
        stop = min(start + piece, len(text))
        if start == 0:
            stop = min(max(stop, 512), len(text))  # an engine's first piece has as many
        low = scanner.low
        rows = scanner.feed(memoryview(text)[start:stop], start, stop == len(text))
        found += zip(rows.keys.tolist(), rows.offset.tolist(), rows.size.tolist(), strict=True)
        assert not len(rows) or int(rows.offset.min()) >= low
        start, scanner = stop, pickle.loads(pickle.dumps(scanner))
    error = scanner.error
    return found, None if error is None else (type(error).__name__, str(error))


def plain(text: bytes) -> Found:
    """The lines up to one that is too long."""
    found, at = Found(), len(MARK) if text.startswith(MARK) else 0
    for number, line in enumerate(text[at:].split(b"\n"), 1):
        if len(line) > LIMITS.member_bytes:
            break
        if line.strip():
            found.append((str(number).encode(), at, len(line)))
        at += len(line) + 1
    return found
