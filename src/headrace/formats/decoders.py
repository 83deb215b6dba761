"""The registry of user-defined decoders."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeGuard

from headrace.errors import OptionError
from headrace.formats.images import EXTENSIONS as IMAGE_EXTENSIONS
from headrace.formats.images import SPECS as IMAGE_SPECS
from headrace.formats.sounds import BY_TORCHCODEC
from headrace.types import Buffer

_WAYS = ("FromString", "ParseFromString")
_MISSING_MOST = 5  # names of fields in an error


def is_message_class(what: object) -> TypeGuard[type]:
    """True if `what` is a class that parses bytes, such as a generated protobuf message."""
    return isinstance(what, type) and any(callable(getattr(what, name, None)) for name in _WAYS)


class MessageDecoder:
    """Decodes bytes to an object of a class that has `FromString` or `ParseFromString`.

    The class is pickled by reference: its module must be importable in the workers.

    Raises:
        Exception: Any exception of the class for invalid bytes.
        ValueError: A required field of the message is missing.
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
    if not _EXTENSION.fullmatch(str(extension)) or str(extension) != extension:
        raise OptionError(f"extension={extension!r} must be of a-z, 0-9, '_', '+' and '-': the last part of a name")
    if extension in _OWN:
        raise OptionError(f"extension={extension!r} is one of headrace's own ({', '.join(sorted(_OWN))})")
    if not callable(decode):
        raise OptionError(f"decode={decode!r}: a function of bytes is needed")
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
