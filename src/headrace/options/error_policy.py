"""Options for samples that are skipped: those that fail, and those that the user excludes."""

from __future__ import annotations

import os
import stat
from typing import Any

from headrace._util import check
from headrace._util.check import is_whole
from headrace.errors import OptionError
from headrace.options import Exclude, SkipPolicy

MAX_SKIPS = None, 100  # default of max_skips: in total, in a row


def skip_policy(on_error: Any, max_skips: Any) -> SkipPolicy | None:
    """Return the policy for failed samples, None for none, or raise OptionError."""
    if callable(on_error):
        check.function("on_error", on_error, is_plain=True)
    else:
        check.one_of("on_error", on_error, ("raise", "skip"), ", or a function of an exception")
    limits = max_skips if isinstance(max_skips, tuple) else (max_skips, None)
    if len(limits) != 2 or not all(limit is None or is_whole(limit) for limit in limits):
        raise check.invalid("max_skips", max_skips, "a whole number or None, or two of them: in all, in a row")
    if on_error != "raise":
        return SkipPolicy(None if on_error == "skip" else on_error, *limits)
    if max_skips != MAX_SKIPS:
        raise check.lacking(f"max_skips={max_skips!r}", "on_error='skip' or a function, and on_error is 'raise'")
    return None


def exclusion(given: Exclude | str | os.PathLike[str] | None) -> Exclude | None:
    """Return the exclusion, or raise OptionError. A path is a file written by `quarantine`."""
    if isinstance(given, str | os.PathLike):
        return Exclude(files=[given])
    if given is not None and not isinstance(given, Exclude):
        raise check.invalid("exclude", given, "hr.Exclude(samples=…, steps=…) or a file written by quarantine=")
    return given


def quarantine_file(given: str | os.PathLike[str] | None, on_error: object) -> str | None:
    """Return the path, or raise OptionError if nothing is skipped or the file is not writable."""
    if given is None:
        return None
    path = os.fspath(given)
    if on_error == "raise":
        raise check.lacking(f"quarantine={path!r}", "on_error='skip' or a function, and on_error is 'raise'")
    try:
        with open(path, "ab", opener=open_file):  # pathlib takes no opener
            return path
    except (OSError, ValueError) as error:
        raise OptionError(f"quarantine={path!r} cannot be written: {error}") from error


def open_file(path: str, flags: int) -> int:
    """Open a regular file, for `opener` of Python's `open`. Never blocks on a pipe or device.

    Raises:
        OSError: it is no regular file, or cannot be opened.
    """
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0), 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError("it is a pipe or a device, and no file")
    return descriptor
