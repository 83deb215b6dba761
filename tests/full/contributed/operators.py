"""Operators as another package would have them: one of each kind."""

import bisect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from full.contributed.documented import in_turn
from unit.batchers import Buckets, Budget

import headrace as hr

Sample = dict[str, Any]


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


def length_buckets(size: int = 3, bounds: Sequence[int] = (4, 9), field: str = "n") -> hr.plugins.BatchOp:
    """Lists of `size` samples, of lengths below the first of two bounds, from it up to the second, and above."""
    length = length_of(field)

    def bucket(sample: Sample) -> int:
        return bisect.bisect(bounds, length(sample))

    def with_longest(samples: list[Sample]) -> list[Sample]:
        longest = max(map(length, samples))
        return [{**sample, "longest": longest} for sample in samples]

    return hr.plugins.BatchOp(batcher=partial(Buckets, size, drop_last=False), measure=bucket, collate=with_longest)


def token_batches(most: int = 9, field: str = "n") -> hr.plugins.BatchOp:
    """Batches of `most` tokens in all, as lists of samples."""
    return hr.plugins.BatchOp(batcher=partial(Budget, most), measure=length_of(field))


hr.plugins.register_operator("in_turn", lambda stretches=3: in_turn(stretches))
for _make in (noisy_copies, length_buckets, token_batches):
    hr.plugins.register_operator(_make.__name__, _make)
