"""Objects as bytes: pickle protocol 5 with the memory of arrays and tensors beside it, not in it.

Classes and functions of the user's script travel by value (cloudpickle), and come back as the script's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import pickle
import pickletools
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import cloudpickle
import numpy as np
import torch

from headrace.types import Buffer

_ALIGNMENT = 64
_SIGNALS = (StopIteration, StopAsyncIteration, GeneratorExit, asyncio.CancelledError)
_NOTHING = torch.empty(0, dtype=torch.uint8)


class _Packer(cloudpickle.Pickler):  # type: ignore[misc]
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor and _is_plain(obj):
            flat = obj.detach().contiguous().view(-1).view(torch.uint8) if obj.numel() else _NOTHING
            memory: Any = flat.numpy()
            return _tensor, (pickle.PickleBuffer(memory), obj.dtype, tuple(obj.shape), obj.requires_grad)
        return super().reducer_override(obj)


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and tensor.grad_fn is None
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.is_quantized
    )


def _tensor(buffer: Buffer, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool) -> torch.Tensor:
    data = np.frombuffer(buffer, np.uint8)
    flat = torch.from_numpy(data) if data.flags.writeable else torch.from_numpy(data.copy())
    return flat.view(dtype).view(shape).requires_grad_(requires_grad)


def pack(value: Any) -> list[Buffer]:
    """`value` as a pickle and the buffers that belong to it; nothing large is copied yet."""
    buffers: list[pickle.PickleBuffer] = []
    out = io.BytesIO()
    _Packer(out, protocol=5, buffer_callback=buffers.append).dump(value)
    return [out.getbuffer(), *(b.raw() for b in buffers)]


def pack_for_workers(value: Any) -> list[Buffer]:
    """As `pack`; functions and classes of modules that a worker could not import go by value, from now on.

    Such are modules that were loaded from a place that is not on the path: tests, plug-ins, notebooks' helpers.
    """
    while True:
        parts = pack(value)
        words = {word for _, word, _ in pickletools.genops(bytes(parts[0])) if isinstance(word, str)}
        foreign = [sys.modules[word] for word in words & set(sys.modules) if not _is_importable(word)]
        foreign = [module for module in foreign if module.__name__ not in cloudpickle.list_registry_pickle_by_value()]
        if not foreign:
            return parts
        for module in foreign:
            cloudpickle.register_pickle_by_value(module)


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


def packed_size(parts: Sequence[Buffer]) -> int:
    """How many bytes `write` needs for `parts`."""
    return sum(_aligned(len(p)) for p in parts)


def write(parts: Sequence[Buffer], target: memoryview) -> tuple[int, ...]:
    """Write `parts` into `target` one after the other; gives their lengths, which `unpack` wants back."""
    offset = 0
    for part in parts:
        np.copyto(np.frombuffer(target, np.uint8, len(part), offset), np.frombuffer(part, np.uint8))
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
