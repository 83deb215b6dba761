"""How methods of data sets find what puts several streams together, which lies above them: the package says so here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Combines = Callable[..., Any]
"""Makes a stream of several, which are its first argument."""

_finders: list[Callable[[str], Combines]] = []


def found_by(finder: Callable[[str], Combines]) -> None:
    """Have `finder` find what puts streams together, by the name of the method."""
    _finders[:] = [finder]


def combined(name: str, streams: Sequence[object], **options: object) -> Any:
    """The stream of several.

    Args:
        name: of the method.
        streams: the one whose method it is, and the others.
        **options: of the method.
    """
    return _finders[0](name)(streams, **options)
