"""JSON Lines: each line is a JSON object and a sample.

orjson, if installed, takes a third of the time of Python's `json`. The results are always those of `json`:

* Integers of any size are exact. orjson converts those beyond 64 bits to floats. Texts with a run of 19 digits or more
  are therefore not passed to it, unless the digits follow a decimal point.
* NaN and Infinity, floats beyond the largest (which are infinite), and unpaired surrogates are values. orjson refuses
  them. `json` parses all that orjson refuses, and provides the error messages.
* The last of equal names in an object wins, at the position of the first. Both libraries do that.
* Too deep nesting is an error. The limit of `json` depends on Python's stack, and is at least 950 levels. With orjson
  the limit is 1,024, or that of `json`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from headrace.formats.format import Block, Format
from headrace.formats.limits import Limits
from headrace.formats.optional import if_installed
from headrace.formats.scanners import BYTE_ORDER_MARK, LineScanner
from headrace.formats.tar.headers import looks_like
from headrace.types import Ints

_NONE = object()
_SHOWN = 12
_DIGITS = 19  # digits of the first integer beyond 63 bits
_WORD = 8  # bytes; so many digits contain at least one aligned word
_BEHIND = np.arange(_WORD, _DIGITS)  # offsets of the bytes after a word
_HIGH, _DIGIT = np.uint64(0xF0F0F0F0F0F0F0F0), np.uint64(0x3030303030303030)
_EDGE = b"\n" * 3 * _WORD
_orjson = partial(if_installed, "orjson")  # part of the extra "fast"


def loads(text: bytes) -> object:
    (value,) = _loads_fast([text]) or (_NONE,)
    if value is not _NONE:
        return value
    try:
        return json.loads(str(text, "utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def loads_many(texts: Sequence[bytes]) -> list[object]:
    """Parse many texts. None for each that requires `loads`."""
    return [None if value is _NONE else value for value in _loads_fast(texts)]


def _loads_fast(texts: Sequence[bytes]) -> list[object]:
    """Parse texts on which both libraries agree. `_NONE` for others. Empty without orjson."""
    orjson = _orjson()
    if orjson is None or not texts:
        return []
    try:
        values: list[object] = list(map(orjson.loads, texts))
    except orjson.JSONDecodeError:
        values = list(map(_taken, texts))
    for k in _with_long_numbers(texts):
        values[k] = _NONE
    return values


def _taken(text: bytes) -> object:
    orjson = _orjson()
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return _NONE


def _with_long_numbers(texts: Sequence[bytes]) -> list[int]:
    """Find texts with 19 digits (or ":" to "?") in a row that follow no decimal point."""
    joined = b"".join([_EDGE, b"\n".join(texts), _EDGE])
    words = np.frombuffer(joined, np.uint64, len(joined) // _WORD) & _HIGH
    full = words == _DIGIT
    at = np.flatnonzero(full)
    # The first full word of each run of digits that four more digits follow: runs of 12 to 19 digits have one.
    at = at[(words.view(np.uint32)[2 * at + 2] == _DIGIT.astype(np.uint32)) & ~full[at - 1]]
    if not len(at):
        return []
    data = np.frombuffer(joined, np.uint8)
    others = (words[at - 1] ^ _DIGIT).astype(np.float64)  # the highest nonzero byte is the last non-digit before
    first = _WORD * (at - 1) + (np.frexp(others)[1] - 1) // _WORD + 1
    is_whole = data[first - 1] != ord(".")
    if not is_whole.any():
        return []
    at, first = at[is_whole], first[is_whole]
    behind = (data[_WORD * at[:, None] + _BEHIND] & 0xF0) == ord("0")
    long = first[_WORD * at - first + np.logical_and.accumulate(behind, 1).sum(1) >= _DIGITS - _WORD]
    starts = len(_EDGE) + np.cumsum([0, *map(len, texts)]) + np.arange(len(texts) + 1)
    found: list[int] = np.unique(np.searchsorted(starts, long, "right") - 1).tolist()
    return found


class JsonLineScanner(LineScanner):
    """Finds lines of JSON. Lines of white space are skipped, but counted."""

    def _begins_well(self, head: bytes) -> bool:
        first = head[self._start :].lstrip()
        if first and first[:1] != b"{":
            what = "all of it is one JSON array" if first[:1] == b"[" else f"it begins with {first[:_SHOWN]!r}"
            self._fail(f"each line must be a JSON object, and {what}{looks_like(head)}", 1, self._start)
        return self.error is None

    def _samples(self, lines: Ints, data: NDArray[np.uint8], offset: int, last: bool) -> Ints:
        starts, _, ends = lines
        # a line that is too long is an error even if it is blank
        return lines[:, ~self._are_blank(lines, data, offset) | (ends - starts > self._longest)]


class JsonLines(Format):
    """Objects, one per line, in UTF-8."""

    name = "jsonl"
    suffixes = (".jsonl", ".ndjson")

    def sniff(self, name: str, head: bytes) -> float:
        first, newline, _ = head.removeprefix(BYTE_ORDER_MARK).lstrip().partition(b"\n")
        if not first.startswith(b"{"):
            return 0.0
        if not newline:
            return 0.3  # the first line is longer than `head`, or a single object
        try:
            json.loads(first)
        except (ValueError, RecursionError):
            return 0.0
        return 0.9

    def scanner(self, url: str, limits: Limits) -> JsonLineScanner:
        return JsonLineScanner(url, limits)

    def open_block(self, block: Block, bodies: Sequence[bytes]) -> Sequence[dict[str, object]]:
        value = loads(bodies[0])
        if type(value) is not dict:
            raise ValueError(f"each line must be a JSON object, and this one is a {type(value).__name__}")
        return [value]

    def open_many(self, block: Block, bodies: Sequence[bytes]) -> Sequence[dict[str, object] | None]:
        return [value if type(value) is dict else None for value in loads_many(bodies)]


JSON_LINES = JsonLines()
