"""Which samples are left out, as the options say it: those that fail, and those that are named."""

from __future__ import annotations

import os
import stat
from typing import Any

from headrace.errors import OptionError
from headrace.functions import is_async
from headrace.options import Exclude, SkipPolicy

MAX_SKIPS = None, 100  # what max_skips is by default: in all, in a row


def skip_policy(on_error: Any, max_skips: Any) -> SkipPolicy | None:
    """Which failed samples are left out; None: none is.

    Raises:
        OptionError: an option has a value that cannot be used.
    """
    is_known = on_error in ("raise", "skip") if isinstance(on_error, str) else callable(on_error)
    if not is_known:
        raise OptionError(f"on_error={on_error!r}: 'raise', 'skip' or a function of an exception is meant")
    if is_async(on_error):
        raise OptionError(f"on_error={on_error!r} is asynchronous: it is called while batches are put in order")
    limits = max_skips if isinstance(max_skips, tuple) else (max_skips, None)
    if len(limits) != 2 or not all(limit is None or is_count(limit) for limit in limits):
        raise OptionError(f"max_skips={max_skips!r}: a number of 0 or more, or two of them or None: in all, in a row")
    if on_error != "raise":
        return SkipPolicy(None if on_error == "skip" else on_error, *limits)
    if max_skips != MAX_SKIPS:
        raise OptionError(f"max_skips={max_skips!r} bounds what on_error leaves out, and on_error is 'raise'")
    return None


def exclusion(given: Exclude | str | os.PathLike[str] | None) -> Exclude | None:
    """What is left out of epochs; a file alone is one that `quarantine` has written.

    Raises:
        OptionError: it is something else.
    """
    if isinstance(given, str | os.PathLike):
        return Exclude(files=[given])
    if given is not None and not isinstance(given, Exclude):
        raise OptionError(
            f"exclude={given!r:.100}: hr.Exclude(samples=…, steps=…) or a file that quarantine= has written is meant"
        )
    return given


def quarantine_file(given: str | os.PathLike[str] | None, on_error: object) -> str | None:
    """The file that names skipped samples.

    Raises:
        OptionError: no sample is skipped, or it is no file that can be written.
    """
    if given is None:
        return None
    path = os.fspath(given)
    if on_error == "raise":
        raise OptionError(f"quarantine={path!r} names the samples that on_error leaves out, and on_error is 'raise'")
    try:
        with open(path, "ab", opener=open_file):  # pathlib takes no opener
            return path
    except (OSError, ValueError) as error:
        raise OptionError(f"quarantine={path!r} cannot be written: {error}") from error


def open_file(path: str, flags: int) -> int:
    """Open a path, as `opener` of Python's `open`; a pipe, a socket or a device is refused, and waited for by nobody.

    Raises:
        OSError: it is no file, or cannot be opened.
    """
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0), 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError("it is a pipe or a device, and no file")
    return descriptor


def is_count(value: object) -> bool:
    """Whether it is a whole number of 0 or more."""
    return isinstance(value, int) and type(value) is not bool and value >= 0
