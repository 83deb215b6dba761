"""Decodes images and sounds in memory.

Images: Pillow decodes all kinds, simplejpeg, if installed, plain JPEG. Milliseconds of CPU time for a JPEG of 85 KB and
450 x 340 pixels (benchmarks/image_decoders.py):

| to | this way | Pillow alone |
|---|---|---|
| rgb8 | 0.8 | 1.2 |
| l8 | 0.7 | 1.1 |
| rgb8, 224 x 224 | 1.0 | 2.1 |

Rejected: scaling to any number of eighths while decoding (simplejpeg can; five eighths and more take longer than full
size); simplejpeg's fast DCT and upsampling (5 % faster, but pixels differ by 1 to 2 of 255 on average).

Sounds: soundfile decodes WAV, FLAC, Ogg (Vorbis, Opus), MP3, AIFF and others; torchcodec decodes what FFmpeg supports,
such as AAC. For lossy formats their values differ, for some files also their lengths. The decoder is therefore an
explicit option, without a fallback.
"""

from __future__ import annotations

import functools
import importlib
import io
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from headrace._util.lazy import if_installed, needed
from headrace.errors import OptionError, reason_of
from headrace.formats.decoders import BY_TORCHCODEC
from headrace.formats.limits import DEFAULTS, Limits
from headrace.types import Buffer

if TYPE_CHECKING:
    from PIL.Image import Image


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
        spec: One of `IMAGE_SPECS`.
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
            return image if self._size is None else _resized(image, self._size)
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
    from PIL.Image import fromarray

    return np.array(_resized(fromarray(pixels), size))


def _resized(image: Image, size: tuple[int, int]) -> Image:
    from PIL.Image import Resampling

    return image.resize((size[1], size[0]), Resampling.BILINEAR)


def torchcodec_decoders(instead: str) -> Any:
    """Import `torchcodec.decoders`. An OptionError names the alternative `instead`."""
    try:
        return importlib.import_module("torchcodec.decoders")
    except (ImportError, OSError, RuntimeError) as error:
        first = str(error).strip().partition("\n")[0][:200]
        raise OptionError(
            f"torchcodec does not load ({first}): it needs FFmpeg's shared libraries, and a build for the torch that "
            f"is here, which of PyPI's for a torch without CUDA is torchcodec==0.13.*; {instead}"
        ) from error


_SAMPLE_BYTES = 4
_MORE_S = 1.0  # decoded beyond the limit, to detect audio that is too long
_HEAD_BYTES = 4096
_SHORTER_S = 0.1  # tolerated difference to the stated length: encoders pad
_NO_LENGTH = (0, 2**32 - 1)  # sizes in the header of a WAV that was written to a pipe


class Sound(TypedDict):
    """Decoded audio.

    Attributes:
        array: `[channels, time] float32`, from -1 to 1, as torchaudio's waveforms.
        rate: Samples per second.
    """

    array: NDArray[np.float32]
    rate: int


def decode_audio(data: Buffer, limits: Limits = DEFAULTS) -> Sound:
    """Decode audio with soundfile. The kind is detected from the bytes."""
    soundfile = needed("soundfile", "audio", kind=ValueError)
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            frames, channels = int(file.frames), int(file.channels)
            nbytes = frames * channels * _SAMPLE_BYTES
            if not 0 <= nbytes <= limits.member_bytes:
                raise ValueError(
                    f"its {frames} samples in {channels} channels take {nbytes} bytes, over the limit of "
                    f"{limits.member_bytes}"
                )
            heard: NDArray[np.float32] = file.read(frames, dtype="float32", always_2d=True)
            if len(heard) < frames:
                raise ValueError(f"it claims {frames} samples, and has {len(heard)}: it is cut off")
            return {"array": np.ascontiguousarray(heard.T), "rate": int(file.samplerate)}
    except soundfile.LibsndfileError as error:
        why = reason_of(error).rstrip(".")
        more = f"; {BY_TORCHCODEC!r} knows more kinds" if "not recognised" in why else ""
        raise ValueError(why + more) from error


def decode_audio_by_torchcodec(data: Buffer, limits: Limits = DEFAULTS) -> Sound:
    """Decode audio with torchcodec, also that of a video.

    FFmpeg conceals much damage. Audio that is shorter than stated in a WAV, FLAC, AIFF, MP4 or MP3 raises a ValueError.
    """
    decoders = torchcodec_decoders("'audio' is by soundfile")
    body = bytes(data)
    try:
        decoder = decoders.AudioDecoder(body)
        about = decoder.metadata
        rate, channels = about.sample_rate, about.num_channels
        if not rate or not channels:
            raise ValueError("it does not state its number of channels, or their rate")
        stop_s = limits.member_bytes / (_SAMPLE_BYTES * channels * rate) + (about.begin_stream_seconds_from_header or 0)
        played = decoder.get_samples_played_in_range(0, stop_s + _MORE_S)
    except RuntimeError as error:
        raise ValueError(reason_of(error)) from error
    heard: NDArray[np.float32] = np.ascontiguousarray(played.data.numpy())
    end_s = played.pts_seconds + heard.shape[1] / rate
    if heard.nbytes > limits.member_bytes or end_s >= stop_s + _MORE_S / 2:
        raise ValueError(f"its samples in {channels} channels take over {limits.member_bytes} bytes, the limit")
    said_s = _said_s(body, about.duration_seconds_from_header)
    if end_s < said_s - _SHORTER_S:
        raise ValueError(f"it claims {said_s:.3f} s, and has {end_s:.3f}: it is cut off")
    return {"array": heard, "rate": int(played.sample_rate)}


def _said_s(body: bytes, header_s: float | None) -> float:
    """Return the length stated in a file, in seconds. 0 if FFmpeg would only estimate it."""
    head = body[:_HEAD_BYTES]
    if head[:4] == b"RIFF":  # FFmpeg accepts truncated ones
        nbytes = int.from_bytes(head[4:8], "little")
        if nbytes not in _NO_LENGTH and nbytes + 8 > len(body):
            raise ValueError(f"it claims {nbytes + 8} bytes, and has {len(body)}: it is cut off")
    is_said = head[:4] in (b"RIFF", b"fLaC", b"FORM") or head[4:8] == b"ftyp" or b"Xing" in head or b"Info" in head
    return float(header_s or 0) if is_said else 0.0
