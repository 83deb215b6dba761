"""One requested range: its object, progress, target memory and time limits."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from headrace._util.context import Charges
from headrace._util.reads import ReportedVersion, Span
from headrace.errors import BadResponseError, ObjectChangedError, ShortReadError, StorageError
from headrace.fetch.meter import Meter
from headrace.options import Fetch
from headrace.types import Answer, Buffer, Fills

if TYPE_CHECKING:
    from headrace.fetch.hosts import Endpoint
    from headrace.fetch.web.connection import Rest


RATE_WINDOW_S = 30.0
_LEAST_S = 0.001


_MOST_UNTOLD_BYTES = 2**30  # of a body of unknown length, which may be endless


class RangeRequest:
    """One range. Every answer is checked against it and continues it at the byte reached.

    It has time limits. Its task is cancelled to interrupt it, as by `asyncio.timeout`.

    Args:
        start: First byte. Negative, without a stop: this many bytes before the end.
        target: Memory for the bytes. None: allocated, see `result`.
        charge: Called and awaited once, with the number of bytes.
        most: Maximum bytes of a longer object, if the store supports ranges for the rest.
        rest: Holds the open answer between requests, for a store without ranges.
        reported: Version in an earlier answer to other requests of the same read.

    Attributes:
        position: Byte of the object that was reached, without received bytes of `body`.
        asked_stop: End of the range. Known after the first answer, unless the store does not report it.
        in_order: The store sends the whole object for every range.
        skipped: Bytes received before the wanted ones.
        is_inside: True while the request counts in the host's limit.
        waits_for: Returns when what the request waits for instead of the store last made progress. Time up to then does
            not count.
        stopped_by: Reason of the interruption, or None.
        paused_s: Seconds that do not count.
    """

    __slots__ = (
        "_back", "_buffer", "_cancelling", "_first", "_from", "_is_open", "_most", "_pieces", "_room", "_seen",
        "_since", "_task", "_window_at", "_window_from", "asked_stop", "began", "body", "charge", "etag", "in_order",
        "is_inside", "paused_s", "position", "ranged", "reported", "rest", "size", "skipped", "start", "stop",
        "stopped_by", "url", "waits_for",
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
        reported: ReportedVersion | None = None,
    ) -> None:
        self.position = max(start or 0, 0)
        self.body: Fills | None = None
        self.waits_for: Callable[[], float] | None = None
        self.stopped_by: str | None = None
        self.began = self.paused_s = 0.0
        self._back = max(-(start or 0), 0)  # number of last bytes, until their position is known
        self.rest, self.in_order, self.skipped = rest, False, 0
        self.url, self.start, self.stop, self.etag, self.charge = url, start, stop, etag, charge
        self._most = most
        self.reported = reported
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

    def start_now(self, now: float) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        self.began = now

    def look(self, now: float) -> None:
        self._since = now
        self._from = self._seen = self.reached

    @property
    def reached(self) -> int:
        body = self.body
        return self.position if body is None else self.position + body.received + getattr(body, "skipped", 0)

    def interrupt(self, why: str) -> None:
        if self.stopped_by is None:
            self.stopped_by = why
            self._task.cancel()

    def settle(self) -> str | None:
        """Return the reason if only `interrupt` cancelled the task; else None. Called afterwards."""
        why, self.stopped_by = self.stopped_by, None
        return why if why is not None and self._task.uncancel() <= self._cancelling else None

    def judge(self, now: float, options: Fetch) -> str | None:
        reached = self.reached
        waits_for = self.waits_for
        if waits_for is not None:
            if waits_for() > self._since:
                self.paused_s += now - self._since
                self._since = now
        elif reached != self._seen:
            if self._seen == self._from:
                self._window_at, self._window_from = now, reached
            self._seen, self._since = reached, now
        elif reached == self._from:
            if now - self._since >= options.first_byte_timeout_s:
                return f"no first byte within {options.first_byte_timeout_s:g} seconds"
        elif now - self._since >= options.stall_timeout_s:
            return f"no byte for {options.stall_timeout_s:g} seconds"
        if waits_for is None and reached != self._from and now - self._window_at >= RATE_WINDOW_S:
            if reached - self._window_from < options.min_rate_bytes_s * (now - self._window_at):
                return f"fewer than {options.min_rate_bytes_s} bytes a second for {RATE_WINDOW_S:g} seconds"
            self._window_at, self._window_from = now, reached
        if now - self.began - self.paused_s >= self.time_s(options):
            return f"not all within {self.time_s(options):g} seconds"
        return None

    @property
    def asked_start(self) -> int | None:
        if self._back:
            return -self._back
        return self.position if self.ranged or self.position else None

    @property
    def if_match(self) -> str | None:
        # RFC 9110 §13.1.1: a weak validator never matches; the answer's ETag is compared in `accept` all the same.
        return None if self.etag is None or self.etag.startswith("W/") else self.etag

    def time_s(self, options: Fetch) -> float:
        """Time limit in seconds. A read longer than `range_bytes` gets proportionally more."""
        wanted = (self.reached if self.asked_stop is None else self.asked_stop) - (self.start or 0)
        skipped = self.skipped + getattr(self.body, "skipped", 0)
        return options.total_timeout_s * max(1.0, (wanted + skipped) / options.range_bytes)

    def accept(self, answer: Answer) -> None:
        size, reported = answer.size, ReportedVersion(answer.etag, answer.modified)
        is_empty = answer.start == answer.stop  # such as an error page, without the object's ETag
        is_checked = answer.etag is not None or not is_empty
        known = self.reported or (None if self.etag is None else ReportedVersion.of(self.etag))
        if is_checked and known is not None:
            known.check(reported, self.url)
        if self.size is not None and size is not None and size != self.size:
            # With If-Match the store reports a change of the object, so one of the sizes is wrong.
            kind = ObjectChangedError if self.if_match is None else BadResponseError
            raise kind(f"the object's size was {self.size}, now it is {size}", url=self.url)
        first, last = self.position, self.asked_stop
        if self._back:
            if size is None:
                raise BadResponseError("the answer does not report the size of the object", url=self.url)
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
            self.etag, self.reported = self.etag or reported.version, known or reported
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
                raise BadResponseError("more than 1 GiB came, and the store does not report the size", url=self.url)
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
        """Return the span that was read. Raises BadResponseError if the store did not report the object's size."""
        if self.size is None:
            raise BadResponseError("the answer does not report the size of the object", url=self.url)
        return Span(min(self.start or 0, self.size), self.position, self.size, self.etag, self.in_order, self.reported)

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


class DeadlineTimer:
    def __init__(self, options: Fetch, clock: Callable[[], float]) -> None:
        self._options, self._clock = options, clock
        self._watched: dict[RangeRequest, None] = {}
        self._hosts: dict[Endpoint, None] = {}
        limits = (options.first_byte_timeout_s, options.stall_timeout_s, options.total_timeout_s)
        self._each_s = min(1.0, min(limits) / 8.0)
        self._look_at = self._due = 0.0
        self._was_late = False
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, watched: RangeRequest, now: float) -> None:
        watched.look(now)
        self._watched[watched] = None
        if self._timer is None:
            self._look_at = now + self._each_s
            self._arm(now, self._look_at)

    def end(self, watched: RangeRequest) -> None:
        self._watched.pop(watched, None)

    def hedge(self, endpoint: Endpoint, now: float, due: float) -> None:
        self._hosts[endpoint] = None
        if due < self._due or self._timer is None:
            self._arm(now, due)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, now: float, due: float) -> None:
        self.close()
        self._due = max(due, now + _LEAST_S)
        self._timer = asyncio.get_running_loop().call_later(self._due - now, self._tick)

    def _tick(self) -> None:
        now = self._clock()
        self._timer = None
        if now >= self._look_at:
            # If the loop was blocked (a stopped process, a long callback), the sockets may hold bytes.
            # They are read first.
            self._was_late = now - self._look_at > self._each_s and not self._was_late
            self._look_at = now + self._each_s
            if not self._was_late:
                self._judge(now)
        due = self._look_at
        for endpoint in list(self._hosts):
            again = endpoint.hedge(now)
            if again == float("inf"):
                del self._hosts[endpoint]
            due = min(due, again)
        if self._watched:
            self._arm(now, due)

    def _judge(self, now: float) -> None:
        for watched in list(self._watched):
            why = watched.judge(now, self._options)
            if why is not None:
                watched.interrupt(why)


def room_for(size: int, url: str) -> io.BytesIO:
    """Allocate untouched memory of `size` bytes, which `getvalue` returns without a copy.

    Raises:
        StorageError: there is not enough memory.
    """
    try:
        return io.BytesIO(bytes(size))
    except (MemoryError, OverflowError):
        raise StorageError(f"the store announces {size} bytes, and memory does not hold them", url=url) from None
