"""Messages of protobuf, by the class that was generated for them; no library of it is imported here."""

from __future__ import annotations

from typing import Any, TypeGuard

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
