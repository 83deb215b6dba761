"""JSON Lines: each line is a sample, an object whose members are its fields."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.errors import FormatError, LimitError, masked
from headrace.formats.format import Block, Format
from headrace.formats.json_text import loads, loads_many
from headrace.formats.limits import DEFAULTS, Limits
from headrace.formats.successive import SuccessiveScanner
from headrace.formats.tar.headers import looks_like
from headrace.rows import Rows
from headrace.types import Ints

_NEWLINE = 10
_BLANK = b" \t\r\n\v\f"
_BLANKS = np.frombuffer(_BLANK, np.uint8)
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SHOWN = 12


class LineScanner(SuccessiveScanner):
    """Finds the lines of an object in successive buffers of it.

    A sample's key is the number of its line, from 1. Lines that hold nothing but white space are passed over, and
    counted. The last one may lack its newline: that an object was cut at a line's end nobody can see but an index.
    """

    def __init__(self, url: str, limits: Limits = DEFAULTS) -> None:
        super().__init__(url)
        self._longest = limits.member_bytes
        self._start = 0  # of the line that is not known whole
        self._line = 1  # its number
        self._is_blank = True  # as far as it was fed

    @property
    def low(self) -> int:
        return self._end if self.done else self._start

    def _found(self, view: memoryview, offset: int, last: bool) -> Rows:
        if offset == 0 and not self._begins_well(bytes(view[:512])):
            return Rows.empty()
        data = np.frombuffer(view, np.uint8)
        ends = np.flatnonzero(data == _NEWLINE) + offset
        if last and self._start < self._end and (not len(ends) or ends[-1] + 1 < self._end):
            ends = np.append(ends, self._end)
        starts = np.concatenate([[self._start], ends + 1])[: len(ends)]
        rows = self._rows(starts, ends, data, offset)
        if len(ends):
            self._start, self._line, self._is_blank = int(ends[-1]) + 1, self._line + len(ends), True
        if self.error is None and self._end - self._start > self._longest:
            self._fail(LimitError, f"the line has more than {self._longest} bytes, the limit", self._line, self._start)
        rest = bytes(view[max(0, self._start - offset) :])
        self._is_blank = self._is_blank and not rest.strip(_BLANK)
        return rows

    def _begins_well(self, head: bytes) -> bool:
        if head.startswith(_BYTE_ORDER_MARK):
            self._start = len(_BYTE_ORDER_MARK)
        first = head[self._start :].lstrip(_BLANK)
        if first and first[:1] != b"{":
            what = "all of it is one JSON array" if first[:1] == b"[" else f"it begins with {first[:_SHOWN]!r}"
            self._fail(FormatError, f"each line must be a JSON object, and {what}{looks_like(head)}", 1, self._start)
        return self.error is None

    def _rows(self, starts: Ints, ends: Ints, data: NDArray[np.uint8], offset: int) -> Rows:
        sizes = ends - starts
        too_long = np.flatnonzero(sizes > self._longest)
        if len(too_long):
            k = int(too_long[0])
            text = f"the line has {int(sizes[k])} bytes, over the limit of {self._longest}"
            self._fail(LimitError, text, self._line + k, int(starts[k]))
            starts, ends, sizes = starts[:k], ends[:k], sizes[:k]
        is_kept = sizes > 0
        inside = np.maximum(starts - offset, 0)  # the first line may begin in the buffer before this one
        suspects = np.isin(data[np.minimum(inside, max(len(data) - 1, 0))], _BLANKS) if len(data) else is_kept
        for k in np.flatnonzero(suspects & is_kept).tolist():
            is_blank = not bytes(data[inside[k] : ends[k] - offset]).strip(_BLANK)
            is_kept[k] = not (is_blank and (k > 0 or self._is_blank))
        numbers = (self._line + np.flatnonzero(is_kept)).astype(np.int64)
        count = len(numbers)
        width = len(str(int(numbers[-1]))) if count else 1
        keys = numbers.astype(f"S{width}")
        zeros = np.zeros(count, np.int32)
        return Rows(keys, np.arange(count + 1), zeros, starts[is_kept], sizes[is_kept], ("line",))

    def _fail(self, kind: type[FormatError], why: str, line: int, at: int) -> None:
        where = f"{masked(self.url)}, line {line}, byte {at}"
        self.error = kind(f"{why} ({where})", url=self.url, key=str(line), offset=at)
        self.done = True


class JsonLines(Format):
    """Objects, one a line, in UTF-8."""

    name = "jsonl"
    suffixes = (".jsonl", ".ndjson")

    def sniff(self, name: str, head: bytes) -> float:  # noqa: ARG002
        first, newline, _ = head.removeprefix(_BYTE_ORDER_MARK).lstrip(_BLANK).partition(b"\n")
        if not first.startswith(b"{"):
            return 0.0
        if not newline:
            return 0.3  # a first line that is longer than what was seen, or a single object
        try:
            json.loads(first)
        except (ValueError, RecursionError):
            return 0.0
        return 0.9

    def scanner(self, url: str, limits: Limits) -> LineScanner:
        return LineScanner(url, limits)

    def open_block(self, block: Block, bodies: Sequence[bytes]) -> Sequence[dict[str, object]]:  # noqa: ARG002
        value = loads(bodies[0])
        if type(value) is not dict:
            raise ValueError(f"each line must be a JSON object, and this one is a {type(value).__name__}")
        return [value]

    def open_many(self, block: Block, bodies: Sequence[bytes]) -> Sequence[dict[str, object] | None]:  # noqa: ARG002
        return [value if type(value) is dict else None for value in loads_many(bodies)]


JSON_LINES = JsonLines()
