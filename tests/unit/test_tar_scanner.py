"""The scanner finds what `tarfile` wrote, says what is damaged, and never gives a sample that is not known whole."""

from __future__ import annotations

import gc
import io
import itertools
import pickle
import tarfile
import weakref
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.errors import FormatError, LimitError, OptionError
from headrace.formats.limits import Limits
from headrace.formats.tar import regular as tar_regular
from headrace.formats.tar.samples import Grouper
from headrace.formats.tar.scanner import TarScanner
from headrace.rows import Rows

URL = "s3://bucket/train.tar?X-Amz-Signature=abc"
Sample = tuple[bytes, dict[str, bytes]]
Found = tuple[list[tuple[bytes, list[tuple[str, int, int]]]], tuple[str, str, object, int | None] | None]
FORMATS = {"ustar": tarfile.USTAR_FORMAT, "pax": tarfile.PAX_FORMAT, "gnu": tarfile.GNU_FORMAT}


class OneByOne(TarScanner):
    """The general way alone."""

    longest_run = 0


def archive(members: Iterable[tuple[str, bytes]], kind: str = "ustar", **pax: str) -> bytes:
    out = io.BytesIO()
    with tarfile.open(
        fileobj=out, mode="w", format=FORMATS[kind], errors="surrogateescape", pax_headers=pax or None
    ) as tar:
        for name, body in members:
            info = tarfile.TarInfo(name)
            info.size = len(body)
            tar.addfile(info, io.BytesIO(body))
    return out.getvalue()


def header(
    name: bytes,
    size: int | bytes = 0,
    kind: bytes = b"0",
    *,
    signed: bool = False,
    prefix: bytes = b"",
    magic: bytes = b"ustar\x0000",
) -> bytes:
    size_field = b"%011o\0" % size if isinstance(size, int) else size
    block = bytearray(
        name.ljust(100, b"\0") + b"0000644\0" + b"0000000\0" * 2 + size_field + b"00000000000\0" + b" " * 8 + kind
    )
    block += bytes(100) + magic + bytes(80) + prefix
    block += bytes(512 - len(block))
    total = sum(block) - (256 * sum(byte >= 128 for byte in block) if signed else 0)
    block[148:156] = b"%06o\0 " % total
    return bytes(block)


def padded(body: bytes) -> bytes:
    return body + bytes(-len(body) % 512)


def member(name: bytes, body: bytes = b"body", kind: bytes = b"0") -> bytes:
    return header(name, len(body), kind) + padded(body)


def pax(records: bytes, kind: bytes = b"x") -> bytes:
    return member(b"pax", records, kind)


def record(key: bytes, value: bytes) -> bytes:
    rest = b" " + key + b"=" + value + b"\n"
    length = len(rest)
    while len(b"%d" % length) + len(rest) != length:
        length = len(b"%d" % length) + len(rest)
    return b"%d" % length + rest


END = bytes(1024)
PLAIN = [(f"d/{k:04d}.{ext}", bytes([k % 251]) * (k * 37 % 1500)) for k in range(20) for ext in ("npy", "cls")]


def scan(data: bytes, boundaries: Sequence[int] = (), kind: type[TarScanner] = TarScanner, **limits: int) -> Found:
    scanner = kind(URL, Limits(**limits))
    found = []
    bounds = [0, *boundaries, len(data)]
    for number, (start, stop) in enumerate(itertools.pairwise(bounds)):
        found += listed(scanner.feed(memoryview(data)[start:stop], start, number == len(boundaries)))
    assert scanner.done
    error = scanner.error
    return found, error and (type(error).__name__, str(error), error.key, error.offset)


def listed(rows: Rows) -> list[tuple[bytes, list[tuple[str, int, int]]]]:
    members = [
        (rows.fields[field], offset, size)
        for field, offset, size in zip(rows.field.tolist(), rows.offset.tolist(), rows.size.tolist(), strict=True)
    ]
    return [(key, members[rows.starts[k] : rows.starts[k + 1]]) for k, key in enumerate(rows.keys.tolist())]


def samples(data: bytes, boundaries: Sequence[int] = (), **limits: int) -> list[Sample]:
    found, error = scan(data, boundaries, **limits)
    assert error is None
    return [(key, {field: data[offset : offset + size] for field, offset, size in row}) for key, row in found]


def damage(data: bytes, **limits: int) -> FormatError:
    scanner = TarScanner(URL, Limits(**limits))
    scanner.feed(data, 0, True)
    assert scanner.error is not None
    return scanner.error


def keys(data: bytes) -> list[bytes]:
    """Keys of the samples before the damage."""
    return [key for key, _ in scan(data)[0]]


def by_tarfile(data: bytes) -> list[Sample]:
    """What WebDataset makes of the members that `tarfile` reads."""
    groups: list[Sample] = []
    with tarfile.open(fileobj=io.BytesIO(data), encoding="utf-8", errors="surrogateescape") as tar:
        for info in tar:
            folder, slash, base = info.name.rpartition("/")
            stem, dot, field = base.partition(".")
            if not info.isreg() or not stem or not dot:
                continue
            key = (folder + slash + stem).encode("utf-8", "surrogateescape")
            if not groups or groups[-1][0] != key:
                groups.append((key, {}))
            body = tar.extractfile(info)
            assert body is not None
            groups[-1][1][field.lower()] = body.read()
    return groups


# what is found


@pytest.mark.parametrize("kind", FORMATS)
def test_scanner_finds_what_tarfile_wrote(kind: str) -> None:
    data = archive(PLAIN, kind)
    assert samples(data) == by_tarfile(data)
    assert len(samples(data)) == 20


@pytest.mark.parametrize(("kind", "name"), [
    ("ustar", "p" * 120 + "/" + "n" * 90 + ".jpg"),
    ("gnu", "l" * 3000 + "/x.jpg"),
    ("gnu", "long-with-ünï/" * 30 + "é.SEG.PNG"),
    ("pax", "l" * 3000 + "/x.jpg"),
    ("pax", "ünï-日本/" * 30 + "é.Seg.Png"),
    ("pax", "../../etc/passwd.txt"),
    ("gnu", "/absolute/./x.txt"),
    ("gnu", "not-\udcff\udcfe-utf8.cls"),
])  # fmt: skip
def test_scanner_keeps_names_as_tarfile_does_when_they_are_unusual(kind: str, name: str) -> None:
    data = archive([("before.cls", b"1"), (name, b"body"), ("after.cls", b"2")], kind)
    assert samples(data) == by_tarfile(data)
    assert len(samples(data)) == 3


def test_scanner_groups_members_as_webdataset_does() -> None:
    names = ["a/b.seg.png", "a/b.JSON", "a/c.d/e.txt", "a/.hidden", "noext", "dir.d/noext", "a/c.cls", "a/b.cls", "x."]
    data = archive([(name, name.encode()) for name in [*names, "__meta.x__"]])
    assert samples(data) == [
        (b"a/b", {"seg.png": b"a/b.seg.png", "json": b"a/b.JSON"}),
        (b"a/c.d/e", {"txt": b"a/c.d/e.txt"}),
        (b"a/c", {"cls": b"a/c.cls"}),
        (b"a/b", {"cls": b"a/b.cls"}),
        (b"x", {"": b"x."}),
    ]


@pytest.mark.parametrize("kind", [b"1", b"2", b"3", b"4", b"5", b"6"])
def test_scanner_passes_over_members_without_body_when_their_header_tells_a_size(kind: bytes) -> None:
    data = member(b"a.x") + header(b"a.link", 4096, kind) + member(b"a.y") + END
    assert samples(data) == [(b"a", {"x": b"body", "y": b"body"})]


@pytest.mark.parametrize("kind", [b"0", b"\0", b"7"])
def test_scanner_takes_every_type_of_regular_member(kind: bytes) -> None:
    assert samples(member(b"a.x", b"1", kind) + END) == [(b"a", {"x": b"1"})]


def test_scanner_reads_sizes_in_base_256() -> None:
    data = header(b"a.x", b"\x80" + (700).to_bytes(11, "big")) + padded(b"z" * 700) + END
    assert samples(data) == [(b"a", {"x": b"z" * 700})]


def test_scanner_reads_sizes_that_spaces_pad() -> None:
    assert samples(header(b"a.x", b"          4 ") + padded(b"body") + END) == [(b"a", {"x": b"body"})]


def test_scanner_accepts_the_historical_signed_checksum() -> None:
    data = header("é.x".encode(), 1, signed=True) + padded(b"1") + END
    assert samples(data) == [("é".encode(), {"x": b"1"})]


def test_scanner_ignores_the_prefix_field_when_the_format_is_gnu() -> None:
    data = b"".join(header(b"%d.x" % k, prefix=b"12345", magic=b"ustar  \0") for k in range(9)) + END
    assert keys(data) == [b"%d" % k for k in range(9)]
    assert scan(data, kind=OneByOne) == scan(data)


def test_pax_size_goes_before_the_size_in_the_header() -> None:
    data = pax(record(b"size", b"600")) + header(b"a.x", 0) + padded(b"s" * 600) + member(b"b.x") + END
    assert samples(data) == [(b"a", {"x": b"s" * 600}), (b"b", {"x": b"body"})]


def test_pax_records_hold_for_one_member_only() -> None:
    data = pax(record(b"path", b"long.x")) + member(b"short.x") + member(b"other.x") + END
    assert [key for key, _ in samples(data)] == [b"long", b"other"]


def test_global_pax_headers_are_ignored_when_they_name_no_member() -> None:
    data = archive([("a.x", b"1")], "pax", comment="0123abc", **{"SCHILY.xattr.user.ünï": "ü"})
    assert samples(data) == [(b"a", {"x": b"1"})]


@pytest.mark.parametrize("name", [b"path", b"size"])
def test_global_pax_headers_are_refused_when_they_rename_or_resize_members(name: bytes) -> None:
    error = damage(pax(record(name, b"1"), b"g") + member(b"a.x") + END)
    assert f"global pax header gives all members one {name.decode()}" in str(error)


def test_scanner_ignores_what_follows_two_zero_blocks() -> None:
    data = member(b"a.x") + END + b"garbage" * 200
    assert samples(data) == [(b"a", {"x": b"body"})]
    assert samples(data, [1024 + 1024]) == [(b"a", {"x": b"body"})]


def test_scanner_accepts_one_zero_block_when_it_is_the_last() -> None:
    assert samples(member(b"a.x") + bytes(512)) == [(b"a", {"x": b"body"})]


def test_scanner_finds_no_sample_when_the_archive_holds_no_member() -> None:
    assert samples(archive([])) == []


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


# damage


def test_every_truncation_is_found_and_no_sample_is_given_that_is_not_whole() -> None:
    members = [("a.x", b"1" * 700), ("a.y", b"2"), ("b.x" + "l" * 200, b"3" * 513), ("c.x", b""), ("d.x", b"4")]
    for kind in ("pax", "gnu"):
        whole = archive(members, kind)
        end = len(whole.rstrip(b"\0")) // 512 * 512 + 512
        complete = by_tarfile(whole)
        for length in [*range(0, end + 1, 64), *(at + d for at in range(512, end, 512) for d in (-1, 1)), end]:
            found, error = scan(whole[:length])
            assert error is not None, length
            name, text, _, offset = error
            assert name == "FormatError"
            assert (offset, "truncated" in text) == (length, True) if length else "is empty" in text
            given_ = [(k, {f: whole[o : o + s] for f, o, s in row}) for k, row in found]
            assert given_ == complete[: len(given_)]
            assert len(given_) < len(complete)
        assert scan(whole[: end + 512])[1] is None


def test_truncation_names_the_member_whose_body_is_cut() -> None:
    error = damage((member(b"a.x") + member(b"dir/b.x", bytes(5000)))[:3000])
    assert (error.key, error.offset, error.stage) == ("dir/b", 3000, "scan")
    assert "'dir/b.x', 5000 bytes from byte 1536 on" in str(error)
    assert error.url is not None
    assert "abc" not in error.url + str(error)


def test_truncation_keeps_the_samples_behind_which_another_began() -> None:
    assert keys((member(b"a.x") + member(b"b.x") + member(b"c.x"))[:-512]) == [b"a", b"b"]
    assert keys(member(b"a.x") + member(b"b.x")) == [b"a"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMATS)
def test_every_flipped_bit_of_a_header_is_found_or_changes_nothing(kind: str) -> None:
    data = archive([(f"{k}.cls", b"1") for k in range(6)], kind)
    good = scan(data)
    at = 2 * 1024
    changes_nothing = []
    for bit in range(512 * 8):
        flipped = bytearray(data)
        flipped[at + bit // 8] ^= 1 << bit % 8
        found, error = scan(bytes(flipped))
        if error is None:
            assert found == good[0]
            changes_nothing.append(bit // 8)
        else:
            assert (error[3], [key for key, _ in found]) == (at, [b"0"])
    assert all(148 <= byte < 156 for byte in changes_nothing)  # zero or space around the checksum's digits


@pytest.mark.parametrize("runs", [TarScanner, OneByOne])
def test_wrong_checksum_names_its_offset_when_it_is_in_the_middle(runs: type[TarScanner]) -> None:
    data = bytearray(b"".join(member(b"%d.x" % k) for k in range(9)) + END)
    data[5 * 1024 + 3] ^= 1
    found, error = scan(bytes(data), kind=runs)
    assert [key for key, _ in found] == [b"0", b"1", b"2", b"3"]  # 4 may have gone on in the damaged member
    assert error is not None
    assert error[3] == 5 * 1024
    assert "checksum" in error[1]


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
    assert damage(data).offset == 9 * 1024
    assert scan(data) == scan(data, kind=OneByOne)


@pytest.mark.parametrize("size", [
    b"-0000000001\0", b"0000000008\0\0", b"12 34567890\0", bytes(12), b" " * 12, b"0x000000010\0", b"\xff" * 12,
    b"\xff" * 11 + b"\x9c", b"0_1        \0", b"+0000000001\0", b"00000000001\"", b"00000000001\x02",
])  # fmt: skip
def test_bad_size_is_an_error_that_names_the_member(size: bytes) -> None:
    for before in (0, 9):
        error = damage(b"".join(member(b"%d.y" % k) for k in range(before)) + header(b"k/a.x", size) + END)
        assert not isinstance(error, LimitError)
        assert "no size" in str(error)
        assert (error.key, error.offset) == ("k/a", before * 1024)


@pytest.mark.parametrize(("data", "limits"), [
    (header(b"a.x", 2**30 + 1), {}),
    (header(b"a.x", b"\x80" + (2**70).to_bytes(11, "big")), {}),
    (header(b"a.x", b"\xbf" + b"\xff" * 11), {}),
    (pax(record(b"size", b"%d" % 2**41)) + header(b"a.x"), {}),
    (member(b"a.x", bytes(101)), {"member_bytes": 100}),
    (header(b"pax", 2**20 + 1, b"x"), {}),
    (header(b"long", 2**20 + 1, b"L"), {}),
    (header(b"long", 2**20 + 1, b"K"), {}),
    (pax(record(b"path", b"n" * 4096 + b".x")) + header(b"a.x"), {}),
    (member(b"long", b"n" * 4096 + b".x\0", b"L") + header(b"a.x"), {}),
    (b"".join(member(b"n" * 20 + b"%d.x" % k) for k in range(8)), {"name_bytes": 20}),
    (pax(record(b"mtime", b"1")) * 17 + header(b"a.x"), {}),
    (b"".join(member(b"a.%d" % k) for k in range(9)), {"fields": 8}),
    (b"".join(header(b"a.%d" % k) for k in range(1001)), {}),
])  # fmt: skip
def test_what_is_over_a_limit_is_an_error_that_says_so(data: bytes, limits: dict[str, int]) -> None:
    error = damage(data + END, **limits)
    assert isinstance(error, LimitError)
    assert "limit" in str(error)


def test_what_is_at_a_limit_is_read() -> None:
    data = pax(record(b"mtime", b"1")) * 15 + pax(record(b"path", b"n" * 4094 + b".x")) + header(b"a.x") + END
    assert len(samples(data)) == 1
    assert len(samples(b"".join(member(b"a.%d" % k) for k in range(8)) + END, fields=8)[0][1]) == 8


@pytest.mark.parametrize("limit", ["member_bytes", "header_bytes", "name_bytes", "extension_chain", "fields"])
def test_limits_refuse_what_is_no_bound(limit: str) -> None:
    with pytest.raises(OptionError, match=f"{limit}=0"):
        Limits(**{limit: 0})


@pytest.mark.parametrize("records", [
    b"0 a=b\n", b"5 a=b\n", b"7 a=b\n", b"99 a=b\n", b"6 abc\n", b"6 =ab\n", b"a=b\n", b"-6 a=b\n", b"6 a=bX",
    b"9" * 30_000, b"\0" * 8 + b"6 a=b\n", b" 6 a=b\n", b"3 \n",
])  # fmt: skip
def test_damaged_pax_records_are_an_error(records: bytes) -> None:
    error = damage(pax(records) + member(b"a.x") + END)
    assert "pax header is damaged" in str(error)
    assert error.offset == 512


def test_pax_size_that_is_no_number_is_an_error() -> None:
    assert "no size" in str(damage(pax(record(b"size", b"-1")) + member(b"a.x") + END))
    assert "no size" in str(damage(pax(record(b"size", b"1" * 5000)) + member(b"a.x") + END))


def test_pax_path_with_a_zero_byte_is_an_error() -> None:
    assert "zero byte" in str(damage(pax(record(b"path", b"a\0.x")) + member(b"a.x") + END))


@pytest.mark.parametrize("data", [
    member(b"a.x", b"", b"S"),
    pax(record(b"GNU.sparse.major", b"1")) + member(b"a.x"),
    pax(record(b"GNU.sparse.major", b"1")) + pax(record(b"path", b"a.x")) + member(b"b.x"),
])  # fmt: skip
def test_sparse_members_are_refused(data: bytes) -> None:
    assert "sparse members are not supported" in str(damage(data + END))


@pytest.mark.parametrize("kind", [b"M", b"Z", b"\xff"])
def test_members_of_unknown_type_are_refused(kind: bytes) -> None:
    assert "not supported" in str(damage(member(b"a.x", b"", kind) + END))


def test_second_field_of_one_name_is_an_error_that_names_the_member() -> None:
    data = member(b"0.x") + member(b"a.jpg") + member(b"a.cls") + member(b"a.JPG") + END
    error = damage(data)
    assert (error.key, error.offset) == ("a", 3 * 1024)
    assert "'a.JPG'" in str(error)
    assert keys(data) == [b"0"]


def test_field_that_would_hide_what_the_loader_adds_is_an_error() -> None:
    assert "begins with '__'" in str(damage(member(b"a.__KEY__") + END))


def test_zero_block_in_the_middle_is_an_error() -> None:
    data = member(b"a.x") + member(b"b.x") + bytes(512) + member(b"c.x") + END
    error = damage(data)
    assert "a zero block in the middle" in str(error)
    assert error.offset == 2048
    assert keys(data) == [b"a"]  # b may have gone on where the zeros are


def test_extended_header_without_a_member_is_an_error() -> None:
    assert "no member behind it" in str(damage(pax(record(b"path", b"a.x")) + END))


@pytest.mark.parametrize(("start", "looks"), [
    (b"\x1f\x8b\x08\0", "gzip"), (b"<html><body>no", "HTML"), (b"\n<!DOCTYPE html>", "HTML"), (b"PK\x03\x04", "zip"),
    (b"<?xml version='1.0'?><Error>", "XML"), (b"\x28\xb5\x2f\xfd", "zstandard"), (b'{"error": 1}', "JSON"),
])  # fmt: skip
def test_what_is_no_tar_archive_is_called_what_it_looks_like(start: bytes, looks: str) -> None:
    for length in (100, 512, 3000):
        error = damage(start.ljust(length, b"."))
        assert "is not a tar archive" in str(error)
        assert looks in str(error)
        assert error.offset == 0


def test_nothing_is_read_when_damage_was_found() -> None:
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


# the ways of reading agree


def test_scanner_goes_on_in_a_copy_when_it_was_pickled_anywhere() -> None:
    data = archive([*PLAIN[:6], ("l" * 1500 + ".x", b"1"), *PLAIN[6:12]], "pax")
    whole, _ = scan(data)
    scanner = TarScanner(URL)
    found: list[bytes] = []
    for at in range(0, len(data), 512):
        scanner = pickle.loads(pickle.dumps(scanner))
        found += scanner.feed(data[at : at + 512], at, at + 512 == len(data)).keys.tolist()
    assert found == [key for key, _ in whole]
    assert scanner.done
    damaged = TarScanner(URL)
    damaged.feed(data[:600], 0, True)
    copy = pickle.loads(pickle.dumps(damaged))
    assert (str(copy.error), copy.error.offset) == (str(damaged.error), 600)


NAMES = st.sampled_from(
    ["a.x", "a.y", "a.Y", "b.x", "b.seg.png", "dir/c.x", "dir.d/none", ".hidden", "ü.x", "n" * 90 + "/p.x", "__m.x__"]
).map(str.encode)
PIECES = st.one_of(
    st.builds(member, NAMES.map(lambda name: name[-99:]), st.binary(max_size=3).map(lambda body: body * 400)),
    st.builds(
        lambda k, n: b"".join(member(b"%d.x" % i, bytes(n)) for i in range(k)), st.integers(1, 9), st.integers(0, 999)
    ),
    st.builds(
        lambda magic, k: b"".join(header(b"m/%d.y" % (i // 2), magic=magic) for i in range(k)),
        st.sampled_from([b"ustar  \0", bytes(8)]),
        st.integers(1, 9),
    ),
    st.builds(lambda k: member(b"in.tar", b"".join(member(b"%d.z" % i) for i in range(k)) + END), st.integers(1, 9)),
    st.just(member(b"like.x", bytes(257) + b"ustar\x0000" + bytes(700))),
    st.builds(lambda name: header(name[-4:], 3, prefix=b"pre/fix") + padded(b"123"), NAMES),
    st.builds(lambda kind: header(b"l.x", 0, kind), st.sampled_from([b"1", b"2", b"5", b"S", b"D", b"Z"])),
    st.builds(lambda size: header(b"s.x", size) + bytes(512), st.sampled_from([
        b"00000000001 ", b"          1 ", b"-0000000001\0", b"\x80" + bytes(10) + b"\1", b"000000000001",
        b"0_000000001\0",
    ])),
    st.builds(lambda name: pax(record(b"path", name * 40)) + member(b"cut"), NAMES),
    st.builds(lambda name: member(b"long", name * 40 + b"\0", b"L") + member(b"cut"), NAMES),
    st.builds(lambda: header("é.x".encode(), 0, signed=True)),
    st.builds(lambda: header(b"nul\0rest.y", 0)),
    st.builds(lambda: pax(b"", b"g")),
    st.binary(max_size=600),
    st.just(bytes(512)),
)  # fmt: skip


@st.composite
def damaged_archives(draw: Callable[..., object]) -> bytes:
    data = bytearray(b"".join(draw(st.lists(PIECES, max_size=14)))) + draw(st.sampled_from([END, bytes(512), b""]))  # type: ignore[call-overload]
    if data:
        for _ in range(draw(st.integers(0, 1))):  # type: ignore[call-overload]
            at = draw(st.integers(0, len(data) - 1))  # type: ignore[call-overload]
            data[at] = draw(st.integers(0, 255))  # type: ignore[call-overload]
    return bytes(data)


@pytest.mark.slow
@settings(max_examples=1000)
@given(damaged_archives(), st.data())
def test_fast_and_general_way_and_every_cutting_agree_on_any_bytes(data: bytes, draws: st.DataObject) -> None:
    blocks = len(data) // 512
    boundaries = sorted(512 * cut for cut in draws.draw(st.lists(st.integers(0, blocks), max_size=6)))
    limits = draws.draw(st.sampled_from([{}, {"fields": 2}, {"name_bytes": 60}, {"member_bytes": 900}]))
    general = scan(data, kind=OneByOne, **limits)
    assert scan(data, **limits) == general
    assert scan(data, boundaries, **limits) == general
    with pytest.MonkeyPatch.context() as few:
        few.setattr(tar_regular, "_FEWEST_HEADERS", 1)
        few.setattr(tar_regular, "_FEWEST_NAMES", 1)
        assert scan(data, boundaries, **limits) == general


def grouped(runs: list[list[bytes]], limits: Limits, *, at_once: bool) -> list[object]:
    grouper = Grouper(limits)
    found: list[object] = []
    body = 512
    try:
        for names in runs:
            bodies = np.arange(body, body + 1024 * len(names), 1024)
            sizes = bodies % 509
            if at_once:
                grouper.add_run(np.array(names, np.bytes_), bodies, sizes)
            else:
                grouper.add(names, bodies.tolist(), sizes.tolist())
            body += 1024 * len(names)
            found += [grouper.low, listed(grouper.take(ended=False)), grouper.low]
    except FormatError as error:
        return [*found, listed(grouper.take(ended=False)), type(error), str(error), error.key, error.offset]
    return [*found, listed(grouper.take(ended=True)), grouper.low]


ANY_NAMES = st.lists(st.text("ab./_Xxü", min_size=1, max_size=8).map(str.encode), min_size=1, max_size=9)
ENDS = [[b"x"], [b"x", b"seg.Y", b""], [b"x", b"x"], [b"X", b"y"], [b"y", b"Y"]]
ORDERLY_NAMES = st.builds(
    lambda first, ends: [b"%d.%s" % (k, end) for k, of_sample in enumerate(ends, first) for end in of_sample],
    st.integers(7, 11),
    st.one_of(
        st.builds(lambda ends, count: [ends] * count, st.sampled_from(ENDS), st.integers(1, 6)),
        st.lists(st.sampled_from(ENDS), min_size=1, max_size=6),
    ),
)
ODD_NAMES = st.builds(
    lambda names, odd, at: [*names[:at], odd, *names[at:]],
    ORDERLY_NAMES,
    st.sampled_from([b"__a.b__", b"__a.b", b"d/__a.b__", b"a.__B", b"a", b".b", b"d.d/a"]),
    st.integers(0, 9),
)


@pytest.mark.slow
@settings(max_examples=500)
@example([[b"1.x", b"2.x", b"2.y", b"2.z", b"3.x"]], Limits(fields=2))
@example([[b"1.x", b"2.x", b"2.X", b"3.x"]], Limits())
@given(
    st.lists(st.one_of(ORDERLY_NAMES, ODD_NAMES, ANY_NAMES), max_size=5),
    st.sampled_from([Limits(), Limits(fields=2), Limits(name_bytes=7)]),
)
def test_members_make_the_same_samples_when_they_are_added_at_once(runs: list[list[bytes]], limits: Limits) -> None:
    with pytest.MonkeyPatch.context() as few:
        few.setattr(tar_regular, "_FEWEST_NAMES", 1)
        assert grouped(runs, limits, at_once=True) == grouped(runs, limits, at_once=False)


@settings(max_examples=100)
@given(st.binary(max_size=4096))
def test_scanner_ends_with_an_error_when_bytes_are_arbitrary(data: bytes) -> None:
    found, error = scan(data)
    assert found == []
    assert error is not None or data[:1024] == bytes(1024) or data == bytes(512)


@pytest.mark.parametrize("kind", FORMATS)
def test_regular_archives_are_read_by_the_fast_way(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []
    step = TarScanner._step
    monkeypatch.setattr(TarScanner, "_step", lambda self, block, at: (steps.append(at), step(self, block, at))[1])
    data = archive(PLAIN, kind)
    assert len(samples(data)) == 20
    assert len(steps) == 2  # the end mark


@pytest.mark.parametrize("kind", FORMATS)
def test_many_regular_members_are_grouped_at_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[bytes] = []
    add = Grouper.add
    monkeypatch.setattr(Grouper, "add", lambda self, names, *rest: (added.extend(names), add(self, names, *rest))[1])
    data = archive([(f"d.1/{k:04d}.{ext}", b"1") for k in range(300) for ext in ("Npy", "seg.png", "cls")], kind)
    assert samples(data) == by_tarfile(data)
    assert added == [f"d.1/{k}.{ext}".encode() for k in ("0000", "0299") for ext in ("Npy", "seg.png", "cls")]


def test_offsets_count_from_the_start_of_the_archive_when_it_comes_in_parts() -> None:
    data = archive(PLAIN)
    assert samples(data, list(range(2048, len(data), 2048))) == by_tarfile(data)
    scanner = TarScanner(URL)
    rows = scanner.feed(np.frombuffer(data, np.uint8).data, 0, True)
    assert rows.sizes().sum() == sum(len(body) for _, body in PLAIN)


LONG = member(b"pax", record(b"path", b"n" * 200 + b".bin"), b"x") + member(b"cut")
LONG_OF_NONE = member(b"pax", record(b"path", b"n" * 200), b"x") + member(b"cut")


@pytest.mark.parametrize("kind", [TarScanner, OneByOne])
@pytest.mark.parametrize("refused", [member(b"c.bin", b"4" * 5000), LONG])
@pytest.mark.parametrize("cut", [0, 512, 2048, 4096])
def test_sample_before_is_given_when_a_member_of_another_sample_breaks_a_limit(
    kind: type[TarScanner], refused: bytes, cut: int
) -> None:
    before = member(b"a.bin", b"1") + member(b"b.bin", b"2") + member(b"b.cls", b"3")
    data = before + refused + member(b"d.bin", b"5") + END
    found, error = scan(data, [cut] if cut else [], kind, member_bytes=1000, name_bytes=100)
    assert error is not None
    assert error[0] == "LimitError"
    assert [(key, [field for field, _, _ in row]) for key, row in found] == [(b"a", ["bin"]), (b"b", ["bin", "cls"])]


@pytest.mark.parametrize("kind", [TarScanner, OneByOne])
@pytest.mark.parametrize(
    "refused",
    [
        member(b"b.txt", b"4" * 5000),  # its own
        member(b"README", b"4" * 5000),  # of no sample, and so are those below: the sample may go on behind them
        member(b".hidden", b"4" * 5000),
        member(b"__meta__/c.bin", b"4" * 5000),
        header(b"c.bin", 5000, b"D"),
        LONG_OF_NONE,
        header(b"c.bin", 2**21, b"x"),  # an extended header: of whom, is not known
    ],
)
def test_sample_before_is_not_given_when_it_may_go_on_behind_what_breaks_a_limit(
    kind: type[TarScanner], refused: bytes
) -> None:
    data = member(b"a.bin", b"1") + member(b"b.bin", b"2") + refused + member(b"b.cls", b"3") + END
    found, error = scan(data, (), kind, member_bytes=1000, name_bytes=100)
    assert error is not None
    assert error[0] == "LimitError"
    assert [key for key, _ in found] == [b"a"]
