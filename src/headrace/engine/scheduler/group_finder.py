"""Finds the groups among waiting samples by batchers."""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from headrace.errors import OptionError
from headrace.types import Batcher, LastingBatcher

_WAITING_MOST = 2**20  # limit of waiting samples: no group will ever come


class FoundGroup(NamedTuple):
    """Numbers of a group's samples in order, or the error to raise in place of the group."""

    numbers: Sequence[int]
    error: Exception | None = None


class GroupFinder:
    """Finds one group after the other.

    A new batcher finds each group from the waiting samples, in order. A lasting batcher finds the same groups. The next
    group thus depends on these samples only, and a run that resumes from a state without the earlier samples finds it
    too.
    """

    def __init__(self, begin: Callable[[], Batcher], name: str) -> None:
        self._begin, self._name = begin, name
        self._batcher: Batcher | None = None
        self._offered = 0  # number of samples offered to the batcher
        self._known: list[int] = []  # per offered waiting sample: its number in the batcher's count
        self._numbers: list[int] = []
        self._measures: list[int] = []

    @property
    def waiting(self) -> Sequence[int]:
        return self._numbers

    def offer(self, numbers: Iterable[int], measures: Iterable[int]) -> Iterator[FoundGroup]:
        """Add samples in ascending order and yield the groups found."""
        self._numbers.extend(numbers)
        self._measures.extend(measures)
        yield from self._found()

    def end(self) -> Iterator[FoundGroup]:
        """Yield the last groups. Samples that still wait belong to no group."""
        while self._batcher is not None and self._numbers:
            try:
                named = self._batcher.end()
                chosen = self._checked(named) if named is not None else ()
            except Exception as error:
                yield self._anew(range(len(self._numbers)), self._noted(error))
                continue
            if not chosen:
                break
            yield self._taken(chosen)
            yield from self._found()

    def cut(self) -> FoundGroup:
        """Make a group of all waiting samples, without the batcher."""
        return self._anew(range(len(self._numbers)))

    def drop(self) -> None:
        self._anew(range(len(self._numbers)))

    def _found(self) -> Iterator[FoundGroup]:
        while len(self._known) < len(self._numbers):
            self._known.append(self._offered)
            self._offered += 1
            this = len(self._known) - 1
            try:
                if this >= _WAITING_MOST:
                    raise OptionError(f"{self._name}: {_WAITING_MOST} samples wait, and its batcher names no group")
                if self._batcher is None:
                    self._batcher = self._begin()
                named = self._batcher.offer(self._measures[this])
                chosen = self._checked(named) if named is not None and len(named) else ()
            except Exception as error:  # replaces that sample; the others are offered to a new batcher
                yield self._anew([this], self._noted(error))
                continue
            if chosen:
                yield self._taken(chosen)

    def _checked(self, chosen: Sequence[int]) -> Sequence[int]:
        """Return the indices of the waiting samples that a batcher has named, or raise OptionError."""
        numbers = [operator.index(one) for one in chosen]
        places = [bisect_left(self._known, one) for one in numbers]
        if len(set(numbers)) < len(numbers) or [self._known[k] for k in places if k < len(self._known)] != numbers:
            raise OptionError(
                f"{self._name}: of {self._offered} samples that it was offered, its batcher named {numbers!r:.200}: "
                "they count from 0, and each can be in a group once"
            )
        return places

    def _taken(self, chosen: Sequence[int]) -> FoundGroup:
        """Remove the group at these indices of waiting samples. A lasting batcher stays."""
        if not isinstance(self._batcher, LastingBatcher):
            return self._anew(chosen)
        lasting, offered, gone = self._batcher, self._offered, set(chosen)
        known = [one for k, one in enumerate(self._known) if k not in gone]
        group = self._anew(chosen)
        self._batcher, self._offered, self._known = lasting, offered, known
        return group

    def _anew(self, chosen: Sequence[int], error: Exception | None = None) -> FoundGroup:
        """Remove the group and offer the remaining samples to a new batcher."""
        numbers, gone = [self._numbers[k] for k in chosen], set(chosen)
        self._numbers = [number for k, number in enumerate(self._numbers) if k not in gone]
        self._measures = [measure for k, measure in enumerate(self._measures) if k not in gone]
        self._batcher, self._offered, self._known = None, 0, []
        return FoundGroup(numbers, error)

    def _noted(self, error: Exception) -> Exception:
        error.add_note(f"stage: {self._name}, while samples were put together")
        return error
