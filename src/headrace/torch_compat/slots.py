"""Slots of one task's samples in a batch's slab."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from headrace.formats.columns import Column, ColumnBodies, Columns
from headrace.torch_compat.spec import ArrayLeaf, ColumnLeaf, Leaf, Mismatch, NumberLeaf, Spec, aligned

_WRITTEN_AT_ONCE_BYTES = 2**20


class Slots:
    """Writes the samples of one task into a batch's slab, about 1 MiB at a time.

    Args:
        first: First slot of the task.

    Attributes:
        at_once: Number of samples written together, which fit the processor's cache.
        waiting: Samples made and not written.
        columns: Values of the leaves that have no slots.
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
            Mismatch: a sample has another form, or there are more samples than slots. Samples in `waiting` are not
                written.
        """
        for sample in samples:
            self.waiting.append(sample)
            del sample  # reuse its memory, which is in the processor's cache, for the next sample
            if len(self.waiting) >= self.at_once:
                self.flush()
        self.flush()

    def add(self, samples: Sequence[object]) -> None:
        """Add samples to write now or at `flush`. Raises as `fill` does."""
        self.waiting += samples
        if len(self.waiting) >= self.at_once:
            self.flush()

    def flush(self) -> None:
        """Write waiting samples. Raises as `fill` does."""
        if self.waiting:
            self._write()

    def fill_columns(self, columns: Columns, bodies: ColumnBodies, count: int) -> bool:
        """Write `count` samples from columns. Return False if they have another form."""
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
        """Read back the samples written. Only for a task whose `first` is 0."""
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
