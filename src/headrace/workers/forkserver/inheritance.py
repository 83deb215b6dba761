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
import pickle
import re
import sys
import warnings
from collections.abc import Callable
from functools import partial
from multiprocessing import process as processes
from multiprocessing import resource_tracker
from typing import Any

from headrace._util.lazy import when_torch_is_loaded
from headrace._util.shared_memory import close_all
from headrace.torch_compat import serialize

_STREAMS = ("stderr", "stdout")
_COLLATE = "torch.utils.data._utils.collate"
_PR_SET_NAME = 15
_NAME = b"pt_data_worker"  # as torch's; `ps` and `top` show it

Settings = dict[str, Any]


def capture() -> str:
    """Return the settings for a worker that starts now, as text. Takes some tenths of a millisecond.

    Raises:
        CannotCarryError: an entry of `default_collate_fn_map` in torch cannot be pickled. The message names its type.
    """
    import torch

    parent: Any = multiprocessing.current_process()
    root = logging.getLogger()
    loggers = [logger for logger in list(root.manager.loggerDict.values()) if isinstance(logger, logging.Logger)]
    settings: Settings = {
        "identity": parent._identity,
        "parent": (parent.name, os.getpid()),
        "authkey": bytes(parent.authkey),
        "config": {name: value for name, value in parent._config.items() if type(value) in (str, int, bool)},
        "locale": locale.setlocale(locale.LC_ALL),
        "arguments": [str(argument) for argument in getattr(sys, "argv", ())],
        "recursion_limit": sys.getrecursionlimit(),
        "faulthandler": faulthandler.is_enabled(),
        "warnings": _filters(),
        "levels": {logger.name: logger.level for logger in loggers if logger.level},
        "root": root.level,
        "disable": root.manager.disable,
        "handlers": _handlers(root),
        "dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "collate_map": _packed_collate_map(),
    }
    return base64.b64encode(pickle.dumps(settings)).decode("ascii")


def next_number() -> int:
    """Return the number of this process's next child, in multiprocessing's count."""
    counter: Any = processes
    number: int = next(counter._process_counter)
    return number


def live(captured: str, number: int, run: Callable[[], None], trainer_fd: int | None, *tracker_fd: int) -> int:
    """Call `run` as such a child, then its finalizers. Return the exit status.

    Args:
        captured: Result of `capture`.
        number: Result of `next_number`.
        trainer_fd: A descriptor that is readable once the trainer has ended, if any.
        *tracker_fd: The trainer's resource tracker, if any. A new tracker would remove the user's shared memory when
            this worker ends.
    """
    settings: Settings = pickle.loads(base64.b64decode(captured))
    ctypes.CDLL(None).prctl(_PR_SET_NAME, _NAME)
    tracker: Any = resource_tracker._resource_tracker
    for fd in tracker_fd:
        tracker._fd, tracker._pid = fd, None
    identity = (*settings["identity"], number)
    child: Any = multiprocessing.Process(
        target=_run, args=(settings, run), name=f"Process-{':'.join(map(str, identity))}", daemon=True
    )
    child._identity = identity
    child._parent_name, child._parent_pid = settings["parent"]
    child._config = {**settings["config"], "daemon": True}
    child.authkey = settings["authkey"]
    status: int = child._bootstrap(trainer_fd)  # runs multiprocessing's finalizers, and ends threads
    return status


def _run(settings: Settings, run: Callable[[], None]) -> None:
    with contextlib.suppress(locale.Error):
        locale.setlocale(locale.LC_ALL, settings["locale"])
    sys.argv = settings["arguments"]
    with contextlib.suppress(RecursionError):
        sys.setrecursionlimit(settings["recursion_limit"])
    if not settings["faulthandler"]:
        faulthandler.disable()
    elif sys.stderr is not None:
        faulthandler.enable()
    warnings.resetwarnings()
    for module, packed in settings["warnings"]:
        if module in sys.modules:  # importing it could take seconds
            with contextlib.suppress(Exception):  # classes that cannot be imported here
                warnings.filters.append(pickle.loads(packed))  # type: ignore[attr-defined]
    root = logging.getLogger()
    root.setLevel(settings["root"])
    logging.disable(settings["disable"])
    for name, level in settings["levels"].items():
        logging.getLogger(name).setLevel(level)
    for stream, level, formatter in settings["handlers"]:
        handler = logging.StreamHandler(getattr(sys, stream))
        handler.setLevel(level)
        handler.setFormatter(None if formatter is None else serialize.unpack_bytes(formatter))
        root.addHandler(handler)
    when_torch_is_loaded(partial(_apply_to_torch, settings))
    run()


def _apply_to_torch(settings: Settings) -> None:
    import torch

    torch.set_num_threads(1)
    torch.set_default_dtype(getattr(torch, settings["dtype"]))
    entries = serialize.unpack_bytes(settings["collate_map"])
    found = _collate_map()
    found.clear()  # in place: other functions refer to this dict
    found.update(entries)


def _filters() -> list[tuple[str, bytes]]:
    """Return the module of its category and the pickle of each filter. Filters of unknown form are missing."""
    found = []
    for entry in list(warnings.filters):
        _, message, category, module, _ = entry
        if isinstance(category, type) and all(isinstance(text, str | re.Pattern | None) for text in (message, module)):
            with contextlib.suppress(AttributeError, pickle.PicklingError):  # a local class
                found.append((category.__module__, pickle.dumps(entry)))
    return found


def _handlers(root: logging.Logger) -> list[tuple[str, int, bytes | None]]:
    """Return (stream, level, packed formatter) of each handler of a standard stream. Others have files and locks."""
    found = []
    for handler in root.handlers:
        stream, formatter, packed = getattr(handler, "stream", None), handler.formatter, None
        names = [name for name in _STREAMS if stream in (getattr(sys, name), getattr(sys, f"__{name}__"))]
        if stream is None or not names or not isinstance(handler, logging.StreamHandler):
            continue
        with contextlib.suppress(Exception):  # not picklable: plain lines are better than none
            packed = _packed(formatter, None if type(formatter) is logging.Formatter else formatter)
        found.append((names[0], handler.level, packed))
    return found


def _packed_collate_map() -> bytes:
    """Serialize the whole map in order: earlier entries have priority."""
    entries = list(_collate_map().items())
    users = {
        getattr(types, "__qualname__", repr(types)): (types, function)
        for types, function in entries
        if getattr(function, "__module__", None) != _COLLATE or not _is_torchs(types)
    }
    try:
        return _packed(entries, users)
    except Exception as error:
        raise serialize.cannot_carry(error, {"default_collate_fn_map": users}) from error


def _collate_map() -> dict[object, object]:
    found: dict[object, object] = importlib.import_module(_COLLATE).default_collate_fn_map
    return found


def _is_torchs(types: object) -> bool:
    each = types if isinstance(types, tuple) else (types,)
    return all(getattr(one, "__module__", None) in {"builtins", "numpy", "torch"} for one in each)


def _packed(value: object, users: object) -> bytes:
    """Serialize `value`. `users` are its parts from modules that workers may not find."""
    if users:
        descriptors: list[int] = []
        serialize.pack_for_workers(users, descriptors)  # makes pickling of such modules by value permanent; takes 1 ms
        if descriptors:
            close_all(descriptors)
            raise TypeError("it uses memory or connections that processes share, which cannot be inherited this way")
    return serialize.pack_bytes(value)
