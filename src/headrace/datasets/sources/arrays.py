"""The rows of NumPy's files as samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from headrace.datasets.places.guessing import names_at
from headrace.datasets.sources.array_rows import ArrayRows
from headrace.datasets.sources.constructors import Urls
from headrace.datasets.stream import Stream
from headrace.formats.compression.decompressor import path_of
from headrace.formats.limits import DEFAULTS, Limits
from headrace.formats.stored_arrays import Names, Table, check_names
from headrace.formats.zip.arrays import npy_table, npz_table
from headrace.protocols import Reads, Version


@dataclass(frozen=True)
class NumpyFiles:
    """Files of one array, .npy, or of several, .npz."""

    names: Names
    kind: str = "arrays"

    async def table(self, reader: Reads, url: str, limits: Limits) -> tuple[Table, Version]:
        read = npy_table if path_of(url).lower().endswith(".npy") else npz_table
        return await read(reader, url, self.names, limits)


def arrays(
    urls: Urls,
    names: Names = None,
    *,
    limits: Limits = DEFAULTS,
    listing: Literal["new", "kept"] = "new",
    storage_options: Mapping[str, object] | None = None,
) -> Stream:
    """The rows of arrays in .npz and .npy files, along the first axis, by random access.

    A sample has `__key__`, the row's number in its file, `__url__`, and an array for each that the file has; that of an
    .npy file is called "value". Of arrays that are stored as they are, as `np.save` and `np.savez` do it, stretches of
    rows are read by ranges, 64 KiB or a row. Those that `np.savez_compressed` has packed are read whole, when one of
    their rows is first needed, and held; so are arrays of several dimensions that lie by columns in an .npz file.

    `hr.stream` reads an .npz file as one sample, and `hr.tokens` windows of an array of token ids.

    Args:
        urls: an address, a pattern such as "s3://bucket/{000..099}.npz" or "data/**/*.npz", that of a folder, or a
            list of them; all have the same arrays.
        names: which arrays, by the names of their fields, such as {"image": "x_train", "label": "y_train"}; or a list
            of names. By default all, which must have as many rows each then.
        limits: how much files may ask for: `member_bytes` for what is read at once.
        listing: as in `hr.stream`.
        storage_options: for the store: credentials, endpoint, region.

    Raises:
        OptionError: no address, or names of fields that are taken. Files are read later: then an array that is not
            there, or has another number of rows, is one.
        FormatError: later, a file is damaged, holds Python objects, or lies by columns.
    """
    check_names(names, "names")
    places = names_at(urls, storage_options, kept=listing == "kept", folders=(".npz", ".npy")).urls
    return Stream(ArrayRows(places, NumpyFiles(names), limits, storage_options))
