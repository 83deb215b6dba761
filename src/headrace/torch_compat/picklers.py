"""The picklers: what is pickled for each object, on its way to workers and back.

Classes and functions of the user's script travel by value (cloudpickle), and come back as the script's own.
"""

from __future__ import annotations

import functools
import io
import pickle
import sys
from collections import ChainMap
from collections.abc import Callable, Iterable
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

import cloudpickle
import numpy as np

from headrace.lately import is_tensor, tensor_types
from headrace.torch_compat import mapped_values, reducers, spawning, views, without_maps
from headrace.torch_compat.by_value import (
    Cells,
    has_modules,
    is_by_name,
    load_home,
    modules_by_value,
    packing,
    reduced_class,
    reduced_code,
    reduced_code_with_lines,
    reduced_function,
    reference_to,
)
from headrace.torch_compat.mappings import Mappings
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
            raise TypeError("an open file cannot be pickled")  # cloudpickle would carry a copy of all that it reads
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
    """For what is kept longer than this process: classes and functions go by their names, or not at all."""

    def reducer_override(self, obj: object) -> Any:
        return NotImplemented if isinstance(obj, type | FunctionType) else super().reducer_override(obj)


class OutwardPacker(Packer):
    """For what workers need: what is mapped is mapped again, and what is shared stays shared.

    Args:
        descriptors: what workers need beside the bytes is put here.
        mappings: of this process; None where the system does not say.

    Attributes:
        modules: the names of the modules that were met.
        named: functions and classes that go by value, and can be found by name in their modules.
        gaps: of the arrays and tensors whose buffers have gaps, for `views.gathered`.
    """

    is_outward = True
    dispatch_table: ClassVar = ChainMap({CodeType: reduced_code_with_lines}, cloudpickle.Pickler.dispatch_table)
    lets_go_of_graphs = True  # as a data set that is forked: what comes of it is found out with its samples

    def __init__(
        self,
        out: io.BytesIO,
        descriptors: list[int],
        mappings: Mappings | None,
        buffer_callback: Callable[[pickle.PickleBuffer], object] | None,
    ) -> None:
        super().__init__(out, protocol=5, buffer_callback=buffer_callback)
        self._descriptors, self._mappings = descriptors, mappings
        self._cells: Cells = {}
        self.modules: set[str] = set()
        self.named: list[object] = []
        self.gaps: views.Gaps = {}
        self._by_value = {"__main__", *modules_by_value()}
        self._ordinary: set[type] = set()  # kinds of which there is nothing to ask

    def reducer_override(self, obj: object) -> Any:
        kind = type(obj)
        if kind in self._ordinary:
            return NotImplemented
        if isinstance(obj, ModuleType):
            self.modules.add(obj.__name__)
        elif kind is not np.ndarray and kind not in tensor_types() and _has_a_home(obj):
            self.modules.add(obj.__module__)
            if obj.__module__ in self._by_value and _has_its_name(obj):
                self.named.append(obj)
        if type(obj) is FunctionType:
            return reduced_function(super().reducer_override(obj), obj, self._cells)
        found = self._form_of_memory(obj) or reducers.reduced(obj, is_by_name)
        if found is None:
            found = super().reducer_override(obj)
            if found is NotImplemented and reducers.is_ordinary(kind):
                self._ordinary.add(kind)
        return reducers.with_attributes(obj, found) if is_tensor(obj) else found

    def _form_of_memory(self, obj: object) -> reducers.Reduced | None:
        mappings = self._mappings
        if is_tensor(obj):
            if not _is_plain(obj):
                return None
            if mappings is not None:
                form = mapped_values.form_of_tensor(obj, mappings)
            else:
                form = mapped_values.form_on_storage(obj) if obj.is_shared() else None  # type: ignore[no-untyped-call]
            has_gaps = obj.numel() and not obj.is_contiguous() and _order(obj) is None
            return views.form_of_tensor(obj, self.gaps) if form is None and has_gaps else form
        form = spawning.form_of(obj, mappings)
        if form is None and mappings is None:
            form = without_maps.form_of(obj, self._descriptors)
        if form is None and isinstance(obj, np.ndarray):
            return views.form_of_array(obj, self.gaps, mappings)
        return mapped_values.form_of(obj, mappings) if form is None and mappings is not None else form


class ReferringPacker(OutwardPacker):
    """The same for what refers to things that are there already.

    Args:
        reference: gives of each object what stands for it; None: it is packed itself.
        **named: as `OutwardPacker` has them.
    """

    def __init__(self, out: io.BytesIO, reference: Callable[[object], object], **named: Any) -> None:
        super().__init__(out, **named)
        self._reference = reference

    def persistent_id(self, obj: object) -> object:
        """Called by the pickler."""
        return self._reference(obj)


class ReferringUnpacker(pickle.Unpickler):
    """The reverse.

    Args:
        data: the pickle.
        buffers: that belong to it.
        referred: gives what a reference stands for.
    """

    def __init__(self, data: Buffer, buffers: Iterable[object], referred: Callable[[Any], object]) -> None:
        super().__init__(io.BytesIO(data), buffers=buffers)
        self._referred = referred

    def persistent_load(self, reference: object) -> object:
        """Called by the unpickler."""
        return self._referred(reference)


def _has_a_home(what: object) -> bool:
    """Whether it says in which module it is found; objects that have an answer to everything are not asked."""
    return (
        not reducers.guesses(type(what))
        and hasattr(what, "__qualname__")
        and isinstance(getattr(what, "__module__", None), str)
    )


def _has_its_name(what: Any) -> bool:
    """Whether a function or class is what its module has under its name."""
    is_named = isinstance(what, type | FunctionType | functools._lru_cache_wrapper)
    return is_named and vars(sys.modules[what.__module__]).get(what.__name__) is what


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
    """The dimensions in the order in which they lie in memory; None where that is theirs, or memory has gaps."""
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
    """A tensor over a buffer, which lies there in the order of its dimensions that is given."""
    import torch

    data = np.frombuffer(buffer, np.uint8)
    flat = torch.from_numpy(data) if data.flags.writeable else torch.from_numpy(data.copy())
    tensor = flat.view(dtype).view(shape)
    if order is not None:
        tensor = tensor.permute([order.index(dimension) for dimension in range(len(order))])
    return tensor.requires_grad_(requires_grad)
