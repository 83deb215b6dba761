"""Batches as nested containers: changing what lies in them, and keeping what holds it.

The containers are rebuilt as torch's pin_memory does: mutable ones from a shallow copy, so that what a subclass has
beside its contents stays; others by a call of their type, and where that does not take them as a plain dict or list.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence, Sequence
from typing import TypeGuard, TypeVar

L = TypeVar("L")


def rebuilt(batch: object, is_leaf: Callable[[object], TypeGuard[L]], change: Callable[[L], object]) -> object:
    """The same containers with other leaves.

    Args:
        is_leaf: asked of every value before its contents are; what it accepts is changed and not looked into.
        change: gives what takes a leaf's place. All other values stay, strings and bytes as a whole.
    """
    if is_leaf(batch):
        return change(batch)
    if isinstance(batch, (str, bytes, bytearray, memoryview)):
        return batch
    if isinstance(batch, Mapping):
        return _mapping(batch, {key: rebuilt(value, is_leaf, change) for key, value in batch.items()})
    if isinstance(batch, tuple):
        parts = [rebuilt(value, is_leaf, change) for value in batch]
        make: Callable[..., object] = type(batch)
        return make(*parts) if hasattr(batch, "_fields") else make(parts)
    if isinstance(batch, Sequence):
        return _sequence(batch, [rebuilt(value, is_leaf, change) for value in batch])
    return batch


def _mapping(batch: Mapping[object, object], parts: dict[object, object]) -> object:
    try:
        if isinstance(batch, MutableMapping):
            clone = copy.copy(batch)
            clone.update(parts)
            return clone
        return type(batch)(parts)  # type: ignore[call-arg]
    except TypeError:
        return parts


def _sequence(batch: Sequence[object], parts: list[object]) -> object:
    try:
        if isinstance(batch, MutableSequence):
            clone = copy.copy(batch)
            for place, part in enumerate(parts):
                clone[place] = part
            return clone
        return type(batch)(parts)  # type: ignore[call-arg]
    except TypeError:
        return parts
