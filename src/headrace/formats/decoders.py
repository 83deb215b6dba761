"""Decoders that others have added."""

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
    """Whether `what` is a class that makes its objects of bytes, as those generated for messages do."""
    return isinstance(what, type) and any(callable(getattr(what, name, None)) for name in _WAYS)


class MessageDecoder:
    """The message in a field's bytes, as an object of a class that has `FromString` or `ParseFromString`.

    It goes to the workers as its class does: by the name of the module, which must be there to import.

    Raises:
        Exception: what the class raises for bytes that are none of its messages.
        ValueError: a field that the message must have is not there.
    """

    def __init__(self, message: type) -> None:
        self._message: Any = message

    @property
    def what(self) -> str:
        """What a field is then, for errors."""
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
_BY_NAME_ONLY = {"audio", "msgpack", "pt", "pickle"}  # by extension they may be what others have registered
_OWN = frozenset({*WHAT_BY_EXTENSION, *NAMES, *IMAGE_EXTENSIONS, "gz"} - _BY_NAME_ONLY)
_EXTENSION = re.compile(r"[a-z0-9_+-]+")

GROUP = "headrace.decoders"

_registered: dict[str, Callable[[bytes], object]] = {}


def register_decoder(extension: str, decode: Callable[[bytes], object]) -> None:
    """Have `.decode()` give `decode(data)` for fields with this extension, in streams that are made from now on.

    `.decode(field="extension")` names it for any other field; with "gz" behind the extension the bytes are unpacked
    before. It goes to the workers with the streams: nothing has to be registered there. A second registration wins over
    the first. A package that is installed can name its function as an entry point of the group `headrace.decoders`,
    under the extension, instead. `headrace.testing.DecoderContract` tests a decoder.

    Args:
        extension: the last part of a field's name, in lower case; none that headrace decodes itself (json, npy, …).
        decode: gives the value of a field's bytes, and raises where they are damaged: that is a DecodeError then, with
            the field and the sample's key. It must not run what the data say. A class of protobuf's messages, or any
            other that has `FromString` or `ParseFromString`, gives its objects.

    Raises:
        OptionError: the extension is none, or one of headrace's own; or `decode` cannot be called.

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
    """Those that others have added, by extension; what is installed is imported when it is first used."""
    return {**_installed(), **_registered}


class InstalledDecoder:
    """What a package names as an entry point; it is imported where it is first called, which is in a worker."""

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
