"""CSV: in whatever pieces it comes, records are those that Python's `csv` finds, or an error gives the reason."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator

from full.fuzz.dice import Dice
from full.fuzz.scanned import PIECES, scanned

from headrace.formats.delimited import CSV, TSV, Csv
from headrace.formats.format import Block
from headrace.formats.limits import Limits

LIMITS = Limits(member_bytes=300, header_bytes=200, fields=20)
URL = "memory://fuzz/records"
FORMS = (CSV, TSV, Csv(delimiter=";", quote="'"), Csv(quote=None), Csv(header=False, columns=("a", "b")))


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
    found, members, error = scanned(lambda: form.scanner(URL, LIMITS), text, piece)
    bodies = [text[at : at + size] for _, at, size in found]
    opened: list[dict[str, object] | None] = []
    for member, body in zip(members, bodies, strict=True):
        try:
            opened += form.open_block(Block("u", (member,), LIMITS), [body])
        except ValueError:
            opened.append(None)
    if found:
        many = form.open_many(Block("u", (members[0],), LIMITS), bodies)
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


def plain(form: Csv, data: bytes) -> list[list[str]] | None:
    text = str(data, "utf-8", "replace").removeprefix("\ufeff")
    if "\r" in text.replace("\r\n", "") or data.count(b"\xef\xbb\xbf") > 1:
        return None
    try:
        rows = [row for row in form._layout.reader(io.StringIO(text, newline="")) if row]
    except csv.Error:
        return None
    return rows[1:] if form._layout.header else rows
