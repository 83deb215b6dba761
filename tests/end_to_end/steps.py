"""The steps of an epoch, as several ranks get them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def steps_of(loaders: Sequence[Iterable[Any]], most: int | None = None) -> list[list[Any]]:
    """The ranks' batches of each step, of so many, or all; ranks end after the same one."""
    iterators, steps = [iter(loader) for loader in loaders], list[list[Any]]()
    while len(steps) != most:
        batches = [next(iterator, None) for iterator in iterators]
        if batches[0] is None:
            assert batches == [None] * len(batches)
            break
        assert not any(batch is None for batch in batches)
        steps.append(batches)
    return steps
