"""Scanners of buffers that follow one another, from an object's first byte on."""

from __future__ import annotations

import abc

from headrace.errors import FormatError
from headrace.rows import Rows


class SuccessiveScanner(abc.ABC):
    """A `headrace.rows.Scanner` that is given every byte of an object once, in order.

    Attributes:
        error: the damage that was found; nothing is read after it.
        done: all was read, or `error` is set.
    """

    def __init__(self, url: str) -> None:
        self.error: FormatError | None = None
        self.done = False
        self.url = url
        self._end = 0  # of what was fed

    @property
    @abc.abstractmethod
    def low(self) -> int:
        """The lowest offset whose bytes are still needed."""

    def feed(self, buffer: memoryview, offset: int, last: bool) -> Rows:
        """The samples that end in `buffer`, the part of the object at `offset`.

        Raises:
            ValueError: that is not where the buffer before this one has ended.
        """
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
        """The same; damage is in `error` then."""
