"""Decompression of shards into leases."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

import anyio.to_thread

from headrace._util.shared_memory import Lease
from headrace.errors import FormatError
from headrace.readers.protocol import Flow

_BLOCK = 512

UNPACKED_MOST = 2**40
"""Maximum bytes of a decompressed shard, reserved in the epoch's address space."""


class Unpacks(Protocol):
    """A decompressor, see `headrace.formats.compression.Decompressor`."""

    is_past_end: bool

    def feed(self, data: memoryview) -> None: ...

    def read_into(self, target: memoryview) -> int: ...

    def finish(self) -> None: ...


async def unpacked(
    ranges: AsyncGenerator[tuple[int, Lease, bool], None], unpacks: Unpacks, flow: Flow, size: int, ordinal: int
) -> AsyncGenerator[tuple[int, Lease, bool], None]:
    """Yield (offset, bytes, True if they are the last) of a compressed shard's content.

    Threads decompress without the GIL. The last lease may be empty. The shard counts as active only during
    decompression: a compressed range, or a lease that is half full, makes no progress alone, so the memory it waits for
    must be admitted.

    Args:
        size: Bytes of each lease, a multiple of 512.
        ordinal: Number of the shard in the order of the epoch.
    """
    offset, filled = 0, 0
    target: Lease | None = None
    worker = object()

    async def room() -> Lease:
        # before later reads of this shard, which are useless without memory for their content
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
                            break  # more input is needed
                        full, target = target, None
                        yield offset, full, False
                        offset += size
                finally:
                    packed.release()
                flow.pause(worker)
        unpacks.finish()
    except FormatError:
        whole = filled // _BLOCK * _BLOCK
        if target is not None and whole:  # emit the content before the damage
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
