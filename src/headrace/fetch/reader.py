"""One reader for all stores: bounded requests, checked answers, time-outs, and further attempts."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import numpy as np

from headrace.errors import (
    BadResponseError,
    LoaderClosedError,
    ObjectChangedError,
    OptionError,
    ReadTimeoutError,
    ShortReadError,
    StorageError,
)
from headrace.fetch.meter import Meter
from headrace.fetch.retry import RetryPolicy
from headrace.fetch.stores import Stores
from headrace.options import FetchOptions
from headrace.types import Answer, Buffer, Span, Store


class Reader:
    """Byte ranges of objects in any store, each exactly what the store holds, or one clear error.

    At most `concurrency` requests are under way at once. An answer counts only when it is the range that was asked for,
    of the same version of the object as the range's other answers, and complete; a body that is cut is continued at the
    byte reached. Not seen without checksums: bytes that a store or proxy changed and labelled as right.

    A reader belongs to one event loop. Cancelling a read gives its slot and its connection back.

    Args:
        options: time-outs and attempts.
        concurrency: requests under way at once.
        storage_options: settings for the stores; obstore's names for S3, GCS, Azure and HTTP, fsspec's otherwise.
        meter: where to count.
        clock: monotonic seconds; decides when a range's time is over.
        rng: draws the waits between attempts.
    """

    def __init__(
        self,
        options: FetchOptions | None = None,
        *,
        concurrency: int,
        storage_options: Mapping[str, Any] | None = None,
        meter: Meter | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        if concurrency < 1:
            raise OptionError(f"concurrency={concurrency} must be 1 or more")
        self.options = options or FetchOptions()
        self.meter = meter or Meter()
        self._policy = RetryPolicy.of(self.options)
        self._clock = clock
        self._rng = rng or random.Random()
        self._slots = asyncio.Semaphore(concurrency)
        self._stores = Stores(self.options, storage_options)
        self._closed = False

    async def read(self, url: str, start: int | None = None, stop: int | None = None) -> bytes:
        """The bytes [start, stop) of the object at `url`, fewer where it ends before; all of it without a range.

        Raises:
            StorageError: the read failed for good.
            OptionError: the range or the address cannot be asked for.
        """
        if (start or 0) < 0 or (stop is not None and stop < (start or 0)):
            raise OptionError(f"start={start}, stop={stop} is no byte range: 0 <= start <= stop must hold")
        if stop is not None and stop == (start or 0):
            return b""
        pieces: list[Buffer] = []
        await self._fetch(_Goal(url, start, stop, None), pieces.append)
        return bytes(pieces[0]) if len(pieces) == 1 else b"".join(pieces)

    async def read_into(self, url: str, start: int, target: memoryview, *, etag: str | None = None) -> Span:
        """Fill `target` with the object's bytes from `start` on, fewer where it ends before; the span says which.

        A `start` at or beyond the end gives an empty span at the end. What `target` holds after an error is undefined.

        Args:
            etag: the version the bytes must be of; of an earlier span of the same object.

        Raises:
            ObjectChangedError: the object is of another version than `etag`, or changed during the read.
            StorageError: the read failed for good.
        """
        if start < 0 or not target.nbytes:
            raise OptionError(f"start={start} and a target of {target.nbytes} bytes: both must be in range")
        # numpy copies without the GIL; a slice assignment to the memoryview would hold it.
        room = np.frombuffer(target, np.uint8)
        at = 0

        def take(piece: Buffer) -> None:
            nonlocal at
            source = np.frombuffer(piece, np.uint8)
            np.copyto(room[at : at + len(source)], source)
            at += len(source)

        return await self._fetch(_Goal(url, start, start + target.nbytes, etag), take)

    async def aclose(self) -> None:
        """Let connections and threads go; no read may be under way. May be called again."""
        self._closed = True
        await self._stores.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _fetch(self, goal: _Goal, take: Callable[[Buffer], None]) -> Span:
        if self._closed:
            raise LoaderClosedError("this reader was closed; make a new one")
        store, path = self._stores.of(goal.url)
        clock, meter = self._clock, self.meter
        began: float | None = None
        attempt = 0
        while True:
            attempt += 1
            async with self._slots:
                now = clock()
                if began is None:
                    began = now
                meter.begin(now)
                try:
                    await self._request(store, path, goal, take, began)
                    return goal.span()
                except (StorageError, OSError) as error:
                    failure = error
                finally:
                    meter.end(clock())
            try:
                left_s = began + goal.budget_s(self.options) - clock()
                wait_s = self._policy.wait_s(failure, attempt, left_s, self._rng)
                if wait_s is None:
                    meter.errors += 1
                    raise _final(failure, goal, attempt) from failure
            finally:
                # Its traceback holds this frame, and so the target: kept here it would be a cycle.
                del failure
            meter.retries += 1
            await asyncio.sleep(wait_s)

    async def _request(
        self, store: Store, path: str, goal: _Goal, take: Callable[[Buffer], None], began: float
    ) -> None:
        """One request: what is still missing of `goal` goes to `take`."""
        options, now = self.options, asyncio.get_running_loop().time
        wait_s = options.first_byte_timeout_s
        limit = asyncio.timeout(min(wait_s, began + goal.budget_s(options) - self._clock()))
        try:
            async with limit:
                answer = await store.get(path, goal.asked_start, goal.asked_stop, if_match=goal.if_match)
                chunks = answer.chunks
                try:
                    goal.accept(answer)
                    ends = now() + began + goal.budget_s(options) - self._clock()
                    wait_s = options.stall_timeout_s
                    async for piece in chunks:
                        size = len(piece)
                        goal.check_room(size)
                        take(piece)
                        goal.position += size
                        self.meter.bytes += size
                        if goal.position != goal.asked_stop:  # a timer costs as much as the rest of this loop
                            limit.reschedule(min(now() + wait_s, ends))
                finally:
                    aclose = getattr(chunks, "aclose", None)
                    if aclose is not None:
                        await aclose()
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise ReadTimeoutError(
                f"no byte for {wait_s:g} seconds, or not all within {goal.budget_s(options):g}",
                url=goal.url,
            ) from error
        goal.check_end()


class _Goal:
    """One range on its way: what was asked for, what is known of the object, and how far it got."""

    __slots__ = ("asked_stop", "etag", "position", "ranged", "size", "start", "stop", "url")

    def __init__(self, url: str, start: int | None, stop: int | None, etag: str | None) -> None:
        self.url, self.start, self.stop, self.etag = url, start, stop, etag
        self.ranged = start is not None or stop is not None
        self.position = start or 0
        self.asked_stop = stop
        self.size: int | None = None

    @property
    def asked_start(self) -> int | None:
        return self.position if self.ranged or self.position else None

    @property
    def if_match(self) -> str | None:
        # RFC 9110 §13.1.1: a weak validator never matches; the answer's ETag is compared in `accept` all the same.
        return None if self.etag is None or self.etag.startswith("W/") else self.etag

    def budget_s(self, options: FetchOptions) -> float:
        """Seconds for all attempts; what is longer than one range gets as much more time."""
        ranges = 1.0
        if self.asked_stop is not None:
            ranges = max(1.0, (self.asked_stop - (self.start or 0)) / options.range_bytes)
        return options.total_timeout_s * ranges

    def accept(self, answer: Answer) -> None:
        """Take up what the answer says of the object, if it is the one that was asked for."""
        if self.etag is not None and answer.etag is not None and answer.etag != self.etag:
            raise ObjectChangedError(f"the object changed: its ETag was {self.etag}, now {answer.etag}", url=self.url)
        if self.size is not None and answer.size != self.size:
            raise ObjectChangedError(f"the object changed: its size was {self.size}, now {answer.size}", url=self.url)
        first = min(self.position, answer.size)
        last = answer.size if self.asked_stop is None else max(first, min(self.asked_stop, answer.size))
        if (answer.start, answer.stop) != (first, last):
            raise BadResponseError(
                f"asked for bytes {first} to {last} of {answer.size}, the answer is {answer.start} to {answer.stop}",
                url=self.url,
            )
        self.etag = self.etag or answer.etag
        self.size, self.position, self.asked_stop = answer.size, first, last

    def check_room(self, size: int) -> None:
        if self.asked_stop is not None and self.position + size > self.asked_stop:
            raise BadResponseError(
                f"the body is longer than bytes {self.start or 0} to {self.asked_stop}", url=self.url
            )

    def check_end(self) -> None:
        if self.asked_stop is not None and self.position < self.asked_stop:
            raise ShortReadError(f"the body ended at byte {self.position}, not {self.asked_stop}", url=self.url)

    def span(self) -> Span:
        size = self.size or 0
        return Span(min(self.start or 0, size), self.position, size, self.etag)


def _final(error: StorageError | OSError, goal: _Goal, attempts: int) -> StorageError:
    """The error for the caller: of the same kind, and with the range and the number of attempts."""
    kind: type[StorageError] = StorageError
    status = None
    if isinstance(error, StorageError):
        kind = next(c for c in type(error).__mro__ if c.__module__ == StorageError.__module__)
        # Only the words: address, range and attempts are said anew.
        reason, status = str(error).split(f" ({error.url}", 1)[0], error.status
    elif isinstance(error, TimeoutError):
        kind, reason = ReadTimeoutError, str(error) or "no answer in time"
    else:
        reason = f"{type(error).__name__}: {error}"
    return kind(reason, url=goal.url, start=goal.start, stop=goal.stop, attempts=attempts, status=status)
