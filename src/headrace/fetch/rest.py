"""The unread rest of an answer that is longer than the requested range, for the next read."""

from __future__ import annotations

from headrace._util.reads import ReportedVersion
from headrace.errors import BadResponseError
from headrace.fetch.web.body import Body
from headrace.types import Answer, Buffer

_SKIPPED_BYTES = 256 * 1024


class Rest:
    """The open answer of a server that sends whole objects only, for reading an object in order.

    Each part is read from the same body, so the server sends every byte once. If the connection broke, or a part
    precedes the position, the object is requested again and the bytes before the part are discarded.
    """

    def __init__(self) -> None:
        self._body: Body | None = None
        self._at = 0
        self._size: int | None = None
        self._reported: ReportedVersion | None = None  # version of the first answer

    def go_on(self, start: int, stop: int, name: str) -> Answer | None:
        """Return bytes [start, stop) of the open answer; None without one or if it is past `start`."""
        body, self._body = self._body, None
        if body is None:
            return None
        if start < self._at:
            body.abort()
            return None
        return self._part(body, start, stop, name)

    def begin(
        self, body: Body, start: int, stop: int, name: str, *, size: int | None, reported: ReportedVersion
    ) -> Answer:
        """Return bytes [start, stop) of a new answer.

        Raises:
            ObjectChangedError: the previous answer had another version.
            BadResponseError: the versions cannot be compared.
        """
        if self._reported is not None:
            self._reported.check(reported, name)
        self._at, self._size, self._reported = 0, size, reported
        return self._part(body, start, stop, name)

    def keep(self, body: Body, at: int) -> None:
        self.release()
        if body.is_open:
            self._body, self._at = body, at

    def release(self) -> None:
        body, self._body = self._body, None
        if body is not None:
            body.abort()

    def _part(self, body: Body, start: int, stop: int, name: str) -> Answer:
        end = stop if self._size is None else min(stop, self._size)
        part = _Part(self, body, start - self._at, start, end, name)
        known, (etag, modified) = None if self._size is None else end, self._reported or ReportedVersion()
        return Answer(start, known, self._size, etag, part, in_order=True, modified=modified)


class _Part:
    """Bytes [start, stop) of a body, after `skip` bytes that are discarded. Implements `Fills`."""

    def __init__(self, rest: Rest, body: Body, skip: int, start: int, stop: int, name: str) -> None:
        self._rest, self._body, self._name = rest, body, name
        self._to_skip, self._left, self._stop = skip, stop - start, stop
        self._before = self._base = body.received  # bytes received before this part, and before its wanted bytes

    @property
    def received(self) -> int:
        return 0 if self._to_skip else self._body.received - self._base

    @property
    def skipped(self) -> int:
        return (self._body.received if self._to_skip else self._base) - self._before

    async def read_into(self, target: memoryview) -> int:
        await self._skip()
        count = await self._body.read_into(target[: self._left])
        self._left -= count
        if not self._left:
            self._rest.keep(self._body, self._stop)
        return count

    async def aclose(self) -> None:
        if self._left:
            await self._body.aclose()

    def __aiter__(self) -> _Part:
        return self

    async def __anext__(self) -> Buffer:
        piece = bytearray(min(_SKIPPED_BYTES, self._left))
        count = await self.read_into(memoryview(piece)) if piece else 0
        if not count:
            raise StopAsyncIteration
        return memoryview(piece)[:count]

    async def _skip(self) -> None:
        room = memoryview(bytearray(min(self._to_skip, _SKIPPED_BYTES)))
        while self._to_skip:
            count = await self._body.read_into(room[: self._to_skip])
            if not count:
                raise BadResponseError(f"the whole ended {self._to_skip} bytes before the part", url=self._name)
            self._base = self._body.received
            self._to_skip -= count
