"""DNS lookups, shared by concurrent callers and cached for a short time."""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import chain, takewhile, zip_longest
from typing import NamedTuple

from headrace.errors import LoaderClosedError
from headrace.fetch.threads import Threads

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
