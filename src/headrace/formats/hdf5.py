"""HDF5 files: which bytes of a file hold which rows of its datasets. h5py reads what describes them, and no values.

The library lets one thread in at a time, and waits there for what it reads. So it is given the file's first bytes
beforehand, and values are read without it: chunks and stretches of rows, each by a range, many at once.
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import FormatError, LimitError, OptionError, masked
from headrace.formats.limits import Limits
from headrace.types import Buffer, Ints

MAGIC = b"\x89HDF\r\n\x1a\n"
PAGE_BYTES = 256 * 1024
_STRETCH_BYTES = 64 * 1024  # of a dataset without chunks that are read at once, where a row is not longer

_CHUNKS = itertools.count()  # files in memory have names, too

Datasets = Mapping[str, str] | Sequence[str] | None
"""The datasets that are read, by the names of their fields; a list where those are the same; None: all."""

Array = NDArray[np.generic]


class RangeFile(io.RawIOBase):
    """A file of which pages are read when they are first needed, and kept.

    Args:
        read: gives the bytes [start, stop).
        size: bytes of the file.
        most: bytes that may be read of it.
    """

    def __init__(self, read: Callable[[int, int], bytes], size: int, most: int) -> None:
        super().__init__()
        self._read, self.size, self._most = read, size, most
        self._pages: dict[int, bytes] = {}
        self._at = 0
        self.failure: Exception | None = None

    def hold(self, head: bytes) -> None:
        """The file's first bytes are these."""
        whole = len(head) if len(head) == self.size else len(head) // PAGE_BYTES * PAGE_BYTES
        for at in range(0, whole, PAGE_BYTES):
            self._pages[at // PAGE_BYTES] = head[at : at + PAGE_BYTES]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.size}[whence]
        self._at = base + offset
        return self._at

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
            except Exception as error:  # h5py would tell of it in other words
                self.failure = error
                raise
        return self._pages[number]


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A stretch of rows, or of rows and of parts of their values, that lies together.

    Attributes:
        places: where in the dataset it begins, along each axis.
        offset, size: its bytes; none where nothing was written.
        mask: which filters it went without.
    """

    places: tuple[int, ...]
    offset: int
    size: int
    mask: int = 0


class Dataset:
    """What is known of a dataset.

    Attributes:
        name: its path in the file.
        dtype, shape: of all of it.
        rows: how many rows its pieces have.
    """

    def __init__(self, dataset: Any, url: str, limits: Limits) -> None:
        self.name, self.dtype, self.shape = str(dataset.name), dataset.dtype, tuple(dataset.shape)
        self._url = url
        self.count = int(self.shape[0])
        self._fill = dataset.fillvalue
        self._filters: Any = None
        inner = self.shape[1:]
        self.row_bytes = math.prod(inner) * self.dtype.itemsize
        if self.dtype.hasobject:
            raise self._refused("has values of any length, which lie elsewhere in the file")
        if dataset.is_virtual or dataset.external:
            raise self._refused("lies in other files")
        if dataset.chunks is None:
            self.rows = max(1, min(self.count, _STRETCH_BYTES // max(self.row_bytes, 1)))
            self._pieces = self._stretches(dataset.id.get_offset())
            self._shape = (self.rows, *inner)
        else:
            self.rows, self._shape = int(dataset.chunks[0]), tuple(dataset.chunks)
            self._pieces = self._chunks(dataset)
        longest = math.prod(self._shape) * self.dtype.itemsize
        if max(longest, self.row_bytes) > limits.member_bytes:
            raise LimitError(f"{masked(url)}: a chunk of {self.name!r} has {longest} bytes, over the limit", url=url)

    def pieces(self, number: int) -> Sequence[StoredPart]:
        """Those of the rows from `number` times `rows` on."""
        return self._pieces.get(number, ())

    @property
    def all_pieces(self) -> Iterator[StoredPart]:
        return itertools.chain.from_iterable(self._pieces.values())

    def assembled(self, number: int, bodies: Sequence[Buffer]) -> Array:
        """The rows from `number` times `rows` on, of the bytes of their pieces.

        Raises:
            FormatError: they do not decode.
        """
        count = min(self.rows, self.count - number * self.rows)
        found: Array = np.full((count, *self.shape[1:]), self._fill, self.dtype)
        for piece, body in zip(self.pieces(number), bodies, strict=True):
            if not piece.size:
                continue
            values = self._values(piece, body)
            target = (
                slice(0, count),
                *(slice(at, at + n) for at, n in zip(piece.places[1:], self._shape[1:], strict=True)),
            )
            part = found[target]
            part[...] = values[tuple(map(slice, part.shape))]
        return found.astype(self.dtype.newbyteorder("="), copy=False)

    def _values(self, piece: StoredPart, body: Buffer) -> Array:
        if self._filters is None:
            shape = (min(self.rows, self.count - piece.places[0]), *self._shape[1:])
            shape = shape if len(body) < math.prod(self._shape) * self.dtype.itemsize else self._shape
            return np.frombuffer(body, self.dtype, math.prod(shape)).reshape(shape)
        return self._unfiltered(piece, body)

    def _unfiltered(self, piece: StoredPart, body: Buffer) -> Array:
        """What the library makes of a chunk: it is given it as that of a file in memory."""
        import h5py

        kind, plist = self._filters
        values: Array = np.empty(self._shape, self.dtype)
        origin = (0,) * len(self._shape)
        try:
            with h5py.File(f"chunk{next(_CHUNKS)}", "w", driver="core", backing_store=False) as file:
                space = h5py.h5s.create_simple(self._shape)
                created = h5py.h5d.create(file.id, b"chunk", kind, space, plist)
                created.write_direct_chunk(origin, bytes(body), piece.mask)
                del created  # until it is opened anew, the library knows nothing of the mask
                dataset = h5py.h5d.open(file.id, b"chunk")
                dataset.read(h5py.h5s.ALL, h5py.h5s.ALL, values)
        except (OSError, RuntimeError, ValueError) as error:
            raise FormatError(
                f"{masked(self._url)}: the chunk of {self.name!r} at byte {piece.offset} does not decode: {error}",
                url=self._url,
            ) from None
        return values

    def _stretches(self, start: int | None) -> dict[int, tuple[StoredPart, ...]]:
        origin = (0,) * (len(self.shape) - 1)
        if start is None and self.count and self.row_bytes:
            raise self._refused("lies in its header (compact), or was never written")
        found: dict[int, tuple[StoredPart, ...]] = {}
        for number, row in enumerate(range(0, self.count, self.rows)):
            size = min(self.rows, self.count - row) * self.row_bytes
            found[number] = (StoredPart((row, *origin), (start or 0) + row * self.row_bytes, size),)
        return found

    def _chunks(self, dataset: Any) -> dict[int, tuple[StoredPart, ...]]:
        plist = dataset.id.get_create_plist()
        if plist.get_nfilters():
            self._filters = dataset.id.get_type().copy(), plist
        found: dict[int, list[StoredPart]] = {}

        def add(info: Any) -> None:
            piece = StoredPart(tuple(info.chunk_offset), info.byte_offset, info.size, info.filter_mask)
            found.setdefault(piece.places[0] // self.rows, []).append(piece)

        dataset.id.chunk_iter(add)
        return {number: tuple(pieces) for number, pieces in found.items()}

    def _refused(self, why: str) -> FormatError:
        return FormatError(f"{masked(self._url)}: the dataset {self.name!r} {why}: that is not read", url=self._url)


@dataclass(frozen=True, slots=True)
class Table:
    """The datasets of a file by the names of their fields, all of as many rows."""

    datasets: Mapping[str, Dataset]
    count: int

    @property
    def kinds(self) -> dict[str, str]:
        """What each field is like."""
        return {name: f"{one.dtype.name} {list(one.shape[1:])}" for name, one in self.datasets.items()}

    @property
    def row_bytes(self) -> int:
        return sum(one.row_bytes for one in self.datasets.values())

    @property
    def blocks(self) -> Ints:
        """The first rows of the pieces that are read for most of a row's bytes."""
        largest = max(self.datasets.values(), key=lambda one: one.row_bytes)
        return np.arange(0, self.count, largest.rows)


def table_of(file: RangeFile, datasets: Datasets, url: str, limits: Limits) -> Table:
    """What describes the datasets that are wanted, and are there.

    Raises:
        FormatError: the file is damaged, or has a dataset that is not read here.
        LimitError: what describes them is longer than may be.
        OptionError: h5py is not installed; or its datasets do not share their first axis.
        StorageError: it could not be read.
    """
    try:
        import h5py
    except ImportError:
        raise OptionError(f"{masked(url)}: h5py reads it; try: pip install 'headrace[hdf5]'") from None
    try:
        with h5py.File(file, "r") as opened:
            names = _names(opened, h5py.Dataset, datasets, url)
            found = {field: Dataset(opened[name], url, limits) for field, name in names.items()}
    except (FormatError, OptionError):
        raise
    except Exception as error:
        if file.failure is not None:
            raise file.failure from None
        raise FormatError(
            f"{masked(url)} cannot be read as HDF5: {' '.join(str(error).split())[:300]}", url=url
        ) from None
    end = max((p.offset + p.size for one in found.values() for p in one.all_pieces), default=0)
    if end > file.size:
        raise FormatError(f"{masked(url)} is cut off: its values end at byte {end} of {file.size}", url=url)
    counts = {one.count for one in found.values()}
    if len(counts) > 1:
        shapes = ", ".join(f"{one.name} {list(one.shape)}" for one in found.values())
        raise OptionError(f"{masked(url)}: its datasets do not have as many rows each ({shapes[:400]}): give datasets=")
    return Table(found, counts.pop() if counts else 0)


def _names(opened: Any, kind: Any, datasets: Datasets, url: str) -> dict[str, str]:
    if datasets is None:
        found: dict[str, str] = {}

        def add(name: str, one: Any) -> None:
            if isinstance(one, kind) and one.shape:
                found[name] = name

        opened.visititems(add)
        if not found:
            raise FormatError(f"{masked(url)} has no datasets with rows", url=url)
        return found
    wanted = dict(datasets) if isinstance(datasets, Mapping) else {name: name for name in datasets}
    for name in wanted.values():
        if not isinstance(opened.get(name), kind) or not opened[name].shape:
            there: list[str] = []
            opened.visit(there.append)
            raise OptionError(f"{masked(url)} has no dataset {name!r:.200} with rows; it has {', '.join(there)[:400]}")
    return wanted
