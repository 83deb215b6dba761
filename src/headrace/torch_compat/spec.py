"""Specs: the form of a sample, and the layout of its values in a batch's slab.

A spec is derived from one sample. Samples of exactly that form are written into slots. All others are collated by
torch's function. So the result always equals torch's.
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

_COPY_BYTES = 4096  # leaves up to this size are copied: keeping the labels must not keep the images
_ALIGNMENT = 64


class _Template(abc.ABC):
    """Containers of a sample. Leaves are numbered from the left."""

    @abc.abstractmethod
    def taker(self, leaves: Sequence[Leaf]) -> Taker:
        """Return a function that collects the leaves of a sample of exactly this form."""

    @abc.abstractmethod
    def divide(self, samples: Sequence[Any], leaves: Sequence[Leaf], out: list[Sequence[object]]) -> None:
        """Append the values of many samples to `out`, leaf by leaf, or raise Mismatch."""

    @abc.abstractmethod
    def sample(self, values: Sequence[object]) -> object: ...

    @abc.abstractmethod
    def batch(self, values: Sequence[object]) -> object:
        """Return a batch as torch collates it, made of the batch's value of each leaf."""

    def batch_in_sequence(self, values: Sequence[object]) -> object:
        """Same as `batch`, inside a sequence."""
        return self.batch(values)


@dataclass(frozen=True)
class _Place(_Template):
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
        """Return texts as a tuple: torch transposes sequences, which makes tuples of them."""
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
        return [child.batch_in_sequence(values) for child in self.children]  # torch makes a list, also of a tuple


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
    """Form of a sample, and layout of a slab: one array per leaf, in order."""

    def __init__(self, template: _Template, leaves: list[Leaf]) -> None:
        self._template, self.leaves = template, leaves
        self._take = template.taker(leaves)

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
    def loads(blob: bytes) -> Spec:
        from headrace.torch_compat.serialize import unpack_bytes

        spec: Spec = unpack_bytes(blob)
        return spec

    def fits(self, sample: object) -> bool:
        try:
            self._flatten(sample)
        except Mismatch:
            return False
        return True

    def is_tuple_of(self, count: int) -> bool:
        """True if samples are tuples of `count` values without nested containers."""
        return self._template == _Sequence(tuple, tuple(map(_Place, range(count))))

    def is_dict_of(self, names: Sequence[str]) -> bool:
        """True if samples are dicts with these names in this order, without nested containers."""
        return self._template == _Dict(tuple(names), tuple(map(_Place, range(len(names)))))

    def columns(self, sample: object) -> list[list[object]]:
        """Return the columns that `write` would return for `sample` alone."""
        return [[value] for leaf, value in zip(self.leaves, self._flatten(sample), strict=True) if leaf.dtype is None]

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
        """Return the first `count` samples written. Their arrays are views of the slab."""
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
        """Return the batch as torch's default_collate would make it.

        Args:
            slab: The slab's bytes. Large tensors are views of it and keep it alive; small ones are copies.
            count: Number of slots to read.
            columns: Return values of `write`, concatenated over the batch's tasks.
            copy: True to copy all tensors.
            holes: Slots among them without a sample.
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
        out: list[object] = []
        self._take(sample, out)
        return out


def aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
