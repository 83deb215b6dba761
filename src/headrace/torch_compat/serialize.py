"""Serialization: pickle protocol 5, with the data of arrays and tensors in buffers."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import inspect
import io
import itertools
import os
import pickle
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import cloudpickle.cloudpickle as internals
import numpy as np
from numpy.typing import NDArray

from headrace._util.shared_memory import PublishedPlaces, aligned, close_all, receiving_descriptors, sending_descriptors
from headrace.errors import CannotCarryError, WorkerDiedError
from headrace.torch_compat.picklers import NamingPacker, OutwardPacker, Packer, modules_by_value, put_together
from headrace.torch_compat.tracebacks import trim
from headrace.types import Buffer
from headrace.workers.failures import NOWHERE, CaughtError, Origin, PackedError

_SIGNALS = (StopIteration, StopAsyncIteration, GeneratorExit, asyncio.CancelledError)
_LOADED_ALREADY = ("torch", "numpy", "cloudpickle")  # by the fork server


class Pickled:
    """A pickle in pieces. Bytes objects of 64 KiB and more are kept as pieces without a copy."""

    def __init__(self) -> None:
        self.pieces: list[Buffer] = []
        self._nbytes = 0

    def write(self, piece: Buffer) -> None:
        self.pieces.append(piece if type(piece) is bytes else bytes(piece))  # mutable data is copied now
        self._nbytes += len(piece)

    def __len__(self) -> int:
        return self._nbytes

    def __bytes__(self) -> bytes:
        return b"".join(self.pieces)


T = TypeVar("T")

PickledPart = Pickled | Buffer
"""One of the parts of a serialized value: first its pickle, then its buffers."""


def pack(value: object, packer: type[Packer] = Packer) -> list[PickledPart]:
    """Serialize `value` into a pickle and its buffers. Nothing large is copied yet."""
    buffers: list[pickle.PickleBuffer] = []
    out = Pickled()
    packer(out, protocol=5, buffer_callback=buffers.append).dump(value)
    return [out, *(b.raw() for b in buffers)]


def pack_by_name(value: object) -> list[PickledPart]:
    """Serialize for other processes than workers, which import classes and functions by name."""
    return pack(value, NamingPacker)


def pack_for_workers(value: object, descriptors: list[int], modules: set[str] | None = None) -> list[Buffer]:
    """Serialize `value` for `write` and `unpack_in_worker`.

    Modules that a worker could not import are registered in cloudpickle, so that their functions and classes are
    pickled by value from now on. Such modules were loaded from outside the path: tests, plug-ins, helpers of notebooks.

    Args:
        descriptors: Collects the descriptors that workers share, for `unpack_in_worker`. The caller must close them.
        modules: Collects the names of the modules that workers will import.
    """
    try:
        while True:
            close_all(descriptors)
            buffers: list[pickle.PickleBuffer] = []
            out = io.BytesIO()
            packer = OutwardPacker(out, buffer_callback=buffers.append)
            with sending_descriptors(descriptors):
                packer.dump((value, packer.named))  # pickling the value fills the list after it
            by_value = modules_by_value()
            named = (name for name in packer.modules if name in sys.modules and name not in by_value)
            foreign = [name for name in named if not _is_importable(name)]
            if not foreign:
                if modules is not None:
                    modules |= packer.modules - by_value
                return [out.getbuffer(), *(buffer.raw() for buffer in buffers)]
            internals._PICKLE_BY_VALUE_MODULES.update(foreign)
    except BaseException:
        close_all(descriptors)
        raise


def why_not_for_workers(value: object) -> Exception | None:
    descriptors: list[int] = []
    try:
        pack_for_workers(value, descriptors)
    except Exception as error:
        return error
    finally:
        close_all(descriptors)
    return None


def files_of(modules: Iterable[str]) -> dict[str, int]:
    """Return modification times, in nanoseconds, of modules neither standard nor preloaded."""
    found = {}
    for name in modules:
        top, file = name.partition(".")[0], getattr(sys.modules.get(name), "__file__", None)
        if file is None or name == "__main__" or top in _LOADED_ALREADY or top in sys.stdlib_module_names:
            continue
        with contextlib.suppress(OSError):
            found[name] = Path(file).stat().st_mtime_ns
    return found


def _is_importable(name: str) -> bool:
    """True if a new process with this sys.path would find the same module."""
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
    return sum(aligned(len(p)) for p in parts)


def write(parts: Sequence[PickledPart], target: memoryview) -> tuple[int, ...]:
    """Write `parts` into `target` in order. Return their lengths, for `unpack`."""
    offset = 0
    for part in parts:
        at = offset
        for piece in part.pieces if isinstance(part, Pickled) else (part,):
            np.copyto(np.frombuffer(target, np.uint8, len(piece), at), np.frombuffer(piece, np.uint8))
            at += len(piece)
        offset += aligned(len(part))
    return tuple(len(p) for p in parts)


def unpack(source: memoryview | NDArray[np.uint8], lengths: Sequence[int], *, copy: bool) -> Any:
    """Return the value written by `pack` and `write`.

    Args:
        source: Without `copy` the value's arrays are views of it and keep it alive.
        copy: True to give the arrays their own memory.
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
    """Return the value of `pack`'s parts. Its arrays own their memory."""
    return pickle.loads(parts[0], buffers=[bytearray(part) for part in parts[1:]])


def unpack_in_worker(source: memoryview, lengths: Sequence[int], descriptors: Sequence[int]) -> Any:
    """Return the value of `pack_for_workers`. Its arrays are views of `source`.

    Functions and classes pickled by value are added to their modules, which are created if they do not exist.

    Args:
        descriptors: Those of `pack_for_workers`. Not needed after this call.
    """
    data, *buffers = _pieces(source, lengths)
    with receiving_descriptors(descriptors):
        value, named = pickle.loads(data, buffers=buffers)
    for what in named:  # for picklers by name in the worker, such as torch's DataPipes
        vars(_module(what.__module__)).setdefault(what.__name__, what)
    return value


def copied(value: T) -> T:
    """Return `value` as a worker would receive it, in this process."""
    descriptors: list[int] = []
    parts = pack_for_workers(value, descriptors)
    target = memoryview(bytearray(packed_size(parts)))
    try:
        made: T = unpack_in_worker(target, write(parts, target), descriptors)
        return made
    finally:
        close_all(descriptors)


def _module(name: str) -> ModuleType:
    """Return the module of this name. It is empty if it cannot be imported."""
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
    """Serialize a small value into one byte string."""
    return pickle.dumps([bytes(part) for part in pack(value)], protocol=5)


def unpack_bytes(blob: bytes) -> Any:
    """Return the value of `pack_bytes`. Its arrays own their memory."""
    return unpack_parts(pickle.loads(blob))


class WorkerTraceback(Exception):
    """Traceback in a worker, as text. The cause of the exception that the trainer sees."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


def pack_error(error: BaseException, origin: Origin = NOWHERE, /) -> PackedError:
    """Pack an exception with its notes, its attributes and the text of its traceback.

    In other processes unpicklable attributes are missing, and unpicklable arguments are replaced by their `repr`. `str`
    and `repr` of the exception stay the same.
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
            back = unpack_bytes(blob)[0]  # some exceptions cannot be unpickled, or change
            is_whole = isinstance(back, BaseException) and (form is not error or back.args == error.args)
            if is_whole and [*map(_without_addresses, _shown(back))] == [*map(_without_addresses, shown)]:
                return blob
        except Exception:  # noqa: S112 (try the next form)
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


_without_addresses = partial(re.compile(" at 0x[0-9a-fA-F]+").sub, "")  # addresses differ between processes


class _Parts:
    """An exception rebuilt without calling its class, which may need other arguments.

    Args:
        shown: Fixed results of `str` and `repr`, independent of its class.
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
    """The `repr` of an object, in place of the object."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def put_together_as(
    text: str, shown: str, kind: type[BaseException], args: tuple[object, ...], attributes: dict[str, object]
) -> BaseException:
    """Rebuild an exception with a fixed text. Its class would need data that this process lacks."""
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
    """Replace a signal that would end the epoch or cancel the trainer if raised there."""
    error = RuntimeError(f"{type(signal).__name__} was raised: {signal}").with_traceback(signal.__traceback__)
    for note in getattr(signal, "__notes__", ()):
        error.add_note(note)
    return error


def unpack_error(packed: PackedError) -> BaseException:
    """Return the exception of `pack_error`, as the trainer sees it.

    In the process that raised it, the first call returns the original. Other calls return a copy whose cause shows the
    traceback. If a user's function raised it in a worker as in torch, the cause is such an exception, and the result
    has torch's text.
    """
    original = packed.original.take() if packed.original is not None else None
    error = _copy_of(packed) if original is None else original
    return _caused(error, packed.origin.caught) if packed.origin.caught else error


def _copy_of(packed: PackedError) -> BaseException:
    error: BaseException
    error, notes, text = unpack_bytes(packed.blob)
    have = getattr(error, "__notes__", [])
    for note in notes:
        if note not in have:
            error.add_note(note)
    error.__cause__ = WorkerTraceback(text)
    return error


LEAVES = frozenset({str, bytes, int, float, bool, type(None)})
_ALIKE = frozenset("biufcmMSU")  # numpy dtype kinds that every pickler packs identically: numbers, times and text
_PARTS_MOST = 16


class PackedEach:
    """Values pickled one by one, which share no objects.

    Attributes:
        pieces: For each value (offset, size) of its pickle and of each buffer, in one flat tuple.
        nbytes: Memory needed by all.
    """

    def __init__(self) -> None:
        self.pieces: list[tuple[int, ...]] = []
        self.nbytes = 0
        self._buffers: list[Buffer] = []
        self._published = 0, 0  # (buffers, bytes)

    @classmethod
    def of(cls, values: Iterable[object]) -> PackedEach:
        packed = cls()
        for value in values:
            packed.add(value)
        return packed

    def add(self, value: object) -> None:
        """Pickle one more value. If that fails, nothing is added."""
        parts: list[PickledPart]
        if is_simple(value):
            buffers: list[pickle.PickleBuffer] = []
            parts = [pickle.dumps(value, protocol=5, buffer_callback=buffers.append), *(b.raw() for b in buffers)]
        else:
            parts = pack(value)
        pieces = list[int]()
        for part in parts:
            if pieces and (gap := aligned(self.nbytes) - self.nbytes):
                self._buffers.append(bytes(gap))
                self.nbytes += gap
            self._buffers += part.pieces if isinstance(part, Pickled) else [part]
            pieces += (self.nbytes, len(part))
            self.nbytes += len(part)
        self.pieces.append(tuple(pieces))

    def skip(self) -> None:
        self.pieces.append(())

    def write(self, target: memoryview) -> None:
        _write_buffers(self._buffers, target)

    def publish(self, target: memoryview, places: PublishedPlaces) -> bool:
        """Write the last value. False if there is no room for it."""
        buffers, offset = self._published
        if self.nbytes > len(target) - PublishedPlaces.NBYTES or not places.has_room(self.pieces[-1]):
            return False
        _write_buffers(self._buffers[buffers:], target[offset:])
        places.add(self.pieces[-1])
        self._published = len(self._buffers), self.nbytes
        return True


_JOINED_BYTES = 4096


def _write_buffers(buffers: Sequence[Buffer], target: memoryview) -> None:
    offset = 0
    for is_small, some in itertools.groupby(buffers, lambda buffer: len(buffer) < _JOINED_BYTES):
        for data in [b"".join(some)] if is_small else some:
            if data:
                np.copyto(np.frombuffer(target, np.uint8, len(data), offset), np.frombuffer(data, np.uint8))
                offset += len(data)


def unpack_each(source: Buffer, pieces: Iterable[Sequence[int]]) -> Iterator[Callable[[], Any]]:
    """Yield a function for each value of `PackedEach` that unpickles it, with memory of its own."""
    memory = memoryview(source)
    for each in pieces:
        if each:
            data, *buffers = (memory[at : at + size] for at, size in zip(each[::2], each[1::2], strict=True))
            yield partial(_unpacked, data, buffers) if buffers else partial(pickle.loads, data)


def _unpacked(data: memoryview, buffers: list[memoryview]) -> Any:
    return pickle.loads(data, buffers=[bytearray(buffer) for buffer in buffers])


def is_simple(value: object) -> bool:
    """True if pickle writes a value as `pack` does, and faster: few arrays, texts and numbers."""
    parts: Any = value if type(value) in (dict, list, tuple) else (value,)
    if len(parts) > _PARTS_MOST:
        return False
    if type(parts) is dict:
        if not LEAVES.issuperset(map(type, parts)):
            return False
        parts = parts.values()
    return all(type(part) in LEAVES or (type(part) is np.ndarray and part.dtype.kind in _ALIKE) for part in parts)


_MOST_LOOKED_AT = 100_000
_DEEPEST = 100
_LONGEST = 240
_SIMPLE = (type(None), bool, int, float, complex, str, bytes)
FORK = 'or give multiprocessing_context="fork"'


def cannot_carry(error: BaseException, values: Mapping[str, object], offer: str = FORK) -> CannotCarryError:
    """Return the error for values that cannot be pickled for workers, by names that users know."""
    text = _refusal(error, values)
    return CannotCarryError(
        f"{text}. Workers are processes that are not forked from this one. "
        "Open it in the worker instead, when it is first used, in __getitem__, __iter__ or worker_init_fn, "
        f"and leave it None until then{offer and '; '}{offer}.",
        what=text,
    )


def cannot_carry_index(error: BaseException, index: object) -> CannotCarryError:
    text = _refusal(error, {"sampler's index": index})
    return CannotCarryError(
        f"{text}. Indices go to workers that run already, also where these were forked: have the sampler give "
        "numbers, texts or tuples of them, and open the rest in __getitem__.",
        what=text,
    )


def _refusal(error: BaseException, values: Mapping[str, object]) -> str:
    what = " and ".join(values) or "something"
    for name, value in values.items():
        if why_not_for_workers(value) is not None:
            path, fault = _fault(value, name, {}, set()) or (name, value)
            if len(path) > _LONGEST:
                path = f"{path[: _LONGEST // 2]}…{path[-_LONGEST // 2 :]}"
            home = "" if type(fault).__module__ == "builtins" else f"{type(fault).__module__}."
            what, error = f"{path} (a {home}{type(fault).__qualname__})", why_not_for_workers(fault) or error
            break
    return f"{what} cannot be sent to a worker: {error}"


def _fault(
    value: object, path: str, seen: dict[int, object], failing: set[int], depth: int = 0
) -> tuple[str, object] | None:
    """Find the innermost part of `value` that fails by itself.

    Return None if it fails only for a part visited before: objects that refer to one another all fail for one lock.
    `seen` also keeps the values alive, so that their ids stay unique.
    """
    seen[id(value)] = value
    failing.add(id(value))
    fails_by_itself = True
    for part_path, part in _parts(value, path) if depth < _DEEPEST else ():
        if type(part) in _SIMPLE or len(seen) > _MOST_LOOKED_AT:
            continue
        if id(part) in seen:
            fails_by_itself &= id(part) not in failing
            continue
        seen[id(part)] = part
        if why_not_for_workers(part) is not None:
            if (found := _fault(part, part_path, seen, failing, depth + 1)) is not None:
                return found
            fails_by_itself = False
    return (path, value) if fails_by_itself else None


def _parts(value: object, path: str) -> Iterator[tuple[str, object]]:
    """Yield (path, part) of everything pickled with `value`, except by custom `__reduce__`."""
    attributes: object = getattr(value, "__dict__", {})
    if isinstance(value, dict):
        yield from ((f"{path}[{key!r:.60}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"{path}[{number}]", part) for number, part in enumerate(value))
    elif isinstance(value, functools.partial):
        attributes = {"func": value.func, "args": value.args, "keywords": value.keywords}
    elif isinstance(value, MethodType):
        attributes = {"__self__": value.__self__, "__func__": value.__func__}
    elif isinstance(value, FunctionType):
        used = inspect.getclosurevars(value)
        yield from ((f"{path}.<variable {name}>", part) for name, part in used.nonlocals.items())
        yield from ((f"{path}.<global {name}>", part) for name, part in used.globals.items())
        yield from ((f"{path}.<default {number}>", part) for number, part in enumerate(value.__defaults__ or ()))
        attributes = {**(value.__kwdefaults__ or {}), **vars(value)}
    elif not isinstance(value, type):
        yield f"type({path})", type(value)
        attributes = {}
        with contextlib.suppress(Exception):  # the value itself cannot be pickled
            attributes = value.__getstate__()
        if isinstance(attributes, tuple) and len(attributes) == 2:  # class with slots
            attributes = {**(attributes[0] or {}), **attributes[1]}
    if isinstance(attributes, Mapping):
        yield from ((f"{path}.{name}", part) for name, part in attributes.items() if name not in _OF_CLASSES)


_OF_CLASSES = ("__dict__", "__weakref__")


def pack_worker_error(error: BaseException, where: str, origin: Origin = NOWHERE) -> PackedError:
    """Pack a user's exception in a worker, or the worker's death that it means in torch."""
    if is_death(error):
        return pack_error(_end(error), origin)
    return pack_error(error, replace(origin, caught=_caught_text(error, where)))


def is_death(error: BaseException) -> bool:
    """True if an exception ends a torch worker, as KeyboardInterrupt and SystemExit do."""
    return not isinstance(error, Exception)


def _exit_code(error: BaseException) -> int:
    match error:
        case SystemExit(code=int(code)):
            return code
        case SystemExit():
            return int(error.code is not None)
        case KeyboardInterrupt():
            return 0
    return 1


def _end(error: BaseException) -> WorkerDiedError:
    """Return the error for a torch worker's death. headrace's worker continues."""
    died = WorkerDiedError(
        f"DataLoader worker (pid(s) {os.getpid()}) exited unexpectedly: {error!r} was raised in it",
        pid=os.getpid(),
        exitcode=_exit_code(error),
    )
    died.__cause__ = error
    return died


def caught(error: BaseException, where: str) -> BaseException:
    """Return an exception of this process as torch words it, with the original as the cause."""
    return _caused(error, _caught_text(error, where))


def _caught_text(error: BaseException, where: str) -> str:
    trim(error)
    return f"Caught {type(error).__name__} {where}.\nOriginal {''.join(traceback.format_exception(error))}"


def _caused(original: BaseException, text: str) -> BaseException:
    error = _retold(original, text)
    error.__cause__ = original
    for name, value in vars(original).items():
        if name != "__notes__":
            vars(error).setdefault(name, value)
    with contextlib.suppress(Exception):
        if text in str(error):
            return error
    error.add_note(text)  # the class ignores the text
    return error


def _retold(original: BaseException, text: str) -> BaseException:
    kind: Any = type(original)
    if isinstance(original, StopIteration | StopAsyncIteration):  # else the loop would end without an error
        return RuntimeError(text)
    from torch._utils import KeyErrorMessage

    argument = KeyErrorMessage(text) if issubclass(kind, KeyError) else text  # else str() escapes line ends
    has_message = bool(getattr(kind, "message", None))
    with contextlib.suppress(Exception):
        try:
            made: BaseException = kind(message=argument) if has_message else kind(argument)
        except Exception:  # it needs other arguments: make it without `__init__`
            made = kind.__new__(kind)
            made.args = (argument,)
            if not str(made):  # its text needs the original arguments, as in UnicodeDecodeError
                made = kind(*original.args)
        if type(made) is kind:
            return made
    return RuntimeError(text)
