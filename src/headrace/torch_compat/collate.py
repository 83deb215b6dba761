"""torch's default_collate, written straight into a batch's slab.

A spec is taken from one sample. Samples of exactly that form are written into slots; for all others torch's own
function makes the batch, so that the result is equal to torch's by construction or by a check of exact types.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import cloudpickle
import numpy as np
import torch
from torch.utils.data._utils.collate import collate, default_collate_fn_map
from torch.utils.data.dataloader import default_collate

from headrace.torch_compat.by_value import dumped

__all__ = ["Mismatch", "Slots", "Spec", "default_collate", "is_extended", "plain_collate"]

_SLOT_BYTES = 65536  # leaves of this size are written one by one, smaller ones a chunk at a time
_WRITTEN_AT_ONCE_BYTES = 2**20
_COPY_BYTES = 4096  # leaves of this size leave the slab: keeping the labels must not keep the images
_ALIGNMENT = 64
_ORIGINAL_MAP = dict(default_collate_fn_map)

Kind = Literal["tensor", "array", "scalar", "float", "int", "bool", "column"]


class Mismatch(Exception):
    """A sample does not have the form of the spec."""


def is_extended() -> bool:
    """Whether the user has registered collate functions of their own with torch."""
    return default_collate_fn_map != _ORIGINAL_MAP


def plain_collate(samples: list[Any]) -> Any:
    """What torch's default_collate gives, in a worker too, in memory of the process.

    torch's own function puts tensors into fresh shared memory there, and ours would have to be copied out of it again.
    """
    functions: Any = dict(default_collate_fn_map)
    if functions.get(torch.Tensor) is _ORIGINAL_MAP[torch.Tensor]:
        functions[torch.Tensor] = _stack
    return collate(samples, collate_fn_map=functions)


def _stack(tensors: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
    first = tensors[0]
    if first.is_nested or first.layout is not torch.strided:
        made: torch.Tensor = _ORIGINAL_MAP[torch.Tensor](tensors, collate_fn_map=collate_fn_map)
        return made
    # As torch's function in a worker: the batch has the dtype of the first, whatever the others could be cast to.
    return torch.stack(tensors, 0, out=first.new_empty((len(tensors), *first.shape)))


@dataclass(frozen=True)
class Leaf:
    """One value of a sample: its kind, and for those written into slots dtype and shape."""

    kind: Kind
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    exact: Any = None  # the Python or numpy type that a value must have

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of one sample's value in the slab."""
        return 0 if self.dtype is None else math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Node:
    """A container of a sample: a dict with these keys, a list, a tuple or a named tuple."""

    kind: Literal["dict", "list", "tuple", "namedtuple"]
    children: tuple[Any, ...]
    keys: tuple[Any, ...] = ()
    cls: Any = None


def _leaf(value: Any) -> Leaf:
    kind = type(value)
    if kind is torch.Tensor:
        if value.layout is not torch.strided or value.device.type != "cpu" or value.requires_grad or value.is_quantized:
            raise Mismatch
        if value.is_nested:
            raise Mismatch
        return Leaf("tensor", value.dtype, tuple(value.shape))
    if kind is np.ndarray:
        return Leaf("array", _torch_dtype(value.dtype), value.shape, value.dtype)
    if isinstance(value, np.generic) and value.dtype.kind in "fiub":
        return Leaf("scalar", _torch_dtype(value.dtype), (), kind)
    if kind is float:
        return Leaf("float", torch.float64, (), float)
    if kind is bool:
        return Leaf("bool", torch.bool, (), bool)
    if kind is int:
        return Leaf("int", torch.int64, (), int)
    if kind is str or kind is bytes:
        return Leaf("column", exact=kind)
    raise Mismatch


def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    try:
        return torch.from_numpy(np.empty(0, dtype)).dtype
    except (TypeError, ValueError):
        raise Mismatch from None


def _template(value: Any, leaves: list[Leaf]) -> Node | int:
    kind = type(value)
    if kind is dict:
        return Node("dict", tuple(_template(v, leaves) for v in value.values()), tuple(value))
    if kind is list or kind is tuple:
        return Node("list" if kind is list else "tuple", tuple(_template(v, leaves) for v in value))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return Node("namedtuple", tuple(_template(v, leaves) for v in value), cls=kind)
    leaves.append(_leaf(value))
    return len(leaves) - 1


class Spec:
    """The form of a sample, and where its values lie in a slab: one array for each leaf, one after the other."""

    def __init__(self, template: Node | int, leaves: list[Leaf]) -> None:
        self.template, self.leaves = template, leaves
        self._flatten = _flattener(template, leaves)

    @classmethod
    def of(cls, sample: Any) -> Spec | None:
        """The spec of `sample`; None where batches of its kind are torch's business."""
        leaves: list[Leaf] = []
        try:
            template = _template(sample, leaves)
        except Mismatch:
            return None
        return cls(template, leaves)

    def __reduce__(self) -> tuple[Any, ...]:
        return Spec, (self.template, self.leaves)

    def dumps(self) -> bytes:
        """The spec as bytes, with the user's own named tuples in it."""
        return dumped(self)

    @staticmethod
    def loads(blob: bytes) -> Spec:
        """The spec of `dumps`."""
        spec = cloudpickle.loads(blob)
        assert isinstance(spec, Spec)
        return spec

    def fits(self, sample: Any) -> bool:
        """Whether `sample` has this form."""
        try:
            self._flatten(sample)
        except Mismatch:
            return False
        return True

    def columns(self, sample: Any) -> list[list[Any]]:
        """What `write` would give for `sample` alone."""
        return [[value] for leaf, value in zip(self.leaves, self._flatten(sample), strict=True) if leaf.dtype is None]

    @functools.cached_property
    def sample_bytes(self) -> int:
        """Bytes of one sample's slots."""
        return sum(leaf.nbytes for leaf in self.leaves)

    def nbytes(self, capacity: int) -> int:
        """Bytes of a slab of `capacity` slots."""
        return sum(aligned(leaf.nbytes * capacity) for leaf in self.leaves)

    def write(self, samples: Sequence[Any], slab: memoryview, slot: int, capacity: int) -> list[list[Any]]:
        """Write samples into the slots from `slot` on; gives the columns of the leaves that have no slots.

        Raises:
            Mismatch: a sample has another form. Slots of this call may have been written.
        """
        rows = [self._flatten(sample) for sample in samples]
        columns, offset = [], 0
        for k, leaf in enumerate(self.leaves):
            values = [row[k] for row in rows]
            if leaf.dtype is None:
                columns.append(values)
                continue
            size = leaf.nbytes
            here = slab[offset + slot * size : offset + (slot + len(rows)) * size]
            offset += aligned(size * capacity)
            if size:
                _write_leaf(leaf, values, here)
        return columns

    def samples(self, slab: memoryview, count: int, capacity: int, columns: Sequence[Sequence[Any]]) -> list[Any]:
        """The first `count` samples that were written, equal to what they were; their arrays are views of the slab."""
        lists: list[list[Any]] = []
        offset, column = 0, iter(columns)
        for leaf in self.leaves:
            if leaf.dtype is None:
                lists.append(list(next(column)))
                continue
            size = leaf.nbytes * count
            lists.append(_values(leaf, slab[offset : offset + size], count))
            offset += aligned(leaf.nbytes * capacity)
        return [_sample(self.template, [values[k] for values in lists]) for k in range(count)]

    def read(
        self,
        slab: Any,
        count: int,
        capacity: int,
        columns: Sequence[Sequence[Any]],
        *,
        copy: bool,
        holes: Collection[int] = (),
    ) -> Any:
        """The batch as torch's default_collate would have made it.

        Args:
            slab: a uint8 array over the slab; tensors are views of it and keep it alive, small ones are copies.
            count: how many slots are meant, from the first on.
            columns: what `write` gave, all chunks of the batch one after the other.
            copy: make copies of all.
            holes: those slots among them that hold no sample.
        """
        values: list[Any] = []
        offset, column = 0, iter(columns)
        missing = set(holes)
        kept = [slot for slot in range(count) if slot not in missing] if missing else []
        for leaf in self.leaves:
            if leaf.dtype is None:
                values.append(list(next(column)))
                continue
            size = leaf.nbytes * count
            if not size:
                values.append(torch.empty((count - len(holes), *leaf.shape), dtype=leaf.dtype))
                continue
            tensor = torch.from_numpy(slab[offset : offset + size]).view(leaf.dtype).view(count, *leaf.shape)
            offset += aligned(leaf.nbytes * capacity)
            if holes:
                values.append(tensor[kept])
            else:
                values.append(tensor.clone() if copy or size <= _COPY_BYTES else tensor)
        return _build(self.template, values)


class Slots:
    """Where the samples of one task go in a batch's slab; they are written as they are made, about a MiB at a time.

    Args:
        spec: their form.
        slab: the batch's memory.
        first: the slot of the first one.
        capacity: how many slots there are.

    Attributes:
        waiting: samples that are made and not written.
        count: how many are written.
        columns: of the leaves that have no slots.
    """

    def __init__(self, spec: Spec, slab: memoryview, first: int, capacity: int) -> None:
        self._spec, self._slab, self._first, self._capacity = spec, slab, first, capacity
        self._at_once = max(1, _WRITTEN_AT_ONCE_BYTES // max(1, spec.sample_bytes))
        self.waiting: list[Any] = []
        self.count = 0
        self.columns: list[list[Any]] = [[] for leaf in spec.leaves if leaf.dtype is None]

    def fill(self, samples: Iterable[Any], *, leaves_out: Callable[[Any], bool] = lambda _: False) -> None:
        """Write all of `samples` but those for which `leaves_out` is true.

        Raises:
            Mismatch: one has another form, or there are more than slots. Those in `waiting` are not written.
        """
        for sample in samples:
            if not leaves_out(sample):
                self.waiting.append(sample)
            del sample  # the next one is to be made where this one was: that memory is in the processor's cache
            if len(self.waiting) >= self._at_once:
                self._write()
        if self.waiting:
            self._write()

    def fill_columns(self, columns: Sequence[Any], bodies: Any, count: int) -> bool:
        """Write `count` samples that are columns (`headrace.formats.columns`); whether they have this form."""
        template, leaves = self._spec.template, self._spec.leaves
        if not isinstance(template, Node) or template.kind != "tuple" or template.children != (*range(len(columns)),):
            return False
        for leaf, column in zip(leaves, columns, strict=True):
            exact = int if column.is_number else column.dtype
            if leaf.kind != ("int" if column.is_number else "array") or (leaf.exact, leaf.shape) != (
                exact,
                column.shape,
            ):
                return False
        offset = 0
        for leaf, column in zip(leaves, columns, strict=True):
            size = leaf.nbytes
            column.write(bodies, self._slab[offset + self._first * size : offset + (self._first + count) * size])
            offset += aligned(size * self._capacity)
        self.count += count
        return True

    def written(self) -> list[Any]:
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


def _write_leaf(leaf: Leaf, values: list[Any], here: memoryview) -> None:
    if leaf.kind in ("tensor", "array"):
        raw = torch.frombuffer(here, dtype=torch.uint8)
        assert leaf.dtype is not None
        target = raw.view(leaf.dtype).view(len(values), *leaf.shape)
        tensors = values if leaf.kind == "tensor" else [torch.from_numpy(v) for v in values]
        if leaf.nbytes >= _SLOT_BYTES:
            for row, tensor in zip(target, tensors, strict=True):
                row.copy_(tensor)
        else:
            torch.stack(tensors, out=target)
        return
    dtype = np.dtype({"float": "f8", "int": "i8", "bool": "?"}.get(leaf.kind) or leaf.exact)
    try:
        np.frombuffer(here, dtype)[:] = values
    except OverflowError:
        raise Mismatch from None


def _values(leaf: Leaf, here: memoryview, count: int) -> list[Any]:
    """What `_write_leaf` wrote."""
    if leaf.kind == "tensor":
        assert leaf.dtype is not None
        if not here.nbytes:
            return [torch.empty(leaf.shape, dtype=leaf.dtype) for _ in range(count)]
        return list(torch.frombuffer(here, dtype=torch.uint8).view(leaf.dtype).view(count, *leaf.shape))
    if leaf.kind == "array":
        return list(np.frombuffer(here, leaf.exact).reshape(count, *leaf.shape))
    dtype = np.dtype({"float": "f8", "int": "i8", "bool": "?"}.get(leaf.kind) or leaf.exact)
    array = np.frombuffer(here, dtype)
    return list(array) if leaf.kind == "scalar" else list(array.tolist())


def _sample(template: Node | int, values: list[Any]) -> Any:
    if isinstance(template, int):
        return values[template]
    children = [_sample(child, values) for child in template.children]
    if template.kind == "dict":
        return dict(zip(template.keys, children, strict=True))
    if template.kind == "namedtuple":
        return template.cls(*children)
    return tuple(children) if template.kind == "tuple" else children


def _flattener(template: Node | int, leaves: list[Leaf]) -> Callable[[Any], list[Any]]:
    """A function from a sample to the list of its leaves' values, which raises Mismatch for any other form."""
    visit = _visitor(template, leaves)

    def flatten(sample: Any) -> list[Any]:
        out: list[Any] = []
        visit(sample, out)
        return out

    return flatten


def _visitor(template: Node | int, leaves: list[Leaf]) -> Callable[[Any, list[Any]], None]:
    if isinstance(template, int):
        return _leaf_visitor(leaves[template])
    children = [_visitor(child, leaves) for child in template.children]
    if template.kind == "dict":
        keys = template.keys

        def visit_dict(value: Any, out: list[Any]) -> None:
            if type(value) is not dict or tuple(value) != keys:
                raise Mismatch
            for child, item in zip(children, value.values(), strict=True):
                child(item, out)

        return visit_dict
    exact: Any = {"list": list, "tuple": tuple}.get(template.kind, template.cls)

    def visit_sequence(value: Any, out: list[Any]) -> None:
        if type(value) is not exact or len(value) != len(children):
            raise Mismatch
        for child, item in zip(children, value, strict=True):
            child(item, out)

    return visit_sequence


def _leaf_visitor(leaf: Leaf) -> Callable[[Any, list[Any]], None]:
    dtype, shape, exact = leaf.dtype, leaf.shape, leaf.exact

    def visit_tensor(value: Any, out: list[Any]) -> None:
        if type(value) is not torch.Tensor or value.dtype is not dtype or value.shape != shape:
            raise Mismatch
        if value.layout is not torch.strided or value.device.type != "cpu" or value.requires_grad:
            raise Mismatch
        out.append(value)

    def visit_array(value: Any, out: list[Any]) -> None:
        if type(value) is not np.ndarray or value.dtype != exact or value.shape != shape:
            raise Mismatch
        if not value.flags.writeable or any(stride < 0 for stride in value.strides):
            value = value.copy()
        out.append(value)

    def visit_value(value: Any, out: list[Any]) -> None:
        if type(value) is not exact:
            raise Mismatch
        out.append(value)

    return {"tensor": visit_tensor, "array": visit_array}.get(leaf.kind, visit_value)


def _build(template: Node | int, values: list[Any]) -> Any:
    if isinstance(template, int):
        return values[template]
    children = [_build(child, values) for child in template.children]
    if template.kind == "dict":
        return dict(zip(template.keys, children, strict=True))
    for k, child in enumerate(template.children):
        if isinstance(child, int) and type(children[k]) is list:
            children[k] = tuple(children[k])  # torch transposes sequences, and leaves strings as that gives them
    if template.kind == "namedtuple":
        return template.cls(*children)
    return children  # torch makes a list of a tuple too


def aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
