"""Lookup of the fetched ranges that hold members of samples."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np

from headrace._util.sample_ranges import Rows


def spans_of(rows: Rows, starts: Sequence[int]) -> Sequence[int]:
    """Return the indices of spans, by ascending start, that hold members of a non-empty table."""
    low = bisect.bisect_right(starts, int(rows.offset.min())) - 1
    high = bisect.bisect_right(starts, int((rows.offset + np.maximum(rows.size, 1)).max()) - 1) - 1
    return range(low, high + 1) if low >= 0 and high <= low + 1 else spans_of_each(rows, starts)


def spans_of_each(rows: Rows, starts: Sequence[int]) -> list[int]:
    """Return the indices of spans that hold members, for any number of spans."""
    low = np.searchsorted(starts, rows.offset, side="right") - 1
    high = np.searchsorted(starts, rows.offset + np.maximum(rows.size, 1) - 1, side="right") - 1
    between = [np.arange(low[k] + 1, high[k]) for k in np.flatnonzero(high - low > 1).tolist()]
    touched: list[int] = np.unique(np.concatenate([low, high, *between])).tolist()
    return [k for k in touched if k >= 0]  # an empty member may be before the first span


def member_pieces(starts: Sequence[int], ends: Sequence[int], offset: int, size: int) -> list[tuple[int, int, int]]:
    """Split [offset, offset + size) by span: (span, first byte in the span, one past the last)."""
    pieces = []
    k = bisect.bisect_right(starts, offset) - 1
    stop = offset + size
    while offset < stop:
        end = min(stop, ends[k])
        pieces.append((k, offset - starts[k], end - starts[k]))
        offset = end
        k += 1
    return pieces
