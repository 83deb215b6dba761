"""Decodes images to arrays: Pillow for all kinds, simplejpeg, if installed, for plain JPEG.

Milliseconds of CPU time for a JPEG of 85 KB and 450 x 340 pixels (benchmarks/image_decoders.py):

| to | this way | Pillow alone |
|---|---|---|
| rgb8 | 0.8 | 1.2 |
| l8 | 0.7 | 1.1 |
| rgb8, 224 x 224 | 1.0 | 2.1 |

Rejected: scaling to any number of eighths while decoding (simplejpeg can; five eighths and more take longer than full
size); simplejpeg's fast DCT and upsampling (5 % faster, but pixels differ by 1 to 2 of 255 on average).
"""

from __future__ import annotations

import functools
import io
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headrace.formats.limits import DEFAULTS, Limits
from headrace.formats.optional import if_installed, needed
from headrace.types import Buffer

if TYPE_CHECKING:
    from PIL.Image import Image


EXTENSIONS = frozenset(("jpg", "jpeg", "png", "ppm", "pgm", "pbm", "pnm", "webp", "avif", "bmp", "gif", "tif", "tiff"))
SPECS = ("rgb8", "l8", "torch", "pil")
_MODES = {"rgb8": "RGB", "torch": "RGB", "l8": "L"}

# excludes kinds that start a program (EPS) or are not used for photographs
_FORMATS = ("JPEG", "PNG", "PPM", "WEBP", "BMP", "GIF", "TIFF", "AVIF")


class ImageDecoder:
    """Decodes an image as `spec`, optionally scaled to `size`.

    The kind is detected from the bytes, not from a name. Of animations and several pages, the first image is decoded.
    Alpha is dropped, 16-bit samples are reduced to their upper 8 bits, gray from a JPEG is its luma. An EXIF
    orientation is not applied (Pillow applies one in a TIFF's own tags). Arrays own their memory. JPEG has no checksum:
    damage that libjpeg tolerates within the picture is not detected, but truncation is an error.

    Args:
        spec: One of SPECS.
        size: (height, width) in pixels.
        limits: `pixels` is checked against the header before decoding. Pillow has its own limit, based on
            `PIL.Image.MAX_IMAGE_PIXELS`.
    """

    def __init__(self, spec: str, size: tuple[int, int] | None = None, limits: Limits = DEFAULTS) -> None:
        self._spec = spec
        self._size = (size[0], size[1]) if size else None
        self._limits = limits

    def __call__(self, data: Buffer) -> object:
        mode = _MODES.get(self._spec)
        if mode is None:
            image = pillow_image(data, None, self._size, self._limits)
            return image.resize((self._size[1], self._size[0]), _bilinear()) if self._size else image
        pixels = simplejpeg_pixels(data, mode, self._size, self._limits)
        if pixels is None:
            pixels = np.array(pillow_image(data, mode, self._size, self._limits))
        if self._size:
            pixels = scaled(pixels, self._size)
        return planes(pixels) if self._spec == "torch" else pixels


def simplejpeg_pixels(data: Buffer, mode: str, size: tuple[int, int] | None, limits: Limits) -> Pixels | None:
    """Decode to `[H, W, 3]` or, in mode "L", `[H, W]`, at least of `size`. Faster than Pillow.

    None unless the file is a plain, intact JPEG. Pillow decides on all others, so that the accepted files do not depend
    on simplejpeg.
    """
    library = if_installed("simplejpeg") if data[:2] == b"\xff\xd8" else None
    if library is None:
        return None
    try:
        height, width, colours, _ = library.decode_jpeg_header(data)
    except ValueError:
        return None
    limits.check_pixels(width, height)
    if colours not in ("YCbCr", "Gray", "RGB"):
        return None
    by = shrinkage(height, width, size)
    least = {"min_height": -(-height // by), "min_width": -(-width // by), "min_factor": by} if by > 1 else {}
    try:
        pixels: Pixels = library.decode_jpeg(data, "GRAY" if mode == "L" else "RGB", **least)
    except ValueError:
        return None
    return pixels[:, :, 0] if mode == "L" else pixels


def shrinkage(height: int, width: int, size: tuple[int, int] | None) -> int:
    """Return 1, 2, 4 or 8: the scale reduction in a JPEG's decoder, if `size` is wanted.

    The decoder's output has at least 1.5 times `size`. Compared to scaling from all pixels, pixels differ by up to 1.4
    of 255 on average (40 dB). 2000 x 1500 to 224 x 224 pixels take 6.8 ms instead of 10.7. With 1 times, as Pillow
    does, it would take up to a quarter less, but pixels would differ by up to 2.7 (34 dB).
    """
    if size is None:
        return 1
    return next((by for by in (8, 4, 2) if 2 * height >= 3 * by * size[0] and 2 * width >= 3 * by * size[1]), 1)


def pillow_image(data: Buffer, mode: str | None, size: tuple[int, int] | None, limits: Limits) -> Image:
    """Decode to `mode`, or the image's own. May be reduced, but at least to `size`."""
    library = needed("PIL.Image", "image", kind=ValueError)
    try:
        image: Image = library.open(io.BytesIO(data), formats=_known_formats())
    except library.UnidentifiedImageError:
        raise ValueError(f"its {len(data)} bytes are no image of a known kind") from None
    limits.check_pixels(image.width, image.height)
    if image.format in ("JPEG", "MPO"):
        by = shrinkage(image.height, image.width, size)
        image.draft(mode or image.mode, (image.width // by, image.height // by))  # also decodes only luma
    image.load()
    return image if mode is None else _converted(image, mode)


@functools.cache
def _known_formats() -> tuple[str, ...]:
    """The formats of the installed Pillow; older versions lack AVIF."""
    from PIL import Image

    Image.init()
    return tuple(name for name in _FORMATS if name in Image.OPEN)


def _bilinear() -> Any:
    from PIL.Image import Resampling

    return Resampling.BILINEAR


def _converted(image: Image, mode: str) -> Image:
    from PIL.Image import fromarray

    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM"):
        # Pillow would clip at 255
        image = fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise ValueError(f"its samples have 32 bits (mode {image.mode}); use the spec 'pil'")
    image.info.pop("transparency", None)  # Pillow would warn about its loss, or search for a replacement colour
    return image if image.mode == mode else image.convert(mode)


def planes(array: Pixels) -> Pixels:
    return np.ascontiguousarray(array.transpose(2, 0, 1))


Pixels = NDArray[np.uint8]


def scaled(pixels: Pixels, size: tuple[int, int]) -> Pixels:
    """Scale `[H, W]` or `[H, W, 3]` to `size`. Results differ by at most 1 between machines.

    torch's kernels for bytes take a seventh of Pillow's time, with equal results. From 450 x 340 to 224 x 224 pixels:
    0.15 and 1.05 ms on one core.
    """
    if pixels.shape[:2] == size:
        return pixels
    return by_torch(pixels, size) if torch_is_fast() else by_pillow(pixels, size)


@functools.cache
def torch_is_fast() -> bool:
    """True if torch has vectorized kernels for bytes here.

    The general ones take nearly twice Pillow's time, and give wrong pixels for gray images scaled to a width of 1
    (2.13).
    """
    import torch

    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


def by_torch(pixels: Pixels, size: tuple[int, int]) -> Pixels:
    import torch

    # unsqueeze and permute give strides of "channels last", so that torch reorders nothing
    planes = torch.from_numpy(np.atleast_3d(pixels)).unsqueeze(0).permute(0, 3, 1, 2)
    new = torch.nn.functional.interpolate(planes, size, mode="bilinear", antialias=True)
    array: Pixels = new[0].permute(1, 2, 0).numpy()
    return np.ascontiguousarray(array.reshape(*size, *pixels.shape[2:]))


def by_pillow(pixels: Pixels, size: tuple[int, int]) -> Pixels:
    from PIL import Image

    return np.array(Image.fromarray(pixels).resize((size[1], size[0]), Image.Resampling.BILINEAR))
