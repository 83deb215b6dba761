"""The connections of one reader, opened on demand and reused, and the addresses of hosts."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import math
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import chain, takewhile, zip_longest
from typing import NamedTuple

from headrace.errors import BadResponseError, LoaderClosedError, ReadTimeoutError, StorageError
from headrace.fetch.threads import Threads
from headrace.fetch.web.connection import Connection, EndedError, in_words
from headrace.fetch.web.http1 import Head, WebOrigin
from headrace.options import Fetch

_KEPT_S = 30.0
_THREADS = 16  # image data sets may have one host per image


class Address(NamedTuple):
    """An address of a host. `sockaddr` as in the socket module, with the IP address first."""

    family: int
    sockaddr: tuple[int | str | bytes, ...]


Resolve = Callable[[str, int], list[Address]]


def resolve(host: str, port: int, flags: int = 0) -> list[Address]:
    """Ask the system's resolver, which orders addresses by preference. Blocks."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return [Address(family, sockaddr) for family, _, _, _, sockaddr in found]


class _Lookup:
    def __init__(self, found: asyncio.Future[list[Address]]) -> None:
        self.found = found
        self.until = math.inf  # expiry time
        self.turn: deque[Address] = deque()
        self.failed: list[Address] = []  # latest failure last


class Lookups:
    """The addresses of hosts, for one reader.

    Lookups run in daemon threads. The event loop joins its own threads when it closes, and a resolver without network
    is slow. Results are cached for `kept_s` seconds, failures not at all.
    """

    def __init__(
        self, resolve: Resolve = resolve, *, clock: Callable[[], float] = time.monotonic, kept_s: float = _KEPT_S
    ) -> None:
        self._resolve, self._clock, self._kept_s = resolve, clock, kept_s
        self._threads = Threads("headrace-lookups", _THREADS)
        self._lookups: dict[tuple[str, int], _Lookup] = {}  # oldest first

    async def addresses(self, host: str, port: int) -> list[Address]:
        """Return all addresses of `host`, in the order in which to try them.

        Each call starts with the next address, to spread the load. Address families alternate (RFC 8305 §4). Addresses
        that failed come last.

        Raises:
            OSError: the host has no address.
            LoaderClosedError: `close` was called.
        """
        with suppress(socket.gaierror):
            return resolve(host, port, socket.AI_NUMERICHOST)
        lookup = self._lookups.get((host, port))
        if lookup is None or lookup.until <= self._clock():
            lookup = self._begin(host, port)
        await asyncio.wait([lookup.found])  # cancelling one waiter does not cancel the lookup
        lookup.found.result()
        order = [*lookup.turn, *lookup.failed]
        lookup.turn.rotate(-1)
        return order

    def failed(self, host: str, port: int, addresses: list[Address]) -> None:
        lookup = self._lookups.get((host, port))
        if lookup is not None:
            failed = [*lookup.failed, *(address for address in lookup.turn if address in addresses)]
            lookup.failed = sorted(failed, key=addresses.__contains__)
            lookup.turn = deque(address for address in lookup.turn if address not in addresses)

    def close(self) -> None:
        """Fail all waiters. Threads end when the resolver returns."""
        for lookup in self._lookups.values():
            if not lookup.found.done():
                lookup.found.set_exception(LoaderClosedError("the lookups of this reader were ended; make a new one"))
        self._threads.close()

    def _begin(self, host: str, port: int) -> _Lookup:
        now = self._clock()
        for old in list(takewhile(lambda place: self._lookups[place].until <= now, self._lookups)):
            del self._lookups[old]
        lookup = _Lookup(self._threads.call(self._resolve, host, port))
        self._lookups.pop((host, port), None)
        self._lookups[host, port] = lookup

        def settle(found: asyncio.Future[list[Address]]) -> None:
            if found.exception() is None:
                lookup.until = self._clock() + self._kept_s
                lookup.turn.extend(_interleaved(found.result()))
            else:
                del self._lookups[host, port]

        lookup.found.add_done_callback(settle)
        return lookup


def _interleaved(addresses: list[Address]) -> list[Address]:
    families: dict[int, list[Address]] = {}
    for address in dict.fromkeys(addresses):
        families.setdefault(address.family, []).append(address)
    return [address for address in chain(*zip_longest(*families.values())) if address is not None]


_IDLE_S = 4.0  # servers and middleboxes may drop older ones silently
_TRANSLATED = ipaddress.IPv6Network("64:ff9b::/96")  # IPv4 addresses in IPv6 networks (RFC 6052)
_GLOBAL_IPV6 = ipaddress.IPv6Network("2000::/3")  # all unicast addresses that IANA has allocated
# Not public, though `ipaddress` reports so in some releases of Python. Azure's machines get their secrets from the
# first address. 192.0.0.0/24 is for protocols, also of Oracle's cloud. 192.88.99.0/24 was for
# relays (RFC 7526), 3fff::/20 is for documents (RFC 9637).
_NOT_PUBLIC = tuple(map(ipaddress.ip_network, ("168.63.129.16/32", "192.0.0.0/24", "192.88.99.0/24", "3fff::/20")))


def is_public(address: str) -> bool:
    """True if an IP address is public, by Python's `ipaddress` and a few exceptions.

    An IPv6 address that contains an IPv4 address is as public as that. Others are public below 2000::/3 only.
    """
    if not address:
        return False  # it closed before its address was known
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        is_translated = ip in _TRANSLATED
        inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF) if is_translated else ip.ipv4_mapped or ip.sixtofour
        if inner is None and ip not in _GLOBAL_IPV6:
            return False
        ip = inner or ip
    return ip.is_global and not ip.is_multicast and not any(ip in network for network in _NOT_PUBLIC)


class Connections:
    """All connections of one reader, to any origins, as many as are in use at once.

    Args:
        tls: None: made from the machine's certificates at first use.
        idle_s: Seconds after which an idle connection is closed.
    """

    def __init__(
        self,
        options: Fetch,
        tls: ssl.SSLContext | None = None,
        *,
        is_public: Callable[[str], bool] = is_public,
        idle_s: float = _IDLE_S,
        resolve: Resolve = resolve,
    ) -> None:
        self._options, self._tls, self._idle_s = options, tls, idle_s
        self.is_public = is_public
        self._lookups = Lookups(resolve)
        self._open: set[Connection] = set()
        self._idle: dict[WebOrigin, list[Connection]] = {}
        self._sweeper: asyncio.TimerHandle | None = None
        self._is_closed = False

    async def ask(
        self, origin: WebOrigin, request: bytes, *, name: str, public_only: bool = False
    ) -> tuple[Connection, Head]:
        """Send `request` to `origin`. Return the connection and the head of the answer.

        The server may have closed a reused connection. If it gives no byte, the request is sent once more on a new one
        (RFC 9112 §9.3.1; every request is a GET).

        Args:
            public_only: Refuse addresses that are not public.

        Raises:
            StorageError: there is no answer.
            BadResponseError: the answer is malformed, or the origin's address is refused.
        """
        used = self._take_idle(origin, public_only=public_only)
        if used is not None:
            try:
                return used, await _ask(used, request, name)
            except StorageError:
                if used.has_begun:
                    raise
        connection = await self._connect(origin, name, public_only=public_only)
        return connection, await _ask(connection, request, name)

    async def aclose(self) -> None:
        self._is_closed = True
        self._lookups.close()
        if self._sweeper is not None:
            self._sweeper.cancel()
        self._idle.clear()
        await _close(list(self._open))

    def _put_back(self, origin: WebOrigin, connection: Connection) -> None:
        """Keep the connection. The latest is reused first, so that surplus ones expire."""
        self._idle.setdefault(origin, []).append(connection)
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().call_later(self._idle_s, self._sweep)

    def _take_idle(self, origin: WebOrigin, *, public_only: bool) -> Connection | None:
        idle = self._idle.get(origin)
        while idle:
            connection = idle.pop()
            is_allowed = not public_only or self.is_public(connection.address)
            if is_allowed and connection.idle_s() < self._idle_s and connection.is_usable():
                return connection
            connection.abort()
        return None

    def _sweep(self) -> None:
        self._sweeper = None
        for origin, idle in list(self._idle.items()):
            old = [connection for connection in idle if connection.idle_s() >= self._idle_s]
            del idle[: len(old)]
            for connection in old:
                connection.abort()
            if not idle:
                del self._idle[origin]
        if self._idle:
            self._sweeper = asyncio.get_running_loop().call_later(self._idle_s, self._sweep)

    async def _connect(self, origin: WebOrigin, name: str, *, public_only: bool) -> Connection:
        limit_s = self._options.connect_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                try:
                    return await self._new(origin, name, public_only=public_only)
                except OSError as error:
                    if error.errno not in DESCRIPTORS_SHORT:
                        raise
                idle = [connection for each in self._idle.values() for connection in each]
                self._idle.clear()
                await _close(idle)
                return await self._new(origin, name, public_only=public_only)
        except TimeoutError as error:
            raise ReadTimeoutError(f"no connection within {limit_s:g} seconds", url=name) from error
        except ssl.SSLCertVerificationError as error:
            reason = f"the certificate of {origin.host} was refused: {error.verify_message}"
            raise BadResponseError(reason, url=name) from error
        except OSError as error:
            reason = in_words(error)
            if error.errno in DESCRIPTORS_SHORT:
                reason += "; raise the limit (`ulimit -n`), or lower hr.Fetch(concurrency=)"
            raise StorageError(f"no connection: {reason}", url=name) from error

    async def _new(self, origin: WebOrigin, name: str, *, public_only: bool) -> Connection:
        self._check_open()
        addresses = await self._lookups.addresses(origin.host, origin.port)
        if public_only:
            addresses = [address for address in addresses if self.is_public(str(address.sockaddr[0]))]
            if not addresses:
                where = f"{origin.host}, which is in a private network"
                raise BadResponseError(f"redirected to {where}; from a public server that is refused", url=name)
        tls = self._context() if origin.scheme == "https" else None
        sock, number = await dial(addresses)
        self._lookups.failed(origin.host, origin.port, addresses[:number])
        try:
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: Connection(partial(self._put_back, origin)),
                sock=sock,
                ssl=tls,
                server_hostname=None if tls is None else origin.host,
            )
        except OSError:
            self._lookups.failed(origin.host, origin.port, addresses[number : number + 1])
            raise
        # Not earlier: if this is cancelled, uvloop closes the transport without calling connection_lost.
        self._open.add(connection)
        connection.closed.add_done_callback(lambda _: self._open.discard(connection))
        if self._is_closed:
            connection.abort()
        self._check_open()
        return connection

    def _check_open(self) -> None:
        if self._is_closed:
            raise LoaderClosedError("the connections of this reader were closed; make a new one")

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()  # takes about 20 ms, as it reads the machine's certificates
            self._tls.set_alpn_protocols(["http/1.1"])
        return self._tls


async def _ask(connection: Connection, request: bytes, name: str) -> Head:
    try:
        return await connection.ask(request)
    except EndedError as error:
        connection.abort()
        raise StorageError(f"the connection ended before the answer: {error}", url=name) from error
    except ValueError as error:
        connection.abort()
        raise BadResponseError(f"the answer cannot be used: {error}", url=name) from error
    except BaseException:
        connection.abort()
        raise


async def _close(connections: list[Connection]) -> None:
    for connection in connections:
        connection.abort()
    if connections:
        await asyncio.wait([connection.closed for connection in connections])


_HEAD_START_S = 0.25  # what RFC 8305 §5 recommends

DESCRIPTORS_SHORT = (errno.EMFILE, errno.ENFILE)


async def dial(addresses: list[Address]) -> tuple[socket.socket, int]:
    """Connect to the first of `addresses` that answers. Return the socket and the index.

    Each is tried when the previous ones have failed or have had a quarter of a second. Earlier ones may still answer
    first.

    Raises:
        OSError: no connection succeeded; the error of the last one.
    """
    if len(addresses) == 1:
        return await _connect(addresses[0]), 0  # without the cost of tasks
    waiting = deque(enumerate(addresses))
    attempts: dict[asyncio.Task[socket.socket], int] = {}
    try:
        while True:
            if waiting:
                number, address = waiting.popleft()
                attempts[asyncio.create_task(_connect(address))] = number
            done, _ = await asyncio.wait(
                attempts, timeout=_HEAD_START_S if waiting else None, return_when=asyncio.FIRST_COMPLETED
            )
            for attempt in done:
                number, error = attempts.pop(attempt), attempt.exception()
                if error is None:
                    return attempt.result(), number
                is_short = isinstance(error, OSError) and error.errno in DESCRIPTORS_SHORT
                if is_short or not (waiting or attempts):
                    raise error
    finally:
        for attempt in attempts:
            if not (attempt.cancel() or attempt.cancelled() or attempt.exception()):
                attempt.result().close()


async def _connect(address: Address) -> socket.socket:
    # The protocol is named because asyncio sets TCP_NODELAY only where it is.
    sock = socket.socket(address.family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, address.sockaddr)
    except BaseException:
        sock.close()
        raise
    return sock
