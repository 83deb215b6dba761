"""Fields of many samples decoded at once, by numpy: a Python call for each small one would cost more than its work.

It takes only what it can prove to be as usual: the same fields in every sample, `.npy` files with one header, plain
decimal numbers. For all else it gives None, and samples are decoded one by one; a property test holds the two together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.formats.values import Decoder, npy_header
from headrace.rows import Rows
from headrace.types import Ints

_DIGITS_MOST = 18  # of a number that surely fits into 64 bits


class ColumnBodies(Protocol):
    """The bytes that rows lie in."""

    def gather(self, offsets: Ints, length: int) -> NDArray[np.uint8]:
        """The `length` bytes at each of `offsets`: `[len(offsets), length]`."""
        ...

    def gather_into(self, out: NDArray[np.uint8], offsets: Ints) -> None:
        """The same, into an array of this shape."""
        ...


class Column(NamedTuple):
    """One value of every sample.

    Attributes:
        dtype, shape: of each value.
        is_number: whether a value is a Python int; else it is an array.
        head: where the value begins in its member, in bytes.
        offsets: of the members.
        values: the values themselves, where they had to be read.
    """

    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    is_number: bool
    head: int
    offsets: Ints
    values: NDArray[np.integer] | None

    def write(self, bodies: ColumnBodies, target: memoryview) -> None:
        """Write the values one after the other into `target`."""
        out = np.frombuffer(target, np.uint8).reshape(len(self.offsets), -1)
        if self.values is not None:
            out[:] = self.values.view(np.uint8).reshape(out.shape)
        else:
            bodies.gather_into(out, self.offsets + self.head)


Columns = Sequence[Column] | Mapping[str, Column | Sequence[str]]
"""What samples are that are tuples, or dicts: for each of their values a column, or the text that it is in each."""


class SampleColumns(Protocol):
    """Makes all samples of a row table at once."""

    def __call__(self, rows: Rows, bodies: ColumnBodies, urls: Sequence[str]) -> Columns | None:
        """Their values; None where they must be made one by one.

        Args:
            urls: of each sample the address of its shard.
        """
        ...


class ColumnDecoder:
    """Decodes the fields `names` of samples as `decoder` does, all samples of a row table at once.

    Args:
        names: for each value of a sample the field it is made of; "jpg;png" is the first of the two that there is.
    """

    def __init__(self, decoder: Decoder, names: Sequence[str]) -> None:
        self._decoder, self._names = decoder, tuple(names)

    def __call__(self, rows: Rows, bodies: ColumnBodies, urls: Sequence[str] = ()) -> list[Column] | None:  # noqa: ARG002
        """A column for each name; None where the samples must be decoded one by one."""
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
                return None  # of several the first is taken, but all are decoded, and may fail to
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
        return None  # said better of the sample alone
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
