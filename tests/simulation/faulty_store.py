"""A store in memory with the faults of real ones, drawn by a seed, and servers that can be too much asked of."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from headrace.errors import ObjectChangedError, ObjectMissingError, ShortReadError, StorageError, ThrottledError
from headrace.fetch import Reader
from headrace.options import Fetch
from headrace.types import Answer, Buffer

PIECE = 16 * 1024
FOR_EVER_S = 1e6
PASSING = (
    "503", "503-after", "500", "refused", "reset", "cut", "cut-reset", "short", "stall", "drip", "hang", "wrong-range",
    "slow", "open-end",
)  # fmt: skip


def body_of(path: str, size: int) -> bytes:
    return random.Random(path).randbytes(size)


class Body:
    """A body that comes in pieces, and may stop coming; it fills memory, too."""

    def __init__(self, store: FaultyStore, data: bytes, fault: str | None, at: int) -> None:
        self._store, self._data, self._fault, self._at = store, data, fault, at
        self.received = 0
        self._done = False
        store.open_bodies += 1

    async def read_into(self, target: memoryview) -> int:
        begin = self.received
        async for piece in self._pieces(begin + len(target)):
            at = self.received - begin
            target[at : at + len(piece)] = piece
            self.received += len(piece)
        return self.received - begin

    async def __aiter__(self) -> AsyncIterator[Buffer]:
        async for piece in self._pieces(len(self._data)):
            self.received += len(piece)
            yield piece

    async def _pieces(self, end: int) -> AsyncIterator[bytes]:
        while self.received < min(end, len(self._data)):
            last = min(self.received + PIECE, end, len(self._data))
            if self._fault is not None and self.received >= self._at:
                await self._fail()
                if self._fault == "short":
                    return
                last = min(last, self.received + 200)
            await asyncio.sleep(0.0005)
            yield self._data[self.received : last]

    async def _fail(self) -> None:
        if self._fault == "cut":
            raise ShortReadError("the connection ended within the body", url="x")
        if self._fault == "cut-reset":
            raise ConnectionResetError("reset")
        await asyncio.sleep({"stall": FOR_EVER_S, "drip": 1.0}.get(str(self._fault), 0.0))

    async def aclose(self) -> None:
        if not self._done:
            self._done = True
            self._store.open_bodies -= 1


class Pieces:
    """A body for readers that take pieces only."""

    def __init__(self, body: Body) -> None:
        self._pieces, self.aclose = aiter(body), body.aclose

    def __aiter__(self) -> AsyncIterator[Buffer]:
        return self._pieces


@dataclass
class FaultyStore:
    """Objects by path; each request meets a fault with the probability `p`.

    Attributes:
        latency: Seconds to the head of a response.
        fails_at: Byte of a body at which its fault occurs. Drawn by default.
        requests: Number of requests by path.
        injected: Faults that occurred.
        violations: Requests before the time that Retry-After requested.
    """

    rng: random.Random
    objects: dict[str, bytes] = field(default_factory=dict)
    p: float = 0.0
    faults: tuple[str, ...] = PASSING
    latency: Callable[[], float] = lambda: 0.02
    fills: bool = True
    fails_at: int | None = None

    def __post_init__(self) -> None:
        self.requests: Counter[str] = Counter()
        self.injected: Counter[str] = Counter()
        self._hold_until: dict[tuple[str, int | None], float] = {}
        self.violations = self.open_bodies = self.under_way = self.most_under_way = 0

    async def get(
        self, path: str, start: int | None = None, stop: int | None = None, *, if_match: str | None = None
    ) -> Answer:
        self.requests[path] += 1
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            return await self._answer(path, start, stop, if_match)
        finally:
            self.under_way -= 1

    def of(self, url: str) -> tuple[FaultyStore, str]:
        """Stand where a reader looks addresses up: every address is a path of this store."""
        return self, url

    async def aclose(self) -> None:
        assert not self.under_way

    async def _answer(self, path: str, start: int | None, stop: int | None, if_match: str | None) -> Answer:
        now = asyncio.get_running_loop().time()
        self.violations += now < self._hold_until.get((path, start), 0.0)
        fault = self.rng.choice(self.faults) if self.rng.random() < self.p else None
        if fault is not None:
            self.injected[fault] += 1
        await asyncio.sleep({"hang": FOR_EVER_S, "slow": 3.0}.get(str(fault), self.latency()))
        if fault == "503-after":
            self._hold_until[path, start] = asyncio.get_running_loop().time() + 2.0
            raise ThrottledError("slow down", url=path, status=503, retry_after_s=2.0)
        if fault == "503":
            raise ThrottledError("slow down", url=path, status=503)
        if fault == "500":
            raise StorageError("an error of its own", url=path, status=500)
        if fault in ("refused", "reset"):
            raise {"refused": ConnectionRefusedError, "reset": ConnectionResetError}[fault]("no")
        data = self.objects.get(path.partition("?")[0])
        if data is None:
            raise ObjectMissingError("no such object", url=path)
        etag = f'"{hash(data)}"' if fault != "changed" else '"another"'
        if if_match is not None and if_match != etag:
            raise ObjectChangedError("the object changed", url=path)
        first = min(start or 0, len(data))
        last = len(data) if stop is None else max(first, min(stop, len(data)))
        open_end = fault == "open-end" and start is None
        at = self.rng.randrange(max(1, last - first)) if self.fails_at is None else self.fails_at
        body = Body(self, data[first:last], None if open_end else fault, at)
        shift = fault == "wrong-range"
        return Answer(
            first + shift,
            None if open_end else last,
            None if open_end else len(data),
            etag,
            body if self.fills else Pieces(body),  # type: ignore[arg-type]
        )


def reader_of(stores: Any, *, seed: int = 0, concurrency: int = 8, options: Fetch | None = None) -> Reader:
    clock = asyncio.get_running_loop().time
    return Reader(options, concurrency=concurrency, clock=clock, rng=random.Random(seed), stores=stores)
