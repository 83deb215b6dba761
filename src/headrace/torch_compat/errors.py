"""Exceptions of workers and of the pinning thread as torch's loader raises them; the original one is the cause."""

from __future__ import annotations

import contextlib
import traceback
from typing import Any

from torch._utils import KeyErrorMessage

from headrace.torch_compat import packing


def pack_worker_error(error: BaseException, where: str) -> bytes:
    """An exception as `unpack_worker_error` wants it.

    Args:
        where: as in "in DataLoader worker process 0".
    """
    return packing.pack_bytes((_told(error, where), packing.pack_error(error)))


def unpack_worker_error(blob: bytes) -> BaseException:
    """The exception that the trainer sees; its cause is the original one, with all of its attributes."""
    text, original_blob = packing.unpack_bytes(blob)
    return _caused(packing.unpack_error(original_blob), text)


def caught(error: BaseException, where: str) -> BaseException:
    """The same for an exception of this process."""
    return _caused(error, _told(error, where))


def _told(error: BaseException, where: str) -> str:
    return f"Caught {type(error).__name__} {where}.\nOriginal {''.join(traceback.format_exception(error))}"


def _caused(original: BaseException, text: str) -> BaseException:
    error = _retold(original, text)
    error.__cause__ = original
    for name, value in vars(original).items():
        if name != "__notes__":
            vars(error).setdefault(name, value)
    return error


def _retold(original: BaseException, text: str) -> BaseException:
    """An exception of the same type whose text is `text`, by the way torch makes it."""
    kind: Any = type(original)
    if isinstance(original, StopIteration | StopAsyncIteration):  # else the loop would end as if nothing had happened
        return RuntimeError(text)
    if kind is KeyError:
        return KeyError(KeyErrorMessage(text))
    has_message = bool(getattr(kind, "message", None))
    with contextlib.suppress(Exception):
        try:
            made = kind(message=text) if has_message else kind(text)
        except Exception:  # it wants other arguments: it is put together without them, where its text allows that
            made = kind.__new__(kind)
            made.args = (text,)
        if has_message or text in str(made):
            error: BaseException = made
            return error
    return RuntimeError(text)
