"""Headers compared with an index: a right index passes for any writer, and each wrong entry is found."""

from __future__ import annotations

import io
import tarfile
from dataclasses import replace

import numpy as np
import pytest

from headrace._util.sample_ranges import Rows
from headrace.formats.tar.member_check import MemberNames, misplaced
from headrace.formats.tar.scanner import TarScanner

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "pax": tarfile.PAX_FORMAT, "gnu": tarfile.GNU_FORMAT}
NAMES = ["a.txt", "a.CLS", "skipped", "empty.txt", "dir/b.txt", "dir/b.cls", "p" * 90 + "/" + "n" * 90 + ".cls", "x."]
LONG = ["ünï-日本/" * 30 + "é.Seg.Png", "l" * 300 + "/x.jpg", "not-\udcff-utf8.cls"]


def archive(kind: str, *, mtime: float = 0.5, folders: int = 4) -> tuple[memoryview, Rows]:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=FORMATS[kind], errors="surrogateescape") as tar:
        names = [f"{k}{name}" for k in range(folders) for name in NAMES + LONG * (kind != "ustar")]
        for k, name in enumerate(names):
            member = tarfile.TarInfo(name)
            member.size, member.mtime = 0 if "empty" in name else 30 * k + 1, mtime
            tar.addfile(member, io.BytesIO(bytes(member.size)))
            link = tarfile.TarInfo(f"link-{k}.txt")
            link.type, link.linkname = tarfile.SYMTYPE, "a.txt"
            tar.addfile(link)
    scanner = TarScanner("")
    rows = scanner.feed(out.getbuffer(), 0, True)
    assert scanner.error is None
    return out.getbuffer(), rows


def wrong(view: memoryview, rows: Rows, first: int = 0, step: int = 1) -> list[int]:
    begin = int(rows.offset[first])
    some = np.arange(first, len(rows.field), step)
    found = misplaced(view[begin:], MemberNames.of(rows, some), rows.offset[some] - begin, rows.size[some])
    return [first + k * step for k in found]


@pytest.mark.parametrize("mtime", [0, 0.5])
@pytest.mark.parametrize("kind", FORMATS)
def test_right_index_is_not_contradicted(kind: str, mtime: float) -> None:
    view, rows = archive(kind, mtime=mtime)
    assert [wrong(view, rows, first, step) for first in range(len(rows.field)) for step in (1, 2, 3)] == [
        [] for _ in range(3 * len(rows.field))
    ]


@pytest.mark.parametrize("folders", [1, 4])
@pytest.mark.parametrize("kind", FORMATS)
def test_each_wrong_entry_is_found(kind: str, folders: int) -> None:
    view, rows = archive(kind, folders=folders)
    for k in range(1, len(rows.field)):
        longer, nearer = rows.size.copy(), rows.offset.copy()
        longer[k] += 1
        nearer[k] -= 512
        other = rows.field.copy()
        other[k] = (other[k] + 1) % len(rows.fields)
        assert k in wrong(view, replace(rows, size=longer))
        assert k in wrong(view, replace(rows, offset=nearer))
        assert wrong(view, replace(rows, field=other)) == [k]
    assert wrong(view, replace(rows, offset=rows.offset + 1)) == list(range(1, len(rows.field)))
    keys = np.roll(rows.keys, 1)
    assert wrong(view, replace(rows, keys=keys)) == list(range(1, len(rows.field)))
