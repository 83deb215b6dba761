"""Stage 2 of 4: takes addresses and byte ranges, gives bytes.

    reader.py         the face: reads, checks of their bytes, the cache
    gather.py         reads become requests of a good length      ranges.py   which ones (pure)
    attempts.py       one range until it is all there             goal.py     what is known of it, and its bytes
    host.py           one host: second requests, and all below    meter.py    what is counted
      turns.py level.py   how many requests at once, and per second
      retry.py            which failures are worth another attempt, when, and how many in all
      hedge.py            when a first byte is late
    watch.py          time limits of all requests, by one timer
    cache.py cache_folder.py    what was read before               checksums.py   whether it is what it should be

    stores.py registry.py       which store an address belongs to
    web.py            HTTP(S) by our own client: connections.py connection.py body.py http1.py statuses.py
    s3.py             S3: addresses signed by obstore, carried by web.py
    object_stores.py  GCS and Azure, by obstore
    local.py          files           memory.py  a dictionary           fsspec_store.py  every other scheme
    hf.py             Hugging Face's hub                                pipe.py   output of shell commands
    threads.py        blocking calls                                    masking.py   no secrets in texts

    shards.py keys.py samples of what was read

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
