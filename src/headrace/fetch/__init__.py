"""Stage 2 of 4: takes addresses and byte ranges, gives bytes.

    reader.py     the face: reads, checks of their bytes, the cache
    coalescer.py  reads become requests of a good length             ranges.py      which ones (pure)
    policy/       attempts, waits, second requests, time limits, how many at once
    stores/       S3, files, any scheme                              web/           HTTP(S)
    cache.py cache_folder.py    what was read before
    threads.py    blocking calls                                     meter.py held.py    what is counted

A store answers or raises, the reader checks and asks again: what a fault does is decided once, for all stores.
"""

from __future__ import annotations

from headrace.fetch.meter import Meter
from headrace.fetch.reader import Reader

__all__ = ["Meter", "Reader"]
