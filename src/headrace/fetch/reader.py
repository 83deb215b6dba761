"""The interface of the fetch stage: byte ranges of objects in any store."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Self

import numpy as np

from headrace._util import check
from headrace._util.context import Charges, running_charge
from headrace._util.reads import Check, Span, Version
from headrace.errors import (
    BadResponseError,
    ChecksumError,
    LoaderClosedError,
    ObjectChangedError,
    ObjectMissingError,
    OptionError,
    ShortReadError,
    StorageError,
    not_as_known,
    not_as_listed,
)
from headrace.fetch.attempts import Attempts
from headrace.fetch.coalescer import Coalescer, paid
from headrace.fetch.meter import Meter
from headrace.fetch.range_request import RangeRequest
from headrace.fetch.stores.addresses import Stores, gives_ends, host_of, is_local, split
from headrace.options import Fetch
from headrace.types import Listed, Lists, Pins

if TYPE_CHECKING:
    from headrace.fetch.cache import Cache, Cached
    from headrace.fetch.web.connection import Rest


_ANY_VERSION = Version()
_NO_ENDS = (400, 416, 501)  # statuses of servers that support ranges, but not suffix ranges


class Reader:
    """Byte ranges of objects in any store: exactly the stored bytes, or one clear error.

    At most `concurrency` requests run at once, and fewer to a host that throttles. An answer is accepted only if it is
    complete, is the requested range, and has the same object version as the range's other answers. A body that breaks
    off is continued at the byte reached. Without a `check`, bytes that a store or proxy corrupted and labelled as
    correct are not detected.

    A reader belongs to one event loop. Cancelling a read releases its slot and its connection.

    Args:
        storage_options: Settings of the stores: obstore's names for S3, GCS, Azure and HTTP, otherwise fsspec's.
        data_set: Identifies the data set in the cache.
        rng: Source of the random waits between attempts.
    """

    def __init__(
        self,
        options: Fetch | None = None,
        *,
        concurrency: int,
        storage_options: Mapping[str, object] | None = None,
        data_set: str = "",
        meter: Meter | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        stores: Stores | None = None,
    ) -> None:
        check.whole("concurrency", concurrency, 1)
        self.options = options or Fetch()
        self.storage_options = dict(storage_options or {})
        self.meter = meter or Meter()
        self._stores = stores or Stores(self.options, storage_options)
        self._attempts = Attempts(self.options, concurrency, self.meter, clock, rng or random.Random())
        self._gather = Coalescer(self._fetch, self.options, self.meter)
        self._clock = clock
        self._cache = _cache(self.options, storage_options, data_set)
        self._without_ends: set[str | int] = set()  # hosts that support ranges, but not suffix ranges
        self._closed = False

    async def read(
        self,
        url: str,
        start: int | None = None,
        stop: int | None = None,
        *,
        check: Check | None = None,
        version: Version | None = None,
    ) -> bytes:
        """Return bytes [start, stop) of the object at `url`, fewer if it ends earlier.

        Args:
            check: Returns False for wrong bytes, which are requested once more.
            version: The required version of the object.

        Raises:
            ObjectChangedError: the object has another version.
            ChecksumError: the bytes were wrong both times.
            StorageError: the read failed after all attempts.
            OptionError: the range or the address is invalid.
        """
        if (start or 0) < 0 or (stop is not None and stop < (start or 0)):
            raise OptionError(f"start={start}, stop={stop} is no byte range: 0 <= start <= stop must hold")
        if stop is not None and stop == (start or 0):
            return b""
        version = version or _ANY_VERSION
        cache = self._cache_for(url)
        charge = running_charge.get()
        if cache is None:
            return await self._read(url, start, stop, charge, check, version)
        async with self._kept(cache, url, start, stop, version.etag, check) as found:
            if found is None:
                return await self._read(url, start, stop, charge, check, version, cache)
        await paid(charge, len(found.data))
        return bytes(found.data)

    async def _read(
        self,
        url: str,
        start: int | None,
        stop: int | None,
        charge: Charges | None,
        check: Check | None,
        version: Version,
        cache: Cache | None = None,
    ) -> bytes:
        for _ in range(1 if check is None else 2):
            try:
                data, span = await self._gather.read(url, start, stop, charge, version.etag)
            except ObjectChangedError as error:
                if version.known_by == "indexed":
                    raise
                raise not_as_listed(url, error.reason) from error
            if span is not None and version.size not in (None, span.size):
                raise not_as_known(url, f"it had {version.size} bytes then, and has {span.size}", version.known_by)
            if check is None or check(data):
                if cache is not None and span is not None:
                    await cache.put(url, start, stop, span, data)
                return data
            charge = None
        raise _wrong_bytes(url, start, stop)

    async def read_each(self, ranges: Sequence[tuple[str, Version, tuple[int, int]]]) -> list[bytes]:
        """Return ranges of local files, by one call in a thread. Consecutive ranges of a file open it once.

        Nothing is repeated. After an error `read` of each range repeats it, or raises the final error.

        Raises:
            StorageError, OSError, TimeoutError: a file has another version, or lacks some of the bytes.
        """
        from headrace.fetch.stores.local import LocalStore

        self._check_open()
        if not ranges:
            return []
        store = self._stores.of(ranges[0][0])[0]
        assert isinstance(store, LocalStore)
        await paid(running_charge.get(), sum(stop - start for _, _, (start, stop) in ranges))
        self.meter.begin(self._clock())
        try:
            async with asyncio.timeout(self.options.total_timeout_s):
                read = await store.get_each(
                    [(self._stores.of(url)[1], known.etag, span) for url, known, span in ranges]
                )
        finally:
            self.meter.end(self._clock())
        for (url, version, (start, stop)), (size, data) in zip(ranges, read, strict=True):
            self.meter.bytes += len(data)
            if len(data) < stop - start or version.size not in (None, size):
                raise ShortReadError(f"the file has {size} bytes; {start} to {stop} are wanted", url=url)
        return [data for _, data in read]

    async def read_into(
        self,
        url: str,
        start: int,
        target: memoryview,
        *,
        etag: str | None = None,
        check: Check | None = None,
        rest: Rest | None = None,
    ) -> Span:
        """Fill `target` with the object's bytes from `start`. Return the span, which may be shorter.

        A `start` at or beyond the end gives an empty span at the end. A negative `start` counts from the end, by one
        request to most stores; of a shorter object all bytes are read. After an error the content of `target` is
        undefined.

        Args:
            etag: The required version, from an earlier span of the same object.
            check: Returns False for wrong bytes, which are requested once more.
            rest: Shared by all reads of a caller that reads the object in order. If a server sends whole objects only,
                each read continues where the one before ended; the span then has `in_order`.

        Raises:
            ObjectChangedError: the object has another version than `etag`, or changed during the read.
            ChecksumError: the bytes were wrong both times.
            StorageError: the read failed after all attempts.
        """
        if not target.nbytes or -start > target.nbytes:
            raise OptionError(f"start={start} and a target of {target.nbytes} bytes: both must be in range")
        stop = start + target.nbytes if start >= 0 else None
        cache = self._cache_for(url)
        if cache is None:
            return await self._read_into(url, start, stop, target, etag, check, rest)
        async with self._kept(cache, url, start, stop, etag, check) as found:
            if found is None:
                return await self._read_into(url, start, stop, target, etag, check, rest, cache)
        np.frombuffer(target, np.uint8)[: len(found.data)] = np.frombuffer(found.data, np.uint8)
        return found.span

    async def _read_into(
        self,
        url: str,
        start: int,
        stop: int | None,
        target: memoryview,
        etag: str | None,
        check: Check | None,
        rest: Rest | None,
        cache: Cache | None = None,
    ) -> Span:
        for _ in range(1 if check is None else 2):
            request = RangeRequest(url, start, stop, target=target, etag=etag, rest=rest)
            if start < 0 and (begins := await self._fetch_end(request)) is not None:
                if not begins.size:
                    return begins
                start, target = max(0, begins.size + start), target[: min(begins.size, -start)]
                return await self.read_into(url, start, target, etag=etag or begins.etag, check=check, rest=rest)
            if start >= 0:
                await self._fetch(request)
            if check is None or check(request.data()):
                span = request.span()
                if cache is not None:
                    await cache.put(url, start, stop, span, request.data())
                return span
        raise _wrong_bytes(url, start, stop)

    async def listing(self, url: str, *, levels: int | None = None) -> AsyncIterator[Sequence[Listed]]:
        """List the objects in the folder at `url`, which ends with a slash. See `Lists.listing`.

        Raises:
            OptionError: the store cannot list objects.
            StorageError: listing failed.
        """
        store, prefix = self._stores.of(url)
        if not isinstance(store, Lists):
            raise OptionError.at(
                url,
                f"cannot be listed: {split(url)[0]}: does not list its objects; give the addresses as a "
                "list, as a pattern in braces like 'a-{000..012}.tar', or as the rows of a table (hr.table)",
            )
        scheme = split(url)[0]
        base = "" if scheme == "file" else url[: len(url) - len(prefix)]  # a file's path is its address
        async for page in store.listing(prefix, levels=levels):
            yield [Listed(base + path, size, etag) for path, size, etag in page] if base else page

    async def pinned(self, url: str) -> str | None:
        """Return the folder's address at its current revision; None without revisions or folder.

        Raises:
            StorageError: the store failed.
        """
        store, prefix = self._stores.of(url)
        if not isinstance(store, Pins):
            return None
        try:
            return url[: len(url) - len(prefix)] + await store.pinned(prefix)
        except ObjectMissingError:
            return None

    async def aclose(self) -> None:
        """Close connections and threads. No read may be running. May be called repeatedly."""
        self._closed = True
        await self._attempts.aclose()
        if self._cache is not None:
            await self._cache.aclose()
        await self._stores.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @asynccontextmanager
    async def _kept(
        self, cache: Cache, url: str, start: int | None, stop: int | None, etag: str | None, check: Check | None
    ) -> AsyncGenerator[Cached | None, None]:
        """Yield the cached read that passes `check`. None: the caller reads, and others may wait for that."""
        found, is_begun = await cache.get_or_begin(url, start, stop, etag)
        if found is not None and check is not None and not check(found.data):
            found = None
        self.meter.cached += found is not None
        try:
            yield found
        finally:
            if is_begun:
                cache.end(url, start, stop)

    def _fetch(self, request: RangeRequest) -> Awaitable[None]:
        store, path = self._stores.of(request.url)
        return self._attempts.fetch(store, path, request)

    async def _fetch_end(self, request: RangeRequest) -> Span | None:
        """Fetch the last bytes by a suffix range. Return None, or size and version if refused."""
        store = self._stores.of(request.url)[0]
        if gives_ends(store) and host_of(store) not in self._without_ends:
            try:
                await self._fetch(request)
                span = request.span()
                if span.start < span.stop:
                    return None
                self._without_ends |= {host_of(store)} if span.size else set()
                return span
            except StorageError as error:
                if not isinstance(error, BadResponseError) and error.status not in _NO_ENDS:
                    raise
                self._without_ends.add(host_of(store))
        first = RangeRequest(request.url, 0, 1, target=memoryview(bytearray(1)), etag=request.etag)
        await self._fetch(first)
        return first.span()

    def _cache_for(self, url: str) -> Cache | None:
        self._check_open()
        return None if self._cache is None or is_local(self._stores.of(url)[0]) else self._cache

    def _check_open(self) -> None:
        if self._closed:
            raise LoaderClosedError("this reader was closed; make a new one")


def _cache(options: Fetch, storage_options: Mapping[str, object] | None, data_set: str) -> Cache | None:
    if options.cache_dir is None:
        return None
    from headrace.fetch.cache import Cache

    return Cache(options.cache_dir, options.cache_bytes, storage_options, data_set=data_set)


def _wrong_bytes(url: str, start: int | None, stop: int | None) -> ChecksumError:
    return ChecksumError(
        "the bytes are not those that the index was made of", url=url, start=start, stop=stop, attempts=2
    )
