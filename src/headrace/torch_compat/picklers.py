"""Picklers for objects sent to workers and back, and reducers of special objects.

Classes and functions of the user's script are pickled by value (cloudpickle, with additions), and refer to the
script's own when they return.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import functools
import importlib
import io
import linecache
import mmap
import os
import pickle
import sys
import threading
import types
import weakref
from collections import ChainMap
from collections.abc import Callable
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict

import cloudpickle
import cloudpickle.cloudpickle as internals
import numpy as np
from numpy.typing import NDArray

from headrace._util.lazy import is_tensor, tensor_types, torch_is_loaded
from headrace._util.shared_memory import receive_descriptor, send_descriptor
from headrace.errors import CannotCarryError
from headrace.types import Buffer

if TYPE_CHECKING:
    import torch


Cells = dict[int, tuple[types.CellType, types.CellType]]
"""By the id of a closure cell: the cell, and the empty cell pickled in its place."""

_FILE = 10  # index of the file name among the arguments of a code object
_shared: weakref.WeakSet[type] = weakref.WeakSet()  # classes whose ids both sides of a fork know
_is_forked_worker = False


def share_classes() -> list[type]:
    """Give ids to the classes pickled by value, so that forks of this process can refer to them.

    Returns the classes. The caller keeps them alive for as long as its forks run.
    """
    by_value = modules_by_value()
    classes, waiting = set[type](), [object]
    while waiting:
        new = [kind for kind in type.__subclasses__(waiting.pop()) if kind not in classes]
        classes.update(new)
        waiting += new
    found = [kind for kind in classes if vars(kind).get("__module__") in by_value or "<locals>" in kind.__qualname__]
    for kind in found:
        internals._get_or_create_tracker_id(kind)
    _shared.update(found)
    return found


def begin_forked_worker() -> None:
    global _is_forked_worker
    _is_forked_worker = True


def reference_to(kind: type) -> tuple[Callable[[str], type], tuple[str]] | None:
    """Return the reduced form of a class that this forked worker shares with the trainer."""
    if not _is_forked_worker or kind not in _shared:
        return None
    return _shared_class, (internals._get_or_create_tracker_id(kind),)


def _shared_class(tracker: str) -> type:
    return internals._DYNAMIC_CLASS_TRACKER_BY_ID[tracker]  # type: ignore[no-any-return]


def modules_by_value() -> set[str]:
    """Return the modules that workers cannot import: the script, and those registered in cloudpickle."""
    return {"__main__", *internals.list_registry_pickle_by_value()}


def is_by_name(what: Callable[..., object]) -> bool:
    """True if a function or class is found by its name in a module that is not pickled by value."""
    found: object = sys.modules.get(what.__module__ or "__main__")
    for name in what.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is what and what.__module__ not in modules_by_value()


def load_home(kind: type) -> None:
    """Import the module that a class names as its home, if only its package is (numpy.rec)."""
    home: object = kind.__module__
    if isinstance(home, str) and home not in sys.modules and home.partition(".")[0] in sys.modules and "." in home:
        with contextlib.suppress(ImportError):
            importlib.import_module(home)


def reduced_function(reduced: Any, function: types.FunctionType, cells: Cells) -> object:
    """Keep closure variables that functions share shared after unpickling."""
    if reduced is NotImplemented or function.__closure__ is None:
        return reduced
    make, (*arguments, _), *rest = reduced
    empty = tuple(cells.setdefault(id(cell), (cell, types.CellType()))[1] for cell in function.__closure__)
    return make, (*arguments, empty), *rest


def reduced_code(code: types.CodeType) -> tuple[Callable[..., types.CodeType], tuple[object, ...]]:
    """Reduce code with its file name, which tracebacks need and cloudpickle omits since 3.1.3."""
    make, arguments = internals.Pickler.dispatch_table[types.CodeType](code)
    return make, (*arguments[:_FILE], code.co_filename, *arguments[_FILE + 1 :])


def reduced_code_with_lines(code: types.CodeType) -> object:
    """Reduce code for another process, with source lines that are in no file (notebook cells)."""
    make, arguments = reduced_code(code)
    file = code.co_filename
    if file not in linecache.cache or os.path.exists(file):  # noqa: PTH110 (it may be anything)
        return make, arguments
    return _code_with_lines, (file, linecache.getlines(file), make, arguments)


_brought: set[str] = set()  # files whose lines came with code


def _code_with_lines(
    file: str, lines: list[str], make: Callable[..., types.CodeType], arguments: tuple[object, ...]
) -> types.CodeType:
    """Make code, and add its lines to `linecache` for tracebacks and `inspect`."""
    if file not in linecache.cache or file in _brought:
        _brought.add(file)
        linecache.cache[file] = sum(map(len, lines)), None, lines, file
    return make(*arguments)


def reduced_class(reduced: Any, kind: type, *, outward: bool) -> object:
    """Reduce a class with its slots and qualified name.

    Args:
        outward: True in the trainer, whose classes replace those of workers. Otherwise a known class stays as it is.
    """
    if reduced is NotImplemented or len(reduced) < 3:
        return reduced
    make, arguments, (attributes, slots), *_ = reduced
    own, set_state = vars(kind), internals._class_setstate if outward else _set_new_state
    if issubclass(kind, enum.Enum):
        _check_members(kind)
    else:
        attributes["__qualname__"] = kind.__qualname__
        if "__slots__" in own and not issubclass(kind, tuple):  # tuples cannot have slots
            arguments[3]["__slots__"] = own["__slots__"]
            for name in [name for name, value in own.items() if isinstance(value, types.MemberDescriptorType)]:
                attributes.pop(name, None)
    tracker = internals._get_or_create_tracker_id(kind)
    arguments = tuple(None if argument is tracker else argument for argument in arguments)  # tracked by `_class`
    return _class, (tracker, make, arguments), (attributes, slots), None, None, set_state


def _check_members(kind: type[enum.Enum]) -> None:
    """Raise TypeError if members are more than their values, which are all that cloudpickle sends."""
    mixed = vars(kind)["_member_type_"]
    for member in kind:
        is_made_otherwise = mixed is not object and "__new_member__" in vars(kind) and mixed(member.value) != member
        if is_made_otherwise or any(name[:1] != "_" or name[-1:] != "_" for name in vars(member)):  # not enum's own
            raise TypeError(f"{member!r} is more than its value, and cannot be sent: define {kind!r} in a module")


def _class(tracker: str, make: Callable[..., type], arguments: tuple[object, ...]) -> type:
    found: type | None = internals._DYNAMIC_CLASS_TRACKER_BY_ID.get(tracker)
    if found is None:
        made = make(*arguments)
        _new.add(made)
        found = internals._lookup_class_or_track(tracker, made)
    return found


_new: weakref.WeakSet[type] = weakref.WeakSet()  # classes without a state so far


def _set_new_state(kind: type, state: tuple[dict[str, object], dict[str, object]]) -> None:
    """Ignore the state of a class that was known before: it may have changed since it was sent."""
    if kind in _new:
        _new.discard(kind)
        internals._class_setstate(kind, state)


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
        return _shared_storage, (send_descriptor(obj._share_fd_cpu_()[0]), obj.nbytes())
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
    fd = receive_descriptor(number)
    try:
        storage: torch.UntypedStorage = new._new_shared_fd_cpu(fd, size)
    finally:
        os.close(fd)
    return storage


_CARRIED_DEVICES = ("cpu", "meta")


class Packer(cloudpickle.Pickler):  # type: ignore[misc]
    lets_go_of_graphs = is_outward = False
    dispatch_table: ClassVar[Any] = ChainMap({CodeType: reduced_code}, cloudpickle.Pickler.dispatch_table)

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

    To be used within `sending_descriptors`.

    Attributes:
        modules: Names of the modules used.
        named: Functions and classes pickled by value that can be found by name in their modules.
    """

    is_outward = True
    dispatch_table: ClassVar = ChainMap({CodeType: reduced_code_with_lines}, cloudpickle.Pickler.dispatch_table)
    lets_go_of_graphs = True  # as with a forked data set; errors appear with its samples

    def __init__(self, out: io.BytesIO, buffer_callback: Callable[[pickle.PickleBuffer], object] | None) -> None:
        super().__init__(out, protocol=5, buffer_callback=buffer_callback)
        self._cells: Cells = {}
        self.modules: set[str] = set()
        self.named: list[object] = []
        self._by_value = modules_by_value()
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
        found = reduced(obj)
        if found is None:
            found = super().reducer_override(obj)
            asks = kind.__module__ in _SPECIAL or issubclass(kind, (type, ModuleType, np.ndarray, *tensor_types()))
            if found is NotImplemented and not asks:
                self._plain.add(kind)
        return with_attributes(obj, found) if is_tensor(obj) else found


_NAMED = (type, FunctionType, BuiltinFunctionType, functools._lru_cache_wrapper)
_SPECIAL = ("builtins", "functools", "_io", "numpy", "torch", "torch.storage", PIPES)  # homes of special types


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
