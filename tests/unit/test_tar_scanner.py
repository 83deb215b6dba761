"""Tar: the corpus of damaged archives, limits, memory, the fast path, and headers that contradict an index."""

from __future__ import annotations

import gc
import io
import tarfile
import weakref
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from corpus import CASES, GROUPS, Case
from corpus.parts import END, GNU, header, pax, record
from corpus.parts import member as member_of
from unit.tar_scans import URL, Found, OneByOne, scan

from headrace._util.sample_ranges import Rows
from headrace.errors import FormatError, LimitError, OptionError
from headrace.formats.limits import Limits
from headrace.formats.tar.member_check import MemberNames, misplaced
from headrace.formats.tar.samples import Grouper
from headrace.formats.tar.scanner import TarScanner

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "pax": tarfile.PAX_FORMAT, "gnu": tarfile.GNU_FORMAT}


def archive(names: Iterable[str], kind: str) -> bytes:
    with tarfile.open(fileobj=(out := io.BytesIO()), mode="w", format=FORMATS[kind]) as tar:
        for name in names:
            tar.addfile(tarfile.TarInfo(name))
    return out.getvalue()


def member(name: bytes, body: bytes = b"body") -> bytes:
    return member_of(name, body)


def test_scanner_ignores_the_prefix_field_when_the_format_is_gnu() -> None:
    data = b"".join(header(b"%d.x" % k, prefix=b"12345", magic=GNU) for k in range(9)) + END
    for kind in (TarScanner, OneByOne):
        found, error = scan(data, kind=kind)
        assert [key for key, _ in found] == [b"%d" % k for k in range(9)]
        assert error is None


def test_scanner_steps_over_bodies_that_many_buffers_hold() -> None:
    body = bytes(range(256)) * 200
    data = member(b"a.x", body) + member(b"b.x", body) + END
    scanner = TarScanner(URL)
    counts = [len(scanner.feed(data[at : at + 512], at, at + 512 == len(data))) for at in range(0, len(data), 512)]
    assert sum(counts) == 2
    assert counts[1 + len(body) // 512] == 1  # at b's header
    assert scanner.done
    assert scanner.error is None


def test_low_is_the_first_byte_still_needed() -> None:
    data = member(b"skipped", bytes(1000)) + member(b"a.x", bytes(600)) + member(b"a.y") + member(b"b.x") + END
    scanner = TarScanner(URL)
    lows = []
    for at in range(0, len(data), 512):
        scanner.feed(data[at : at + 512], at, at + 512 == len(data))
        lows.append(scanner.low // 512)
    # headers are at blocks 0, 3, 6, 8; the end mark at 10 and 11
    assert lows == [3, 3, 3, 4, 4, 4, 4, 4, 9, 9, 9, 12]


@pytest.mark.parametrize("tail", [b"\0 ", b"\x001", b"1 "])
def test_checksum_that_is_right_only_with_digits_above_seven_is_wrong(tail: bytes) -> None:
    names = (b"%d.x" % k for k in range(1000))
    block = bytearray(
        next(block for name in names if (block := header(name))[153] in b"01" and block[152] in b"1234567")
    )
    block[152] -= 1 if tail == b"\0 " else 0
    block[153] += 8 if tail == b"\0 " else 0
    block[154:156] = tail
    data = b"".join(member(b"a.%d" % k) for k in range(9)) + bytes(block) + END
    for kind in (TarScanner, OneByOne):
        _, error = scan(data, kind=kind)
        assert error is not None
        assert error.offset == 9 * 1024


@pytest.mark.parametrize(("data", "limits"), [
    (member(b"a.x", bytes(101)), Limits(member_bytes=100)),
    (b"".join(member(b"n" * 20 + b"%d.x" % k) for k in range(8)), Limits(name_bytes=20)),
    (b"".join(member(b"a.%d" % k) for k in range(9)), Limits(fields=8)),
])  # fmt: skip
def test_limits_are_those_that_were_given(data: bytes, limits: Limits) -> None:
    assert isinstance(scan(data + END, limits=limits)[1], LimitError)
    assert scan(data + END)[1] is None


@pytest.mark.parametrize("limit", ["member_bytes", "header_bytes", "name_bytes", "extension_chain", "fields"])
def test_limit_of_zero_is_refused(limit: str) -> None:
    with pytest.raises(OptionError, match=f"{limit}=0"):
        Limits(**{limit: 0})


def test_nothing_is_read_after_damage() -> None:
    scanner = TarScanner(URL)
    scanner.feed(b"?" * 512, 0, False)
    first = scanner.error
    assert first is not None
    assert scanner.done
    assert len(scanner.feed(member(b"a.x") + member(b"b.x") + END, 512, True)) == 0
    assert scanner.error is first


def test_error_does_not_keep_the_buffer() -> None:
    class Part(bytearray):
        """Can be referred to weakly."""

    part = Part(b"?" * 512)
    gone = weakref.ref(part)
    scanner = TarScanner(URL)
    scanner.feed(part, 0, True)
    del part
    gc.collect()
    assert scanner.error is not None
    assert gone() is None


def test_scanner_refuses_buffers_that_do_not_follow_one_another() -> None:
    scanner = TarScanner(URL)
    with pytest.raises(ValueError, match="follow one another"):
        scanner.feed(bytes(512), 512, False)
    with pytest.raises(ValueError, match="multiples of 512"):
        scanner.feed(bytes(500), 0, False)


@pytest.mark.parametrize("kind", FORMATS)
def test_regular_archives_are_read_by_the_fast_way(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []
    step = TarScanner._step
    monkeypatch.setattr(TarScanner, "_step", lambda self, block, at: (steps.append(at), step(self, block, at))[1])
    found, _ = scan(archive([f"d/{k:04d}.{ext}" for k in range(20) for ext in ("npy", "cls")], kind))
    assert len(found) == 20
    assert len(steps) == 2  # the end mark


@pytest.mark.parametrize("kind", FORMATS)
def test_many_regular_members_are_grouped_at_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[bytes] = []
    add = Grouper.add
    monkeypatch.setattr(Grouper, "add", lambda self, names, *rest: (added.extend(names), add(self, names, *rest))[1])
    names = [f"d.1/{k:04d}.{ext}" for k in range(300) for ext in ("Npy", "seg.png", "cls")]
    found, _ = scan(archive(names, kind))
    assert [(key, [field for field, _, _ in members]) for key, members in found] == [
        (b"d.1/%04d" % k, ["npy", "seg.png", "cls"]) for k in range(300)
    ]
    assert added == [f"d.1/{k}.{ext}".encode() for k in ("0000", "0299") for ext in ("Npy", "seg.png", "cls")]


LONG = pax(record(b"path", b"n" * 200 + b".bin")) + member(b"cut")
LONG_OF_NONE = pax(record(b"path", b"n" * 200)) + member(b"cut")


@pytest.mark.parametrize("kind", [TarScanner, OneByOne])
@pytest.mark.parametrize("refused", [member(b"c.bin", b"4" * 5000), LONG])
@pytest.mark.parametrize("piece", [512, 2048, 4096, 2**20])
def test_sample_before_a_limit_error_is_emitted(kind: type[TarScanner], refused: bytes, piece: int) -> None:
    before = member(b"a.bin", b"1") + member(b"b.bin", b"2") + member(b"b.cls", b"3")
    data = before + refused + member(b"d.bin", b"5") + END
    found, error = scan(data, piece, Limits(member_bytes=1000, name_bytes=100), kind=kind)
    assert isinstance(error, LimitError)
    assert [(key, [field for field, _, _ in row]) for key, row in found] == [(b"a", ["bin"]), (b"b", ["bin", "cls"])]


@pytest.mark.parametrize("kind", [TarScanner, OneByOne])
@pytest.mark.parametrize("refused", [
    member(b"b.txt", b"4" * 5000),  # its own
    member(b"README", b"4" * 5000),  # of no sample, as those below: the sample may continue after them
    member(b".hidden", b"4" * 5000),
    member(b"__meta__/c.bin", b"4" * 5000),
    header(b"c.bin", 5000, b"D"),
    LONG_OF_NONE,
    header(b"c.bin", 2**21, b"x"),  # an extended header: of whom, is not known
])  # fmt: skip
def test_sample_that_may_continue_after_a_limit_is_not_emitted(kind: type[TarScanner], refused: bytes) -> None:
    data = member(b"a.bin", b"1") + member(b"b.bin", b"2") + refused + member(b"b.cls", b"3") + END
    found, error = scan(data, limits=Limits(member_bytes=1000, name_bytes=100), kind=kind)
    assert isinstance(error, LimitError)
    assert [key for key, _ in found] == [b"a"]


def check(case: Case, found: Found, error: FormatError | None) -> None:
    samples = [
        (key.decode("utf-8", "surrogateescape"), {field: case.data[at : at + size] for field, at, size in members})
        for key, members in found
    ]
    assert samples == list(case.samples), case.name
    if case.damage is None:
        assert error is None, case.name
        return
    assert error is not None, case.name
    where = type(error).__name__, error.key, error.offset
    assert where == (case.damage.error, case.damage.key, case.damage.offset), case.name
    assert case.damage.text in str(error), case.name
    assert (error.url, error.stage) == (URL, "scan")
    assert f"({URL}, byte {case.damage.offset})" in str(error)


def test_corpus_has_every_case_once() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 165
    data = [case.data for case in CASES]
    assert len(set(data)) == len(data)


@pytest.mark.parametrize("group", GROUPS)
def test_scanner_emits_whole_samples_and_then_the_error(group: str) -> None:
    for case in GROUPS[group]:
        check(case, *scan(case.data))


NAMES = ["a.txt", "a.CLS", "skipped", "empty.txt", "dir/b.txt", "dir/b.cls", "p" * 90 + "/" + "n" * 90 + ".cls", "x."]
LONG_NAMES = ["ünï-日本/" * 30 + "é.Seg.Png", "l" * 300 + "/x.jpg", "not-\udcff-utf8.cls"]


def archive_with_links(kind: str, *, mtime: float = 0.5, folders: int = 4) -> tuple[memoryview, Rows]:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=FORMATS[kind], errors="surrogateescape") as tar:
        names = [f"{k}{name}" for k in range(folders) for name in NAMES + LONG_NAMES * (kind != "ustar")]
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
def test_correct_index_is_accepted(kind: str, mtime: float) -> None:
    view, rows = archive_with_links(kind, mtime=mtime)
    assert [wrong(view, rows, first, step) for first in range(len(rows.field)) for step in (1, 2, 3)] == [
        [] for _ in range(3 * len(rows.field))
    ]


@pytest.mark.parametrize("folders", [1, 4])
@pytest.mark.parametrize("kind", FORMATS)
def test_each_wrong_entry_is_detected(kind: str, folders: int) -> None:
    view, rows = archive_with_links(kind, folders=folders)
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
