"""Windows of the tokens of a file, and documents: where they lie, by arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from headrace.formats.sample_rows import keys_of, rows_of_members
from headrace.formats.tokens.layouts import TokenFile
from headrace.rows import Rows
from headrace.types import Ints


@dataclass(frozen=True, slots=True)
class TokenWindows:
    """Windows of one length, each `stride` tokens behind the one before it.

    Attributes:
        length: tokens in a window.
        has_short: whether a last window comes, too, that has fewer, where there are tokens that no other has.
    """

    length: int
    stride: int
    has_short: bool = False

    def count(self, tokens: int) -> int:
        """How many there are in so many tokens."""
        if self.has_short and tokens:
            shared = max(self.length - self.stride, 0)  # with the window before
            return max(1, -(-(tokens - shared) // self.stride))
        return max(0, (tokens - self.length) // self.stride + 1)

    def counts(self, tokens: Ints) -> Ints:
        """The same of many numbers of tokens."""
        counts = np.maximum((tokens - self.length) // self.stride + 1, 0)
        if self.has_short:
            shared = max(self.length - self.stride, 0)
            counts = np.where(tokens > 0, np.maximum(-((shared - tokens) // self.stride), 1), counts)
        return np.asarray(counts, np.int64)

    def begins(self, numbers: Ints) -> Ints:
        """Where windows begin, by their numbers."""
        return np.asarray(numbers, np.int64) * self.stride

    def ends(self, numbers: Ints, tokens: int) -> Ints:
        """Where they end, in so many tokens."""
        return np.minimum(self.begins(numbers) + self.length, tokens)


@dataclass(frozen=True, slots=True, eq=False)
class WindowsOfDocuments:
    """Windows that lie in one document each: those of the first document, then those of the next one.

    Attributes:
        windows: as they are cut from each document, as if it were a file.
        documents: where documents begin, ascending, and where the last one ends.
        firsts: the number of each document's first window, and of all windows last.
    """

    windows: TokenWindows
    documents: Ints
    firsts: Ints

    @classmethod
    def of(cls, windows: TokenWindows, documents: Ints) -> Self:
        """Windows of `documents`: 16 bytes of memory for each of these."""
        firsts = np.zeros(len(documents), np.int64)
        np.cumsum(windows.counts(np.diff(documents)), out=firsts[1:])
        return cls(windows, documents, firsts)

    @property
    def count(self) -> int:
        return int(self.firsts[-1])

    def places(self, numbers: Ints) -> tuple[Ints, Ints]:
        """(where windows begin, where they end), by their numbers."""
        document = np.searchsorted(self.firsts, numbers, side="right") - 1
        begins = self.documents[document] + self.windows.begins(numbers - self.firsts[document])
        return begins, np.minimum(begins + self.windows.length, self.documents[document + 1])


def rows_of(file: TokenFile, numbers: Ints, begins: Ints, ends: Ints) -> Rows:
    """The table of samples that are the tokens [begins, ends); their keys are `numbers`."""
    itemsize = file.dtype.itemsize
    return rows_of_members(keys_of(numbers), file.begin + begins * itemsize, (ends - begins) * itemsize, file.dtype.str)


def rows_with_documents(file: TokenFile, numbers: Ints, begins: Ints, ends: Ints, documents: Ints) -> Rows:
    """The same of windows whose documents are to be known: each document's tokens are a member of its own.

    Args:
        documents: where documents begin, ascending.
    """
    itemsize = file.dtype.itemsize
    first = np.searchsorted(documents, begins, side="right")
    stop = np.maximum(np.searchsorted(documents, ends, side="left"), first)
    counts = 1 + stop - first
    starts = np.concatenate([[0], np.cumsum(counts)])
    of_window = np.repeat(np.arange(len(numbers)), counts)
    number = np.arange(starts[-1]) - starts[of_window]  # of a member in its window
    cuts = documents[np.minimum(first[of_window] + number - 1, len(documents) - 1)] if len(documents) else number
    offset = np.where(number == 0, begins[of_window], cuts)
    end = np.append(offset[1:], 0)
    end[starts[1:] - 1] = ends
    return Rows(
        keys_of(numbers),
        starts,
        number.astype(np.int32),
        file.begin + offset * itemsize,
        (end - offset) * itemsize,
        tuple(f"{file.dtype.str} {k}" for k in range(int(counts.max(initial=1)))),
    )
