"""The values of a sample: what form each has, how it is written into a slab, and how it is read from there."""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

__all__ = ["ArrayLeaf", "ColumnLeaf", "Leaf", "Mismatch", "NumberLeaf", "Taker", "leaf_of"]

_SLOT_BYTES = 65536  # leaves of this size are written one by one, smaller ones a chunk at a time

Taker = Callable[[object, list[object]], None]
"""Puts what a sample has at some place at the end of a list, or raises Mismatch."""


class Mismatch(Exception):
    """A sample does not have the form of the spec."""


@dataclass(frozen=True)
class Leaf(abc.ABC):
    """One value of a sample.

    Attributes:
        dtype: of what a batch has of it; None where a batch has a list of such values, and they have no slots.
        shape: of one value.
    """

    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of one sample's value in the slab."""
        return 0 if self.dtype is None else math.prod(self.shape) * self.dtype.itemsize

    @abc.abstractmethod
    def taker(self) -> Taker:
        """What takes a value of exactly this form."""

    def check(self, values: Sequence[object]) -> None:
        """Raise Mismatch where one of some values has another form."""
        take, out = self.taker(), list[object]()
        for value in values:
            take(value, out)

    @abc.abstractmethod
    def write(self, values: list[Any], here: memoryview) -> None:
        """Write values that were taken into their slots.

        Raises:
            Mismatch: a value cannot be written so that it reads as it was.
        """

    @abc.abstractmethod
    def values(self, here: memoryview, count: int) -> list[Any]:
        """What `write` wrote; arrays and tensors are views of the slots."""


class TensorLeaf(Leaf):
    """A tensor in the host's memory."""

    dtype: torch.dtype

    def taker(self) -> Taker:
        dtype, shape = self.dtype, self.shape

        def take(value: object, out: list[object]) -> None:
            if type(value) is not torch.Tensor or value.dtype is not dtype or value.shape != shape:
                raise Mismatch
            if value.layout is not torch.strided or value.device.type != "cpu" or value.requires_grad:
                raise Mismatch
            out.append(value)

        return take

    def write(self, values: list[Any], here: memoryview) -> None:
        target = torch.frombuffer(here, dtype=torch.uint8).view(self.dtype).view(len(values), *self.shape)
        if self.nbytes >= _SLOT_BYTES:
            for row, tensor in zip(target, values, strict=True):
                row.copy_(tensor)
        else:
            torch.stack(values, out=target)

    def values(self, here: memoryview, count: int) -> list[torch.Tensor]:
        if not here.nbytes:
            return [torch.empty(self.shape, dtype=self.dtype) for _ in range(count)]
        return list(torch.frombuffer(here, dtype=torch.uint8).view(self.dtype).view(count, *self.shape))


@dataclass(frozen=True)
class ArrayLeaf(TensorLeaf):
    """An array, of which a batch has a tensor.

    Attributes:
        exact: the array's own dtype.
    """

    exact: np.dtype[np.generic] | None = None

    def taker(self) -> Taker:
        shape, exact = self.shape, self.exact

        def take(value: object, out: list[object]) -> None:
            if type(value) is not np.ndarray or value.dtype != exact or value.shape != shape:
                raise Mismatch
            out.append(value)

        return take

    def write(self, values: list[Any], here: memoryview) -> None:
        """By numpy, which takes arrays as they are: torch would make a tensor of each first, in six times the time."""
        target = np.frombuffer(here, self.exact).reshape(len(values), *self.shape)
        if self.shape and self.nbytes < _SLOT_BYTES:
            np.concatenate(values, out=target.reshape(-1, *self.shape[1:]))
        else:
            for k, value in enumerate(values):
                target[k] = value

    def values(self, here: memoryview, count: int) -> list[Any]:
        return list(np.frombuffer(here, self.exact).reshape(count, *self.shape))


@dataclass(frozen=True)
class _ExactLeaf(Leaf):
    """A value whose form is its type.

    Attributes:
        exact: the type.
    """

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
    """A number of Python's."""

    def write(self, values: list[Any], here: memoryview) -> None:
        try:
            np.frombuffer(here, self.exact)[:] = values
        except OverflowError:
            raise Mismatch from None

    def values(self, here: memoryview, count: int) -> list[Any]:  # noqa: ARG002
        return list(np.frombuffer(here, self.exact).tolist())


class ScalarLeaf(NumberLeaf):
    """A number of numpy's."""

    def values(self, here: memoryview, count: int) -> list[Any]:  # noqa: ARG002
        return list(np.frombuffer(here, self.exact))


class ColumnLeaf(_ExactLeaf):
    """Text or bytes: a batch has a list of them, beside the slots."""

    def write(self, values: list[Any], here: memoryview) -> None:
        raise NotImplementedError

    def values(self, here: memoryview, count: int) -> list[Any]:
        raise NotImplementedError


def _tensor_leaf(value: torch.Tensor) -> Leaf:
    if value.layout is not torch.strided or value.device.type != "cpu" or value.requires_grad or value.is_quantized:
        raise Mismatch
    if value.is_nested:
        raise Mismatch
    return TensorLeaf(value.dtype, tuple(value.shape))


def _array_leaf(value: np.ndarray[Any, np.dtype[np.generic]]) -> Leaf:
    return ArrayLeaf(_torch_dtype(value.dtype), value.shape, value.dtype)


def _torch_dtype(dtype: np.dtype[np.generic]) -> torch.dtype:
    try:
        return torch.from_numpy(np.empty(0, dtype)).dtype
    except (TypeError, ValueError):
        raise Mismatch from None


_LEAVES_OF_TYPES: dict[type, Leaf] = {
    float: NumberLeaf(torch.float64, exact=float),
    bool: NumberLeaf(torch.bool, exact=bool),
    int: NumberLeaf(torch.int64, exact=int),
    str: ColumnLeaf(exact=str),
    bytes: ColumnLeaf(exact=bytes),
}
"""Of values whose form is their type, and no type derived from it."""


def leaf_of(value: object) -> Leaf:
    """The form of a value.

    Raises:
        Mismatch: batches of its kind are torch's business.
    """
    kind = type(value)
    if kind in _LEAVES_OF_TYPES:
        return _LEAVES_OF_TYPES[kind]
    if type(value) is torch.Tensor:
        return _tensor_leaf(value)
    if type(value) is np.ndarray:
        return _array_leaf(value)
    if isinstance(value, np.generic) and value.dtype.kind in "fiub":
        return ScalarLeaf(_torch_dtype(value.dtype), exact=kind)
    raise Mismatch
