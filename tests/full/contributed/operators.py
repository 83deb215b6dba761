"""Operators as another package would have them: one of each kind."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import headrace as hr

Sample = dict[str, Any]


def in_turn(stretches: int = 3) -> hr.plugins.OrderOp:
    """The first sample of each stretch of the data, the second of each, and so on."""

    def numbers(positions: NDArray[np.int64], count: int, seed: int) -> NDArray[np.int64]:
        size, longer = divmod(count, stretches)  # the first ones have one more
        turn, stretch = np.divmod(positions, stretches)
        return stretch * size + np.minimum(stretch, longer) + turn

    return hr.plugins.OrderOp(numbers=numbers)


def noisy_copies(most: int = 3, field: str = "n") -> hr.plugins.SampleOp:
    """Each sample several times, all but the first with noise."""

    def copies(sample: Sample) -> Iterator[Sample]:
        for copy in range(int(sample[field]) % (most + 1)):
            noise = int(hr.rng().integers(1000)) if copy else 0
            yield {**sample, "noise": noise}

    return hr.plugins.SampleOp(fn=copies, yields="many")


def length_of(field: str) -> Callable[[Sample], int]:
    """The length of a field; a number is its own length."""

    def length(sample: Sample) -> int:
        value = sample[field]
        return len(value) if isinstance(value, str | list) else int(value)

    return length


class Buckets:
    """A batch is `size` samples with lengths between the same bounds."""

    def __init__(self, size: int, bounds: Sequence[int]) -> None:
        self.size, self.bounds, self.offered = size, bounds, 0
        self.buckets: dict[int, list[int]] = {}

    def offer(self, measure: int) -> Sequence[int] | None:
        bucket = self.buckets.setdefault(bisect.bisect(self.bounds, measure), [])
        bucket.append(self.offered)
        self.offered += 1
        return bucket if len(bucket) == self.size else None

    def end(self) -> Sequence[int]:
        return self.buckets[min(self.buckets)]


def length_buckets(size: int = 3, bounds: Sequence[int] = (4, 9), field: str = "n") -> hr.plugins.BatchOp:
    """Lists of `size` samples, of lengths below the first bound, from it up to the second, and so on."""
    length = length_of(field)

    def with_longest(samples: list[Sample]) -> list[Sample]:
        longest = max(map(length, samples))
        return [{**sample, "longest": longest} for sample in samples]

    return hr.plugins.BatchOp(batcher=lambda: Buckets(size, bounds), measure=length, collate=with_longest)


class Budget:
    """Samples in order, as long as they have no more tokens than `most`; a longer one is a batch by itself."""

    def __init__(self, most: int) -> None:
        self.most, self.tokens, self.offered = most, 0, 0

    def offer(self, measure: int) -> Sequence[int]:
        self.tokens += measure
        self.offered += 1
        is_over = self.tokens > self.most and self.offered > 1
        return range(self.offered - 1) if is_over else ()

    def end(self) -> Sequence[int]:
        return range(self.offered)


def token_batches(most: int = 9, field: str = "n") -> hr.plugins.BatchOp:
    """Batches of `most` tokens in all, as lists of samples."""
    return hr.plugins.BatchOp(batcher=lambda: Budget(most), measure=length_of(field))


for _make in (in_turn, noisy_copies, length_buckets, token_batches):
    hr.plugins.register_operator(_make.__name__, _make)
