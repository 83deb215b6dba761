"""A web server on loopback that fails on purpose, each time in the same way."""

from __future__ import annotations

import asyncio
import gzip
import random
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from types import TracebackType
from typing import Self
from urllib.parse import unquote, urlsplit

_REASONS = {
    200: "OK",
    206: "Partial Content",
    404: "Not Found",
    412: "Precondition Failed",
    416: "Range Not Satisfiable",
}


@dataclass(frozen=True)
class Fault:
    """What goes wrong with an object's answers.

    Args:
        kind: a status ("503"), or one of
            "reset" (connection reset before any header), "close" (ended before any header),
            "cut" / "cut-reset" (ended or reset within the body), "short-chunked" (chunked, no last chunk),
            "hang" (no answer), "stall" (no end of the body),
            "whole" (the range is ignored), "wrong-label" (Content-Range of other bytes),
            "shorter" (fewer bytes than asked),
            "gzip" (an encoded body), "new-version" (another ETag and other bytes), "new-etag" (another ETag),
            "weak-etag", "no-etag".
        times: for how many requests; None: for all.
        at: where in the body, in bytes; None: drawn from the server's seed.
    """

    kind: str
    times: int | None = 1
    at: int | None = None


@dataclass(frozen=True)
class Request:
    """A request as it came: `target` is the path and query as sent."""

    target: str
    headers: dict[str, str]

    @property
    def range(self) -> str | None:
        return self.headers.get("range")


class FaultServer:
    """Serves `objects` by name, in a thread with a loop of its own; use it in a `with` block.

    Faults are taken in the order they were added, one request after the other.
    """

    def __init__(self, objects: dict[str, bytes] | None = None, *, seed: int = 0) -> None:
        self.objects = dict(objects or {})
        self.requests: list[Request] = []
        self._faults: dict[str, list[Fault]] = {}
        self._rng = random.Random(seed)
        self._connections: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._all_gone = threading.Event()
        self._stalled = threading.Semaphore(0)
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="fault-server")

    def add(self, name: str, data: bytes, *faults: Fault) -> str:
        """Serve `data` with `faults`; its address."""
        self.objects[name] = data
        self._faults[name] = list(faults)
        return f"{self.url}/{name}"

    def requests_for(self, name: str) -> list[Request]:
        return [r for r in self.requests if unquote(urlsplit(r.target).path) == f"/{name}"]

    def wait_until_stalled(self) -> bool:
        """Whether a request came to its stall or hang."""
        return self._stalled.acquire(timeout=10)

    def wait_until_no_connection(self) -> bool:
        """Whether every client has gone."""
        return self._all_gone.wait(timeout=10)

    def __enter__(self) -> Self:
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._started.set()
        await self._stop.wait()
        server.close()
        for writer in list(self._connections):
            writer.transport.abort()
        await asyncio.gather(*self._tasks)
        await server.wait_closed()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._connections.add(writer)
        self._all_gone.clear()
        try:
            while await self._answer(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            self._connections.discard(writer)
            self._tasks.discard(task)
            if not self._connections:
                self._all_gone.set()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answers one request; whether the connection goes on."""
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:] if line)}
        request = Request(lines[0].split(" ")[1], headers)
        self.requests.append(request)
        name = unquote(urlsplit(request.target).path)[1:]
        kind, at = self._next_fault(name)
        if kind in ("reset", "close"):
            return self._end(writer, reset=kind == "reset")
        if kind == "hang":
            return await self._stall(reader)
        if kind.isdigit():
            extra = {"Retry-After": "0"} if kind in ("429", "503") else {}
            return await self._send(writer, int(kind), extra, b"<Error><Code>Injected</Code></Error>")
        if name not in self.objects:
            return await self._send(writer, 404, {}, b"<Error><Code>NoSuchKey</Code></Error>")
        status, extra, body = self._content(self.objects[name], request, kind)
        if status in (412, 416):
            return await self._send(writer, status, extra, b"")
        at = min(len(body), self._rng.randrange(len(body) + 1) if at is None else at)
        if kind == "short-chunked":
            head = _head(status, {**extra, "Transfer-Encoding": "chunked"})
            writer.write(head + b"%x\r\n%b\r\n" % (at, body[:at]))
            await writer.drain()
            return self._end(writer, reset=False)
        if kind in ("cut", "cut-reset", "stall"):
            writer.write(_head(status, {**extra, "Content-Length": str(len(body))}) + body[:at])
            await writer.drain()
            return await self._stall(reader) if kind == "stall" else self._end(writer, reset=kind == "cut-reset")
        return await self._send(writer, status, extra, body)

    def _next_fault(self, name: str) -> tuple[str, int | None]:
        waiting = self._faults.get(name, [])
        if not waiting:
            return "", None
        fault = waiting[0]
        if fault.times is not None:
            waiting[:1] = [Fault(fault.kind, fault.times - 1, fault.at)] if fault.times > 1 else []
        return fault.kind, fault.at

    def _content(self, data: bytes, request: Request, kind: str) -> tuple[int, dict[str, str], bytes]:
        if kind == "new-version":
            data = data[::-1]
        version = sha256(data).hexdigest()[:16] + (str(len(self.requests)) if kind == "new-etag" else "")
        etag = f'W/"{version}"' if kind == "weak-etag" else f'"{version}"'
        extra = {} if kind == "no-etag" else {"ETag": etag}
        wanted = request.headers.get("if-match")
        if wanted is not None and (wanted != etag or kind == "weak-etag"):
            return 412, extra, b""
        if request.range is None or kind == "whole":
            return 200, extra, data
        start, stop = _asked(request.range, len(data))
        if start >= len(data):
            return 416, {"Content-Range": f"bytes */{len(data)}"}, b""
        body = data[start:stop]
        if kind == "gzip":
            extra["Content-Encoding"] = "gzip"
            body = gzip.compress(body, mtime=0)
        if kind == "wrong-label":
            start, stop = start + 7, stop + 7
        if kind == "shorter":
            body, stop = body[:-7], stop - 7
        extra["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        return 206, extra, body

    async def _send(self, writer: asyncio.StreamWriter, status: int, extra: dict[str, str], body: bytes) -> bool:
        writer.write(_head(status, {**extra, "Content-Length": str(len(body))}) + body)
        await writer.drain()
        return True

    def _end(self, writer: asyncio.StreamWriter, *, reset: bool) -> bool:
        if reset:
            raw: socket.socket = writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        return False

    async def _stall(self, reader: asyncio.StreamReader) -> bool:
        self._stalled.release()
        await reader.read()  # until the client goes
        return False


def _head(status: int, headers: dict[str, str]) -> bytes:
    lines = [f"HTTP/1.1 {status} {_REASONS.get(status, 'Injected')}", *(f"{n}: {v}" for n, v in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def _asked(header: str, size: int) -> tuple[int, int]:
    first, _, last = header.removeprefix("bytes=").partition("-")
    return int(first), min(int(last) + 1, size) if last else size


def numbered(size: int) -> bytes:
    """`size` bytes that tell where they lie."""
    return b"".join(_words(size))[:size]


def _words(size: int) -> Iterator[bytes]:
    return (n.to_bytes(4, "big") for n in range(size // 4 + 1))
