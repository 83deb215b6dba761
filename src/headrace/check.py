"""Checks of single arguments. Each raises an OptionError with the argument, its value and the valid ones."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable
from typing import TypeVar

from headrace.errors import OptionError, masked_text
from headrace.functions import is_async, name_of
from headrace.numbers import is_whole

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


def size(name: str, value: object) -> None:
    """Check the height and width of images, or None."""
    if value is not None and not (
        isinstance(value, tuple | list) and len(value) == 2 and all(is_whole(side, 1) for side in value)
    ):
        raise invalid(name, value, "(height, width), both 1 pixel or more")
