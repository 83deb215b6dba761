"""Specs: the form of a sample and its values, and their slots in a batch's slab.

A spec is derived from one sample. Samples of exactly that form are written into slots. All others are collated by
torch's function. So the result always equals torch's.
"""

from __future__ import annotations

import abc
import functools
import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headrace._util.lazy import is_tensor
from headrace._util.sample_ranges import LeasedBodies
from headrace._util.shared_memory import aligned
from headrace.formats.decoders import Column, Columns

if TYPE_CHECKING:
    import torch


_SLOT_BYTES = 65536  # leaves of this size or more are written one by one, smaller ones in chunks


class Mismatch(Exception):
    """A sample does not have the form of the spec."""


@dataclass(frozen=True)
class Leaf(abc.ABC):
    """Form of one value of a sample.

    Attributes:
        dtype: torch's name of the dtype in a batch. None if a batch has a list of the values instead of slots.
    """

    dtype: str | None = None
    shape: tuple[int, ...] = ()

    @functools.cached_property
    def nbytes(self) -> int:
        return 0 if self.dtype is None else math.prod(self.shape) * self.itemsize

    @functools.cached_property
    def itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch's object. Not stored: leaves are sent to workers without torch."""
        return _torch_dtype(self.dtype or "")

    @abc.abstractmethod
    def check(self, values: Sequence[object]) -> None:
        """Raise Mismatch unless all values have exactly this form."""

    def write(self, values: list[Any], here: memoryview) -> None:
        """Write accepted values into their slots, or raise Mismatch if one cannot be stored exactly."""
        raise NotImplementedError

    def values(self, here: memoryview, count: int) -> list[object]:
        """Read values that `write` wrote. Arrays and tensors are views of the slots."""
        raise NotImplementedError


@functools.cache
def _torch_dtype(name: str) -> torch.dtype:
    import torch

    dtype: torch.dtype = getattr(torch, name)
    return dtype


class TensorLeaf(Leaf):
    dtype: str

    @functools.cached_property
    def itemsize(self) -> int:
        return self.torch_dtype.itemsize

    def check(self, values: Sequence[object]) -> None:
        import torch

        dtype, shape = self.torch_dtype, self.shape
        for value in values:
            if type(value) is not torch.Tensor or value.dtype is not dtype or value.shape != shape:
                raise Mismatch
            if value.layout is not torch.strided or value.device.type != "cpu" or value.requires_grad:
                raise Mismatch

    def write(self, values: list[Any], here: memoryview) -> None:
        import torch

        target = torch.frombuffer(here, dtype=torch.uint8).view(self.torch_dtype).view(len(values), *self.shape)
        if self.nbytes >= _SLOT_BYTES:
            for row, tensor in zip(target, values, strict=True):
                row.copy_(tensor)
        else:
            torch.stack(values, out=target)

    def values(self, here: memoryview, count: int) -> list[object]:
        import torch

        if not here.nbytes:
            return [torch.empty(self.shape, dtype=self.torch_dtype) for _ in range(count)]
        return list(torch.frombuffer(here, dtype=torch.uint8).view(self.torch_dtype).view(count, *self.shape))


@dataclass(frozen=True)
class ArrayLeaf(TensorLeaf):
    """An array of dtype `exact`, which becomes a tensor in a batch."""

    exact: np.dtype[np.generic] | None = None

    @functools.cached_property
    def itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize

    def check(self, values: Sequence[object]) -> None:
        shape, exact = self.shape, self.exact
        for value in values:
            if type(value) is not np.ndarray or value.dtype != exact or value.shape != shape:
                raise Mismatch

    def write(self, values: list[Any], here: memoryview) -> None:
        """Write with numpy. torch would make a tensor of each array, and take six times as long."""
        target = np.frombuffer(here, self.exact).reshape(len(values), *self.shape)
        if self.shape and self.nbytes < _SLOT_BYTES:
            np.concatenate(values, out=target.reshape(-1, *self.shape[1:]))
        else:
            for k, value in enumerate(values):
                target[k] = value

    def values(self, here: memoryview, count: int) -> list[object]:
        return list(np.frombuffer(here, self.exact).reshape(count, *self.shape))


@dataclass(frozen=True)
class _ExactLeaf(Leaf):
    """A value whose form is its type."""

    exact: type = object

    def check(self, values: Sequence[object]) -> None:
        if set(map(type, values)) - {self.exact}:
            raise Mismatch


class NumberLeaf(_ExactLeaf):
    def write(self, values: list[Any], here: memoryview) -> None:
        try:
            np.frombuffer(here, self.exact)[:] = values
        except OverflowError:
            raise Mismatch from None

    def values(self, here: memoryview, count: int) -> list[object]:
        return list(np.frombuffer(here, self.exact).tolist())


class ScalarLeaf(NumberLeaf):
    def values(self, here: memoryview, count: int) -> list[object]:
        return list(np.frombuffer(here, self.exact))


class ColumnLeaf(_ExactLeaf):
    """Text or bytes. A batch has a list of them, outside the slots."""


def _tensor_leaf(value: torch.Tensor) -> Leaf:
    import torch

    if value.layout is not torch.strided or value.device.type != "cpu" or value.requires_grad:
        raise Mismatch
    if value.is_quantized or value.is_nested:
        raise Mismatch
    return TensorLeaf(str(value.dtype).removeprefix("torch."), tuple(value.shape))


def name_of(dtype: np.dtype[np.generic]) -> str:
    """Return torch's dtype name for a numpy dtype, or raise Mismatch if torch has none."""
    if dtype.name not in _COMMON or not dtype.isnative:
        raise Mismatch
    if dtype.kind == "u" and dtype.char != np.dtype(dtype.name).char:  # C's unsigned long long: torch refuses it
        raise Mismatch
    return dtype.name


_COMMON = frozenset({
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
})  # fmt: skip
"""Names of the dtypes that numpy and torch share."""


_LEAVES_OF_TYPES: dict[type, Leaf] = {
    float: NumberLeaf("float64", exact=float),
    bool: NumberLeaf("bool", exact=bool),
    int: NumberLeaf("int64", exact=int),
    str: ColumnLeaf(exact=str),
    bytes: ColumnLeaf(exact=bytes),
}
"""Leaves of exact types. Subclasses are not included."""


def leaf_of(value: object) -> Leaf:
    """Return the form of a value, or raise Mismatch if torch must collate it."""
    kind = type(value)
    if kind in _LEAVES_OF_TYPES:
        return _LEAVES_OF_TYPES[kind]
    if is_tensor(value):
        return _tensor_leaf(value)
    if type(value) is np.ndarray:
        return ArrayLeaf(name_of(value.dtype), value.shape, value.dtype)
    if isinstance(value, np.generic) and value.dtype.kind in "fiub":
        return ScalarLeaf(name_of(value.dtype), exact=kind)
    raise Mismatch


_COPY_BYTES = 4096  # leaves up to this size are copied: keeping the labels must not keep the images


@dataclass(frozen=True)
class _Container:
    """A container of a sample. Its parts are containers, or numbers of leaves from the left."""

    cls: type[Any]
    keys: tuple[object, ...]
    parts: tuple[_Template, ...]

    def of(self, parts: list[object]) -> object:
        if self.cls is dict:
            return dict(zip(self.keys, parts, strict=True))
        return self.cls(parts) if self.cls in (list, tuple) else self.cls(*parts)


_Template = _Container | int


def _template(value: object, leaves: list[Leaf]) -> _Template:
    parts: Iterable[object]
    if type(value) is dict:
        keys, parts = tuple(value), value.values()
    elif type(value) is list or type(value) is tuple or (isinstance(value, tuple) and hasattr(value, "_fields")):
        keys, parts = tuple(range(len(value))), value
    else:
        leaves.append(leaf_of(value))
        return len(leaves) - 1
    return _Container(type(value), keys, tuple([_template(part, leaves) for part in parts]))


def _divide(template: _Template, samples: Sequence[Any], leaves: Sequence[Leaf], out: list[Sequence[object]]) -> None:
    """Append the values of many samples to `out`, leaf by leaf, or raise Mismatch."""
    if type(template) is int:
        leaves[template].check(samples)
        out.append(samples)
        return
    assert type(template) is _Container
    if set(map(type, samples)) - {template.cls}:
        raise Mismatch
    if template.cls is dict and set(map(tuple, samples)) - {template.keys}:
        raise Mismatch
    if set(map(len, samples)) - {len(template.parts)}:
        raise Mismatch
    for key, part in zip(template.keys, template.parts, strict=True):
        _divide(part, list(map(operator.itemgetter(key), samples)), leaves, out)


def _sample(template: _Template, values: Sequence[object]) -> object:
    if type(template) is int:
        return values[template]
    assert type(template) is _Container
    return template.of([_sample(part, values) for part in template.parts])


def _batch(template: _Template, values: Sequence[object], *, in_sequence: bool = False) -> object:
    """Return a batch as torch collates it, made of the batch's value of each leaf.

    torch transposes sequences, which makes tuples of their texts, and lists of tuples.
    """
    if type(template) is int:
        value = values[template]
        return tuple(value) if in_sequence and type(value) is list else value
    assert type(template) is _Container
    parts = [_batch(part, values, in_sequence=template.cls is not dict) for part in template.parts]
    return parts if template.cls is tuple else template.of(parts)


class Spec:
    """Form of a sample, and layout of a slab: one array per leaf, in order."""

    def __init__(self, template: _Template, leaves: list[Leaf]) -> None:
        self._template, self.leaves = template, leaves

    @classmethod
    def of(cls, sample: object) -> Spec | None:
        """Return the spec of `sample`. None if torch must collate such samples."""
        leaves: list[Leaf] = []
        try:
            template = _template(sample, leaves)
        except Mismatch:
            return None
        return cls(template, leaves)

    def __reduce__(self) -> tuple[Callable[..., Spec], tuple[_Template, list[Leaf]]]:
        return Spec, (self._template, self.leaves)

    def dumps(self) -> bytes:
        from headrace.torch_compat.serialize import pack_bytes

        return pack_bytes(self)

    @staticmethod
    @functools.lru_cache(256)
    def loads(blob: bytes) -> Spec:
        from headrace.torch_compat.serialize import unpack_bytes

        spec: Spec = unpack_bytes(blob)
        return spec

    def fits(self, sample: object) -> bool:
        try:
            self._divided([sample])
        except Mismatch:
            return False
        return True

    def is_tuple_of(self, count: int) -> bool:
        """True if samples are tuples of `count` values without nested containers."""
        return self._template == _Container(tuple, tuple(range(count)), tuple(range(count)))

    def is_dict_of(self, names: Sequence[str]) -> bool:
        """True if samples are dicts with these names in this order, without nested containers."""
        return self._template == _Container(dict, tuple(names), tuple(range(len(names))))

    def columns(self, sample: object) -> list[list[object]]:
        """Return the columns that `write` would return for `sample` alone."""
        return [
            [*values] for leaf, values in zip(self.leaves, self._divided([sample]), strict=True) if leaf.dtype is None
        ]

    @functools.cached_property
    def sample_bytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.leaves)

    def nbytes(self, capacity: int) -> int:
        return sum(aligned(leaf.nbytes * capacity) for leaf in self.leaves)

    def write(self, samples: Sequence[object], slab: memoryview, slot: int, capacity: int) -> list[list[object]]:
        """Write samples into the slots from `slot` on. Return the columns of leaves without slots.

        Raises:
            Mismatch: a sample has another form. Slots of this call may have been written.
        """
        columns, offset = list[list[object]](), 0
        for leaf, column in zip(self.leaves, self._divided(samples), strict=True):
            values = list(column)
            if leaf.dtype is None:
                columns.append(values)
                continue
            size = leaf.nbytes
            here = slab[offset + slot * size : offset + (slot + len(samples)) * size]
            offset += aligned(size * capacity)
            if size:
                leaf.write(values, here)
        return columns

    def samples(self, slab: memoryview, count: int, capacity: int, columns: Sequence[Sequence[object]]) -> list[Any]:
        """Return the first `count` samples written. Their arrays are views of the slab."""
        lists: list[list[object]] = []
        offset, column = 0, iter(columns)
        for leaf in self.leaves:
            if leaf.dtype is None:
                lists.append(list(next(column)))
                continue
            lists.append(leaf.values(slab[offset : offset + leaf.nbytes * count], count))
            offset += aligned(leaf.nbytes * capacity)
        return [_sample(self._template, [values[k] for values in lists]) for k in range(count)]

    def read(
        self,
        slab: NDArray[np.uint8],
        count: int,
        capacity: int,
        columns: Sequence[Sequence[object]],
        *,
        copy: bool,
        holes: Collection[int] = (),
        first: int = 0,
    ) -> object:
        """Return the batch as torch's default_collate would make it.

        Args:
            slab: The slab's bytes. Large tensors are views of it and keep it alive; small ones are copies.
            columns: Return values of `write`, concatenated over the batch's tasks.
            holes: Slots among them without a sample.
            first: First slot to read.
        """
        import torch

        values: list[object] = []
        offset, column = 0, iter(columns)
        missing = set(holes)
        kept = [slot for slot in range(count) if slot not in missing] if missing else []
        for leaf in self.leaves:
            if leaf.dtype is None:
                values.append(list(next(column)))
                continue
            size = leaf.nbytes * count
            if not size:
                values.append(torch.empty((count - len(holes), *leaf.shape), dtype=leaf.torch_dtype))
                continue
            begin = offset + first * leaf.nbytes
            tensor = torch.from_numpy(slab[begin : begin + size]).view(leaf.torch_dtype).view(count, *leaf.shape)
            offset += aligned(leaf.nbytes * capacity)
            if holes:
                values.append(tensor[kept])
            else:
                values.append(tensor.clone() if copy or size <= _COPY_BYTES else tensor)
        return _batch(self._template, values)

    def _divided(self, samples: Sequence[object]) -> list[Sequence[object]]:
        """Return the values of each leaf, or raise Mismatch."""
        values: list[Sequence[object]] = []
        _divide(self._template, samples, self.leaves, values)
        return values


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

    def fill_columns(self, columns: Columns, bodies: LeasedBodies, count: int) -> bool:
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
