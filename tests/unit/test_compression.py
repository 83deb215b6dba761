"""Decompression: round trips in bounded memory; damage is an error with its offset."""

from __future__ import annotations

import bz2
import gzip
import itertools
import lzma
import pickle
import random
import struct
import sys
import zlib
from collections.abc import Callable, Iterator

import lz4.frame
import numpy as np
import pytest
import zstandard
from builders.numbers import peak_of
from builders.seekable import seekable, skippable, table_of

from headrace.errors import FormatError, LimitError, OptionError
from headrace.formats.compression import Decompressor, Frames, kind_of, seek_table, seek_table_bytes, unpack_frame
from headrace.formats.limits import Limits

URL = "https://user:word@host/train.tar.x?sig=abc"
PACKS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": lambda data: gzip.compress(data, 6, mtime=0),
    "zstd": zstandard.ZstdCompressor(write_checksum=True).compress,
    "bzip2": bz2.compress,
    "xz": lambda data: lzma.compress(data, preset=0),
    "lz4": lambda data: lz4.frame.compress(data, content_checksum=True),
}
ROOM = Limits(unpacked_ratio=2**30)


def pack(kind: str, data: bytes) -> bytes:
    return PACKS[kind](data)


def mixed(size: int, seed: int = 0) -> bytes:
    source = random.Random(seed)
    parts: list[bytes] = []
    while sum(map(len, parts)) < size:
        length = source.randrange(1, max(size // 8, 2))
        parts.append(source.choice([source.randbytes(length), bytes(length), (b"headrace " * length)[:length]]))
    return b"".join(parts)[:size]


def drained(archive: Decompressor, room: int = 2**16) -> Iterator[bytes]:
    target = bytearray(room)
    while got := archive.read_into(memoryview(target)):
        yield bytes(target[:got])


def unpack_until_damage(kind: str, data: bytes, limits: Limits = ROOM) -> tuple[bytes, FormatError | None]:
    archive, out = Decompressor(kind, URL, limits), bytearray()
    archive.feed(data)
    try:
        for piece in drained(archive):
            out += piece
        archive.finish()
    except FormatError as error:
        return bytes(out), error
    return bytes(out), None


def unpack(kind: str, data: bytes, limits: Limits = ROOM) -> bytes:
    out, error = unpack_until_damage(kind, data, limits)
    assert error is None
    return out


def damage(kind: str, data: bytes, limits: Limits = ROOM) -> tuple[bytes, FormatError]:
    out, error = unpack_until_damage(kind, data, limits)
    assert error is not None
    assert error.offset is not None
    return out, error


@pytest.mark.parametrize(("url", "kind"), [
    ("/data/a.tar", None), ("a.tar.gz", "gzip"), ("a.tgz", "gzip"), ("s3://bucket/a.tar.zst", "zstd"),
    ("a.tzst", "zstd"), ("a.tar.bz2", "bzip2"), ("a.tbz2", "bzip2"), ("a.tbz", "bzip2"), ("a.tar.xz", "xz"),
    ("a.txz", "xz"), ("a.tar.lz4", "lz4"), ("https://host/a.tar.gz?X-Amz-Signature=1#part", "gzip"),
    ("https://host/a.tar?name=b.tar.gz", None), ("a.TAR.GZ", None), ("a.json.gz", "gzip"), ("a.json", None),
])  # fmt: skip
def test_kind_is_read_from_the_name_without_the_query(url: str, kind: str | None) -> None:
    assert kind_of(url) == kind


@pytest.mark.slow
@pytest.mark.parametrize("kind", PACKS)
def test_a_small_read_of_a_bomb_takes_little_memory(kind: str) -> None:
    archive = Decompressor(kind, URL, ROOM)
    archive.feed(pack(kind, bytes(2**25)))
    target = memoryview(bytearray(1000))
    # zstd: room for a step, and a block; bzip2: a block of 900 KB, 4 bytes for each byte of it; xz: its window
    bounds = {"zstd": 2.5 * 2**20, "bzip2": 4.5 * 2**20, "xz": 2**19}
    assert peak_of(lambda: archive.read_into(target)) < bounds.get(kind, 2**18)


@pytest.mark.parametrize("kind", PACKS)
def test_an_array_of_another_type_is_filled_when_it_is_the_target(kind: str) -> None:
    data = np.arange(1000, dtype=np.int64)
    target = np.zeros_like(data)
    archive = Decompressor(kind, URL)
    archive.feed(pack(kind, data.tobytes()))
    assert archive.read_into(memoryview(target)) == data.nbytes
    assert np.array_equal(target, data)


@pytest.mark.parametrize("kind", ["zstd", "lz4"])
def test_skippable_frames_are_passed_over_at_any_place(kind: str) -> None:
    packed = skippable(b"") + pack(kind, b"one") + skippable(bytes(70_000), 15) + pack(kind, b"two") + skippable(b"x")
    assert unpack(kind, packed) == b"onetwo"
    for cut in (5, 8 + len(pack(kind, b"one")) + 3, 8 + len(pack(kind, b"one")) + 20, len(packed) - 1):
        _, error = damage(kind, packed[:cut])
        assert error.offset == cut
        assert "truncated" in str(error)


REST = (b"x", b"GARBAGE AT THE END", b"\x50\x2a\x4d\x19garbage", b"\x1e")
ZEROS = [*((kind, bytes(4)) for kind in ("zstd", "bzip2", "lz4")), *(("xz", bytes(zeros)) for zeros in (1, 2, 3, 4002))]


@pytest.mark.parametrize(("kind", "rest", "why"), [
    *((kind, rest, "") for kind in PACKS for rest in REST),
    *((kind, zeros, "") for kind, zeros in ZEROS),
    ("xz", bytes(3) + pack("xz", b"two"), "multiples of 4"),
])  # fmt: skip
def test_other_data_after_the_last_frame_is_damage_at_its_place(kind: str, rest: bytes, why: str) -> None:
    packed = pack(kind, b"all of it") * 2
    out, error = damage(kind, packed + rest)
    assert out == b"all of it" * 2
    assert error.offset == len(packed) or (kind == "xz" and not rest[0])
    assert str(error.offset) in str(error)
    assert why in str(error)


@pytest.mark.parametrize("kind", PACKS)
def test_data_of_another_kind_is_an_error_that_names_it(kind: str) -> None:
    for other in [None, *PACKS]:
        if other != kind:
            _, error = damage(kind, bytes(4) + pack(kind, b"data") if other is None else pack(other, b"data"))
            assert error.offset == 0
            assert f"not {kind} data" in str(error)
            assert other is None or f"as {other} data do" in str(error)
    with pytest.raises(FormatError, match="empty"):
        Decompressor(kind, URL).finish()


@pytest.mark.parametrize("kind", PACKS)
def test_truncation_within_a_frame_is_detected_at_any_byte(kind: str) -> None:
    one, two = pack(kind, mixed(400)), pack(kind, b"second")
    data = mixed(400) + b"second"
    for cut in range(len(one) + len(two)):
        if cut == len(one):
            assert unpack(kind, (one + two)[:cut]) == mixed(400)
            continue
        out, error = damage(kind, (one + two)[:cut])
        assert data.startswith(out)
        assert error.offset == cut
        assert cut < len(one) or out.startswith(mixed(400))


@pytest.mark.slow
@pytest.mark.parametrize("kind", PACKS)
def test_data_before_a_truncation_is_emitted(kind: str) -> None:
    data = mixed(3_000_000)
    packed = pack(kind, data)
    out, _ = damage(kind, packed[: len(packed) * 3 // 4])
    assert data.startswith(out)
    assert len(out) > len(data) // 3


@pytest.mark.parametrize("kind", PACKS)
def test_frames_before_damage_are_emitted_and_the_error_is_permanent(kind: str) -> None:
    good, bad = pack(kind, b"first"), bytearray(pack(kind, mixed(500)))
    bad[-6] ^= 0x10
    archive = Decompressor(kind, URL)
    archive.feed(good + bad)
    target = bytearray(3000)
    assert target[: archive.read_into(memoryview(target))] == b"first"
    for _ in range(2):
        with pytest.raises(FormatError) as caught:
            archive.read_into(memoryview(target))
        assert len(good) <= (caught.value.offset or 0) < len(good + bad)
    archive.feed(good)
    with pytest.raises(FormatError):
        archive.finish()


def test_an_error_names_the_archive_without_its_secrets_and_pickles_when_data_is_damaged() -> None:
    packed = bytearray(pack("gzip", mixed(500)))
    packed[-8] ^= 1
    _, error = damage("gzip", bytes(packed))
    assert "https://host/train.tar.x?sig=***, byte" in str(error)
    assert isinstance(error.__cause__, zlib.error)
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.offset, copy.url) == (str(error), error.offset, error.url)


@pytest.mark.slow
@pytest.mark.parametrize("kind", PACKS)
def test_a_bomb_is_over_the_limit_when_more_came_out_than_the_ratio_allows(kind: str) -> None:
    limits = Limits(unpacked_free_bytes=2**20, unpacked_ratio=20)
    packed = pack(kind, bytes(2**25))
    out, error = damage(kind, packed, limits)
    assert isinstance(error, LimitError)
    assert "20 bytes for each (unpacked_ratio)" in str(error)
    assert len(out) <= max(2**20, 20 * len(packed))
    assert out == bytes(len(out))


@pytest.mark.slow
@pytest.mark.parametrize("kind", PACKS)
@pytest.mark.parametrize("room", [3000, 2**22])
def test_dense_data_passes_when_its_ratio_is_below_the_limit(kind: str, room: int) -> None:
    source = random.Random(1)
    data = b"".join(source.randbytes(100) + bytes(4000) for _ in range(2000))
    packed = pack(kind, data)
    limits = Limits(unpacked_free_bytes=2**20, unpacked_ratio=2 * len(data) // len(packed))
    archive = Decompressor(kind, URL, limits)
    archive.feed(packed)
    assert b"".join(drained(archive, room)) == data
    archive.finish()


def zstd_with_window(log: int) -> bytes:
    parameters = zstandard.ZstdCompressionParameters(window_log=log, write_content_size=False)
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    return packer.compress(b"data") + packer.flush()


XZ_FILTERS = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "dict_size": 2**25}]


@pytest.mark.parametrize(("kind", "packed", "enough", "low", "named"), [
    ("zstd", zstd_with_window(21), 2**21, 2**21 - 1, 2**21),
    ("xz", lzma.compress(b"data", filters=XZ_FILTERS), 2**25, 2**24, 2**24),
])  # fmt: skip
def test_window_over_the_limit_is_a_limit_error(kind: str, packed: bytes, enough: int, low: int, named: int) -> None:
    assert unpack(kind, packed, Limits(window_bytes=enough)) == b"data"
    _, error = damage(kind, packed, Limits(window_bytes=low))
    assert isinstance(error, LimitError)
    assert str(named) in str(error)


def test_an_xz_check_of_an_unknown_kind_is_damage() -> None:
    packed = bytearray(lzma.compress(b"data", check=lzma.CHECK_CRC32))
    packed[7] = packed[-3] = 2  # a check of 4 bytes that is not assigned
    packed[8:12] = struct.pack("<I", zlib.crc32(packed[6:8]))
    packed[-12:-8] = struct.pack("<I", zlib.crc32(packed[-8:-2]))
    assert "check of kind 2" in str(damage("xz", bytes(packed))[1])


def test_a_zstd_block_that_is_too_long_is_damage_before_it_is_complete() -> None:
    begin = pack("zstd", b"data" * 100)[:7] + struct.pack("<I", 200_000 << 3)[:3]
    assert "a block of 200000 bytes" in str(damage("zstd", begin)[1])


def test_a_frame_that_needs_a_dictionary_is_damage() -> None:
    dictionary = zstandard.ZstdCompressionDict(mixed(1000), dict_type=zstandard.DICT_TYPE_RAWCONTENT)
    trained = zstandard.train_dictionary(2000, [mixed(200, seed) for seed in range(400)])
    for known in (dictionary, trained):
        damage("zstd", zstandard.ZstdCompressor(dict_data=known, write_checksum=True).compress(mixed(900)))


def test_finishing_is_refused_when_not_all_was_read() -> None:
    archive = Decompressor("gzip", URL)
    archive.feed(pack("gzip", b"data"))
    with pytest.raises(ValueError, match="more"):
        archive.finish()


@pytest.mark.parametrize(("kind", "module"), [("zstd", "zstandard"), ("lz4", "lz4.frame")])
def test_missing_library_is_refused_with_the_extra(kind: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(OptionError, match=rf"pip install 'headrace\[{kind}\]'"):
        Decompressor(kind, URL)
    with pytest.raises(OptionError, match="'zip'"):
        Decompressor("zip", URL)


# The seekable format


def table(data: bytes, limits: Limits = ROOM) -> Frames:
    found = seek_table(data[-seek_table_bytes(data[-9:]) :], len(data), url=URL, limits=limits)
    assert found is not None
    return found


def frame_of(data: bytes, frames: Frames, i: int) -> bytes:
    packed, size = data[frames.packed[i] : frames.packed[i + 1]], int(frames.unpacked[i + 1] - frames.unpacked[i])
    return unpack_frame(packed, size, ROOM, url=URL)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("checksums", [False, True])
@pytest.mark.parametrize("parts", [[], [b""], [b"one", b"", mixed(5000), bytes(70_000)]])
def test_frames_of_seekable_archives_decode_alone(parts: list[bytes], checksums: bool, own: bool) -> None:
    data = seekable(parts, checksums, own)
    frames = table(data)
    assert frames.packed.dtype == frames.unpacked.dtype == np.int64
    assert frames.unpacked.tolist() == [0, *itertools.accumulate(map(len, parts))]
    assert [frame_of(data, frames, i) for i in range(len(parts))] == parts
    assert unpack("zstd", data) == b"".join(parts)


def test_archive_that_is_not_seekable_has_no_seek_table() -> None:
    plain, data = pack("zstd", mixed(500)), seekable([b"one", b"two"])
    assert seek_table_bytes(plain[-9:]) == seek_table_bytes(b"short") == 0
    assert seek_table(plain, len(plain)) is None
    with pytest.raises(ValueError, match="bytes long"):
        seek_table(data[-20:], len(data))


TABLE = table_of([(10, 10)], 0)
OVERLONG = TABLE[:-9] + struct.pack("<IBI", 2**32 - 1, 0, 0x8F92EAB1)


@pytest.mark.parametrize("bad", [
    TABLE[1:],  # its first byte is the data's
    b"x" * 10 + table_of([(11, 10)], 0),
    b"x" * 10 + table_of([(9, 10)], 0),
    b"x" * 10 + table_of([(10, 10)], 0x04),
    b"x" * 10 + table_of([(10, 10)], 0x80),
    b"x" * 10 + OVERLONG,
    b"x" * 10 + b"\x5d" + TABLE[1:],
])  # fmt: skip
def test_a_table_that_does_not_fit_the_object_is_damage(bad: bytes) -> None:
    with pytest.raises(FormatError, match="table of zstd frames") as caught:
        seek_table(bad, len(bad), url=URL)
    assert caught.value.offset is not None


@pytest.mark.parametrize("has_size", [True, False])
def test_frame_that_is_cut_or_of_another_size_is_damage(has_size: bool) -> None:
    packed = zstandard.ZstdCompressor(write_content_size=has_size).compress(mixed(500))
    assert unpack_frame(packed, 500) == mixed(500)
    for size in (0, 1, 499, 501, 10**6):
        with pytest.raises(FormatError):
            unpack_frame(packed, size)
    for bad in (*(packed[:cut] for cut in range(len(packed))), packed + b"x", packed + pack("zstd", b"")):
        with pytest.raises(FormatError, match=r"https://host/train.tar.x\?sig=\*\*\*"):
            unpack_frame(bad, 500, url=URL)
    stream = zstandard.ZstdCompressor(write_content_size=has_size, write_checksum=True).compressobj()
    assert unpack_frame(stream.compress(b"") + stream.flush(), 0) == b""


def test_table_and_frame_over_the_limits_are_limit_errors() -> None:
    enough, low = (Limits(unpacked_free_bytes=size, unpacked_ratio=1) for size in (10_000, 9_999))
    promised, packed = b"x" * 10 + table_of([(10, 10_000)], 0), pack("zstd", bytes(10_000))
    assert table(promised, enough).unpacked[-1] == 10_000
    assert unpack_frame(packed, 10_000, enough) == bytes(10_000)
    with pytest.raises(LimitError, match="10000"):
        table(promised, low)
    with pytest.raises(LimitError, match="10000"):
        unpack_frame(packed, 10_000, low)
    assert unpack("gzip", pack("gzip", bytes(2**24)), Limits(unpacked_ratio=1)) == bytes(2**24)  # free bytes suffice
    with pytest.raises(LimitError, match="window"):
        unpack_frame(packed, 10_000, Limits(window_bytes=9_999))


def test_a_skippable_frame_is_empty() -> None:
    data = pack("zstd", b"one") + skippable(b"a remark")
    data += table_of([(len(pack("zstd", b"one")), 3), (16, 0)], 0)
    frames = table(data)
    assert [frame_of(data, frames, i) for i in range(2)] == [b"one", b""]
