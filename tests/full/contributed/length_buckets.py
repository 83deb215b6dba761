"""An operator as a package of somebody else would have it: batches of samples that are about as long."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

import headrace as hr


class Buckets:
    """Samples whose lengths lie between the same bounds are a batch once there are `size` of them."""

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


class Length:
    """That of a sample's field; of a number it is itself."""

    def __init__(self, field: str) -> None:
        self.field = field

    def __call__(self, sample: dict[str, Any]) -> int:
        value = sample[self.field]
        return len(value) if isinstance(value, str | list) else int(value)


class Longest:
    """The samples of a batch, each with the length of the longest one: what it is to be padded to."""

    def __init__(self, length: Length) -> None:
        self.length = length

    def __call__(self, samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
        longest = max(map(self.length, samples))
        return [{**sample, "longest": longest} for sample in samples]


def length_buckets(size: int = 3, bounds: Sequence[int] = (4, 9), field: str = "n") -> hr.BatchOp:
    """Lists of `size` samples, of lengths below the first bound, from it up to the second, and so on."""
    length = Length(field)
    return hr.BatchOp(batcher=lambda: Buckets(size, bounds), measure=length, collate=Longest(length))


hr.register_operator("length_buckets", length_buckets)
