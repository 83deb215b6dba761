"""Which of the samples that wait make a group."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from headrace.errors import OptionError
from headrace.types import Batcher

_WAITING_MOST = 2**20  # samples; more are held for a group that never comes


class FoundGroup(NamedTuple):
    """Samples that are put together.

    Attributes:
        numbers: of the samples, in the order in which they are put together.
        error: why they cannot be: it comes in their place.
    """

    numbers: Sequence[int]
    error: Exception | None = None


class GroupFinder:
    """Asks batchers for one group after the other.

    Each group is found by a batcher of its own, which is offered the samples that wait, in order. So it follows from
    them alone which one is next, and a run that goes on from a state, for which others are gone, finds the same.

    Args:
        begin: gives a new batcher.
        name: of the operator, for errors.
    """

    def __init__(self, begin: Callable[[], Batcher], name: str) -> None:
        self._begin, self._name = begin, name
        self._batcher: Batcher | None = None
        self._offered = 0  # how many of those that wait it knows
        self._numbers: list[int] = []
        self._measures: list[int] = []

    @property
    def waiting(self) -> Sequence[int]:
        """The numbers of the samples that are in no group yet."""
        return self._numbers

    def offer(self, number: int, measure: int) -> Iterator[FoundGroup]:
        """The groups that there are now that this sample has come; numbers ascend."""
        self._numbers.append(number)
        self._measures.append(measure)
        yield from self._found()

    def end(self) -> Iterator[FoundGroup]:
        """The groups that there are now that no more come; those that wait after that are in none."""
        while self._batcher is not None and self._numbers:
            try:
                chosen = self._checked(self._batcher.end())
            except Exception as error:
                yield self._taken(range(len(self._numbers)), self._noted(error))
                continue
            if not chosen:
                break
            yield self._taken(chosen)
            yield from self._found()

    def cut(self) -> FoundGroup:
        """All that wait make a group, whatever the batcher says: no more are waited for."""
        return self._taken(range(len(self._numbers)))

    def drop(self) -> None:
        """Forget those that wait."""
        self._taken(range(len(self._numbers)))

    def _found(self) -> Iterator[FoundGroup]:
        while self._offered < len(self._numbers):
            self._offered += 1
            try:
                if self._offered > _WAITING_MOST:
                    raise OptionError(f"{self._name}: {_WAITING_MOST} samples wait, and its batcher names no group")
                if self._batcher is None:
                    self._batcher = self._begin()
                chosen = self._checked(self._batcher.offer(self._measures[self._offered - 1]))
            except Exception as error:  # that sample's: the others are offered to another batcher
                yield self._taken([self._offered - 1], self._noted(error))
                continue
            if chosen:
                yield self._taken(chosen)

    def _checked(self, chosen: Sequence[int] | None) -> Sequence[int]:
        if chosen is None:
            return ()
        numbers = [operator.index(one) for one in chosen]
        if len(set(numbers)) < len(numbers) or not all(0 <= one < self._offered for one in numbers):
            raise OptionError(
                f"{self._name}: of {self._offered} samples that it was offered, its batcher named {numbers!r:.200}: "
                "they count from 0, and each can be in a group once"
            )
        return numbers

    def _taken(self, chosen: Sequence[int], error: Exception | None = None) -> FoundGroup:
        """Some of those that wait, by the order in which they came; the rest is offered to another batcher."""
        numbers, gone = [self._numbers[k] for k in chosen], set(chosen)
        self._numbers = [number for k, number in enumerate(self._numbers) if k not in gone]
        self._measures = [measure for k, measure in enumerate(self._measures) if k not in gone]
        self._batcher, self._offered = None, 0
        return FoundGroup(numbers, error)

    def _noted(self, error: Exception) -> Exception:
        error.add_note(f"stage: {self._name}, while samples were put together")
        return error
