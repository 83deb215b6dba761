"""One requested range: the object's known facts, the progress, and the target memory."""

from __future__ import annotations

import io
from typing import Any, cast

import numpy as np

from headrace.errors import BadResponseError, ObjectChangedError, ShortReadError, StorageError
from headrace.fetch.meter import Meter
from headrace.fetch.policy.deadlines import Watched
from headrace.fetch.rest import Rest
from headrace.options import FetchOptions
from headrace.protocols import Span, Told
from headrace.running import Charges
from headrace.types import Answer, Buffer, Fills

_MOST_UNTOLD_BYTES = 2**30  # of a body of unknown length, which may be endless


class RangeRequest(Watched):
    """One range. Every answer is checked against it and continues it at the byte reached.

    Args:
        start: First byte. Negative, without a stop: this many bytes before the end.
        target: Memory for the bytes. None: allocated, see `result`.
        charge: Called and awaited once, with the number of bytes.
        most: Maximum bytes of a longer object, if the store supports ranges for the rest.
        rest: Holds the open answer between requests, for a store without ranges.
        told: Version in an earlier answer to other requests of the same read.

    Attributes:
        asked_stop: End of the range. Known after the first answer, unless the store does not report it.
        in_order: The store sends the whole object for every range.
        skipped: Bytes received before the wanted ones.
        is_inside: True while the request counts in the host's limit.
    """

    __slots__ = (
        "_back", "_buffer", "_first", "_is_open", "_most", "_pieces", "_room",
        "asked_stop", "charge", "etag", "in_order", "is_inside", "ranged", "rest", "size", "skipped",
        "start", "stop", "told", "url",
    )  # fmt: skip

    def __init__(
        self,
        url: str,
        start: int | None,
        stop: int | None,
        *,
        target: memoryview | None = None,
        etag: str | None = None,
        charge: Charges | None = None,
        most: int | None = None,
        rest: Rest | None = None,
        told: Told | None = None,
    ) -> None:
        super().__init__(max(start or 0, 0))
        self._back = max(-(start or 0), 0)  # number of last bytes, until their position is known
        self.rest, self.in_order, self.skipped = rest, False, 0
        self.url, self.start, self.stop, self.etag, self.charge = url, start, stop, etag, charge
        self._most = most
        self.told = told
        self.ranged = start is not None or stop is not None
        self.asked_stop = stop
        self.size: int | None = None
        self.is_inside = True
        self._is_open = False
        self._first = self.position
        self._pieces: list[Buffer] = []
        self._buffer: io.BytesIO | None = None
        # numpy copies without the GIL; a slice assignment to the memoryview would hold it.
        self._room: Any = None if target is None else np.frombuffer(target, np.uint8)

    @property
    def asked_start(self) -> int | None:
        if self._back:
            return -self._back
        return self.position if self.ranged or self.position else None

    @property
    def if_match(self) -> str | None:
        # RFC 9110 §13.1.1: a weak validator never matches; the answer's ETag is compared in `accept` all the same.
        return None if self.etag is None or self.etag.startswith("W/") else self.etag

    def time_s(self, options: FetchOptions) -> float:
        """Time limit in seconds. A read longer than `range_bytes` gets proportionally more."""
        wanted = (self.reached if self.asked_stop is None else self.asked_stop) - (self.start or 0)
        skipped = self.skipped + getattr(self.body, "skipped", 0)
        return options.total_timeout_s * max(1.0, (wanted + skipped) / options.range_bytes)

    def accept(self, answer: Answer) -> None:
        size, told = answer.size, Told(answer.etag, answer.modified)
        is_empty = answer.start == answer.stop  # such as an error page, without the object's ETag
        is_checked = answer.etag is not None or not is_empty
        known = self.told or (None if self.etag is None else Told.of(self.etag))
        if is_checked and known is not None:
            known.check(told, self.url)
        if self.size is not None and size is not None and size != self.size:
            # With If-Match the store reports a change of the object, so one of the sizes is wrong.
            kind = ObjectChangedError if self.if_match is None else BadResponseError
            raise kind(f"the object's size was {self.size}, now it is {size}", url=self.url)
        first, last = self.position, self.asked_stop
        if self._back:
            if size is None:
                raise BadResponseError("the answer does not say how long the object is", url=self.url)
            first = size if answer.start == size else max(0, size - self._back)  # or only the size, and no bytes
        elif size is not None:
            first = min(first, size)
        if size is not None:
            last = size if last is None else max(first, min(last, size))
        self._is_open = answer.stop is None and size is None
        if answer.start != first or not (self._is_open or answer.stop == last or (last is None and size is None)):
            raise BadResponseError(
                f"asked for bytes {first} to {'the end' if last is None else last} of "
                f"{'?' if size is None else size}, the answer is {answer.start} to {answer.stop}",
                url=self.url,
            )
        if self._back:
            self.start, self._first, self._back = first, first, 0
        if is_checked:
            self.etag, self.told = self.etag or told.version, known or told
        self.in_order = answer.in_order
        self.size = size if self.size is None else self.size
        self.position, self.asked_stop = first, answer.stop if last is None else last
        self._first = min(self._first, first)
        if self._most is not None and answer.gives_ranges and self.asked_stop is not None:
            self.asked_stop = min(self._most, self.asked_stop)

    async def receive(self, answer: Answer, meter: Meter) -> None:
        if self.position == self.asked_stop:
            return
        chunks = answer.chunks
        if hasattr(chunks, "read_into") and self._open_room():
            await self._fill(cast("Fills", chunks), meter)
            return
        async for piece in chunks:
            size = len(piece)
            if self.asked_stop is not None and self.position + size > self.asked_stop:
                if self.asked_stop != self._most:
                    start = self.start or 0
                    raise BadResponseError(f"the body is longer than bytes {start} to {self.asked_stop}", url=self.url)
                size = self.asked_stop - self.position
            if self._room is None:
                self._pieces.append(piece if size == len(piece) else memoryview(piece)[:size])
            else:
                at = self.position - self._first
                np.copyto(self._room[at : at + size], np.frombuffer(piece, np.uint8)[:size])
            self.position += size
            meter.bytes += size
            if self.asked_stop is None and self.position > _MOST_UNTOLD_BYTES:
                raise BadResponseError(
                    "more than 1 GiB came, and the store does not say how much there is", url=self.url
                )
            if self.position == self.asked_stop == self._most:
                return

    def check_end(self) -> None:
        if self._is_open and (self.asked_stop is None or self.position < self.asked_stop):
            self.size = self.asked_stop = self.position
        if self.asked_stop is not None and self.position < self.asked_stop:
            raise ShortReadError(f"the body ended at byte {self.position}, not {self.asked_stop}", url=self.url)

    def result(self) -> bytes:
        """Return the bytes, if no target was given. Callable once."""
        if self._buffer is not None:
            self._room = None  # while it exists, `getvalue` copies
            return self._buffer.getvalue()
        pieces = self._pieces
        return bytes(pieces[0]) if len(pieces) == 1 else b"".join(pieces)

    def data(self) -> memoryview:
        return memoryview(self._room)[: self.position - self._first]

    def span(self) -> Span:
        """Return the span that was read.

        Raises:
            BadResponseError: the store did not report the object's size.
        """
        if self.size is None:
            raise BadResponseError("the answer does not say how long the object is", url=self.url)
        return Span(min(self.start or 0, self.size), self.position, self.size, self.etag, self.in_order, self.told)

    def _open_room(self) -> bool:
        if self._room is None and not self._pieces and self.asked_stop is not None:
            self._buffer = room_for(self.asked_stop - self.position, self.url)
            self._room = np.frombuffer(self._buffer.getbuffer(), np.uint8)
            self._first = self.position
        return self._room is not None

    async def _fill(self, body: Fills, meter: Meter) -> None:
        end = None if self.asked_stop is None else self.asked_stop - self._first
        target = memoryview(self._room)[self.position - self._first : end]
        got = 0
        self.body = body
        try:
            got = await body.read_into(target)
        except ShortReadError:
            got = body.received
            if got < len(target):
                raise  # else all bytes are there, and only the end marker is missing
        except BaseException:
            got = body.received
            raise
        finally:
            self.body = None
            self.skipped += getattr(body, "skipped", 0)
            got = min(got, len(target))
            self.position += got
            meter.bytes += got


def room_for(size: int, url: str) -> io.BytesIO:
    """Allocate untouched memory of `size` bytes, which `getvalue` returns without a copy.

    Raises:
        StorageError: there is not enough memory.
    """
    try:
        return io.BytesIO(bytes(size))
    except (MemoryError, OverflowError):
        raise StorageError(f"the store announces {size} bytes, and memory does not hold them", url=url) from None
