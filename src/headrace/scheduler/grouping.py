"""Which of the samples that wait make a group."""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from headrace.errors import OptionError
from headrace.types import Batcher, LastingBatcher

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

    Each group is found by a batcher of its own, which is offered the samples that wait, in order; or by one that lasts,
    and finds the same. So it follows from those samples alone which group is next, and a run that goes on from a state,
    for which others are gone, finds it too.

    Args:
        begin: gives a new batcher.
        name: of the operator, for errors.
    """

    def __init__(self, begin: Callable[[], Batcher], name: str) -> None:
        self._begin, self._name = begin, name
        self._batcher: Batcher | None = None
        self._offered = 0  # how many it was told of
        self._known: list[int] = []  # by what it knows the first of those that wait: how many it was told of before
        self._numbers: list[int] = []
        self._measures: list[int] = []

    @property
    def waiting(self) -> Sequence[int]:
        """The numbers of the samples that are in no group yet."""
        return self._numbers

    def offer(self, numbers: Iterable[int], measures: Iterable[int]) -> Iterator[FoundGroup]:
        """The groups that there are now that these samples have come; numbers ascend."""
        self._numbers.extend(numbers)
        self._measures.extend(measures)
        yield from self._found()

    def end(self) -> Iterator[FoundGroup]:
        """The groups that there are now that no more come; those that wait after that are in none."""
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
        """All that wait make a group, whatever the batcher says: no more are waited for."""
        return self._anew(range(len(self._numbers)))

    def drop(self) -> None:
        """Forget those that wait."""
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
            except Exception as error:  # that sample's: the others are offered to another batcher
                yield self._anew([this], self._noted(error))
                continue
            if chosen:
                yield self._taken(chosen)

    def _checked(self, chosen: Sequence[int]) -> Sequence[int]:
        """Which of those that wait a batcher has named, by the order in which they came."""
        numbers = [operator.index(one) for one in chosen]
        places = [bisect_left(self._known, one) for one in numbers]
        if len(set(numbers)) < len(numbers) or [self._known[k] for k in places if k < len(self._known)] != numbers:
            raise OptionError(
                f"{self._name}: of {self._offered} samples that it was offered, its batcher named {numbers!r:.200}: "
                "they count from 0, and each can be in a group once"
            )
        return places

    def _taken(self, chosen: Sequence[int]) -> FoundGroup:
        """Some of those that wait, by the order in which they came."""
        if not isinstance(self._batcher, LastingBatcher):
            return self._anew(chosen)
        lasting, offered, gone = self._batcher, self._offered, set(chosen)
        known = [one for k, one in enumerate(self._known) if k not in gone]
        group = self._anew(chosen)
        self._batcher, self._offered, self._known = lasting, offered, known
        return group

    def _anew(self, chosen: Sequence[int], error: Exception | None = None) -> FoundGroup:
        """The same; the rest is offered to another batcher."""
        numbers, gone = [self._numbers[k] for k in chosen], set(chosen)
        self._numbers = [number for k, number in enumerate(self._numbers) if k not in gone]
        self._measures = [measure for k, measure in enumerate(self._measures) if k not in gone]
        self._batcher, self._offered, self._known = None, 0, []
        return FoundGroup(numbers, error)

    def _noted(self, error: Exception) -> Exception:
        error.add_note(f"stage: {self._name}, while samples were put together")
        return error
