"""Objects as bytes: pickle protocol 5 with the memory of arrays and tensors beside it, not in it."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import io
import pickle
import re
import sys
import traceback
from collections.abc import Iterable, Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from headrace.descriptors import receiving, sending
from headrace.failures import NOWHERE, CaughtError, Origin, PackedError
from headrace.memory import close_all
from headrace.torch_compat.by_value import modules_by_value, send_by_value
from headrace.torch_compat.picklers import NamingPacker, OutwardPacker, Packer
from headrace.torch_compat.reducers import put_together
from headrace.torch_compat.tracebacks import trim
from headrace.types import Buffer

_ALIGNMENT = 64
_SIGNALS = (StopIteration, StopAsyncIteration, GeneratorExit, asyncio.CancelledError)
_LOADED_ALREADY = ("torch", "numpy", "cloudpickle")  # by the fork server


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


T = TypeVar("T")

PickledPart = Pickled | Buffer
"""Of what is carried: first a pickle, then the buffers that belong to it."""


def pack(value: object, packer: type[Packer] = Packer) -> list[PickledPart]:
    """`value` as a pickle and the buffers that belong to it; nothing large is copied yet."""
    buffers: list[pickle.PickleBuffer] = []
    out = Pickled()
    packer(out, protocol=5, buffer_callback=buffers.append).dump(value)
    return [out, *(b.raw() for b in buffers)]


def pack_by_name(value: object) -> list[PickledPart]:
    """The same for other processes than this one and its workers: they have the classes and functions already."""
    return pack(value, NamingPacker)


def pack_for_workers(
    value: object,
    descriptors: list[int],
    modules: set[str] | None = None,
) -> list[Buffer]:
    """`value` for `write` and `unpack_in_worker`.

    Functions and classes of modules that a worker could not import go by value, from now on. Such are modules that were
    loaded from a place that is not on the path: tests, plug-ins, notebooks' helpers.

    Args:
        descriptors: of what workers share with this process, for `unpack_in_worker`; they are the caller's to close.
        modules: the names of the modules that workers will import are put here.
    """
    try:
        while True:
            close_all(descriptors)
            buffers: list[pickle.PickleBuffer] = []
            out = io.BytesIO()
            packer = OutwardPacker(out, buffer_callback=buffers.append)
            with sending(descriptors):
                packer.dump((value, packer.named))  # the list is filled while what comes before it is pickled
            by_value = modules_by_value()
            named = (name for name in packer.modules if name in sys.modules and name not in by_value)
            foreign = [name for name in named if not _is_importable(name)]
            if not foreign:
                if modules is not None:
                    modules |= packer.modules - by_value
                return [out.getbuffer(), *(buffer.raw() for buffer in buffers)]
            for name in foreign:
                send_by_value(name)
    except BaseException:
        close_all(descriptors)
        raise


def why_not_for_workers(value: object) -> Exception | None:
    """What an attempt at `pack_for_workers` raises."""
    descriptors: list[int] = []
    try:
        pack_for_workers(value, descriptors)
    except Exception as error:
        return error
    finally:
        close_all(descriptors)
    return None


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
    place: Sequence[str] | None = None
    spec: ModuleSpec | None = None
    for depth in range(name.count(".") + 1):
        part = ".".join(name.split(".")[: depth + 1])
        found = (finder.find_spec(part, place) for finder in sys.meta_path if hasattr(finder, "find_spec"))
        spec = next((spec for spec in found if spec is not None), None)
        if spec is None:
            return False
        place = spec.submodule_search_locations
    return spec is not None and spec.origin == getattr(sys.modules[name], "__file__", spec.origin)


def packed_size(parts: Sequence[PickledPart]) -> int:
    """How many bytes `write` needs for `parts`."""
    return sum(aligned(len(p)) for p in parts)


def write(parts: Sequence[PickledPart], target: memoryview) -> tuple[int, ...]:
    """Write `parts` into `target` one after the other; gives their lengths, which `unpack` wants back."""
    offset = 0
    for part in parts:
        at = offset
        for piece in part.pieces if isinstance(part, Pickled) else (part,):
            np.copyto(np.frombuffer(target, np.uint8, len(piece), at), np.frombuffer(piece, np.uint8))
            at += len(piece)
        offset += aligned(len(part))
    return tuple(len(p) for p in parts)


def unpack(source: memoryview | NDArray[np.uint8], lengths: Sequence[int], *, copy: bool) -> Any:
    """The value that `pack` and `write` put there.

    Args:
        source: a memoryview or a uint8 array; without `copy` the arrays of the value are views of it and keep it alive.
        lengths: what `write` gave.
        copy: give the value memory of its own.
    """
    data, *pieces = _pieces(source, lengths)
    return pickle.loads(memoryview(data), buffers=[bytearray(piece) for piece in pieces] if copy else pieces)


def _pieces(source: memoryview | NDArray[np.uint8], lengths: Sequence[int]) -> list[Any]:
    pieces, offset = [], 0
    for length in lengths:
        pieces.append(source[offset : offset + length])
        offset += aligned(length)
    return pieces


def unpack_parts(parts: Sequence[Buffer]) -> Any:
    """The value of `pack`'s parts, each of them a copy; its arrays have memory of their own."""
    return pickle.loads(parts[0], buffers=[bytearray(part) for part in parts[1:]])


def unpack_in_worker(
    source: memoryview,
    lengths: Sequence[int],
    descriptors: Sequence[int],
) -> Any:
    """The value of `pack_for_workers`: its arrays are views of `source`.

    Functions and classes that went by value can be found in their modules from now on; those are made, if need be.

    Args:
        descriptors: those of `pack_for_workers`; none of them is needed any more after this.
    """
    data, *buffers = _pieces(source, lengths)
    with receiving(descriptors):
        value, named = pickle.loads(data, buffers=buffers)
    for what in named:  # whoever pickles by name in the worker finds them: torch's DataPipes, the user's own code
        vars(_module(what.__module__)).setdefault(what.__name__, what)
    return value


def copied(value: T) -> T:
    """`value` as a worker would have it; in this process."""
    descriptors: list[int] = []
    parts = pack_for_workers(value, descriptors)
    target = memoryview(bytearray(packed_size(parts)))
    try:
        made: T = unpack_in_worker(target, write(parts, target), descriptors)
        return made
    finally:
        close_all(descriptors)


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


def pack_bytes(value: object) -> bytes:
    """`value` as one string of bytes, for things that are small or sent once."""
    parts = pack(value)
    target = bytearray(packed_size(parts))
    lengths = write(parts, memoryview(target))
    return pickle.dumps((lengths, bytes(target)), protocol=5)


def unpack_bytes(blob: bytes) -> Any:
    """The value of `pack_bytes`, with memory of its own."""
    lengths, data = pickle.loads(blob)
    return unpack(memoryview(data), lengths, copy=True)


def aligned(length: int) -> int:
    """Where what follows so many bytes begins."""
    return -(-length // _ALIGNMENT) * _ALIGNMENT


class WorkerTraceback(Exception):
    """The traceback of an exception where it was raised, as text; the cause of the exception that the trainer sees."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


def pack_error(error: BaseException, origin: Origin = NOWHERE, /) -> PackedError:
    """An exception; for other processes with its notes, its attributes, and the text of its traceback.

    What of it does not pickle is left out there, and is text where it was an argument. It is shown there as here.
    """
    trim(error)
    text = "".join(traceback.format_exception(error))
    if isinstance(error, _SIGNALS):
        error = _as_error(error)
    notes = list(getattr(error, "__notes__", ()))
    return PackedError(_packed_error(error, notes, text), origin, original=CaughtError(error))


def _packed_error(error: BaseException, notes: list[str], text: str) -> bytes:
    shown = _shown(error)
    for form in (error, _Parts(error), _Parts(error, shown)):
        try:
            blob = pack_bytes((form, notes, text))
            back = unpack_bytes(blob)[0]  # some exceptions pickle and do not come back, or come back as others
            is_whole = isinstance(back, BaseException) and (form is not error or back.args == error.args)
            if is_whole and [*map(_without_addresses, _shown(back))] == [*map(_without_addresses, shown)]:
                return blob
        except Exception:  # noqa: S112 (whatever goes wrong, there is another form)
            continue
    line = "".join(traceback.format_exception_only(error)).strip()
    made = RuntimeError(f"{line} (the exception itself cannot be pickled)")
    return pack_bytes((made, notes, text))


def _shown(error: BaseException) -> tuple[str, str]:
    texts = []
    for show in (str, repr):
        try:
            texts.append(show(error))
        except Exception as broken:
            texts.append(f"<{type(error).__name__}: its text cannot be made: {type(broken).__name__}>")
    return texts[0], texts[1]


_without_addresses = partial(re.compile(" at 0x[0-9a-fA-F]+").sub, "")  # those of objects are others in each process


class _Parts:
    """An exception that is put together again without a call of its class, which may want other arguments.

    Args:
        shown: what `str` and `repr` give of it from now on, whatever its class makes of what is left of it.
    """

    def __init__(self, error: BaseException, shown: tuple[str, str] | None = None) -> None:
        self._error, self._shown = error, shown

    def __reduce__(self) -> tuple[object, ...]:
        error = self._error
        args = tuple(value if _packs(value) else ReprText(repr(value)) for value in error.args)
        state = {name: value for name, value in error.__dict__.items() if _packs(value)}
        if self._shown is None:
            return put_together, (type(error), args, state)
        return put_together_as, (*self._shown, type(error), args, state)


class ReprText(str):
    """The `repr` of a thing, in the place of that."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def put_together_as(
    text: str, shown: str, kind: type[BaseException], args: tuple[object, ...], attributes: dict[str, object]
) -> BaseException:
    """An exception of a kind that makes its text of what other processes do not have."""
    members = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__str__": lambda _: text,
        "__repr__": lambda _: shown,
        "__reduce__": lambda _: (put_together_as, (text, shown, kind, args, attributes)),
    }
    return put_together(type(kind.__name__, (kind,), members), args, attributes)


def _packs(value: object) -> bool:
    try:
        unpack_bytes(pack_bytes(value))
    except Exception:
        return False
    return True


def _as_error(signal: BaseException) -> RuntimeError:
    """What would be taken for an end of the epoch, or for a wish of the trainer's, where it is raised again."""
    error = RuntimeError(f"{type(signal).__name__} was raised: {signal}").with_traceback(signal.__traceback__)
    for note in getattr(signal, "__notes__", ()):
        error.add_note(note)
    return error


def unpack_error(packed: PackedError) -> BaseException:
    """The exception of `pack_error`: itself once, where it was raised; else its cause shows its traceback."""
    original = packed.original.take() if packed.original is not None else None
    if original is not None:
        return original
    error: BaseException
    error, notes, text = unpack_bytes(packed.blob)
    have = getattr(error, "__notes__", [])
    for note in notes:
        if note not in have:
            error.add_note(note)
    error.__cause__ = WorkerTraceback(text)
    return error
