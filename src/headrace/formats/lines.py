"""Formats of lines: JSON Lines and plain text, and the base of scanners that read an object from its first byte on.

Each line of JSON Lines is a JSON object and a sample. orjson, if installed, takes a third of the time of Python's
`json`. The results are always those of `json`:

* Integers of any size are exact. orjson converts those beyond 64 bits to floats. Texts with a run of 19 digits or more
  are therefore not passed to it, unless the digits follow a decimal point.
* NaN and Infinity, floats beyond the largest (which are infinite), and unpaired surrogates are values. orjson refuses
  them. `json` parses all that orjson refuses, and provides the error messages.
* The last of equal names in an object wins, at the position of the first. Both libraries do that.
* Too deep nesting is an error. The limit of `json` depends on Python's stack, and is at least 950 levels. With orjson
  the limit is 1,024, or that of `json`.
"""

from __future__ import annotations

import abc
import json
from collections.abc import Sequence
from functools import partial
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from headrace._util import check
from headrace._util.lazy import if_installed
from headrace._util.sample_ranges import Rows
from headrace.errors import FormatError, LimitError, masked
from headrace.formats.format import Block, Format, keys_of, rows_of_members
from headrace.formats.limits import DEFAULTS, Limits
from headrace.formats.tar.headers import looks_like
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

    _counted = "line"  # what the keys number

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

    def _fail(self, why: str, number: int, at: int, kind: type[FormatError] = FormatError) -> None:
        """Stop scanning, due to damage in a sample that starts at a line or record `number` and at byte `at`."""
        where = f"{masked(self.url)}, {self._counted} {number}, byte {at}"
        self.error = kind(f"{why} ({where})", url=self.url, key=str(number), offset=at)
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
        if self.error is None and self._end - start > self._longest:
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


_NONE = object()
_SHOWN = 12
_LONG = b"0" * 19  # digits of the first integer beyond 63 bits
_KINDS = bytes(ord("0") if chr(code) in "0123456789" else ord(" ") for code in range(256))  # digits, and others
_orjson = partial(if_installed, "orjson")  # part of the extra "fast"


def loads(text: bytes) -> object:
    (value,) = _loads_fast([text]) or (_NONE,)
    if value is not _NONE:
        return value
    try:
        return json.loads(str(text, "utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def loads_many(texts: Sequence[bytes]) -> list[object]:
    """Parse many texts. None for each that requires `loads`."""
    return [None if value is _NONE else value for value in _loads_fast(texts)]


def _loads_fast(texts: Sequence[bytes]) -> list[object]:
    """Parse texts on which both libraries agree. `_NONE` for others. Empty without orjson."""
    orjson = _orjson()
    if orjson is None or not texts:
        return []
    try:
        values: list[object] = list(map(orjson.loads, texts))
    except orjson.JSONDecodeError:
        values = list(map(_taken, texts))
    return [_NONE if _has_long_integer(text) else value for text, value in zip(texts, values, strict=True)]


def _taken(text: bytes) -> object:
    orjson = _orjson()
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return _NONE


def _has_long_integer(text: bytes) -> bool:
    """True if some text has 19 digits in a row that follow no decimal point."""
    kinds = text.translate(_KINDS)
    at = kinds.find(_LONG)
    while at >= 0:
        if text[at - 1 : at] != b".":
            return True
        at = kinds.find(_LONG, kinds.find(b" ", at))
    return False


class JsonLineScanner(LineScanner):
    """Finds lines of JSON. Lines of white space are skipped, but counted."""

    def _begins_well(self, head: bytes) -> bool:
        first = head[self._start :].lstrip()
        if first and first[:1] != b"{":
            what = "all of it is one JSON array" if first[:1] == b"[" else f"it begins with {first[:_SHOWN]!r}"
            self._fail(f"each line must be a JSON object, and {what}{looks_like(head)}", 1, self._start)
        return self.error is None

    def _samples(self, lines: Ints, data: NDArray[np.uint8], offset: int, last: bool) -> Ints:
        starts, _, ends = lines
        # a line that is too long is an error even if it is blank
        return lines[:, ~self._are_blank(lines, data, offset) | (ends - starts > self._longest)]


class JsonLines(Format):
    """Objects, one per line, in UTF-8."""

    name = "jsonl"
    suffixes = (".jsonl", ".ndjson")

    def sniff(self, name: str, head: bytes) -> float:
        first, newline, _ = head.removeprefix(BYTE_ORDER_MARK).lstrip().partition(b"\n")
        if not first.startswith(b"{"):
            return 0.0
        if not newline:
            return 0.3  # the first line is longer than `head`, or a single object
        try:
            json.loads(first)
        except (ValueError, RecursionError):
            return 0.0
        return 0.9

    def scanner(self, url: str, limits: Limits) -> JsonLineScanner:
        return JsonLineScanner(url, limits)

    def open_block(self, block: Block, bodies: Sequence[bytes]) -> Sequence[dict[str, object]]:
        value = loads(bodies[0])
        if type(value) is not dict:
            raise ValueError(f"each line must be a JSON object, and this one is a {type(value).__name__}")
        return [value]

    def open_many(self, block: Block, bodies: Sequence[bytes]) -> Sequence[dict[str, object] | None]:
        return [value if type(value) is dict else None for value in loads_many(bodies)]


JSON_LINES = JsonLines()


By = Literal["line", "paragraph", "file"]
"""Unit of a sample."""


class TextScanner(LineScanner):
    """Finds lines or paragraphs, or the whole object. Blank lines separate paragraphs."""

    def __init__(self, url: str, by: By, limits: Limits = DEFAULTS) -> None:
        super().__init__(url, limits, unit=by, member=_member(by))
        self._by = by
        self._paragraph: tuple[int, int, int] | None = None  # (start, number of first line, end) of the open one

    @property
    def _open(self) -> tuple[int, int]:
        return super()._open if self._paragraph is None else self._paragraph[:2]

    def _begins_well(self, head: bytes) -> bool:
        if self._by == "file":
            self._paragraph = self._start, 1, self._start
        if said := looks_like(head, is_text=True):
            text = f"{masked(self.url)} is no text in UTF-8{said}"
            self.error, self.done = FormatError(text, url=self.url, offset=0), True
        return self.error is None

    def _samples(self, lines: Ints, data: NDArray[np.uint8], offset: int, last: bool) -> Ints:
        if self._by == "line":
            return lines
        if self._by == "paragraph":
            return self._paragraphs(lines, ~self._are_blank(lines, data, offset), last)
        return np.array([[self._open[0]], [1], [self._end]]) if last else np.zeros((3, 0), np.int64)

    def _paragraphs(self, lines: Ints, is_text: NDArray[np.bool_], last: bool) -> Ints:
        starts, numbers, ends = lines
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


class Text(Format):
    """Text in UTF-8. Samples are `{"text": …}`; see `hr.text`.

    Args:
        by: Unit of a sample.

    Raises:
        OptionError: `by` is invalid.
    """

    name = "text"
    suffixes = (".txt",)

    def __init__(self, by: By = "line") -> None:
        check.one_of("by", by, get_args(By))
        self.by: By = by
        self.name = "text" if by == "line" else f"text(by={by!r})"  # indexes with other options do not match

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
            return ()  # decoding one alone gives a better error
        return () if any("\0" in text for text in texts) else [{"text": text} for text in texts]

    def _check(self, block: Block) -> None:
        if block.members != (_member(self.by),):
            raise ValueError(f"its index is of {block.members[0]!r:.40}, and samples by {self.by} are asked for")


def _member(by: By) -> str:
    return f"text by {by}"


TEXT = Text()
