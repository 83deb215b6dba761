"""TCP connections to hosts that have several addresses, of which some may not answer (RFC 8305)."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections import deque
from collections.abc import Callable
from itertools import takewhile

from headrace.fetch.lookups import Address

_HEAD_START_S = 0.25  # what RFC 8305 §5 recommends

DESCRIPTORS_SHORT = (errno.EMFILE, errno.ENFILE)


async def dial(addresses: list[Address], failed: Callable[[Address], None]) -> tuple[socket.socket, Address]:
    """A socket that is connected to the first of `addresses` that answers, and that address.

    Each is tried when those before it have failed, or have had a quarter of a second; they may still answer first.

    Args:
        failed: called with each address that fails or was overtaken.

    Raises:
        OSError: none can be connected to; the error of the last one.
    """
    waiting = deque(addresses)
    attempts: dict[asyncio.Task[socket.socket], Address] = {}  # in the order in which they began
    try:
        while True:
            if waiting:
                address = waiting.popleft()
                attempts[asyncio.create_task(_connect(address))] = address
            done, _ = await asyncio.wait(
                attempts, timeout=_HEAD_START_S if waiting else None, return_when=asyncio.FIRST_COMPLETED
            )
            for attempt in done:
                error = attempt.exception()
                if error is None:
                    for slower in takewhile(lambda other: other is not attempt, attempts):
                        failed(attempts[slower])
                    return attempt.result(), attempts.pop(attempt)
                if isinstance(error, OSError) and error.errno in DESCRIPTORS_SHORT:
                    raise error
                failed(attempts.pop(attempt))
                if not attempts and not waiting:
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
