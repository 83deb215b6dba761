"""A cache of shards' tables for two minutes, so that processes of a machine read them once."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from urllib.parse import urlsplit

from headrace._util.reads import Check, Reads, Span, Version
from headrace.fetch.stores.writing import part_beside
from headrace.formats.json_values import as_list, as_number, as_text

FRESH_S = 120.0  # if a shard is replaced meanwhile, reading its samples fails
SUFFIX = ".table"
_REMOVED_S = 24 * 3600.0
_FAR = ("http", "https", "s3", "gs", "gcs", "az", "abfs", "abfss", "hf")
_HERE = ("localhost", "127.0.0.1", "::1")
_DIGEST_BYTES = 16
_MOST_BYTES = 16 * 2**20  # for one shard

Kept = dict[tuple[int, int], tuple[Span, bytes]]
"""Cached reads, by start and requested number of bytes."""


def is_far(url: str) -> bool:
    """True if reading the shard again costs more than reading the cache."""
    parts = urlsplit(url)
    return parts.scheme in _FAR and parts.hostname not in _HERE


class KeptReads:
    """Reads of one shard through the cache, all of one version of the object."""

    def __init__(self, reads: Reads, kept: Kept) -> None:
        self._reads, self.kept, self.is_new = reads, kept, False
        self._etag = next((span.etag for span, _ in kept.values()), None)

    async def read(
        self,
        url: str,
        start: int | None = None,
        stop: int | None = None,
        *,
        check: Check | None = None,
        version: Version | None = None,
    ) -> bytes:
        """See `Reads.read`. Not cached."""
        return await self._reads.read(url, start, stop, check=check, version=version)

    async def read_into(
        self, url: str, start: int, target: memoryview, *, etag: str | None = None, rest: object = None
    ) -> Span:
        found = self.kept.get((start, len(target)))
        if found is not None:
            target[: len(found[1])] = found[1]
            return found[0]
        span = await self._reads.read_into(url, start, target, etag=etag or self._etag, rest=rest)
        self._etag = self._etag or span.etag
        self.kept[start, len(target)] = span, bytes(target[: span.stop - span.start])
        self.is_new = True
        return span


def load(place: Path) -> Kept:
    """Return the cached reads in `place`; none if they are too old or damaged."""
    try:
        age_s = time.time() - place.stat().st_mtime
        data = place.read_bytes() if 0 <= age_s < FRESH_S else b""
    except OSError:
        return {}
    body, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    if not data or blake2b(body, digest_size=_DIGEST_BYTES).digest() != digest:
        return {}
    head, _, rest = body.partition(b"\n")
    kept, at = Kept(), 0
    for one in as_list(json.loads(head)) or ():
        start, asked, stop, size, etag = as_list(one) or [None] * 5
        numbers = [number for number in map(as_number, (start, asked, stop, size)) if number is not None]
        if len(numbers) < 4:
            return {}
        begin = numbers[0] if numbers[0] >= 0 else max(0, numbers[3] + numbers[0])
        span = Span(begin, numbers[2], numbers[3], as_text(etag))
        kept[numbers[0], numbers[1]] = span, rest[at : at + span.stop - span.start]
        at += span.stop - span.start
    return kept


def save(place: Path, kept: Kept) -> None:
    """Cache reads of a known version. Errors of the disk are ignored."""
    spans = [span for span, _ in kept.values()]
    is_known = len({span.etag for span in spans}) == 1 and spans[0].etag and not spans[0].etag.startswith("W/")
    if not is_known or sum(span.stop - span.start for span in spans) > _MOST_BYTES:
        return
    head = [[start, asked, span.stop, span.size, span.etag] for (start, asked), (span, _) in kept.items()]
    body = b"".join([json.dumps(head).encode(), b"\n", *(data for _, data in kept.values())])
    with suppress(OSError):
        part = part_beside(place)
        try:
            with part:
                part.write(body + blake2b(body, digest_size=_DIGEST_BYTES).digest())
            Path(part.name).replace(place)
        finally:
            Path(part.name).unlink(missing_ok=True)
        _remove_old(place.parent)


def _remove_old(folder: Path) -> None:
    mark, now = folder / f"removed{SUFFIX}", time.time()
    with suppress(OSError):
        if now - mark.stat().st_mtime < _REMOVED_S / 24:
            return
    mark.touch()
    os.utime(mark)
    for old in folder.glob(f"*{SUFFIX}"):
        with suppress(OSError):
            if now - old.stat().st_mtime > _REMOVED_S:
                old.unlink()
