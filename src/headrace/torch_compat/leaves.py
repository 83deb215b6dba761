"""Leaves of samples: the form of each value, and its encoding in a slab."""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.lately import is_tensor

if TYPE_CHECKING:
    import torch

__all__ = ["ArrayLeaf", "ColumnLeaf", "Leaf", "Mismatch", "NumberLeaf", "Taker", "leaf_of"]

_SLOT_BYTES = 65536  # leaves of this size or more are written one by one, smaller ones in chunks

Taker = Callable[[object, list[object]], None]
"""Appends the leaf values of a (part of a) sample to a list, or raises Mismatch."""


class Mismatch(Exception):
    """A sample does not have the form of the spec."""


@dataclass(frozen=True)
class Leaf(abc.ABC):
    """Form of one value of a sample.

    Attributes:
        dtype: torch's name of the dtype in a batch. None if a batch has a list of the values instead of slots.
        shape: Shape of one value.
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
    def taker(self) -> Taker:
        """Return a function that accepts a value of exactly this form."""

    def check(self, values: Sequence[object]) -> None:
        take, out = self.taker(), list[object]()
        for value in values:
            take(value, out)

    @abc.abstractmethod
    def write(self, values: list[Any], here: memoryview) -> None:
        """Write accepted values into their slots, or raise Mismatch if one cannot be stored exactly."""

    @abc.abstractmethod
    def values(self, here: memoryview, count: int) -> list[object]:
        """Read values that `write` wrote. Arrays and tensors are views of the slots."""


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

    def taker(self) -> Taker:
        import torch

        dtype, shape = self.torch_dtype, self.shape

        def take(value: object, out: list[object]) -> None:
            if type(value) is not torch.Tensor or value.dtype is not dtype or value.shape != shape:
                raise Mismatch
            if value.layout is not torch.strided or value.device.type != "cpu" or value.requires_grad:
                raise Mismatch
            out.append(value)

        return take

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

    def taker(self) -> Taker:
        shape, exact = self.shape, self.exact

        def take(value: object, out: list[object]) -> None:
            if type(value) is not np.ndarray or value.dtype != exact or value.shape != shape:
                raise Mismatch
            out.append(value)

        return take

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

    def taker(self) -> Taker:
        exact = self.exact

        def take(value: object, out: list[object]) -> None:
            if type(value) is not exact:
                raise Mismatch
            out.append(value)

        return take

    def check(self, values: Sequence[object]) -> None:
        if set(map(type, values)) - {self.exact}:
            raise Mismatch


class NumberLeaf(_ExactLeaf):
    def write(self, values: list[Any], here: memoryview) -> None:
        try:
            np.frombuffer(here, self.exact)[:] = values
        except OverflowError:
            raise Mismatch from None

    def values(self, here: memoryview, count: int) -> list[object]:  # noqa: ARG002
        return list(np.frombuffer(here, self.exact).tolist())


class ScalarLeaf(NumberLeaf):
    def values(self, here: memoryview, count: int) -> list[object]:  # noqa: ARG002
        return list(np.frombuffer(here, self.exact))


class ColumnLeaf(_ExactLeaf):
    """Text or bytes. A batch has a list of them, outside the slots."""

    def write(self, values: list[Any], here: memoryview) -> None:
        raise NotImplementedError

    def values(self, here: memoryview, count: int) -> list[object]:
        raise NotImplementedError


def _tensor_leaf(value: torch.Tensor) -> Leaf:
    import torch

    if value.layout is not torch.strided or value.device.type != "cpu" or value.requires_grad or value.is_quantized:
        raise Mismatch
    if value.is_nested:
        raise Mismatch
    return TensorLeaf(str(value.dtype).removeprefix("torch."), tuple(value.shape))


def _array_leaf(value: np.ndarray[Any, np.dtype[np.generic]]) -> Leaf:
    return ArrayLeaf(name_of(value.dtype), value.shape, value.dtype)


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
        return _array_leaf(value)
    if isinstance(value, np.generic) and value.dtype.kind in "fiub":
        return ScalarLeaf(name_of(value.dtype), exact=kind)
    raise Mismatch
