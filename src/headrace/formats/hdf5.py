"""Locates rows of HDF5 datasets. h5py reads the metadata only, and no values.

HDF5 admits one thread at a time, and blocks it for reads. It therefore gets the first bytes of the file beforehand.
Values are read without it: many chunks and ranges of rows at once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from headrace.errors import FormatError, LimitError, OptionError, masked
from headrace.formats.limits import Limits
from headrace.formats.optional import needed
from headrace.formats.pinned_object import SeekableFile
from headrace.formats.stored_arrays import Array, Names, StoredArray, StoredPart, Table, chosen
from headrace.types import Buffer

MAGIC = b"\x89HDF\r\n\x1a\n"
PAGE_BYTES = 256 * 1024
_COUNTS_USER_BLOCKS = (1, 14, 4)  # older HDF5 ignored user blocks in H5Dchunk_iter
_SOFT_LINKS = 16  # maximum number on the path of a dataset

_CHUNKS = itertools.count()  # for unique names of files in memory


class RangeFile(SeekableFile):
    """A file that reads pages on demand, up to `most` bytes, and caches them."""

    def __init__(self, read: Callable[[int, int], bytes], size: int, most: int) -> None:
        super().__init__(size)
        self._read, self._most = read, most
        self._pages: dict[int, bytes] = {}
        self.failure: Exception | None = None

    def hold(self, head: bytes) -> None:
        whole = len(head) if len(head) == self.size else len(head) // PAGE_BYTES * PAGE_BYTES
        for at in range(0, whole, PAGE_BYTES):
            self._pages[at // PAGE_BYTES] = head[at : at + PAGE_BYTES]

    def readinto(self, target: Any) -> int:
        view = memoryview(target).cast("B")
        stop = min(self._at + len(view), self.size)
        done = 0
        while self._at < stop:
            page, inside = divmod(self._at, PAGE_BYTES)
            some = self._page(page)[inside : inside + stop - self._at]
            view[done : done + len(some)] = some
            done, self._at = done + len(some), self._at + len(some)
        return done

    def _page(self, number: int) -> bytes:
        if number not in self._pages:
            try:
                if len(self._pages) * PAGE_BYTES > self._most:
                    raise LimitError(f"what describes its datasets has more than {self._most} bytes, the limit")
                start = number * PAGE_BYTES
                self._pages[number] = self._read(start, min(start + PAGE_BYTES, self.size))
            except Exception as error:  # h5py would replace the error
                self.failure = error
                raise
        return self._pages[number]


class Dataset(StoredArray):
    def __init__(self, dataset: Any, url: str) -> None:
        super().__init__(str(dataset.name), dataset.dtype, tuple(dataset.shape), 0)
        self._url, self._fill = url, dataset.fillvalue
        self.rows, self._shape = int(dataset.chunks[0]), tuple(dataset.chunks)
        plist = dataset.id.get_create_plist()
        self._filters = (dataset.id.get_type().copy(), plist) if plist.get_nfilters() else None
        found: dict[int, list[StoredPart]] = {}

        def add(info: Any) -> None:
            part = StoredPart(tuple(info.chunk_offset), info.byte_offset, info.size, info.filter_mask)
            found.setdefault(part.places[0] // self.rows, []).append(part)

        dataset.id.chunk_iter(add)
        self._parts = found

    @property
    def parts_bytes(self) -> int:
        return max(super().parts_bytes, int(math.prod(self._shape) * self.dtype.itemsize))

    def parts(self, number: int) -> Sequence[StoredPart]:
        return self._parts.get(number, ())

    def assembled(self, number: int, bodies: Sequence[Buffer]) -> Array:
        count = self._rows_at(number)
        found: Array = np.full((count, *self.shape[1:]), self._fill, self.dtype)
        for part, body in zip(self.parts(number), bodies, strict=True):
            inner = zip(part.places[1:], self._shape[1:], strict=True)
            target = found[(slice(0, count), *(slice(at, at + n) for at, n in inner))]
            target[...] = self._values(part, body)[tuple(map(slice, target.shape))]
        return found.astype(self.dtype.newbyteorder("="), copy=False)

    def _values(self, part: StoredPart, body: Buffer) -> Array:
        """Decode a chunk, if it has filters with the library, as the chunk of a file in memory."""
        if self._filters is None:
            return np.frombuffer(body, self.dtype, math.prod(self._shape)).reshape(self._shape)
        import h5py

        kind, plist = self._filters
        values: Array = np.empty(self._shape, self.dtype)
        origin = (0,) * len(self._shape)
        try:
            with h5py.File(f"chunk{next(_CHUNKS)}", "w", driver="core", backing_store=False) as file:
                space = h5py.h5s.create_simple(self._shape)
                created = h5py.h5d.create(file.id, b"chunk", kind, space, plist)
                created.write_direct_chunk(origin, bytes(body), part.mask)
                del created  # the library ignores the mask until the dataset is reopened
                dataset = h5py.h5d.open(file.id, b"chunk")
                dataset.read(h5py.h5s.ALL, h5py.h5s.ALL, values)
        except (OSError, RuntimeError, ValueError) as error:
            raise FormatError.at(
                self._url, f": the chunk of {self.name!r} at byte {part.offset} does not decode: {error}"
            ) from None
        return values


def _array(dataset: Any, url: str) -> StoredArray:
    from h5py import version

    why = None
    if dataset.dtype.hasobject:
        why = "has values of any length, which are elsewhere in the file"
    elif dataset.is_virtual or dataset.external:
        why = "is in other files"
    elif dataset.chunks is None and dataset.size and dataset.id.get_offset() is None:
        why = "is in its header (compact), or was never written"
    elif (
        dataset.chunks is not None and dataset.file.userblock_size and version.hdf5_version_tuple < _COUNTS_USER_BLOCKS
    ):
        why = (
            f"is in chunks after a user block, and HDF5 {version.hdf5_version} reports wrong places of "
            "these; h5py 3.13 has one that does not"
        )
    if why is not None:
        raise FormatError.at(url, f": the dataset {dataset.name!r} {why}: that is not read")
    if dataset.chunks is not None:
        return Dataset(dataset, url)
    return StoredArray(dataset.name, dataset.dtype, dataset.shape, dataset.id.get_offset() or 0)


def _by_links(opened: Any, datasets: Names, there: Sequence[str]) -> list[str]:
    """Return the requested names that a visit did not find, but that link to datasets with rows."""
    import h5py

    wanted = datasets.values() if isinstance(datasets, Mapping) else datasets or ()
    paths = {name: _path(opened, name) for name in (one.lstrip("/") for one in wanted) if name not in there}
    found = {name: opened[path] for name, path in paths.items() if path is not None}
    return [name for name, one in found.items() if isinstance(one, h5py.Dataset) and one.shape]


def _path(opened: Any, name: str) -> str | None:
    """Resolve soft links of a name, as h5py would open other files. None if not in this file."""
    from h5py import Group, h5l

    path, left, most = "", _parts(name), _SOFT_LINKS
    while left:
        part, group = left.pop(0).encode("utf-8", "surrogateescape"), opened[path or "/"]
        if not isinstance(group, Group) or not group.id.links.exists(part):
            return None
        kind = group.id.links.get_info(part).type
        if kind == h5l.TYPE_HARD:
            path += f"/{part.decode('utf-8', 'surrogateescape')}"
        elif kind == h5l.TYPE_SOFT and most:
            target, most = group.id.links.get_val(part).decode("utf-8", "surrogateescape"), most - 1
            path, left = "" if target.startswith("/") else path, _parts(target) + left
        else:
            return None
    return path or None


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]


def table_of(file: RangeFile, datasets: Names, url: str, limits: Limits) -> Table:
    """Return the metadata of the selected datasets."""
    h5py = needed("h5py", "hdf5", masked(url))
    there: list[str] = []

    def add(name: str, one: Any) -> None:
        if isinstance(one, h5py.Dataset) and one.shape:
            there.append(name)

    try:
        with h5py.File(file, "r") as opened:
            opened.visititems(add)
            there += _by_links(opened, datasets, there)
            found = {field: _array(opened[name], url) for field, name in chosen(datasets, there, url).items()}
    except (FormatError, OptionError):
        raise
    except Exception as error:
        if file.failure is not None:
            raise file.failure from None
        why = " ".join(str(error).split())[:300]
        raise FormatError.at(url, f"cannot be read as HDF5: {why}") from None
    if not found:
        raise FormatError.at(url, "has no datasets with rows")
    return Table.of(found, file.size, url, limits)
