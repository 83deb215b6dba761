"""From the bytes of a sample's fields to values, by the field's extension or by what the user says of it.

Nothing here runs code from data: no pickle, no object arrays; what is not known stays bytes.
"""

from __future__ import annotations

import io
import json
import math
import zipfile
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.errors import DecodeError, OptionError
from headrace.formats.images import EXTENSIONS as IMAGE_EXTENSIONS
from headrace.formats.images import SPECS as IMAGE_SPECS
from headrace.formats.images import ImageDecoder
from headrace.types import Buffer

_NPY_MAGIC = b"\x93NUMPY"
_NPY_HEADER_MOST = 10_000
_NPZ_FREE_BYTES = 64 * 2**20
_NPZ_RATIO = 200
_KNOWN_FIELDS_MOST = 4096


def decode_text(data: Buffer) -> str:
    """`data` as UTF-8 text."""
    return str(data, "utf-8")


def decode_int(data: Buffer) -> int:
    """The number that `data` writes in decimal digits."""
    return int(bytes(data))


def decode_json(data: Buffer) -> Any:
    """The value of a JSON document."""
    try:
        return json.loads(bytes(data))
    except RecursionError:
        raise ValueError("it is nested too deep") from None


class NpyDecoder:
    """The array in an .npy file, as one that owns its memory; object arrays are refused.

    Files of one data set mostly have equal headers, so the last one is remembered: 1 us instead of 20.
    """

    def __init__(self) -> None:
        self._last: tuple[bytes, tuple[int, ...], np.dtype[Any], bool] = (b"?", (), np.dtype("u1"), False)

    def __call__(self, data: Buffer) -> NDArray[Any]:
        head, shape, dtype, by_column = self._last
        if data[: len(head)] != head:
            self._last = head, shape, dtype, by_column = npy_header(data)
        size = math.prod(shape) * dtype.itemsize
        if len(data) != len(head) + size:
            raise ValueError(f"the header tells of {size} bytes of array, {len(data) - len(head)} follow")
        array: NDArray[Any] = np.ndarray(shape, dtype, data, len(head), order="F" if by_column else "C")
        return array.copy("K")


def npy_header(data: Buffer) -> tuple[bytes, tuple[int, ...], np.dtype[Any], bool]:
    """(The header's bytes, the array's shape, its dtype, whether it is in Fortran order) of an .npy file."""
    major = data[6] if len(data) >= 12 and bytes(data[:6]) == _NPY_MAGIC else None
    if major not in (1, 2):
        raise ValueError("it does not begin as an .npy file of version 1 or 2")
    start = 10 if major == 1 else 12
    length = int.from_bytes(data[8:start], "little")
    if length > _NPY_HEADER_MOST:
        raise ValueError(f"its header has {length} bytes, over the limit of {_NPY_HEADER_MOST}")
    head = bytes(data[: start + length])
    read = np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
    shape, by_column, dtype = read(io.BytesIO(head[8:]), max_header_size=_NPY_HEADER_MOST)
    if dtype.hasobject:
        raise ValueError("it holds Python objects, which are never unpickled")
    if any(n < 0 for n in shape):
        raise ValueError(f"its shape is {shape}")
    return head, shape, dtype, by_column


def decode_npz(data: Buffer) -> dict[str, NDArray[Any]]:
    """The arrays in an .npz file by name; one that unpacks to over 64 MiB and 200 times its size is refused."""
    arrays: dict[str, NDArray[Any]] = {}
    decode = NpyDecoder()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        size = sum(member.file_size for member in archive.infolist())
        if size > max(_NPZ_FREE_BYTES, _NPZ_RATIO * len(data)):
            raise ValueError(f"{len(data)} bytes would unpack to {size}, over the limit of {_NPZ_RATIO} times as many")
        for member in archive.infolist():
            if not member.filename.endswith(".npy"):
                raise ValueError(f"its member {member.filename!r} is no array")
            arrays[member.filename.removesuffix(".npy")] = decode(archive.read(member))
    return arrays


class _Way(NamedTuple):
    what: str
    decode: Callable[[Any], Any]
    is_users: bool = False


_PLAIN: dict[str, Callable[[Any], Any]] = {
    "int": decode_int,
    "text": decode_text,
    "json": decode_json,
    "npz": decode_npz,
}
_WHAT_BY_EXTENSION = {
    **dict.fromkeys(("cls", "index", "id"), "int"),
    **dict.fromkeys(("txt", "text", "transcript"), "text"),
    **{name: name for name in ("json", "npy", "npz")},
}
_NAMES = ("bytes", "int", "text", "json", "npy", "npz", *IMAGE_SPECS)


def decoder(
    spec: str | None = None, *, size: tuple[int, int] | None = None, **by_field: str | Callable[[bytes], Any]
) -> Decoder:
    """What decodes the fields of samples; it pickles where the callables given to it do.

    By the last part of the field's name: cls, index, id to int; txt, text, transcript to str; json; npy to an array;
    npz to a dict of arrays; jpg, jpeg, png, ppm, pgm, pbm, pnm, webp, bmp, gif, tif, tiff to images, if `spec` is
    given. All other fields stay as they are, and so do values that are not bytes.

    Args:
        spec: "rgb8" for `[H, W, 3] uint8`, "l8" for `[H, W] uint8`, "torch" for `[3, H, W] uint8`, "pil" for
            a `PIL.Image.Image` in the mode that the file has.
        size: (height, width) in pixels that images are scaled to.
        by_field: for the fields named, instead of what their extension says: one of the names above, or "bytes",
            "int", "text", "json", "npy", "npz", or a function of the bytes.

    Raises:
        OptionError: there is no such spec, or the size is none.
    """
    return Decoder(spec, size, by_field)


class Decoder:
    """Gives samples with their fields decoded; see `decoder`."""

    def __init__(
        self, spec: str | None, size: tuple[int, int] | None, by_field: dict[str, str | Callable[[bytes], Any]]
    ) -> None:
        if spec is not None and spec not in IMAGE_SPECS:
            raise OptionError(f"spec={spec!r} must be one of {', '.join(IMAGE_SPECS)}")
        for field, what in by_field.items():
            if field.startswith("__"):
                raise OptionError(f"{field}={what!r}: what begins with '__' says where a sample is from, and stays")
            if what not in _NAMES and not callable(what):
                raise OptionError(f"{field}={what!r} must be one of {', '.join(_NAMES)}, or a function")
        if size is not None:
            if not _is_size(size):
                raise OptionError(f"size={size!r} must be (height, width), both 1 pixel or more")
            if spec is None and not any(what in IMAGE_SPECS for what in by_field.values()):
                raise OptionError(f"size={size!r} needs a spec for images: one of {', '.join(IMAGE_SPECS)}")
        self._spec, self._size, self._by_field = spec, size, by_field
        self._known: dict[str, _Way | None] = {}

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        """A new dict like `sample`, with decoded fields.

        Raises:
            DecodeError: a field's bytes do not decode. An exception of the user's own function comes as it is,
                with a note that says where.
        """
        decoded = dict(sample)
        for field, data in sample.items():
            try:
                way = self._known[field]
            except KeyError:
                way = self._way(field)
            if way is None:
                continue
            what, decode, is_users = way
            try:
                if isinstance(data, (bytes, bytearray, memoryview)):
                    decoded[field] = decode(bytes(data) if is_users else data)
                elif is_users:
                    decoded[field] = decode(data)
                elif field in self._by_field:
                    raise TypeError(f"it is a {type(data).__name__}, not bytes")
            except Exception as error:
                if is_users:
                    error.add_note(f"while decoding field {field!r} of sample {sample.get('__key__')!r}")
                    raise
                raise _failure(sample, field, what, error) from error
        return decoded

    def what(self, field: str) -> str | None:
        """What `field` is decoded as, by our own functions; None where it is left alone, or decoded by the user's."""
        what = self._what(field)
        return None if callable(what) or what == "bytes" else what

    def _what(self, field: str) -> str | Callable[[bytes], Any] | None:
        extension = field.rpartition(".")[2]
        what = self._by_field.get(field)
        if what is None and not field.startswith("__"):
            what = self._spec if extension in IMAGE_EXTENSIONS else _WHAT_BY_EXTENSION.get(extension)
        return what

    def _way(self, field: str) -> _Way | None:
        """How to decode `field`; None to leave it alone."""
        extension = field.rpartition(".")[2]
        what = self._what(field)
        way: _Way | None = None
        if callable(what):
            way = _Way("a value", what, is_users=True)
        elif what in IMAGE_SPECS:
            kind = f"an image ({extension})" if extension in IMAGE_EXTENSIONS else "an image"
            way = _Way(kind, ImageDecoder(what, self._size))
        elif what == "npy":
            way = _Way(what, NpyDecoder())
        elif what is not None and what != "bytes":
            way = _Way(what, _PLAIN[what])
        if len(self._known) >= _KNOWN_FIELDS_MOST:
            self._known.clear()  # names come from the data: they must not pile up
        self._known[field] = way
        return way


def _is_size(size: Any) -> bool:
    return isinstance(size, (tuple, list)) and len(size) == 2 and all(isinstance(n, int) and n > 0 for n in size)


def _failure(sample: dict[str, Any], field: str, what: str, cause: Exception) -> DecodeError:
    why = str(cause) or type(cause).__name__
    return DecodeError(
        f"field '{field}' does not decode as {what}: {why}",
        field=field,
        key=sample.get("__key__"),
        url=sample.get("__url__"),
    )
