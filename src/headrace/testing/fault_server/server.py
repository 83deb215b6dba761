"""A web server on loopback with reproducible faults."""

from __future__ import annotations

import asyncio
import inspect
import math
import random
import socket
import struct
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from hashlib import sha256
from http.client import responses
from typing import Any, Literal, Self, get_args, get_origin

from headrace._util import check
from headrace.errors import OptionError
from headrace.testing.fault_server.faults import FAULTS, Plan, Request, redirect
from headrace.types import Buffer


@dataclass(frozen=True, kw_only=True, slots=True)
class When:
    """Which requests are hit.

    Attributes:
        p: Share of the requests.
        match: Names of objects, as a shell pattern.
        method, range: This method; a Range header that contains this text.
        first, after, only, every: By the number of the attempt at the same object and range: the first N, those after
            N, only number N, each Nth.
        times: At most N requests. Of the faults with `times` only the first that is not used up can hit.
        burst, gap: N requests are hit, then N are not, in the order of arrival.
        t0, t1: From and until this many seconds after the server's start.
    """

    p: float = 1.0
    match: str = "*"
    method: str = ""
    range: str = ""
    first: float = math.inf
    after: int = 0
    only: int = 0
    every: int = 1
    times: float = math.inf
    burst: int = 0
    gap: int = 1
    t0: float = 0.0
    t1: float = math.inf

    def admits(self, request: Request, age_s: float) -> bool:
        attempt = request.attempt
        return (
            fnmatchcase(request.name, self.match)
            and self.method in ("", request.method)
            and self.range in (request.range or "")
            and self.after < attempt <= self.first
            and self.only in (0, attempt)
            and attempt % self.every == 0
            and self.t0 <= age_s < self.t1
        )


class Rule:
    """A fault, its parameters and selectors, parsed from text: `reset_body:p=0.3,at=100`.

    Raises:
        OptionError: there is no such fault or parameter.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.fault, _, rest = text.partition(":")
        check.one_of(f"{text!r}: fault", self.fault, FAULTS)
        parameters, selectors = _hints(FAULTS[self.fault]), _hints(When)
        known, given = parameters | selectors, dict[str, Any]()
        for name, _, value in (part.partition("=") for part in rest.split(",") if part):
            check.one_of(f"{text!r}: parameter", name, known)
            try:
                given[name] = _value(value, known[name])
            except ValueError as error:
                raise OptionError(f"{name}={value} of {text!r} is not {error}") from None
        self.parameters = {name: value for name, value in given.items() if name in parameters}
        self.when = When(**{name: value for name, value in given.items() if name not in parameters})
        self._hits = self._seen = 0

    @property
    def is_used_up(self) -> bool:
        return self._hits >= self.when.times

    def hits(self, request: Request, rng: random.Random, age_s: float) -> bool:
        """True if this request is hit; then it is counted."""
        if not self.when.admits(request, age_s):
            return False
        if self.when.burst:
            self._seen += 1
            if (self._seen - 1) % (self.when.burst + self.when.gap) >= self.when.burst:
                return False
        if self.is_used_up or rng.random() >= self.when.p:
            return False
        self._hits += 1
        return True

    def change(self, plan: Plan) -> None:
        FAULTS[self.fault](plan, **self.parameters)


def chosen(rules: Iterable[Rule], request: Request, seed: int, age_s: float) -> Iterator[tuple[Rule, random.Random]]:
    """Yield the rules that hit a request, each with random numbers for its fault."""
    turn_is_taken = False
    for rule in rules:
        if rule.when.times < math.inf:
            if turn_is_taken or rule.is_used_up:
                continue
            turn_is_taken = True
        rng = random.Random(f"{seed}|{rule.text}|{request.name}|{request.method}|{request.range}|{request.attempt}")
        if rule.hits(request, rng, age_s):
            yield rule, rng


def _hints(function: Callable[..., object]) -> dict[str, object]:
    signature = inspect.signature(function, eval_str=True)
    return {name: known.annotation for name, known in signature.parameters.items() if known.annotation is not Plan}


def _value(text: str, hint: object) -> object:
    """Convert the text. The ValueError describes the expected value."""
    words = get_args(hint) if get_origin(hint) is Literal else ()
    if hint is str or text in words:
        return text
    if words:
        raise ValueError(" or ".join(words))
    try:
        return int(text) if hint is int else float(text)
    except ValueError:
        raise ValueError("a whole number" if hint is int else "a number") from None


_PIECE_BYTES = 256 * 1024


class Line:
    """One connection to a client.

    Args:
        stalled: Called when a fault stops sending.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, stalled: Callable[[], object]
    ) -> None:
        self._reader, self._writer, self._stalled = reader, writer, stalled
        # After `drain` the data is sent, so a reset right after it loses nothing.
        writer.transport.set_write_buffer_limits(0)

    async def send(self, plan: Plan) -> bool:
        """Send the answer. Return True if the connection stays open.

        Raises:
            ConnectionError: the client has disconnected.
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
        """Send nothing for `seconds`. A disconnecting client is detected at once.

        Input during the pause is discarded, so clients must wait for more data.

        Raises:
            ConnectionError: the client has disconnected.
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


_SECRETS = ("authorization", "cookie", "proxy-authorization", "x-amz-security-token", "x-api-key")


class FaultServer:
    """Serves `objects` with faults, over HTTP and as an S3 endpoint with path-style addresses.

    It runs in a thread with its own loop; use it in a `with` block. A fault is text,
    `name:parameter=value,selector=value`. `FAULTS` has the names and parameters, `When` the selectors. Whether and
    where it hits a request is a function of (seed, fault, object, range, attempt), independent of the order of
    requests.

        with FaultServer(seed=7) as server:
            url = server.add("a.tar", data, "reset_body:p=0.3", "slowdown:times=2,retry_after=1")

    Attributes:
        objects: The served objects.
        url: The address. `elsewhere_url` is a second listener with the same objects, which must receive no secret.
        log: All requests, in order.
        connections, peak_connections: Open connections now, and at most so far.

    Args:
        faults: For every object, in addition to those of `add`.
        port: 0: any free port.
        idle_close_s: Seconds after which idle connections are closed.
        max_connections: Further connections are reset at once.
    """

    def __init__(
        self,
        objects: Mapping[str, Buffer] | None = None,
        *,
        faults: Iterable[str] = (),
        seed: int = 0,
        port: int = 0,
        idle_close_s: float | None = None,
        max_connections: int | None = None,
    ) -> None:
        self.objects: Mapping[str, Buffer] = {} if objects is None else objects
        self.log: list[Request] = []
        self.peak_connections = 0
        self._common = [Rule(text) for text in faults]
        self._rules: dict[str, list[Rule]] = {}
        self._seed, self._port = seed, port
        self._idle_close_s, self._max_connections = idle_close_s, max_connections
        self._attempts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._etags: dict[str, tuple[Buffer, str]] = {}
        self._held_until: dict[tuple[str, str | None], float] = {}
        self._writers: dict[asyncio.StreamWriter, asyncio.Task[None]] = {}
        self._ended = threading.Condition()
        self._stalls = threading.Semaphore(0)
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="fault-server")

    def add(self, name: str, data: Buffer, *faults: str) -> str:
        """Serve `data` with these faults from now on. Return its address."""
        rules = [Rule(text) for text in faults]
        assert isinstance(self.objects, MutableMapping), "these objects are not to be changed"
        self.objects[name] = data
        self._rules[name] = rules
        self._attempts.pop(name, None)
        return f"{self.url}/{name}"

    def requests_for(self, name: str) -> list[Request]:
        return [request for request in self.log if request.name == name]

    @property
    def hits(self) -> Counter[str]:
        return Counter(fault for request in self.log for fault in request.faults)

    @property
    def retry_after_violations(self) -> int:
        """Number of requests before the time of a Retry-After for their object and range."""
        return sum(request.is_early for request in self.log)

    @property
    def credential_leaks(self) -> Counter[str]:
        """Numbers of secret headers that came to the second listener, by name."""
        return Counter(
            name for request in self.log if request.elsewhere for name in _SECRETS if name in request.headers
        )

    @property
    def connections(self) -> int:
        return len(self._writers)

    def wait_until_stalled(self) -> bool:
        """Wait up to ten seconds for one more stall or hang. False after a timeout."""
        return self._stalls.acquire(timeout=10)

    def wait_until_no_connection(self, *, but: int = 0) -> bool:
        """Wait up to ten seconds until at most `but` connections are open. False after a timeout."""
        with self._ended:
            return self._ended.wait_for(lambda: self.connections <= but, timeout=10)

    def __enter__(self) -> Self:
        self._sockets = [socket.create_server(("127.0.0.1", port), backlog=512) for port in (self._port, 0)]
        self.url, self.elsewhere_url = (f"http://127.0.0.1:{one.getsockname()[1]}" for one in self._sockets)
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop, self._stop, self._began_s = asyncio.get_running_loop(), asyncio.Event(), time.monotonic()
        servers = [
            await asyncio.start_server(partial(self._connected, elsewhere), sock=one, backlog=512)
            for elsewhere, one in zip((False, True), self._sockets, strict=True)
        ]
        self._started.set()
        await self._stop.wait()
        # When a server closes, asyncio leaves sockets open that it is just accepting.
        while accepting := asyncio.all_tasks() - {asyncio.current_task(), *self._writers.values()}:
            await asyncio.wait(accepting)
        for server in servers:
            server.close()
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.gather(*self._writers.values())
        for server in servers:
            await server.wait_closed()

    def _connected(self, elsewhere: bool, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers[writer] = asyncio.create_task(self._attend(reader, writer, elsewhere))
        self.peak_connections = max(self.peak_connections, len(self._writers))

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, elsewhere: bool) -> None:
        try:
            line = Line(reader, writer, self._stalls.release)
            if self._max_connections is not None and len(self._writers) > self._max_connections:
                line.end(reset=True)
            else:
                await self._converse(reader, line, elsewhere)
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError):
            pass  # the client has disconnected, or was idle for too long
        except (ValueError, asyncio.LimitOverrunError):
            writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        finally:
            writer.close()
            with self._ended:
                del self._writers[writer]
                self._ended.notify_all()

    async def _converse(self, reader: asyncio.StreamReader, line: Line, elsewhere: bool) -> None:
        goes_on = True
        while goes_on:
            async with asyncio.timeout(self._idle_close_s):
                first, *rest = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").strip().split("\r\n")
            method, target, _ = first.split(" ")
            pairs = (text.partition(":") for text in rest)
            headers = {name.lower(): value.strip() for name, _, value in pairs}
            request = Request(method, target, headers, elsewhere)
            goes_on = await line.send(self._plan(request)) and headers.get("connection", "").lower() != "close"

    def _plan(self, request: Request) -> Plan:
        name, place = request.name, (request.name, request.range)
        attempts = self._attempts[name]
        attempts[f"{request.method} {request.range}"] += 1
        request.attempt = attempts[f"{request.method} {request.range}"]
        now = time.monotonic()
        request.is_early = now < self._held_until.get(place, 0.0)
        plan = Plan(request, elsewhere_url=self.elsewhere_url)
        rules = [] if "hops" in request.query else self._rules.get(name, []) + self._common
        hits = list(chosen(rules, request, self._seed, now - self._began_s))
        self._answer(plan, hits)
        for rule, plan.rng in hits:
            rule.change(plan)
        request.faults = tuple(rule.fault for rule, _ in hits)
        if plan.hold_s > 0:
            self._held_until[place] = now + plan.hold_s
        self.log.append(request)
        return plan

    def _answer(self, plan: Plan, hits: Sequence[tuple[Rule, object]]) -> None:
        request, hops = plan.request, plan.request.query.get("hops", "0")
        if request.method not in ("GET", "HEAD"):
            plan.refuse(405, "MethodNotAllowed")
        elif hops != "0":
            redirect(plan, mode="loop") if hops == "loop" else redirect(plan, n=int(hops))
        elif request.is_listing:
            modes = [str(rule.parameters.get("mode", "loop")) for rule, _ in hits if rule.fault == "listing"]
            plan.list_bucket(self.objects, *modes[:1] or [""])
        else:
            data = self.objects.get(request.name)
            if data is None:
                plan.refuse(404, "NoSuchKey")
            else:
                plan.serve(data, self._etag(request.name, data))

    def _etag(self, name: str, data: Buffer) -> str:
        known, etag = self._etags.get(name, (None, ""))
        if known is not data:
            etag = f'"{sha256(data).hexdigest()[:16]}"'
            self._etags[name] = data, etag
        return etag
