"""Exceptions of workers and of the pinning thread as torch's loader raises them; the original one is the cause."""

from __future__ import annotations

import contextlib
import functools
import os
import traceback
from dataclasses import replace
from typing import Any

from headrace.errors import WorkerDiedError
from headrace.failures import NOWHERE, Origin, PackedError
from headrace.forks import exit_code
from headrace.torch_compat import serialize
from headrace.torch_compat.tracebacks import trim


def pack_worker_error(error: BaseException, where: str, origin: Origin = NOWHERE) -> PackedError:
    """What a user's function has raised in a worker, or the death that torch's worker would have died of it.

    Args:
        where: as in "in DataLoader worker process 0".
    """
    if is_death(error):
        return serialize.pack_error(_end(error), origin)
    return serialize.pack_error(error, replace(origin, caught=_caught_text(error, where)))


def is_death(error: BaseException) -> bool:
    """Whether it ends a worker of torch's: what is no Exception, such as a KeyboardInterrupt or SystemExit."""
    return not isinstance(error, Exception)


@functools.singledispatch
def _exit_code(error: BaseException) -> int:
    """That of a worker of torch's that it ends."""
    del error
    return 1


_exit_code.register(SystemExit, exit_code)


@_exit_code.register(KeyboardInterrupt)
def _code_of_interrupt(error: KeyboardInterrupt) -> int:
    del error
    return 0


def _end(error: BaseException) -> WorkerDiedError:
    """The death of torch's worker; ours lives on."""
    died = WorkerDiedError(
        f"DataLoader worker (pid(s) {os.getpid()}) exited unexpectedly: {error!r} was raised in it",
        pid=os.getpid(),
        exitcode=_exit_code(error),
    )
    died.__cause__ = error
    return died


def unpack_error(packed: PackedError) -> BaseException:
    """The exception that the trainer sees.

    Where a user's function has raised it in a worker of torch's kind, its cause is the original one, with all of its
    attributes.
    """
    error = serialize.unpack_error(packed)
    return _caused(error, packed.origin.caught) if packed.origin.caught else error


def caught(error: BaseException, where: str) -> BaseException:
    """The same for an exception of this process."""
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
    error.add_note(text)  # its class says something of its own
    return error


def _retold(original: BaseException, text: str) -> BaseException:
    """An exception of the same type whose text is `text`, by the way torch makes it."""
    kind: Any = type(original)
    if isinstance(original, StopIteration | StopAsyncIteration):  # else the loop would end as if nothing had happened
        return RuntimeError(text)
    from torch._utils import KeyErrorMessage

    argument = KeyErrorMessage(text) if issubclass(kind, KeyError) else text  # else its lines would be one
    has_message = bool(getattr(kind, "message", None))
    with contextlib.suppress(Exception):
        try:
            made: BaseException = kind(message=argument) if has_message else kind(argument)
        except Exception:  # it wants other arguments: it is put together without them
            made = kind.__new__(kind)
            made.args = (argument,)
            if not str(made):  # it is made of the arguments, as UnicodeDecodeError's
                made = kind(*original.args)
        if type(made) is kind:
            return made
    return RuntimeError(text)
