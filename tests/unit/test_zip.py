"""Zip archives: samples are what was written; damaged, hostile and unknown archives are errors with a name."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from builders.arrays import saved
from builders.stored import put, put_folder

import headrace as hr
from headrace.errors import DecodeError, FormatError, LimitError
from headrace.formats.limits import Limits
from headrace.testing.decoders import same

FILES = {f"{n:03}.{field}": bytes([n]) * (n * size) for n in range(9) for field, size in (("bin", 40), ("cls", 1))}


class Pipe(io.BytesIO):
    """A file without places: sizes follow the data."""

    def tell(self) -> int:
        raise OSError("a pipe has no places")


def packed(
    files: dict[str, bytes], method: int = zipfile.ZIP_STORED, *, wide: bool = False, piped: bool = False
) -> bytes:
    with zipfile.ZipFile(out := Pipe() if piped else io.BytesIO(), "w", method) as archive:
        archive.comment = b"PK\5\6 is no end"
        for name, data in files.items():
            with archive.open(name, "w", force_zip64=wide) as file:
                file.write(data)
    return out.getvalue()


def read(data: bytes, name: str = "0.zip", **options: Any) -> list[dict[str, Any]]:
    return list(hr.stream(put(data, name), **options))


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("how", [{}, {"wide": True}, {"piped": True}, {"wide": True, "piped": True}], ids=str)
def test_samples_equal_the_written_ones(method: int, how: dict[str, bool]) -> None:
    samples = read(packed(FILES, method, **how))
    assert [sample["__key__"] for sample in samples] == [f"{n:03}" for n in range(9)]
    assert {f"{one['__key__']}.{name}": one[name] for one in samples for name in ("bin", "cls")} == FILES


def test_directory_that_is_long_or_wide_is_found() -> None:
    files = {f"folder/with/a/long/name/{n:06}.x": b"%d" % n for n in range(1500)}
    assert [sample["x"] for sample in read(packed(files))] == list(files.values())
    data = bytearray(packed(FILES))
    at = data.rfind(b"PK\5\6", 0, len(data) - 20)
    _, _, _, _, count, length, start, _ = struct.unpack_from("<4s4H2IH", data, at)
    wide = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, length, start)
    wide += struct.pack("<4sIQI", b"PK\6\7", 0, at, 1)
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 2**16 - 1, 2**16 - 1, 2**32 - 1, 2**32 - 1, 0)
    assert len(read(bytes(data[:at]) + wide + end)) == 9


def test_folders_and_names_of_other_alphabets() -> None:
    (sample,) = read(packed({"a/": b"", "a/ü.x": b"1", "__MACOSX/._ü.x": b"", "note": b""}))
    assert sample["__key__"] == "a/ü"


def edited(data: bytes, what: bytes, at: int, value: bytes) -> bytes:
    changed, place = bytearray(data), data.find(what)
    while place >= 0:
        changed[place + at : place + at + len(value)] = value
        place = data.find(what, place + 4)
    return bytes(changed)


def renamed(name: str) -> bytes:
    return packed({name: b"x"})


ONE = packed({"a.x": b"some bytes" * 9}, zipfile.ZIP_DEFLATED)
TWO = packed({"a.x": b"1" * 50, "b.x": b"2" * 50})


@pytest.mark.parametrize(("data", "why"), [
    (edited(ONE, b"PK\1\2", 8, b"\1"), "'a.x' is encrypted"),
    (edited(ONE, b"PK\1\2", 10, b"\x0c"), "'a.x' is packed by"),
    (edited(ONE, b"PK\1\2", 10, b"\0"), "stored as"), (edited(ONE, b"PK\1\2", 42, b"\xff\xff\1"), "would end after"),
    (renamed("/etc/a.x"), "is outside"), (renamed("a/../../b.x"), "is outside"),
    (renamed("a\\b.x"), "is outside"),
    (edited(packed({"a.x": b"1", "b.x": b"2"}), b"b.x", 0, b"a.x"), "two members called"),
    (packed({"a.x": b"1", "b.x": b"2", "a.y": b"3"}), "are not stored together"), (ONE + b"x", "does not end as"),
    (packed({"a.x": b"1", "a.X": b"2"}), "second field"), (ONE[:30], "cut off"), (b"x" + ONE, "before its end"),
    (edited(TWO, b"PK\1\2", 42, struct.pack("<I", 10)), "overlaps what follows it"),
    (edited(ONE, b"PK\1\2", 0, b"PK\1\3"), "entry 0"), (edited(ONE, b"PK\1\2", 28, b"\xff\xff"), "cut off in entry 0"),
])  # fmt: skip
def test_unreadable_archive_is_an_error_with_its_reason(data: bytes, why: str) -> None:
    with pytest.raises(FormatError, match=rf"memory://stored/\d+/0.zip.*{why}"):
        read(data)


@pytest.mark.parametrize("data", [
    edited(ONE, b"PK\3\4", 14, b"\0\1\2\3"), edited(ONE, b"PK\3\4", 22, b"\1\0"), edited(ONE, b"PK\3\4", 30, b"b.y"),
    edited(ONE, b"PK\3\4", 0, b"PK\3\5"), edited(ONE, b"PK\3\4", 26, b"\xff\xff"),
    edited(ONE, b"PK\3\4", 35, b"\xff\xff"),
    edited(packed({"a.x": b"abc"}, piped=True), b"PK\7\x08", 4, b"\0\0"),
    edited(packed({"a.x": b"abc"}), b"abc", 0, b"abd"),
])  # fmt: skip
def test_member_that_is_damaged_is_an_error_of_its_sample(data: bytes) -> None:
    with pytest.raises(DecodeError, match=r"sample 'a' of memory://stored/\d+/0.zip.*field 'x'"):
        read(data)


def test_bomb_is_an_error_by_its_entry_and_by_its_content() -> None:
    low = Limits(unpacked_free_bytes=1000, unpacked_ratio=20)
    bomb = packed({"a.x": bytes(10**6)}, zipfile.ZIP_DEFLATED)
    with pytest.raises(LimitError, match=r"'a.x' of .* unpacks to 1000000"):
        read(bomb, limits=low)
    with pytest.raises(DecodeError, match="unpacks to more than"):
        read(edited(bomb, b"PK\1\2", 24, struct.pack("<I", 100)), limits=low)


def arrays(n: int) -> dict[str, Any]:
    return {"a": np.arange(n), "b": np.ones((2, n), np.float32)}


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_file_is_one_sample(save: Callable[..., None]) -> None:
    files = {}
    for n in range(4):
        files[f"{n}.npz"] = saved(save, **arrays(n))
    data = hr.stream(put_folder(files) + "/{0..3}.npz")
    assert len(data) == 4
    samples = list(hr.DataLoader(data.shuffle("global"), batch_size=None, collate_fn=dict))
    for sample in samples:
        assert same({name: sample[name] for name in "ab"}, arrays(int(sample["__key__"])))
    assert sorted(sample["__key__"] for sample in samples) == list("0123")


def test_npz_that_is_damaged_is_an_error_of_its_sample() -> None:
    whole = saved(np.savez, **arrays(50))
    for data in (whole[:-30], whole[:200] + b"\xff" + whole[201:], zlib.compress(b"x")):
        with pytest.raises(DecodeError, match="does not open as npz"):
            read(data, "0.npz")
    with pytest.raises(LimitError):
        read(whole, "0.npz", limits=Limits(member_bytes=100))
