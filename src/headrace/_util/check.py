"""Checks of single arguments. Each raises an OptionError with the argument, its value and the valid ones."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeGuard, TypeVar

from headrace._util.functions import is_async, name_of
from headrace.errors import OptionError, masked_text

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from headrace.types import Ints

F = TypeVar("F")


def invalid(name: str, value: object, needed: str) -> OptionError:
    """Return the error of an argument that is not what is needed."""
    text = name_of(value) if callable(value) else masked_text(repr(value))
    return OptionError(f"{name}={text:.200} must be {needed}")


def conflict(one: str, other: str, remedy: str = "give one of them") -> OptionError:
    """Return the error of two options that exclude each other."""
    return OptionError(f"{one} and {other} exclude each other: {remedy}")


def lacking(one: str, other: str) -> OptionError:
    """Return the error of an option that has no effect, or no meaning, without another."""
    return OptionError(f"{one} needs {other}")


def unequal(one: str, has: object, other: str, others: object, remedy: str = "") -> OptionError:
    """Return the error of two things that have different numbers, or different values, of something."""
    return OptionError(f"{one} has {has}, and {other} has {others}{remedy and f': {remedy}'}")


def empty(name: str, things: str, remedy: str = "") -> OptionError:
    """Return the error of something that lacks all that it is needed for."""
    return OptionError(f"{name} has no {things}{remedy and f': {remedy}'}")


def too_few(things: str, ranks: int, remedy: str) -> OptionError:
    """Return the error of ranks that cannot each have one of several things."""
    return OptionError(f"{things} for {ranks} ranks, and each needs one: {remedy}")


def whole(name: str, value: object, least: int = 0, also: str = "") -> int:
    """Return an int64. `also` names valid values of other types."""
    if is_whole(value, least):
        return operator.index(value)
    raise invalid(name, value, f"a whole number, {least} or more{also}")


def whole_or_none(name: str, value: object, least: int = 0) -> None:
    if value is not None:
        whole(name, value, least, ", or None")


def number(name: str, value: float, least: float = 0, most: float = math.inf, *, is_open: bool = False) -> None:
    """Check a number. `is_open`: `least` itself is refused."""
    try:
        is_valid = least <= value <= most and not (is_open and value == least)
    except (TypeError, ValueError):
        is_valid = False
    if not is_valid:
        low = f"above {least}" if is_open else f"{least} or more"
        raise invalid(name, value, f"a number, {low}" if most == math.inf else f"a number, {low}, at most {most:,}")


def one_of(name: str, value: object, words: Iterable[object], also: str = "") -> None:
    """Check one of several words. `also` names valid values of other types, which were checked before."""
    words = [*words]
    if value not in words:
        raise invalid(name, value, f"one of {', '.join(map(repr, words)) or 'nothing':.500}{also}")


def function(name: str, value: F, *, is_plain: bool = False) -> F:
    """Return a function. `is_plain`: an `async def` is refused."""
    if not callable(value) or (is_plain and is_async(value)):
        raise invalid(name, value, "a plain function, not an `async def`" if is_plain else "a function")
    return value


def names(name: str, value: Collection[object]) -> None:
    """Check different texts, at least one."""
    if not value or len({*value}) < len(value) or not all(isinstance(one, str) for one in value):
        raise invalid(name, value, "different names of fields, at least one")


def whole_numbers(name: str, values: ArrayLike, stop: int = 2**63, count: int | None = None, hint: str = "") -> Ints:
    """Return whole numbers below `stop` as an array of int64. `count`: how many are needed."""
    import numpy as np  # the command line does without

    given = np.asarray(values)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu") or count not in (None, len(given)):
        needed = "whole numbers in one dimension" if count is None else f"{count} whole numbers"
        raise OptionError(f"{name} must be {needed}, not an array of {given.dtype}, shape {given.shape}{hint}")
    outside = np.flatnonzero((given < 0) | (given >= stop))
    if len(outside):
        raise invalid(f"{name}[{outside[0]}]", int(given[outside[0]]), f"a whole number, 0 or more, below {stop}")
    return given.astype(np.int64)


def size(name: str, value: object) -> None:
    """Check the height and width of images, or None."""
    if value is not None and not (
        isinstance(value, tuple | list) and len(value) == 2 and all(is_whole(side, 1) for side in value)
    ):
        raise invalid(name, value, "(height, width), both 1 pixel or more")


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
