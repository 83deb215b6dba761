"""Fields decode to what was written, run no code, and fail with the name of the sample: numbers, arrays and media."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import struct
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from builders import videos
from builders.numbers import peak_of, saved
from builders.tars import zipped
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image, features
from unit import decoding
from unit.decoding import SMOOTH, WHERE, decoded, failure, mean_difference, picture, saved_image

from headrace.errors import OptionError
from headrace.formats.decoders import NpyDecoder, decoder
from headrace.formats.limits import DEFAULTS, Limits
from headrace.formats.media import (
    by_pillow,
    by_torch,
    pillow_image,
    scaled,
    shrinkage,
    simplejpeg_pixels,
    torch_is_fast,
)


@pytest.mark.slow
@pytest.mark.parametrize("as_buffer", [bytes, bytearray, memoryview])
@pytest.mark.parametrize(("field", "data", "value"), [
    ("cls", b"17", 17), ("index", b"-3\n", -3), ("id", b"0", 0), ("cls", b"  3\n", 3), ("cls", b"+7\t", 7),
    ("cls", b"-0", 0), ("cls", b"007", 7), ("cls", b"9" * 4300, int("9" * 4300)), ("cls", b"\r\n12\x0b\x0c", 12),
    ("txt", "grüße".encode(), "grüße"), ("text", b"", ""), ("transcript", b"a b", "a b"), ("en.txt", b"hi", "hi"),
    ("json", b'{"a": [1, null]}', {"a": [1, None]}), ("meta.json", b"3", 3),
    ("json", b'{"a": 1, "a": [1e999, -Infinity]}', {"a": [float("inf"), -float("inf")]}),
    ("json.gz", gzip.compress(b"[1]", mtime=0), [1]),
    ("a.txt.gz", gzip.compress(b"a", mtime=0) + gzip.compress(b"b", mtime=0), "ab"),
])  # fmt: skip
def test_last_part_of_a_field_selects_the_decoder(field: str, data: bytes, value: object, as_buffer: Any) -> None:
    assert decoded(field, as_buffer(data)) == value


@pytest.mark.parametrize("field", [
    "pth", "pt", "pkl", "pickle", "pyd", "pyc", "joblib", "jpg", "seg.png", "unknown", "", "json5", "gz", "bin.gz",
    "pkl.gz", "tar.gz", "jpg.gz", "json.gz.gz", "wav", "msgpack",
])  # fmt: skip
def test_bytes_of_unknown_extensions_are_not_decoded(field: str) -> None:
    data = gzip.compress(pickle.dumps(print)) if field.endswith("gz") else pickle.dumps(print)
    assert decoded(field, data) is data


def test_decoder_returns_a_new_sample_and_keeps_reserved_names() -> None:
    sample = {"__key__": b"7", "__url__": "u", "__x__.json": b"{}", "cls": b"1", "json": {"not": "bytes"}}
    assert decoder()(sample) == {**sample, "cls": 1}
    assert sample["cls"] == b"1"


@pytest.mark.parametrize(("field", "says", "damaged"), [
    ("cls", "int: ", [b"", b" ", b"-", b"+ 3", b"--3", b"1_000", b"1 000", b"1,000", b"0x10", b"1e3", b"1.0", b"3\0"]),
    ("cls", "int: ", ["\u0663".encode(), "\u00a03".encode(), "\ufeff3".encode(), b"9" * 4301, b"\xff", b"True"]),
    ("txt", "text: ", [b"\xff"]),
    ("json", "json: ", [b"", b"{", b"{} {}", b"{'a': 1}", b'"\xff"', b"[1,]", b"nan", b'"a\nb"']),
    ("json", "100000 digits", [b"1" * 10**5]),
    ("json", "too deep", [b"[" * 200_000]),
    ("json.gz", "json in gzip: ", [b"", b"{}", zlib.compress(b"{}"), gzip.compress(b"{}", mtime=0) + b"more"]),
    ("npy", "npy: ", [b""]),
    ("npz", "npz: ", [b"PK"]),
])  # fmt: skip
def test_failure_names_field_key_and_address(field: str, says: str, damaged: list[bytes]) -> None:
    for data in damaged:
        error = failure(field, data)
        assert says in str(error)
        assert str(pickle.loads(pickle.dumps(error))) == str(error)


# in gzip


def test_gzip_is_removed_unless_bytes_are_wanted() -> None:
    assert decoded("count.gz", memoryview(gzip.compress(b"7")), **{"count.gz": "int"}) == 7
    packed = gzip.compress(b"7")
    assert decoded("cls.gz", packed, **{"cls.gz": "bytes"}) is packed
    assert decoded("cls.gz", packed, **{"cls.gz": len}) == len(packed)


@pytest.mark.slow
def test_gzip_that_unpacks_to_more_than_the_limits_is_refused() -> None:
    packed = gzip.compress(b"x" * 10_000)
    low, *enough = (Limits(unpacked_free_bytes=n, unpacked_ratio=r) for n, r in ((9_999, 1), (10_000, 1), (1, 300)))
    assert "9999, which is the limit" in str(failure("txt.gz", packed, limits=low))
    for limits in enough:
        assert len(decoded("txt.gz", packed, limits=limits)) == 10_000
    assert "which is the limit" in str(failure("txt.gz", gzip.compress(bytes(2**26 + 1))))


# fields by name


def test_decoder_by_field_goes_before_the_extension() -> None:
    sample = {**WHERE, "jpg": b"raw", "cls": b"word", "count.bin": b"12", "seg.png": picture("PNG")}
    decode = decoder("rgb8", jpg="bytes", cls="text", **{"count.bin": "int", "seg.png": "l8"})
    values = decode(sample)
    assert (values["jpg"], values["cls"], values["count.bin"]) == (b"raw", "word", 12)
    assert values["seg.png"].shape == (36, 48)
    assert decoded("cls", memoryview(b"abc"), cls=lambda data: (type(data), data)) == (bytes, b"abc")
    assert "it is a str, not bytes" in str(failure("bin", "text", bin="int"))


def test_what_names_built_in_decoders() -> None:
    decode = decoder("rgb8", own=len, raw="bytes", size=(2, 2), **{"a.bin": "npy", "b.gz": "int"})
    for _ in range(2):
        assert [decode.what(f) for f in ("cls", "x.npy", "a.bin", "jpg")] == ["int", "npy", "npy", "rgb8"]
        assert {decode.what(f) for f in ("own", "raw", "b.gz", "npy.gz", "__key__.npy", "other")} == {None}


def test_exception_of_a_users_function_gets_a_note() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        decoded("bin", b"", bin=lambda data: 1 / len(data))
    assert caught.value.__notes__ == ["while decoding field 'bin' of sample 'd/7'"]


@pytest.mark.parametrize(("args", "options", "says"), [
    (("rgb",), {}, "spec='rgb' must be one of 'rgb8'"),
    ((), {"cls": "integer"}, "cls='integer' must be one of"),
    ((), {"cls": 3}, "cls=3"),
    ((), {"size": (8, 8)}, "needs a spec"),
    (("rgb8",), {"size": (0, 8)}, r"size=\(0, 8\)"),
    (("rgb8",), {"size": 8}, "size=8"),
    (("rgb8",), {"size": (8, 8.5)}, "size="),
    ((), {"__key__": "int"}, "__key__"),
])  # fmt: skip
def test_decoder_refuses_options_it_cannot_use(args: tuple[Any, ...], options: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        decoder(*args, **options)


def test_decoder_survives_pickling_when_it_was_used() -> None:
    decode = decoder("rgb8", size=(4, 5), bin=json.loads)
    sample = {
        **WHERE,
        "npz": saved(np.savez, a=np.arange(3)),
        "png": picture("PNG"),
        "bin": b"[1]",
        "cls.gz": gzip.compress(b"4"),
    }
    first = decode(sample)
    second = pickle.loads(pickle.dumps(decode))(sample)
    assert (second["bin"], second["cls.gz"]) == ([1], 4)
    assert np.array_equal(second["npz"]["a"], np.arange(3))
    assert np.array_equal(first["png"], second["png"])


def test_decoder_forgets_field_names_when_there_are_many() -> None:
    decode = decoder()
    decode({f"{k}.cls": b"1" for k in range(10_000)})
    assert len(decode._known) <= 4096


def npy(array: Any, version: tuple[int, int] | None = None) -> bytes:
    np.lib.format.write_array(out := io.BytesIO(), np.asanyarray(array), version=version)
    return out.getvalue()


def npz(members: dict[str, bytes], kind: int = zipfile.ZIP_DEFLATED) -> bytes:
    return zipped(members, kind)


def with_size(data: bytes, size: int) -> bytes:
    """An archive whose directory states another size of its first member."""
    central = data.index(b"PK\x01\x02")
    return data[: central + 24] + struct.pack("<I", size) + data[central + 28 :]


DTYPES = st.one_of(
    hnp.scalar_dtypes(),
    hnp.unicode_string_dtypes(),
    st.just(np.dtype([("a", ">f4"), ("b", [("c", "S3")]), ("d", "i2", (2,))])),
).filter(lambda dtype: dtype.itemsize > 0)


@given(st.data(), st.sampled_from([(1, 0), (2, 0)]), st.booleans())
def test_npy_equals_the_saved_array_and_owns_its_memory(
    data: st.DataObject, version: tuple[int, int], by_column: bool
) -> None:
    shape = data.draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    dtype = data.draw(DTYPES)
    array = np.ndarray(shape, dtype, bytes(range(1, 128)) * (64 * dtype.itemsize // 127 + 1))
    if by_column:
        array = np.asfortranarray(array)
    decode = NpyDecoder()
    for buffer in (npy(array, version), memoryview(npy(array, version))):  # the second by the remembered header
        got = decode(buffer)
        assert (got.dtype, got.shape, got.tobytes()) == (array.dtype, array.shape, array.tobytes())
        assert got.flags.owndata
        assert got.flags.writeable
        assert got.flags.f_contiguous == array.flags.f_contiguous


def test_npy_header_is_read_again_when_it_changes() -> None:
    decode, first = NpyDecoder(), np.arange(6, dtype="f4")
    for array in (first, np.arange(6, dtype="i4"), np.arange(6.0).reshape(2, 3), first):
        got = decode(npy(array))
        assert got.dtype == array.dtype
        assert np.array_equal(got, array)


def crafted(text: str) -> bytes:
    return b"\x93NUMPY\x01\0" + struct.pack("<H", len(text) + 1) + text.encode("latin1") + b"\n"


@pytest.mark.parametrize("text", [
    "{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000,), }",
    "{'descr': '<f8', 'fortran_order': False, 'shape': (-1, -1), }" + " " * 8,
    "{'descr': '<f8', 'fortran_order': False, 'shape': (0,), }" + " " * 10_000,
    "{'descr': '|O', 'fortran_order': False, 'shape': (0,), }",
    "{'descr': [('a', '<f4'), ('b', '|O')], 'fortran_order': False, 'shape': (0,), }",
    "{'descr': '|V0', 'fortran_order': False, 'shape': (1000000000000,), }",
    "{'descr': [], 'fortran_order': False, 'shape': (1000000000000,), }",
    "{'descr': '<f8', 'fortran_order': False, 'shape': (0, 1" + "0" * 400 + "), }",
    "{'descr': '<f8', 'fortran_order': False, 'shape': (0," + "1," * 200 + "), }",
    "{'descr': '<f8', 'fortran_order': False, 'shape': (0, 4611686018427387904, 4611686018427387904), }",
    "{'descr': '<f8', 'fortran_order': False, 'shape': (1.0,), }",
    "{'descr': '<f8', 'fortran_order': 'False', 'shape': (1,), }",
    "{'descr': '<f8', 'fortran_order': False}",
    "{'descr': 'nothing', 'fortran_order': False, 'shape': (0,), }",
    "__import__('os').abort()", "(" * 5000, "-" * 9000 + "1", "1" + "+1" * 4000, "[" * 9000, "\xff", "",
])  # fmt: skip
def test_npy_with_a_wrong_header_is_refused(text: str) -> None:
    for rest in (b"", bytes(8)):
        failure("npy", crafted(text) + rest)


def test_npz_is_refused_when_it_would_unpack_to_more_than_the_limits_given() -> None:
    array = npy(np.zeros(1000, np.uint8))
    data, low = npz({"a.npy": array}), Limits(unpacked_free_bytes=1, unpacked_ratio=1)
    assert "over the limit of 1 times" in str(failure("npz", data, limits=low))
    for enough in (Limits(unpacked_free_bytes=len(array), unpacked_ratio=1), Limits(unpacked_free_bytes=1)):
        assert decoded("npz", data, limits=enough)["a"].shape == (1000,)


def test_npz_member_longer_than_its_entry_is_not_unpacked() -> None:
    data = with_size(npz({"a.npy": npy(np.zeros(2**25, np.uint8))}), 200)
    assert peak_of(lambda: failure("npz", data)) < 2**22
    assert "CRC" in str(failure("npz", data))


def test_npz_keeps_names_with_folders_and_refuses_the_same_name_twice() -> None:
    assert list(decoded("npz", npz({"a/b.npy": npy(1), "../c.npy": npy(2), ".npy": npy(3)}))) == ["a/b", "../c", ""]
    twice = npz({"a.npy": npy(1), "b.npy": npy(2)}).replace(b"b.npy", b"a.npy")
    assert "two arrays named 'a'" in str(failure("npz", twice))
    assert len(str(failure("npz", npz({"x" * 60_000: b""})))) < 1000


OBJECTS, NINE = np.array([{}], object), {"a.npy": npy(np.arange(9))}


@pytest.mark.parametrize(("field", "why", "data"), [
    ("npy", "never unpickled", saved(np.save, OBJECTS)),
    ("npz", "never unpickled", saved(np.savez, a=OBJECTS)),
    ("npz", "does not begin", b"the rest of arrays" + npz({})),
    ("npz", "over the limit of 200 times", saved(np.savez_compressed, a=np.zeros(2**26 + 1, np.uint8))),
    *(("npy", "version 1 or 2", npy(3)[:6] + version + npy(3)[8:]) for version in (b"\x04\0", b"\x01\x01", b"\0\0")),
    ("npz", "1000000", with_size(npz(NINE), 10**6)),
    # Python's zipfile unpacks these without a bound
    *(("npz", "packed in a way", npz(NINE, kind)) for kind in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)),
    *(("npz", f"{n!r} is no array", npz({n: b"1"})) for n in ("script.py", "a.pkl", "a.npy/", "a", "a.NPY")),
])  # fmt: skip
def test_foreign_archives_are_refused_and_run_no_code(field: str, why: str, data: bytes) -> None:
    assert why in str(failure(field, data))


MOST = Limits()
KINDS = {"JPEG": "jpg", "PNG": "png", "PPM": "ppm", "WEBP": "webp", "BMP": "bmp", "GIF": "gif", "TIFF": "tif"}
KINDS |= {"AVIF": "avif"} if features.check("avif") else {}
RGB, LUMA = Image.fromarray(SMOOTH), np.asarray(Image.fromarray(SMOOTH).convert("L"))


@pytest.mark.parametrize(("field", "kind"), [
    ("png", "PNG"), ("a.ppm", "PPM"), ("pnm", "PPM"), ("webp", "WEBP"), ("bmp", "BMP"), ("tif", "TIFF"),
    ("tiff", "TIFF"), ("jpg", "PNG"), ("gif", "BMP"),
])  # fmt: skip
def test_images_decode_to_their_pixels_under_any_name(field: str, kind: str) -> None:
    data = picture(kind, **({"lossless": True} if kind == "WEBP" else {}))
    rgb, planes, gray = (decoded(field, memoryview(data), spec) for spec in ("rgb8", "torch", "l8"))
    assert np.array_equal(rgb, SMOOTH)
    assert np.array_equal(planes, SMOOTH.transpose(2, 0, 1))
    assert np.array_equal(gray, LUMA)
    assert np.array_equal(np.asarray(decoded(field, data, "pil")), SMOOTH)


@pytest.mark.parametrize("size", [None, (20, 30), (36, 48), (70, 90)])
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_arrays_are_contiguous_writable_and_no_view_of_the_data(kind: str, size: tuple[int, int] | None) -> None:
    height, width = size or (36, 48)
    for spec, shape in (("rgb8", (height, width, 3)), ("l8", (height, width)), ("torch", (3, height, width))):
        data = bytearray(picture(kind))
        got = decoded("jpg", data, spec, size=size)
        assert (got.shape, got.dtype) == (shape, np.uint8)
        assert got.flags.c_contiguous
        before = got.copy()
        data[:] = bytes(len(data))
        assert np.array_equal(got, before)
        got[...] = 1
        assert got.min() == 1


# JPEG by two libraries


@pytest.mark.slow
@pytest.mark.parametrize("size", [None, (36, 48), (17, 23), (9, 12), (4, 6), (2, 3), (5, 40), (50, 60)])
@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("options", [
    {"quality": 95}, {"progressive": True}, {"subsampling": 0}, {"keep_rgb": True}, {"restart_marker_blocks": 1},
], ids=str)  # fmt: skip
def test_jpegs_decode_alike(options: dict[str, Any], mode: str, size: tuple[int, int] | None) -> None:
    pytest.importorskip("simplejpeg")
    for wanted in ("RGB", "L"):
        for source in ("RGB", mode):
            data = picture("JPEG", mode=source, **options)
            one = simplejpeg_pixels(data, wanted, size, MOST)
            assert one is not None
            assert mean_difference(one, np.asarray(pillow_image(data, wanted, size, MOST))) < 0.2


def test_jpegs_in_inks_decode_as_pillow_decodes_them() -> None:
    for image in (RGB.convert("CMYK"), Image.merge("CMYK", [RGB.getchannel(k % 3) for k in range(4)])):
        data = saved_image(image, "JPEG", quality=95)
        assert simplejpeg_pixels(data, "RGB", None, MOST) is None
        expected = Image.open(io.BytesIO(data)).convert("RGB")
        assert np.array_equal(decoded("jpg", data, "rgb8"), np.asarray(expected))
        assert decoded("jpg", data, "l8", size=(9, 8)).shape == (9, 8)
        assert decoded("jpg", data, "pil").mode == "CMYK"


def run_without(library: str, program: str, data: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    program = f"import sys; sys.modules[{library!r}] = None\n{program}"
    return subprocess.run([sys.executable, "-c", program], input=data, capture_output=True, check=False)


@pytest.mark.process
def test_jpegs_decode_without_simplejpeg_and_name_pillow_where_it_is_missing() -> None:
    decode = "from headrace.formats.media import ImageDecoder\nresult = ImageDecoder('rgb8')(sys.stdin.buffer.read())\n"
    data = picture("JPEG")
    run = run_without("simplejpeg", f"{decode}sys.stdout.buffer.write(result.tobytes())", data)
    assert mean_difference(np.frombuffer(run.stdout, np.uint8).reshape(36, 48, 3), decoded("jpg", data, "rgb8")) < 0.2
    run = run_without("PIL", "from headrace.formats.decoders import decoder\ndecoder('rgb8')({'png': b'x'})")
    assert b"pip install 'headrace[image]'" in run.stderr


# scaled


@pytest.mark.parametrize(("height", "width", "size", "by"), [
    (340, 450, None, 1), (340, 450, (224, 224), 1), (336, 336, (112, 112), 2), (335, 336, (112, 112), 1),
    (336, 335, (112, 112), 1), (1500, 2000, (224, 224), 4), (9000, 9000, (1, 1), 8), (1, 9000, (1, 1), 1),
    (1, 1, (9, 9), 1),
])  # fmt: skip
def test_jpegs_are_shrunk_to_no_less_than_1_5_of_the_size(
    height: int, width: int, size: tuple[int, int] | None, by: int
) -> None:
    assert shrinkage(height, width, size) == by


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("size", [(36, 48), (18, 24), (12, 11), (5, 9), (4, 5), (40, 20), (72, 96)])
def test_scaled_images_are_near_pillows_own_from_all_pixels(kind: str, size: tuple[int, int]) -> None:
    data = picture(kind, **({"quality": 95} if kind == "JPEG" else {}))
    expected = Image.open(io.BytesIO(data)).resize(size[::-1], Image.Resampling.BILINEAR)
    for spec, mode in (("rgb8", "RGB"), ("l8", "L")):
        most = 1 if size == (36, 48) else 2
        assert mean_difference(decoded("jpg", data, spec, size=size), np.asarray(expected.convert(mode))) < most
    assert np.array_equal(
        decoded("jpg", data, "torch", size=size), decoded("jpg", data, "rgb8", size=size).transpose(2, 0, 1)
    )
    assert decoded("jpg", data, "pil", size=size).size == size[::-1]


def test_images_of_one_pixel_and_one_row_decode_and_scale() -> None:
    for kind, field in KINDS.items():
        for width in (1, 7):
            data = saved_image(Image.new("RGB", (width, 1), (200, 200, 200)), kind)
            assert decoded(field, data, "torch").shape == (3, 1, width)
            large = decoded(field, data, "rgb8", size=(3, 4))
            assert large.shape == (3, 4, 3)
            assert abs(large.astype(int) - 200).max() <= 3


# kinds of pixels


def test_alpha_is_dropped_and_palettes_are_looked_up() -> None:
    assert np.array_equal(decoded("png", picture("PNG", mode="RGBA"), "rgb8"), SMOOTH)
    assert np.array_equal(decoded("png", picture("PNG", mode="LA"), "l8"), LUMA)
    assert np.array_equal(decoded("png", picture("PNG", transparency=(0, 0, 90)), "rgb8"), SMOOTH)
    palette = RGB.quantize(64)
    expected = np.asarray(palette.convert("RGB"))
    for transparency in ({}, {"transparency": bytes(range(64))}, {"transparency": 3}):
        assert np.array_equal(decoded("png", saved_image(palette, "PNG", **transparency), "rgb8"), expected)
    assert np.array_equal(decoded("png", saved_image(palette, "GIF"), "rgb8"), expected)


def test_images_of_two_levels_become_black_and_white() -> None:
    bits = RGB.convert("1")
    for kind in ("PNG", "TIFF", "PPM"):
        assert np.array_equal(decoded("png", saved_image(bits, kind), "l8"), np.asarray(bits) * np.uint8(255))


@pytest.mark.parametrize(("field", "kind"), [("png", "PNG"), ("tif", "TIFF"), ("pgm", "PPM")])
def test_samples_of_sixteen_bits_become_their_upper_eight(field: str, kind: str) -> None:
    deep = np.arange(0, 2**16, 64, dtype=np.uint16).reshape(32, 32)
    data = picture(kind, deep)
    assert np.array_equal(decoded(field, data, "l8"), deep >> 8)
    assert np.array_equal(decoded(field, data, "rgb8")[:, :, 1], deep >> 8)
    assert decoded(field, data, "torch", size=(4, 4)).max() > 200


def test_colours_of_sixteen_bits_and_interlaced_pngs_decode() -> None:
    deep = (np.arange(4 * 5 * 3) * 999).reshape(4, 5, 3)
    rows = b"".join(b"\0" + row.tobytes() for row in deep.astype(">u2"))
    data = png(struct.pack(">IIBBBBB", 5, 4, 16, 2, 0, 0, 0), rows)
    assert np.array_equal(decoded("png", data, "rgb8"), deep >> 8)
    adam7 = struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 1)  # 1 x 1: one pass of one pixel
    assert decoded("png", png(adam7, b"\0\1\2\3"), "rgb8").tolist() == [[[1, 2, 3]]]


def png(head: bytes, rows: bytes) -> bytes:
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in chunks
    )


def test_32_bit_samples_are_refused_except_as_pillow_image() -> None:
    for dtype, mode in ((np.float32, "F"), (np.int32, "I")):
        data = picture("TIFF", np.ones((3, 4), dtype))
        assert "32 bits" in str(failure("tiff", data, "rgb8"))
        assert decoded("tiff", data, "pil").mode == mode


def test_first_image_is_taken_when_there_are_several() -> None:
    others = [Image.new("RGB", (48, 36), (9, 9, 9)), Image.new("RGB", (48, 36), (99, 9, 9))]
    for kind, options in (("TIFF", {}), ("WEBP", {"lossless": True}), ("MPO", {"quality": 95})):
        data = saved_image(RGB, kind, save_all=True, append_images=others, **options)
        for spec, size in (("rgb8", None), ("rgb8", (20, 20)), ("pil", (20, 20))):
            expected = RGB.resize((20, 20), Image.Resampling.BILINEAR) if size else RGB
            assert mean_difference(np.asarray(decoded("x.jpg", data, spec, size=size)), np.asarray(expected)) < 2
    shades = [Image.new("L", (8, 6), shade) for shade in (40, 80, 120)]
    data = saved_image(shades[0], "GIF", save_all=True, append_images=shades[1:])
    assert decoded("gif", data, "l8").tolist() == [[40] * 8] * 6


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_orientation_in_exif_is_not_applied(kind: str) -> None:
    exif = Image.Exif()
    exif[0x112] = 6  # to be turned by 90 degrees
    data = picture(kind, exif=exif)
    assert decoded("jpg", data, "rgb8").shape == (36, 48, 3)
    assert np.array_equal(np.asarray(decoded("jpg", data, "l8")), decoded("jpg", picture(kind), "l8"))


SPECS = ("rgb8", "torch", "l8", "pil")
HUGE = 60_000
NOISE = np.random.default_rng(0).integers(0, 256, (24, 24, 3), np.uint8)


def put(data: bytes, at: int, layout: str, *values: int) -> bytes:
    new = struct.pack(layout, *values)
    return data[:at] + new + data[at + len(new) :]


def huge_png() -> bytes:
    head = put(picture("PNG"), 16, ">II", HUGE, HUGE)
    return put(head, 29, ">I", zlib.crc32(head[12:29]))


def huge_jpeg(progressive: bool) -> bytes:
    data = picture("JPEG", progressive=progressive)
    return put(data, data.index(b"\xff\xc2" if progressive else b"\xff\xc0") + 5, ">HH", HUGE, HUGE)


def huge_gif_frame() -> bytes:
    data = picture("GIF")
    return put(data, data.rindex(b"\x2c" + struct.pack("<HHHH", 0, 0, 48, 36)) + 5, "<HH", HUGE, HUGE)


def huge_tiff(pages: int) -> bytes:
    image = Image.new("RGB", (48, 36))
    data = saved_image(image, "TIFF", compression="tiff_deflate", save_all=True, append_images=[image] * (pages - 1))
    table = struct.unpack_from("<I", data, 4)[0]
    for k in range(struct.unpack_from("<H", data, table)[0]):
        entry = table + 2 + 12 * k
        if struct.unpack_from("<H", data, entry)[0] in (256, 257):
            data = put(data, entry + 2, "<HII", 4, 1, HUGE)
    return data


def large_webp() -> bytes:
    data = picture("WEBP", lossless=True)
    return put(data, data.index(b"VP8L") + 9, "<I", 16383 | 16383 << 14)  # as large as can be: 2**28 pixels


def animated_gif() -> bytes:
    frames = [Image.new("L", (48, 36), shade) for shade in (1, 2, 3)]
    return put(saved_image(frames[0], "GIF", save_all=True, append_images=frames[1:]), 6, "<HH", HUGE, HUGE)


BOMBS: dict[str, Callable[[], bytes]] = {
    "PNG": huge_png,
    "JPEG": lambda: huge_jpeg(False),
    "progressive JPEG": lambda: huge_jpeg(True),
    "GIF": lambda: put(picture("GIF"), 6, "<HH", HUGE, HUGE),
    "frame of a GIF": huge_gif_frame,
    "animated GIF": animated_gif,
    "TIFF": lambda: huge_tiff(1),
    "TIFF of several pages": lambda: huge_tiff(3),
    "WEBP": large_webp,
    "BMP": lambda: put(picture("BMP"), 18, "<ii", HUGE, HUGE),
    "PPM": lambda: b"P6 60000 60000 255\n" + bytes(99),
    "PGM": lambda: b"P5 60000 60000 65535\n" + bytes(99),
    "PBM": lambda: b"P1 60000 60000\n0 1",
}


@pytest.mark.slow
@pytest.mark.parametrize("of_pillow", [True, False])
@pytest.mark.parametrize("kind", BOMBS)
def test_pixel_limit_is_checked_in_the_header(kind: str, of_pillow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not of_pillow:
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)  # a program may switch off Pillow's own
    data = BOMBS[kind]()

    def refused() -> None:
        for spec in SPECS:
            for size in (None, (8, 8)):
                error = str(failure("jpg", data, spec, size=size))
                assert "pixels, over the limit" in error or (of_pillow and "exceeds limit" in error)

    assert peak_of(refused) < 2**23


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "PPM"])
def test_pixel_limit_is_the_one_that_was_given(kind: str) -> None:
    data = picture(kind)
    for spec in SPECS:
        error = failure("png", data, spec, limits=Limits(pixels=48 * 36 - 1))
        assert "it has 48 x 36 pixels, over the limit of 1727" in str(error)
        decoded("png", data, spec, limits=Limits(pixels=48 * 36))


@pytest.mark.parametrize("spec", ["rgb8", "l8", "pil"])
@pytest.mark.parametrize("options", [
    {}, {"progressive": True}, {"restart_marker_blocks": 1}, {"mode": "L"}, {"mode": "CMYK"},
], ids=str)  # fmt: skip
def test_jpeg_that_is_cut_off_or_lacks_its_middle_is_an_error(options: dict[str, object], spec: str) -> None:
    data = picture("JPEG", NOISE, **options)
    for length in [*range(0, len(data), 41), len(data) - 2, len(data) - 1]:
        failure("jpg", data[:length], spec)
        failure("jpg", data[:length], spec, size=(6, 5))
    large = picture("JPEG", np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8))
    failure("jpg", large[: len(large) // 2], spec)
    failure("jpg", large[:300] + large[-40:-2], spec)


@pytest.mark.parametrize("kind", ["PNG", "GIF", "WEBP", "BMP", "PPM", "TIFF"])
def test_image_that_is_cut_off_is_an_error(kind: str) -> None:
    data = picture(kind, NOISE)
    for spec in SPECS:
        for length in (len(data) // 2, len(data) // 4, 12):
            failure("png", data[:length], spec)


def test_png_with_a_changed_byte_or_a_bomb_in_its_text_is_an_error() -> None:
    data, body = picture("PNG"), b"zTXta\0\0" + zlib.compress(bytes(10**8))
    for place in range(data.index(b"IDAT") + 4, len(data) - 20, 97):
        failure("png", put(data, place, "B", data[place] ^ 16), "rgb8")
    bomb = data[:33] + struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body)) + data[33:]
    failure("png", bomb, "rgb8")


@pytest.mark.parametrize("data", [
    b"", b"\xff\xd8", b"\xff\xd8\xff\xd9", b"no image", b"<svg/>", bytes(100), b"P6 -5 5 255\n", b"P6 " + b"9" * 5000,
    b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
])  # fmt: skip
def test_data_that_is_no_image_is_an_error(data: bytes) -> None:
    for spec in SPECS:
        assert "an image (png): " in str(failure("png", data, spec))
        assert "0x" not in str(failure("png", data, spec))  # no object's address


LENGTHS = st.integers(1, 70)


@pytest.mark.skipif(not torch_is_fast(), reason="torch is not used here: this processor has no AVX2")
@given(LENGTHS, LENGTHS, LENGTHS, LENGTHS, st.booleans(), st.integers(0, 99))
def test_torch_and_pillow_differ_by_one_at_most(
    height: int, width: int, to_height: int, to_width: int, is_gray: bool, seed: int
) -> None:
    shape = (height, width) if is_gray else (height, width, 3)
    pixels = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    one, other = by_torch(pixels, (to_height, to_width)), by_pillow(pixels, (to_height, to_width))
    assert one.shape == other.shape == (to_height, to_width, *shape[2:])
    assert one.dtype == other.dtype == np.uint8
    assert np.abs(one.astype(int) - other).max() <= 1
    assert one.flags.c_contiguous
    assert one.flags.writeable


@pytest.mark.parametrize(("shape", "size"), [
    ((100_000, 1), (1, 1)), ((1, 100_000), (1, 3)), ((1000, 1000, 3), (1, 1)), ((2, 3, 3), (900, 700)),
])  # fmt: skip
def test_extreme_scaling_equals_pillow(shape: tuple[int, ...], size: tuple[int, int]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    assert np.abs(scaled(pixels, size).astype(int) - by_pillow(pixels, size)).max() <= 1


def test_scaling_keeps_a_single_colour() -> None:
    for size in ((3, 5), (300, 200)):
        assert (scaled(np.full((31, 47, 3), 255, np.uint8), size) == 255).all()


def test_array_of_the_right_size_is_returned() -> None:
    pixels = np.zeros((4, 5, 3), np.uint8)
    assert scaled(pixels, (4, 5)) is pixels


soundfile = pytest.importorskip("soundfile")

TONE = np.sin(np.arange(2000, dtype=np.float32) / 9)[:, None] * np.array([[0.5, -0.25]], np.float32)


def tone(kind: str, subtype: str | None = None, *, times: int = 1) -> bytes:
    soundfile.write(out := io.BytesIO(), np.tile(TONE, (times, 1)), 16000, format=kind, subtype=subtype)
    return out.getvalue()


def packed_tone(container: str) -> bytes:
    """One second of 440 Hz."""
    av = videos.av
    samples = np.sin(np.arange(48000, dtype=np.float32) / 48000 * 440 * 2 * np.pi)[None] / 2
    with av.open(out := io.BytesIO(), "w", format=container) as file:
        stream = file.add_stream("libopus" if container == "webm" else "aac", rate=48000)
        stream.layout = "mono"
        for at in range(0, 48000, 960):
            frame = av.AudioFrame.from_ndarray(samples[:, at : at + 960], format="fltp", layout="mono")
            frame.sample_rate, frame.pts = 48000, at
            file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    return out.getvalue()


def heard(what: str, data: bytes) -> Any:
    sound = decoding.decoded("x", data, x=what)
    assert sound["array"].dtype == np.float32
    assert sound["array"].flags.c_contiguous
    return sound


def audio_failure(what: str, data: bytes, limits: Limits = DEFAULTS) -> str:
    return str(decoding.failure("x", data, x=what, limits=limits))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "subtype", "most"), [
    ("WAV", "FLOAT", 0), ("WAV", "PCM_16", 0), ("FLAC", None, 0), ("AIFF", None, 0), ("OGG", None, 1e-5),
    ("MP3", None, 1e-4),
])  # fmt: skip
def test_torchcodec_and_soundfile_decode_the_same(kind: str, subtype: str | None, most: float) -> None:
    videos.torchcodec()
    data = tone(kind, subtype)
    sound, wanted = heard("audio:torchcodec", data), heard("audio", data)
    assert (sound["rate"], sound["array"].shape[0]) == (16000, 2)
    assert abs(sound["array"].shape[1] - 2000) <= (300 if kind == "OGG" else 0), "it counts what the encoder padded"
    both = min(sound["array"].shape[1], 2000)
    assert np.abs(sound["array"][:, :both] - wanted["array"][:, :both]).max() <= most
    why = "audio:torchcodec: its samples in 2 channels take over 9999 bytes"
    assert why in audio_failure("audio:torchcodec", data, Limits(member_bytes=9999))


@pytest.mark.parametrize("container", ["mp4", "adts", "webm"])
def test_torchcodec_decodes_containers_unknown_to_soundfile(container: str) -> None:
    videos.torchcodec()
    data = packed_tone(container)
    sound = heard("audio:torchcodec", data)
    assert sound["rate"] == 48000
    assert 0 <= sound["array"].shape[1] - 48000 < 4000, "encoders pad"
    loud = np.abs(np.fft.rfft(sound["array"][0][:48000]))
    assert abs(int(loud.argmax()) - 440) <= 1
    assert "not recognised; 'audio:torchcodec' knows more kinds" in audio_failure("audio", data)


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "AIFF", "MP3", "mp4"])
def test_torchcodec_reports_truncated_audio(kind: str) -> None:
    videos.torchcodec()
    whole = packed_tone("mp4") if kind == "mp4" else tone(kind, times=20)
    heard("audio:torchcodec", whole)
    assert "does not decode as audio:torchcodec" in audio_failure("audio:torchcodec", whole[: len(whole) * 2 // 3])


def test_error_of_missing_torchcodec_names_its_requirements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", None)
    error = audio_failure("audio:torchcodec", tone("WAV"))
    for words in ("torchcodec does not load", "FFmpeg's shared libraries", "'audio' is by soundfile"):
        assert words in error


def test_audio_is_not_decoded_over_the_limit() -> None:
    error = audio_failure("audio", tone("FLAC"), Limits(member_bytes=15999))
    assert "2000 samples in 2 channels take 16000 bytes, over the limit of 15999" in error
