"""Images that are cut off, no images, or too large by their header are errors that name the sample."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from builders.memory import peak_of
from PIL import Image
from unit.decoding import decoded, failure, picture, saved

from headrace.formats.limits import Limits

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
    data = saved(image, "TIFF", compression="tiff_deflate", save_all=True, append_images=[image] * (pages - 1))
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
    return put(saved(frames[0], "GIF", save_all=True, append_images=frames[1:]), 6, "<HH", HUGE, HUGE)


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
