"""The rows of HDF5 files as samples."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import anyio.from_thread
import anyio.to_thread
import numpy as np

from headrace.datasets.asynchronous import AsyncDataset, KeySource
from headrace.datasets.blocking import blocking
from headrace.datasets.constructors import Urls
from headrace.datasets.guessing import names_at
from headrace.datasets.source import SampleSource, StoredSource, Traits, fingerprint_of
from headrace.datasets.stream import Stream
from headrace.errors import FormatError, OptionError, masked, not_as_indexed
from headrace.formats.hdf5 import MAGIC, PAGE_BYTES, Array, Dataset, Datasets, StoredPart, RangeFile, Table, table_of
from headrace.formats.limits import DEFAULTS, Limits
from headrace.indexes.held import HeldReads
from headrace.indexes.index import for_each
from headrace.protocols import Reads, Version
from headrace.reading import OwnReaders
from headrace.running import running_threads
from headrace.types import Ints

_HEAD_BYTES = 4 * PAGE_BYTES


class Hdf5Rows(AsyncDataset):
    """The rows of files by number: of each dataset the chunk that a row lies in is read, and held for its others.

    Args:
        urls: the files.
        datasets: which of theirs.
        limits: how much they may ask for.
        storage_options: for the store.
    """

    def __init__(
        self,
        urls: Sequence[str],
        datasets: Datasets = None,
        limits: Limits = DEFAULTS,
        storage_options: Mapping[str, object] | None = None,
    ) -> None:
        self.urls, self.datasets, self.limits, self.storage_options = urls, datasets, limits, storage_options
        self._readers = OwnReaders(storage_options, self.aclose)
        self._tables: list[tuple[Table, Version]] = []
        self._starts: Ints = np.zeros(1, np.int64)
        self._is_open = False
        self._held: HeldReads[Array] = HeldReads(lambda rows: rows.nbytes)
        self._numbers: dict[tuple[int, str, int], int] = {}

    def __reduce__(self) -> tuple[object, ...]:
        return Hdf5Rows, (self.urls, self.datasets, self.limits, self.storage_options)

    def __sample_source__(self) -> SampleSource:
        return Hdf5Source(self)

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def starts(self) -> Ints:
        """The number of each file's first row, and of all rows last."""
        self._open_now()
        return self._starts

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        self._open_now()
        return self._tables[0][0].row_bytes

    @property
    def blocks(self) -> Ints:
        """The numbers of the rows that chunks begin with, and of all rows last."""
        self._open_now()
        begins = [table.blocks + start for (table, _), start in zip(self._tables, self._starts, strict=False)]
        return np.concatenate([*begins, self._starts[-1:]]).astype(np.int64)

    def _open_now(self) -> None:
        if not self._is_open:
            blocking(self.aopen)

    async def aopen(self) -> None:
        """Read what describes the files' datasets."""
        if self._is_open:
            return
        async with self._readers.use() as reader:
            self._tables = await for_each(len(self.urls), partial(self._table, reader))
        first = self._tables[0][0].kinds
        for url, (table, _) in zip(self.urls, self._tables, strict=True):
            if table.kinds != first:
                raise FormatError(
                    f"{masked(url)} has {table.kinds}, and {masked(self.urls[0])} has {first}: the files of a stream "
                    "have the same datasets",
                    url=url,
                )
        self._starts = np.concatenate([[0], np.cumsum([table.count for table, _ in self._tables])]).astype(np.int64)
        self._is_open = True

    async def aclose(self) -> None:
        await self._held.aclose()

    async def aget(self, key: int) -> dict[str, object]:
        """Row `key` of all.

        Raises:
            IndexError: there are fewer.
            FormatError: its chunk is damaged.
            ObjectChangedError: the file is another one.
        """
        await self.aopen()
        try:
            number = range(int(self._starts[-1]))[operator.index(key)]
        except IndexError:
            raise IndexError(f"there is no row {key}: there are {int(self._starts[-1])}") from None
        ordinal = int(np.searchsorted(self._starts, number, side="right")) - 1
        row = number - int(self._starts[ordinal])
        fields = self._tables[ordinal][0].datasets
        places = [(field, *divmod(row, dataset.rows)) for field, dataset in fields.items()]
        found = {field: self._held.held(self._number(ordinal, field, piece)) for field, piece, _ in places}
        missing = [(field, piece) for field, piece, _ in places if found[field] is None]
        if missing:
            loaded = await for_each(len(missing), lambda k: self._load(ordinal, *missing[k]))
            found |= dict(zip((field for field, _ in missing), loaded, strict=True))
        sample: dict[str, object] = {"__key__": str(row), "__url__": masked(self.urls[ordinal])}
        for field, _, inside in places:
            rows = found[field]
            assert rows is not None
            sample[field] = np.array(rows[inside])  # of its own: the chunk may go
        return sample

    def _number(self, ordinal: int, field: str, piece: int) -> int:
        return self._numbers.setdefault((ordinal, field, piece), len(self._numbers))

    async def _load(self, ordinal: int, field: str, piece: int) -> Array:
        table, version = self._tables[ordinal]
        async with self._readers.use() as reader:
            load = partial(self._rows, reader, self.urls[ordinal], version, table.datasets[field], piece)
            return await self._held.get(self._number(ordinal, field, piece), load)

    async def _rows(self, reader: Reads, url: str, version: Version, dataset: Dataset, number: int) -> Array:
        pieces = dataset.pieces(number)

        async def body(k: int) -> bytes:
            piece: StoredPart = pieces[k]
            if not piece.size:
                return b""
            stop = piece.offset + piece.size
            data = await reader.read(url, piece.offset, stop, version=version)
            if len(data) < piece.size:
                raise not_as_indexed(url, f"of bytes {piece.offset} to {stop} it has only {len(data)}")
            return data

        bodies = await for_each(len(pieces), body)
        # never on the loop: whoever is in the library may wait for what the loop reads
        return await anyio.to_thread.run_sync(dataset.assembled, number, bodies, limiter=running_threads.get())

    async def _table(self, reader: Reads, ordinal: int) -> tuple[Table, Version]:
        url = self.urls[ordinal]
        head = memoryview(bytearray(_HEAD_BYTES))
        span = await reader.read_into(url, 0, head)
        version = Version(span.size, span.etag)
        known = bytes(head[: span.stop - span.start])
        if MAGIC not in known:
            raise FormatError(f"{masked(url)} is no HDF5 file: it begins with {known[:8]!r}", url=url)

        def read(start: int, stop: int) -> bytes:
            return anyio.from_thread.run(partial(reader.read, url, start, stop, version=version))

        file = RangeFile(read, span.size, self.limits.member_bytes)
        file.hold(known)
        described = partial(table_of, file, self.datasets, url, self.limits)
        return await anyio.to_thread.run_sync(described, limiter=running_threads.get()), version


class Hdf5Source(StoredSource, KeySource):
    """Rows, read by the loader's own reader."""

    traits = Traits(numbered=True, objects=True)

    def __init__(self, data: Hdf5Rows) -> None:
        super().__init__(data)
        self.data: Hdf5Rows = data

    @property
    def starts(self) -> Ints:
        return self.data.starts

    @property
    def blocks(self) -> Ints | None:
        return self.data.blocks

    @property
    def sample_bytes(self) -> float | None:
        return float(self.data.row_bytes)

    @property
    def text(self) -> str:
        more = f" and {len(self.urls) - 1} more" if len(self.urls) > 1 else ""
        return f"hdf5({masked(self.urls[0])}{more})"

    def fingerprint(self) -> str:
        return fingerprint_of((*self.urls, repr(self.data.datasets)))


def hdf5(
    urls: Urls,
    datasets: Datasets = None,
    *,
    limits: Limits = DEFAULTS,
    storage_options: Mapping[str, object] | None = None,
) -> Stream:
    """The rows of HDF5 files, along the first axis of their datasets, by random access.

    A sample has `__key__`, the row's number in its file, `__url__`, and an array for each dataset. What describes the
    datasets is read by h5py, before the first sample; chunks are read by ranges, many at once, whatever the file's
    place. Of a chunk that is read all rows are held for a while, 256 MiB in all: rows in order, and
    `.shuffle("window")`, read each chunk about once, `.shuffle("global")` of chunks with many rows again and again.

    Args:
        urls: an address, a pattern such as "s3://bucket/{000..099}.h5", or a list of them; all have the same datasets.
        datasets: which, by the names of their fields, such as {"image": "train/images", "label": "train/labels"}; or a
            list of names. By default all, which must have as many rows each then.
        limits: how much files may ask for: `member_bytes` for a chunk, and for what describes the datasets.
        storage_options: for the store: credentials, endpoint, region.

    Raises:
        OptionError: no address; or names of fields that are taken. Files are read later: then a dataset that is not
            there, or has another number of rows, is one.
        FormatError: later, a file is damaged, or has a dataset that is not read: of texts and lists of any length, of
            other files.
    """
    fields: Sequence[Any] = list(datasets) if datasets is not None else []
    taken = next((name for name in fields if not isinstance(name, str) or name.startswith("__")), None)
    if isinstance(datasets, str) or taken is not None or (datasets is not None and not fields):
        raise OptionError(
            f"datasets={datasets!r:.200}: names of datasets, by those of fields that do not begin with '__'"
        )
    return Stream(Hdf5Rows(names_at(urls, storage_options).urls, datasets, limits, storage_options))
