"""The form of a sample, and where its values lie in the slab of a batch.

A spec is taken from one sample. Samples of exactly that form are written into slots; for all others torch's own
function makes the batch, so that the result is equal to torch's by construction or by a check of exact types.
"""

from __future__ import annotations

import abc
import functools
import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.torch_compat.leaves import Leaf, Mismatch, Taker, leaf_of

_COPY_BYTES = 4096  # leaves of this size leave the slab: keeping the labels must not keep the images
_ALIGNMENT = 64


class _Template(abc.ABC):
    """A sample's containers; its leaves are numbered from the left."""

    @abc.abstractmethod
    def taker(self, leaves: Sequence[Leaf]) -> Taker:
        """What takes the leaves of a sample of exactly this form."""

    @abc.abstractmethod
    def divide(self, samples: Sequence[Any], leaves: Sequence[Leaf], out: list[Sequence[object]]) -> None:
        """Put the values of many samples at the end of `out`, one leaf after the other; Mismatch for any other form."""

    @abc.abstractmethod
    def sample(self, values: Sequence[object]) -> object:
        """A sample, of its leaves' values."""

    @abc.abstractmethod
    def batch(self, values: Sequence[object]) -> object:
        """A batch as torch collates it, of what it has for each leaf."""

    def batch_in_sequence(self, values: Sequence[object]) -> object:
        """The same, where the container around it is a sequence."""
        return self.batch(values)


@dataclass(frozen=True)
class _Place(_Template):
    """One leaf: its number."""

    number: int

    def taker(self, leaves: Sequence[Leaf]) -> Taker:
        return leaves[self.number].taker()

    def divide(self, samples: Sequence[Any], leaves: Sequence[Leaf], out: list[Sequence[object]]) -> None:
        leaves[self.number].check(samples)
        out.append(samples)

    def sample(self, values: Sequence[object]) -> object:
        return values[self.number]

    def batch(self, values: Sequence[object]) -> object:
        return values[self.number]

    def batch_in_sequence(self, values: Sequence[object]) -> object:
        """Torch transposes sequences, and leaves strings as that gives them."""
        value = values[self.number]
        return tuple(value) if type(value) is list else value


@dataclass(frozen=True)
class _Dict(_Template):
    keys: tuple[object, ...]
    children: tuple[_Template, ...]

    def taker(self, leaves: Sequence[Leaf]) -> Taker:
        keys, takers = self.keys, [child.taker(leaves) for child in self.children]

        def take(value: object, out: list[object]) -> None:
            if type(value) is not dict or tuple(value) != keys:
                raise Mismatch
            for child, part in zip(takers, value.values(), strict=True):
                child(part, out)

        return take

    def divide(self, samples: Sequence[Any], leaves: Sequence[Leaf], out: list[Sequence[object]]) -> None:
        if set(map(type, samples)) - {dict} or set(map(tuple, samples)) - {self.keys}:
            raise Mismatch
        for key, child in zip(self.keys, self.children, strict=True):
            child.divide(list(map(operator.itemgetter(key), samples)), leaves, out)

    def sample(self, values: Sequence[object]) -> object:
        return dict(zip(self.keys, [child.sample(values) for child in self.children], strict=True))

    def batch(self, values: Sequence[object]) -> object:
        return dict(zip(self.keys, [child.batch(values) for child in self.children], strict=True))


@dataclass(frozen=True)
class _Sequence(_Template):
    cls: type[list[object] | tuple[object, ...]]
    children: tuple[_Template, ...]

    def taker(self, leaves: Sequence[Leaf]) -> Taker:
        exact, takers = self.cls, [child.taker(leaves) for child in self.children]

        def take(value: object, out: list[object]) -> None:
            if type(value) is not exact or len(value) != len(takers):
                raise Mismatch
            for child, part in zip(takers, value, strict=True):
                child(part, out)

        return take

    def divide(self, samples: Sequence[Any], leaves: Sequence[Leaf], out: list[Sequence[object]]) -> None:
        if set(map(type, samples)) - {self.cls} or set(map(len, samples)) - {len(self.children)}:
            raise Mismatch
        for k, child in enumerate(self.children):
            child.divide(list(map(operator.itemgetter(k), samples)), leaves, out)

    def sample(self, values: Sequence[object]) -> object:
        return self.cls(child.sample(values) for child in self.children)

    def batch(self, values: Sequence[object]) -> object:
        return [child.batch_in_sequence(values) for child in self.children]  # torch makes a list of a tuple too


class _NamedTuple(_Sequence):
    @property
    def _make(self) -> Callable[..., object]:
        return self.cls

    def sample(self, values: Sequence[object]) -> object:
        return self._make(*[child.sample(values) for child in self.children])

    def batch(self, values: Sequence[object]) -> object:
        return self._make(*[child.batch_in_sequence(values) for child in self.children])


def _template(value: object, leaves: list[Leaf]) -> _Template:
    if type(value) is dict:
        return _Dict(tuple(value), tuple(_template(part, leaves) for part in value.values()))
    if type(value) is list or type(value) is tuple:
        return _Sequence(type(value), tuple(_template(part, leaves) for part in value))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return _NamedTuple(type(value), tuple(_template(part, leaves) for part in value))
    leaves.append(leaf_of(value))
    return _Place(len(leaves) - 1)


class Spec:
    """The form of a sample, and where its values lie in a slab: one array for each leaf, one after the other."""

    def __init__(self, template: _Template, leaves: list[Leaf]) -> None:
        self._template, self.leaves = template, leaves
        self._take = template.taker(leaves)

    @classmethod
    def of(cls, sample: object) -> Spec | None:
        """The spec of `sample`; None where batches of its kind are torch's business."""
        leaves: list[Leaf] = []
        try:
            template = _template(sample, leaves)
        except Mismatch:
            return None
        return cls(template, leaves)

    def __reduce__(self) -> tuple[Callable[..., Spec], tuple[_Template, list[Leaf]]]:
        return Spec, (self._template, self.leaves)

    def dumps(self) -> bytes:
        """The spec as bytes, with the user's own named tuples in it."""
        from headrace.torch_compat.serialize import pack_bytes

        return pack_bytes(self)

    @staticmethod
    def loads(blob: bytes) -> Spec:
        """The spec of `dumps`."""
        from headrace.torch_compat.serialize import unpack_bytes

        spec: Spec = unpack_bytes(blob)
        return spec

    def fits(self, sample: object) -> bool:
        """Whether `sample` has this form."""
        try:
            self._flatten(sample)
        except Mismatch:
            return False
        return True

    def is_tuple_of(self, count: int) -> bool:
        """Whether samples are tuples of so many values, none of which is a container."""
        return self._template == _Sequence(tuple, tuple(map(_Place, range(count))))

    def is_dict_of(self, names: Sequence[str]) -> bool:
        """Whether samples are dicts of these names, in this order, and none of their values is a container."""
        return self._template == _Dict(tuple(names), tuple(map(_Place, range(len(names)))))

    def columns(self, sample: object) -> list[list[object]]:
        """What `write` would give for `sample` alone."""
        return [[value] for leaf, value in zip(self.leaves, self._flatten(sample), strict=True) if leaf.dtype is None]

    @functools.cached_property
    def sample_bytes(self) -> int:
        """Bytes of one sample's slots."""
        return sum(leaf.nbytes for leaf in self.leaves)

    def nbytes(self, capacity: int) -> int:
        """Bytes of a slab of `capacity` slots."""
        return sum(aligned(leaf.nbytes * capacity) for leaf in self.leaves)

    def write(self, samples: Sequence[object], slab: memoryview, slot: int, capacity: int) -> list[list[object]]:
        """Write samples into the slots from `slot` on; gives the columns of the leaves that have no slots.

        Raises:
            Mismatch: a sample has another form. Slots of this call may have been written.
        """
        taken: list[Sequence[object]] = []
        self._template.divide(samples, self.leaves, taken)
        columns, offset = list[list[object]](), 0
        for leaf, column in zip(self.leaves, taken, strict=True):
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
        """The first `count` samples that were written, equal to what they were; their arrays are views of the slab."""
        lists: list[list[object]] = []
        offset, column = 0, iter(columns)
        for leaf in self.leaves:
            if leaf.dtype is None:
                lists.append(list(next(column)))
                continue
            lists.append(leaf.values(slab[offset : offset + leaf.nbytes * count], count))
            offset += aligned(leaf.nbytes * capacity)
        return [self._template.sample([values[k] for values in lists]) for k in range(count)]

    def read(
        self,
        slab: NDArray[np.uint8],
        count: int,
        capacity: int,
        columns: Sequence[Sequence[object]],
        *,
        copy: bool,
        holes: Collection[int] = (),
    ) -> object:
        """The batch as torch's default_collate would have made it.

        Args:
            slab: a uint8 array over the slab; tensors are views of it and keep it alive, small ones are copies.
            count: how many slots are meant, from the first on.
            columns: what `write` gave, all chunks of the batch one after the other.
            copy: make copies of all.
            holes: those slots among them that hold no sample.
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
            tensor = torch.from_numpy(slab[offset : offset + size]).view(leaf.torch_dtype).view(count, *leaf.shape)
            offset += aligned(leaf.nbytes * capacity)
            if holes:
                values.append(tensor[kept])
            else:
                values.append(tensor.clone() if copy or size <= _COPY_BYTES else tensor)
        return self._template.batch(values)

    def _flatten(self, sample: object) -> list[object]:
        """The values of its leaves; Mismatch for any other form."""
        out: list[object] = []
        self._take(sample, out)
        return out


def aligned(size: int) -> int:
    """The size with what is left free behind it."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT
