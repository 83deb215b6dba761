"""Scanners that read an object from its first byte on, and the base class for line formats."""

from __future__ import annotations

import abc

import numpy as np
from numpy.typing import NDArray

from headrace._util.sample_ranges import Rows
from headrace.errors import FormatError, LimitError, masked
from headrace.formats.limits import DEFAULTS, Limits
from headrace.formats.sample_rows import keys_of, rows_of_members
from headrace.types import Ints

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_NEWLINE = 10
_BLANK = b" \t\r\v\f"
_BLANKS = np.frombuffer(_BLANK, np.uint8)


class SuccessiveScanner(abc.ABC):
    """A `headrace._util.sample_ranges.Scanner` that receives every byte of an object once, in order.

    Attributes:
        error: Damage that was found. Nothing is scanned after it.
        done: True once all was scanned or `error` is set.
    """

    def __init__(self, url: str) -> None:
        self.error: FormatError | None = None
        self.done = False
        self.url = url
        self._end = 0  # offset after the last fed byte

    @property
    @abc.abstractmethod
    def low(self) -> int:
        """The lowest offset whose bytes are still needed."""

    def feed(self, buffer: memoryview, offset: int, last: bool) -> Rows:
        """Scan the buffer at `offset` of the object. Return the samples that end in it."""
        view = memoryview(buffer).cast("B")
        if offset != self._end:
            raise ValueError(f"fed byte {offset} on after {self._end}: buffers must follow one another")
        self._end += len(view)
        if self.done:
            return Rows.empty()
        rows = self._found(view, offset, last)
        self.done = last or self.error is not None
        return rows

    @abc.abstractmethod
    def _found(self, view: memoryview, offset: int, last: bool) -> Rows:
        """Scan one buffer. Damage is stored in `error`."""

    def _fail(self, why: str, line: int, at: int, kind: type[FormatError] = FormatError) -> None:
        """Stop scanning, due to damage in a sample that starts at the line `line` and byte `at`."""
        where = f"{masked(self.url)}, line {line}, byte {at}"
        self.error = kind(f"{why} ({where})", url=self.url, key=str(line), offset=at)
        self.done = True


class LineScanner(SuccessiveScanner):
    """Finds samples of whole lines. The key is the number of a sample's first line, from 1.

    The last line needs no newline. An object that was truncated at the end of a line can only be detected with an
    index.

    Args:
        unit: Name of a sample, for errors.
        member: Name of a sample's bytes in row tables.
    """

    def __init__(self, url: str, limits: Limits = DEFAULTS, *, unit: str = "line", member: str = "line") -> None:
        super().__init__(url)
        self._longest, self._unit, self._member = limits.member_bytes, unit, member
        self._start, self._line = 0, 1  # of the incomplete line
        self._is_blank = True  # the fed part of the incomplete line

    @property
    def low(self) -> int:
        return self._end if self.done else self._open[0]

    @property
    def _open(self) -> tuple[int, int]:
        """Offset and first line number of the incomplete sample."""
        return self._start, self._line

    @abc.abstractmethod
    def _begins_well(self, head: bytes) -> bool:
        """Check the first bytes of the object. Return False if `error` was set."""

    @abc.abstractmethod
    def _samples(self, lines: Ints, data: NDArray[np.uint8], offset: int, last: bool) -> Ints:
        """Return the samples completed by these lines. Both are starts, numbers and ends, `[3, n]`.

        The lines end in `data`, the part of the object at `offset`.
        """

    def _found(self, view: memoryview, offset: int, last: bool) -> Rows:
        if offset == 0:
            if view[:3] == BYTE_ORDER_MARK:
                self._start = len(BYTE_ORDER_MARK)
            if not self._begins_well(bytes(view[:512])):
                return Rows.empty()
        data = np.frombuffer(view, np.uint8)
        ends = np.flatnonzero(data == _NEWLINE) + offset
        if last and self._start < self._end and (not len(ends) or ends[-1] + 1 < self._end):
            ends = np.append(ends, self._end)
        starts = np.concatenate([[self._start], ends + 1])
        lines = np.stack([starts[:-1], self._line + np.arange(len(ends)), ends])
        samples = self._samples(lines, data, offset, last)
        if len(ends):
            self._start, self._line, self._is_blank = int(starts[-1]), self._line + len(ends), True
        rest = bytes(view[max(0, self._start - offset) :])
        self._is_blank = self._is_blank and not rest.strip(_BLANK)
        rows = self._rows(*samples)
        start, line = self._open
        if self.error is None and self._end - start > self._longest and not last:
            self._fail_by_length(line, start)
        return rows

    def _are_blank(self, lines: Ints, data: NDArray[np.uint8], offset: int) -> NDArray[np.bool_]:
        starts, _, ends = lines
        are_blank: NDArray[np.bool_] = ends <= starts
        if not len(data):
            return are_blank
        inside = np.maximum(starts - offset, 0)  # the first line may start in an earlier buffer
        suspects = np.isin(data[np.minimum(inside, len(data) - 1)], _BLANKS) | (starts < offset)
        for k in np.flatnonzero(suspects & ~are_blank).tolist():
            is_blank = not bytes(data[inside[k] : ends[k] - offset]).strip(_BLANK)
            are_blank[k] = is_blank and (k > 0 or self._is_blank)
        return are_blank

    def _rows(self, starts: Ints, lines: Ints, ends: Ints) -> Rows:
        sizes = ends - starts
        too_long = np.flatnonzero(sizes > self._longest)
        if len(too_long):
            k = int(too_long[0])
            self._fail_by_length(int(lines[k]), int(starts[k]))
            starts, lines, sizes = starts[:k], lines[:k], sizes[:k]
        return rows_of_members(keys_of(lines), starts, sizes, self._member)

    def _fail_by_length(self, line: int, at: int) -> None:
        self._fail(f"the {self._unit} has more than {self._longest} bytes, the limit", line, at, LimitError)
