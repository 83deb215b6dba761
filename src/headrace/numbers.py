"""Numbers of users as arrays have them: never another number in the place of one that does not fit, without a word."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np
from numpy.typing import NDArray


def array_of(values: Any) -> NDArray[Any]:
    """The same as an array; what is none yet, such as a list, has whole numbers as numpy's int64.

    Raises:
        OverflowError: a list has a whole number that int64 cannot hold, of which numpy makes float64.
    """
    array = np.asarray(values)
    if hasattr(values, "dtype") or array.dtype.kind not in "ufO" or not array.size:
        return array
    if array.dtype.kind == "O" or np.abs(array).max() >= 2**63:
        for value in np.asarray(values, object).flat:
            if hasattr(value, "__index__") and not -(2**63) <= int(value) < 2**63:
                raise OverflowError(
                    f"a list has the whole number {value}, which int64 cannot hold; an array of uint64 can"
                )
    return array


def is_whole(value: Any, least: int = 0) -> bool:
    """Whether it is a whole number from that on that int64 can hold, also one of NumPy's; True and False are none."""
    try:
        return type(value) is not bool and least <= operator.index(value) < 2**63
    except TypeError:
        return False


def is_time(value: Any) -> bool:
    """Whether it is a finite number of more than 0, such as a time in seconds; True is none."""
    try:
        return type(value) is not bool and math.isfinite(value) and bool(value > 0)
    except (TypeError, ValueError, RuntimeError):
        return False


def holds(dtype: str, number: float, largest: float) -> bool:
    """Whether a type can hold a number as it is: others would be wrapped around, or cut off.

    Args:
        dtype: its name, as numpy and torch have it.
        number: the number.
        largest: the largest finite one of that type, where it has a point.
    """
    if dtype == "bool":
        return number in (0, 1)
    if "int" not in dtype:
        return not math.isfinite(number) or abs(number) <= largest
    bounds = np.iinfo(dtype)
    return float(number).is_integer() and bounds.min <= number <= bounds.max
