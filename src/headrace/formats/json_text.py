"""Values of JSON texts: by orjson where it is installed, and the same values and errors without it.

orjson takes a third of the time of Python's own `json`, whose values are the ones that count:

* Whole numbers of any size are exact. orjson makes floats of those that have more than 64 bits, so what has a run of 19
  digits or more, which is looked for in the bytes, is not given to it.
* NaN and Infinity, floats over the largest one (which are infinite), and halves of surrogate pairs are values. orjson
  refuses them; what it refuses, for whatever reason, `json` is asked, and it also says what is wrong.
* Of equal names in an object the last one holds, in the place of the first. Both do that.
* What is nested too deep is an error. How deep that is depends on Python's stack, which does for 950 levels or
  more; with orjson it is 1,024, or that.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

_DIGITS = 19  # as many has the first whole number that does not fit into 63 bits
_NEAR = np.array([-1, -2, -3]), np.array([16, 17, 18])  # from the first of 16 digits: those before, and behind
_EDGE = b"\n" * 8
_NONE = object()


def loads(text: bytes) -> object:
    """The value of a JSON text in UTF-8, as Python's json has it.

    Raises:
        ValueError: it is none, or nested too deep.
    """
    (value,) = _loads_fast([text]) or (_NONE,)
    if value is not _NONE:
        return value
    try:
        return json.loads(str(text, "utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def loads_many(texts: Sequence[bytes]) -> list[object]:
    """The values of many texts; None in the place of each for which `loads` must be asked."""
    return [None if value is _NONE else value for value in _loads_fast(texts)]


def _loads_fast(texts: Sequence[bytes]) -> list[object]:
    """The values that both libraries give; `_NONE` in the place of others. Without orjson there are none."""
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
    """The value of one text that orjson may refuse."""
    orjson = _orjson()
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return _NONE


@cache
def _orjson() -> Any:
    try:
        import orjson
    except ImportError:  # the extra "fast" has it
        return None
    return orjson


def _with_long_numbers(texts: Sequence[bytes]) -> list[int]:
    """Which texts have a run of 19 digits, as one of 16 bytes or more that are digits, or ":" to "?", may be."""
    joined = b"".join([_EDGE, b"\n".join(texts), _EDGE])
    words = np.frombuffer(joined, np.uint32, len(joined) // 4)
    full = (words & np.uint32(0xF0F0F0F0)) == np.uint32(0x30303030)
    full = full[1:] & full[:-1]
    full = full[2:] & full[:-2]  # four words in a row: every such run has them
    if not full.any():
        return []
    data, first = np.frombuffer(joined, np.uint8), 4 * np.flatnonzero(full)
    before, behind = (data[first[:, None] + near] - np.uint8(48) < 10 for near in _NEAR)
    length = 16 + np.logical_and.accumulate(before, 1).sum(1) + np.logical_and.accumulate(behind, 1).sum(1)
    starts = len(_EDGE) + np.cumsum([0, *(len(text) + 1 for text in texts)])
    found: list[int] = np.unique(np.searchsorted(starts, first[length >= _DIGITS], "right") - 1).tolist()
    return found
