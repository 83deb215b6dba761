"""Lines of JSON: in whatever pieces they come, they are those between newlines, and each opens or is a ValueError."""

from __future__ import annotations

import json
from collections.abc import Iterator

from full.fuzz.dice import Dice
from full.fuzz.scanned import MARK, PIECES, Found, scanned

from headrace.formats.format import Block
from headrace.formats.limits import Limits
from headrace.formats.lines import JSON_LINES, JsonLineScanner

LIMITS = Limits(member_bytes=300)
URL = "memory://fuzz/lines"


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
    piece = piece if len(text) < 512 else max(piece, 64)
    found, _, error = scanned(lambda: JsonLineScanner(URL, LIMITS), text, piece)
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


def plain(text: bytes) -> Found:
    found, at = Found(), len(MARK) if text.startswith(MARK) else 0
    for number, line in enumerate(text[at:].split(b"\n"), 1):
        if len(line) > LIMITS.member_bytes:
            break
        if line.strip():
            found.append((str(number).encode(), at, len(line)))
        at += len(line) + 1
    return found
