"""Stage 2 of 4: takes addresses and byte ranges, gives bytes.

    reader.py     the face: reads, checks of their bytes, the cache
    coalescer.py  reads become requests of a good length             ranges.py      which ones (pure)
    policy/       attempts, waits, second requests, time limits, how many at once
    stores/       S3, files, any scheme                              web/           HTTP(S)
    cache.py cache_folder.py    what was read before                 checksums.py   whether it is what it should be
    threads.py    blocking calls                                     meter.py held.py    what is counted

A store answers or raises, the reader checks and asks again: what a fault does is decided once, for all stores.
"""

from __future__ import annotations

from headrace.fetch.held import unwatched
from headrace.fetch.meter import Meter
from headrace.fetch.reader import Reader
from headrace.options import FetchOptions
from headrace.running import running_reader

__all__ = ["Meter", "Reader", "read"]


async def read(url: str, start: int | None = None, stop: int | None = None) -> bytes:
    """The bytes [start, stop) of the object at `url`; all of it without a range.

    Inside a loader the read goes through the loader's fetch stage and counts there; elsewhere it has connections of
    its own, which end with it: for many reads outside a loader keep one `Reader`.

    Raises:
        StorageError: the read failed for good; the message names the address, the range and the attempts.
        OptionError: no store knows the address's scheme.
    """
    running = running_reader.get()
    if running is not None:
        return await unwatched(running.read(url, start, stop))
    async with Reader(FetchOptions(), concurrency=1) as reader:
        return await reader.read(url, start, stop)
