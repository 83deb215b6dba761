"""Batchers of several kinds, and what each makes of samples, by the plainest of programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from headrace.ops.batch import EvenBatcher
from headrace.ops.bucket import BucketBatcher
from headrace.types import Batcher


class Budget:
    """Groups in order, whose measures have a sum of so much at most."""

    def __init__(self, most: int) -> None:
        self._most, self._sum, self._offered = most, 0, 0

    def offer(self, measure: int) -> Sequence[int]:
        self._sum += measure
        self._offered += 1
        return range(self._offered - 1) if self._sum > self._most else ()

    def end(self) -> Sequence[int]:
        return range(self._offered)


class Buckets:
    """Groups of so many of one kind; it gives no group at the end where it is to leave short ones out."""

    def __init__(self, size: int, *, drop_last: bool) -> None:
        self._size, self._drop_last, self._offered = size, drop_last, 0
        self._buckets: dict[int, list[int]] = {}

    def offer(self, measure: int) -> Sequence[int] | None:
        bucket = self._buckets.setdefault(measure % 3, [])
        bucket.append(self._offered)
        self._offered += 1
        return bucket if len(bucket) == self._size else None

    def end(self) -> Sequence[int] | None:
        return None if self._drop_last else next(iter(self._buckets.values()))


class LargestFirst:
    """The largest of each four that wait, and then the first one: groups of one or two in another order."""

    def __init__(self) -> None:
        self._measures: list[int] = []

    def offer(self, measure: int) -> Sequence[int]:
        self._measures.append(measure)
        return self._chosen() if len(self._measures) == 4 else ()

    def end(self) -> Sequence[int]:
        return self._chosen()

    def _chosen(self) -> Sequence[int]:
        largest = self._measures.index(max(self._measures))
        return [largest, 0] if largest else [0]


Sample = tuple[int, int]  # and its measure
Groups = Callable[[Sequence[Sample]], Iterable[list[int]]]
Full = Callable[[Sequence[int]], int]


class Kind(NamedTuple):
    """A way to put samples together: makes a batcher, and the groups expected from it."""

    begin: Callable[[], Batcher]
    groups: Groups


def whenever(full: Full, *, bucket: Callable[[int], int] = lambda measure: 0, drop_last: bool = False) -> Groups:
    """Groups of samples of one bucket.

    Args:
        full: how many of the waiting samples of a bucket are a group, by the measures of all; 0: none yet.
    """

    def groups(samples: Sequence[Sample]) -> Iterable[list[int]]:
        waiting: list[Sample] = []
        for sample in samples:
            waiting.append(sample)
            group = [one for one in waiting if bucket(one[1]) == bucket(sample[1])]
            group = group[: full([measure for _, measure in group])]
            if group:
                waiting = [one for one in waiting if one not in group]
                yield [one for one, _ in group]
        while waiting and not drop_last:
            group = [one for one in waiting if bucket(one[1]) == bucket(waiting[0][1])]
            waiting = [one for one in waiting if one not in group]
            yield [one for one, _ in group]

    return groups


def of_size(size: int) -> Full:
    return lambda measures: size if len(measures) == size else 0


def up_to(most: int, count: Callable[[Sequence[int]], int]) -> Full:
    """All but the last one, which has no room there."""
    return lambda measures: len(measures) - 1 if count(measures) > most else 0


def largest_first(samples: Sequence[Sample]) -> Iterable[list[int]]:
    left = list(samples)
    while left:
        largest = max(left[:4], key=lambda one: one[1])
        group = [largest] if largest is left[0] else [largest, left[0]]
        left = [one for one in left if one not in group]
        yield [one for one, _ in group]


def even(size: int, *, drop_last: bool = False) -> Kind:
    return Kind(partial(EvenBatcher, size, drop_last=drop_last), whenever(of_size(size), drop_last=drop_last))


def budget(most: int) -> Kind:
    return Kind(partial(Budget, most), whenever(up_to(most, sum)))


def buckets(size: int, *, drop_last: bool = False) -> Kind:
    groups = whenever(of_size(size), bucket=lambda measure: measure % 3, drop_last=drop_last)
    return Kind(partial(Buckets, size, drop_last=drop_last), groups)


def by_length(size: int | None, tokens: int | None, *, drop_last: bool = False) -> Kind:
    full = up_to(tokens, lambda lengths: len(lengths) * max(lengths)) if tokens is not None else of_size(size)
    groups = whenever(full, bucket=lambda length: sum(length > edge for edge in (2, 5)), drop_last=drop_last)
    return Kind(partial(BucketBatcher, (2, 5), size, tokens, drop_last=drop_last), groups)


KINDS: dict[str, Kind] = {
    "even 1": even(1),
    "even 3": even(3),
    "even 5": even(5),
    "even 3, whole": even(3, drop_last=True),
    "budget 7": budget(7),
    "budget 20": budget(20),
    "buckets of 2": buckets(2),
    "buckets of 4": buckets(4),
    "buckets of 3, whole": buckets(3, drop_last=True),
    "largest first": Kind(LargestFirst, largest_first),
    "3 by length": by_length(3, None),
    "2 by length, whole": by_length(2, None, drop_last=True),
    "30 tokens by length": by_length(None, 30),
    "12 tokens by length, whole": by_length(None, 12, drop_last=True),
}
