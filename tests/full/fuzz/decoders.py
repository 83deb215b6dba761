"""The decoders of fields: damage is a DecodeError, and values are those of numpy, json and Pillow.

`run.py` adds bounds on the time and memory that one input may take; limits are low, so that bombs are small.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from builders.numbers import npy, saved
from full.fuzz.dice import Dice
from PIL import Image

from headrace.errors import DecodeError
from headrace.formats.decoders import Decoder, decoder
from headrace.formats.limits import Limits
from headrace.formats.media import pillow_image, simplejpeg_pixels

LIMITS = Limits(pixels=2**16, unpacked_free_bytes=2**18, unpacked_ratio=20)
OPTIONS: tuple[dict[str, Any], ...] = (
    {"spec": "rgb8"},
    {"spec": "l8"},
    {"spec": "torch", "size": (7, 5)},
    {"spec": "pil"},
    {"spec": "pil", "size": (9, 3)},
    {"spec": "l8", "size": (1, 1)},
)
DTYPES = ("|u1", "<f4", ">f4", "<i8", "|b1", "<c16", "<U3", "|S2", "|V3", "<M8[ns]", "|O", "<f2", "|S0", "<m8[D]", "?")
SHAPES = (
    "()", "(1,)", "(3,)", "(2, 3)", "(0,)", "(4, 0)", "(-1,)", "(2**40,)", "(99999999999, 99999999999)", "(True,)", "3",
    "(1.0,)", "(2, -2)",
)  # fmt: skip
JSONS = (
    b'{"a": [1, 2.5, -3e400, null, true], "b": "\\ud800", "a": {}}',
    b"[" * 3000 + b"]" * 3000,
    b"NaN",
    b"1" * 5000,
    '"ü"'.encode("utf-16"),
    b"\xef\xbb\xbf{}",
)
TURNED = b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06" + bytes(6)
NUMBERS = (b"7", b" -12\n", b"+3", b"007", b"1_0", "٣".encode(), b"9" * 5000, b"", b"-", b"\x1c7", b"+ 3", b"--1")


def seeds() -> Iterator[bytes]:
    for array in (
        np.arange(6.0).reshape(2, 3),
        np.int64(3),
        np.zeros((2, 0)),
        np.asfortranarray(np.eye(3, 4, dtype="f4")),
    ):
        yield b"\x00" + npy(array)
    yield from (bytes([1, k, k // 3, 0, 24 % (k + 1)]) + bytes(24) for k in range(40))
    yield b"\x02" + saved(np.savez, a=np.arange(3), b=np.eye(2))
    yield b"\x02" + saved(np.savez_compressed, a=np.zeros(500))
    yield from (bytes([3, k, 9]) + npy(np.arange(k)) for k in range(4))
    yield from (b"\x04" + text for text in JSONS)
    yield from (b"\x05" + text for text in NUMBERS)
    yield from (b"\x06" + text for text in ("ü".encode(), b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbfa"))
    for way, texts in ((7, JSONS), (8, (npy(np.eye(3)),))):
        yield from (bytes([way]) + gzip.compress(text, mtime=0) for text in texts)
        yield from (bytes([way + 2]) + text for text in texts)
    yield b"\x07" + gzip.compress(b"1", mtime=0) + gzip.compress(b"2", mtime=0) + bytes(9)
    yield b"\x07" + gzip.compress(bytes(2**20), mtime=0)
    for k, picture in enumerate(_pictures()):
        yield from (bytes([11, option]) + picture for option in (k % len(OPTIONS), (k + 3) % len(OPTIONS)))


def _pictures() -> Iterator[bytes]:
    pixels = (np.arange(20 * 30 * 3) % 251).astype(np.uint8).reshape(20, 30, 3)
    gray, deep = pixels[:, :, 0].copy(), np.arange(600, dtype=np.uint16).reshape(20, 30) * 100
    images = [Image.fromarray(pixels), Image.fromarray(gray), Image.fromarray(pixels).convert("P")]
    for image in images:
        for kind in ("PNG", "GIF", "BMP", "TIFF", "WEBP", "PPM", "JPEG"):
            out = io.BytesIO()
            (image.convert("RGB") if image.mode == "P" and kind in ("JPEG", "PPM", "WEBP") else image).save(out, kind)
            yield out.getvalue()
    more: list[tuple[Image.Image, str, dict[str, Any]]] = [
        (images[0].convert("CMYK"), "JPEG", {}),
        (images[0], "JPEG", {"progressive": True, "quality": 30}),
        (images[0], "JPEG", {"subsampling": 0, "exif": TURNED}),
        (images[0].convert("RGBA"), "PNG", {}),
        (images[2], "PNG", {"transparency": 3}),
        (Image.fromarray(deep), "PNG", {}),
        (Image.fromarray(deep), "TIFF", {}),
        (images[0], "TIFF", {"compression": "tiff_lzw"}),
        (images[0], "TIFF", {"compression": "tiff_deflate"}),
        (images[1].convert("1"), "TIFF", {"compression": "group4"}),
        (images[1].convert("1"), "PPM", {}),
        (images[0], "GIF", {"save_all": True, "append_images": images[:1]}),
        (images[0].convert("RGBA"), "WEBP", {"lossless": True}),
    ]
    for image, kind, options in more:
        image.save(out := io.BytesIO(), kind, **options)
        yield out.getvalue()


def _decoded(field: str, data: bytes, **options: Any) -> Any:
    decode: Decoder = decoder(limits=LIMITS, **options)
    try:
        return decode({"__key__": "k", field: data})[field]
    except DecodeError as error:
        _assert_told(error, field)
        return None


def _assert_told(error: DecodeError, field: str) -> None:
    assert (error.field, error.key) == (field, "k")
    assert len(str(error)) < 1000


def _check_npy(data: bytes) -> None:
    array = _decoded("npy", data)
    if array is not None:
        _same(array, np.load(io.BytesIO(data), allow_pickle=False))
        start = 10 if data[6] == 1 else 12
        assert len(data) == start + int.from_bytes(data[8:start], "little") + array.nbytes
        assert array.flags.owndata


def _same(array: Any, other: Any) -> None:
    assert array.shape == other.shape
    assert array.dtype == other.dtype or not other.dtype.itemsize  # of no elements: numpy itself makes S1 of S0
    assert array.tobytes() == other.tobytes()


def _check_made_npy(data: bytes) -> None:
    dice = Dice(data)
    version, descr, shape = dice.number(5), dice.one_of(DTYPES), dice.one_of(SHAPES)
    order, size = dice.one_of(("False", "True", "0")), dice.number(40)
    more = dice.one_of(("", ", 'x': 1", "  ", "\\N", "[" * 300))
    text = f"{{'descr': '{descr}', 'fortran_order': {order}, 'shape': {shape}{more}}}".encode()
    if dice.number(3) == 0:
        text = text.replace(b"'" + descr.encode() + b"'", b"[('a', '<i4'), ('b', '|O', (2,))]")
    length = struct.pack("<H" if version in (0, 1) else "<I", len(text))
    _check_npy(
        b"\x93NUMPY" + bytes([max(version, 1), 0]) + length + text + bytes(dice.rest().ljust(size, b"\1")[:size])
    )


def _check_npz(data: bytes) -> None:
    arrays = _decoded("npz", data)
    if arrays is not None:
        with np.load(io.BytesIO(data), allow_pickle=False) as theirs:
            assert set(arrays) == set(theirs)
            for name, array in arrays.items():
                _same(array, theirs[name])


def _check_made_npz(data: bytes) -> None:
    dice, out = Dice(data), io.BytesIO()
    count, kind = dice.number(2) + 1, dice.one_of((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA))
    with warnings.catch_warnings(), zipfile.ZipFile(out, "w", kind) as archive:
        warnings.simplefilter("ignore")  # of names that are there twice
        for _ in range(count):
            name = dice.one_of(("a.npy", "b.npy", "a", "../c.npy", ".npy"))
            archive.writestr(zipfile.ZipInfo(name), dice.rest() if dice.number(3) else npy(np.arange(3)), kind)
    _check_npz(out.getvalue())


def _check_json(data: bytes) -> None:
    value = _decoded("json", data)
    try:
        other = json.loads(data)
    except (ValueError, RecursionError):
        assert value is None
        return
    assert repr(value) == repr(other)


def _check_int(data: bytes) -> None:
    value = _decoded("cls", data)
    match = re.fullmatch(rb"[ \t\n\r\v\f]*([+-]?[0-9]{1,4300})[ \t\n\r\v\f]*", data)
    assert value == (int(match[1]) if match else None)


def _check_text(data: bytes) -> None:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        assert _decoded("txt", data) is None
    else:
        assert _decoded("txt", data) == text


def _check_gzip(inner: str) -> Callable[[bytes], None]:
    def run(data: bytes) -> None:
        value = _decoded(f"{inner}.gz", data)
        if value is not None:
            unpacked = gzip.decompress(data)
            assert len(unpacked) <= max(LIMITS.unpacked_free_bytes, LIMITS.unpacked_ratio * len(data))
            assert repr(value) == repr(_decoded(inner, unpacked))

    return run


def _check_made_gzip(inner: str) -> Callable[[bytes], None]:
    return lambda data: _check_gzip(inner)(gzip.compress(data, 1, mtime=0))


def _check_image(data: bytes) -> None:
    options, picture = OPTIONS[data[0] % len(OPTIONS)] if data else OPTIONS[0], data[1:]
    value = _decoded("jpg", picture, **options)
    if isinstance(value, np.ndarray):
        assert value.dtype == np.uint8
        size = options.get("size")
        shape = value.shape[1:] if options["spec"] == "torch" else value.shape[:2]
        assert size in (None, shape)
        assert value.shape == {"rgb8": (*shape, 3), "torch": (3, *shape), "l8": shape}[options["spec"]]
        assert shape[0] * shape[1] <= LIMITS.pixels
    if options["spec"] in ("rgb8", "l8"):
        mode = "RGB" if options["spec"] == "rgb8" else "L"
        try:
            quick = simplejpeg_pixels(picture, mode, None, LIMITS)
        except ValueError:
            return  # too many pixels
        if quick is not None:  # then Pillow would have given a picture as well
            slow = np.array(pillow_image(picture, mode, None, LIMITS))
            assert slow.shape == quick.shape


WAYS: tuple[Callable[[bytes], None], ...] = (
    _check_npy,
    _check_made_npy,
    _check_npz,
    _check_made_npz,
    _check_json,
    _check_int,
    _check_text,
    _check_gzip("json"),
    _check_gzip("npy"),
    _check_made_gzip("json"),
    _check_made_gzip("npy"),
    _check_image,
)


def check(data: bytes) -> None:
    WAYS[data[0] % len(WAYS) if data else 0](data[1:])
