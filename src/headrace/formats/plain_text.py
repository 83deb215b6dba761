"""Plain text: each line of an object, each paragraph, or all of it is a sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from headrace.errors import FormatError, LimitError, OptionError, masked
from headrace.formats.format import Block, Format
from headrace.formats.limits import DEFAULTS, Limits
from headrace.formats.successive import SuccessiveScanner
from headrace.formats.tar.headers import looks_like
from headrace.rows import Rows
from headrace.types import Ints

By = Literal["line", "paragraph", "file"]
"""What is a sample."""

_NEWLINE = 10
_BLANK = b" \t\r\v\f"
_BLANKS = np.frombuffer(_BLANK, np.uint8)
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class TextScanner(SuccessiveScanner):
    """Finds lines, or paragraphs, in successive buffers of an object; or the end of it.

    A sample's key is the number of the line that it begins in, from 1.
    """

    def __init__(self, url: str, by: By, limits: Limits = DEFAULTS) -> None:
        super().__init__(url)
        self._by, self._longest = by, limits.member_bytes
        self._line_start, self._line = 0, 1  # of the line that is not known whole
        self._is_blank = True  # as far as it was fed
        self._paragraph: tuple[int, int, int] | None = None  # start, number of its first line, end: of one that goes on

    @property
    def low(self) -> int:
        if self.done:
            return self._end
        return self._line_start if self._paragraph is None else self._paragraph[0]

    def _found(self, view: memoryview, offset: int, last: bool) -> Rows:
        if offset == 0 and not self._begins_well(bytes(view[:512])):
            return Rows.empty()
        data = np.frombuffer(view, np.uint8)
        if self._by == "file":
            found = self._file(last)
        else:
            ends = np.flatnonzero(data == _NEWLINE) + offset
            if last and self._line_start < self._end and (not len(ends) or ends[-1] + 1 < self._end):
                ends = np.append(ends, self._end)
            starts = np.concatenate([[self._line_start], ends + 1])
            lines = np.stack([starts[:-1], self._line + np.arange(len(ends)), ends])
            found = lines if self._by == "line" else self._paragraphs(lines, data, offset, last)
            if len(ends):
                self._line_start, self._line, self._is_blank = int(starts[-1]), self._line + len(ends), True
            rest = bytes(view[max(0, self._line_start - offset) :])
            self._is_blank = self._is_blank and not rest.strip(_BLANK)
        rows = self._rows(*found)
        if self.error is None and self._end - self.low > self._longest and not last:
            self._fail(self._line if self._paragraph is None else self._paragraph[1], self.low)
        return rows

    def _begins_well(self, head: bytes) -> bool:
        if head.startswith(_BYTE_ORDER_MARK):
            self._line_start = len(_BYTE_ORDER_MARK)
        if said := looks_like(head, is_text=True):
            text = f"{masked(self.url)} is no text in UTF-8{said}"
            self.error, self.done = FormatError(text, url=self.url, offset=0), True
        return self.error is None

    def _file(self, last: bool) -> Ints:
        return np.array([[self._line_start], [1], [self._end]]) if last else np.zeros((3, 0), np.int64)

    def _paragraphs(self, lines: Ints, data: NDArray[np.uint8], offset: int, last: bool) -> Ints:
        starts, numbers, ends = lines
        is_text = ~self._are_blank(starts, ends, data, offset)
        before = np.concatenate([[self._paragraph is not None], is_text[:-1]])[: len(is_text)]
        begins, closes = np.flatnonzero(is_text & ~before), np.flatnonzero(~is_text & before)
        first, number, end = self._paragraph or (0, 0, 0)
        goes_on = self._paragraph is not None
        all_starts = np.concatenate([[first] * goes_on, starts[begins]]).astype(np.int64)
        all_numbers = np.concatenate([[number] * goes_on, numbers[begins]]).astype(np.int64)
        all_ends = np.where(closes > 0, ends[closes - 1], end) if len(closes) else np.zeros(0, np.int64)
        if len(all_starts) > len(all_ends):
            final = int(ends[-1]) if len(is_text) and is_text[-1] else end
            self._paragraph = int(all_starts[-1]), int(all_numbers[-1]), final
            if last:
                all_ends, self._paragraph = np.append(all_ends, final), None
        else:
            self._paragraph = None
        count = len(all_ends)
        return np.stack([all_starts[:count], all_numbers[:count], all_ends])

    def _are_blank(self, starts: Ints, ends: Ints, data: NDArray[np.uint8], offset: int) -> NDArray[np.bool_]:
        are_blank = ends <= starts
        if not len(data):
            return are_blank
        inside = np.maximum(starts - offset, 0)  # the first line may begin in the buffer before this one
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
            self._fail(int(lines[k]), int(starts[k]))
            starts, lines, sizes = starts[:k], lines[:k], sizes[:k]
        count = len(starts)
        keys = lines.astype(f"S{len(str(int(lines[-1])))}") if count else np.zeros(0, "S1")
        return Rows(keys, np.arange(count + 1), np.zeros(count, np.int32), starts, sizes, (_member(self._by),))

    def _fail(self, line: int, at: int) -> None:
        text = f"the {self._by} has more than {self._longest} bytes, the limit"
        where = f"{masked(self.url)}, line {line}, byte {at}"
        self.error = LimitError(f"{text} ({where})", url=self.url, key=str(line), offset=at)
        self.done = True


class Text(Format):
    """Text in UTF-8: samples are `{"text": …}`; see `hr.text`.

    Args:
        by: what is a sample.

    Raises:
        OptionError: there is no such thing.
    """

    name = "text"
    suffixes = (".txt",)

    def __init__(self, by: By = "line") -> None:
        if by not in get_args(By):
            raise OptionError(f'by={by!r}: "line", "paragraph" or "file" is meant')
        self.by: By = by
        self.name = "text" if by == "line" else f"text(by={by!r})"  # an index of it is no other's

    def scanner(self, url: str, limits: Limits) -> TextScanner:
        return TextScanner(url, self.by, limits)

    def open_block(self, block: Block, bodies: Sequence[bytes]) -> Sequence[dict[str, object]]:
        self._check(block)
        if b"\0" in bodies[0]:
            raise ValueError("it has a NUL byte")
        return [{"text": str(bodies[0], "utf-8").removesuffix("\r")}]

    def open_many(self, block: Block, bodies: Sequence[bytes]) -> Sequence[dict[str, object] | None]:
        try:
            self._check(block)
            texts = [str(body, "utf-8").removesuffix("\r") for body in bodies]
        except ValueError:
            return ()  # said better of one alone
        return () if any("\0" in text for text in texts) else [{"text": text} for text in texts]

    def _check(self, block: Block) -> None:
        if block.members != (_member(self.by),):
            raise ValueError(f"its index is of {block.members[0]!r:.40}, and samples by {self.by} are asked for")


def _member(by: By) -> str:
    return f"text by {by}"


TEXT = Text()
