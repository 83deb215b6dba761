"""Decodes fields of many samples at once with numpy, as a Python call per field is slow.

Only regular data are decoded: equal fields in every sample, `.npy` files with equal headers, plain decimal numbers. The
result is None for all other data, and samples are decoded one by one. A property test compares both ways.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace._util.sample_ranges import Rows
from headrace.formats.decoders import Decoder
from headrace.formats.plain import npy_header
from headrace.types import Ints

_DIGITS_MOST = 18  # any number of so many digits fits into 64 bits


class ColumnBodies(Protocol):
    """The bytes that rows refer to."""

    def gather(self, offsets: Ints, length: int) -> NDArray[np.uint8]:
        """Return the `length` bytes at each of `offsets` as `[len(offsets), length]`."""
        ...

    def gather_into(self, out: NDArray[np.uint8], offsets: Ints) -> None: ...


class Column(NamedTuple):
    """One value of every sample.

    Attributes:
        is_number: True if a value is a Python int, False if it is an array.
        head: Offset of the value in its member, in bytes.
        offsets: Offsets of the members.
        values: The parsed values, if the bytes are not the values. Else None.
    """

    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    is_number: bool
    head: int
    offsets: Ints
    values: NDArray[np.integer] | None

    def write(self, bodies: ColumnBodies, target: memoryview) -> None:
        """Write the values consecutively into `target`."""
        out = np.frombuffer(target, np.uint8).reshape(len(self.offsets), -1)
        if self.values is not None:
            out[:] = self.values.view(np.uint8).reshape(out.shape)
        else:
            bodies.gather_into(out, self.offsets + self.head)


Columns = Sequence[Column] | Mapping[str, Column | Sequence[str]]
"""The values of samples that are tuples or dicts: a column each, or the string of each sample."""


SampleColumns = Callable[[Rows, ColumnBodies, Sequence[str]], Columns | None]
"""Makes the values of all samples of a row table at once, or None if they must be made one by one.

The texts are the URLs of the shards of the samples.
"""


class ColumnDecoder:
    """Decodes fields of all samples of a row table at once, with the results of `decoder`.

    Args:
        names: The field for each value of a sample. "jpg;png" selects the first of the two that is present.
    """

    def __init__(self, decoder: Decoder, names: Sequence[str]) -> None:
        self._decoder, self._names = decoder, tuple(names)

    def __call__(self, rows: Rows, bodies: ColumnBodies, urls: Sequence[str] = ()) -> list[Column] | None:
        """Return a column for each name. None if samples must be decoded one by one."""
        count = len(rows)
        members = len(rows.field)
        if (
            rows.block is not None
            or not count
            or members % count
            or not (np.diff(rows.starts) == members // count).all()
        ):
            return None
        field = rows.field.reshape(count, -1)
        if not (field == field[0]).all():
            return None
        there = {rows.fields[number]: k for k, number in enumerate(field[0].tolist())}
        columns = []
        for names in self._names:
            present = [name for name in names.split(";") if name in there]
            if len(present) != 1:
                return None  # the first of several is used, but all are decoded, and any of them may fail
            decode = {"npy": _npy, "int": _ints}.get(self._decoder.what(present[0]) or "")
            if decode is None:
                return None
            k = there[present[0]]
            column = decode(rows.offset.reshape(count, -1)[:, k], rows.size.reshape(count, -1)[:, k], bodies)
            if column is None:
                return None
            columns.append(column)
        return columns


def _npy(offsets: Ints, sizes: Ints, bodies: ColumnBodies) -> Column | None:
    size = int(sizes[0])
    if not (sizes == size).all():
        return None
    try:
        head, shape, dtype, by_column = npy_header(memoryview(bodies.gather(offsets[:1], size)[0]))
    except Exception:
        return None  # decoding the sample alone gives a better error
    if by_column or dtype.hasobject or not math.prod(shape) or len(head) + math.prod(shape) * dtype.itemsize != size:
        return None
    heads = bodies.gather(offsets, len(head))
    return (
        Column(dtype, shape, False, len(head), offsets, None)
        if (heads == np.frombuffer(head, np.uint8)).all()
        else None
    )


def _ints(offsets: Ints, sizes: Ints, bodies: ColumnBodies) -> Column | None:
    if int(sizes.min()) < 1 or int(sizes.max()) > _DIGITS_MOST:
        return None
    values = np.zeros(len(sizes), np.int64)
    for size in np.unique(sizes).tolist():
        chosen = np.flatnonzero(sizes == size)
        digits = bodies.gather(offsets[chosen], size) - np.uint8(ord("0"))
        if (digits > 9).any():
            return None
        values[chosen] = digits @ 10 ** np.arange(size - 1, -1, -1, dtype=np.int64)
    return Column(np.dtype(np.int64), (), True, 0, offsets, values)
