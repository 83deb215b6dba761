"""Decodes fields of samples, by extension or the user's choice, and registered decoders.

Nothing here executes code from data unless `allow_pickle=True`: no pickles, no object arrays. Unknown fields stay
bytes.

Fields of many samples are decoded at once with numpy, as a Python call per field is slow. Only regular data are: equal
fields in every sample, `.npy` files with equal headers, plain decimal numbers. The result is None for all other data,
and samples are decoded one by one. A property test compares both ways.
"""

from __future__ import annotations

import copy
import functools
import gzip
import io
import json
import math
import pickle
import re
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NamedTuple, TypeGuard

import numpy as np
from numpy.typing import NDArray

from headrace._util import check
from headrace._util.lazy import needed
from headrace._util.sample_ranges import LeasedBodies, Rows
from headrace.errors import DecodeError, reason_of
from headrace.formats.limits import DEFAULTS, Limits
from headrace.types import Buffer, Ints

_DIGITS_MOST = 4300  # Python's default: the time grows with the square
_PIECE_BYTES = 2**20


def decode_text(data: Buffer) -> str:
    return str(data, "utf-8")


def decode_int(data: Buffer) -> int:
    """Decode a decimal integer: ASCII digits, optional sign and surrounding white space.

    Python's int() accepts more: "1_000", and digits of every script.
    """
    text = bytes(data).strip()
    digits = text[1:] if text[:1] in (b"-", b"+") else text
    if not digits.isdigit():
        raise ValueError(f"{bytes(data[:40])!r} is no whole number in decimal digits")
    if len(digits) > _DIGITS_MOST:
        raise ValueError(f"it has {len(digits)} digits, over the limit of {_DIGITS_MOST}")
    return int(text)


def decode_json(data: Buffer) -> object:
    """Decode JSON as Python's json: NaN is a number, the last of equal names wins."""
    try:
        return json.loads(bytes(data))
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def decode_msgpack(data: Buffer) -> object:
    """Decode MessagePack. The library refuses sizes beyond the data."""
    msgpack = needed("msgpack", "msgpack", kind=ValueError)
    try:
        value: object = msgpack.unpackb(data, raw=False, strict_map_key=False)
    except msgpack.exceptions.StackError:
        raise ValueError("it is nested too deep") from None
    return value


def decode_pickle(data: Buffer) -> object:
    """Load a pickle. This executes code from `data`."""
    value: object = pickle.load(file := io.BytesIO(data))
    if file.tell() != len(data):
        raise ValueError(f"its {len(data)} bytes continue after its end at {file.tell()}")
    return value


def gunzipped(data: Buffer, limits: Limits = DEFAULTS) -> bytes:
    """Decompress one or several gzip members, and verify their CRCs."""
    if data[:2] != b"\x1f\x8b":
        raise ValueError("it does not begin as gzip data")
    most = limits.unpacked(len(data))
    room = most
    parts = []
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
        while part := file.read(_PIECE_BYTES):
            room -= len(part)
            if room < 0:
                raise ValueError(f"{len(data)} bytes unpack to more than {most}, which is the limit")
            parts.append(part)
    return b"".join(parts)


_MAGIC = b"\x93NUMPY"
_ZIP_BEGINS = (b"PK\3\4", b"PK\5\6")
_HEADER_MOST = 10_000


class NpyDecoder:
    """Decodes an .npy file to an array that owns its memory. Object arrays are refused.

    Files of one data set mostly have equal headers, so the last parsed header is cached: 1 us instead of 20.
    """

    def __init__(self) -> None:
        self._last: tuple[bytes, tuple[int, ...], np.dtype[np.generic], bool] | None = None

    def __call__(self, data: Buffer) -> NDArray[np.generic]:
        if self._last is None or data[: len(self._last[0])] != self._last[0]:
            self._last = npy_header(data)
        head, shape, dtype, by_column = self._last
        size = math.prod(shape) * dtype.itemsize
        if len(data) != len(head) + size:
            raise ValueError(f"the header describes {size} bytes of array, {len(data) - len(head)} follow")
        array: NDArray[np.generic] = np.ndarray(shape, dtype, data, len(head), order="F" if by_column else "C")
        return array.copy("K")


def npy_header(data: Buffer) -> tuple[bytes, tuple[int, ...], np.dtype[np.generic], bool]:
    """Parse an .npy header: (bytes, shape, dtype, is column-major). Raises a ValueError."""
    version = bytes(data[6:8]) if len(data) >= 12 and bytes(data[:6]) == _MAGIC else None
    if version not in (b"\1\0", b"\2\0"):
        raise ValueError("it does not begin as an .npy file of version 1 or 2")
    major = version[0]
    start = 10 if major == 1 else 12
    length = int.from_bytes(data[8:start], "little")
    if length > _HEADER_MOST:
        raise ValueError(f"its header has {length} bytes, over the limit of {_HEADER_MOST}")
    head = bytes(data[: start + length])
    read = np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
    try:
        shape, by_column, dtype = read(io.BytesIO(head[8:]), max_header_size=_HEADER_MOST)
    except Exception as error:  # of any type: the header is a Python expression
        raise ValueError(f"its header does not describe an array ({reason_of(error)})") from error
    if dtype.hasobject:
        raise ValueError("it holds Python objects, which are never unpickled")
    if any(n < 0 for n in shape):
        raise ValueError(f"its shape is {shape}")
    if dtype.itemsize == 0 and math.prod(shape) > 0:
        raise ValueError(f"its header describes {shape} elements of no bytes")  # any number of them
    return head, shape, dtype, by_column


def decode_npz(data: Buffer, limits: Limits = DEFAULTS) -> dict[str, NDArray[np.generic]]:
    """Return the arrays in an .npz file by name."""
    arrays: dict[str, NDArray[np.generic]] = {}
    decode = NpyDecoder()
    if bytes(data[:4]) not in _ZIP_BEGINS:  # zipfile only checks the end
        raise ValueError("it does not begin as a zip archive")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = archive.infolist()
        size = sum(member.file_size for member in members)
        if size > limits.unpacked(len(data)):
            raise ValueError(
                f"{len(data)} bytes would unpack to {size}, over the limit of {limits.unpacked_ratio} times as many"
            )
        for member in members:
            name = member.filename.removesuffix(".npy")
            if name == member.filename:
                raise ValueError(f"its member {name!r} is no array")
            if name in arrays:
                raise ValueError(f"it has two arrays named {name!r}")
            arrays[name] = decode(_unpacked(archive, member))
    return arrays


def _unpacked(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    # a member may be longer than stated: only for these kinds, and only with `read(size)`, is the output bounded
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"its member {member.filename!r} is packed in a way that numpy does not use")
    with archive.open(member) as file:
        data = file.read(member.file_size)
    if len(data) != member.file_size:
        raise ValueError(f"its member {member.filename!r} has {len(data)} bytes and should have {member.file_size}")
    return data


BY_TORCHCODEC = "audio:torchcodec"
IMAGE_EXTENSIONS = frozenset(
    ("jpg", "jpeg", "png", "ppm", "pgm", "pbm", "pnm", "webp", "avif", "bmp", "gif", "tif", "tiff")
)
IMAGE_SPECS = ("rgb8", "l8", "torch", "pil")
_WAYS = ("FromString", "ParseFromString")
_MISSING_MOST = 5  # names of fields in an error


def is_message_class(what: object) -> TypeGuard[type]:
    """True if `what` is a class that parses bytes, such as a generated protobuf message."""
    return isinstance(what, type) and any(callable(getattr(what, name, None)) for name in _WAYS)


class MessageDecoder:
    """Decodes bytes to an object of a class that has `FromString` or `ParseFromString`.

    The class is pickled by reference: its module must be importable in the workers.
    """

    def __init__(self, message: type) -> None:
        self._message: Any = message

    @property
    def what(self) -> str:
        """Description of the decoded field, for errors."""
        return f"a message {self._message.__qualname__}"

    def __call__(self, data: Buffer) -> object:
        if hasattr(self._message, "FromString"):
            value = self._message.FromString(bytes(data))
        else:
            value = self._message()
            value.ParseFromString(bytes(data))
        if hasattr(value, "IsInitialized") and not value.IsInitialized():
            names = value.FindInitializationErrors()[:_MISSING_MOST]
            raise ValueError(f"fields that it must have are missing: {', '.join(names)}")
        return value


WHAT_BY_EXTENSION = {
    **dict.fromkeys(("cls", "index", "id"), "int"),
    **dict.fromkeys(("txt", "text", "transcript"), "text"),
    **{name: name for name in ("json", "npy", "npz")},
}
PICKLES = frozenset(("pkl", "pickle"))
NAMES = ("bytes", "int", "text", "json", "npy", "npz", "audio", BY_TORCHCODEC, "msgpack", "pt", "pickle", *IMAGE_SPECS)
_BY_NAME_ONLY = {"audio", "msgpack", "pt", "pickle"}  # users may register decoders for these extensions
_OWN = frozenset({*WHAT_BY_EXTENSION, *NAMES, *IMAGE_EXTENSIONS, "gz"} - _BY_NAME_ONLY)
_EXTENSION = re.compile(r"[a-z0-9_+-]+")

GROUP = "headrace.decoders"

_registered: dict[str, Callable[[bytes], object]] = {}


def register_decoder(extension: str, decode: Callable[[bytes], object]) -> None:
    """Let `.decode()` call `decode(data)` for fields with this extension, in new streams.

    `.decode(field="extension")` selects the decoder for any other field. With ".gz" after the extension the bytes are
    decompressed first. The decoder is sent to the workers with the streams, so they need no registration. A second
    registration replaces the first. An installed package can also name its function as an entry point of the group
    `headrace.decoders`, under the extension. Test a decoder with `headrace.testing.DecoderContract`.

    Args:
        extension: The last part of a field's name, in lower case. Must not be one that headrace decodes (json, npy, …).
        decode: Returns the value of a field from its bytes, and raises if they are damaged. The exception becomes a
            DecodeError with the field and the key of the sample. The function must not execute code from the data. A
            class with `FromString` or `ParseFromString`, such as a protobuf message, decodes to its instances.

    Raises:
        OptionError: The extension is invalid or one of headrace's own, or `decode` is not callable.

    Example:
        >>> register_decoder("hex", lambda data: int(data, 16))
    """
    if not _EXTENSION.fullmatch(str(extension)) or str(extension) != extension or extension in _OWN:
        taken = ", ".join(sorted(_OWN))
        raise check.invalid("extension", extension, f"the end of a name, of a-z, 0-9, '_', '+', '-', and not {taken}")
    check.function("decode", decode)
    _registered[extension] = MessageDecoder(decode) if is_message_class(decode) else decode


def registered_decoders() -> dict[str, Callable[[bytes], object]]:
    """Return user-defined decoders by extension. Installed ones are imported when called."""
    return {**_installed(), **_registered}


@functools.cache
def _imported(name: str, value: str) -> Callable[[bytes], object]:
    found: Callable[[bytes], object] = EntryPoint(name, value, GROUP).load()
    return MessageDecoder(found) if is_message_class(found) else found


def decode_installed(name: str, value: str, data: bytes) -> object:
    """Decode by an entry point. The first call, in a worker, imports it."""
    return _imported(name, value)(data)


@functools.cache
def _installed() -> dict[str, Callable[[bytes], object]]:
    found = entry_points(group=GROUP)
    return {entry.name: partial(decode_installed, entry.name, entry.value) for entry in found if entry.name not in _OWN}


_KNOWN_FIELDS_MOST = 4096


class _Way(NamedTuple):
    what: str
    decode: Callable[[Any], object]
    name: str | None = None
    is_users: bool = False


def decode_pt(data: Buffer) -> object:
    """Load data of `torch.save` with tensors, containers and plain values. Executes no code."""
    import torch

    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


_PLAIN: dict[str, Callable[[Any], object]] = {
    "int": decode_int,
    "text": decode_text,
    "json": decode_json,
    "msgpack": decode_msgpack,
    "pt": decode_pt,
    "pickle": decode_pickle,
}


def decoder(
    spec: str | None = None,
    *,
    size: tuple[int, int] | None = None,
    limits: Limits = DEFAULTS,
    allow_pickle: bool = False,
    **by_field: str | Callable[[bytes], object],
) -> Decoder:
    """Return a decoder of the fields of samples. It can be pickled if its callables can.

    The last part of a field's name selects the decoder: cls, index, id to int; txt, text, transcript to str; json; npy
    to an array; npz to a dict of arrays; jpg, jpeg, png, ppm, pgm, pbm, pnm, webp, avif, bmp, gif, tif, tiff and the
    field image to images, if `spec` is given; registered extensions. With ".gz" after any of these (json.gz) the bytes
    are decompressed first. Other fields, and values that are not bytes, are not changed. pkl and pickle are only
    decoded if `allow_pickle`.

    Args:
        spec: "rgb8" for `[H, W, 3] uint8`, "l8" for `[H, W] uint8`, "torch" for `[3, H, W] uint8`, "pil" for a
            `PIL.Image.Image` in the mode of the file.
        size: (height, width) in pixels to scale images to. The aspect ratio is not kept.
        limits: Limits on the pixels of an image, and the decompressed size of npz and gz.
        allow_pickle: Load pickles, which executes code from the data. Only for trusted data.
        **by_field: Decoders for fields by name, instead of by extension: one of the names above, or "bytes", "int",
            "text", "json", "npy", "npz", "audio" (a dict of `array`, `[channels, time] float32`, and `rate`, by
            soundfile; "audio:torchcodec" uses torchcodec), "msgpack", "pt" (written by `torch.save`, loaded with
            `weights_only=True`), "pickle" (if `allow_pickle`), a registered extension, a protobuf message or other
            class with `FromString` or `ParseFromString`, or a function of the bytes.

    Raises:
        OptionError: The spec or size is invalid, or pickles are requested without `allow_pickle`.
    """
    return Decoder(spec, size, by_field, limits, allow_pickle=allow_pickle)


class Decoder:
    """Decodes the fields of samples; see `decoder`."""

    def __init__(
        self,
        spec: str | None,
        size: tuple[int, int] | None,
        by_field: dict[str, str | Callable[[bytes], object]],
        limits: Limits,
        *,
        allow_pickle: bool,
    ) -> None:
        self._registered = registered_decoders()  # pickled for the workers
        if spec is not None:
            check.one_of("spec", spec, IMAGE_SPECS)
        for field, what in by_field.items():
            if field.startswith("__"):
                raise check.invalid("field", field, "a name that does not begin with '__'")
            if not callable(what):
                check.one_of(field, what, (*NAMES, *sorted(self._registered)), ", or a function")
            if what == "pickle" and "pickle" not in self._registered and not allow_pickle:
                raise check.lacking(
                    f"{field}='pickle'",
                    "allow_pickle=True: reading a pickle runs code from the data, whose authors could do here whatever "
                    "you can",
                )
        if size is not None:
            check.size("size", size)
            if spec is None and not any(what in IMAGE_SPECS for what in by_field.values()):
                raise check.lacking(f"size={size!r}", f"a spec for images: one of {', '.join(IMAGE_SPECS)}")
        self._spec, self._size, self._by_field, self._limits = spec, size, by_field, limits
        self._allow_pickle = allow_pickle
        self._known: dict[str, _Way | None] = {}
        self._only: frozenset[str] | None = None

    def __getstate__(self) -> dict[str, object]:
        """Exclude the cache of fields."""
        return {**vars(self), "_known": {}}

    def only(self, names: Iterable[str]) -> Decoder:
        """Return a decoder of just these fields. Others are not changed."""
        narrow = copy.copy(self)  # without the cache of fields
        narrow._only = frozenset(names)
        return narrow

    def __call__(self, sample: dict[str, object]) -> dict[str, object]:
        """Return a copy of `sample` with decoded fields."""
        decoded = dict(sample)
        for field, data in sample.items():
            try:
                way = self._known[field]
            except KeyError:
                way = self._way(field)
            if way is None:
                continue
            what, decode, _, is_users = way
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
        """Return the name of the built-in decoder of `field`. None if there is none, or for gzip."""
        way = self._known[field] if field in self._known else self._way(field)
        return None if way is None else way.name

    def _way(self, field: str) -> _Way | None:
        name, _, extension = field.rpartition(".")
        is_packed = extension == "gz" and name != ""
        if is_packed:
            extension = name.rpartition(".")[2]
        what = self._by_field.get(field)
        if self._only is not None and field not in self._only:
            what = None
        elif what is None and not field.startswith("__"):
            what = self._spec if extension in IMAGE_EXTENSIONS else WHAT_BY_EXTENSION.get(extension)
            if field == "image" and field not in self._registered:
                what = self._spec
            if what is None and extension in self._registered:
                what = extension
            elif extension in PICKLES and self._allow_pickle:
                what = "pickle"
        way: _Way | None = None
        if callable(what) and not is_message_class(what):
            way = _Way("a value", what, is_users=True)
        elif what is not None and what != "bytes":
            message = MessageDecoder(what) if is_message_class(what) else None
            way = self._own_way(str(what), extension) if message is None else _Way(message.what, message)
            if is_packed:
                decode = way.decode
                way = _Way(f"{way.what} in gzip", lambda data: decode(gunzipped(data, self._limits)))
        if len(self._known) >= _KNOWN_FIELDS_MOST:
            self._known.clear()  # names come from the data, so the cache must be bounded
        self._known[field] = way
        return way

    def _own_way(self, what: str, extension: str) -> _Way:
        if what in self._registered:
            return _Way(what, lambda data: self._registered[what](bytes(data)))
        if what in IMAGE_SPECS:
            from headrace.formats.media import ImageDecoder

            kind = f"an image ({extension})" if extension in IMAGE_EXTENSIONS else "an image"
            return _Way(kind, ImageDecoder(what, self._size, self._limits), what)
        if what == "npy":
            return _Way(what, NpyDecoder(), what)
        if what == "npz":
            return _Way(what, partial(decode_npz, limits=self._limits), what)
        if what in ("audio", BY_TORCHCODEC):
            from headrace.formats.media import decode_audio, decode_audio_by_torchcodec

            decode = decode_audio if what == "audio" else decode_audio_by_torchcodec
            return _Way(what, partial(decode, limits=self._limits), what)
        return _Way(what, _PLAIN[what], what)


def _failure(sample: dict[str, Any], field: str, what: str, cause: Exception) -> DecodeError:
    return DecodeError(
        f"field '{field}' does not decode as {what}: {reason_of(cause)}",
        field=field,
        key=sample.get("__key__"),
        url=sample.get("__url__"),
    )


_WORD_DIGITS_MOST = 18  # any number of so many digits fits into 64 bits


class Column(NamedTuple):
    """One value of every sample.

    Attributes:
        is_number: True if a value is a Python int, False if it is an array.
        head: Offset of the value in its member, in bytes.
        offsets: Offsets of the members.
        values: The parsed values, if the bytes are not the values. Else None.
    """

    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    is_number: bool
    head: int
    offsets: Ints
    values: NDArray[np.integer] | None

    def write(self, bodies: LeasedBodies, target: memoryview) -> None:
        """Write the values consecutively into `target`."""
        out = np.frombuffer(target, np.uint8).reshape(len(self.offsets), -1)
        if self.values is not None:
            out[:] = self.values.view(np.uint8).reshape(out.shape)
        else:
            bodies.gather_into(out, self.offsets + self.head)


Columns = Sequence[Column] | Mapping[str, Column | Sequence[str]]
"""The values of samples that are tuples or dicts: a column each, or the string of each sample."""


SampleColumns = Callable[[Rows, LeasedBodies, Sequence[str]], Columns | None]
"""Makes the values of all samples of a row table at once, or None if they must be made one by one.

The texts are the URLs of the shards of the samples.
"""


class ColumnDecoder:
    """Decodes fields of all samples of a row table at once, with the results of `decoder`.

    Args:
        names: The field for each value of a sample. "jpg;png" selects the first of the two that is present.
    """

    def __init__(self, decoder: Decoder, names: Sequence[str]) -> None:
        self._decoder, self._names = decoder, tuple(names)

    def __call__(self, rows: Rows, bodies: LeasedBodies, urls: Sequence[str] = ()) -> list[Column] | None:
        """Return a column for each name. None if samples must be decoded one by one."""
        count = len(rows)
        members = len(rows.field)
        if (
            rows.block is not None
            or not count
            or members % count
            or not (np.diff(rows.starts) == members // count).all()
        ):
            return None
        field = rows.field.reshape(count, -1)
        if not (field == field[0]).all():
            return None
        there = {rows.fields[number]: k for k, number in enumerate(field[0].tolist())}
        columns = []
        for names in self._names:
            present = [name for name in names.split(";") if name in there]
            if len(present) != 1:
                return None  # the first of several is used, but all are decoded, and any of them may fail
            decode = {"npy": _npy, "int": _ints}.get(self._decoder.what(present[0]) or "")
            if decode is None:
                return None
            k = there[present[0]]
            column = decode(rows.offset.reshape(count, -1)[:, k], rows.size.reshape(count, -1)[:, k], bodies)
            if column is None:
                return None
            columns.append(column)
        return columns


def _npy(offsets: Ints, sizes: Ints, bodies: LeasedBodies) -> Column | None:
    size = int(sizes[0])
    if not (sizes == size).all():
        return None
    try:
        head, shape, dtype, by_column = npy_header(memoryview(bodies.gather(offsets[:1], size)[0]))
    except Exception:
        return None  # decoding the sample alone gives a better error
    if by_column or dtype.hasobject or not math.prod(shape) or len(head) + math.prod(shape) * dtype.itemsize != size:
        return None
    heads = bodies.gather(offsets, len(head))
    return (
        Column(dtype, shape, False, len(head), offsets, None)
        if (heads == np.frombuffer(head, np.uint8)).all()
        else None
    )


def _ints(offsets: Ints, sizes: Ints, bodies: LeasedBodies) -> Column | None:
    if int(sizes.min()) < 1 or int(sizes.max()) > _WORD_DIGITS_MOST:
        return None
    values = np.zeros(len(sizes), np.int64)
    for size in np.unique(sizes).tolist():
        chosen = np.flatnonzero(sizes == size)
        digits = bodies.gather(offsets[chosen], size) - np.uint8(ord("0"))
        if (digits > 9).any():
            return None
        values[chosen] = digits @ 10 ** np.arange(size - 1, -1, -1, dtype=np.int64)
    return Column(np.dtype(np.int64), (), True, 0, offsets, values)
