"""The tar scanner beside the corpus of damaged archives: limits, memory, and the fast path."""

from __future__ import annotations

import gc
import io
import itertools
import tarfile
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from corpus.parts import END, GNU, header, pax, record
from corpus.parts import member as a_member
from hypothesis import example, given, settings
from hypothesis import strategies as st
from unit.tar_scans import OneByOne

from headrace._util.sample_ranges import Rows
from headrace.errors import FormatError, LimitError, OptionError
from headrace.formats.limits import Limits
from headrace.formats.tar import regular as tar_regular
from headrace.formats.tar.samples import Grouper
from headrace.formats.tar.scanner import TarScanner

URL = "s3://bucket/train.tar?X-Amz-Signature=abc"
Sample = tuple[bytes, dict[str, bytes]]
FORMATS = {"ustar": tarfile.USTAR_FORMAT, "pax": tarfile.PAX_FORMAT, "gnu": tarfile.GNU_FORMAT}


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


def member(name: bytes, body: bytes = b"body") -> bytes:
    return a_member(name, body)


PLAIN = [(f"d/{k:04d}.{ext}", bytes([k % 251]) * (k * 37 % 1500)) for k in range(20) for ext in ("npy", "cls")]


def scan(data: bytes, boundaries: Sequence[int] = (), kind: type[TarScanner] = TarScanner, **limits: int) -> Any:
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
    return [key for key, _ in scan(data)[0]]


def by_tarfile(data: bytes) -> list[Sample]:
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


def test_scanner_ignores_the_prefix_field_when_the_format_is_gnu() -> None:
    data = b"".join(header(b"%d.x" % k, prefix=b"12345", magic=GNU) for k in range(9)) + END
    assert keys(data) == [b"%d" % k for k in range(9)]
    assert scan(data, kind=OneByOne) == scan(data)


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


@pytest.mark.parametrize(("data", "limits"), [
    (member(b"a.x", bytes(101)), {"member_bytes": 100}),
    (b"".join(member(b"n" * 20 + b"%d.x" % k) for k in range(8)), {"name_bytes": 20}),
    (b"".join(member(b"a.%d" % k) for k in range(9)), {"fields": 8}),
])  # fmt: skip
def test_limits_are_those_that_were_given(data: bytes, limits: dict[str, int]) -> None:
    assert isinstance(damage(data + END, **limits), LimitError)
    assert scan(data + END)[1] is None


@pytest.mark.parametrize("limit", ["member_bytes", "header_bytes", "name_bytes", "extension_chain", "fields"])
def test_limits_refuse_what_is_no_bound(limit: str) -> None:
    with pytest.raises(OptionError, match=f"{limit}=0"):
        Limits(**{limit: 0})


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


LONG = pax(record(b"path", b"n" * 200 + b".bin")) + member(b"cut")
LONG_OF_NONE = pax(record(b"path", b"n" * 200)) + member(b"cut")


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
@pytest.mark.parametrize("refused", [
    member(b"b.txt", b"4" * 5000),  # its own
    member(b"README", b"4" * 5000),  # of no sample, as those below: the sample may continue after them
    member(b".hidden", b"4" * 5000),
    member(b"__meta__/c.bin", b"4" * 5000),
    header(b"c.bin", 5000, b"D"),
    LONG_OF_NONE,
    header(b"c.bin", 2**21, b"x"),  # an extended header: of whom, is not known
])  # fmt: skip
def test_sample_that_may_continue_after_what_breaks_a_limit_is_not_given(
    kind: type[TarScanner], refused: bytes
) -> None:
    data = member(b"a.bin", b"1") + member(b"b.bin", b"2") + refused + member(b"b.cls", b"3") + END
    found, error = scan(data, (), kind, member_bytes=1000, name_bytes=100)
    assert error is not None
    assert error[0] == "LimitError"
    assert [key for key, _ in found] == [b"a"]
