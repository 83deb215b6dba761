"""TCP connections to hosts that have several addresses, of which some may not answer (RFC 8305)."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections import deque

from headrace.fetch.web.lookups import Address

_HEAD_START_S = 0.25  # what RFC 8305 §5 recommends

DESCRIPTORS_SHORT = (errno.EMFILE, errno.ENFILE)


async def dial(addresses: list[Address]) -> tuple[socket.socket, int]:
    """A socket that is connected to the first of `addresses` that answers, and how many come before that one.

    Each is tried when those before it have failed, or have had a quarter of a second; they may still answer first.

    Raises:
        OSError: none can be connected to; the error of the last one.
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
