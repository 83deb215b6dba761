"""Arrays stored in a file, read by rows: the bytes of each row, and their conversion. The datasets of HDF5 files.

h5py reads the metadata of HDF5 files only, and no values. HDF5 admits one thread at a time, and blocks it for reads. It
therefore gets the first bytes of the file beforehand. Values are read without it: many chunks and ranges of rows at
once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace._util import check
from headrace._util.lazy import needed
from headrace.errors import FormatError, LimitError, OptionError, masked
from headrace.formats.limits import Limits, check_bytes
from headrace.formats.pinned_object import SeekableFile
from headrace.types import Buffer, Ints

_STRETCH_BYTES = 64 * 1024  # read together from contiguous rows, or one longer row

Names = Mapping[str, str] | Sequence[str] | None
"""Arrays to read by field name, or a list if the names are equal. None: all."""

Array = NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A contiguous part of an array.

    Attributes:
        places: Start in the array, along each axis.
        offset, size: Location of the bytes. The size is 0 if nothing was written.
        mask: Bits of the filters that were not applied.
    """

    places: tuple[int, ...]
    offset: int
    size: int
    mask: int = 0


class StoredArray:
    """An array of contiguous rows, read in stretches.

    Attributes:
        count: Number of rows.
        rows: Number of rows that are read together.
    """

    def __init__(self, name: str, dtype: np.dtype[np.generic], shape: tuple[int, ...], offset: int) -> None:
        self.name, self.dtype, self.shape, self.count = name, dtype, shape, int(shape[0])
        self.row_bytes = math.prod(shape[1:]) * dtype.itemsize
        self.rows = max(1, min(self.count, _STRETCH_BYTES // max(self.row_bytes, 1)))
        self._offset = offset

    @property
    def parts_bytes(self) -> int:
        """Bytes of the rows that are read together."""
        return self.rows * self.row_bytes

    def parts(self, number: int) -> Sequence[StoredPart]:
        """Return the parts with the rows from `number * rows` on."""
        row = number * self.rows
        size = self._rows_at(number) * self.row_bytes
        return (StoredPart((row, *(0 for _ in self.shape[1:])), self._offset + row * self.row_bytes, size),)

    def assembled(self, number: int, bodies: Sequence[Buffer]) -> Array:
        """Return the rows from `number * rows` on, in native byte order, from the bytes of `parts`."""
        (body,) = bodies
        found: Array = np.frombuffer(body, self.dtype).reshape((self._rows_at(number), *self.shape[1:]))
        return found.astype(self.dtype.newbyteorder("="), copy=False)

    def _rows_at(self, number: int) -> int:
        return min(self.rows, self.count - number * self.rows)


@dataclass(frozen=True, slots=True)
class Table:
    """The arrays of a file by field name. All have `count` rows."""

    arrays: Mapping[str, StoredArray]
    count: int

    @staticmethod
    def of(arrays: Mapping[str, StoredArray], size: int, url: str, limits: Limits) -> Table:
        """Return a table of arrays in a file of `size` bytes."""
        for one in arrays.values():
            check_bytes(f"a part of {one.name!r}", one.parts_bytes, limits.member_bytes, url=url)
        parts = (part for one in arrays.values() for k in range(-(-one.count // one.rows)) for part in one.parts(k))
        end = max((part.offset + part.size for part in parts), default=0)
        if end > size:
            raise FormatError.at(url, f"is cut off: its values end at byte {end} of {size}")
        counts = {one.count for one in arrays.values()}
        if len(counts) > 1:
            shapes = ", ".join(f"{one.name} {list(one.shape)}" for one in arrays.values())
            raise OptionError.at(
                url, f": its arrays do not have as many rows each ({shapes[:400]}): name those that are wanted"
            )
        return Table(arrays, counts.pop() if counts else 0)

    @property
    def kinds(self) -> dict[str, str]:
        return {name: f"{one.dtype.name} {list(one.shape[1:])}" for name, one in self.arrays.items()}

    @property
    def row_bytes(self) -> int:
        return sum(one.row_bytes for one in self.arrays.values())

    @property
    def parts_bytes(self) -> int:
        return sum(one.parts_bytes for one in self.arrays.values())

    @property
    def blocks(self) -> Ints:
        """First rows of the parts of the array with the largest rows."""
        largest = max(self.arrays.values(), key=lambda one: one.row_bytes)
        return np.arange(0, self.count, largest.rows)


def chosen(names: Names, there: Sequence[str], url: str) -> dict[str, str]:
    """Return the names of the selected arrays by field. Raises an OptionError for invalid ones."""
    if names is None:
        taken = next((name for name in there if name.startswith("__")), None)
        if taken is not None:
            raise OptionError.at(
                url,
                f"has {taken!r:.200}, and names of fields that begin with '__' are taken: name the "
                f"arrays that are wanted, by those of their fields, such as {{'value': {taken!r:.200}}}",
            )
        return {name: name for name in there}
    wanted = dict(names) if isinstance(names, Mapping) else {name: name for name in names}
    for name in wanted.values():
        check.one_of(f"{masked(url)}: array", name.lstrip("/"), there)
    return {field: name.lstrip("/") for field, name in wanted.items()}


def check_names(names: object, option: str) -> None:
    """Raise an OptionError if `names` are no valid names of fields and arrays."""
    fields = list(names) if isinstance(names, Mapping | Sequence) and not isinstance(names, str) else []
    if names is not None and (not fields or not all(isinstance(one, str) and one[:2] != "__" for one in fields)):
        raise check.invalid(option, names, "names of arrays, by fields that do not begin with '__'")


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
