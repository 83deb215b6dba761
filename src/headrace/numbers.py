"""Validation of numbers given by users. Numbers that do not fit are refused."""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeGuard

if TYPE_CHECKING:
    from numpy.typing import NDArray


def array_of(values: Any) -> NDArray[Any]:
    """Convert to an array. Lists of integers become int64.

    Raises:
        OverflowError: a list has an integer beyond int64, which numpy would convert to float64.
    """
    import numpy as np  # the command line does without

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


def is_whole(value: Any, least: int = 0) -> TypeGuard[SupportsIndex]:
    """True if `value` is an int64 of at least `least`, NumPy's included. bool does not count."""
    try:
        return type(value) is not bool and least <= operator.index(value) < 2**63
    except TypeError:
        return False


def is_time(value: Any) -> bool:
    """True if `value` is a finite number above 0, such as seconds. True does not count."""
    try:
        return type(value) is not bool and math.isfinite(value) and bool(value > 0)
    except (TypeError, ValueError, RuntimeError):
        return False


def holds(dtype: str, number: float, largest: float) -> bool:
    """True if a dtype, by name, represents `number` without wrapping or rounding off."""
    if dtype == "bool":
        return number in (0, 1)
    if "int" not in dtype:
        return not math.isfinite(number) or abs(number) <= largest
    import numpy as np

    bounds = np.iinfo(dtype)
    return float(number).is_integer() and bounds.min <= number <= bounds.max
