"""Stage 2 of 4: reads byte ranges of objects in any store.

    reader.py     the interface: reads, checks of the bytes, the cache
    coalescer.py  merges and splits reads into requests
    policy/       attempts, waits, hedged requests, time limits, concurrency
    stores/       S3, files, any scheme                              web/           HTTP(S)
    cache.py cache_folder.py    the disk cache
    threads.py    blocking calls                                     meter.py        counters

A store answers or raises. The reader checks answers and retries, so faults are handled in one place for all stores.
"""

from __future__ import annotations

from headrace.fetch.meter import Meter
from headrace.fetch.reader import Reader

__all__ = ["Meter", "Reader"]
