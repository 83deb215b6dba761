"""The rows of HDF5 files as samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import anyio.from_thread
import anyio.to_thread

from headrace.datasets.places.guessing import names_at
from headrace.datasets.sources.array_rows import ArrayRows
from headrace.datasets.sources.constructors import Urls
from headrace.datasets.stream import Stream
from headrace.errors import FormatError, masked
from headrace.formats.hdf5 import MAGIC, PAGE_BYTES, RangeFile, table_of
from headrace.formats.limits import DEFAULTS, Limits
from headrace.formats.stored_arrays import Names, Table, check_names
from headrace.protocols import Reads, Version
from headrace.running import running_threads

_HEAD_BYTES = 4 * PAGE_BYTES


@dataclass(frozen=True)
class Hdf5Files:
    """Files whose datasets h5py describes."""

    names: Names
    kind: str = "hdf5"

    async def table(self, reader: Reads, url: str, limits: Limits) -> tuple[Table, Version]:
        head = memoryview(bytearray(_HEAD_BYTES))
        span = await reader.read_into(url, 0, head)
        version = Version(span.size, span.etag)
        known = bytes(head[: span.stop - span.start])
        if MAGIC not in known:
            raise FormatError(f"{masked(url)} is no HDF5 file: it begins with {known[:8]!r}", url=url)

        def read(start: int, stop: int) -> bytes:
            return anyio.from_thread.run(partial(reader.read, url, start, stop, version=version))

        file = RangeFile(read, span.size, limits.member_bytes)
        file.hold(known)
        described = partial(table_of, file, self.names, url, limits)
        return await anyio.to_thread.run_sync(described, limiter=running_threads.get()), version


def hdf5(
    urls: Urls,
    datasets: Names = None,
    *,
    limits: Limits = DEFAULTS,
    listing: Literal["new", "kept"] = "new",
    storage_options: Mapping[str, object] | None = None,
) -> Stream:
    """The rows of HDF5 files, along the first axis of their datasets, by random access.

    A sample has `__key__`, the row's number in its file, `__url__`, and an array for each dataset. What describes the
    datasets is read by h5py, before the first sample; chunks are read by ranges, many at once, whatever the file's
    place. Of a chunk that is read all rows are held for a while, 256 MiB in all: rows in order, and
    `.shuffle("window")`, read each chunk about once, `.shuffle("global")` of chunks with many rows again and again.

    Args:
        urls: an address, a pattern such as "s3://bucket/{000..099}.h5" or "data/**/*.h5", that of a folder, or a
            list of them; all have the same datasets.
        datasets: which, by the names of their fields, such as {"image": "train/images", "label": "train/labels"}; or a
            list of names. By default all, which must have as many rows each then.
        limits: how much files may ask for: `member_bytes` for a chunk, and for what describes the datasets.
        listing: as in `hr.stream`.
        storage_options: for the store: credentials, endpoint, region.

    Raises:
        OptionError: no address; or names of fields that are taken. Files are read later: then a dataset that is not
            there, or has another number of rows, is one.
        FormatError: later, a file is damaged, or has a dataset that is not read: of texts and lists of any length, of
            other files.
    """
    check_names(datasets, "datasets")
    places = names_at(urls, storage_options, kept=listing == "kept", folders=(".h5", ".hdf5", ".nc")).urls
    return Stream(ArrayRows(places, Hdf5Files(datasets), limits, storage_options))
