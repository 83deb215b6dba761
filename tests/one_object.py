"""Reads of one object that lies in memory."""

from __future__ import annotations

from typing import Any

from headrace._util.reads import Check, Reads, Span, Version


class OneObject(Reads):
    """What a format's index is made from, whatever the address.

    Args:
        data: the object.
        most_bytes: more memory than that may not be asked for at once, where it is given.

    Attributes:
        reads: how many there were.
    """

    def __init__(self, data: bytes, *, most_bytes: int | None = None) -> None:
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
        return self.data[start:stop]

    async def read_into(
        self, url: str, start: int, target: memoryview, *, etag: str | None = None, rest: Any = None
    ) -> Span:
        self.reads += 1
        assert self.most_bytes is None or len(target) <= max(self.most_bytes, -start), "memory for what it claims"
        start = max(0, len(self.data) + start) if start < 0 else start
        part = self.data[start : start + len(target)]
        target[: len(part)] = part
        return Span(start, start + len(part), len(self.data), "v1")
