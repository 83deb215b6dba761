"""Reads of one object in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace._util.reads import Check, Reads, Span, Version


class OneObject(Reads):
    """One object for all addresses, or objects by address. `most_bytes` limits the size of a request."""

    def __init__(self, data: bytes | Mapping[str, bytes], *, most_bytes: int | None = None) -> None:
        self.data, self.most_bytes, self.reads = data, most_bytes, 0

    async def read(
        self,
        url: str,
        start: int | None = None,
        stop: int | None = None,
        *,
        check: Check | None = None,
        version: Version | None = None,
    ) -> bytes:
        self.reads += 1
        return self._of(url)[start:stop]

    async def read_into(
        self, url: str, start: int, target: memoryview, *, etag: str | None = None, rest: Any = None
    ) -> Span:
        self.reads += 1
        assert self.most_bytes is None or len(target) <= max(self.most_bytes, -start), "memory for what it claims"
        data = self._of(url)
        start = max(0, len(data) + start) if start < 0 else start
        part = data[start : start + len(target)]
        target[: len(part)] = part
        return Span(start, start + len(part), len(data), "v1")

    def _of(self, url: str) -> bytes:
        return self.data[url] if isinstance(self.data, Mapping) else self.data
