"""Remaining positions of an epoch: all from a position on, and holes below it."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from headrace.types import Ints, Ranges

_LISTED_MOST = 256  # ranges; some KB of JSON
_BITS_MOST = 2**26
_FAR = 2**62


@dataclass(frozen=True, slots=True)
class Cursor:
    """The remaining positions of an epoch, in order: holes first, then the rest.

    Attributes:
        position: Every position from here on remains.
        holes: [k, 2] int64: disjoint ascending ranges [start, stop) below `position` that remain, too. Negative
            positions count from the end of the epoch before.
    """

    position: int
    holes: Ints

    @staticmethod
    def at(position: int = 0) -> Cursor:
        return Cursor(position, np.zeros((0, 2), np.int64))

    @property
    def hole_count(self) -> int:
        return int((self.holes[:, 1] - self.holes[:, 0]).sum())

    def coming(self, start: int, stop: int) -> Ints:
        """Return remaining positions number `start` to `stop` - 1."""
        held = self.hole_count
        after = np.arange(self.position + max(start - held, 0), self.position + max(stop - held, 0))
        if start >= held:
            return after
        return np.concatenate([expanded(_stretch(self.holes, start, stop)), after])

    def after(self, count: int) -> Cursor:
        """Return the cursor after delivery of the first `count` remaining positions."""
        held = self.hole_count
        if count >= held:
            return Cursor.at(self.position + count - held)
        return Cursor(self.position, _stretch(self.holes, count, held))

    def without(self, delivered: Ints) -> Cursor:
        """Return the cursor after delivery of some of the remaining positions."""
        return self.without_ranges(compressed(np.unique(delivered)))

    def without_ranges(self, ranges: Ints) -> Cursor:
        """Return the cursor without some positions, given as ascending ranges that do not touch."""
        if not len(ranges):
            return self
        top = max(self.position, int(ranges[-1, 1]))
        planned = np.concatenate([self.holes, [[self.position, top]]])
        return Cursor(top, difference(planned, ranges))


def _stretch(ranges: Ints, start: int, stop: int) -> Ints:
    """Return numbers `start` to `stop` - 1 of those in `ranges`, as ranges."""
    ends = np.cumsum(ranges[:, 1] - ranges[:, 0])
    stop = min(stop, int(ends[-1]) if len(ends) else 0)
    if start >= stop:
        return np.zeros((0, 2), np.int64)
    first, last = int(ends.searchsorted(start, side="right")), int(ends.searchsorted(stop))
    some = ranges[first : last + 1].copy()
    some[-1, 1] -= ends[last] - stop
    some[0, 0] = ranges[first, 1] - (ends[first] - start)
    return some


def expanded(ranges: Ints) -> Ints:
    sizes = ranges[:, 1] - ranges[:, 0]
    first = np.repeat(ranges[:, 0] - np.cumsum(sizes) + sizes, sizes)
    return np.asarray(first + np.arange(len(first)), np.int64)


def compressed(numbers: Ints) -> Ints:
    if not len(numbers):
        return np.zeros((0, 2), np.int64)
    ends = np.flatnonzero(np.diff(numbers) != 1)
    starts = np.concatenate([numbers[:1], numbers[ends + 1]])
    stops = np.concatenate([numbers[ends], numbers[-1:]]) + 1
    return np.stack([starts, stops], axis=1)


def difference(ranges: Ints, others: Ints) -> Ints:
    """Return numbers of ascending ranges not in `others`, as ranges that do not touch."""
    edges = np.concatenate([ranges[:, 0], ranges[:, 1], others[:, 0], others[:, 1]])
    steps = np.repeat([1, -1, 2, -2], [len(ranges), len(ranges), len(others), len(others)])
    ascending = np.argsort(edges, kind="stable")
    edges, inside = edges[ascending], np.cumsum(steps[ascending])
    wanted = np.flatnonzero((inside[:-1] == 1) & (edges[1:] > edges[:-1]))
    starts, stops = edges[wanted], edges[wanted + 1]
    is_new = starts[1:] != stops[:-1]
    first, last = np.ones(len(starts), np.bool_), np.ones(len(starts), np.bool_)
    first[1:] = last[:-1] = is_new
    return np.stack([starts[first], stops[last]], axis=1)


def pack_ranges(ranges: Ints) -> list[int] | str:
    """Encode ascending ranges that do not touch as JSON; `unpack_ranges` decodes them.

    The result is a list of each range's distance from the end of the last and its length. Many close ranges are encoded
    as text instead, with a bit for each number.
    """
    before = np.concatenate([[0], ranges[:-1, 1]])[: len(ranges)]
    numbers: list[int] = np.stack([ranges[:, 0] - before, ranges[:, 1] - ranges[:, 0]], axis=1).ravel().tolist()
    if len(ranges) <= _LISTED_MOST or ranges[-1, 1] - ranges[0, 0] > _BITS_MOST:
        return numbers
    first = int(ranges[0, 0])
    bits = np.zeros(int(ranges[-1, 1]) - first, bool)
    bits[expanded(ranges) - first] = True
    text = f"{first}:" + base64.b64encode(zlib.compress(np.packbits(bits).tobytes(), 9)).decode()
    return text if len(text) < len(str(numbers)) else numbers


def unpack_ranges(packed: Sequence[int] | str) -> Ints:
    """Decode the result of `pack_ranges`. Raises ValueError if the input is invalid."""
    if isinstance(packed, str):
        return _unpack_bits(packed)
    if len(packed) % 2 or not all(type(number) is int and abs(number) < _FAR for number in packed):
        raise ValueError("ranges must be pairs of whole numbers")
    ends = list(accumulate(packed))
    if any(size < 1 for size in packed[1::2]) or any(gap < 1 for gap in packed[2::2]) or (ends and ends[-1] >= _FAR):
        raise ValueError("ranges must ascend, and hold something")
    return np.array(ends, np.int64).reshape(-1, 2)


def _unpack_bits(text: str) -> Ints:
    first, _, coded = text.partition(":")
    try:
        unzip = zlib.decompressobj()
        data = unzip.decompress(base64.b64decode(coded, validate=True), _BITS_MOST // 8 + 1)
    except zlib.error as error:
        raise ValueError(f"ranges cannot be unpacked: {error}") from error
    if unzip.unconsumed_tail or not unzip.eof or abs(int(first)) >= _FAR:
        raise ValueError("ranges are cut off, or too many")
    return compressed(np.flatnonzero(np.unpackbits(np.frombuffer(data, np.uint8))) + int(first))


def united(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Merge ranges [start, stop) into ascending ranges that do not touch."""
    result: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if start >= stop:
            continue
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(result[-1][1], stop)
        else:
            result.append((start, stop))
    return tuple(result)


def among_left(start: int, stop: int, gone: Ranges) -> Ranges:
    """Return the `start`-th to `stop`-th of the numbers that are not in `gone`, as ranges."""
    result = []
    shift = 0
    for begin, end in gone:
        first, last = start + shift, min(stop + shift, begin)
        if first < last:
            result.append((first, last))
            start = last - shift
        shift += end - begin
    if start < stop:
        result.append((start + shift, stop + shift))
    return tuple(result)
