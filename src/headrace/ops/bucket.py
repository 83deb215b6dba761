"""Batchers and other functions that group samples; see `headrace.types.Batcher`."""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from headrace.ops.select import field_of
from headrace.workers.randomness import rng


class EvenBatcher:
    """Groups of `size` samples, in order. The last one may be shorter."""

    def __init__(self, size: int, *, drop_last: bool) -> None:
        self._size, self._drop_last, self._offered = size, drop_last, 0

    def offer(self, measure: int) -> Sequence[int]:  # noqa: ARG002 (each counts as one)
        self._offered += 1
        return range(self._offered) if self._offered == self._size else ()

    def end(self) -> Sequence[int]:
        return () if self._drop_last else range(self._offered)


class WindowShuffle:
    """Permutes the samples of a window, depending on (seed, epoch, position of the window).

    Args:
        seed: Combined with the loader's seed. None: the loader's seed alone.
    """

    def __init__(self, seed: int | None) -> None:
        self._seed = seed

    def __call__(self, samples: list[Any]) -> list[Any]:
        generator = rng()
        if self._seed is not None:
            generator = np.random.default_rng([self._seed, int(generator.integers(2**63))])
        return [samples[k] for k in generator.permutation(len(samples))]


class BucketBatcher:
    """Groups of samples of similar length. A full bucket is a group.

    Args:
        edges: Greatest length of each bucket, ascending. The last bucket has all longer samples.
        size: Samples in a full bucket. None: `tokens` decides.
        tokens: Maximum padded size of a group: its number of samples times the longest length.
    """

    is_lasting: Literal[True] = True

    def __init__(self, edges: Sequence[int], size: int | None, tokens: int | None, *, drop_last: bool) -> None:
        self._edges, self._size, self._tokens, self._drop_last = edges, size, tokens, drop_last
        self._buckets: dict[int, list[int]] = {}  # ordered by first sample
        self._longest: dict[int, int] = {}
        self._offered = 0

    def offer(self, measure: int) -> Sequence[int]:
        number, this = bisect_left(self._edges, measure), self._offered
        self._offered += 1
        bucket = self._buckets.get(number)
        if bucket is None:
            bucket = self._buckets[number] = []
        if self._tokens is not None:
            longest = max(measure, self._longest.get(number, 0)) if bucket else measure
            self._longest[number] = longest
            if bucket and (len(bucket) + 1) * longest > self._tokens:
                del self._buckets[number]
                self._buckets[number], self._longest[number] = [this], measure
                return bucket
        bucket.append(this)
        if len(bucket) != self._size:
            return ()
        del self._buckets[number]
        return bucket

    def end(self) -> Sequence[int] | None:
        return None if self._drop_last else self._buckets.pop(next(iter(self._buckets)))


class Length:
    """Returns the length of a sample: `len` of the field `of`, or the result of a function `of`.

    Args:
        most: Maximum length. None: unlimited.
    """

    def __init__(self, of: str | int | Callable[[Any], int], most: int | None = None) -> None:
        self._of, self._most = of, most

    def __call__(self, sample: object) -> int:
        given = self._of(sample) if callable(self._of) else len(field_of(sample, self._of))
        try:
            length = operator.index(given)
        except TypeError:
            raise TypeError(f"bucket: the length of a sample is {given!r:.100}: a whole number is needed") from None
        if length < 0:
            raise ValueError(f"bucket: the length of a sample is {length}: 0 or more is meant")
        if self._most is not None and length > self._most:
            raise ValueError(
                f"bucket: a sample has the length {length}, and batch_tokens={self._most} is less: cut it, or leave it "
                "out by .filter()"
            )
        return length
