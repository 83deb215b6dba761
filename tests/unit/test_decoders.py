"""Fields decode to what their writers put in, own their memory, run no code, and fail with the sample's name."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image

from headrace.errors import DecodeError, OptionError
from headrace.formats import images
from headrace.formats.values import NpyDecoder, decoder

WHERE = {"__key__": "d/7", "__url__": "s3://bucket/a.tar"}
SMOOTH = np.stack([*np.meshgrid(np.arange(48), np.arange(36)), np.full((36, 48), 90)], -1).astype(np.uint8) * 2


def npy(array: Any, version: tuple[int, int] | None = None) -> bytes:
    out = io.BytesIO()
    np.lib.format.write_array(out, np.asanyarray(array), version=version)
    return out.getvalue()


def picture(kind: str, array: np.ndarray[Any, Any] = SMOOTH, mode: str | None = None, **options: Any) -> bytes:
    out = io.BytesIO()
    image = Image.fromarray(array)
    (image.convert(mode) if mode else image).save(out, kind, **options)
    return out.getvalue()


def decoded(field: str, data: Any, *args: Any, **options: Any) -> Any:
    return decoder(*args, **options)({**WHERE, field: data})[field]


def failure(field: str, data: Any, *args: Any, **options: Any) -> DecodeError:
    with pytest.raises(DecodeError) as caught:
        decoded(field, data, *args, **options)
    error = caught.value
    assert (error.field, error.key, error.url, error.stage) == (field, "d/7", "s3://bucket/a.tar", "decode")
    assert str(error).startswith(f"field '{field}' does not decode as ")
    assert error.__cause__ is not None
    return error


@pytest.mark.parametrize("as_buffer", [bytes, bytearray, memoryview])
@pytest.mark.parametrize(("field", "data", "value"), [
    ("cls", b"17", 17), ("index", b"-3\n", -3), ("id", b"0", 0),
    ("txt", "grüße".encode(), "grüße"), ("text", b"", ""), ("transcript", b"a b", "a b"), ("en.txt", b"hi", "hi"),
    ("json", b'{"a": [1, null]}', {"a": [1, None]}), ("meta.json", b"3", 3),
])  # fmt: skip
def test_decoder_goes_by_the_last_part_of_the_field(field: str, data: bytes, value: object, as_buffer: Any) -> None:
    assert decoded(field, as_buffer(data)) == value


@pytest.mark.parametrize("field", ["pth", "pkl", "pyd", "pickle", "jpg", "seg.png", "unknown", "", "txt.gz", "json5"])
def test_decoder_leaves_bytes_alone_when_the_extension_is_not_known_or_not_asked_for(field: str) -> None:
    data = pickle.dumps(print)
    assert decoded(field, data) is data


def test_decoder_gives_a_new_sample_and_leaves_what_is_not_a_field() -> None:
    sample = {"__key__": b"7", "__url__": "u", "__x__.json": b"{}", "cls": b"1", "json": {"not": "bytes"}}
    assert decoder()(sample) == {**sample, "cls": 1}
    assert sample["cls"] == b"1"


@pytest.mark.parametrize(("field", "data", "says"), [
    ("cls", b"1.5", "int: "), ("cls", b"", "int: "), ("cls", b"9" * 9999, "int: "), ("txt", b"\xff", "text: "),
    ("json", b"{", "json: "), ("json", b"[" * 200_000, "too deep"), ("npy", b"", "npy: "), ("npz", b"PK", "npz: "),
])  # fmt: skip
def test_failure_names_field_key_and_address(field: str, data: bytes, says: str) -> None:
    error = failure(field, data)
    assert says in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


# fields by name


def test_by_field_goes_before_the_extension() -> None:
    sample = {**WHERE, "jpg": b"raw", "cls": b"word", "count.bin": b"12", "seg.png": picture("PNG")}
    decode = decoder("rgb8", jpg="bytes", cls="text", **{"count.bin": "int", "seg.png": "l8"})
    values = decode(sample)
    assert (values["jpg"], values["cls"], values["count.bin"]) == (b"raw", "word", 12)
    assert values["seg.png"].shape == (36, 48)


def test_by_field_takes_functions_and_gives_them_bytes() -> None:
    assert decoded("cls", memoryview(b"abc"), cls=lambda data: (type(data), data)) == (bytes, b"abc")


def test_users_own_exception_comes_as_it_is_with_a_note() -> None:
    class OwnError(Exception):
        pass

    def fails(data: bytes) -> None:
        raise OwnError("mine")

    with pytest.raises(OwnError, match="mine") as caught:
        decoded("bin", b"", bin=fails)
    assert caught.value.__notes__ == ["while decoding field 'bin' of sample 'd/7'"]


def test_field_asked_for_by_name_fails_when_it_is_not_bytes() -> None:
    assert "it is a str, not bytes" in str(failure("bin", "text", bin="int"))


@pytest.mark.parametrize(("args", "options", "says"), [
    (("rgb",), {}, "spec='rgb' must be one of rgb8"),
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
    sample = {**WHERE, "npy": npy([1, 2]), "png": picture("PNG"), "bin": b"[1]"}
    first = decode(sample)
    second = pickle.loads(pickle.dumps(decode))(sample)
    assert second["bin"] == [1]
    assert all(np.array_equal(first[field], second[field]) for field in ("npy", "png"))


def test_decoder_forgets_field_names_when_there_are_many() -> None:
    decode = decoder()
    decode({f"{k}.cls": b"1" for k in range(10_000)})
    assert len(decode._known) <= 4096


# arrays

DTYPES = st.one_of(
    hnp.scalar_dtypes(), hnp.unicode_string_dtypes(), st.just(np.dtype([("a", "<f4"), ("b", "i2", (2,))]))
).filter(lambda dtype: dtype.itemsize > 0)


@given(st.data(), st.sampled_from([(1, 0), (2, 0)]), st.booleans())
def test_npy_gives_what_was_written_and_owns_it(data: st.DataObject, version: tuple[int, int], by_column: bool) -> None:
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


def test_npy_tells_headers_apart_when_they_change() -> None:
    decode = NpyDecoder()
    arrays = [
        np.arange(6, dtype="f4"),
        np.arange(6, dtype="i4"),
        np.arange(6.0).reshape(2, 3),
        np.arange(6, dtype="f4"),
    ]
    for array in arrays:
        got = decode(npy(array))
        assert got.dtype == array.dtype
        assert np.array_equal(got, array)


def test_npy_of_objects_is_refused_and_runs_nothing() -> None:
    out = io.BytesIO()
    np.save(out, np.array([{}], object), allow_pickle=True)
    assert "never unpickled" in str(failure("npy", out.getvalue()))


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"\0", lambda data: data[:128]])
def test_npy_is_refused_when_its_length_is_not_its_headers(change: Any) -> None:
    decode = decoder()
    whole = npy(np.arange(9))
    for _ in range(2):
        with pytest.raises(DecodeError, match="the header tells of 72 bytes"):
            decode({**WHERE, "npy": change(whole)})
        decode({**WHERE, "npy": whole})


def crafted(text: str) -> bytes:
    return b"\x93NUMPY\x01\0" + struct.pack("<H", len(text) + 1) + text.encode() + b"\n"


@pytest.mark.parametrize("text", [
    "{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000,), }",
    "{'descr': '<f8', 'fortran_order': False, 'shape': (-1, -1), }" + " " * 8,
    "{'descr': '<f8', 'fortran_order': False, 'shape': (0,), }" + " " * 10_000,
    "{'descr': '|O', 'fortran_order': False, 'shape': (0,), }",
    "{'descr': 'nothing', 'fortran_order': False, 'shape': (0,), }",
    "__import__('os').abort()", "(" * 5000,
])  # fmt: skip
def test_npy_is_refused_when_its_header_lies(text: str) -> None:
    failure("npy", crafted(text) + bytes(8))


def test_npy_is_refused_when_its_version_is_not_known() -> None:
    assert "version 1 or 2" in str(failure("npy", b"\x93NUMPY\x04\0" + bytes(200)))


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_gives_its_arrays_by_name(save: Any) -> None:
    out = io.BytesIO()
    save(out, a=np.arange(3), b=np.eye(2))
    got = decoded("npz", memoryview(out.getvalue()))
    assert list(got) == ["a", "b"]
    assert np.array_equal(got["a"], np.arange(3))
    assert np.array_equal(got["b"], np.eye(2))


def test_npz_is_refused_when_it_would_unpack_to_very_much() -> None:
    out = io.BytesIO()
    np.savez_compressed(out, a=np.zeros(2**26 + 1, np.uint8))
    assert "over the limit of 200 times" in str(failure("npz", out.getvalue()))


def test_npz_is_refused_when_a_member_is_no_array() -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("script.py", "print()")
    assert "'script.py' is no array" in str(failure("npz", out.getvalue()))


# images


@pytest.mark.parametrize(("field", "kind"), [
    ("png", "PNG"), ("a.ppm", "PPM"), ("pnm", "PPM"), ("webp", "WEBP"), ("bmp", "BMP"), ("tif", "TIFF"),
    ("tiff", "TIFF"),
])  # fmt: skip
def test_images_decode_to_their_pixels_by_every_spec(field: str, kind: str) -> None:
    data = picture(kind, **({"lossless": True} if kind == "WEBP" else {}))
    rgb, planes = decoded(field, data, "rgb8"), decoded(field, memoryview(data), "torch")
    assert np.array_equal(rgb, SMOOTH)
    assert np.array_equal(planes, SMOOTH.transpose(2, 0, 1))
    assert planes.flags.c_contiguous
    assert all(
        array.flags.owndata and array.flags.writeable
        for array in (rgb, planes.base if planes.base is not None else planes)
    )
    assert np.array_equal(decoded(field, data, "l8"), np.asarray(Image.fromarray(SMOOTH).convert("L")))
    image = decoded(field, data, "pil")
    assert isinstance(image, Image.Image)
    assert np.array_equal(np.asarray(image), SMOOTH)


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("field", ["jpg", "jpeg"])
def test_jpegs_decode_alike_with_and_without_simplejpeg(field: str, mode: str) -> None:
    data = picture("JPEG", mode=mode, quality=95)
    by_pillow = images.by_pillow(data, "rgb8", None)
    assert by_pillow.shape == (36, 48, 3)
    assert np.abs(by_pillow.astype(int) - SMOOTH).max() < (256 if mode == "L" else 40)
    by_simplejpeg = images.by_simplejpeg(data)
    if mode == "CMYK":
        assert by_simplejpeg is None
    elif by_simplejpeg is not None:
        assert np.abs(by_simplejpeg.astype(int) - by_pillow).max() <= 2
    rgb = decoded(field, memoryview(data), "rgb8")
    assert rgb.shape == (36, 48, 3)
    assert rgb.flags.writeable
    planes = decoded(field, data, "torch")
    assert np.array_equal(planes, rgb.transpose(2, 0, 1))
    assert planes.flags.c_contiguous


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize(("spec", "shape"), [("rgb8", (5, 9, 3)), ("l8", (5, 9)), ("torch", (3, 5, 9)), ("pil", None)])
def test_size_scales_images_to_exactly_that(kind: str, spec: str, shape: tuple[int, ...] | None) -> None:
    got = decoded("jpg", picture(kind), spec, size=(5, 9))
    assert (got.size if shape is None else got.shape) == (shape or (9, 5))
    if spec == "rgb8":
        # within a scaling filter's width of the original's even slope
        assert (
            np.abs(got[:, :, 0].mean(0) - np.asarray(Image.fromarray(SMOOTH).resize((9, 5)))[:, :, 0].mean(0)).max() < 4
        )


def test_alpha_is_dropped_and_palettes_are_looked_up() -> None:
    assert np.array_equal(decoded("png", picture("PNG", mode="RGBA"), "rgb8"), SMOOTH)
    assert decoded("gif", picture("GIF"), "rgb8").shape == (36, 48, 3)


def test_samples_of_sixteen_bits_become_their_upper_eight() -> None:
    deep = np.arange(0, 2**16, 64, dtype=np.uint16).reshape(32, 32)
    assert np.array_equal(decoded("png", picture("PNG", deep), "l8"), deep >> 8)
    assert np.array_equal(decoded("png", picture("PNG", deep), "rgb8")[:, :, 1], deep >> 8)


def test_samples_of_thirty_two_bits_are_refused_but_as_pillow_image() -> None:
    data = picture("TIFF", np.ones((3, 4), np.float32))
    assert "32 bits" in str(failure("tiff", data, "rgb8"))
    assert decoded("tiff", data, "pil").mode == "F"


def test_image_over_the_pixel_limit_is_refused_from_its_header(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)  # a program may switch off Pillow's own
    bomb = bytearray(picture("PNG"))
    bomb[16:24] = struct.pack(">II", 20_000, 20_000)
    bomb[29:33] = struct.pack(">I", __import__("zlib").crc32(bomb[12:29]))
    assert "20000 x 20000 pixels, over the limit" in str(failure("png", bytes(bomb), "rgb8"))
    jpeg = bytearray(picture("JPEG"))
    frame = jpeg.index(b"\xff\xc0")
    jpeg[frame + 5 : frame + 9] = struct.pack(">HH", 60_000, 60_000)
    for spec in ("rgb8", "torch", "l8", "pil"):
        assert "60000 x 60000 pixels, over the limit" in str(failure("jpg", bytes(jpeg), spec))


@pytest.mark.parametrize("spec", ["rgb8", "torch", "l8", "pil"])
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_truncated_image_is_an_error(kind: str, spec: str) -> None:
    data = picture(kind)
    failure("jpg", data[: len(data) // 2], spec)


@pytest.mark.parametrize("data", [b"", b"\xff\xd8", b"no image", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"])
def test_what_is_no_image_of_a_known_kind_is_an_error(data: bytes) -> None:
    assert "an image (png)" in str(failure("png", data, "rgb8"))
    assert "0x" not in str(failure("png", data, "rgb8"))
