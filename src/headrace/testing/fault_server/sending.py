"""Plans on the wire."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from http.client import responses

from headrace.testing.fault_server.answers import Plan
from headrace.types import Buffer

_PIECE_BYTES = 256 * 1024


class Line:
    """One connection to a client.

    Args:
        stalled: called when nothing is sent on purpose.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, stalled: Callable[[], object]
    ) -> None:
        self._reader, self._writer, self._stalled = reader, writer, stalled
        # What `drain` has let through is on its way: a reset right after it loses nothing.
        writer.transport.set_write_buffer_limits(0)

    async def send(self, plan: Plan) -> bool:
        """Send the answer; whether the connection goes on.

        Raises:
            ConnectionError: the client has gone.
        """
        if plan.instead == "hang":
            self._stalled()
        if plan.delay_s:
            await self._pause(plan.delay_s)
        if plan.instead:
            return self.end(reset=plan.instead == "reset")
        if plan.raw:
            await self._write(plan.raw)
            return False
        head = plan.interim + _head(plan)
        if plan.head_stall_s:
            await self._write(head[: len(head) // 2])
            self._stalled()
            await self._pause(plan.head_stall_s)
            head = head[len(head) // 2 :]
        self._writer.write(head)
        if plan.request.method == "HEAD":
            return not plan.ends
        return await self._send_body(plan) and not plan.ends

    def end(self, *, reset: bool) -> bool:
        """Nothing more is sent; False, for the connection does not go on."""
        if reset:
            raw: socket.socket = self._writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._writer.transport.abort()
        return False

    async def _send_body(self, plan: Plan) -> bool:
        body, at = memoryview(plan.body), 0
        for stop, what, seconds in [*sorted(plan.stops), (len(body), "end", 0.0)]:
            await self._send_part(plan, body[at:stop])
            at = stop
            if what == "stall":
                self._stalled()
                await self._pause(seconds)
            elif what != "end":
                return self.end(reset=what == "reset")
        if plan.framing == "chunked":
            await self._write(b"0\r\n\r\n")
        return True

    async def _send_part(self, plan: Plan, part: Buffer) -> None:
        step = int(plan.bytes_per_s / 20) + 1 if plan.bytes_per_s else _PIECE_BYTES
        for start in range(0, len(part), step):
            piece = part[start : start + step]
            if plan.bytes_per_s:
                await self._pause(len(piece) / plan.bytes_per_s)
            if plan.framing == "chunked":
                piece = b"".join((b"%x\r\n" % len(piece), piece, b"\r\n"))
            await self._write(piece)
        await self._writer.drain()

    async def _write(self, data: Buffer) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def _pause(self, seconds: float) -> None:
        """Nothing for so long; ConnectionError when the client goes, which then is noticed at once.

        Only while it waits for more: what it sends is lost.
        """
        try:
            async with asyncio.timeout(seconds):
                await self._reader.read()
        except TimeoutError:
            return
        raise ConnectionResetError


def _head(plan: Plan) -> bytes:
    headers = dict(plan.headers)
    if plan.framing == "chunked" and plan.request.method != "HEAD":
        headers["Transfer-Encoding"] = "chunked"
    elif plan.framing != "close":
        headers["Content-Length"] = str(len(plan.body) if plan.announced is None else plan.announced)
    lines = [
        f"HTTP/1.1 {plan.status} {responses.get(plan.status, 'Unknown')}",
        *(f"{n}: {v}" for n, v in headers.items()),
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
