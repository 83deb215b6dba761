"""Reads the end of a file and other metadata outside of its columns."""

from __future__ import annotations

from collections.abc import Iterable

from headrace._util.reads import Reads
from headrace.errors import LimitError
from headrace.formats.format import ShardEntry
from headrace.formats.limits import Limits
from headrace.formats.parquet.footer import MAGIC, Place
from headrace.formats.pinned_object import PinnedObject

END_BYTES = 8  # the footer's length and the magic
TAIL_BYTES = 64 * 1024
_ENCRYPTED = b"PARE"
_GAP_BYTES = 64 * 1024  # largest gap within one read


class FileEnd:
    """The last bytes of a file, and earlier parts once they were read."""

    def __init__(self, shard: PinnedObject, tail: bytes) -> None:
        self.shard = shard
        self._parts = [(shard.size - len(tail), tail)]

    @staticmethod
    async def of(reads: Reads, entry: ShardEntry) -> FileEnd:
        """Read the last bytes of a file, with all of its footer or a part."""
        shard = PinnedObject(reads, entry.url)
        listed = None if entry.version is None else entry.version.size
        start = -TAIL_BYTES if listed is None else max(0, listed - TAIL_BYTES)
        tail = await shard.read(start, TAIL_BYTES if listed is None else max(1, listed - start))
        if listed not in (None, shard.size):  # a later check raises the error
            tail = await shard.read(-TAIL_BYTES, TAIL_BYTES)
        return FileEnd(shard, bytes(tail))

    async def footer(self, limits: Limits) -> bytes:
        """Return the footer. Read its missing part."""
        ((start, tail),) = self._parts
        size = self.shard.size
        is_short = size < len(MAGIC) + END_BYTES
        if is_short or (not start and tail[: len(MAGIC)] not in (MAGIC, _ENCRYPTED)):
            raise ValueError(f"it has {size} bytes, which do not begin as Parquet does")
        length = int.from_bytes(tail[-END_BYTES:-4], "little")
        if tail[-4:] == _ENCRYPTED:
            raise ValueError("its footer is encrypted, and headrace has no keys: decrypt it first")
        if tail[-4:] != MAGIC:
            raise ValueError("it does not end as Parquet does: it is cut off, or was not written to its end")
        if length + END_BYTES + len(MAGIC) > size:
            raise ValueError(f"its footer would have {length} bytes, and all of it has {size}")
        if length > limits.unpacked_free_bytes:
            raise LimitError(f"its footer has {length} bytes, over the limit of {limits.unpacked_free_bytes}")
        missing = length + END_BYTES - len(tail)
        if missing > 0:
            self._parts = [(start - missing, bytes(await self.shard.read(start - missing, missing)) + tail)]
        return self.at(size - END_BYTES - length, length)

    async def read(self, places: Iterable[Place]) -> None:
        """Read the bytes at some places. Adjacent places are read together.

        Raises:
            ValueError, StorageError: The file is shorter than before, or could not be read.
        """
        missing: list[Place] = []
        for start, nbytes in sorted(place for place in places if self._part_of(*place) is None):
            if missing and start - sum(missing[-1]) <= _GAP_BYTES:
                first, count = missing.pop()
                missing.append((first, max(start + nbytes, first + count) - first))
            else:
                missing.append((start, nbytes))
        bodies = await self.shard.read_each([(start, start + nbytes) for start, nbytes in missing])
        self._parts += [(start, bytes(body)) for (start, _), body in zip(missing, bodies, strict=True)]

    def at(self, start: int, nbytes: int) -> bytes:
        part = self._part_of(start, nbytes)
        assert part is not None, "it was read"
        first, data = part
        return data[start - first : start - first + nbytes]

    def _part_of(self, start: int, nbytes: int) -> tuple[int, bytes] | None:
        stop = start + nbytes
        return next(((at, data) for at, data in self._parts if at <= start and stop <= at + len(data)), None)
