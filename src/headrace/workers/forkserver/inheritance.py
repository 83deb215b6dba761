"""State that workers inherit from the trainer, except environment, path and folder.

A fork of the trainer would copy all its state, with locks, threads and CUDA. Inherited are settings that functions rely
on implicitly, if they are small and have names. Kernel settings (affinity, niceness, umask, limits) are the trainer's
when the fork server was started.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import faulthandler
import importlib
import locale
import logging
import multiprocessing
import os
import re
import sys
import warnings
from collections.abc import Callable
from functools import partial
from multiprocessing import process as processes
from multiprocessing import resource_tracker
from typing import Any, TypedDict

from headrace._util.shared_memory import close_all
from headrace._util.torch_lazy import when_torch_is_loaded
from headrace.errors import CannotCarryError

_STREAMS = ("stderr", "stdout")
_COLLATE = "torch.utils.data._utils.collate"


class CapturedHandler(TypedDict):
    stream: str
    level: int
    formatter: str | None


class CapturedLogging(TypedDict):
    levels: dict[str, int]
    root: int
    disable: int
    handlers: list[CapturedHandler]


class Captured(TypedDict):
    """The inherited settings, for JSON."""

    warnings: list[list[Any]]
    logging: CapturedLogging
    default_dtype: str
    collate_map: str
    faulthandler: bool


def capture() -> Captured:
    """Return the settings for a worker that starts now. Takes some tenths of a millisecond.

    Raises:
        CannotCarryError: an entry of `default_collate_fn_map` in torch cannot be pickled. The message names its type.
    """
    return {
        "warnings": [kept for kept in map(_described_filter, list(warnings.filters)) if kept is not None],
        "logging": _described_logging(),
        "default_dtype": _described_dtype(),
        "collate_map": _described_collate_map(),
        "faulthandler": faulthandler.is_enabled(),
    }


def apply(captured: Captured) -> None:
    """Apply the result of `capture`. To be called once, before a new worker unpickles anything."""
    warnings.resetwarnings()
    warnings.filters.extend(filter(None, map(_filter, captured["warnings"])))  # type: ignore[attr-defined]
    _apply_logging(captured["logging"])
    when_torch_is_loaded(partial(_apply_to_torch, captured))
    if not captured["faulthandler"]:
        faulthandler.disable()
    elif sys.stderr is not None:
        faulthandler.enable()


def _described_filter(entry: tuple[object, ...]) -> list[Any] | None:
    action, message, category, module, line = entry
    patterns = [_described_pattern(pattern) for pattern in (message, module)]
    if not isinstance(category, type) or False in patterns:
        return None  # added by hand, with unknown meaning
    return [action, patterns[0], [category.__module__, category.__qualname__], patterns[1], line]


def _described_pattern(pattern: object) -> object:
    if isinstance(pattern, re.Pattern):
        return [pattern.pattern, pattern.flags]
    return pattern if pattern is None or isinstance(pattern, str) else False


def _filter(described: list[Any]) -> tuple[Any, ...] | None:
    """Return None if the category's module is not loaded: importing it could take seconds."""
    action, message, (module, name), place, line = described
    category: object = sys.modules.get(module)
    for part in name.split("."):
        category = getattr(category, part, None)
    return (action, _pattern(message), category, _pattern(place), line) if isinstance(category, type) else None


def _pattern(described: object) -> object:
    return re.compile(*described) if isinstance(described, list) else described


def _described_logging() -> CapturedLogging:
    root = logging.getLogger()
    loggers = list(root.manager.loggerDict.items())
    return {
        "levels": {
            name: logger.level for name, logger in loggers if isinstance(logger, logging.Logger) and logger.level
        },
        "root": root.level,
        "disable": root.manager.disable,
        "handlers": [described for described in map(_described_handler, root.handlers) if described is not None],
    }


def _described_handler(handler: logging.Handler) -> CapturedHandler | None:
    """Describe a handler of a standard stream. Others have files, sockets and locks: None."""
    if not isinstance(handler, logging.StreamHandler):
        return None
    for stream in _STREAMS:
        if handler.stream is getattr(sys, stream) or handler.stream is getattr(sys, f"__{stream}__"):
            formatter = None
            if handler.formatter is not None:
                with contextlib.suppress(Exception):  # not picklable: plain lines are better than none
                    is_pythons = type(handler.formatter) is logging.Formatter
                    formatter = _packed(handler.formatter, None if is_pythons else handler.formatter)
            return {"stream": stream, "level": handler.level, "formatter": formatter}
    return None


def _apply_logging(described: CapturedLogging) -> None:
    root = logging.getLogger()
    root.setLevel(described["root"])
    logging.disable(described["disable"])
    for name, level in described["levels"].items():
        logging.getLogger(name).setLevel(level)
    for handler in described["handlers"]:
        made = logging.StreamHandler(getattr(sys, handler["stream"]))
        made.setLevel(handler["level"])
        if handler["formatter"] is not None:
            made.setFormatter(_unpacked(handler["formatter"]))
        root.addHandler(made)


def _described_dtype() -> str:
    import torch

    return str(torch.get_default_dtype()).removeprefix("torch.")


def _apply_to_torch(captured: Captured) -> None:
    import torch

    torch.set_num_threads(1)
    torch.set_default_dtype(getattr(torch, captured["default_dtype"]))
    _apply_collate_map(captured["collate_map"])


def _described_collate_map() -> str:
    """Describe the whole map in order: earlier entries have priority."""
    entries = list(_collate_map().items())
    users = [
        entry for entry in entries if getattr(entry[1], "__module__", None) != _COLLATE or not _is_torchs(entry[0])
    ]
    try:
        return _packed(entries, users)
    except Exception as error:
        for types, function in users:
            try:
                _packed((types, function), None)
            except Exception as reason:
                name = getattr(types, "__qualname__", repr(types))
                text = f"default_collate_fn_map[{name}]={function!r} cannot be sent to a worker: {reason}"
                raise CannotCarryError(
                    f'{text}. Register it in worker_init_fn, or give multiprocessing_context="fork".', what=text
                ) from error
        raise


def _apply_collate_map(packed: str) -> None:
    entries = _unpacked(packed)
    found = _collate_map()
    found.clear()  # in place: other functions refer to this dict
    found.update(entries)


def _collate_map() -> dict[object, object]:
    found: dict[object, object] = importlib.import_module(_COLLATE).default_collate_fn_map
    return found


def _is_torchs(types: object) -> bool:
    each = types if isinstance(types, tuple) else (types,)
    return all(getattr(one, "__module__", None) in {"builtins", "numpy", "torch"} for one in each)


def _packed(value: object, users: object) -> str:
    """Serialize `value` as text. `users` are its parts from modules that workers may not find."""
    from headrace.torch_compat import serialize

    if users:
        descriptors: list[int] = []
        serialize.pack_for_workers(users, descriptors)  # makes pickling of such modules by value permanent; takes 1 ms
        if descriptors:
            close_all(descriptors)
            raise TypeError("it uses memory or connections that processes share, which cannot be inherited this way")
    return base64.b64encode(serialize.pack_bytes(value)).decode("ascii")


def _unpacked(text: str) -> Any:
    from headrace.torch_compat import serialize

    return serialize.unpack_bytes(base64.b64decode(text))


_PR_SET_NAME = 15
_NAME = b"pt_data_worker"  # as torch's; `ps` and `top` show it


class Surroundings(TypedDict):
    """State that a child of the trainer would inherit now, for JSON."""

    identity: list[int]
    parent: list[object]  # name and pid
    authkey: str
    config: dict[str, object]
    locale: str
    arguments: list[str]
    recursion_limit: int


def next_number() -> int:
    """Return the number of this process's next child, in multiprocessing's count."""
    counter: Any = processes
    number: int = next(counter._process_counter)
    return number


def described() -> Surroundings:
    parent: Any = multiprocessing.current_process()
    return {
        "identity": list(parent._identity),
        "parent": [parent.name, os.getpid()],
        "authkey": parent.authkey.hex(),
        "config": {name: value for name, value in parent._config.items() if type(value) in (str, int, bool)},
        "locale": locale.setlocale(locale.LC_ALL),
        "arguments": [str(argument) for argument in getattr(sys, "argv", ())],
        "recursion_limit": sys.getrecursionlimit(),
    }


def live(
    surroundings: Surroundings, number: int, run: Callable[[], None], trainer_fd: int | None, *tracker_fd: int
) -> int:
    """Call `run` as such a child, then its finalizers. Return the exit status.

    Args:
        number: Result of `next_number`.
        trainer_fd: A descriptor that is readable once the trainer has ended, if any.
        *tracker_fd: The trainer's resource tracker, if any. A new tracker would remove the user's shared memory when
            this worker ends.
    """
    ctypes.CDLL(None).prctl(_PR_SET_NAME, _NAME)
    with contextlib.suppress(locale.Error):
        locale.setlocale(locale.LC_ALL, surroundings["locale"])
    sys.argv = list(surroundings["arguments"])
    with contextlib.suppress(RecursionError):
        sys.setrecursionlimit(surroundings["recursion_limit"])
    tracker: Any = resource_tracker._resource_tracker
    for fd in tracker_fd:
        tracker._fd, tracker._pid = fd, None
    identity = (*surroundings["identity"], number)
    child: Any = multiprocessing.Process(target=run, name=f"Process-{':'.join(map(str, identity))}", daemon=True)
    child._identity = identity
    child._parent_name, child._parent_pid = surroundings["parent"]
    child._config = {**surroundings["config"], "daemon": True}
    child.authkey = bytes.fromhex(surroundings["authkey"])
    status: int = child._bootstrap(trainer_fd)  # runs multiprocessing's finalizers, and ends threads
    return status
