"""Rows of NumPy files as samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from headrace._util.reads import Reads, Version
from headrace.dataset.stream import Stream
from headrace.formats.compression import path_of
from headrace.formats.limits import DEFAULTS, Limits
from headrace.formats.stored_arrays import Names, Table, check_names
from headrace.formats.zip.arrays import npy_table, npz_table
from headrace.sources.array_rows import ArrayRows
from headrace.sources.constructors import Urls
from headrace.sources.discovery.guessing import names_at


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
