"""Values that lie in mapped memory, on their way to workers: as a pickled form, and back as views of the same memory.

The forms hold a buffer of all bytes that a value reaches over, which `packing` hands on as a mapping or as a copy.
Arrays are in `views`.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable, Sequence
from multiprocessing.shared_memory import SharedMemory
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.lately import torch_is_loaded
from headrace.torch_compat.mappings import Mappings, address_of
from headrace.torch_compat.received import mapping, shared_storage
from headrace.torch_compat.views import extent

if TYPE_CHECKING:
    import torch

_CData = ctypes.c_char.__mro__[-2]  # what all of ctypes' values are
_Form = tuple[object, ...]


def form_of(value: object, mappings: Mappings) -> _Form | None:
    """How a value is pickled that lies in mapped memory; None: it does not.

    Plain tensors are `form_of_tensor`'s.

    Raises:
        CannotCarryError: its memory is shared, and there is no way to share it with a worker.
    """
    if torch_is_loaded():
        _know_torchs()
    kind = type(value)
    return (_FORMS_OF_EXACTLY.get(kind) or _form_of_kind.dispatch(kind))(value, mappings)


@functools.singledispatch
def _form_of_kind(value: object, mappings: Mappings) -> _Form | None:
    """The same, of instances of a class and of those derived from it."""
    del value, mappings
    return None


# Tensors.


@functools.cache
def _know_torchs() -> None:
    import torch

    _form_of_kind.register(torch.UntypedStorage)(_form_of_storage)
    _form_of_kind.register(torch.storage.TypedStorage)(_form_of_typed_storage)


def form_of_tensor(tensor: torch.Tensor, mappings: Mappings) -> _Form | None:
    """As `form_of`, of a plain tensor: all tensors of one storage have one in a worker, too."""
    if not tensor.numel() or mappings.find(tensor.data_ptr(), 1) is None:
        return None
    storage = tensor.untyped_storage()
    return None if mappings.find(storage.data_ptr(), storage.nbytes()) is None else form_on_storage(tensor)


def form_on_storage(tensor: torch.Tensor) -> _Form:
    """A tensor's place in its storage, which is pickled by itself."""
    storage = tensor.untyped_storage()
    place = tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
    return _tensor, (storage, *place, tensor.requires_grad)


def _tensor(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
) -> torch.Tensor:
    import torch

    tensor = torch.empty(0, dtype=dtype, device="cpu").set_(storage, offset, shape, stride)
    return tensor.requires_grad_(requires_grad)


def _form_of_storage(storage: torch.UntypedStorage, mappings: Mappings) -> _Form | None:
    if storage.device.type != "cpu" or not storage.nbytes():
        return None
    address, size = storage.data_ptr(), storage.nbytes()
    mapped = mappings.find(address, size)
    if mapped is None:
        return None
    begins_with_file = mapped.offset + mapped.start == 0
    if storage.is_shared() and begins_with_file and mapped.is_shared and mapped.is_writable:
        return shared_storage, (mapped.source, size)
    return _storage, (extent(address, size, storage),)


def _storage(memory: memoryview) -> torch.UntypedStorage:
    import torch

    if memory.readonly:  # torch warns of what it has no word for, and the trainer's tensor is no better
        memory = extent(address_of(memory), len(memory), memory).raw()
    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()


def _form_of_typed_storage(storage: torch.storage.TypedStorage, mappings: Mappings) -> _Form | None:
    from headrace.torch_compat.storages import typed_storage

    untyped = storage._untyped_storage
    return None if _form_of_storage(untyped, mappings) is None else (typed_storage, (untyped, storage.dtype))


# Others.


def _form_of_view(view: memoryview, mappings: Mappings) -> _Form | None:
    try:
        array = np.asarray(view)
    except ValueError:  # it was released, or is of a format that only its maker knows
        return None
    if not array.nbytes or mappings.find(array.__array_interface__["data"][0], 1) is None:
        return None
    return memoryview, (array,)


def _form_of_mapping(value: mmap.mmap, mappings: Mappings) -> _Form | None:
    if value.closed:
        return None
    mapped = mappings.find(address_of(value), len(value))
    return None if mapped is None else (mapping, (mapped, value.tell()))


@_form_of_kind.register(_CData)
def _form_of_ctype(value: Any, mappings: Mappings) -> _Form | None:
    address, size = ctypes.addressof(value), ctypes.sizeof(value)
    if mappings.find(address, size) is None and not isinstance(value, ctypes.Array):
        return None
    value.__reduce__()  # which refuses pointers
    lengths: list[int] = []
    kind: Any = type(value)
    while issubclass(kind, ctypes.Array):  # the types of arrays have no names to go by
        lengths.append(kind._length_)
        kind = kind._type_
    return _ctype, (extent(address, size, value), kind, lengths)


def _ctype(memory: memoryview, kind: Any, lengths: Sequence[int]) -> object:
    for length in reversed(lengths):
        kind = kind * length
    return kind.from_buffer(memory)


def _form_of_shared_memory(value: SharedMemory, mappings: Mappings) -> _Form | None:
    """Not by its name, which may be gone by the time that a worker looks for it."""
    del mappings
    return None if value.buf is None else (_shared_memory, (value.buf, value.name, value.size))


def _shared_memory(memory: memoryview, name: str, size: int) -> object:
    made: Any = SharedMemory.__new__(SharedMemory)
    made._buf, made._size = memory, size
    made._name = "/" + name if SharedMemory._prepend_leading_slash else name  # type: ignore[attr-defined]
    return made


_FORMS_OF_EXACTLY: dict[type, Callable[[Any, Mappings], _Form | None]] = {
    memoryview: _form_of_view,
    mmap.mmap: _form_of_mapping,
    SharedMemory: _form_of_shared_memory,
}
"""Of types whose subclasses pickle in ways of their own."""
