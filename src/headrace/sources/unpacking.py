"""The content of compressed shards that can be unpacked from their start only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import anyio
import anyio.to_thread

from headrace._util.context import running_charge
from headrace._util.reads import Reads, Version
from headrace.errors import OptionError, masked, not_as_indexed
from headrace.formats.compression import Decompressor

FROM_ITS_START = (
    "can only be unpacked from its start: read it in order, shuffle it by='window', or repack the shards once, by "
    "`headrace pack URL… FOLDER --format parquet`"
)

_KEPT_BYTES = 4 * 2**20
_OPEN_MOST = 64
_JUMPS_MOST = 64
_STEP_BYTES = 2**20
_READ_BYTES, _READ_BYTES_MOST = 2**18, 4 * 2**20


class UnpackedShards:
    """The content of shards, unpacked in order as it is requested. For use on one event loop.

    The last 4 MiB of each shard are kept. A request before them unpacks the shard from its start once more, and both
    places continue from there.
    """

    def __init__(self) -> None:
        self._open: OrderedDict[int, _Unpacking] = OrderedDict()
        self._opened = self._jumps = self._reads = 0

    async def read(
        self, reader: Reads, url: str, version: Version, begin: int, end: int, unpacks: Callable[[], Decompressor]
    ) -> bytes:
        """Return bytes [begin, end) of the content.

        Raises:
            FormatError, LimitError: The shard is damaged.
            ObjectChangedError: The content ends before.
            OptionError: Requests are mostly of random places.
        """
        self._reads += 1
        while True:
            one = self._nearest(url, version, begin) or self._opened_at(url, version, begin, unpacks)
            async with one.lock:
                if one.start <= begin:  # else another request was first
                    return await one.read(reader, begin, end)

    def drop(self, url: str) -> None:
        self._open = OrderedDict((number, one) for number, one in self._open.items() if one.url != url)

    def _nearest(self, url: str, version: Version, begin: int) -> _Unpacking | None:
        found = [
            (one.end, number)
            for number, one in self._open.items()
            if one.start <= begin and (one.url, one.version) == (url, version)
        ]
        if not found:
            return None
        _, number = max(found)
        self._open.move_to_end(number)
        return self._open[number]

    def _opened_at(self, url: str, version: Version, begin: int, unpacks: Callable[[], Decompressor]) -> _Unpacking:
        self._jumps += begin > _STEP_BYTES
        if self._jumps > _JUMPS_MOST and 4 * self._jumps > self._reads:
            raise OptionError(f"samples of {masked(url)} are wanted at random places, and it {FROM_ITS_START}")
        if len(self._open) >= _OPEN_MOST:
            self._open.popitem(last=False)
        self._opened += 1
        one = self._open[self._opened] = _Unpacking(url, version, unpacks())
        return one


class _Unpacking:
    """One shard, unpacked up to `end`. The content from `start` on is kept."""

    def __init__(self, url: str, version: Version, decompressor: Decompressor) -> None:
        self.url, self.version, self._decompressor = url, version, decompressor
        self.lock = anyio.Lock()
        self.start, self._content = 0, bytearray()
        self._at = 0  # bytes of the shard that were read

    @property
    def end(self) -> int:
        return self.start + len(self._content)

    async def read(self, reader: Reads, begin: int, end: int) -> bytes:
        while self.end < end:
            if await anyio.to_thread.run_sync(self._unpack, begin):
                continue
            stop = self._at + min(_READ_BYTES + self._at, _READ_BYTES_MOST)
            stop = stop if self.version.size is None else min(stop, self.version.size)
            charge = running_charge.set(None)  # other samples wait for these bytes, too
            try:
                data = await reader.read(self.url, self._at, stop, version=self.version) if stop > self._at else b""
            finally:
                running_charge.reset(charge)
            if not data:
                self._decompressor.finish()
                raise not_as_indexed(self.url, f"it unpacks to {self.end} bytes, and bytes {begin} to {end} are wanted")
            self._decompressor.feed(data)
            self._at += len(data)
        return bytes(self._content[begin - self.start : end - self.start])

    def _unpack(self, begin: int) -> int:
        """Unpack up to 1 MiB, and drop what is long before `begin`. Return the number of bytes; 0: more must be fed."""
        piece = memoryview(bytearray(_STEP_BYTES))
        count = self._decompressor.read_into(piece)
        self._content += piece[:count]
        gone = min(begin, self.end - _KEPT_BYTES) - self.start
        if gone > 0:
            del self._content[:gone]
            self.start += gone
        return count
