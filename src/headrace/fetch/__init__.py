"""Stage 2 of 4: takes addresses and byte ranges, gives bytes.

    reader.py         one range: requests, checks, time-outs, further attempts
    retry.py          which failures are worth another attempt, and when (pure)
    meter.py          what the reader counts
    stores.py         which store an address belongs to
    object_stores.py  S3, GCS, Azure and HTTP, by obstore
    local.py          files           memory.py  a dictionary           fsspec_store.py  every other scheme

A store answers or raises, the reader checks and asks again: what a fault does is decided once, for all stores.
"""

from __future__ import annotations

from headrace.fetch.meter import Meter
from headrace.fetch.reader import Reader
from headrace.options import FetchOptions
from headrace.types import running_reader

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
        return await running.read(url, start, stop)
    async with Reader(FetchOptions(), concurrency=1) as reader:
        return await reader.read(url, start, stop)
