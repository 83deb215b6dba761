"""Where hosts lie: one lookup for all who ask at the same time, and for those who ask soon after."""

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
_THREADS = 16  # data sets of pictures may name as many hosts as pictures


class Address(NamedTuple):
    """Where a host can be connected to; `sockaddr` as the socket module takes it, the IP address first."""

    family: int
    sockaddr: tuple[int | str | bytes, ...]


Resolve = Callable[[str, int], list[Address]]


def resolve(host: str, port: int, flags: int = 0) -> list[Address]:
    """What the system's resolver knows, its favourite first; blocks."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return [Address(family, sockaddr) for family, _, _, _, sockaddr in found]


class _Lookup:
    """One lookup, under way or done; `until` is when it is to be forgotten."""

    def __init__(self, found: asyncio.Future[list[Address]]) -> None:
        self.found = found
        self.until = math.inf
        self.turn: deque[Address] = deque()
        self.failed: list[Address] = []  # the latest one last


class Lookups:
    """The addresses of hosts, for one reader.

    They are looked up by daemon threads of our own: the event loop's are joined when it closes, and a resolver that has
    lost its network takes its time.

    Args:
        resolve: gives the addresses of a host and port, one or more, or raises OSError; called in a thread.
        clock: seconds that only go forward.
        kept_s: how long what was found is used; that nothing was found is forgotten at once.
    """

    def __init__(
        self, resolve: Resolve = resolve, *, clock: Callable[[], float] = time.monotonic, kept_s: float = _KEPT_S
    ) -> None:
        self._resolve, self._clock, self._kept_s = resolve, clock, kept_s
        self._threads = Threads("headrace-lookups", _THREADS)
        self._lookups: dict[tuple[str, int], _Lookup] = {}  # oldest first

    async def addresses(self, host: str, port: int) -> list[Address]:
        """All addresses of `host`, in the order in which to try them.

        Each call begins with the next one, so that the load is spread; families take turns (RFC 8305 §4); those that
        failed come last.

        Raises:
            OSError: it has none. LoaderClosedError: `close` was called.
        """
        with suppress(socket.gaierror):
            return resolve(host, port, socket.AI_NUMERICHOST)
        lookup = self._lookups.get((host, port))
        if lookup is None or lookup.until <= self._clock():
            lookup = self._begin(host, port)
        await asyncio.wait([lookup.found])  # it goes on for the others where one who waits is cancelled
        lookup.found.result()
        order = [*lookup.turn, *lookup.failed]
        lookup.turn.rotate(-1)
        return order

    def failed(self, host: str, port: int, addresses: list[Address]) -> None:
        """Have the others tried before these, until the host is looked up again."""
        lookup = self._lookups.get((host, port))
        if lookup is not None:
            failed = [*lookup.failed, *(address for address in lookup.turn if address in addresses)]
            lookup.failed = sorted(failed, key=addresses.__contains__)
            lookup.turn = deque(address for address in lookup.turn if address not in addresses)

    def close(self) -> None:
        """Fail those who wait; a thread ends as soon as the resolver lets it."""
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
