"""Packing of documents into sequences, and its plan where the documents' lengths are known.

Where lengths must be read, documents are packed row by row: see `headrace.order.packed_rows`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.order.permutation import draw, permutation
from headrace.types import Ints

if TYPE_CHECKING:
    from headrace.order.combined import TokenMixing


@dataclass(frozen=True, slots=True)
class Packing:
    """How documents become sequences of `length` tokens: by "concat" or "best_fit".

    Attributes:
        mixing: How packed rows draw documents from a mixture by tokens, if there is one.
    """

    length: int
    method: str
    mixing: TokenMixing | None = None

    @property
    def text(self) -> str:
        return f"pack({self.length}, {self.method})"

    def planned(self, lengths: Ints, bins: Bins | None, key: int) -> PackPlan:
        """Plan sequences of documents with these lengths. `key` is the seed of the order of best-fit sequences."""
        if bins is None:
            return ConcatPlan(lengths, self.length)
        return BestFitPlan(lengths, self.length, bins, draw("pack", self.length, key))


class Pieces(NamedTuple):
    """Concatenated parts of a sequence: tokens [starts, stops) of documents, by their positions in packing order."""

    documents: Ints
    starts: Ints
    stops: Ints


class ConcatPlan:
    """Concatenated documents, cut every `size` tokens. The last sequence may be shorter.

    Takes 8 bytes of memory per document.
    """

    def __init__(self, lengths: Ints, size: int) -> None:
        self._size = size
        self._edges = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=self._edges[1:])
        self.count = -(-int(self._edges[-1]) // size)

    def pieces(self, sequence: int) -> Pieces:
        begin = sequence * self._size
        end = min(begin + self._size, int(self._edges[-1]))
        first = int(self._edges.searchsorted(begin, side="right")) - 1
        stop = int(self._edges.searchsorted(end, side="left"))
        begins, ends = self._edges[first:stop], self._edges[first + 1 : stop + 1]
        starts, stops = np.maximum(begin - begins, 0), np.minimum(ends, end) - begins
        some = np.flatnonzero(stops > starts)  # skips empty documents
        return Pieces(some + first, starts[some], stops[some])


class BestFitPlan:
    """Whole documents, combined to leave little padding. Longer ones are first cut.

    The number of sequences, and their combinations of lengths, depend only on how many documents have each length, not
    on their order. Documents of one length are assigned in order to the sequences with a slot of that length. So the
    documents of a sequence are about as far in their order as the sequence is in its own.

    Takes some 20 bytes of memory per document, and three times as much during planning.

    Args:
        size: Tokens of a sequence.
        bins: Combinations of these lengths.
        key: Seed of the order of sequences. Without it, the longest documents would come first.
    """

    def __init__(self, lengths: Ints, size: int, bins: Bins, key: int) -> None:
        self._size, self.count = size, bins.count
        counts = -(-lengths // size)
        narrow = np.int32 if len(lengths) + counts.sum() < 2**31 else np.int64
        self._documents = np.repeat(np.arange(len(lengths), dtype=narrow), counts)
        firsts = np.cumsum(counts) - counts
        self._numbers = (np.arange(len(self._documents)) - np.repeat(firsts, counts)).astype(np.int32)
        left = lengths[self._documents] - self._numbers.astype(np.int64) * size
        self._lengths = np.minimum(left, size).astype(np.int32)
        slots, self._firsts = bins.slots(permutation(np.arange(self.count), self.count, key))
        self._pieces = np.empty(len(slots), narrow)
        self._pieces[_by_length(slots, size)] = _by_length(self._lengths, size)

    def pieces(self, sequence: int) -> Pieces:
        chosen = self._pieces[self._firsts[sequence] : self._firsts[sequence + 1]]
        starts = self._numbers[chosen].astype(np.int64) * self._size
        return Pieces(self._documents[chosen].astype(np.int64), starts, starts + self._lengths[chosen])


PackPlan = ConcatPlan | BestFitPlan

_Filled = tuple[tuple[int, int], ...]
"""Content of a sequence: documents as (length, number of these)."""


class Bins:
    """Combinations of lengths in sequences, with their counts.

    Best fit decreasing: each length, longest first, goes where it leaves the least room. Equal lengths and equal rooms
    are processed together, so the time depends on the number of different lengths, not of documents.

    Args:
        lengths: Lengths of the documents. Longer ones than `size` are cut into pieces of `size` tokens and a rest.
        size: Tokens of a sequence.

    Attributes:
        count: Number of sequences.
    """

    def __init__(self, lengths: Ints, size: int) -> None:
        have = np.bincount(lengths % size, minlength=size + 1) if len(lengths) else np.zeros(size + 1, np.int64)
        have[0], have[size] = 0, int((lengths // size).sum())
        self._rooms: dict[int, list[tuple[_Filled, int]]] = {}  # room -> (content, number of such sequences)
        self._sizes: list[int] = []  # rooms, ascending
        done: list[tuple[_Filled, int]] = []
        for length in np.flatnonzero(have)[::-1].tolist():
            self._fill(length, int(have[length]), size)
            done += self._rooms.pop(0, [])
            if self._sizes and not self._sizes[0]:
                self._sizes.pop(0)
        for room in self._sizes:
            done += self._rooms[room]
        self._rooms, self._sizes = {}, []
        patterns = [[length for length, times in filled for _ in range(times)] for filled, _ in done]
        self._counts = np.array([count for _, count in done], np.int64)
        self._sizes_of = np.array([len(pattern) for pattern in patterns], np.int64)
        self._flat = np.array([length for pattern in patterns for length in pattern], np.int32)
        self.count = int(self._counts.sum())

    def slots(self, order: Ints) -> tuple[NDArray[np.int32], Ints]:
        """Return the lengths in each sequence, flat, and the offset of each sequence plus the end.

        Args:
            order: Permutation of the sequences, which are grouped by content here.
        """
        pattern = np.repeat(np.arange(len(self._counts)), self._counts)[order]
        counts = self._sizes_of[pattern]
        firsts = np.zeros(len(order) + 1, np.int64)
        np.cumsum(counts, out=firsts[1:])
        begins = np.cumsum(self._sizes_of) - self._sizes_of
        places = np.arange(firsts[-1]) + np.repeat(begins[pattern] - firsts[:-1], counts)
        return self._flat[places], firsts

    def _fill(self, length: int, count: int, size: int) -> None:
        """Add documents of a length where they leave the least room, or to new sequences."""
        while count:
            at = bisect_left(self._sizes, length)
            if at == len(self._sizes):
                self._add(size, (), -(-count // (size // length)))
                continue
            room = self._sizes[at]
            filled, some = self._rooms[room].pop()
            if not self._rooms[room]:
                del self._rooms[room], self._sizes[at]
            each = room // length  # a sequence that got one is the best fit for the next one
            full = min(some, count // each)
            if full:
                self._add(room - each * length, (*filled, (length, each)), full)
                count -= full * each
            elif count:
                self._add(room - count * length, (*filled, (length, count)), 1)
                count, full = 0, 1
            if some > full:
                self._add(room, filled, some - full)

    def _add(self, room: int, filled: _Filled, count: int) -> None:
        if room not in self._rooms:
            self._rooms[room] = []
            insort(self._sizes, room)
        self._rooms[room].append((filled, count))


def _by_length(lengths: NDArray[np.int32], size: int) -> Ints:
    keys = lengths.astype(np.uint16) if size < 2**16 else lengths  # 16-bit numbers are sorted in linear time
    return np.asarray(np.argsort(keys, kind="stable"), np.int64)
