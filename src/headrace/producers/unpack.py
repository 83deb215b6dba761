"""Compressed shards: what they unpack to, in leases, as if it had been read like this."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

import anyio.to_thread

from headrace.errors import FormatError
from headrace.memory import Lease
from headrace.producer import Flow

_BLOCK = 512

UNPACKED_MOST = 2**40
"""Bytes that one shard may unpack to: so much room it is given in the epoch's address space."""


class Unpacks(Protocol):
    """Decompresses successive pieces; see `headrace.formats.compression.decompressor.Decompressor`."""

    is_past_end: bool

    def feed(self, data: memoryview) -> None: ...

    def read_into(self, target: memoryview) -> int: ...

    def finish(self) -> None: ...


async def unpacked(
    ranges: AsyncGenerator[tuple[int, Lease, bool], None], unpacks: Unpacks, flow: Flow, size: int, ordinal: int
) -> AsyncGenerator[tuple[int, Lease, bool], None]:
    """(offset, the bytes, whether they are the last) of what ranges of a compressed shard unpack to.

    It is unpacked in threads, without the GIL. The end is told by one more lease, which may be empty. Only while it is
    being unpacked does the shard count as getting on: a packed range that has come, and a lease that is half full,
    bring nothing by themselves, and what they wait for must be let in.

    Args:
        size: bytes of each lease, a multiple of 512.
        ordinal: the shard's number in the order of the epoch.
    """
    offset, filled = 0, 0
    target: Lease | None = None
    worker = object()

    async def room() -> Lease:
        # before what is read ahead of this shard: that is of no use while there is no room for what it becomes
        flow.pause(worker)
        lease = await flow.lease(size, (ordinal, -1))
        flow.go_on(worker)
        flow.loaded(lease)
        return lease

    try:
        async with aclosing(ranges) as each:
            async for _, packed, _ in each:
                flow.go_on(worker)
                flow.loaded(packed)
                try:
                    unpacks.feed(packed.view)
                    while True:
                        if target is None:
                            target, filled = await room(), 0
                        filled += await anyio.to_thread.run_sync(unpacks.read_into, target.view[filled:])
                        if filled < size:
                            break  # it wants more input
                        full, target = target, None
                        yield offset, full, False
                        offset += size
                finally:
                    packed.release()
                flow.pause(worker)
        unpacks.finish()
    except FormatError:
        whole = filled // _BLOCK * _BLOCK
        if target is not None and whole:  # what lies before the damage comes first
            flow.trim(target, whole)
            before, target = target, None
            yield offset, before, False
        raise
    else:
        if target is None:
            target, filled = await room(), 0
        flow.trim(target, filled)
        last, target = target, None
        yield offset, last, True
    finally:
        flow.pause(worker)
        if target is not None:
            target.release()
