"""A web server on loopback that sends the bytes of a test."""

import asyncio
import socket
import ssl
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec

LOOPS = [("asyncio", {"use_uvloop": False})]
if find_spec("uvloop") is not None:
    LOOPS.append(("asyncio", {"use_uvloop": True}))
"""For `anyio_backend`: the event loops on which our own client is tested."""


@dataclass(frozen=True)
class Reply:
    """An answer.

    Args:
        then: "next" (waits for another request), "end" (closes the connection) or "reset".
    """

    data: bytes
    then: str = "next"


@dataclass
class Script:
    """The answers to requests in order, over any connection; the last answer is repeated.

    Attributes:
        requests: the heads of requests, as they came.
        connections: how many there were.
        open: how many there are; `gone` is set while there is none.
        asked: released for each request.
    """

    answers: list[Reply | bytes]
    url: str = ""
    requests: list[str] = field(default_factory=list)
    connections: int = 0
    open: int = 0
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    asked: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))

    def fields(self, number: int = -1) -> dict[str, str]:
        """The header fields of a request, by names in lower case."""
        pairs = (line.partition(": ") for line in self.requests[number].split("\r\n")[1:] if line)
        return {name.lower(): value for name, _, value in pairs}

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        self.gone.clear()
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                self.requests.append((await reader.readuntil(b"\r\n\r\n")).decode("latin-1"))
                self.asked.release()
                answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
                reply = answer if isinstance(answer, Reply) else Reply(answer)
                writer.write(reply.data)
                await writer.drain()
                if reply.then != "next":
                    break
            if reply.then == "reset":
                raw: socket.socket = writer.get_extra_info("socket")
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()
        writer.close()
        self.open -= 1
        if not self.open:
            self.gone.set()


@asynccontextmanager
async def serving(
    *answers: Reply | bytes, tls: ssl.SSLContext | None = None, host: str = "127.0.0.1"
) -> AsyncIterator[Script]:
    script = Script(list(answers))
    conversations: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        conversations[asyncio.ensure_future(script.converse(reader, writer))] = writer

    server = await asyncio.start_server(connected, host, 0, ssl=tls)
    script.url = f"http{'' if tls is None else 's'}://{host}:{server.sockets[0].getsockname()[1]}"
    try:
        yield script
    finally:
        server.close()
        for task, writer in conversations.items():
            task.cancel()
            writer.transport.abort()
        await asyncio.gather(*conversations, return_exceptions=True)
        await server.wait_closed()


def ok(body: bytes, *fields: str, status: str = "200 OK") -> bytes:
    lines = "".join(f"{line}\r\n" for line in (f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *fields))
    return lines.encode("latin-1") + b"\r\n" + body


def part(body: bytes, start: int, size: int | str, *fields: str) -> bytes:
    return ok(
        body, f"Content-Range: bytes {start}-{start + len(body) - 1}/{size}", *fields, status="206 Partial Content"
    )


def chunked(*pieces: bytes, status: str = "200 OK", fields: str = "") -> bytes:
    coded = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return f"HTTP/1.1 {status}\r\n{fields}Transfer-Encoding: chunked\r\n\r\n".encode() + coded + b"0\r\n\r\n"
