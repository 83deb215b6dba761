"""Plain text: each line of an object, each paragraph, or the whole object is a sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from headrace._util import check
from headrace.errors import FormatError, masked
from headrace.formats.format import Block, Format
from headrace.formats.limits import DEFAULTS, Limits
from headrace.formats.scanners import LineScanner
from headrace.formats.tar.headers import looks_like
from headrace.types import Ints

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
