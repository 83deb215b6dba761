"""Stage 2 of 4: reads byte ranges of objects in any store.

    reader.py     the interface: reads, checks of the bytes, the cache
    coalescer.py  merges and splits reads into requests
    attempts.py   one range until it is complete: retries, waits     range_request.py  its state, bytes, time limits
    hosts.py      one host: hedged requests, concurrency and rates   cache.py          the disk cache
    stores/       S3, files, any scheme                              web/              HTTP(S)
    threads.py    blocking calls                                     meter.py          counters

A store answers or raises. The reader checks answers and retries, so faults are handled in one place for all stores.
"""

from __future__ import annotations

from headrace.fetch.meter import Meter
from headrace.fetch.reader import Reader

__all__ = ["Meter", "Reader"]
