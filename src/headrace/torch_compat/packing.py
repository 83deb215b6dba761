"""Objects as bytes: pickle protocol 5 with the memory of arrays and tensors beside it, not in it.

Classes and functions of the user's script travel by value (cloudpickle), and come back as the script's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import io
import mmap
import os
import pickle
import sys
import threading
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch.utils.data.datapipes.datapipe import _DataPipeSerializationWrapper

from headrace.types import Buffer

_ALIGNMENT = 64
_SIGNALS = (StopIteration, StopAsyncIteration, GeneratorExit, asyncio.CancelledError)
_CARRIED_DEVICES = ("cpu", "meta")
_LOADED_ALREADY = ("torch", "numpy", "cloudpickle")  # by the helper process
_NOTHING = torch.empty(0, dtype=torch.uint8)


class _Packer(cloudpickle.Pickler):  # type: ignore[misc]
    lets_go_of_graphs = False

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, io.TextIOWrapper) and obj not in (sys.stdout, sys.stderr):
            raise TypeError("an open file cannot be pickled")  # cloudpickle would carry a copy of all that it reads
        if isinstance(obj, torch.Tensor) and obj.device.type not in _CARRIED_DEVICES:
            raise TypeError(
                f"a tensor on {obj.device} cannot be sent to another process; "
                "leave tensors on the CPU in the data set and in workers, and move batches in the training loop"
            )
        if isinstance(obj, torch.Tensor) and obj.grad_fn is not None and not self.lets_go_of_graphs:
            raise RuntimeError(
                "a tensor that requires gradients and is no leaf would lose what it was made of; detach it"
            )
        if type(obj) is torch.Tensor and _is_plain(obj):
            order = _order(obj)
            laid = obj.detach() if order is None else obj.detach().permute(order)
            flat = laid.contiguous().view(-1).view(torch.uint8) if obj.numel() else _NOTHING
            memory: Any = flat.numpy()
            return _tensor, (pickle.PickleBuffer(memory), obj.dtype, tuple(laid.shape), obj.requires_grad, order)
        return super().reducer_override(obj)


class _OutwardPacker(_Packer):
    """For what workers need: files that are mapped are mapped again, and shared tensors stay shared.

    Args:
        descriptors: the descriptors of the shared tensors' memory are put here; None: they are copied.

    Attributes:
        modules: the names of the modules that were met.
        named: functions and classes that go by value, and can be found by name in their modules.
    """

    lets_go_of_graphs = True  # as a data set that is forked: what comes of it is found out with its samples

    def __init__(self, out: io.BytesIO, descriptors: list[int] | None, buffer_callback: Any) -> None:
        super().__init__(out, protocol=5, buffer_callback=buffer_callback)
        self._descriptors = descriptors
        self._shared: dict[int, int] = {}
        self.modules: set[str] = set()
        self.named: list[Any] = []
        self._by_value = {"__main__", *cloudpickle.list_registry_pickle_by_value()}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, ModuleType):
            self.modules.add(obj.__name__)
        elif hasattr(obj, "__qualname__") and isinstance(getattr(obj, "__module__", None), str):
            self.modules.add(obj.__module__)
            if obj.__module__ in self._by_value and _has_its_name(obj):
                self.named.append(obj)
        if isinstance(obj, _DataPipeSerializationWrapper):
            pipe: Any = obj
            return type(obj), (pipe._datapipe,)  # which it would pickle by itself, and without what cloudpickle can do
        if type(obj) is np.memmap and (again := _map_again(obj)) is not None:
            return again
        if self._descriptors is not None and _is_shared(obj):
            return self._share(obj, self._descriptors)
        return super().reducer_override(obj)

    def _share(self, tensor: torch.Tensor, descriptors: list[int]) -> tuple[Any, ...]:
        storage = tensor.untyped_storage()
        number = self._shared.get(storage.data_ptr())
        if number is None:
            number = self._shared[storage.data_ptr()] = len(descriptors)
            descriptor, _ = storage._share_fd_cpu_()
            descriptors.append(os.dup(descriptor))
        place = tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        return _shared_tensor, (number, storage.nbytes(), *place, tensor.requires_grad)


def _has_its_name(what: Any) -> bool:
    """Whether a function or class is what its module has under its name."""
    return isinstance(what, type | FunctionType) and vars(sys.modules[what.__module__]).get(what.__name__) is what


def _is_shared(value: Any) -> bool:
    return type(value) is torch.Tensor and _is_plain(value) and value.is_shared()  # type: ignore[no-untyped-call]


_unpacking = threading.local()


def _shared_tensor(
    number: int, size: int, dtype: torch.dtype, offset: int, shape: Any, stride: Any, requires_grad: bool
) -> torch.Tensor:
    storages = _unpacking.storages
    if number not in storages:
        storage: Any = torch.UntypedStorage
        storages[number] = storage._new_shared_fd_cpu(_unpacking.descriptors[number], size)
    tensor = torch.empty(0, dtype=dtype).set_(storages[number], offset, shape, stride)
    return tensor.requires_grad_(requires_grad)


def _map_again(array: Any) -> tuple[Any, ...] | None:
    """How a worker maps the same file again; None where the memory is not the file's (copies, changes kept private)."""
    whole = array
    while isinstance(whole.base, np.memmap):
        whole = whole.base
    if array.filename is None or array.mode == "c" or array.dtype.hasobject or not isinstance(whole.base, mmap.mmap):
        return None
    if not Path(array.filename).exists():
        return None
    mode = "r" if array.mode == "r" else "r+"
    start = array.ctypes.data - whole.ctypes.data
    form = start, array.dtype, array.shape, array.strides
    return _mapped, (str(array.filename), mode, whole.offset, whole.nbytes, *form)


def _mapped(name: str, mode: Any, offset: int, size: int, start: int, dtype: Any, shape: Any, strides: Any) -> Any:
    whole: Any = np.memmap(name, np.uint8, mode, offset, (size,))
    array: Any = np.ndarray(shape, dtype, whole, start, strides).view(np.memmap)
    array._mmap, array.filename, array.offset, array.mode = whole._mmap, whole.filename, whole.offset, mode
    return array


def _is_plain(tensor: torch.Tensor) -> bool:
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


def _tensor(
    buffer: Buffer,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    requires_grad: bool,
    order: tuple[int, ...] | None = None,
) -> torch.Tensor:
    data = np.frombuffer(buffer, np.uint8)
    flat = torch.from_numpy(data) if data.flags.writeable else torch.from_numpy(data.copy())
    tensor = flat.view(dtype).view(shape)
    if order is not None:
        tensor = tensor.permute([order.index(dimension) for dimension in range(len(order))])
    return tensor.requires_grad_(requires_grad)


class Pickled:
    """A pickle in pieces: bytes of 64 KiB and more stay the objects they are, and are not copied into it."""

    def __init__(self) -> None:
        self.pieces: list[Buffer] = []
        self._nbytes = 0

    def write(self, piece: Buffer) -> None:
        """Called by the pickler."""
        self.pieces.append(piece if type(piece) is bytes else bytes(piece))  # what can change is copied now
        self._nbytes += len(piece)

    def __len__(self) -> int:
        return self._nbytes

    def __bytes__(self) -> bytes:
        return b"".join(self.pieces)


Part = Pickled | Buffer
"""Of what is carried: first a pickle, then the buffers that belong to it."""


def pack(value: Any) -> list[Part]:
    """`value` as a pickle and the buffers that belong to it; nothing large is copied yet."""
    buffers: list[pickle.PickleBuffer] = []
    out = Pickled()
    _Packer(out, protocol=5, buffer_callback=buffers.append).dump(value)
    return [out, *(b.raw() for b in buffers)]


def pack_for_workers(value: Any, descriptors: list[int] | None = None, modules: set[str] | None = None) -> list[Buffer]:
    """As `pack`; functions and classes of modules that a worker could not import go by value, from now on.

    Such are modules that were loaded from a place that is not on the path: tests, plug-ins, notebooks' helpers.

    Args:
        descriptors: the descriptors of shared tensors' memory are put here, for `unpack_in_worker`; they are the
            caller's to close. Without it workers get copies.
        modules: the names of the modules that workers will import are put here.
    """
    while True:
        buffers: list[pickle.PickleBuffer] = []
        out = io.BytesIO()
        packer = _OutwardPacker(out, descriptors, buffer_callback=buffers.append)
        packer.dump((value, packer.named))  # the list is filled while what comes before it is pickled
        by_value = cloudpickle.list_registry_pickle_by_value()
        names = (name for name in packer.modules if name in sys.modules and name not in by_value)
        foreign = [sys.modules[name] for name in names if not _is_importable(name)]
        if not foreign:
            if modules is not None:
                modules |= packer.modules - by_value
            return [out.getbuffer(), *(b.raw() for b in buffers)]
        while descriptors:
            os.close(descriptors.pop())
        for module in foreign:
            cloudpickle.register_pickle_by_value(module)


def files_of(modules: Iterable[str]) -> dict[str, int]:
    """Of those modules that are the user's own or other people's: when their files were written, in nanoseconds."""
    found = {}
    for name in modules:
        top, file = name.partition(".")[0], getattr(sys.modules.get(name), "__file__", None)
        if file is None or name == "__main__" or top in _LOADED_ALREADY or top in sys.stdlib_module_names:
            continue
        with contextlib.suppress(OSError):
            found[name] = Path(file).stat().st_mtime_ns
    return found


def _is_importable(name: str) -> bool:
    """Whether a fresh process with our sys.path would find the same module."""
    if name == "__main__" or name.partition(".")[0] in sys.stdlib_module_names:
        return True
    place: Any = None
    spec: Any = None
    for depth in range(name.count(".") + 1):
        part = ".".join(name.split(".")[: depth + 1])
        found = (finder.find_spec(part, place) for finder in sys.meta_path if hasattr(finder, "find_spec"))
        spec = next((spec for spec in found if spec is not None), None)
        if spec is None:
            return False
        place = spec.submodule_search_locations
    return spec is not None and spec.origin == getattr(sys.modules[name], "__file__", spec.origin)


def packed_size(parts: Sequence[Part]) -> int:
    """How many bytes `write` needs for `parts`."""
    return sum(_aligned(len(p)) for p in parts)


def write(parts: Sequence[Part], target: memoryview) -> tuple[int, ...]:
    """Write `parts` into `target` one after the other; gives their lengths, which `unpack` wants back."""
    offset = 0
    for part in parts:
        at = offset
        for piece in part.pieces if isinstance(part, Pickled) else (part,):
            np.copyto(np.frombuffer(target, np.uint8, len(piece), at), np.frombuffer(piece, np.uint8))
            at += len(piece)
        offset += _aligned(len(part))
    return tuple(len(p) for p in parts)


def unpack(source: Any, lengths: Sequence[int], *, copy: bool) -> Any:
    """The value that `pack` and `write` put there.

    Args:
        source: a memoryview or a uint8 array; without `copy` the arrays of the value are views of it and keep it alive.
        lengths: what `write` gave.
        copy: give the value memory of its own.
    """
    pieces: list[Any] = []
    offset = 0
    for length in lengths:
        piece = source[offset : offset + length]
        pieces.append(bytearray(piece) if copy and pieces else piece)
        offset += _aligned(length)
    return pickle.loads(memoryview(pieces[0]), buffers=pieces[1:])


def unpack_parts(parts: Sequence[bytes]) -> Any:
    """The value of `pack`'s parts, each of them a copy; its arrays have memory of their own."""
    return pickle.loads(parts[0], buffers=[bytearray(part) for part in parts[1:]])


def unpack_in_worker(source: memoryview, lengths: Sequence[int], descriptors: Sequence[int]) -> Any:
    """The value of `pack_for_workers`: its arrays are views of `source`, its shared tensors what they were.

    Functions and classes that went by value can be found in their modules from now on; those are made, if need be.
    """
    _unpacking.storages, _unpacking.descriptors = {}, descriptors
    try:
        value, named = unpack(source, lengths, copy=False)
    finally:
        del _unpacking.storages, _unpacking.descriptors
    for what in named:  # whoever pickles by name in the worker finds them: torch's DataPipes, the user's own code
        vars(_module(what.__module__)).setdefault(what.__name__, what)
    return value


def copied(value: Any) -> Any:
    """`value` as a worker would have it; in this process."""
    parts = pack_for_workers(value)
    target = memoryview(bytearray(packed_size(parts)))
    return unpack_in_worker(target, write(parts, target), ())


def _module(name: str) -> ModuleType:
    """The module of this name; an empty one where there is none to import."""
    parent = name.rpartition(".")[0]
    if parent:
        _module(parent)
    if name not in sys.modules:
        try:
            importlib.import_module(name)
        except ImportError:
            sys.modules[name] = ModuleType(name)
            sys.modules[name].__path__ = []
    return sys.modules[name]


def pack_bytes(value: Any) -> bytes:
    """`value` as one string of bytes, for things that are small or sent once."""
    parts = pack(value)
    target = bytearray(packed_size(parts))
    lengths = write(parts, memoryview(target))
    return pickle.dumps((lengths, bytes(target)), protocol=5)


def unpack_bytes(blob: bytes) -> Any:
    """The value of `pack_bytes`, with memory of its own."""
    lengths, data = pickle.loads(blob)
    return unpack(memoryview(data), lengths, copy=True)


def _aligned(length: int) -> int:
    return -(-length // _ALIGNMENT) * _ALIGNMENT


class WorkerTraceback(Exception):
    """The traceback of an exception where it was raised, as text; the cause of the exception that the trainer sees."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


def pack_error(error: BaseException) -> bytes:
    """An exception with its traceback's text, its notes and its attributes; what of it does not pickle, as text."""
    text = "".join(traceback.format_exception(error))
    if isinstance(error, _SIGNALS):
        error = _as_error(error)
    notes = list(getattr(error, "__notes__", ()))
    for form in (error, _Parts(error)):
        try:
            blob = pack_bytes((form, notes, text))
            back = unpack_bytes(blob)[0]  # some exceptions pickle and do not come back, or come back as others
            if isinstance(back, BaseException) and (form is not error or back.args == error.args):
                return blob
        except Exception:  # noqa: S112 (whatever goes wrong, there is another form)
            continue
    told = "".join(traceback.format_exception_only(error)).strip()
    return pack_bytes((RuntimeError(f"{told} (the exception itself cannot be pickled)"), notes, text))


class _Parts:
    """An exception that is put together again without a call of its class, which may want other arguments."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> tuple[Any, ...]:
        error = self._error
        args = tuple(value if _packs(value) else repr(value) for value in error.args)
        state = {name: value for name, value in error.__dict__.items() if _packs(value)}
        return _put_together, (type(error), args, state)


def _put_together(cls: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    error = cls.__new__(cls, *args)
    builtin = next(base for base in cls.__mro__ if base.__module__ == "builtins")
    with contextlib.suppress(Exception):
        # For what those of Python itself keep beside: errno, encoding, …
        builtin.__init__(error, *args)  # type: ignore[misc]
    error.args = args
    error.__dict__.update(state)
    return error


def _packs(value: Any) -> bool:
    try:
        unpack_bytes(pack_bytes(value))
    except Exception:
        return False
    return True


def _as_error(signal: BaseException) -> RuntimeError:
    """What would be taken for an end of the epoch, or for a wish of the trainer's, where it is raised again."""
    error = RuntimeError(f"{type(signal).__name__} was raised: {signal}")
    for note in getattr(signal, "__notes__", ()):
        error.add_note(note)
    return error


def unpack_error(blob: bytes) -> BaseException:
    """The exception of `pack_error`; its cause shows the traceback it had."""
    error, notes, text = unpack_bytes(blob)
    assert isinstance(error, BaseException)
    have = getattr(error, "__notes__", [])
    for note in notes:
        if note not in have:
            error.add_note(note)
    error.__cause__ = WorkerTraceback(text)
    return error
