"""The samples of one task on their way into a batch's slab."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from headrace.formats.columns import Column, ColumnBodies, Columns
from headrace.torch_compat.leaves import ArrayLeaf, ColumnLeaf, Leaf, Mismatch, NumberLeaf
from headrace.torch_compat.spec import Spec, aligned

_WRITTEN_AT_ONCE_BYTES = 2**20


class Slots:
    """Where the samples of one task go in a batch's slab; they are written as they are made, about a MiB at a time.

    Args:
        spec: their form.
        slab: the batch's memory.
        first: the slot of the first one.
        capacity: how many slots there are.

    Attributes:
        at_once: how many are written together, for so many bytes are in the processor's cache.
        waiting: samples that are made and not written.
        count: how many are written.
        columns: of the leaves that have no slots.
    """

    def __init__(self, spec: Spec, slab: memoryview, first: int, capacity: int) -> None:
        self._spec, self._slab, self._first, self._capacity = spec, slab, first, capacity
        self.at_once = max(1, _WRITTEN_AT_ONCE_BYTES // max(1, spec.sample_bytes))
        self.waiting: list[object] = []
        self.count = 0
        self.columns: list[list[object]] = [[] for leaf in spec.leaves if leaf.dtype is None]

    def fill(self, samples: Iterable[object]) -> None:
        """Write all of `samples`.

        Raises:
            Mismatch: one has another form, or there are more than slots. Those in `waiting` are not written.
        """
        for sample in samples:
            self.waiting.append(sample)
            del sample  # the next one is to be made where this one was: that memory is in the processor's cache
            if len(self.waiting) >= self.at_once:
                self.flush()
        self.flush()

    def add(self, samples: Sequence[object]) -> None:
        """Write samples, sooner or later: `flush` writes those that wait; raises as `fill` does."""
        self.waiting += samples
        if len(self.waiting) >= self.at_once:
            self.flush()

    def flush(self) -> None:
        """Write those that wait; raises as `fill` does."""
        if self.waiting:
            self._write()

    def fill_columns(self, columns: Columns, bodies: ColumnBodies, count: int) -> bool:
        """Write `count` samples that are columns (`headrace.formats.columns`); whether they have this form."""
        leaves = self._spec.leaves
        values: Sequence[Column | Sequence[str]]
        if isinstance(columns, Mapping):
            values, has_form = list(columns.values()), self._spec.is_dict_of(tuple(columns))
        else:
            values, has_form = columns, self._spec.is_tuple_of(len(columns))
        if not has_form or not all(map(_holds, leaves, values)):
            return False
        offset, texts = 0, iter(self.columns)
        for leaf, column in zip(leaves, values, strict=True):
            if not isinstance(column, Column):
                next(texts).extend(column)
                continue
            size = leaf.nbytes
            column.write(bodies, self._slab[offset + self._first * size : offset + (self._first + count) * size])
            offset += aligned(size * self._capacity)
        self.count += count
        return True

    def written(self) -> list[object]:
        """The samples that were written, equal to what they were; where none were written before `first`."""
        return self._spec.samples(self._slab, self.count, self._capacity, self.columns)

    def _write(self) -> None:
        slot = self._first + self.count
        if slot + len(self.waiting) > self._capacity:
            raise Mismatch
        for column, values in zip(
            self.columns, self._spec.write(self.waiting, self._slab, slot, self._capacity), strict=True
        ):
            column.extend(values)
        self.count += len(self.waiting)
        self.waiting.clear()


def _holds(leaf: Leaf, column: Column | Sequence[str]) -> bool:
    if not isinstance(column, Column):
        return leaf == ColumnLeaf(exact=str)
    if column.is_number:
        return leaf == NumberLeaf("int64", column.shape, int)
    return leaf == ArrayLeaf(leaf.dtype, column.shape, column.dtype)
