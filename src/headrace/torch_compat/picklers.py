"""Picklers for objects sent to workers and back.

Classes and functions of the user's script are pickled by value (cloudpickle), and refer to the script's own when they
return.
"""

from __future__ import annotations

import functools
import io
import pickle
import sys
from collections import ChainMap
from collections.abc import Callable
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

import cloudpickle
import numpy as np

from headrace.lately import is_tensor, tensor_types
from headrace.torch_compat import reducers
from headrace.torch_compat.by_value import (
    Cells,
    has_modules,
    load_home,
    modules_by_value,
    packing,
    reduced_class,
    reduced_code,
    reduced_code_with_lines,
    reduced_function,
    reference_to,
)
from headrace.types import Buffer

if TYPE_CHECKING:
    import torch

_CARRIED_DEVICES = ("cpu", "meta")


class Packer(cloudpickle.Pickler):  # type: ignore[misc]
    lets_go_of_graphs = is_outward = False
    dispatch_table: ClassVar[Any] = ChainMap({CodeType: reduced_code}, cloudpickle.Pickler.dispatch_table)

    def dump(self, obj: object) -> None:
        if not has_modules():
            super().dump(obj)
            return
        with packing():
            super().dump(obj)

    def reducer_override(self, obj: object) -> Any:
        if isinstance(obj, io.TextIOWrapper) and obj not in (sys.stdout, sys.stderr):
            raise TypeError("an open file cannot be pickled")  # cloudpickle would copy the file's content
        if isinstance(obj, tensor_types()):
            self._check_tensor(obj)
        if is_tensor(obj) and _is_plain(obj):
            return _form_of_tensor(obj)
        if isinstance(obj, type):
            reference = None if self.is_outward else reference_to(obj)
            if reference is not None:
                return reference
            load_home(obj)
            return reduced_class(super().reducer_override(obj), obj, outward=self.is_outward)
        return super().reducer_override(obj)

    def _check_tensor(self, tensor: torch.Tensor) -> None:
        if tensor.device.type not in _CARRIED_DEVICES:
            raise TypeError(
                f"a tensor on {tensor.device} cannot be sent to another process; "
                "leave tensors on the CPU in the data set and in workers, and move batches in the training loop"
            )
        if tensor.grad_fn is not None and not self.lets_go_of_graphs:
            raise RuntimeError(
                "a tensor that requires gradients and is no leaf would lose what it was made of; detach it"
            )


class NamingPacker(Packer):
    """For data that outlives this process: classes and functions are pickled by name only."""

    def reducer_override(self, obj: object) -> Any:
        return NotImplemented if isinstance(obj, type | FunctionType) else super().reducer_override(obj)


class OutwardPacker(Packer):
    """For objects sent to workers. Mapped files are mapped again, shared tensors stay shared.

    To be used within `descriptors.sending`.

    Attributes:
        modules: Names of the modules used.
        named: Functions and classes pickled by value that can be found by name in their modules.
    """

    is_outward = True
    dispatch_table: ClassVar = ChainMap({CodeType: reduced_code_with_lines}, cloudpickle.Pickler.dispatch_table)
    lets_go_of_graphs = True  # as with a forked data set; errors appear with its samples

    def __init__(
        self,
        out: io.BytesIO,
        buffer_callback: Callable[[pickle.PickleBuffer], object] | None,
    ) -> None:
        super().__init__(out, protocol=5, buffer_callback=buffer_callback)
        self._cells: Cells = {}
        self.modules: set[str] = set()
        self.named: list[object] = []
        self._by_value = {"__main__", *modules_by_value()}
        self._plain: set[type] = set()  # types without special handling

    def reducer_override(self, obj: object) -> Any:
        kind = type(obj)
        if kind in self._plain:
            return NotImplemented
        if isinstance(obj, ModuleType):
            self.modules.add(obj.__name__)
        elif isinstance(obj, _NAMED) and isinstance(obj.__module__, str):
            self.modules.add(obj.__module__)
            if obj.__module__ in self._by_value and vars(sys.modules[obj.__module__]).get(obj.__name__) is obj:
                self.named.append(obj)
        if isinstance(obj, FunctionType):
            return reduced_function(super().reducer_override(obj), obj, self._cells)
        found = reducers.reduced(obj)
        if found is None:
            found = super().reducer_override(obj)
            asks = kind.__module__ in _SPECIAL or issubclass(kind, (type, ModuleType, np.ndarray, *tensor_types()))
            if found is NotImplemented and not asks:
                self._plain.add(kind)
        return reducers.with_attributes(obj, found) if is_tensor(obj) else found


_NAMED = (type, FunctionType, BuiltinFunctionType, functools._lru_cache_wrapper)
_SPECIAL = ("builtins", "functools", "_io", "numpy", "torch", "torch.storage", reducers.PIPES)  # homes of special types


def _form_of_tensor(tensor: torch.Tensor) -> tuple[object, ...]:
    import torch

    order = _order(tensor)
    laid = tensor.detach() if order is None else tensor.detach().permute(order)
    flat = laid.contiguous().view(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
    memory: Any = flat.numpy()
    return tensor_of, (pickle.PickleBuffer(memory), tensor.dtype, tuple(laid.shape), tensor.requires_grad, order)


def _is_plain(tensor: torch.Tensor) -> bool:
    import torch

    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and tensor.grad_fn is None
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.is_quantized
        and not tensor.is_nested
    )


def _order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the dimensions in memory order. None if the tensor is contiguous or has gaps."""
    if tensor.is_contiguous():
        return None
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda dimension: -strides[dimension]))
    return order if tensor.permute(order).is_contiguous() else None


def tensor_of(
    buffer: Buffer,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    requires_grad: bool,
    order: tuple[int, ...] | None = None,
) -> torch.Tensor:
    """Return a tensor over a buffer. `order` gives the dimensions in memory order."""
    import torch

    data = np.frombuffer(buffer, np.uint8)
    flat = torch.from_numpy(data) if data.flags.writeable else torch.from_numpy(data.copy())
    tensor = flat.view(dtype).view(shape)
    if order is not None:
        tensor = tensor.permute([order.index(dimension) for dimension in range(len(order))])
    return tensor.requires_grad_(requires_grad)
