"""Exceptions from workers and the pinning thread, as torch raises them, with their cause."""

from __future__ import annotations

import contextlib
import os
import traceback
from dataclasses import replace
from typing import Any

from headrace._util.fork_guard import exit_code
from headrace.errors import WorkerDiedError
from headrace.torch_compat import serialize
from headrace.torch_compat.tracebacks import trim
from headrace.workers.failures import NOWHERE, Origin, PackedError


def pack_worker_error(error: BaseException, where: str, origin: Origin = NOWHERE) -> PackedError:
    """Pack a user's exception in a worker, or the worker's death that it means in torch."""
    if is_death(error):
        return serialize.pack_error(_end(error), origin)
    return serialize.pack_error(error, replace(origin, caught=_caught_text(error, where)))


def is_death(error: BaseException) -> bool:
    """True if an exception ends a torch worker, as KeyboardInterrupt and SystemExit do."""
    return not isinstance(error, Exception)


def _exit_code(error: BaseException) -> int:
    match error:
        case SystemExit():
            return exit_code(error)
        case KeyboardInterrupt():
            return 0
    return 1


def _end(error: BaseException) -> WorkerDiedError:
    """Return the error for a torch worker's death. headrace's worker continues."""
    died = WorkerDiedError(
        f"DataLoader worker (pid(s) {os.getpid()}) exited unexpectedly: {error!r} was raised in it",
        pid=os.getpid(),
        exitcode=_exit_code(error),
    )
    died.__cause__ = error
    return died


def unpack_error(packed: PackedError) -> BaseException:
    """Return the exception that the trainer sees.

    If a user's function raised it in a worker as in torch, its cause is the original with all attributes.
    """
    error = serialize.unpack_error(packed)
    return _caused(error, packed.origin.caught) if packed.origin.caught else error


def caught(error: BaseException, where: str) -> BaseException:
    """Return an exception of this process as torch words it, with the original as the cause."""
    return _caused(error, _caught_text(error, where))


def _caught_text(error: BaseException, where: str) -> str:
    trim(error)
    return f"Caught {type(error).__name__} {where}.\nOriginal {''.join(traceback.format_exception(error))}"


def _caused(original: BaseException, text: str) -> BaseException:
    error = _retold(original, text)
    error.__cause__ = original
    for name, value in vars(original).items():
        if name != "__notes__":
            vars(error).setdefault(name, value)
    with contextlib.suppress(Exception):
        if text in str(error):
            return error
    error.add_note(text)  # the class ignores the text
    return error


def _retold(original: BaseException, text: str) -> BaseException:
    kind: Any = type(original)
    if isinstance(original, StopIteration | StopAsyncIteration):  # else the loop would end without an error
        return RuntimeError(text)
    from torch._utils import KeyErrorMessage

    argument = KeyErrorMessage(text) if issubclass(kind, KeyError) else text  # else str() escapes line ends
    has_message = bool(getattr(kind, "message", None))
    with contextlib.suppress(Exception):
        try:
            made: BaseException = kind(message=argument) if has_message else kind(argument)
        except Exception:  # it needs other arguments: make it without `__init__`
            made = kind.__new__(kind)
            made.args = (argument,)
            if not str(made):  # its text needs the original arguments, as in UnicodeDecodeError
                made = kind(*original.args)
        if type(made) is kind:
            return made
    return RuntimeError(text)
