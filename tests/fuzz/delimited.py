"""CSV: in whatever pieces it comes, records are those that Python's `csv` finds, or an error says why not."""

from __future__ import annotations

import csv
import io
import pickle
from collections.abc import Iterator

from fuzz.dice import Dice
from headrace.formats.delimited import CSV, TSV, Csv
from headrace.formats.format import Block
from headrace.formats.limits import Limits

LIMITS = Limits(member_bytes=300, header_bytes=200, fields=20)
PIECES = (512, 1, 7, 64, 10**6)
FORMS = (CSV, TSV, Csv(delimiter=";", quote="'"), Csv(quote=None), Csv(header=False, columns=("a", "b")))

Record = tuple[bytes, int, int, str]


def seeds() -> Iterator[bytes]:
    for k, text in enumerate(
        (
            'a,b\n1,2\n"3","4"\n',
            '\ufeffa,b\r\n"x, ""y""\n",ü\r\n\r\n1,2',
            'a\tb\n"\n\n"\t\n\t""""\n',
            "a;b\n'x;y';''''\n",
            'a,b\n5" disk,x"y"z\n"q"r,"s"t"u"\n',
            'a,b\n"never closed,1\n2,3\n',
            'a,b\n1\n1,2,3\n\0,1\n1,"' + "x" * 400 + '"\n',
            "a,a\n1,2\n",
            ",__b\n",
            "\r\n\n\na,b\n" * 20,
            "a,b\r1,2\r",
            "",
        )
    ):
        for form in range(len(FORMS)):
            yield bytes([(k + form) % len(PIECES), form]) + text.encode()


def check(data: bytes) -> None:
    dice = Dice(data)
    piece, form, text = dice.one_of(PIECES), dice.one_of(FORMS), dice.rest()
    whole = scan(form, text, max(len(text), 1))
    assert scan(form, text, piece) == whole, "in pieces"
    found, error = whole
    bodies = [text[at : at + size] for _, at, size, _ in found]
    opened: list[dict[str, object] | None] = []
    for (_, _, _, member), body in zip(found, bodies, strict=True):
        try:
            opened += form.open_block(Block("u", (member,), LIMITS), [body])
        except ValueError:
            opened.append(None)
    if found:
        many = form.open_many(Block("u", (found[0][3],), LIMITS), bodies)
        assert len(many) == len(opened) or not many
        assert all(one is None or one == alone for one, alone in zip(many, opened, strict=False))
        if None not in opened:
            assert list(many) == opened
    expected = plain(form, text)
    if expected is None:
        return
    if error is not None:
        expected = expected[: len(found)]
    assert len(expected) == len(found)
    for one, row in zip(opened, expected, strict=True):
        assert one is None or list(one.values()) == row


def scan(form: Csv, text: bytes, piece: int) -> tuple[list[Record], tuple[str, str] | None]:
    scanner, found, start = form.scanner("memory://fuzz/records", LIMITS), list[Record](), 0
    while not scanner.done:
        stop = min(start + piece, len(text))
        if start == 0:
            stop = min(max(stop, 512), len(text))  # an engine's first piece has as many
        low = scanner.low
        rows = scanner.feed(memoryview(text)[start:stop], start, stop == len(text))
        places = zip(rows.keys.tolist(), rows.offset.tolist(), rows.size.tolist(), strict=True)
        found += [(key, at, size, rows.fields[0]) for key, at, size in places]
        assert not len(rows) or int(rows.offset.min()) >= low
        start, scanner = stop, pickle.loads(pickle.dumps(scanner))
    error = scanner.error
    return found, None if error is None else (type(error).__name__, str(error))


def plain(form: Csv, data: bytes) -> list[list[str]] | None:
    """The rows behind the header, as `csv` has them; None where it refuses them, or has other ends of lines."""
    text = str(data, "utf-8", "replace").removeprefix("\ufeff")
    if "\r" in text.replace("\r\n", "") or data.count(b"\xef\xbb\xbf") > 1:
        return None
    try:
        rows = [row for row in form._layout.reader(io.StringIO(text, newline="")) if row]
    except csv.Error:
        return None
    return rows[1:] if form._layout.header else rows
