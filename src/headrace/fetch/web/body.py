"""The body of an answer, received into the reader's memory or in pieces."""

from __future__ import annotations

from headrace.errors import BadResponseError, ShortReadError
from headrace.fetch.web.connection import Connection, EndedError
from headrace.fetch.web.http1 import Chunks, Head
from headrace.types import Buffer

_PIECE_BYTES = 256 * 1024


class Body:
    """A body that implements `Fills`. Iterating over it gives pieces.

    Its connection is reused when all of the body was read. It ends if the body is closed earlier, cancelled or broken.
    `length` is needed if the framing does not give it.
    """

    def __init__(self, connection: Connection, head: Head, name: str, length: int | None = None) -> None:
        self._connection: Connection | None = connection
        self._name = name
        self._keeps_alive = head.keeps_alive
        self._chunks = Chunks() if head.is_chunked else None
        self._left = head.length if length is None else length  # bytes left; None: until the connection ends
        self._is_cut = False
        self._is_whole = False
        self._received = 0
        self._filling: Connection | None = None
        if self._left == 0:
            self._finish()

    @property
    def received(self) -> int:
        return self._received + (0 if self._filling is None else self._filling.filled)

    async def read_into(self, target: memoryview) -> int:
        if self._connection is None:
            if self._is_whole:
                return 0
            raise ShortReadError("the body was given up", url=self._name)
        if self._left is not None:
            target = target[: self._left]
        before, is_at_end = self._received, False
        try:
            if self._chunks is None:
                await self._fill(self._connection, target)
            else:
                is_at_end = await self._unchunk(self._connection, self._chunks, target)
        except EndedError as error:
            if self._chunks is not None or self._left is not None:
                await self.aclose()
                raise ShortReadError(f"the connection ended within the body: {error}", url=self._name) from error
            is_at_end = True  # the body extends to the connection's end
        except ValueError as error:
            await self.aclose()
            raise BadResponseError(f"the answer cannot be used: {error}", url=self._name) from error
        except BaseException:
            await self.aclose()
            raise
        count = self._received - before
        if self._left is not None:
            self._left -= count
        if is_at_end or self._left == 0:
            self._finish()
        return count

    @property
    def is_open(self) -> bool:
        return self._connection is not None

    async def aclose(self) -> None:
        if self._connection is not None:
            self.abort()

    def abort(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()

    def __aiter__(self) -> Body:
        return self

    async def __anext__(self) -> Buffer:
        piece = bytearray(_PIECE_BYTES if self._left is None else min(_PIECE_BYTES, self._left))
        count = await self.read_into(memoryview(piece))
        if not count:
            raise StopAsyncIteration
        return memoryview(piece)[:count]

    async def skip(self, count: int) -> int:
        """Discard up to `count` next bytes without counting them as received. Return their number."""
        room = memoryview(bytearray(min(count, _PIECE_BYTES)))
        skipped = 0
        while skipped < count and (got := await self.read_into(room[: count - skipped])):
            skipped += got
        self._received = 0
        return skipped

    def cut(self, count: int) -> None:
        if self._connection is not None and (self._left is None or count < self._left):
            self._left, self._is_cut = count, True
            if not count:
                self._finish()

    def _finish(self) -> None:
        connection, self._connection = self._connection, None
        self._is_whole = True
        if connection is not None:
            connection.release(keeps_alive=self._keeps_alive and not self._is_cut)

    async def _fill(self, connection: Connection, target: memoryview) -> None:
        came = connection.buffered()[: target.nbytes]
        target[: came.nbytes] = came
        connection.take(came.nbytes)
        self._received += came.nbytes
        if came.nbytes == target.nbytes:
            return
        self._filling = connection
        try:
            await connection.fill(target[came.nbytes :])
        finally:
            self._filling = None
            self._received += connection.filled

    async def _unchunk(self, connection: Connection, chunks: Chunks, target: memoryview) -> bool:
        at = 0
        # A body of known length must end there.
        is_last = self._left == target.nbytes and not self._is_cut
        while True:
            taken, given = chunks.feed(connection.buffered(), target[at:])
            connection.take(taken)
            at += given
            self._received += given
            if chunks.is_done:
                if self._left is not None and not self._is_cut and at < self._left:
                    raise EndedError("its last chunk came early")
                return True
            if at == target.nbytes:
                if not is_last:
                    return False
                if connection.buffered():
                    raise ValueError("its body is longer than announced")
            await connection.more()
