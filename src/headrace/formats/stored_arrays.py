"""Arrays stored in a file, read by rows: the bytes of each row, and their conversion."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace._util import check
from headrace.errors import FormatError, OptionError, masked
from headrace.formats.limits import Limits, check_bytes
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
