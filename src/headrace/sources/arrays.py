"""Rows of arrays in files as samples: `hr.arrays` for NumPy files, `hr.hdf5` for HDF5."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Literal

import anyio.from_thread
import anyio.to_thread
import numpy as np

from headrace._util.context import running_threads
from headrace._util.reads import Reads, Version
from headrace.dataset.asynchronous import AsyncDataset, KeySource
from headrace.dataset.source import SampleSource, StoredSource, Traits, blocking, fingerprint_of, forwarded
from headrace.dataset.stream import Stream
from headrace.errors import FormatError, masked
from headrace.formats.compression import path_of
from headrace.formats.limits import DEFAULTS, Limits
from headrace.formats.pinned_object import PinnedObject, for_each
from headrace.formats.stored_arrays import (
    MAGIC,
    PAGE_BYTES,
    Array,
    Names,
    RangeFile,
    StoredArray,
    Table,
    check_names,
    table_of,
)
from headrace.formats.zip import npy_table, npz_table
from headrace.indexes.index import HELD_BYTES, HeldReads
from headrace.sources.bodies import read_exactly
from headrace.sources.discovery import Urls, names_at
from headrace.sources.entries import check_listed, shown
from headrace.sources.reading import Options, OwnReaders, number_of
from headrace.types import Ints

TableReader = Callable[[Reads, str, Names, Limits], Awaitable[tuple[Table, Version]]]
"""Reads the locations of the rows of the named arrays of a file, and the version of the file."""


@dataclass(eq=False, repr=False)
class ArrayRows(AsyncDataset):
    """Rows of files by number. Chunks that were read for a row are held for others."""

    urls: Sequence[str]
    names: Names
    table: TableReader
    kind: str
    limits: Limits
    storage_options: Options

    def __post_init__(self) -> None:
        self._readers = OwnReaders(self.storage_options, self.aclose)
        self._tables: list[tuple[Table, Version]] = []
        self._starts: Ints = np.zeros(1, np.int64)
        self._is_open = False
        self._held: HeldReads[Array] = HeldReads(lambda rows: rows.nbytes)

    def __reduce__(self) -> tuple[object, ...]:
        return ArrayRows, (self.urls, self.names, self.table, self.kind, self.limits, self.storage_options)

    def __sample_source__(self) -> SampleSource:
        return ArraySource(self)

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def starts(self) -> Ints:
        """First row number of each file, then the total."""
        self._open_now()
        return self._starts

    @property
    def row_bytes(self) -> int:
        self._open_now()
        return self._tables[0][0].row_bytes

    @property
    def blocks(self) -> Ints:
        """First row number of each chunk, then the total."""
        self._open_now()
        begins = [table.blocks + start for (table, _), start in zip(self._tables, self._starts, strict=False)]
        return np.concatenate([*begins, self._starts[-1:]]).astype(np.int64)

    def _open_now(self) -> None:
        if not self._is_open:
            blocking(self.aopen)

    async def aopen(self) -> None:
        if self._is_open:
            return
        async with self._readers.use() as reader:
            tables = lambda k: self.table(reader, self.urls[k], self.names, self.limits)
            self._tables = await for_each(len(self.urls), tables)
        for ordinal, (_, version) in enumerate(self._tables):
            check_listed(self.urls, ordinal, version.size, version.etag)
        first = self._tables[0][0].kinds
        self._held.most = max(HELD_BYTES, 2 * max(table.parts_bytes for table, _ in self._tables))
        for url, (table, _) in zip(self.urls, self._tables, strict=True):
            if table.kinds != first:
                raise FormatError.at(
                    url,
                    f"has {table.kinds}, and {masked(self.urls[0])} has {first}: the files of a stream "
                    "have the same arrays",
                )
        self._starts = np.concatenate([[0], np.cumsum([table.count for table, _ in self._tables])]).astype(np.int64)
        self._is_open = True

    async def aclose(self) -> None:
        await self._held.aclose()

    async def aget(self, key: int) -> dict[str, object]:
        """Return row `key` of all files."""
        await self.aopen()
        number = number_of(key, int(self._starts[-1]), "row")
        ordinal = int(np.searchsorted(self._starts, number, side="right")) - 1
        row = number - int(self._starts[ordinal])
        fields = self._tables[ordinal][0].arrays
        places = [(field, *divmod(row, array.rows)) for field, array in fields.items()]
        found = {field: self._held.held((ordinal, field, piece)) for field, piece, _ in places}
        missing = [(field, piece) for field, piece, _ in places if found[field] is None]
        if missing:
            loaded = await for_each(len(missing), lambda k: self._load(ordinal, *missing[k]))
            found |= dict(zip((field for field, _ in missing), loaded, strict=True))
        sample: dict[str, object] = {"__key__": str(row), "__url__": masked(self.urls[ordinal])}
        for field, _, inside in places:
            rows = found[field]
            assert rows is not None
            sample[field] = np.array(rows[inside])  # a copy: the chunk may be dropped
        return sample

    async def _load(self, ordinal: int, field: str, piece: int) -> Array:
        table, version = self._tables[ordinal]
        async with self._readers.use() as reader:
            load = partial(self._rows, reader, self.urls[ordinal], version, table.arrays[field], piece)
            return await self._held.get((ordinal, field, piece), load)

    async def _rows(self, reader: Reads, url: str, version: Version, array: StoredArray, number: int) -> Array:
        parts = array.parts(number)

        async def body(k: int) -> bytes:
            part = parts[k]
            if not part.size:
                return b""
            return await read_exactly(reader, url, part.offset, part.offset + part.size, version)

        bodies = await for_each(len(parts), body)
        # never on the loop: a thread that holds the library's lock may be waiting for a read on the loop
        return await anyio.to_thread.run_sync(array.assembled, number, bodies, limiter=running_threads.get())


class ArraySource(StoredSource, KeySource):
    data: ArrayRows
    traits = Traits(numbered=True, objects=True)
    starts = forwarded("data")
    blocks = forwarded("data")

    @property
    def sample_bytes(self) -> float | None:
        return float(self.data.row_bytes)

    @property
    def text(self) -> str:
        return f"{self.data.kind}({shown(self.urls)})"

    def fingerprint(self) -> str:
        return fingerprint_of((*self.urls, _digest_of(self.data.names)))

    def fingerprint_with(self, sizes: Ints) -> str:
        return fingerprint_of((*self.urls, _digest_of(self.data.names)), sizes)


def _digest_of(names: Names) -> str:
    """Return a digest of whole names; `fingerprint_of` keeps only the part after the last slash."""
    if names is not None and not isinstance(names, Mapping):
        names = {name: name for name in names}
    wanted = None if names is None else sorted(names.items())
    return blake2b(repr(wanted).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


async def numpy_table(reader: Reads, url: str, names: Names, limits: Limits) -> tuple[Table, Version]:
    read = npy_table if path_of(url).lower().endswith(".npy") else npz_table
    return await read(reader, url, names, limits)


def arrays(
    urls: Urls,
    names: Names = None,
    *,
    limits: Limits = DEFAULTS,
    listing: Literal["new", "kept"] = "new",
    storage_options: Mapping[str, object] | None = None,
) -> Stream:
    """Read rows of arrays in .npz and .npy files, along the first axis, by random access.

    A sample has `__key__`, the row's number in its file, `__url__`, and a field for each array of the file; that of an
    .npy file is "value". For uncompressed arrays, as written by `np.save` and `np.savez`, stretches of rows of 64 KiB,
    or single rows, are read by ranges. Arrays compressed by `np.savez_compressed` are read whole, when one of their
    rows is first needed, and held in memory; so are multidimensional arrays in Fortran order in an .npz file.

    `hr.stream` reads an .npz file as one sample, and `hr.tokens` windows of an array of token ids.

    Args:
        urls: A URL or path, a pattern such as "s3://bucket/{000..099}.npz" or "data/**/*.npz", a folder, or a list of
            these. All files have the same arrays.
        names: Array names by field, such as {"image": "x_train", "label": "y_train"}; or a list of names. By default
            all, which must then have the same number of rows.
        limits: Limits for files: `member_bytes` applies to a single read.
        listing: As in `hr.stream`.
        storage_options: Options of the store: credentials, endpoint, region.

    Raises:
        OptionError: There is no URL, or field names are reserved. Files are read later; an array that does not exist,
            or has another number of rows, then raises it.
        FormatError: Raised later for a file that is damaged, holds Python objects, or is in Fortran order.
    """
    check_names(names, "names")
    places = names_at(urls, storage_options, kept=listing == "kept", folders=(".npz", ".npy")).urls
    return Stream(ArrayRows(places, names, numpy_table, "arrays", limits, storage_options))


_HEAD_BYTES = 4 * PAGE_BYTES


async def hdf5_table(reader: Reads, url: str, names: Names, limits: Limits) -> tuple[Table, Version]:
    shard = PinnedObject(reader, url)
    known = bytes(await shard.read(0, _HEAD_BYTES))
    version = Version(shard.size, shard.etag)
    if MAGIC not in known:
        raise FormatError.at(url, f"is no HDF5 file: it begins with {known[:8]!r}")

    def read(start: int, stop: int) -> bytes:
        return anyio.from_thread.run(partial(reader.read, url, start, stop, version=version))

    file = RangeFile(read, shard.size, limits.member_bytes)
    file.hold(known)
    described = partial(table_of, file, names, url, limits)
    return await anyio.to_thread.run_sync(described, limiter=running_threads.get()), version


def hdf5(
    urls: Urls,
    datasets: Names = None,
    *,
    limits: Limits = DEFAULTS,
    listing: Literal["new", "kept"] = "new",
    storage_options: Mapping[str, object] | None = None,
) -> Stream:
    """Read rows of HDF5 files, along the first axis of their datasets, by random access.

    A sample has `__key__`, the row's number in its file, `__url__`, and an array for each dataset. h5py reads the
    metadata before the first sample. Chunks are read by ranges, many concurrently, from any store. All rows of a chunk
    are held for a while, 256 MiB in total. So sequential order and `.shuffle("window")` read each chunk about once;
    `.shuffle("global")` reads chunks with many rows repeatedly.

    Args:
        urls: A URL or path, a pattern such as "s3://bucket/{000..099}.h5" or "data/**/*.h5", a folder, or a list of
            these. All files have the same datasets.
        datasets: Dataset names by field, such as {"image": "train/images", "label": "train/labels"}; or a list of
            names. By default all, which must then have the same number of rows.
        limits: Limits for files: `member_bytes` applies to a chunk, and to the metadata.
        listing: As in `hr.stream`.
        storage_options: Options of the store: credentials, endpoint, region.

    Raises:
        OptionError: There is no URL; or field names are reserved. Files are read later; a dataset that does not exist,
            or has another number of rows, then raises it.
        FormatError: Raised later for a file that is damaged, or has an unsupported dataset: variable-length texts and
            lists, or data in other files.
    """
    check_names(datasets, "datasets")
    places = names_at(urls, storage_options, kept=listing == "kept", folders=(".h5", ".hdf5", ".nc")).urls
    return Stream(ArrayRows(places, datasets, hdf5_table, "hdf5", limits, storage_options))
