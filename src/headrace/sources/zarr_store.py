"""A Zarr store on the fetch stage, with its retries, limits, caches and budgets."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from typing import NoReturn

from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.core.buffer.core import default_buffer_prototype

from headrace._util.reads import Reads
from headrace.errors import ObjectMissingError, masked
from headrace.formats.pinned_object import for_each
from headrace.sources.reading import OwnReaders


class ZarrStore(Store):
    """A read-only store of Zarr 3: `zarr.open(ZarrStore("s3://bucket/array.zarr"), mode="r")`.

    On a loader's own loop, in an `AsyncDataset` over `zarr.api.asynchronous`, it uses the loader's reader, limits and
    statistics. On other loops, such as that of Zarr's synchronous functions, it has connections of its own.

    It neither writes nor lists. Arrays, and groups with consolidated metadata, are found by name.

    Args:
        url: Folder of the array or group.
        storage_options: Options of the store.
    """

    supports_writes = False
    supports_deletes = False
    supports_listing = False

    def __init__(self, url: str, storage_options: Mapping[str, object] | None = None) -> None:
        super().__init__(read_only=True)
        self.url, self.storage_options = url.rstrip("/"), dict(storage_options or {})
        self._readers = OwnReaders(self.storage_options)

    def __reduce__(self) -> tuple[object, ...]:
        return ZarrStore, (self.url, self.storage_options)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ZarrStore) and self.url == other.url and self.storage_options == other.storage_options

    def __hash__(self) -> int:
        return hash(self.url)

    def __repr__(self) -> str:
        return f"ZarrStore({masked(self.url)!r})"

    async def get(
        self, key: str, prototype: BufferPrototype | None = None, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """Return the bytes of an object. None: it does not exist.

        Raises:
            StorageError: It could not be read.
        """
        async with self._readers.use() as reader:
            try:
                data = await _read(reader, f"{self.url}/{key}", byte_range)
            except ObjectMissingError:
                return None
        return (prototype or default_buffer_prototype()).buffer.from_bytes(data)

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        wanted = list(key_ranges)

        async def one(k: int) -> Buffer | None:
            return await self.get(wanted[k][0], prototype, wanted[k][1])

        async with self._readers.use():
            return await for_each(len(wanted), one)

    async def exists(self, key: str) -> bool:
        async with self._readers.use() as reader:
            return await _size(reader, f"{self.url}/{key}") is not None

    async def getsize(self, key: str) -> int:
        """Return the size of an object in bytes.

        Raises:
            FileNotFoundError: It does not exist.
        """
        async with self._readers.use() as reader:
            size = await _size(reader, f"{self.url}/{key}")
        if size is None:
            raise FileNotFoundError(key)
        return size

    async def set(self, key: str, value: Buffer) -> None:
        self._refuse()

    async def delete(self, key: str) -> None:
        self._refuse()

    def list(self) -> AsyncIterator[str]:
        self._refuse()

    def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        self._refuse()

    def list_dir(self, prefix: str) -> AsyncIterator[str]:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise NotImplementedError(f"{self!r} reads objects by their names: it neither writes nor lists")


async def _read(reader: Reads, url: str, asked: ByteRequest | None) -> bytes:
    if asked is None:
        return await reader.read(url)
    if isinstance(asked, RangeByteRequest):
        return await reader.read(url, asked.start, asked.end)
    if isinstance(asked, OffsetByteRequest):
        return await reader.read(url, asked.offset)
    assert isinstance(asked, SuffixByteRequest)
    size = await _size(reader, url)
    if size is None:
        raise ObjectMissingError("it is not there", url=url)
    return await reader.read(url, max(0, size - asked.suffix), size)


async def _size(reader: Reads, url: str) -> int | None:
    try:
        return (await reader.read_into(url, 0, memoryview(bytearray(1)))).size
    except ObjectMissingError:
        return None
