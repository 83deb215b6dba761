"""Decodes fields of samples, by extension or the user's choice, and registered decoders.

Nothing here executes code from data unless `allow_pickle=True`: no pickles, no object arrays. Unknown fields stay
bytes.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NamedTuple, TypeGuard

from headrace._util import check
from headrace.errors import DecodeError, OptionError, reason_of
from headrace.formats.images import EXTENSIONS as IMAGE_EXTENSIONS
from headrace.formats.images import SPECS as IMAGE_SPECS
from headrace.formats.images import ImageDecoder
from headrace.formats.limits import DEFAULTS, Limits
from headrace.formats.plain import (
    NpyDecoder,
    decode_int,
    decode_json,
    decode_msgpack,
    decode_npz,
    decode_pickle,
    decode_text,
    gunzipped,
)
from headrace.types import Buffer

BY_TORCHCODEC = "audio:torchcodec"
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


class InstalledDecoder:
    """A decoder of an entry point. The first call, in a worker, imports it."""

    def __init__(self, entry: EntryPoint) -> None:
        self._entry = entry.name, entry.value
        self._decode: Callable[[bytes], object] | None = None

    def __reduce__(self) -> tuple[object, ...]:
        name, value = self._entry
        return InstalledDecoder, (EntryPoint(name, value, GROUP),)

    def __call__(self, data: bytes) -> object:
        if self._decode is None:
            found = EntryPoint(*self._entry, GROUP).load()
            self._decode = MessageDecoder(found) if is_message_class(found) else found
        return self._decode(data)


@functools.cache
def _installed() -> dict[str, Callable[[bytes], object]]:
    found = entry_points(group=GROUP)
    return {entry.name: InstalledDecoder(entry) for entry in found if entry.name not in _OWN}


_KNOWN_FIELDS_MOST = 4096


class _Way(NamedTuple):
    what: str
    decode: Callable[[Any], object]
    name: str | None = None
    is_users: bool = False


def _decode_pt(data: Buffer) -> object:
    from headrace.formats.tensors import loaded_tensors

    return loaded_tensors(data)


_PLAIN: dict[str, Callable[[Any], object]] = {
    "int": decode_int,
    "text": decode_text,
    "json": decode_json,
    "msgpack": decode_msgpack,
    "pt": _decode_pt,
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
        limits: Limits = DEFAULTS,
        registered: dict[str, Callable[[bytes], object]] | None = None,
        *,
        allow_pickle: bool = False,
    ) -> None:
        self._registered = registered_decoders() if registered is None else registered  # pickled for the workers
        if spec is not None:
            check.one_of("spec", spec, IMAGE_SPECS)
        for field, what in by_field.items():
            if field.startswith("__"):
                raise OptionError(f"{field}={what!r}: names that begin with '__' are reserved")
            if not callable(what):
                check.one_of(field, what, (*NAMES, *sorted(self._registered)), ", or a function")
            if what == "pickle" and "pickle" not in self._registered and not allow_pickle:
                raise OptionError(
                    f"{field}='pickle': reading a pickle runs code from the data, whose authors could do here "
                    f"whatever you can. If you trust them, give allow_pickle=True as well"
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
        narrow = Decoder(
            self._spec, self._size, self._by_field, self._limits, self._registered, allow_pickle=self._allow_pickle
        )
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
            kind = f"an image ({extension})" if extension in IMAGE_EXTENSIONS else "an image"
            return _Way(kind, ImageDecoder(what, self._size, self._limits), what)
        if what == "npy":
            return _Way(what, NpyDecoder(), what)
        if what == "npz":
            return _Way(what, partial(decode_npz, limits=self._limits), what)
        if what in ("audio", BY_TORCHCODEC):
            from headrace.formats.sounds import decode_audio, decode_audio_by_torchcodec

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
