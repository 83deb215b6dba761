"""Removal of this package's frames from tracebacks that users see."""

from __future__ import annotations

import os
import sys
from types import TracebackType

from headrace.errors import HeadraceError

_HERE = os.path.dirname(os.path.dirname(__file__)) + os.sep  # noqa: PTH120 (files of code objects are text)
_STANDARD = os.path.dirname(os.__file__) + os.sep  # noqa: PTH120
_CARRIERS = (
    *(f"{_STANDARD}{name}" for name in (f"asyncio{os.sep}", f"concurrent{os.sep}", "threading.py")),
    f"{os.sep}anyio{os.sep}",
)


def trim(error: BaseException) -> None:
    """Remove this package's frames from an exception, its causes and the members of a group.

    Frames of event loops and threads that lead to the first foreign frame are removed too. If there is no foreign
    frame, documented errors and errors with a cause lose all frames. Any other such error is a defect and keeps them.
    `python -X dev` keeps all frames.
    """
    if sys.flags.dev_mode:
        return
    waiting, known = [(error, False)], set[int]()
    while waiting:
        one, is_cause = waiting.pop()
        if id(one) in known:
            continue
        known.add(id(one))
        is_told = is_cause or isinstance(one, HeadraceError) or one.__cause__ is not None
        one.__traceback__ = _trimmed(one.__traceback__, needs_some=not is_told)
        others = (one.__cause__, one.__context__, *getattr(one, "exceptions", ()))
        waiting += [(other, is_told) for other in others if other is not None]


class _Trimming:
    """Context that trims exceptions which leave it. The caller's own frame stays invisible."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, frames: object) -> None:
        del kind, frames
        if error is not None:
            trim(error)


trimming = _Trimming()


def _trimmed(first: TracebackType | None, *, needs_some: bool) -> TracebackType | None:
    frames, at = list[TracebackType](), first
    while at is not None:
        frames.append(at)
        at = at.tb_next
    theirs = [one for one in frames if not _is_ours(one)]
    while theirs and _is_carrier(theirs[0]) and frames[0] is not theirs[0]:
        del theirs[0]
    if not theirs:
        return first if needs_some else None
    if len(theirs) == len(frames):
        return first
    for one, following in zip(theirs, [*theirs[1:], None], strict=True):
        one.tb_next = following
    return theirs[0]


def _is_ours(frame: TracebackType) -> bool:
    return frame.tb_frame.f_code.co_filename.startswith(_HERE)


def _is_carrier(frame: TracebackType) -> bool:
    """True for frames of modules that run functions on event loops and in threads."""
    file = frame.tb_frame.f_code.co_filename
    return file.startswith(_CARRIERS[:-1]) or _CARRIERS[-1] in file
