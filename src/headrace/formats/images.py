"""Images in memory to arrays: Pillow for all kinds, simplejpeg for plain JPEG where it is installed."""

from __future__ import annotations

import functools
import importlib
import io
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headrace.types import Buffer

if TYPE_CHECKING:
    from PIL.Image import Image

EXTENSIONS = frozenset(("jpg", "jpeg", "png", "ppm", "pgm", "pbm", "pnm", "webp", "bmp", "gif", "tif", "tiff"))
SPECS = ("rgb8", "l8", "torch", "pil")
PIXELS_MOST = 178_956_970
"""As Pillow's own bound against decompression bombs, but not to be switched off for a whole process."""

# nothing that starts a program (EPS) or that nobody keeps photographs in
_FORMATS = ("JPEG", "PNG", "PPM", "WEBP", "BMP", "GIF", "TIFF")


class ImageDecoder:
    """The image in a file's bytes, as `spec` wants it; scaled to `size`, (height, width), if given.

    Of an animation it is the first frame; alpha is dropped; samples of 16 bits become their upper 8;
    an orientation in EXIF is not applied.
    """

    def __init__(self, spec: str, size: tuple[int, int] | None = None) -> None:
        self._spec = spec
        self._size = size

    def __call__(self, data: Buffer) -> Any:
        if self._size is None and self._spec in ("rgb8", "torch") and data[:2] == b"\xff\xd8":
            array = by_simplejpeg(data)
            if array is not None:
                return planes(array) if self._spec == "torch" else array
        return by_pillow(data, self._spec, self._size)


@functools.cache
def _simplejpeg() -> Any:
    try:
        return importlib.import_module("simplejpeg")
    except ImportError:
        return None


def by_simplejpeg(data: Buffer) -> NDArray[np.uint8] | None:
    """`[H, W, 3]`, sooner than by Pillow; None where the file is anything but plain and sound: let Pillow judge it."""
    library = _simplejpeg()
    if library is None:
        return None
    try:
        height, width, colours, _ = library.decode_jpeg_header(data)
        if height * width > PIXELS_MOST or colours not in ("YCbCr", "Gray", "RGB"):
            return None
        array: NDArray[np.uint8] = library.decode_jpeg(data, "RGB")
    except ValueError:
        return None
    return array


def by_pillow(data: Buffer, spec: str, size: tuple[int, int] | None) -> Any:
    """The image as `spec` wants it, by Pillow."""
    from PIL import Image, UnidentifiedImageError

    try:
        image: Image.Image = Image.open(io.BytesIO(data), formats=_FORMATS)
    except UnidentifiedImageError:
        raise ValueError(f"its {len(data)} bytes are no image of a known kind") from None
    if image.width * image.height > PIXELS_MOST:
        raise ValueError(f"it has {image.width} x {image.height} pixels, over the limit of {PIXELS_MOST}")
    mode = {"rgb8": "RGB", "torch": "RGB", "l8": "L"}.get(spec)
    if size is not None and image.format == "JPEG":
        image.draft(mode or image.mode, (size[1], size[0]))  # a JPEG can be decoded at 1/2, 1/4 or 1/8
    image.load()
    if mode is not None:
        image = _converted(image, mode)
    if size is not None:
        image = image.resize((size[1], size[0]), Image.Resampling.BILINEAR)
    if spec == "pil":
        return image
    array: NDArray[np.uint8] = np.array(image)
    return planes(array) if spec == "torch" else array


def _converted(image: Image, mode: str) -> Image:
    from PIL.Image import fromarray

    if image.mode.startswith("I;16"):
        # Pillow would clip at 255
        image = fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise ValueError(f"its samples have 32 bits (mode {image.mode}); use the spec 'pil'")
    return image if image.mode == mode else image.convert(mode)


def planes(array: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """`[H, W, 3]` as `[3, H, W]`, contiguous."""
    return np.ascontiguousarray(array.transpose(2, 0, 1))
