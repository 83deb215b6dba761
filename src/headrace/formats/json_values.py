"""Checks of untrusted JSON values: each function returns a value of one type, or None."""

from __future__ import annotations


def as_object(value: object) -> dict[str, object] | None:
    return value if isinstance(value, dict) else None


def as_list(value: object) -> list[object] | None:
    return value if isinstance(value, list) else None


def as_text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def as_texts(value: object) -> list[str] | None:
    found = as_list(value)
    texts = [text for text in map(as_text, found or ()) if text is not None]
    return texts if found is not None and len(texts) == len(found) else None


def as_number(value: object) -> int | None:
    """Return an int, or None, also for booleans."""
    return value if type(value) is int else None


def as_count(value: object, most: int) -> int | None:
    """Return an int from 0 to `most`, or None."""
    number = as_number(value)
    return number if number is not None and 0 <= number <= most else None
