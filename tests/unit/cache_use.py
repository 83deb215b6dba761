"""What tests of the cache do with it."""

from __future__ import annotations

from pathlib import Path

from headrace._util.reads import Span
from headrace.fetch.cache import Cache
from headrace.types import Buffer

URL = "https://host/shard.tar"
BLOCK = 4096
LIMIT = 100 * BLOCK
LARGE = 2**30


async def keep(cache: Cache, url: str, data: Buffer, start: int | None = None, etag: str | None = None) -> None:
    await cache.put(url, start, None, Span(start or 0, (start or 0) + len(data), 10**6, etag), data)
    await cache.flush()


async def has(cache: Cache, url: str, etag: str | None = None) -> bool:
    return await cache.get(url, None, None, etag) is not None


def entries(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*/*.range"))


def blocks(folder: Path) -> int:
    return sum(-(-path.stat().st_size // BLOCK) for path in entries(folder))
