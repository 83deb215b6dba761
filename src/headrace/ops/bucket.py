"""`.bucket()`: batches of samples of similar length."""

from __future__ import annotations

import itertools
import operator
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from headrace._util import check
from headrace._util.check import is_whole
from headrace._util.functions import name_of
from headrace.ops.operator import GroupOperator, field_of


def bucket(
    length: str | int | Callable[[Any], int],
    edges: Sequence[int],
    batch_size: int | None,
    batch_tokens: int | None,
    pad_value: float | Mapping[str, float],
    drop_last: bool,
) -> GroupOperator:
    from headrace.torch_compat.padded import PaddedCollate

    edges = [*edges]
    if not all(map(is_whole, edges)) or any(one >= other for one, other in itertools.pairwise(edges)):
        raise check.invalid(".bucket(): edges", edges, "the greatest length of each bucket: ascending whole numbers")
    sizes = {"batch_size": batch_size, "batch_tokens": batch_tokens}
    given = {name: size for name, size in sizes.items() if size is not None}
    if len(given) != 1:
        raise check.lacking(".bucket()", "either batch_size= or batch_tokens=")
    for argument, size in given.items():
        check.whole(f".bucket(): {argument}", size, 1)
    name = name_of(length) if callable(length) else repr(length)
    if callable(length):
        check.function(".bucket(): length", length, is_plain=True)
    described = ", ".join([name, repr(edges), *(f"{name}={size}" for name, size in given.items())])
    batcher = partial(BucketBatcher, edges, batch_size, batch_tokens)
    whole = GroupOperator(
        f"bucket({described}, drop_last=True)",
        partial(batcher, drop_last=True),
        Length(length, batch_tokens),
        PaddedCollate(pad_value),
        makes_batches=True,
    )
    if drop_last:
        return whole
    return replace(whole, name=f"bucket({described})", batcher=partial(batcher, drop_last=False), without_short=whole)


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
