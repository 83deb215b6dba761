"""Descriptions of samples in text, one line per field."""

from __future__ import annotations

import itertools
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_WIDTH = 100
_FIELDS = 40
_BYTES = 24
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def told(samples: Iterable[object]) -> Iterator[str]:
    """Yield lines that describe samples: their fields with types, sizes and first contents."""
    for number, sample in enumerate(samples):
        if number:
            yield ""
        if not isinstance(sample, Mapping):
            yield value_in_words(sample)
            continue
        for name, value in itertools.islice(sample.items(), _FIELDS):
            yield f"{_line(str(name))}: {value_in_words(value)}"
        if len(sample) > _FIELDS:
            yield f"… and {len(sample) - _FIELDS} more fields"


def value_in_words(value: Any) -> str:
    if isinstance(value, str):
        return _line(repr(value[: _WIDTH + 1]) + (f" ({len(value):,} characters)" if len(value) > _WIDTH else ""))
    if isinstance(value, bytes | bytearray | memoryview):
        return f"{len(value):,} bytes, {bytes(value[:_BYTES])!r}{'…' if len(value) > _BYTES else ''}"
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is not None and dtype is not None:
        return f"{type(value).__name__} {list(shape)} {dtype}"
    if isinstance(value, list | tuple | dict | set):
        return _line(f"{type(value).__name__} of {len(value):,}: {reprlib.repr(value)}")
    return _line(f"{type(value).__name__} {reprlib.repr(value)}")


def _line(text: str) -> str:
    """Return `text` as one line, without control characters that a terminal would obey."""
    text = _UNPRINTABLE.sub("·", text)
    return text if len(text) <= _WIDTH + 40 else f"{text[: _WIDTH + 40]}…"
