"""Computes windows of the tokens of a file, and documents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from headrace._util.sample_ranges import Rows
from headrace.formats.sample_rows import keys_of, rows_of_members
from headrace.formats.tokens.layouts import TokenFile
from headrace.types import Ints


@dataclass(frozen=True, slots=True)
class TokenWindows:
    """Windows of one length, each `stride` tokens after the one before it.

    `has_short` is True if remaining tokens form a last, shorter window.
    """

    length: int
    stride: int
    has_short: bool = False

    def count(self, tokens: int) -> int:
        return int(self.counts(np.array([tokens]))[0])

    def counts(self, tokens: Ints) -> Ints:
        counts = np.maximum((tokens - self.length) // self.stride + 1, 0)
        if self.has_short:
            shared = max(self.length - self.stride, 0)  # tokens shared with the window before
            counts = np.where(tokens > 0, np.maximum(-((shared - tokens) // self.stride), 1), counts)
        return np.asarray(counts, np.int64)

    def begins(self, numbers: Ints) -> Ints:
        return np.asarray(numbers, np.int64) * self.stride

    def ends(self, numbers: Ints, tokens: int) -> Ints:
        return np.minimum(self.begins(numbers) + self.length, tokens)


@dataclass(frozen=True, slots=True, eq=False)
class WindowsOfDocuments:
    """Windows that do not cross documents: those of the first document, then those of the next.

    `documents` are starts and the end of the last. `firsts` are first windows, and the number of windows.
    """

    windows: TokenWindows
    documents: Ints
    firsts: Ints

    @classmethod
    def of(cls, windows: TokenWindows, documents: Ints) -> Self:
        """Return the windows of `documents`. Takes 16 bytes of memory per document."""
        firsts = np.zeros(len(documents), np.int64)
        np.cumsum(windows.counts(np.diff(documents)), out=firsts[1:])
        return cls(windows, documents, firsts)

    @property
    def count(self) -> int:
        return int(self.firsts[-1])

    def places(self, numbers: Ints) -> tuple[Ints, Ints]:
        document = np.searchsorted(self.firsts, numbers, side="right") - 1
        begins = self.documents[document] + self.windows.begins(numbers - self.firsts[document])
        return begins, np.minimum(begins + self.windows.length, self.documents[document + 1])


def rows_of(file: TokenFile, numbers: Ints, begins: Ints, ends: Ints) -> Rows:
    """Return the table of samples with the tokens [begins, ends). The keys are `numbers`."""
    itemsize = file.dtype.itemsize
    return rows_of_members(keys_of(numbers), file.begin + begins * itemsize, (ends - begins) * itemsize, file.dtype.str)


def rows_with_documents(file: TokenFile, numbers: Ints, begins: Ints, ends: Ints, documents: Ints) -> Rows:
    """Return the table of windows with the tokens of each document as a separate member."""
    itemsize = file.dtype.itemsize
    first = np.searchsorted(documents, begins, side="right")
    stop = np.maximum(np.searchsorted(documents, ends, side="left"), first)
    counts = 1 + stop - first
    starts = np.concatenate([[0], np.cumsum(counts)])
    of_window = np.repeat(np.arange(len(numbers)), counts)
    number = np.arange(starts[-1]) - starts[of_window]  # number of a member in its window
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
