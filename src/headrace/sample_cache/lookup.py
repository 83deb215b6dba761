"""Digests of functions and values for cache keys, equal in all processes and on all ranks.

A user's function is represented by its byte code, constants, defaults, closure and the globals that it names. Values
among these count by content, functions and classes in the same way. Functions and classes of installed packages are
represented by name and package version. Other objects are taken apart as by `pickle`.

Not detected: files and network resources that a function reads, dynamic names (`getattr`, `importlib.import_module`,
`sys.modules`), and attributes of arrays and enum members.
"""

from __future__ import annotations

import copyreg
import dis
import functools
import importlib.util
import marshal
import os
import platform
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from hashlib import blake2b
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from headrace._util.functions import name_of
from headrace._util.shared_memory import are_descriptors_sent
from headrace.errors import OptionError, printable
from headrace.sample_cache.file import KeepingPlace, SampleFile, table_end
from headrace.types import Buffer

_PLAIN = {type(None), bool, int, float, complex, str, bytes, type(...)}
_GLOBALS = {"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"}
_BY_TEXT = frozenset({"eval", "exec", "globals", "__import__"})
_METHODS = types.FunctionType, classmethod, staticmethod, property
_WRAPPED = "__wrapped__", "__func__", "fget", "fset", "fdel", "func"
# Names in code that uses random numbers, and the classes of generators.
_DRAWS = frozenset(
    {
        *("random", "numpy.random", "secrets", "rng", "py_random", "default_rng", "RandomState", "randrange"),
        *("shuffle", "bernoulli", "multinomial", "normal", "poisson", "rand", "rand_like", "randint"),
        *("randint_like", "randn", "randn_like", "randperm", "bernoulli_", "cauchy_", "exponential_", "geometric_"),
        *("normal_", "random_", "uniform_"),
    }
)
_GENERATORS = {("random", "Random"), ("numpy", "RandomState"), ("numpy", "Generator"), ("torch", "Generator")}


class NotKnownError(Exception):
    """A value has no digest. The text names the value and the reason."""


class ValueDigest:
    """Computes digests. `draws` is the first object that uses random numbers, or None."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[bytes, object]] = {}  # holds the value, so that its id is not reused
        self._open: dict[int, int] = {}
        self.draws: str | None = None

    def of(self, value: Any) -> bytes:
        """Return the digest of a value: 32 bytes."""
        kind, key = type(value), id(value)
        if kind in _PLAIN:
            return _digest(kind.__name__, marshal.dumps(value, 0))  # format 0 does not depend on identities
        if key in self._open:
            return _digest("cycle", b"%d" % self._open[key])
        if key not in self._known:
            self._open[key] = len(self._open)
            try:
                self._known[key] = _digest(kind.__name__, *self._parts(value, kind)), value
            finally:
                del self._open[key]
        return self._known[key][0]

    def _parts(self, value: Any, kind: type) -> Iterator[bytes | memoryview]:
        if kind is tuple or kind is list:
            if set(map(type, value)) <= _PLAIN:  # may be millions of items
                yield marshal.dumps(tuple(value), 0)
            else:
                yield from map(self.of, value)
        elif kind is dict:
            yield from (self.of(list(value)), self.of(list(value.values())))
        elif kind is set or kind is frozenset:
            yield from sorted(map(self.of, value))
        elif kind is types.CodeType:
            yield from self._code(value)
        elif kind is types.ModuleType:
            yield self.of((value.__name__, version_of(value.__name__)))
        elif (name := _name_in_package(value)) is not None:
            self._see_draws(value, name)
            yield self.of((*name, version_of(name[0])))
        elif kind is types.FunctionType:
            yield from self._function(value)
        elif kind is types.MethodType:
            yield from (self.of(value.__func__), self.of(value.__self__))
        elif issubclass(kind, type):
            yield from self._class(value)
        elif any(hasattr(value, attribute) for attribute in _WRAPPED) and not isinstance(value, functools.partial):
            yield from (self.of(getattr(value, attribute, None)) for attribute in _WRAPPED)
        elif kind is np.ndarray and not value.dtype.hasobject:  # without a copy, as it may be large
            yield self.of((value.dtype, value.shape))
            yield np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
        elif _is_tensor(kind):
            yield from self._tensor(value)
        else:
            yield from self._object(value, kind)

    def _code(self, code: types.CodeType) -> Iterator[bytes]:
        counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
        names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
        yield self.of((*counts, *names, code.co_code, code.co_exceptiontable))
        yield from map(self.of, code.co_consts)

    def _function(self, function: types.FunctionType) -> Iterator[bytes]:
        names, used, imported = _names_of(function.__code__)
        if drawn := _DRAWS.intersection(used):
            self.draws = self.draws or f"{name_of(function)}, which uses {min(drawn)}"
        if by_text := _BY_TEXT.intersection(names):
            raise NotKnownError(f"{name_of(function)} finds values by {min(by_text)}, which takes their names as texts")
        for module in imported:
            if version_of(module) is None:
                why = f"{name_of(function)} imports {module or 'its package'} when it is called"
                raise NotKnownError(f"{why}; import it at the top of its file")
        yield self.of((function.__code__, function.__defaults__, function.__kwdefaults__, vars(function)))
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # the cell is still empty
                yield self.of(cell.cell_contents)
        yield from self._named(function.__globals__, names, used, set())

    def _named(self, values: dict[str, Any], names: list[str], used: list[str], seen: set[str]) -> Iterator[bytes]:
        """Yield digests of names in a module. Of the user's own modules, used names are followed."""
        for name in names:
            if name in values and name != "__builtins__":
                value = values[name]
                yield self.of(name)
                yield self.of(value)
                is_own = type(value) is types.ModuleType and version_of(value.__name__) is None
                if is_own and value.__name__ not in seen:
                    seen.add(value.__name__)
                    yield from self._named(vars(value), used, used, seen)

    def _class(self, kind: type) -> Iterator[bytes]:
        yield self.of((kind.__module__, kind.__qualname__, kind.__bases__, type(kind)))  # pickles refer to it by name
        for name, member in sorted(vars(kind).items()):
            is_special = name.startswith("__") or name == "_abc_impl"
            if isinstance(member, _METHODS) or not (is_special or type(member) is types.MemberDescriptorType):
                yield self.of((name, member))

    def _tensor(self, tensor: Any) -> Iterator[bytes | memoryview]:
        import torch

        yield self.of((type(tensor), tensor.dtype, tuple(tensor.shape), str(tensor.layout), vars(tensor)))
        plain = tensor.detach().cpu().as_subclass(torch.Tensor).to_dense().contiguous().reshape(-1)
        yield plain.view(torch.uint8).numpy().data

    def _object(self, value: Any, kind: type) -> Iterator[bytes]:
        self._see_draws(kind, (kind.__module__, kind.__qualname__))
        own = getattr(value, "_fingerprint", None)
        if type(own) is str and kind.__module__.startswith("datasets."):  # Hugging Face computes its own fingerprint
            yield self.of((kind.__qualname__, own))
            return
        reduce: Callable[[Any], Any] | None = copyreg.dispatch_table.get(kind)
        try:
            reduced: Any = reduce(value) if reduce else value.__reduce_ex__(4)
        except Exception as error:
            raise NotKnownError(f"{kind.__qualname__} cannot be taken apart: {error}") from error
        if type(reduced) is str:
            module = getattr(value, "__module__", None) or kind.__module__
            if version_of(module) is None:
                raise NotKnownError(f"{kind.__qualname__} is only known as {reduced}")
            yield self.of((module, reduced, version_of(module)))
            return
        made, arguments, state, items, pairs = (tuple(reduced) + (None,) * 3)[:5]
        yield self.of((kind, made, arguments, state, list(items or ()), list(map(list, pairs or ()))))

    def _see_draws(self, value: object, name: tuple[str, str]) -> None:
        top, last = name[0].partition(".")[0], name[1].rpartition(".")[2]
        is_of_generator = name[0].startswith(("random", "numpy.random", "secrets")) or (top, last) in _GENERATORS
        if is_of_generator or (top in ("torch", "headrace") and last in _DRAWS):
            self.draws = self.draws or ".".join(name)
        elif isinstance(value, type) and top not in sys.stdlib_module_names and (drawn := _drawn_by(value)) is not None:
            self.draws = self.draws or drawn


def _digest(kind: str, *parts: bytes | memoryview) -> bytes:
    digest = blake2b(b"%b %d" % (kind.encode(), len(parts)), digest_size=32)
    for part in parts:
        digest.update(b" %d:" % len(part))
        digest.update(part)
    return digest.digest()


@functools.lru_cache(4096)
def _names_of(code: types.CodeType) -> tuple[list[str], list[str], list[str]]:
    """Return (globals, all names, imported modules) of code and its inner functions."""
    instructions = list(dis.get_instructions(code))
    names = {one.argval for one in instructions if one.opname in _GLOBALS}
    imported = {one.argval for one in instructions if one.opname == "IMPORT_NAME"}
    used = set(code.co_names)
    for inner in code.co_consts:
        if type(inner) is types.CodeType:
            for some, more in zip((names, used, imported), _names_of(inner), strict=True):
                some.update(more)
    return sorted(names), sorted(used), sorted(imported)


@functools.cache
def _drawn_by(kind: type) -> str | None:
    for base in kind.__mro__:
        if base.__module__.startswith("torch.nn.") or base.__module__.partition(".")[0] in sys.stdlib_module_names:
            continue  # layers use them for initial weights
        for member in vars(base).values():
            code = getattr(getattr(member, "__func__", member), "__code__", None)
            if code is not None and (drawn := _DRAWS.intersection(code.co_names)):
                return f"{base.__qualname__}, which uses {min(drawn)}"
    return None


def _is_tensor(kind: type) -> bool:
    return any(f"{base.__module__}.{base.__qualname__}" == "torch.Tensor" for base in kind.__mro__)


def _name_in_package(value: Any) -> tuple[str, str] | None:
    """Return (module, name) if an installed package has this very object under that name."""
    for module in (getattr(value, "__module__", None), "torch"):  # torch's C functions do not have their module
        found = sys.modules.get(module) if type(module) is str else None
        for name in (getattr(value, "__qualname__", None), getattr(value, "__name__", None)):
            if found is None or type(name) is not str or version_of(found.__name__) is None:
                continue
            part: object = found
            for attribute in name.split("."):
                part = getattr(part, attribute, None)
            if part is value:
                return found.__name__, name
    return None


@functools.cache
def version_of(module: str) -> str | None:
    """Return the version of the module's installed package; None for the user's own modules."""
    top = module.partition(".")[0]
    places: list[str] = []
    with suppress(ImportError, ValueError):  # __main__ and synthetic modules have no spec
        spec = importlib.util.find_spec(top) if top else None
        places = [] if spec is None else [spec.origin or "", *(spec.submodule_search_locations or ())]
    is_installed = any({"site-packages", "dist-packages"}.intersection(Path(place).parts) for place in places)
    is_of_python = any(Path(os.__file__).parent in Path(place).parents for place in places)  # a user's file may shadow
    if places[:1] in (["built-in"], ["frozen"]) or (is_of_python and not is_installed):
        return platform.python_version()
    if top != "headrace" and not is_installed:
        return None
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(top)
    version = getattr(sys.modules.get(top), "__version__", None)
    return version if type(version) is str else str(Path(places[0] or places[1]).stat().st_mtime_ns)


Function = Callable[..., object]

_PACKAGES = "headrace", "numpy", "torch", "pillow", "soundfile", "torchcodec"  # packages that decode samples


class Writer:
    """Adds samples to a file, if this process's functions equal those of the file.

    They may differ: a worker may have imported another version of a module, or a call may change a function.

    Args:
        file: None: nothing can be stored.
        expected: Digest of the functions in the trainer. None: the user's `version` replaces it.
    """

    def __init__(self, functions: Sequence[Function], file: SampleFile | None, expected: bytes | None) -> None:
        self._functions, self._file, self._expected = tuple(functions), file, expected
        self._is_same: bool | None = None if expected is not None else True
        self._has_warned = False

    def file(self) -> SampleFile | None:
        return self._file

    def last_file(self) -> SampleFile | None:
        return self._file

    def add(self, number: int, pack: Callable[[], Buffer]) -> None:
        file = self._file
        if file is None:
            return
        if self._is_same is None:  # computed after the first call, which may have changed them
            self._is_same = False
            with suppress(NotKnownError):
                self._is_same = fingerprint_of(self._functions) == self._expected
            if not self._is_same:
                self._warn("what is done to samples has changed since the epoch began; nothing is kept of it")
        if not self._is_same:
            return
        try:
            file.add(number, pack())
        except Exception as error:
            self._warn(f"a sample cannot be kept ({type(error).__name__}: {error}); it is made again each time")

    def __reduce__(self) -> tuple[object, ...]:
        return Writer, (self._functions, self._file, self._expected)

    def _warn(self, what: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(printable(f".cache(): {what}"), RuntimeWarning, stacklevel=2)


class Keeping(Writer):
    """Finds the file for some functions, in the loader's process. Workers get a `Writer` for it.

    Args:
        functions: Functions that workers apply to each sample.
        on_loop: Earlier functions, on the event loop.
        version: Replaces the digests of functions and data. None: all must have digests.
        data: Returns the digest of the data, once. None: the place is not shared.
        count: Returns the number of samples.
    """

    def __init__(
        self,
        functions: Sequence[Function],
        on_loop: Sequence[Function],
        place: KeepingPlace,
        version: str | None,
        data: Callable[[], bytes] | None,
        count: Callable[[], int],
    ) -> None:
        super().__init__(functions, None, None)
        self._on_loop, self._place, self._version = tuple(on_loop), place, version
        self._data, self._count = data, count
        self._of_data: bytes | None = None
        self._lock = threading.Lock()
        self._key = b""

    def file(self) -> SampleFile | None:
        """Return the file for the functions' current digest; None, after a warning, without one."""
        try:
            expected = None if self._version is not None else fingerprint_of(self._functions)
            key = self._key_with(expected)
        except NotKnownError as error:
            raise not_told(error) from error
        with self._lock:
            if key != self._key:
                self._key, self._expected, self._file = key, expected, self._open(key)
            self._is_same = True if expected is None else None
            return self._file

    def last_file(self) -> SampleFile | None:
        """Return the last file, without computing digests for each sample."""
        return self._file if self._key else self.file()

    def __reduce__(self) -> tuple[object, ...]:
        if not are_descriptors_sent():
            return Keeping, (self._functions, self._on_loop, self._place, self._version, self._data, self._count)
        file = self.file()
        return Writer, (self._functions, file, self._expected)

    def _key_with(self, expected: bytes | None) -> bytes:
        if self._of_data is None:
            self._of_data = b"" if self._data is None else self._data()
        versions = platform.python_version_tuple()[:2], [_version(name) for name in _PACKAGES]
        names = None if self._version is None else [self._version, *map(name_of, (*self._on_loop, *self._functions))]
        digest = blake2b(repr((versions, names)).encode(), digest_size=32)
        on_loop = b"" if expected is None else fingerprint_of(self._on_loop)
        for part in (self._of_data, on_loop, expected or b""):
            digest.update(b"%d:" % len(part) + part)
        return digest.digest()

    def _open(self, key: bytes) -> SampleFile | None:
        count = self._count()
        try:
            file = self._place.open(key, count)
        except OSError as error:
            self._warn(f"{self._place} cannot be used ({error}); samples are made again each time")
            return None
        if not file.has_room(table_end(count)):
            self._warn(f"max_bytes has no room for a table of {count} samples; nothing is kept")
        return file


def fingerprint_of(values: Sequence[Any]) -> bytes:
    """Return the digest of some values."""
    return ValueDigest().of(list(values))


def not_told(error: NotKnownError) -> OptionError:
    return OptionError(
        f".cache(): it would not be known when what is kept is out of date: {error}; give version=, and another one "
        "whenever what is done to samples, or the data, change"
    )


@functools.cache
def _version(package: str) -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None
