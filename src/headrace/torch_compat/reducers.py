"""Reducers for objects that pickle refuses, changes, or copies from a file."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from headrace import descriptors
from headrace.errors import CannotCarryError
from headrace.lately import is_tensor, torch_is_loaded
from headrace.torch_compat.by_value import is_by_name

if TYPE_CHECKING:
    import torch

Reduced = tuple[object, ...]
"""Result of `__reduce_ex__`: function, arguments, state, list items, dict items, state setter."""

PIPES = "torch.utils.data.datapipes.datapipe"
_CData = ctypes.c_char.__mro__[-2]  # base class of all ctypes values


def reduced(obj: object) -> Reduced | None:
    """Return the reduced form of an object for workers. None if pickle's own is right.

    Raises:
        CannotCarryError: the object is a writable array over memory that processes share.
    """
    if isinstance(obj, np.ndarray):
        return _of_array(obj)
    if isinstance(obj, functools._lru_cache_wrapper):
        return None if is_by_name(obj) else _of_cache(obj)
    if isinstance(obj, functools.cached_property):
        return _of_cached_property(obj)
    if not torch_is_loaded():
        return None
    if type(obj).__module__ == PIPES and hasattr(obj, "_datapipe"):
        return type(obj), (obj._datapipe,)  # its own __reduce__ pickles the pipe separately, and without cloudpickle
    import torch

    if is_tensor(obj):
        is_shared = obj.device.type == "cpu" and obj.layout is torch.strided and obj.is_shared()  # type: ignore[no-untyped-call]
        return _of_shared_tensor(obj) if is_shared else None
    if isinstance(obj, torch.UntypedStorage) and obj.device.type == "cpu" and obj.is_shared():
        return _shared_storage, (descriptors.send(obj._share_fd_cpu_()[0]), obj.nbytes())
    return None


# Functions with caches.


class _CacheParameters(TypedDict):
    maxsize: int
    typed: bool


def _of_cache(wrapper: functools._lru_cache_wrapper[object]) -> Reduced:
    """Reduce with an empty cache: its content is not accessible."""
    attributes = {name: value for name, value in vars(wrapper).items() if name not in _OF_CACHES}
    return _cache, (wrapper.__wrapped__, wrapper.cache_parameters()), attributes, None, None, _set_attributes


def _cache(function: Callable[..., object], parameters: _CacheParameters) -> functools._lru_cache_wrapper[object]:
    return functools.lru_cache(**parameters)(function)


_OF_CACHES = {"__wrapped__", "cache_parameters"}


def _of_cached_property(found: functools.cached_property[object]) -> Reduced:
    """Reduce without the lock of Python 3.11. A new lock replaces it."""
    attributes = {name: value for name, value in vars(found).items() if name != "lock"}
    return _cached_property, (type(found), hasattr(found, "lock")), attributes, None, None, _set_attributes


def _cached_property(kind: type[functools.cached_property[object]], has_lock: bool) -> object:
    made = kind.__new__(kind)
    if has_lock:
        vars(made)["lock"] = threading.RLock()
    return made


def _set_attributes(obj: object, attributes: dict[str, object]) -> None:
    obj.__dict__.update(attributes)


# Exceptions.


def put_together(cls: type[BaseException], args: tuple[object, ...], attributes: dict[str, object]) -> BaseException:
    """Return an exception made without calling its class."""
    error = cls.__new__(cls, *args)
    builtin = next(base for base in cls.__mro__ if base.__module__ == "builtins")
    with contextlib.suppress(Exception):
        # Sets the extra fields of built-in exceptions: errno, encoding, …
        builtin.__init__(error, *args)  # type: ignore[misc]
    if not isinstance(error, OSError):
        error.args = args
    error.__dict__.update(attributes)
    return error


# Memory.


def with_attributes(tensor: torch.Tensor, reduced: Reduced) -> Reduced:
    attributes = vars(tensor)
    return (*reduced[:2], attributes, None, None, _set_attributes) if attributes and len(reduced) == 2 else reduced


def _of_array(array: NDArray[np.generic]) -> Reduced | None:
    """Reduce an array. None: pickle copies it."""
    if type(array) in (np.ndarray, np.memmap) and (form := _of_mapped_file(array)) is not None:
        return form
    attributes = {} if isinstance(array, np.memmap) else getattr(array, "__dict__", {})
    if attributes and type(array).__reduce__ is np.ndarray.__reduce__:
        reduced: Any = array.__reduce__()
        make, arguments, state = reduced
        return make, arguments, (state, attributes), None, None, _set_array
    owner: object = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if isinstance(owner, memoryview):
        owner = owner.obj
    is_shared = isinstance(owner, mmap.mmap) or (isinstance(owner, _CData) and hasattr(owner, "_wrapper"))
    if is_shared and array.flags.writeable and type(array) is np.ndarray:
        raise CannotCarryError(
            "an array over memory that processes share would be copied, and what a worker writes to it would be lost; "
            "give a tensor after share_memory_(), or make the array in the worker"
        )
    return None


def _set_array(array: NDArray[np.generic], state: tuple[Any, dict[str, object]]) -> None:
    array.__setstate__(state[0])
    vars(array).update(state[1])


def _of_mapped_file(array: NDArray[np.generic]) -> Reduced | None:
    """Reduce an array in a mapped file. None for copies and copy-on-write maps."""
    whole: Any = array
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    is_mapped = type(whole) is np.memmap and isinstance(whole.base, mmap.mmap) and whole.filename is not None
    if not is_mapped or whole.mode == "c" or array.dtype.hasobject or not Path(whole.filename).exists():
        return None
    start = array.ctypes.data - whole.ctypes.data
    form = type(array), array.flags.writeable, start, array.dtype, array.shape, array.strides
    return _mapped_file, (str(whole.filename), whole.offset, whole.nbytes, *form)


def _mapped_file(
    name: str,
    offset: int,
    size: int,
    kind: type[NDArray[np.generic]],
    is_writable: bool,
    start: int,
    dtype: np.dtype[np.generic],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
) -> NDArray[np.generic]:
    whole: Any = np.memmap(name, np.uint8, "r+" if is_writable else "r", offset, (size,))
    array: Any = np.ndarray(shape, dtype, whole, start, strides).view(kind)
    if kind is np.memmap:
        array._mmap, array.filename, array.offset, array.mode = whole._mmap, whole.filename, whole.offset, whole.mode
    made: NDArray[np.generic] = array
    return made


def _of_shared_tensor(tensor: torch.Tensor) -> Reduced:
    """Reduce to the storage and a location in it, so that workers' tensors share storages too."""
    place = tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
    return _shared_tensor, (tensor.untyped_storage(), *place, tensor.requires_grad)


def _shared_tensor(
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


def _shared_storage(number: int, size: int) -> torch.UntypedStorage:
    import torch

    new: Any = torch.UntypedStorage
    fd = descriptors.receive(number)
    try:
        storage: torch.UntypedStorage = new._new_shared_fd_cpu(fd, size)
    finally:
        os.close(fd)
    return storage
