"""Rows of HDF5 files as samples."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Literal

import anyio.from_thread
import anyio.to_thread

from headrace._util.context import running_threads
from headrace._util.reads import Reads, Version
from headrace.dataset.stream import Stream
from headrace.errors import FormatError, masked
from headrace.formats.hdf5 import MAGIC, PAGE_BYTES, RangeFile, table_of
from headrace.formats.limits import DEFAULTS, Limits
from headrace.formats.pinned_object import PinnedObject
from headrace.formats.stored_arrays import Names, Table, check_names
from headrace.sources.array_rows import ArrayRows
from headrace.sources.constructors import Urls
from headrace.sources.discovery.guessing import names_at

_HEAD_BYTES = 4 * PAGE_BYTES


async def hdf5_table(reader: Reads, url: str, names: Names, limits: Limits) -> tuple[Table, Version]:
    shard = PinnedObject(reader, url)
    known = bytes(await shard.read(0, _HEAD_BYTES))
    version = Version(shard.size, shard.etag)
    if MAGIC not in known:
        raise FormatError(f"{masked(url)} is no HDF5 file: it begins with {known[:8]!r}", url=url)

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
